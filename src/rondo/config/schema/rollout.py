"""How the policy is sampled, and what its samples are worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rondo.config.schema.models import FrozenEngineConfig
from rondo.config.schema.types import (
    STRICT,
    Buffer,
    Count,
    Decay,
    Dtype,
    FunctionConfig,
    Mass,
    Name,
    Natural,
    Positive,
    Share,
)


@dataclass(frozen=True, config=STRICT)
class RolloutConfig:
    """How the policy is sampled."""

    engine: Literal["native", "vllm", "sglang"] = "native"
    """What generates."""
    recorded: str | None = None
    """Train on what another run generated: its folder (with tracking.save_rollouts), or Parquet files."""
    n: Count = 8
    """Trajectories per prompt."""
    max_tokens: Count = 512
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
    """Strings that are one token each, besides the tokenizer's end of turn."""
    max_concurrent: Count = 256
    """Sequences decoded at one time (slots of the key/value cache)."""
    dtype: Dtype | None = None
    """Of the engine; default: the actor's compute dtype."""
    decode: Literal["auto", "generic", "lean", "compiled"] = "auto"
    """The decode path of the native engine."""
    deadline_seconds: Positive | None = None
    """Per request; null: none."""
    engine_options: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM or SGLang, as they name them."""
    process: Literal["auto", "host", "own"] = "auto"
    """Where an engine runs; auto: native in the host's process, others in their own."""
    replicas: Count = 1
    """Engines per rank of the rollout group, behind one router (more than one: process=own)."""
    tensor_parallel: Count = 1
    """Devices per engine (vllm, sglang)."""
    sleep: bool = False
    """Give the key/value cache back while the trainer updates (colocated, max_staleness=0)."""
    weight_transport: Literal["auto", "collective", "disk"] = "auto"
    """How weights reach the engines; auto: in place, gathered or collective."""
    bucket_bytes: Buffer = 256 << 20
    """Of weights in transit, at most, beside the two models."""
    agent: FunctionConfig | None = None
    """An agent that talks to the OpenAI endpoint; null: one turn per prompt."""


@dataclass(frozen=True, config=STRICT)
class RewardFunctionConfig:
    """One scorer. Every further key is one of its options."""

    name: Name
    """A built-in scorer, `path.py:name` or dotted name."""
    weight: float = 1.0
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
    path: str | None = None
    """Required: the export of `rondo reward-model`."""
    weight: float = 1.0
    """Of its score in the reward that is trained on; 0: a named score only (a cost model)."""


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    """What is good, and what happens when that cannot be said."""

    functions: tuple[RewardFunctionConfig, ...] = ()
    """Scorers in Python; the reward is the weighted sum of their scores."""
    models: tuple[RewardModelConfig, ...] = ()
    """Model-based rewards; their scores are added to the functions'."""
    accuracy: str | None = None
    """The score that says right (> 0) or wrong; default: the only one there is."""
    timeout_seconds: Positive = 10.0
    """Of one call of a scorer."""
    on_error: Literal["stop", "drop", "retry"] = "stop"
    """A scorer raised, or returned NaN or a wrong type."""
    on_timeout: Literal["stop", "drop", "retry"] = "drop"
    """A scorer took longer than timeout_seconds."""
    max_retries: Natural = 2
    """Of one call; then as "drop"."""
    max_dropped_share: Share = 0.5
    """Of the trajectories of a step; above it the run stops."""
