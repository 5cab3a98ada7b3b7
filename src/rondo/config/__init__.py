"""The typed configuration: schema, loading, validation, printing. Nothing here imports torch or ray."""

# ruff: noqa: F401
from rondo.config.load import (
    LoadedConfig,
    beside_recipe,
    collected,
    load,
    recipe_path,
    shipped_recipe,
    starting_model,
    written,
)
from rondo.config.printing import changes, leaves_of, show, to_yaml
from rondo.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    BestConfig,
    BranchesConfig,
    BypassConfig,
    Config,
    ConstraintConfig,
    CriticConfig,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    FrozenEngineConfig,
    FunctionConfig,
    ImportanceConfig,
    KlConfig,
    LocalBackendConfig,
    ModelConfig,
    NamedModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    SourceConfig,
    ToolConfig,
)
from rondo.config.stages import SAMPLED, RunStage, number_at, stages_of
from rondo.config.tree import Origin
