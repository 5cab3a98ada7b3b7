"""One pipeline stage of a model, out of megatron-core's layers; it and `layers` import megatron-core.

Rows are packed as everywhere: the tokens of a micro-batch are one sequence [N, 1, H] to Megatron, and
attention, which is rondo's own, keeps the documents in it apart: no Transformer Engine is needed for packing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from transformers import PreTrainedModel

from rondo.core.errors import ConfigError
from rondo.models.lora import AdapterSet
from rondo.models.names import persistent_buffers
from rondo.models.value_head import ValueHead
from rondo.planning.memory import Owner
from rondo.training.megatron.families import ROTARY_SCALE, chunks_of, fields_of
from rondo.training.megatron.layers import Norm, PassFacts, Switch, adapt, layer_of
from rondo.training.offload import is_there
from rondo.training.packed import PackedRows
from rondo.training.torch_backend.head import TokenHead
from rondo.training.torch_backend.resting import StreamedStorages
from rondo.training.torch_backend.routing import Again, Around

LEAST, BELOW = Version("0.16.1"), Version("0.17")
# What megatron-core's own attention, norms, routers and experts read, in whose place others stand.
_UNREAD = {
    "apply_query_key_layer_scaling",
    "attention_backend",
    "attention_softmax_in_fp32",
    "layernorm_zero_centered_gamma",
    "memory_efficient_layer_norm",
    "moe_apply_probs_on_input",
    "moe_aux_loss_coeff",
    "moe_enable_routing_replay",
    "moe_expert_capacity_factor",
    "moe_grouped_gemm",
    "moe_input_jitter_eps",
    "moe_layer_freq",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_use_legacy_grouped_gemm",
    "moe_z_loss_coeff",
    "qk_clip",
    "softmax_scale",
    "softmax_type",
    "window_attn_skip_freq",
    "window_size",
}
_SEED = 1  # there is no dropout, and nothing is initialised: nothing depends on it


def check_version() -> None:
    """Raises ConfigError for a version of megatron-core that was never tried."""
    found = Version(importlib.metadata.version("megatron-core"))
    if not LEAST <= found < BELOW:
        raise ConfigError(
            f"actor.backend=megatron: megatron-core {found} is installed, and {LEAST} to below {BELOW} "
            'were tried: pip install "rondo-rl[megatron]"',
            key="actor.backend",
        )


def check_interleaving(config: TransformerConfig) -> None:
    """Raises ConfigError for settings with which chunks train wrongly, and nothing says so: sends in batches
    mix up what one chunk and the next have for each other.
    """
    if not config.overlap_p2p_comm or config.batch_p2p_comm:
        raise ConfigError(
            f"actor.backend.virtual: megatron-core {importlib.metadata.version('megatron-core')} takes "
            f"overlap_p2p_comm={config.overlap_p2p_comm} and batch_p2p_comm={config.batch_p2p_comm} for it, "
            "with which gradients are wrong; leave it out",
            key="actor.backend.virtual",
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """The groups of ranks that Megatron wants."""

    pipeline: dist.ProcessGroup
    """The stages of the same rows."""
    tensor: dist.ProcessGroup
    """Those with the same tokens, each with a part of every product."""
    same: dist.ProcessGroup
    """Those with the same parameters: of other rows, or of other tokens of the same (context)."""
    expert: dist.ProcessGroup
    """Those that share out a mixture's experts, each with whole ones."""
    same_experts: dist.ProcessGroup
    """Those with the same experts: tensor ranks, too, since no expert is cut."""
    alone: dist.ProcessGroup
    """This rank by itself."""

    @property
    def stage(self) -> int:
        """Returns which stage this rank has."""
        return dist.get_rank(self.pipeline)

    @property
    def stages(self) -> int:
        """Returns how many there are."""
        return dist.get_world_size(self.pipeline)

    def collection(self) -> ProcessGroupCollection:
        """Returns them as Megatron names them. To it ranks along context have other rows: it computes token
        by token, but for attention, which is not its own.
        """
        return ProcessGroupCollection(
            tp=self.tensor,
            pp=self.pipeline,
            cp=self.alone,
            tp_cp=self.tensor,
            ep=self.expert,
            expt_tp=self.alone,
            tp_ep=self.expert,
            tp_dp_cp=self.same,  # asked for, and not used
            expt_dp=self.same_experts,
            intra_expt_dp=self.same_experts,
            dp=self.same,
            dp_cp=self.same,
            intra_dp_cp=self.same,
            embd=None,  # gradients of tied embeddings are added up in `ModelStage.finish_gradients`
            pos_embd=None,
        )


