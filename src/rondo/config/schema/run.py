"""The run: its length, its machines, what is shown and kept of it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rondo.config.schema.types import (
    STRICT,
    Chosen,
    Count,
    Device,
    Dtype,
    Few,
    FewOrNone,
    Function,
    LocalPath,
    Mass,
    NonNegative,
    Passes,
    Path,
    Positive,
    Rows,
    Seconds,
    Seed,
    Threads,
)


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig:
    """Answers to data.eval, scored like those of training."""

    every: Count | None = None
    """Steps; null: only before and after."""
    each_epoch: bool = False
    """Evaluate when all rows were taken once more (SFT, preference)."""
    before: bool = True
    """Evaluate the initial policy."""
    after: bool = True
    """Evaluate the final policy."""
    greedy: bool = True
    """One greedy answer per prompt."""
    samples: FewOrNone = 0
    """Sampled answers per prompt: mean@n, best@n, majority@n."""
    temperature: Positive = 1.0
    """Of sampled answers; greedy ones are `greedy: true`."""
    top_p: Mass = 1.0
    """Of sampled answers."""
    limit: Rows | None = None
    """Prompts at most."""


@dataclass(frozen=True, config=STRICT)
class KeepConfig:
    """Episodes in flight go on when weights arrive."""

    name: Literal["auto", "finish", "resume"]
    """finish on the old weights; resume under the new ones; auto: finish up to max_staleness=1, resume above.
    """
    max_aborts: ClassVar[int] = 0
    """How often a prompt group may start again: never."""


@dataclass(frozen=True, config=STRICT)
class AbortConfig:
    """Episodes in flight start again when weights arrive."""

    name: Literal["abort"] = "abort"
    """What becomes of episodes in flight."""
    max_aborts: FewOrNone = 2
    """Of one prompt group; then it goes on as with resume."""


@dataclass(frozen=True, config=STRICT)
class StageConfig:
    """What is otherwise in the steps of a stage: keys as the recipe has them, of those that `config.stages`
    lists. All else is the recipe's, also where an earlier stage had it otherwise.
    """

    step: Count
    """The first step of the stage, which lasts until the next one begins; the run's first step is 1."""
    rollout: Mapping[str, Any] = Field(default_factory=dict)
    """max_tokens (at most the recipe's), temperature, top_p, top_k, min_p of prompts asked from then on."""
    actor: Mapping[str, Any] = Field(default_factory=dict)
    """optimizer.lr, which the schedule multiplies."""
    critic: Mapping[str, Any] = Field(default_factory=dict)
    """optimizer.lr, which the schedule multiplies."""
    algorithm: Mapping[str, Any] = Field(default_factory=dict)
    """entropy_coef, and options of coefficients."""


@dataclass(frozen=True, config=STRICT)
class ProfileConfig:
    """What processes compute, operator by operator, in a few steps."""

    steps: Annotated[tuple[Count, ...], Field(min_length=1)]
    """The steps that are recorded: files in profile/step-000003/."""
    memory: bool = False
    """With the history of the GPU's memory."""


@dataclass(frozen=True, config=STRICT)
class TrainerConfig:
    """How long, how far ahead, and from where."""

    total_steps: Count | None = None
    """Steps of the run, at most; with epochs, whichever end first."""
    epochs: Passes | None = None
    """Passes over the prompts."""
    seed: Seed = 0
    """The one seed: of the order of prompts, of samples, of initial weights."""
    max_staleness: FewOrNone = 0
    """How many policy versions a trajectory may be behind; 0: synchronous on-policy."""
    on_update: Annotated[KeepConfig | AbortConfig, Chosen()] = KeepConfig("auto")
    """What becomes of episodes in flight when weights arrive."""
    order: Literal["prompt", "completion"] = "prompt"
    """In which complete groups are trained."""
    replay: LocalPath | None = None
    """A run's folder: do what its journal says was trained when, to the same bits."""
    run_dir: LocalPath | None = None
    """A folder on this machine (checkpoint.path takes URLs); default: runs/<name of the first recipe>."""
    max_restarts: FewOrNone = 3
    """So often a run that loses a host process (it died, it hangs) goes on from its newest checkpoint."""
    warm_start: LocalPath | None = None
    """An SFT recipe, run first; its export becomes model.path."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Answers to data.eval. None: data.eval=[], and every=null in here."""
    stages: tuple[StageConfig, ...] = ()
    """What is otherwise from certain steps on (lengths, temperature, learning rate); none: one stage."""
    profile: ProfileConfig | None = None
    """Steps that torch's profiler records."""


@dataclass(frozen=True, config=STRICT)
class LocalBackendConfig:
    """This process runs everything, on one device."""

    name: Literal["local"] = "local"
    """What runs the workers."""
    address: ClassVar[None] = None
    """There is no cluster to reach."""


