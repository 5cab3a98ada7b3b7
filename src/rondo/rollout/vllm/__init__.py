"""vLLM behind the RolloutEngine protocol. Only making a `VllmEngine` imports vLLM."""

from __future__ import annotations

from typing import Any

from rondo.rollout.vllm.options import capabilities, check, environment

__all__ = ["VllmEngine", "capabilities", "check", "environment"]


def __getattr__(name: str) -> Any:
    if name == "VllmEngine":
        from rondo.rollout.vllm.engine import VllmEngine

        return VllmEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
