"""Engines in processes of their own that have a planted fault: what an engine of others would be."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from rondo.rollout.protocol import EngineSpec
from rondo.rollout.server.child import EngineServer
from tests.planted.faults import FAULTS


class _Planted(EngineServer):
    fault: ClassVar[str]
    """The fault that is planted here too, before the engine is built; this process ends with it."""

    def __init__(self, spec: EngineSpec) -> None:
        FAULTS[self.fault].plant(pytest.MonkeyPatch(), Path())
        super().__init__(spec)


class StaleEngine(_Planted):
    """Goes on with its first weights."""

    fault = "stale_weights"


class ForgetfulEngine(_Planted):
    """Does not take some tensors."""

    fault = "tensors_left_out"


class ShiftedEngine(_Planted):
    """Reports log-probs one place too late."""

    fault = "log_probs_of_another_token"


ENGINES = {engine.fault: engine for engine in (StaleEngine, ForgetfulEngine, ShiftedEngine)}
