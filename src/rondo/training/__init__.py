"""The training engine: Hugging Face causal LMs under FSDP2 on any number of ranks. It knows no algorithm and
no sampler.
"""

from rondo.training.engine import FsdpEngine
from rondo.training.loss import Loss
from rondo.training.optimizer import OptimizerStats, lr_ratio

__all__ = ["FsdpEngine", "Loss", "OptimizerStats", "lr_ratio"]
