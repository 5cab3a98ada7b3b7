"""One pipeline stage of a model, out of megatron-core's layers; the only module that imports megatron-core.

StageRows are packed as everywhere: the tokens of a micro-batch are one sequence [N, 1, H] to Megatron, and
attention, which is rondo's own, keeps the documents in it apart: no Transformer Engine is needed for packing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from packaging.version import Version
from transformers import PreTrainedModel

from rondo.core.errors import ConfigError
from rondo.models.attention import varlen_attention
from rondo.models.documents import Documents
from rondo.models.value_head import ValueHead
from rondo.training.megatron.families import fields_of
from rondo.training.packed import PackedRows
from rondo.training.torch_backend.head import TokenHead
from rondo.training.torch_backend.routing import Again

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


@dataclasses.dataclass
class _Packed(PackedSeqParams):
    """What attention has to know of a micro-batch. It travels by closure where layers are computed again."""

    documents: Documents | None = None
    again: Again = contextlib.nullcontext
    """Surrounds a layer, whenever it is computed: has its router know the pass."""


class _Layer(TransformerLayer):
    """One whose router knows which pass it is in, also where the layer is computed again."""

    def forward(self, *arguments: Any, packed_seq_params: _Packed, **other: Any) -> Any:
        """See `TransformerLayer.forward`."""
        with packed_seq_params.again():
            return super().forward(*arguments, packed_seq_params=packed_seq_params, **other)


class _Router(torch.nn.Module):
    """A layer's router of transformers, whose choice is handed on as Megatron's dispatchers want it."""

    def __init__(
        self, gate: torch.nn.Module, *, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.gate = _empty_like(gate, config.params_dtype)
        for parameter in self.gate.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def set_layer_number(self, layer_number: int) -> None:
        """Called by Megatron, for its own logs."""

    def forward(
        self, states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states [N, 1, H] -> weights and choice, [N, E] each: 0 and False for experts that a token does not
        go to.
        """
        logits, weights, chosen = self.gate(states.view(-1, states.shape[-1]))
        wide = torch.zeros(logits.shape, dtype=weights.dtype, device=logits.device)
        return wide.scatter(1, chosen, weights), wide.bool().scatter(1, chosen, True)


class _Experts(torch.nn.Module):
    """This rank's experts of a layer, as transformers computes them."""

    def __init__(self, number: int, config: TransformerConfig, *, like: torch.nn.Module, **_: Any) -> None:
        super().__init__()
        self.own = _empty_like(like, config.params_dtype, number)
        self._number = number
        for parameter in self.own.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]  # but over `Grid.same_experts`

    def forward(
        self, states: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """states [M, H], of each expert's tokens one after another, weights [M] -> [M, H]."""
        numbers = torch.arange(self._number, device=states.device)
        each = tokens_per_expert.to(states.device)
        chosen = numbers.repeat_interleave(each, output_size=len(states))
        return self.own(states, chosen[:, None], weights[:, None]), None


def _empty_like(module: torch.nn.Module, dtype: torch.dtype, first: int | None = None) -> torch.nn.Module:
    """Returns a module of transformers with parameters and buffers of its own, with nothing in them. first:
    how many of its experts it has.
    """
    own = copy.copy(module)
    if first is not None:
        own.num_experts = first  # type: ignore[assignment]
    own._parameters = {
        name: torch.nn.Parameter(torch.empty((first or len(one), *one.shape[1:]), dtype=dtype))
        for name, one in module._parameters.items()
        if one is not None
    }
    own._buffers = {
        name: None if one is None else torch.zeros(one.shape, dtype=one.dtype)
        for name, one in module._buffers.items()
    }
    return own


class _Attention(torch.nn.Module):
    """Megatron's `core_attention`, over packed documents."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: _Packed,
        **other: Any,
    ) -> torch.Tensor:
        """query [N, 1, heads, D], key and value [N, 1, groups, D] -> [N, 1, heads · D]."""
        states = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        out = varlen_attention(self, *states, documents=packed_seq_params.documents)[0]
        return out.reshape(len(query), 1, -1)


class _Norm(torch.nn.Module):
    """RMSNorm as transformers computes it: in float32, and multiplied in the states' own dtype. (Megatron's
    own takes no sequence parallel without Transformer Engine.)
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float() if states.dtype.itemsize < 4 else states
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(states.dtype)


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
    """The layers of one stage, without an output of its own: `head` reads the last one's hidden states."""

    def __init__(
        self,
        lm: PreTrainedModel,
        # This stage's, as transformers has them.
        layers: Iterable[torch.nn.Module],
        grid: Grid,
        config: TransformerConfig,
        tied: bool,
    ) -> None:
        text = lm.config.get_text_config()
        super().__init__(
            config,
            TransformerBlockSubmodules([_layer_of(one, config) for one in layers], _Norm),
            text.vocab_size,
            0,
            pre_process=grid.stage == 0,
            post_process=grid.stage == grid.stages - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            pg_collection=grid.collection(),
        )
        rotary = lm.model.rotary_emb
        assert rotary.attention_scaling == 1.0
        self.register_buffer("_frequencies", rotary.inv_freq.float(), persistent=False)
        self.head: StageHead | None = None

    def forward(self, packed: PackedRows, again: Again) -> torch.Tensor:
        """Returns the hidden states [n, 1, H] of this rank's tokens: of a stage that is not the first, from
        those that it was sent.
        """
        ids, positions = packed.input_ids, packed.position_ids
        assert packed.documents is not None
        if packed.documents.context is not None:
            own = packed.documents.context.own(len(ids))
            ids, positions = ids[own], positions[own]
        embedded = self.embedding(ids[None], None) if self.pre_process else None
        angles = torch.outer(positions.float(), self._frequencies)
        hidden: torch.Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            packed_seq_params=_Packed("sbhd", documents=packed.documents, again=again),
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


