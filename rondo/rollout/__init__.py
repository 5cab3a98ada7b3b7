"""Rollout: engines that turn token ids into more token ids with log-probs. Never imports `rondo.training`."""

from rondo.rollout.native.cache import cache_bytes
from rondo.rollout.native.engine import NativeEngine
from rondo.rollout.protocol import RolloutEngine

__all__ = ["NativeEngine", "RolloutEngine", "cache_bytes"]
