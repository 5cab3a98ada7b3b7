"""The typed schema: every key that a recipe may set, its type, and the one place where its default lives.

Options of an algorithm, a scorer or a tracker are not listed here: they are keyword parameters of that
function, checked against its signature by `trainers/commands/check.py`. Nothing here imports torch or ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class FunctionConfig:
    """A function chosen by name (`grpo`), `path.py:name` or dotted name; further keys are its options.

    Written as `advantage: grpo` or `advantage: {name: grpo, normalize_std: false}`.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """The policy's model. One of `path`, `config` and `trainer.warm_start` says where weights come from."""

    path: str | None = None  # a local folder or a hub id
    config: Mapping[str, Any] | None = None  # a transformers config (model_type, …): random initialisation
    tokenizer: str | None = None  # folder, hub id or function `path.py:name`; default: model.path
    chat_template: str | None = None  # a Jinja file that replaces the tokenizer's own template
    attention: Literal["auto", "flash", "sdpa"] = "auto"  # kernel behind the variable-length attention
    trust_remote_code: bool = False


@dataclass(frozen=True)
class SourceConfig:
    """One named source of rows (prompts for RL, conversations for SFT)."""

    type: Literal["parquet", "jsonl", "huggingface", "reasoning_gym", "function"]
    name: str | None = None  # used in prompt ids and per-source metrics; default: from path or task
    path: str | None = None  # file (parquet, jsonl), dataset id or folder (huggingface)
    split: str = "train"  # huggingface only
    task: str | None = None  # reasoning_gym task, or `path.py:name`/dotted function that returns rows
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task or function
    size: int | None = None  # reasoning_gym: how many; others: use only the first `size` rows
    seed: int = 0  # of a procedural source
    weight: float = 1.0  # share of the stream relative to the other sources
    prompt_key: str = "prompt"  # column with a string or a list of chat messages
    system_prompt: str | None = None


@dataclass(frozen=True)
class DataConfig:
    train: tuple[SourceConfig, ...] = ()
    eval: tuple[SourceConfig, ...] = ()
    pretrain: tuple[SourceConfig, ...] = ()  # conversations for algorithm.pretrain_coef (PPO-ptx)
    pretrain_batch_size: int = 16  # conversations of `pretrain` per mini-batch
    batch_size: int = 16  # prompt groups per step (SFT: conversations; preference: pairs)
    max_prompt_tokens: int = 1024
    overlong_prompts: Literal["drop", "error", "truncate_left", "truncate_right"] = "drop"
    shuffle: bool = True


@dataclass(frozen=True)
class ScheduleConfig:
    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = 0  # optimizer steps of linear warm-up from 0
    min_ratio: float = 0.0  # final learning rate as a share of `lr` (linear, cosine, wsd)
    decay_steps: int | None = None  # wsd: length of the final decay; default a tenth of the run


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float | None = 1.0  # maximum global gradient norm; null: no clipping
    schedule: ScheduleConfig = ScheduleConfig()


@dataclass(frozen=True)
class FrozenEngineConfig:
    """An engine (FSDP2) of a model that is evaluated only."""

    token_budget: int = 16384  # tokens per micro-batch and rank; never exceeded
    param_dtype: Dtype = "float32"
    compute_dtype: Literal["auto", Dtype] = "auto"  # auto: bfloat16 on CUDA, float32 elsewhere
    offload_params: bool = False  # parameters rest in host memory between calls
    logits_chunk: int = 4096  # response positions whose logits exist at one time, at most: 512 MiB of them


@dataclass(frozen=True)
class EngineConfig(FrozenEngineConfig):
    """A training engine. Master weights and optimizer state are in `param_dtype`."""

    # Compute transformer blocks again in the backward pass; auto: on CUDA.
    gradient_checkpointing: Literal["auto", True, False] = "auto"
    offload_optimizer: bool = False


@dataclass(frozen=True)
class ActorConfig(EngineConfig):
    optimizer: OptimizerConfig = OptimizerConfig()
    mini_batch_size: int | None = None  # prompt groups per optimizer step; default data.batch_size
    epochs: int = 1  # passes over each batch


@dataclass(frozen=True)
class CriticConfig(EngineConfig):
    """Used when a chosen function reads `values`; a cost critic (`cost_values`) has the same settings."""

    path: str | None = None  # default: the actor's initial model
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    mini_batch_size: int | None = None
    epochs: int = 1
    warmup_steps: int = 0  # trainer steps in which only the critic learns


@dataclass(frozen=True)
class ReferenceConfig(FrozenEngineConfig):
    """Used when a chosen function reads `ref_log_probs`."""

    path: str | None = None  # default: the actor's initial model
    refresh_every: int | None = None  # steps after which the reference becomes the policy; null: frozen


