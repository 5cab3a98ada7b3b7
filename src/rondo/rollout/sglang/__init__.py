"""SGLang behind the RolloutEngine protocol. Importing this imports no SGLang; making `SglangEngine` does."""

from __future__ import annotations

from typing import Any

from rondo.rollout.sglang.options import capabilities, check, environment

__all__ = ["SglangEngine", "capabilities", "check", "environment"]


def __getattr__(name: str) -> Any:
    if name == "SglangEngine":
        from rondo.rollout.sglang.engine import SglangEngine

        return SglangEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