class StageHead(TokenHead):
    """The head of the last stage, over its part of the vocabulary."""

    def __init__(
        self, weight: Callable[[], torch.Tensor], value_head: ValueHead | None, **settings: Any
    ) -> None:
        super().__init__(value_head, **settings)
        self._weight = weight

    def weight_and_bias(self) -> tuple[torch.Tensor, None]:
        """See `TokenHead.weight_and_bias`."""
        return self._weight(), None


class _StageModel(GPTModel):
    """The layers of one stage, or of one of its chunks, without an output of its own: `head` reads the last
    one's hidden states.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        # Which of the model's.
        layers: Iterable[int],
        chunk: int,
        grid: Grid,
        config: TransformerConfig,
        tied: bool,
        device: torch.device,
    ) -> None:
        virtual = config.virtual_pipeline_model_parallel_size
        text = lm.config.get_text_config()
        super().__init__(
            config,
            TransformerBlockSubmodules(
                [layer_of(lm.model.layers[one], config, device) for one in layers], Norm
            ),
            text.vocab_size,
            0,
            pre_process=grid.stage == 0 and chunk == 0,
            post_process=grid.stage == grid.stages - 1 and chunk == (virtual or 1) - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            pg_collection=grid.collection(),
            vp_stage=None if virtual is None else chunk,
        )
        rotary = lm.model.rotary_emb
        self._rotary_scale = float(rotary.attention_scaling)
        assert self._rotary_scale == 1.0 or text.model_type in ROTARY_SCALE
        self.register_buffer("_frequencies", rotary.inv_freq.float(), persistent=False)
        self.head: StageHead | None = None

    def forward(self, packed: PackedRows, again: Again) -> torch.Tensor:
        """Returns the hidden states [n, 1, H] of this rank's tokens: of layers that are not the first, from
        those that they were sent.
        """
        ids, positions = packed.input_ids, packed.position_ids
        assert packed.documents is not None
        if packed.documents.context is not None:
            own = packed.documents.context.own(len(ids))
            ids, positions = ids[own], positions[own]
        embedded = self.embedding(ids[None], None) if self.pre_process else None
        if embedded is not None and torch.is_grad_enabled():
            # Also where they rest (adapters): a layer that is computed again hands on a gradient only of an
            # input that has one.
            embedded.requires_grad_()
        angles = torch.outer(positions.float(), self._frequencies)
        hidden: torch.Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            packed_seq_params=PassFacts(
                "sbhd", documents=packed.documents, rotary_scale=self._rotary_scale, again=again
            ),
        )
        return hidden

    def outputs_of(
        self, hidden: torch.Tensor, packed: PackedRows, outputs: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        """Returns what the head computes of the last stage's hidden states."""
        assert self.head is not None
        if self.config.sequence_parallel:
            # Each tensor rank computes the whole gradient of these (`Vocabulary`), and keeps its own tokens'.
            hidden = gather_from_sequence_parallel_region(hidden, False, self.tp_group)
        return self.head.outputs_of(hidden[:, 0], packed, outputs)