@dataclass(frozen=True)
class PrmConfig:
    """The implicit process reward model (PRIME), used when a chosen function reads `process_rewards`.

    It starts as the reference model and is trained on the outcome (the column `accuracy`) of each step, on an
    engine and in mini-batches like the actor's, with a learning rate of its own.
    """

    lr: float = 1e-6
    beta: float = 0.05  # reward of a token: beta · log(π_prm / π_ref)
    update: Literal["before", "after"] = (
        "before"  # of the step's scoring; "before" scores with what it learned
    )


@dataclass(frozen=True)
class TeacherConfig(FrozenEngineConfig):
    """Used when a chosen function reads `teacher_log_probs` or the teacher's top-k columns (distillation)."""

    path: str | None = None  # required then; its tokenizer must be the policy's
    top_k: int = 16  # likeliest tokens per position, where a function reads teacher_topk_*


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["native", "vllm", "sglang"] = "native"
    # Train on what another run generated: its folder (written with tracking.save_rollouts), or Parquet files.
    recorded: str | None = None
    n: int = 8  # trajectories per prompt
    max_tokens: int = 512  # response tokens at most
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # strings that are one token each, besides the tokenizer's end of turn
    max_concurrent: int = 256  # sequences decoded at one time (slots of the key/value cache)
    dtype: Dtype | None = None  # default: the actor's compute dtype
    decode: Literal["auto", "generic", "lean", "compiled"] = "auto"  # decode path of the native engine
    deadline_seconds: float | None = None  # per request
    engine_options: Mapping[str, Any] = field(
        default_factory=dict
    )  # arguments of vLLM or SGLang, as they name them
    process: Literal["auto", "host", "own"] = (
        "auto"  # where an engine runs; auto: native in the host's, others own
    )
    replicas: int = 1  # engines per rank of the rollout group, behind one router (more than one: process=own)
    tensor_parallel: int = 1  # devices per engine (vllm, sglang)
    sleep: bool = (
        False  # give the key/value cache back while the trainer updates (colocated, max_staleness=0)
    )
    weight_transport: Literal["auto", "collective", "disk"] = "auto"  # auto: in place, gathered or collective
    bucket_bytes: int = 256 << 20  # of weights in transit, at most, beside the two models
    agent: FunctionConfig | None = (
        None  # an agent that talks to the OpenAI endpoint; null: one turn per prompt
    )


@dataclass(frozen=True)
class RewardFunctionConfig:
    """One scorer. Every further key is one of its options."""

    name: str  # a built-in scorer, `path.py:name` or dotted name
    weight: float = 1.0
    sources: tuple[str, ...] | None = None  # only for prompts of these sources; default all
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardModelConfig(FrozenEngineConfig):
    """A model with a value head that scores whole responses, as `rondo reward-model` trains it."""

    name: str = "reward_model"  # of the score; algorithm.constraint.cost may name it
    path: str | None = None  # required: the export of `rondo reward-model`
    weight: float = 1.0  # in the reward that is trained on; 0: a named score only (a cost model)


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[RewardFunctionConfig, ...] = ()
    models: tuple[
        RewardModelConfig, ...
    ] = ()  # model-based rewards; their scores are added to the functions'
    accuracy: str | None = None  # the score that says right (> 0) or wrong; default: the only one there is
    timeout_seconds: float = 10.0
    on_error: Literal["stop", "drop", "retry"] = "stop"  # scorer raised, or returned NaN or a wrong type
    on_timeout: Literal["stop", "drop", "retry"] = "drop"
    max_retries: int = 2  # then as "drop"
    max_dropped_share: float = 0.5  # of the trajectories of a step; above it the run stops


@dataclass(frozen=True)
class KlConfig:
    name: str  # estimator: k1, k2, k3, abs, k1+, k3+
    where: Literal["reward", "loss"]
    coef: float
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: float = 0.1  # adaptive only
    horizon: float = 10000.0  # adaptive only


@dataclass(frozen=True)
class ImportanceConfig:
    """Weights π_old/π_rollout of the policy loss (truncated: TIS; masked: IcePop, MIS)."""

    level: Literal["token", "sequence", "geometric"] = "token"
    lower: float | None = None  # null: no lower bound
    upper: float = 2.0
    outside: Literal["truncate", "mask"] = "truncate"  # clip the weight to the bounds, or set it to 0
    normalize: bool = False  # divide by the batch's mean weight


@dataclass(frozen=True)
class RejectionConfig:
    """Tokens or rows taken out of the loss: those whose statistic of π_old/π_rollout is out of bounds.

    k1 is bounded by ratios (lower <= π_old/π_rollout <= upper; lower defaults to 1/upper), k2 and k3 by
    `upper` alone.
    """

    statistic: Literal["k1", "k2", "k3"]
    upper: float
    level: Literal["token", "sum", "mean", "max"] = "token"  # all but token reject whole rows
    lower: float | None = None


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """For samples of another policy than the trainer's: stale, or an engine with other numerics."""

    # auto: decoupled where the samples are another policy's (trainer.max_staleness > 0, or rollout.engine is
    # not native) or one of the other keys is set, else off. bypass: π_old is the sampler's; nothing is
    # recomputed.
    mode: Literal["auto", "decoupled", "bypass"] = "auto"
    importance: ImportanceConfig | None = None
    reject: tuple[RejectionConfig, ...] = ()


