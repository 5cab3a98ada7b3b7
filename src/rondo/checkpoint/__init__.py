"""Atomic checkpoints: the store, and the controller's part of the state."""

from __future__ import annotations

from rondo.checkpoint.controller_state import (
    ControllerState,
    check_compatible,
    compatibility_record,
    load_controller_state,
    save_controller_state,
)
from rondo.checkpoint.store import Checkpoint, CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "ControllerState",
    "check_compatible",
    "compatibility_record",
    "load_controller_state",
    "save_controller_state",
]
