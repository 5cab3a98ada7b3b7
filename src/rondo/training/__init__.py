"""The training engine: the verbs, over a framework that computes. It knows no algorithm and no sampler."""

from rondo.training.backend import ModelSpec, OptimizerStats
from rondo.training.engine import Engine
from rondo.training.loss import Loss
from rondo.training.make import make_engine

__all__ = ["Engine", "Loss", "ModelSpec", "OptimizerStats", "make_engine"]