def transformer_config(
    lm: PreTrainedModel,
    layers: Sequence[int],
    virtual: int,
    grid: Grid,
    dtype: torch.dtype,
    recompute: str | None,
    options: Mapping[str, Any],
) -> TransformerConfig:
    """Returns megatron-core's settings. layers: of each stage, in so many (`virtual`) chunks. Raises
    ConfigError for options that it does not have, or that rondo sets.
    """
    is_uneven = len(set(layers)) > 1
    ours: dict[str, Any] = {
        **fields_of(lm.config),
        "num_layers": sum(layers),
        "num_layers_in_first_pipeline_stage": layers[0] if is_uneven else None,
        # Of two stages the other one is what is left: with both said megatron-core divides by no stages.
        "num_layers_in_last_pipeline_stage": layers[-1] if is_uneven and len(layers) > 2 else None,
        "tensor_model_parallel_size": dist.get_world_size(grid.tensor),
        "pipeline_model_parallel_size": grid.stages,
        "expert_model_parallel_size": dist.get_world_size(grid.expert),
        "expert_tensor_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "microbatch_group_size_per_vp_stage": grid.stages,
        # Of chunks each send is by itself: see `check_interleaving`. Others' schedule takes batches alone.
        "overlap_p2p_comm": virtual > 1,
        "batch_p2p_comm": virtual == 1,
        "overlap_p2p_comm_warmup_flush": False,  # lengths that vary are waited for first
        "sequence_parallel": dist.get_world_size(grid.tensor) > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "perform_initialization": False,
        "persist_layer_norm": False,
        # Gradients are sums: nothing is divided by tokens, micro-batches or ranks.
        "calculate_per_token_loss": True,
        # Micro-batches have as many tokens as they have.
        "variable_seq_lengths": True,
        "moe_router_load_balancing_type": "none",
        "recompute_granularity": recompute,
        "recompute_method": "uniform" if recompute == "full" else None,
        "recompute_num_layers": 1 if recompute == "full" else None,
    }
    # These want kernels that are not there without Apex or Transformer Engine; options may turn them on.
    fusions = ("bias_activation_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion")
    defaults: dict[str, Any] = dict.fromkeys(fusions, False)
    # Its own default takes micro-batches of one length only.
    defaults |= {"moe_token_dispatcher_type": "alltoall", "transformer_impl": "local"}
    _check_options(options, ours)
    try:
        config = TransformerConfig(**{**defaults, **ours, **options})
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"actor.backend.options: megatron-core refuses them: {error}", key="actor.backend.options"
        ) from error
    if virtual > 1:
        check_interleaving(config)
    return config


