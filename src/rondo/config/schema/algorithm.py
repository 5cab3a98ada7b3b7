"""Advantages, losses, and what goes with them."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rondo.config.schema.types import (
    STRICT,
    Chosen,
    Decay,
    Few,
    Function,
    FunctionConfig,
    NonNegative,
    Number,
    Positive,
)


@dataclass(frozen=True, config=STRICT)
class FixedKlConfig:
    """The coefficient of the KL stays as it is."""

    name: Literal["fixed"] = "fixed"
    """Whether the coefficient changes."""


@dataclass(frozen=True, config=STRICT)
class AdaptiveKlConfig:
    """The coefficient of the KL follows the divergence that is measured (1909.08593)."""

    name: Literal["adaptive"] = "adaptive"
    """Whether the coefficient changes."""
    target: Positive = 0.1
    """The divergence that it aims at."""
    horizon: Positive = 10000.0
    """Samples in which it corrects an error of 1."""


@dataclass(frozen=True, config=STRICT)
class KlConfig:
    """The divergence from the reference model."""

    name: str
    """The estimator: k1, k2, k3, abs, k1+, k3+, k3-unbiased."""
    where: Literal["reward", "loss"]
    """What it is taken off or added to."""
    coef: Positive
    """Its weight; no KL is algorithm.kl: null."""
    controller: Annotated[FixedKlConfig | AdaptiveKlConfig, Chosen()] = FixedKlConfig()
    """Whether the coefficient changes."""


@dataclass(frozen=True, config=STRICT)
class ImportanceConfig:
    """Weights π_old/π_rollout of the policy loss (truncated: TIS; masked: IcePop, MIS)."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """What a weight is of: a token, a row (product), or a row's geometric mean."""
    lower: Positive | None = None
    """The least weight; null: no lower bound."""
    upper: Positive = 2.0
    """The largest weight."""
    outside: Literal["truncate", "mask"] = "truncate"
    """Clip the weight to the bounds, or set it to 0."""
    normalize: bool = False
    """Divide by the batch's mean weight."""


@dataclass(frozen=True, config=STRICT)
class RatioRejectionConfig:
    """Takes tokens or rows out of the loss whose ratio π_old/π_rollout is out of bounds."""

    statistic: Literal["k1"]
    """The estimator of the divergence of the two policies."""
    upper: Positive
    """The largest ratio that stays."""
    level: Literal["token", "sum", "mean"] = "token"
    """What a ratio is of; all but token reject whole rows."""
    lower: Positive | None = None
    """The least ratio that stays; null: 1/upper."""


@dataclass(frozen=True, config=STRICT)
class DivergenceRejectionConfig:
    """Takes tokens or rows out of the loss whose divergence between π_old and π_rollout is above a bound."""

    statistic: Literal["k2", "k3"]
    """The estimator of the divergence of the two policies."""
    upper: Positive
    """The largest value that stays."""
    level: Literal["token", "sum", "mean", "max"] = "token"
    """What a value is of; all but token reject whole rows."""


RejectionConfig = RatioRejectionConfig | DivergenceRejectionConfig


@dataclass(frozen=True, config=STRICT)
class BypassConfig:
    """The sampler's log-probs are the old ones, so that there is nothing to weigh: every π_old/π_rollout is
    1, and the policy loss itself clips against the sampler.
    """

    mode: Literal["bypass"] = "bypass"
    """Where π_old is from."""
    reject: tuple[Annotated[RejectionConfig, Field(discriminator="statistic")], ...] = ()
    """What the policy loss leaves out, by π/π_rollout of the current policy, judged at every update."""
    importance: ClassVar[None] = None
    """There are no weights: the ratio of the policy loss is the one to the sampler already."""


@dataclass(frozen=True, config=STRICT)
class RolloutCorrectionConfig:
    """For samples of another policy than the trainer's: stale, or an engine with other numerics."""

    mode: Literal["auto", "decoupled"] = "auto"
    """auto: decoupled where the samples are another policy's (trainer.max_staleness > 0, or rollout.engine is
    vllm or sglang) or one of the other keys is set, else off.
    """
    importance: ImportanceConfig | None = None
    """Weights of the policy loss; null: none."""
    reject: tuple[Annotated[RejectionConfig, Field(discriminator="statistic")], ...] = ()
    """What is taken out of the loss."""


