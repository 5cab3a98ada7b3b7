"""The typed schema: every key that a recipe may set, its type and bounds, what it means, and its default.

pydantic checks what stands here, when a recipe is loaded and when a program makes a section itself. The text
under a field is its documentation: an error about the key ends with it. Options of an algorithm, a scorer or
a tracker are not listed here: they are keyword parameters of that function, checked against its signature by
`trainers/commands/check.py`. Nothing here imports torch or ray.
"""

# ruff: noqa: F401
from collections.abc import Mapping
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rondo.config.schema.algorithm import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    BranchesConfig,
    BypassConfig,
    CoefficientConfig,
    ConstraintConfig,
    DivergenceRejectionConfig,
    FilterConfig,
    FixedKlConfig,
    ImportanceConfig,
    KlConfig,
    RatioRejectionConfig,
    RejectionConfig,
    RolloutCorrectionConfig,
    TermConfig,
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
    BackendConfig,
    ConstantScheduleConfig,
    CriticConfig,
    CriticOptimizerConfig,
    EngineConfig,
    ExpertBalanceConfig,
    FallingScheduleConfig,
    FrozenEngineConfig,
    ImagesConfig,
    LoraConfig,
    MegatronBackendConfig,
    ModelConfig,
    ModelPart,
    NamedModelConfig,
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
    ChecksConfig,
    ClusterConfig,
    EvaluationConfig,
    KeepConfig,
    LocalBackendConfig,
    ProcessBackendConfig,
    ProfileConfig,
    RayBackendConfig,
    StageConfig,
    TokenBalanceConfig,
    TrackingConfig,
    TrainerConfig,
)
from rondo.config.schema.types import STRICT, Dtype, FunctionConfig


@dataclass(frozen=True, config=STRICT)
class Config:
    """A run."""

    model: ModelConfig = ModelConfig()
    """The policy's model, and where its weights come from."""
    data: DataConfig = DataConfig()
    """What is learnt from, and how much of it a step takes."""
    actor: ActorConfig = ActorConfig()
    """The policy in training: its engine and optimizer."""
    critic: CriticConfig = CriticConfig()
    """The model of values; it is there when a chosen function reads `values` or `cost_values`."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model behind `ref_log_probs`; it is there when a chosen function reads them."""
    prm: PrmConfig = PrmConfig()
    """The implicit process reward model; it is there when a chosen function reads `process_rewards`."""
    teacher: TeacherConfig = TeacherConfig()
    """The model that is distilled; it is there when a chosen function reads a column of the teacher's."""
    models: Mapping[str, NamedModelConfig] = Field(default_factory=dict)
    """Name: a model of that name, for programs, and for teacher.by_source."""
    rollout: RolloutConfig = RolloutConfig()
    """How the policy is sampled, and by what."""
    reward: RewardConfig = RewardConfig()
    """What scores answers, and what happens where a score fails."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, policy loss, KL and aggregation, chosen independently of each other."""
    trainer: TrainerConfig = TrainerConfig()
    """How long a run is, how far sampling may be ahead, and what it starts from."""
    cluster: ClusterConfig = ClusterConfig()
    """The devices, and who is on them."""
    tracking: TrackingConfig = TrackingConfig()
    """What is shown and kept of a run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a run that stopped goes on from, and what it leaves."""

    def at(self, key: str) -> Any:
        """Returns what a dotted key names: a section (`reward.models.0`), or a value."""
        found: Any = self
        for part in key.split("."):
            if isinstance(found, Mapping):
                found = found[part]
            else:
                found = found[int(part)] if part.isdigit() else getattr(found, part)
        return found