@dataclass(frozen=True, config=STRICT)
class ProcessBackendConfig:
    """A process per device of this machine."""

    name: Literal["process"] = "process"
    """What runs the workers."""
    address: ClassVar[None] = None
    """There is no cluster to reach."""


@dataclass(frozen=True, config=STRICT)
class RayBackendConfig:
    """Ray runs a process per device, on one machine or several."""

    name: Literal["ray"] = "ray"
    """What runs the workers."""
    address: str | None = None
    """Of a Ray cluster; default: start Ray here."""


@dataclass(frozen=True, config=STRICT)
class TokenBalanceConfig:
    """A row's work is its tokens, prompt and response."""

    name: Literal["tokens"] = "tokens"
    """What a row's work is taken for."""
    equal_sizes: bool = False
    """Every rank gets as many rows of a mini-batch as the others, give or take one."""


@dataclass(frozen=True, config=STRICT)
class AttentionBalanceConfig:
    """A row's work is linear · L + L², for L tokens: attention counts, too."""

    name: Literal["attention"]
    """What a row's work is taken for."""
    linear: Positive = 24576.0
    """Six times the model's hidden size (24576: one of 4096, a 7B model)."""
    equal_sizes: bool = False
    """Every rank gets as many rows of a mini-batch as the others, give or take one."""


BalanceConfig = TokenBalanceConfig | AttentionBalanceConfig


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    """Devices, and who is on them."""

    backend: Annotated[LocalBackendConfig | ProcessBackendConfig | RayBackendConfig, Chosen()] = (
        LocalBackendConfig()
    )
    """What runs the workers."""
    devices: Few = 1
    """How many, over all machines."""
    pools: Mapping[str, Few] = Field(default_factory=dict)
    """Name: number of devices; none: one pool of all."""
    placement: Mapping[str, str] = Field(default_factory=dict)
    """Role: pool; default: the first pool."""
    device: Device = "auto"
    """What computes: cpu, cuda, or a platform of your own, `path.py:Class`; auto: CUDA where it is."""
    threads: Threads | None = None
    """Torch threads per device; default: cores shared out evenly."""
    balance: Annotated[BalanceConfig, Chosen()] = TokenBalanceConfig()
    """By what rows are spread over the ranks of a worker group."""
    hang_seconds: Seconds | None = 50.0
    """When nothing has moved for so long, say who waits for whom, with stacks, or who works; null: never."""
    timeout_seconds: Seconds = 1800.0
    """Of one collective operation, and without a word of a host: who is waited for longer has failed."""
    env: Mapping[str, str | Seed] = Field(default_factory=dict)
    """Variables of the host processes (process, ray) and what they start, as NCCL's or the allocator's."""
    plan: Literal["refuse", "warn", "off"] = "refuse"
    """What is planned of memory before a run (docs/plan.md). refuse: stop where it certainly is more than
    there is, and warn where it probably is; warn: warn of both; off: plan nothing."""
    card: str | None = None
    """What plans and perf/mfu take a device for: a card of `rondo plan --shapes`, or a file of `rondo plan
    --measure`; null: the card that it is, where it is known."""
    inline: bool = False
    """Of the local backend: calls run on the event loop's thread, so that a breakpoint just works."""


Mode = Literal["warn", "stop", "off"]


