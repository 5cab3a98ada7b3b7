"""The training engine: the verbs, over a framework that computes. It knows no algorithm and no sampler."""

from rondo.training.backend import Head, ModelSpec, OptimizerStats
from rondo.training.engine import Engine
from rondo.training.loss import Loss
from rondo.training.make import (
    check_axes,
    check_model_spec,
    check_settings,
    make_engine,
    waits_per_tile,
)

__all__ = [
    "Engine",
    "Head",
    "Loss",
    "ModelSpec",
    "OptimizerStats",
    "check_axes",
    "check_model_spec",
    "check_settings",
    "make_engine",
    "waits_per_tile",
]
