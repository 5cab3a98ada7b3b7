"""Atomic checkpoints: the store, and the controller's part of the state."""

from __future__ import annotations

from rondo.checkpoint.checked import Files
from rondo.checkpoint.controller_state import (
    READER,
    ControllerState,
    alike,
    check_compatible,
    compatibility_record,
    load_compatibility,
    load_controller_state,
    load_named,
    load_rows,
    pack,
    save_controller_state,
    taking_over,
    unpack,
)
from rondo.checkpoint.store import Checkpoint, CheckpointStore, Draft, Grown

__all__ = [
    "READER",
    "Checkpoint",
    "CheckpointStore",
    "ControllerState",
    "Draft",
    "Files",
    "Grown",
    "alike",
    "check_compatible",
    "compatibility_record",
    "load_compatibility",
    "load_controller_state",
    "load_named",
    "load_rows",
    "pack",
    "save_controller_state",
    "taking_over",
    "unpack",
]