@dataclass(frozen=True, config=STRICT)
class ConstraintConfig:
    """E[cost] <= limit, kept by a Lagrange multiplier (Safe-RLHF, 2310.12773)."""

    cost: str
    """The score that is the cost."""
    limit: Number = 0.0
    """Of the mean cost."""
    initial: Positive = 1.0
    """The multiplier at the start (its logarithm is what changes)."""
    lr: NonNegative = 0.1
    """ln λ += lr · λ · (moving average of the cost - limit)."""
    smoothing: Decay = 0.9
    """Of the moving average; 0: the step's own mean."""


@dataclass(frozen=True, config=STRICT)
class FilterConfig(FunctionConfig):
    """A function that says which groups are worth training on; further keys are its options."""

    max_refills: Positive = 10.0
    """Filtered groups per step at most, in units of data.batch_size; then an error."""


@dataclass(frozen=True, config=STRICT)
class BranchesConfig:
    """Values of a response's steps, by answers that go on from before each (VinePPO, 2410.01679)."""

    n: Few = 9
    """Answers from each place."""
    ends: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = ("\n",)
    """A step ends with the token that completes one of these texts."""
    most: Few | None = None
    """Steps of a response that are valued, the first ones; a later one gains nothing. null: all."""


@dataclass(frozen=True, config=STRICT)
class CoefficientConfig(FunctionConfig):
    """How a number adapts from step to step; further keys are options of the function."""

    start: Number = 0.0
    """Its value in the first step."""


@dataclass(frozen=True, config=STRICT)
class TermConfig(FunctionConfig):
    """A term of the actor's loss beside the policy loss; further keys are options of the function."""

    coef: Number = 1.0
    """What it is multiplied with."""
    by: str | None = None
    """A number of algorithm.coefficients that it is multiplied with, too."""


@dataclass(frozen=True, config=STRICT)
class AlgorithmConfig:
    """Advantage × policy loss × KL × aggregation are independent choices; a named algorithm is a recipe."""

    advantage: Function = FunctionConfig("grpo")
    """The estimator of advantages."""
    policy_loss: Function = FunctionConfig("ppo_clip")
    """Of a token."""
    value_loss: Function = FunctionConfig("clipped_value")
    """Of a critic's token."""
    aggregation: Function = FunctionConfig("token-mean")
    """How the losses of tokens become one number."""
    kl: KlConfig | None = None
    """The divergence from the reference model; null: none."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus; 0: off."""
    terms: tuple[Annotated[TermConfig, Chosen()], ...] = ()
    """Further terms of the actor's loss."""
    coefficients: Mapping[str, Annotated[CoefficientConfig, Chosen()]] = Field(default_factory=dict)
    """Name: a number that adapts from step to step, which losses, terms and estimators may read."""
    filter: Annotated[FilterConfig, Chosen()] | None = None
    """Groups that are not trained on but replaced (dynamic sampling)."""
    mix: Function | None = None
    """What gives rows of another sampler, which join the groups of a step before the advantages:
    demonstrations, replay, or a function or class of yours; null: nothing."""
    select: Function | None = None
    """Which answers of a step are trained on, by what all of them got (StarPO-S)."""
    resample: Function | None = None
    """How often each sample of a prompt is trained on (PF-PPO)."""
    branches: BranchesConfig | None = None
    """What makes the column branch_values; null: nothing does."""
    mask_truncated: bool = False
    """What was cut off at rollout.max_tokens carries no loss: responses, and all rows of an episode."""
    rollout_correction: Annotated[RolloutCorrectionConfig | BypassConfig | None, Chosen()] = (
        RolloutCorrectionConfig()
    )
    """For samples of another policy than the trainer's; null: off."""
    positive_lm_coef: NonNegative = 0.0
    """Weight of the language-model loss on right responses (VAPO); 0: off."""
    pretrain_coef: NonNegative = 0.0
    """Weight of the language-model loss on data.pretrain (PPO-ptx); 0: off."""
    constraint: ConstraintConfig | None = None
    """A bound on a cost; null: none."""
    preference_loss: Function = FunctionConfig("dpo")
    """Of `rondo preference`."""
    reward_model_loss: Function = FunctionConfig("bradley_terry")
    """Of `rondo reward-model`."""
