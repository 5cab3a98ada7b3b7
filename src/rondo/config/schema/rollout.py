"""How the policy is sampled, and what its samples are worth."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rondo.config.schema.models import FrozenEngineConfig
from rondo.config.schema.types import (
    STRICT,
    Buffer,
    Chosen,
    Decay,
    Dtype,
    Few,
    FewOrNone,
    Function,
    LocalPath,
    Mass,
    Name,
    Natural,
    Number,
    Path,
    Positive,
    Seconds,
    Share,
    Tokens,
)


@dataclass(frozen=True, config=STRICT)
class OwnEngineConfig:
    """What the engines have that rondo brings."""

    name: str
    """What generates."""
    process: Literal["auto", "host", "own"] = "auto"
    """Where it runs; auto: in the host's process, and with several replicas each in its own."""
    cache_bytes: Buffer | None = None
    """Of the keys, values and states of one engine; null: what all sequences could need, and at most a share
    of the memory that is free."""
    tensor_parallel: ClassVar[int] = 1
    """Devices per engine: these take one."""
    python: ClassVar[None] = None
    """The interpreter of another environment: these have none."""
    exact: ClassVar[bool] = True
    """It samples from the trainer's own policy, with the same bits whatever else is in the batch."""
    routes: ClassVar[bool] = True
    """It says which experts of a mixture tokens went to."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Arguments of the engine, as the other engines have them."""
        return {"cache_bytes": self.cache_bytes}


@dataclass(frozen=True, config=STRICT)
class NativeEngineConfig(OwnEngineConfig):
    """The engine that rondo brings: the same bits whatever else is in the batch."""

    name: Literal["native"] = "native"
    """What generates."""
    decode: Literal["auto", "generic", "lean", "compiled"] = "auto"
    """How a token is computed; auto: the fastest path for the model, dtype and device."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Arguments of the engine, as the other engines have them."""
        return {"decode": self.decode, **super().options}


@dataclass(frozen=True, config=STRICT)
class TransformersEngineConfig(OwnEngineConfig):
    """The model's own forward and cache, one sequence at a time: slow, and for every causal LM."""

    name: Literal["transformers"] = "transformers"
    """What generates."""


@dataclass(frozen=True, config=STRICT)
class ExternalEngineConfig:
    """What the engines have that run in a process of their own; further keys are their own arguments."""

    name: str
    """What generates."""
    tensor_parallel: Few = 1
    """Devices per engine."""
    python: LocalPath | None = None
    """The interpreter of the environment that has the engine (…/bin/python); null: this one."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the engine; in a recipe they stand beside its name."""
    process: ClassVar[Literal["own"]] = "own"
    """Where it runs; these never share the host's process."""
    exact: ClassVar[bool] = False
    """False: its numerics are not the trainer's, so its samples are another policy's."""
    routes: ClassVar[bool] = False
    """Whether it says which experts of a mixture tokens went to."""


@dataclass(frozen=True, config=STRICT)
class VllmEngineConfig(ExternalEngineConfig):
    """vLLM, in a process of its own; further keys are its `EngineArgs`."""

    name: Literal["vllm"] = "vllm"
    """What generates."""


@dataclass(frozen=True, config=STRICT)
class SglangEngineConfig(ExternalEngineConfig):
    """SGLang, in a process of its own; further keys are its `ServerArgs`."""

    name: Literal["sglang"] = "sglang"
    """What generates."""
    routes: ClassVar[bool] = True
    """Whether it says which experts of a mixture tokens went to."""


EngineChoice = NativeEngineConfig | TransformersEngineConfig | VllmEngineConfig | SglangEngineConfig
ENGINES: Mapping[str, type[EngineChoice]] = {
    engine.name: engine
    for engine in (NativeEngineConfig, TransformersEngineConfig, VllmEngineConfig, SglangEngineConfig)
}


@dataclass(frozen=True, config=STRICT)
class ToolConfig:
    """A tool of the policy, or those of an MCP server. Every further key is one of its options."""

    name: Name
    """A built-in tool, `path.py:name` or dotted name."""
    timeout_seconds: Seconds = 30.0
    """Of one call."""
    max_tokens: Tokens = 1024
    """Of what it answers; what is beyond is cut off, and the policy is told so."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments; in a recipe they stand beside its name."""


@dataclass(frozen=True, config=STRICT)
class EnvironmentConfig:
    """A world that the policy acts in. Every further key is one of its options."""

    name: Name
    """A built-in environment, `path.py:Class` or dotted name."""
    timeout_seconds: Seconds = 30.0
    """Of a reset or a step."""
    max_open: Few | None = None
    """Episodes of a rollout worker that are in it at one time; others wait before their reset. null: all."""
    keep_state: bool = False
    """Keep its true state before and after each step in the record, for reward functions."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments; in a recipe they stand beside its name."""