def _check_options(options: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    for name in options:
        why = ""
        if name not in known:
            why = "is no field of its TransformerConfig"
        elif name in ours:
            why = "is set by rondo; remove it"
        elif name in _UNREAD or name.startswith("moe_router_"):
            why = "would have no effect: attention, norms, routers and experts are not Megatron's; remove it"
        elif name == "recompute_modules" and "moe" in options[name]:
            why = "has moe, and a router would choose again without knowing of which pass; leave that out"
        elif name == "transformer_impl" and options[name] not in _available():
            why = f"can be {' or '.join(_available())} here"
        if why:
            raise ConfigError(
                f"actor.backend.options.{name}: {why} (megatron-core "
                f"{importlib.metadata.version('megatron-core')})",
                key=f"actor.backend.options.{name}",
            )


def _available() -> tuple[str, ...]:
    """Returns whose products there are. (megatron-core says that it has Transformer Engine's where that is
    not installed.)
    """
    there = importlib.util.find_spec("transformer_engine") is not None
    return ("local", "transformer_engine") if there else ("local",)


class ModelStage:
    """This rank's stage, in chunks: its parameters, their gradients in a buffer per chunk and dtype, and the
    schedule.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        layers: Sequence[int],
        grid: Grid,
        config: TransformerConfig,
        device: torch.device,
        adapters: AdapterSet | None,
        *,
        trains: bool,
    ) -> None:
        self.grid = grid
        self._device = device
        self._config = config
        self._virtual = config.virtual_pipeline_model_parallel_size  # None: each stage is one chunk
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # all else of that module stays as it is: unset
            parallel_state._set_global_memory_buffer()
        model_parallel_cuda_manual_seed(_SEED, tp_rank=dist.get_rank(grid.tensor), ep_rank=0, etp_rank=0)
        head = lm.get_output_embeddings()
        has_head = head is not None and hasattr(head, "weight")
        self.tied = has_head and head.weight is lm.get_input_embeddings().weight
        self._layers = chunks_of(layers, self._virtual or 1, grid.stage)
        self.chunks = [
            _StageModel(lm, own, number, grid, config, self.tied, device)
            for number, own in enumerate(self._layers)
        ]
        if not has_head and self.is_last:
            del self.chunks[-1].output_layer  # a critic's
        self.adapters = Switch()
        for chunk, own in zip(self.chunks, self._layers, strict=True):
            chunk.to(device).requires_grad_(trains and adapters is None)
            if adapters is not None:
                adapt(chunk, own.start, lm.config, adapters, grid.tensor, self.adapters)
        self._computing: list[Any] = [*self.chunks]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters of all chunks, by the number of the chunk and the name in it, and buffers
        that are weights, too: biases of routers, which no gradient moves.
        """
        chunks = torch.nn.ModuleList(self.chunks)
        return dict(chunks.named_parameters()) | dict(persistent_buffers(chunks))

    def place_of(self, name: str) -> tuple[str, int]:
        """Returns a tensor's name in its chunk, and how many of all layers are before that chunk's."""
        number, _, inner = name.partition(".")
        return inner, self._layers[int(number)].start

    @property
    def is_last(self) -> bool:
        """Says whether this rank has the head."""
        return self.grid.stage == self.grid.stages - 1

    @property
    def own_copy(self) -> torch.Tensor | None:
        """Returns the last stage's copy of embeddings that are its output weights, too."""
        if self.tied and self.is_last and self.grid.stages > 1:
            weight: torch.Tensor = self.chunks[-1].output_layer.weight
            return weight
        return None

    def attach(self, value_head: ValueHead | None, **settings: Any) -> None:
        """Puts the head on the last stage."""
        if self.is_last:
            self.chunks[-1].head = StageHead(self._output_weight, value_head, **settings)

    def _output_weight(self) -> torch.Tensor:
        """Returns the last stage's: of one that has the embeddings, too, Megatron has none where they are
        tied.
        """
        tied_here, chunk = self.tied and self.grid.stages == 1, self.chunks[-1]
        module = chunk.embedding.word_embeddings if tied_here else chunk.output_layer
        weight: torch.Tensor = module.weight
        return weight

    def make_buffers(self) -> None:
        """Has Megatron hold parameters and gradients in flat buffers, of which each rank with the same
        parameters reduces and updates its own part.
        """
        of_buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self._computing = [
            DistributedDataParallel(self._config, of_buffers, chunk, pg_collection=self.grid.collection())
            for chunk in self.chunks
        ]

    def same(self, parameter: torch.Tensor) -> dist.ProcessGroup:
        """Returns the ranks with the same parameter."""
        return self.grid.same if getattr(parameter, "allreduce", True) else self.grid.same_experts

    def routers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """Yields the layers with experts, among all of the model, and their routers."""
        for chunk, numbers in zip(self.chunks, self._layers, strict=True):
            for number, layer in zip(numbers, chunk.decoder.layers, strict=True):
                if layer.is_moe_layer:
                    yield number, layer.mlp.router.gate

    def run(
        self,
        passes: Iterable[PackedRows],
        number: int,
        use: Callable[[torch.Tensor, PackedRows], torch.Tensor],
        around: Around,
        *,
        backward: bool,
    ) -> None:
        """Goes through all micro-batches. use: is handed the last stage's hidden states of each, and returns
        what is minimised. around: surrounds each forward pass, and gives what surrounds layers that are
        computed again.
        """
        if not number:
            return

        def forward(micro_batches: Iterator[PackedRows], model: torch.nn.Module) -> tuple[Any, Any]:
            packed = next(micro_batches)

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                none = torch.zeros((), dtype=torch.int, device=hidden.device)
                return use(hidden, packed), none, {}

            with around(packed) as again:
                return model(packed, again), loss

        collection = self.grid.collection()
        schedule: Any = get_forward_backward_func(self.grid.stages, self._virtual)
        communicator = P2PCommunicator(self.grid.pipeline, self._config)
        schedule(
            forward_step_func=forward,
            # A micro-batch is laid out once, when it comes to the first chunk.
            data_iterator=list(itertools.tee(passes, len(self.chunks))),
            model=self._computing,
            num_microbatches=number,
            seq_length=1,  # each micro-batch says its own
            micro_batch_size=1,
            forward_only=not backward,
            p2p_communicator=communicator,
            pg_collection=collection,
        )

    def finish_gradients(self) -> None:
        """Adds up the gradients over the ranks: each has its own part of the sum afterwards."""
        finalize_model_grads(self._computing, pg_collection=self.grid.collection())
        ends = (0, self.grid.stages - 1)
        if not self.tied or self.grid.stages == 1 or self.grid.stage not in ends:
            return
        chunk = self.chunks[0 if self.grid.stage == 0 else -1]
        embeddings = chunk.shared_embedding_or_output_weight()
        if not embeddings.requires_grad:
            return
        mine = embeddings.main_grad
        theirs = torch.empty_like(mine)
        other = dist.get_global_rank(self.grid.pipeline, ends[self.grid.stage == 0])
        sent = [
            dist.P2POp(dist.isend, mine, other, self.grid.pipeline),
            dist.P2POp(dist.irecv, theirs, other, self.grid.pipeline),
        ]
        for one in dist.batch_isend_irecv(sent):
            one.wait()
        mine += theirs

    def have_gradients(self) -> None:
        """Makes the gradients, at 0, where there are none."""
        for chunk in self._computing:
            gone = [one.grad_data for one in _buffers_of(chunk) if not is_there(one.grad_data)]
            for gradients in gone:
                gradients.untyped_storage().resize_(gradients.nbytes)
            if gone:
                chunk.zero_grad_buffer()

    def drop_gradients(self) -> None:
        """Gives up the gradients' memory, which others have between steps."""
        for gradients in self.gradients():
            gradients.untyped_storage().resize_(0)

    def gather_parameters(self) -> None:
        """Takes from the other ranks the parts of the parameters that they have updated."""
        for chunk in self._computing:
            chunk.start_param_sync(force_sync=True)

    def buckets(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[torch.nn.Parameter, int]]]:
        """Yields flat buffers of parameters and of gradients, and where each parameter begins in them."""
        for buffer in itertools.chain.from_iterable(map(_buffers_of, self._computing)):
            for bucket in buffer.buckets:
                starts = {one: buffer.param_index_map[one][0] - bucket.offset for one in bucket.params_list}
                yield bucket.param_data, bucket.grad_data, starts

    # ---- memory

    def parameters(self) -> list[torch.Tensor]:
        """Returns those of all chunks."""
        return [one for chunk in self.chunks for one in chunk.parameters()]

    def gradients(self) -> list[torch.Tensor]:
        """Returns the buffers of gradients, of which there is memory from a pass to the end of a step."""
        return [buffer.grad_data for chunk in self._computing for buffer in _buffers_of(chunk)]

    def held(self) -> dict[Owner, int]:
        """Returns the bytes of both that are on the device now."""
        both: dict[Owner, list[torch.Tensor]] = {"weights": self.parameters(), "gradients": self.gradients()}
        return {owner: sum(one.nbytes for one in part if is_there(one)) for owner, part in both.items()}

    def resting(self) -> StreamedStorages:
        """Returns what has parameters, and gradients that are there, in host memory between phases."""
        return StreamedStorages(self._device, self.parameters, self.gradients)


def _buffers_of(chunk: torch.nn.Module) -> tuple[Any, ...]:
    """Returns the flat buffers of a chunk; one that is frozen has none."""
    if not isinstance(chunk, DistributedDataParallel):
        return ()
    return (*chunk.buffers, *chunk.expert_parallel_buffers)
