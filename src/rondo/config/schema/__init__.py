"""The typed schema: every key that a recipe may set, its type and bounds, what it means, and its default.

pydantic checks what stands here, when a recipe is loaded and when a program makes a section itself. The text
under a field is its documentation: an error about the key ends with it. Options of an algorithm, a scorer or
a tracker are not listed here: they are keyword parameters of that function, checked against its signature by
`trainers/commands/check.py`. Nothing here imports torch or ray.
"""

# ruff: noqa: F401
from pydantic.dataclasses import dataclass

from rondo.config.schema.algorithm import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    BypassConfig,
    ConstraintConfig,
    DivergenceRejectionConfig,
    FilterConfig,
    FixedKlConfig,
    ImportanceConfig,
    KlConfig,
    RatioRejectionConfig,
    RejectionConfig,
    RolloutCorrectionConfig,
)
from rondo.config.schema.data import (
    DataConfig,
    FileSourceConfig,
    HuggingfaceSourceConfig,
    SourceConfig,
    TaskSourceConfig,
)
from rondo.config.schema.models import (
    ActorConfig,
    ActorLoraConfig,
    ActorRouterConfig,
    ConstantScheduleConfig,
    CriticConfig,
    CriticOptimizerConfig,
    EngineConfig,
    ExpertBalanceConfig,
    FallingScheduleConfig,
    FrozenEngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrmConfig,
    ReferenceConfig,
    RouterConfig,
    ScheduleConfig,
    TeacherConfig,
    TorchBackendConfig,
    WsdScheduleConfig,
)
from rondo.config.schema.rollout import (
    ENGINES,
    EnvironmentConfig,
    NativeEngineConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RolloutConfig,
    SglangEngineConfig,
    ToolConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
)
from rondo.config.schema.run import (
    AbortConfig,
    AttentionBalanceConfig,
    BalanceConfig,
    BestConfig,
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    KeepConfig,
    LocalBackendConfig,
    ProcessBackendConfig,
    RayBackendConfig,
    TokenBalanceConfig,
    TrackingConfig,
    TrainerConfig,
)
from rondo.config.schema.types import STRICT, Dtype, FunctionConfig


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