@dataclass(frozen=True, config=STRICT)
class RolloutConfig:
    """How the policy is sampled."""

    engine: Annotated[EngineChoice, Chosen()] = NativeEngineConfig()
    """What generates, and its own settings."""
    recorded: LocalPath | None = None
    """Train on what another run generated: its folder (with tracking.save_rollouts), or Parquet files."""
    n: Few = 8
    """Trajectories per prompt."""
    max_tokens: Tokens = 512
    """Response tokens at most."""
    temperature: Positive = 1.0
    """Of training samples; for greedy answers in evaluation see trainer.evaluation.greedy."""
    top_p: Mass = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    top_k: Natural = 0
    """Sample from this many likeliest tokens; 0: from all."""
    min_p: Decay = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, which has them, besides the tokenizer's end of turn."""
    max_concurrent: Few = 256
    """Sequences decoded at one time, where their keys and values fit the cache."""
    dtype: Dtype | None = None
    """Of the engine; default: the actor's compute dtype."""
    deadline_seconds: Seconds | None = None
    """Per request; null: none."""
    replicas: Few = 1
    """Engines per rank of the rollout group, behind one router."""
    sleep: bool = False
    """Give the key/value cache back while the trainer updates (colocated, max_staleness=0)."""
    weight_transport: Literal["auto", "ipc", "collective", "host", "disk"] = "auto"
    """How weights reach the engines (docs/weights.md); auto: the shortest way that works."""
    bucket_bytes: Buffer = 256 << 20
    """Of weights in transit, at most, beside the two models."""
    tools: tuple[Annotated[ToolConfig, Chosen()], ...] = ()
    """What the policy may call; with them and without an agent, it does so until it answers."""
    environments: tuple[Annotated[EnvironmentConfig, Chosen()], ...] = ()
    """What the policy acts in; of several, a prompt's row says which (column `environment`)."""
    episode_workers: FewOrNone = 0
    """Processes per rank of the rollout group in which environments live, or agents that ask over HTTP; 0:
    threads of the rollout worker's own."""
    agent: Function | None = None
    """A function of yours that asks the policy; null: one turn per prompt, the loop of the tools, or that of
    the environments."""
    on_full: Literal["score", "drop"] = "score"
    """An agent asked for more where its context had no room left; its episode ends there."""


@dataclass(frozen=True, config=STRICT)
class RewardFunctionConfig:
    """One scorer. Every further key is one of its options."""

    name: Name
    """A built-in scorer, `path.py:name` or dotted name."""
    weight: Number = 1.0
    """Of its score in the reward."""
    sources: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Only for prompts of these sources; null: of all."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function; in a recipe they stand beside its name."""


@dataclass(frozen=True, config=STRICT)
class RewardModelConfig(FrozenEngineConfig):
    """A model with a value head that scores whole responses, as `rondo reward-model` trains it."""

    name: str = "reward_model"
    """Of the score; algorithm.constraint.cost may name it."""
    path: Path | None = None
    """Required: the export of `rondo reward-model`."""
    override: Mapping[str, Any] = Field(default_factory=dict)
    """Other values than those of its config.json."""
    tokenizer: Literal["compare", "trust"] = "compare"
    """Whether the tokenizer of `path` must have the policy's tokens; trust: it is not looked at."""
    weight: Number = 1.0
    """Of its score in the reward that is trained on; 0: a named score only (a cost model)."""


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    """What is good, and what happens when that cannot be said."""

    functions: tuple[Annotated[RewardFunctionConfig, Chosen()], ...] = ()
    """Scorers in Python; the reward is the weighted sum of their scores."""
    models: tuple[RewardModelConfig, ...] = ()
    """Model-based rewards; their scores are added to the functions'."""
    isolation: Literal["thread", "process"] = "thread"
    """Where functions run that do not say; process: all of them, in processes that may crash."""
    accuracy: str | None = None
    """The score that says right (> 0) or wrong; default: the only one there is."""
    timeout_seconds: Seconds = 10.0
    """Of one call of a scorer."""
    on_error: Literal["stop", "drop", "retry"] = "stop"
    """A scorer raised, or returned NaN or a wrong type."""
    on_timeout: Literal["stop", "drop", "retry"] = "drop"
    """A scorer took longer than timeout_seconds."""
    max_retries: FewOrNone = 2
    """Of one call; then as "drop"."""
    max_dropped_share: Share = 0.5
    """Of the trajectories of a step; above it the run stops."""