@dataclass(frozen=True)
class ConstraintConfig:
    """E[cost] <= limit, kept by a Lagrange multiplier (Safe-RLHF, 2310.12773)."""

    cost: str  # the score that is the cost
    limit: float = 0.0
    initial: float = 1.0  # the multiplier at the start
    lr: float = 0.1  # ln λ += lr · λ · (moving average of the cost - limit)
    smoothing: float = 0.9  # of the moving average; 0: the step's own mean


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantage × policy loss × KL × aggregation are independent choices; a named algorithm is a recipe."""

    advantage: FunctionConfig = FunctionConfig("grpo")
    policy_loss: FunctionConfig = FunctionConfig("ppo_clip")
    value_loss: FunctionConfig = FunctionConfig("clipped_value")
    aggregation: FunctionConfig = FunctionConfig("token-mean")
    kl: KlConfig | None = None
    entropy_coef: float = 0.0
    filter: FunctionConfig | None = None  # groups that are not trained on but replaced (dynamic sampling)
    max_refills: float = 10.0  # filtered groups per step at most, in units of data.batch_size; then an error
    resample: FunctionConfig | None = None  # how often each sample of a prompt is trained on (PF-PPO)
    mask_truncated: bool = False  # responses cut off at rollout.max_tokens carry no loss
    rollout_correction: RolloutCorrectionConfig | None = RolloutCorrectionConfig()  # null: off
    positive_lm_coef: float = 0.0  # language-model loss on right responses (VAPO)
    pretrain_coef: float = 0.0  # language-model loss on data.pretrain (PPO-ptx)
    constraint: ConstraintConfig | None = None
    preference_loss: FunctionConfig = FunctionConfig("dpo")  # of `rondo preference`
    reward_model_loss: FunctionConfig = FunctionConfig("bradley_terry")  # of `rondo reward-model`


@dataclass(frozen=True)
class EvaluationConfig:
    every: int | None = None  # steps; null: only before and after
    before: bool = True
    after: bool = True
    greedy: bool = True  # one greedy answer per prompt
    samples: int = 0  # sampled answers per prompt: mean@n, best@n, majority@n
    temperature: float = 1.0
    top_p: float = 1.0
    limit: int | None = None  # prompts at most


@dataclass(frozen=True)
class TrainerConfig:
    total_steps: int | None = None  # exactly one of total_steps and epochs
    epochs: float | None = None
    seed: int = 0
    max_staleness: int = 0  # 0: synchronous on-policy
    # Episodes in flight when weights arrive: finish on the old ones; resume under the new ones; abort and
    # start again. Default: finish up to max_staleness=1, resume above.
    on_update: Literal["finish", "resume", "abort"] | None = None
    max_aborts: int = 2  # of one prompt group (abort); then it may finish
    order: Literal["prompt", "completion"] = "prompt"  # in which complete groups are trained
    replay: str | None = None  # a run's folder: do what its journal says was trained when, to the same bits
    run_dir: str | None = None  # default runs/<name of the first recipe>
    warm_start: str | None = None  # an SFT recipe, run first; its export becomes model.path
    evaluation: EvaluationConfig = EvaluationConfig()


@dataclass(frozen=True)
class ClusterConfig:
    backend: Literal["local", "process", "ray"] = "local"
    devices: int = 1
    pools: Mapping[str, int] = field(default_factory=dict)  # name: number of devices; none: one pool of all
    placement: Mapping[str, str] = field(default_factory=dict)  # role: pool; default: the first pool
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None  # torch threads per device; default: cores shared out evenly
    inline: bool = False  # local only: calls run on the event loop's thread, so that a breakpoint just works
    ray_address: str | None = None  # default: start Ray here


@dataclass(frozen=True)
class TrackingConfig:
    trackers: tuple[FunctionConfig, ...] = ()  # tensorboard, wandb, mlflow, swanlab (each with its options)
    project: str = "rondo"
    console: Literal["auto", "live", "plain", "off"] = "auto"
    samples: int = 2  # trajectories shown in the console and in the final table
    save_rollouts: bool = True
    plot: bool = True  # curves.png at the end (needs matplotlib)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int | None = None  # steps; null: none
    keep: int = 2  # newest checkpoints kept
    resume: Literal["auto", "never", "must"] = "auto"
    export: bool = True  # write a Hugging Face folder at the end


@dataclass(frozen=True)
class Config:
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
