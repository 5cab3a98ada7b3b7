"""Rollout: engines that turn token ids into more token ids with log-probs. Never imports `rondo.training`."""

from rondo.rollout.build import (
    build_engine,
    check_engine,
    check_engine_spec,
)
from rondo.rollout.native.cache import cache_bytes
from rondo.rollout.native.engine import NativeEngine
from rondo.rollout.protocol import WASTED_TOKENS, Capabilities, EngineSpec, RolloutEngine
from rondo.rollout.server import start_engine

__all__ = [
    "WASTED_TOKENS",
    "Capabilities",
    "EngineSpec",
    "NativeEngine",
    "RolloutEngine",
    "build_engine",
    "cache_bytes",
    "check_engine",
    "check_engine_spec",
    "start_engine",
]
