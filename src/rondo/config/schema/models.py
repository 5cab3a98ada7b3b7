"""The policy, the models beside it, and the engines that train and evaluate them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rondo.config.schema.types import (
    STRICT,
    Batch,
    Buffer,
    Checkpointing,
    Chosen,
    Count,
    Decay,
    Dtype,
    Few,
    LocalPath,
    Natural,
    NonNegative,
    Path,
    Positive,
    Rate,
    Share,
    Tokens,
)

ModelPart = Literal["tower", "projector", "language"]


@dataclass(frozen=True, config=STRICT)
class ImagesConfig:
    """What a model that reads images is given, in training and by every engine."""

    min_pixels: Count | None = None
    """Smaller images are enlarged to so many pixels; null: as preprocessor_config.json says."""
    max_pixels: Count | None = None
    """Larger ones are made smaller; null: likewise."""
    per_prompt: Count | None = None
    """Images of a row at most; more are an error. null: any number."""
    check_seen: bool = True
    """Stop in the first step (RL) where log-probs of answers do not depend on the images."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The policy's model. One of `path`, `config` and `trainer.warm_start` says where weights come from."""

    path: Path | None = None
    """A local folder, a URL or a hub id."""
    hub: Literal["huggingface", "modelscope", "local"] = "huggingface"
    """Where a name that is no folder is looked up: this one, model.tokenizer and the other models' paths."""
    config: Mapping[str, Any] | None = None
    """A transformers config (model_type, …): random initialisation."""
    override: Mapping[str, Any] = Field(default_factory=dict)
    """Other values than those of the config.json of `path`: {rope_parameters: {…}}."""
    tokenizer: Path | None = None
    """A folder, a hub id or a function `path.py:name`; default: model.path."""
    chat_template: LocalPath | None = None
    """A Jinja file that replaces the tokenizer's own template."""
    chat_template_options: Mapping[str, Any] = Field(default_factory=dict)
    """Variables of the chat template ({enable_thinking: false}), wherever a conversation is rendered."""
    tool_format: Literal[
        "auto", "hermes", "qwen_xml", "llama3", "mistral", "deepseek", "kimi_k2", "glm4", "gpt_oss"
    ] = "auto"
    """How the model writes tool calls; auto: as its chat template does."""
    attention: Literal["auto", "flash", "sdpa"] = "auto"
    """The kernel behind the variable-length attention."""
    trust_remote_code: bool = False
    """Run the Python code that a model folder brings."""
    images: ImagesConfig = ImagesConfig()
    """How images are read, by a model of a family that reads them (docs/images.md)."""


@dataclass(frozen=True, config=STRICT)
class WarmupConfig:
    """What all schedules of the learning rate have."""

    name: str
    """How the rate falls after the warm-up."""
    warmup_steps: Natural = 0
    """Optimizer steps w of linear warm-up: the first is taken with lr / w."""
    warmup_ratio: Share = 0.0
    """Or their share of all optimizer steps of the run, rounded down."""


@dataclass(frozen=True, config=STRICT)
class ConstantScheduleConfig(WarmupConfig):
    """The learning rate stays after the warm-up."""

    name: Literal["constant"] = "constant"
    """How the rate falls after the warm-up."""


@dataclass(frozen=True, config=STRICT)
class FallingScheduleConfig(WarmupConfig):
    """The learning rate falls from the warm-up to the end of the run."""

    name: Literal["linear", "cosine"]
    """How the rate falls after the warm-up."""
    min_ratio: Share = 0.0
    """The final learning rate as a share of `lr`."""


@dataclass(frozen=True, config=STRICT)
class WsdScheduleConfig(WarmupConfig):
    """The learning rate stays after the warm-up, and falls at the end (warm-up, stable, decay)."""

    name: Literal["wsd"] = "wsd"
    """How the rate falls after the warm-up."""
    min_ratio: Share = 0.0
    """The final learning rate as a share of `lr`."""
    decay_steps: Count | None = None
    """Length of the final decay; default a tenth of the run."""