def _layer_of(like: torch.nn.Module, config: TransformerConfig) -> ModuleSpec:
    """Says what a layer is made of. like: as transformers has it."""
    mlp: Any = like.mlp
    experts = config.num_moe_experts if hasattr(mlp, "experts") else None
    layer = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.module, own = _Layer, layer.submodules
    own.input_layernorm = own.pre_mlp_layernorm = _Norm
    attention = own.self_attention.submodules
    attention.core_attention = _Attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = _Norm
    if experts is not None:
        of_mixture = own.mlp.submodules
        of_mixture.router = functools.partial(_Router, mlp.gate)
        of_mixture.experts = ModuleSpec(_Experts, params={"like": mlp.experts})
    return layer


def transformer_config(
    lm: PreTrainedModel,
    layers: Sequence[int],
    grid: Grid,
    dtype: torch.dtype,
    recompute: str | None,
    options: Mapping[str, Any],
) -> TransformerConfig:
    """Returns megatron-core's settings. layers: of each stage. Raises ConfigError for options that it does
    not have, or that rondo sets.
    """
    ours: dict[str, Any] = {
        **fields_of(lm.config),
        "num_layers": sum(layers),
        "num_layers_in_first_pipeline_stage": layers[0] if len(set(layers)) > 1 else None,
        "num_layers_in_last_pipeline_stage": layers[-1] if len(set(layers)) > 1 else None,
        "tensor_model_parallel_size": dist.get_world_size(grid.tensor),
        "pipeline_model_parallel_size": grid.stages,
        "expert_model_parallel_size": dist.get_world_size(grid.expert),
        "expert_tensor_parallel_size": 1,
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
        # Micro-batches have as many tokens as they have. A model with a dispatcher wants this one.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "recompute_granularity": recompute,
        "recompute_method": "uniform" if recompute == "full" else None,
        "recompute_num_layers": 1 if recompute == "full" else None,
    }
    # These want kernels that are not there without Apex or Transformer Engine; options may turn them on.
    fusions = ("bias_activation_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion")
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
        if why:
            raise ConfigError(
                f"actor.backend.options.{name}: {why} (megatron-core "
                f"{importlib.metadata.version('megatron-core')})",
                key=f"actor.backend.options.{name}",
            )
    try:
        return TransformerConfig(**{**dict.fromkeys(fusions, False), **ours, **options})
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"actor.backend.options: megatron-core refuses them: {error}", key="actor.backend.options"
        ) from error


