"""Atomic checkpoints: the store, the controller's part of the state, random generators."""

from __future__ import annotations

from rondo.checkpoint.controller_state import (
    ControllerState,
    check_compatible,
    compatibility_record,
    load_controller_state,
    save_controller_state,
)
from rondo.checkpoint.random_state import (
    capture_random_state,
    generator_state,
    restore_generator,
    restore_random_state,
)
from rondo.checkpoint.store import Checkpoint, CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "ControllerState",
    "capture_random_state",
    "check_compatible",
    "compatibility_record",
    "generator_state",
    "load_controller_state",
    "restore_generator",
    "restore_random_state",
    "save_controller_state",
]