ScheduleConfig = ConstantScheduleConfig | FallingScheduleConfig | WsdScheduleConfig


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """AdamW, its schedule, and clipping."""

    lr: Rate = 1e-6
    """The learning rate after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the two moving averages."""
    moments: Literal["full", "8bit"] = "full"
    """What the two moving averages take: as much as parameters, or 8 bits a number, block by block."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    grad_clip: Positive | None = 1.0
    """The largest global gradient norm; null: no clipping."""
    schedule: Annotated[ScheduleConfig, Chosen()] = ConstantScheduleConfig()
    """The learning rate over the run."""
    lr_of_parts: Mapping[ModelPart, Positive] = Field(default_factory=dict)
    """What lr is multiplied with, by part of a model with images: {tower: 0.1}."""


@dataclass(frozen=True, config=STRICT)
class CriticOptimizerConfig(OptimizerConfig):
    """A critic's optimizer: a value head starts from nothing, so it learns faster than the policy."""

    lr: Rate = 1e-5
    """The learning rate after the warm-up."""


@dataclass(frozen=True, config=STRICT)
class TorchBackendConfig:
    """Transformers' models, sharded over the ranks by PyTorch's FSDP2."""

    name: Literal["torch"] = "torch"
    """What computes the model."""
    reshard: bool = True
    """A block's gathered parameters are given back after its forward pass; false: after the backward pass."""
    kernels: Literal["auto", "liger", "transformers"] = "auto"
    """auto: leaner code on a CPU; liger: its kernels of norms and MLPs (CUDA); transformers: its own."""
    mlp_chunk: Tokens | None = None
    """Tokens in an MLP at one time, for long rows: computed again in the backward pass; null: all."""
    offload: Literal["streamed", "plain"] = "streamed"
    """How what is offloaded comes and goes: in large buffers beside other work, or tensor by tensor."""


@dataclass(frozen=True, config=STRICT)
class MegatronBackendConfig:
    """megatron-core's layers and pipelines, with its distributed optimizer's layout: CUDA."""

    name: Literal["megatron"]
    """What computes the model."""
    virtual: Few = 1
    """Chunks of layers that each pipeline stage has, interleaved with the other stages': shorter waits."""
    first_stage_layers: Few | None = None
    """Layers of the first pipeline stage, which has the embeddings too; null: as many as the others."""
    last_stage_layers: Few | None = None
    """Layers of the last pipeline stage, which has the output head too; null: as many as the others."""
    recompute: Literal["full", "selective"] = "full"
    """What gradient_checkpointing computes again: whole layers, or their attention alone."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """megatron-core's own fields of TransformerConfig, by name; those that rondo sets are refused."""


BackendConfig = TorchBackendConfig | MegatronBackendConfig


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """How a model is spread over the ranks of its devices: they shard what these axes leave (FSDP)."""

    replicate: Few = 1
    """Copies of the sharded model (HSDP): parameters are gathered within a copy only."""
    tensor: Few = 1
    """Ranks that compute the same rows, each with a part of every attention's heads and of every product."""
    context: Few = 1
    """Ranks that divide the tokens of the same rows between them."""
    expert: Few = 1
    """Ranks that hold whole experts of a mixture, each another part of them."""
    pipeline: Few = 1
    """Ranks that hold the next few layers each (megatron only)."""


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Adapters of low rank (LoRA): they alone learn, beside a value head; the model's weights stay."""

    rank: Few = 16
    """Of each adapter, r: it adds alpha / r · B · A to a weight, A [r, in], B [out, r]."""
    alpha: Positive = 32.0
    """How much an adapter counts."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all-linear",)
    """The modules that get one, by the end of their names (q_proj); all-linear: all but the output head."""
    parts: Annotated[tuple[ModelPart, ...], Field(min_length=1)] = ("language",)
    """Of a model with images: in which of its parts these modules are."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A starts; B starts at 0, so that the model starts as it was."""
    path: Path | None = None
    """A folder with an adapter of this model, of peft's format, to start from."""
    base_dtype: Literal["nf4"] | None = None
    """In what the weights of linear modules rest: in 4 bits each (nf4, QLoRA); null: in param_dtype."""