@dataclass(frozen=True, config=STRICT)
class ChecksConfig:
    """What is watched, in a recipe before the first step and in the metrics of steps: whether it warns, stops
    the run, or is left alone.
    """

    template_end: Mode = "warn"
    """The chat template writes no end of turn."""
    template_clock: Mode = "warn"
    """The chat template writes the time."""
    template_thoughts: Mode = "warn"
    """The chat template leaves out what earlier answers thought, in SFT or in episodes of several turns."""
    foreign_end: Mode = "warn"
    """The model's folder ends answers at a token that is none, or an ordinary one, to the tokenizer."""
    overlong_unreached: Mode = "warn"
    """The reward function overlong begins behind rollout.max_tokens."""
    format_opened: Mode = "warn"
    """The chat template opens another tag than the first of the reward function format."""
    repeated_rows: Mode = "warn"
    """More than half of a source's rows have the tokens of another one."""
    held_out_trained: Mode = "warn"
    """Rows of data.eval have the tokens of a row of data.train."""
    warm_up: Mode = "warn"
    """The learning rate is still warming up when the run ends."""

    no_signal: Mode = "warn"
    """No row has an advantage: in the first step, or in three in a row."""
    truncated: Mode = "warn"
    """Half of the answers are cut off, three steps in a row."""
    same_and_wrong: Mode = "warn"
    """No entropy left, and groups of equal rewards that are not the best, five steps in a row."""
    gap: Mode = "warn"
    """Sampler and trainer differ by 0.1 nats per token, with the same weights."""
    gap_grows: Mode = "warn"
    """Sampler and trainer are eight times as far apart as in the first steps, two steps in a row."""
    rerouted: Mode = "warn"
    """The trainer's routers would not make 30 % of the replayed choices, three steps in a row."""
    micro_batch: Mode = "warn"
    """A loss of the user's depends on which rows are in its micro-batch."""
    stale: Mode = "warn"
    """Rows are four versions old on average, three steps in a row."""
    update_kl: Mode = "warn"
    """A step moves the policy by 0.2 nats per token, three steps in a row."""
    clipped: Mode = "warn"
    """Half of the tokens are clipped, three steps in a row."""
    no_gradient: Mode = "warn"
    """Rows have advantages and the gradient is 0, three steps in a row."""
    still: Mode = "warn"
    """Tensors that should learn are left as they are while others change, three steps in a row."""
    length_for_reward: Mode = "warn"
    """The held-out reward falls by 0.05 while that of training rises and answers change in length by half."""
    same_score: Mode = "warn"
    """A score that is not 0 is the same for all answers of a run's first ten steps, and another varies."""
    critic_off: Mode = "warn"
    """The explained variance of the critic is -1 or less, five steps in a row."""
    same_end: Mode = "warn"
    """Episodes without success all end after as many steps, others sooner, three steps in a row."""
    failed: Mode = "warn"
    """A tenth of the trajectories has no score, three steps in a row."""


@dataclass(frozen=True, config=STRICT)
class TrackingConfig:
    """What is shown and kept of a run."""

    trackers: tuple[Function, ...] = ()
    """tensorboard, wandb, mlflow, swanlab, trackio, prometheus (each with its options)."""
    project: str = "rondo"
    """The name that trackers file runs under."""
    run_name: str | None = None
    """What trackers call the run; null: as its folder."""
    metric_names: Function | None = None
    """Makes of a step's metrics those that trackers get: verl (its names), or a function of yours; null: they
    get rondo's."""
    console: Literal["auto", "live", "plain", "off"] = "auto"
    """A live display, or a line per step."""
    samples: FewOrNone = 2
    """Trajectories shown in the console and in the final table."""
    save_rollouts: bool = True
    """Write every trajectory to the run's folder."""
    keep_rollouts: Count | None = None
    """Of how many steps, the newest, trajectories are kept there; null: of all."""
    token_columns: Count | None = None
    """Every so many steps, what the step had for each token (advantages, …) is written, too; null: never."""
    keep_token_columns: Count | None = None
    """Of how many steps, the newest, these are kept; null: of all whose trajectories are."""
    checks: ChecksConfig = ChecksConfig()
    """What is watched before and while it runs."""
    plot: bool = True
    """Draw curves.png at the end (needs matplotlib)."""


@dataclass(frozen=True, config=STRICT)
class BestConfig:
    """The checkpoint with the best evaluation, which is kept and exported."""

    metric: str | None = None
    """Of an evaluation, as eval/greedy/reward; null: the newest is exported, and only the newest are kept."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Which value is best; auto: the lowest of a loss, the highest of a reward, score, accuracy or margin."""
    patience: Count | None = None
    """So many evaluations in a row that are no better end the run; null: none do."""
    min_delta: NonNegative = 0.0
    """By how much one must be better to count as better."""

    @property
    def sign(self) -> int:
        """1: the highest is best; -1: the lowest; 0: `auto` cannot tell."""
        if self.mode != "auto":
            return 1 if self.mode == "max" else -1
        last = (self.metric or "").rpartition("/")[2]
        rises = ("/reward/", "/score/", "/best@", "/majority@")
        if any(part in f"{self.metric}/" for part in rises) or last in ("accuracy", "margin"):
            return 1
        return -1 if last == "loss" else 0


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """What a run that stopped goes on from, and what it leaves."""

    every: Count | None = None
    """Steps; null: none."""
    path: Path | None = None
    """Where they lie, this run's alone: a URL (s3://bucket/run) or a folder; default: in the run's folder."""
    keep: Count = 2
    """The newest checkpoints that are kept."""
    best: BestConfig = BestConfig()
    """The checkpoint with the best evaluation."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the newest checkpoint in the run's folder."""
    changed_data: Literal["stop", "warn"] = "stop"
    """Where the rows of data.train are others than those of the checkpoint: end with an error, or go on with
    the rows that are there and say so."""
    export: bool = True
    """Write a Hugging Face folder at the end: of the best checkpoint where checkpoint.best is set."""
    export_dtype: Dtype | None = None
    """Of the exported weights; null: that of model.path where it is narrower than actor.param_dtype (a model
    from scratch or a quantised one has none), else actor.param_dtype."""