class ModelStage:
    """This rank's stage: its parameters, their gradients in one buffer per dtype, and the schedule."""

    def __init__(
        self,
        lm: PreTrainedModel,
        layers: Sequence[int],
        grid: Grid,
        config: TransformerConfig,
        device: torch.device,
        *,
        trains: bool,
    ) -> None:
        self.grid = grid
        self._config = config
        self.offset = sum(layers[: grid.stage])
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # all else of that module stays as it is: unset
            parallel_state._set_global_memory_buffer()
        model_parallel_cuda_manual_seed(_SEED, tp_rank=dist.get_rank(grid.tensor), ep_rank=0, etp_rank=0)
        own = lm.model.layers[self.offset : self.offset + layers[grid.stage]]
        head = lm.get_output_embeddings()
        has_head = head is not None and hasattr(head, "weight")
        self.tied = has_head and head.weight is lm.get_input_embeddings().weight
        self.model = _StageModel(lm, own, grid, config, self.tied)
        if not has_head and self.model.post_process:
            del self.model.output_layer  # a critic's
        self.model.to(device).requires_grad_(trains)
        self._whole: Any = self.model

    @property
    def is_last(self) -> bool:
        """Says whether this rank has the head."""
        return self.grid.stage == self.grid.stages - 1

    @property
    def own_copy(self) -> torch.Tensor | None:
        """Returns the last stage's copy of embeddings that are its output weights, too."""
        if self.tied and self.is_last and self.grid.stages > 1:
            weight: torch.Tensor = self.model.output_layer.weight
            return weight
        return None

    def attach(self, value_head: ValueHead | None, **settings: Any) -> None:
        """Puts the head on the last stage."""
        if self.is_last:
            self.model.head = StageHead(self._output_weight, value_head, **settings)

    def _output_weight(self) -> torch.Tensor:
        """Returns the last stage's: of one that has the embeddings, too, Megatron has none where they are
        tied.
        """
        tied_here = self.tied and self.grid.stages == 1
        module = self.model.embedding.word_embeddings if tied_here else self.model.output_layer
        weight: torch.Tensor = module.weight
        return weight

    def make_buffers(self) -> None:
        """Has Megatron hold parameters and gradients in flat buffers, of which each rank with the same
        parameters reduces and updates its own part.
        """
        of_buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self._whole = DistributedDataParallel(
            self._config, of_buffers, self.model, pg_collection=self.grid.collection()
        )

    def same(self, parameter: torch.Tensor) -> dist.ProcessGroup:
        """Returns the ranks with the same parameter."""
        return self.grid.same if getattr(parameter, "allreduce", True) else self.grid.same_experts

    def routers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """Yields the layers with experts, among all of the model, and their routers."""
        for number, layer in enumerate(self.model.decoder.layers):
            if layer.is_moe_layer:
                yield self.offset + number, layer.mlp.router.gate

    def run(
        self,
        passes: Iterable[PackedRows],
        number: int,
        use: Callable[[torch.Tensor, PackedRows], torch.Tensor],
        around: Callable[[PackedRows], AbstractContextManager[Again]],
        *,
        backward: bool,
    ) -> None:
        """Goes through all micro-batches. use: is handed the last stage's hidden states of each, and returns
        what is minimised. around: surrounds each forward pass, and gives what surrounds layers that are
        computed again.
        """

        def forward(micro_batches: Iterator[PackedRows], model: torch.nn.Module) -> tuple[Any, Any]:
            packed = next(micro_batches)

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                none = torch.zeros((), dtype=torch.int, device=hidden.device)
                return use(hidden, packed), none, {}

            with around(packed) as again:
                return model(packed, again), loss

        collection = self.grid.collection()
        schedule: Any = get_forward_backward_func(self.grid.stages, None)
        communicator = P2PCommunicator(self.grid.pipeline, self._config)
        schedule(
            forward_step_func=forward,
            data_iterator=iter(passes),
            model=self._whole,
            num_microbatches=number,
            seq_length=1,  # each micro-batch says its own
            micro_batch_size=1,
            forward_only=not backward,
            p2p_communicator=communicator,
            pg_collection=collection,
        )

    def finish_gradients(self) -> None:
        """Adds up the gradients over the ranks: each has its own part of the sum afterwards."""
        finalize_model_grads([self._whole], pg_collection=self.grid.collection())
        ends = (0, self.grid.stages - 1)
        if not self.tied or self.grid.stages == 1 or self.grid.stage not in ends:
            return
        mine = self.model.shared_embedding_or_output_weight().main_grad
        theirs = torch.empty_like(mine)
        other = dist.get_global_rank(self.grid.pipeline, ends[self.grid.stage == 0])
        sent = [
            dist.P2POp(dist.isend, mine, other, self.grid.pipeline),
            dist.P2POp(dist.irecv, theirs, other, self.grid.pipeline),
        ]
        for one in dist.batch_isend_irecv(sent):
            one.wait()
        mine += theirs

    def drop_gradients(self) -> None:
        """Sets the gradients to 0."""
        self._whole.zero_grad_buffer()

    def gather_parameters(self) -> None:
        """Takes from the other ranks the parts of the parameters that they have updated."""
        self._whole.start_param_sync(force_sync=True)

    def buckets(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[torch.nn.Parameter, int]]]:
        """Yields flat buffers of parameters and of gradients, and where each parameter begins in them."""
        for buffer in (*self._whole.buffers, *self._whole.expert_parallel_buffers):
            for bucket in buffer.buckets:
                starts = {one: buffer.param_index_map[one][0] - bucket.offset for one in bucket.params_list}
                yield bucket.param_data, bucket.grad_data, starts