@dataclass(frozen=True, config=STRICT)
class ActorLoraConfig(LoraConfig):
    """Adapters of the policy, which generation engines need, too."""

    send: Literal["merged", "adapters"] = "merged"
    """What engines get: all weights, with the adapters merged into them; or A and B alone, once they have the
    base."""


@dataclass(frozen=True, config=STRICT)
class ExpertBalanceConfig:
    """A loss that grows where a mixture's experts get unequal numbers of tokens."""

    weight: Positive = 1e-3
    """What it is multiplied with; it is 1 in each layer at equal numbers, and the layers' are added up."""
    over: Literal["sequence", "mini_batch"] = "sequence"
    """What should be balanced: each sequence by itself, or a mini-batch, for another forward pass."""


@dataclass(frozen=True, config=STRICT)
class RouterConfig:
    """The routers of a mixture, which choose the experts of each token."""

    balance: ExpertBalanceConfig | None = None
    """A loss that spreads tokens over experts; null: none."""
    bias_speed: NonNegative = 0.0
    """How far a step moves the bias of each expert that got fewer, or more, tokens than an equal share."""

    @property
    def balances(self) -> bool:
        """Says whether it matters which experts rows go to, beside what they are worth."""
        return self.balance is not None or self.bias_speed > 0


@dataclass(frozen=True, config=STRICT)
class ActorRouterConfig(RouterConfig):
    """The routers of the policy."""

    replay: Literal["trainer", "sampler"] | None = None
    """The update's tokens go to the experts to which they went when old log-probs were computed (trainer), or
    when they were sampled; null: to those that the routers choose then."""


@dataclass(frozen=True, config=STRICT)
class FrozenEngineConfig:
    """The engine of a model that is evaluated only."""

    token_budget: Tokens = 16384
    """Tokens per micro-batch and rank; never exceeded."""
    param_dtype: Dtype = "float32"
    """Of the parameters at rest."""
    compute_dtype: Literal["auto", Dtype] = "auto"
    """Of the matrix products; auto: bfloat16 on CUDA, float32 elsewhere."""
    offload_params: bool = False
    """Parameters rest in host memory between calls."""
    logits_bytes: Buffer | None = 512 << 20
    """Of the logits that exist at one time, whatever the vocabulary; at least one position's do. null: none
    (kernels for CUDA)."""
    parallel: ParallelConfig | None = None
    """How it is spread over its ranks; null: as the actor is (critic, reference), or by sharding alone."""


@dataclass(frozen=True, config=STRICT)
class EngineConfig(FrozenEngineConfig):
    """A training engine. Master weights and optimizer state are in `param_dtype`; those of adapters are in
    float32 at least.
    """

    gradient_checkpointing: Checkpointing = "auto"
    """Compute blocks again in the backward pass (auto: on CUDA); offload: from inputs in host memory."""
    offload_optimizer: bool = False
    """The optimizer's state rests in host memory between calls."""
    mini_batch_size: Batch | None = None
    """Prompt groups per optimizer step; null: all of a step's."""
    epochs: Few = 1
    """Passes over each batch."""
    lora: LoraConfig | None = None
    """Train adapters of low rank instead of the model's own weights; null: those."""
    router: RouterConfig = RouterConfig()
    """The routers of a mixture of experts."""
    freeze: tuple[ModelPart, ...] = ()
    """Parts of a model with images that do not learn."""


