"""The typed schema: every key that a recipe may set, its type and bounds, what it means, and its default.

pydantic checks what stands here, when a recipe is loaded and when a program makes a section itself. The text
under a field is its documentation: an error about the key ends with it. Options of an algorithm, a scorer or
a tracker are not listed here: they are keyword parameters of that function, checked against its signature by
`trainers/commands/check.py`. Nothing here imports torch or ray.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from rondo.config.schema.algorithm import (
    AlgorithmConfig,
    ConstraintConfig,
    ImportanceConfig,
    KlConfig,
    RejectionConfig,
    RolloutCorrectionConfig,
)
from rondo.config.schema.data import DataConfig, SourceConfig
from rondo.config.schema.models import (
    ActorConfig,
    CriticConfig,
    CriticOptimizerConfig,
    EngineConfig,
    FrozenEngineConfig,
    ModelConfig,
    OptimizerConfig,
    PrmConfig,
    ReferenceConfig,
    ScheduleConfig,
    TeacherConfig,
)
from rondo.config.schema.rollout import RewardConfig, RewardFunctionConfig, RewardModelConfig, RolloutConfig
from rondo.config.schema.run import (
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    TrackingConfig,
    TrainerConfig,
)
from rondo.config.schema.types import STRICT, Dtype, FunctionConfig

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConstraintConfig",
    "CriticConfig",
    "CriticOptimizerConfig",
    "DataConfig",
    "Dtype",
    "EngineConfig",
    "EvaluationConfig",
    "FrozenEngineConfig",
    "FunctionConfig",
    "ImportanceConfig",
    "KlConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrmConfig",
    "ReferenceConfig",
    "RejectionConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TeacherConfig",
    "TrackingConfig",
    "TrainerConfig",
]


@dataclass(frozen=True, config=STRICT)
class Config:
    """A run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    prm: PrmConfig = PrmConfig()
    teacher: TeacherConfig = TeacherConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