@dataclass(frozen=True, config=STRICT)
class ActorConfig(EngineConfig):
    """The policy that is trained."""

    backend: Annotated[BackendConfig, Chosen()] = TorchBackendConfig()
    """What computes this model and those beside it (critic, reference, teacher, …), with its own settings."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How it learns."""
    lora: ActorLoraConfig | None = None
    """Train adapters of low rank instead of the model's own weights; null: those."""
    router: ActorRouterConfig = ActorRouterConfig()
    """The routers of a mixture of experts."""


@dataclass(frozen=True, config=STRICT)
class CriticConfig(EngineConfig):
    """Used when a chosen function reads `values`; a cost critic (`cost_values`) has the same settings."""

    path: Path | None = None
    """A folder or hub id; default: the actor's initial model."""
    override: Mapping[str, Any] = Field(default_factory=dict)
    """Other values than those of the config.json of `path`."""
    tokenizer: Literal["compare", "trust"] = "compare"
    """Whether the tokenizer of `path` must have the policy's tokens; trust: it is not looked at."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """How it learns."""
    warmup_steps: Natural = 0
    """Trainer steps in which only the critic learns."""


@dataclass(frozen=True, config=STRICT)
class ReferenceConfig(FrozenEngineConfig):
    """Used when a chosen function reads `ref_log_probs`."""

    path: Path | None = None
    """A folder or hub id; default: the actor's initial model."""
    override: Mapping[str, Any] = Field(default_factory=dict)
    """Other values than those of the config.json of `path`."""
    tokenizer: Literal["compare", "trust"] = "compare"
    """Whether the tokenizer of `path` must have the policy's tokens; trust: it is not looked at."""
    refresh_every: Count | None = None
    """Steps after which the reference becomes the policy; null: frozen."""


@dataclass(frozen=True, config=STRICT)
class PrmConfig:
    """The implicit process reward model (PRIME), used when a chosen function reads `process_rewards`.

    It starts as the reference model and is trained on the outcome (the column `accuracy`) of each step, on an
    engine and in mini-batches like the actor's, with a learning rate of its own.
    """

    lr: Rate = 1e-6
    """Its learning rate."""
    beta: Positive = 0.05
    """The reward of a token is beta · log(π_prm / π_ref)."""
    update: Literal["before", "after"] = "before"
    """It learns before or after it scores the step; "before" scores with what it learned."""


@dataclass(frozen=True, config=STRICT)
class TeacherConfig(FrozenEngineConfig):
    """Used when a chosen function reads `teacher_log_probs` or the teacher's top-k columns (distillation)."""

    path: Path | None = None
    """A folder or hub id, required then."""
    override: Mapping[str, Any] = Field(default_factory=dict)
    """Other values than those of the config.json of `path`."""
    tokenizer: Literal["compare", "trust"] = "compare"
    """Whether the tokenizer of `path` must have the policy's tokens; trust: it is not looked at."""
    top_k: Few = 16
    """The likeliest tokens per position, where a function reads teacher_topk_*."""
    by_source: Mapping[str, str] = Field(default_factory=dict)
    """The name of a prompt source: which of `models` its rows learn from, in place of `path` (MOPD)."""


@dataclass(frozen=True, config=STRICT)
class NamedModelConfig:
    """A model of `models`, beside those that the run's functions ask for."""

    like: Literal["actor", "teacher"]
    """Whose settings it has, and what it can do. actor: it answers, by engines of its own, and learns, in a
    program (`session.actor(name)`). teacher: it is frozen, and says how likely responses are to it, in a
    program (`session.scorer(name)`), or in teacher.by_source.
    """
    path: Path | None = None
    """A folder or hub id; a teacher needs one. null: the policy's initial model."""
    override: Mapping[str, Any] = Field(default_factory=dict)
    """Other values than those of the config.json of `path`."""
    tokenizer: Literal["compare", "trust"] = "compare"
    """Whether the tokenizer of `path` must have the policy's tokens; trust: it is not looked at."""
    lr: Rate | None = None
    """Of one that learns, at its highest; null: actor.optimizer.lr."""
