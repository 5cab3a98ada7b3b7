"""What a layer of Megatron's is made of here: Megatron's products and dispatchers, and around them the
attention, norms, routers and experts of rondo and transformers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from transformers import PreTrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from rondo.core.errors import ConfigError
from rondo.models.attention import varlen_attention
from rondo.models.documents import Documents
from rondo.models.lora import AdapterSet
from rondo.training.megatron.families import FACTORS, TensorPiece, pieces_of
from rondo.training.torch_backend.routing import Again


@dataclasses.dataclass
class PassFacts(PackedSeqParams):
    """What layers have to know of a micro-batch. It travels by closure where layers are computed again."""

    documents: Documents | None = None
    """Which tokens see each other."""
    rotary_scale: float = 1.0
    """What cosines and sines of positions are multiplied with (YaRN)."""
    again: Again = contextlib.nullcontext
    """Surrounds a layer, whenever it is computed: has its router know the pass."""


class _Layer(TransformerLayer):
    """One whose router knows which pass it is in, also where the layer is computed again."""

    def forward(self, *arguments: Any, packed_seq_params: PassFacts, **other: Any) -> Any:
        """See `TransformerLayer.forward`."""
        with packed_seq_params.again():
            return super().forward(*arguments, packed_seq_params=packed_seq_params, **other)


class _Router(torch.nn.Module):
    """A layer's router of transformers, whose choice is handed on as Megatron's dispatchers want it."""

    def __init__(
        self, gate: torch.nn.Module, device: torch.device, *, config: TransformerConfig, **_: Any
    ) -> None:
        super().__init__()
        self.gate = _empty_like(gate, config.params_dtype, device)
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

    def __init__(
        self,
        number: int,
        config: TransformerConfig,
        *,
        like: torch.nn.Module,
        device: torch.device,
        **_: Any,
    ) -> None:
        super().__init__()
        self.own = _empty_like(like, config.params_dtype, device, number)
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


def _empty_like(
    module: torch.nn.Module, dtype: torch.dtype, device: torch.device, first: int | None = None
) -> torch.nn.Module:
    """Returns a module of transformers with parameters and buffers of its own, with nothing in them. first:
    how many of its experts it has.
    """
    own = copy.copy(module)
    own._modules = dict(module._modules)  # adapters come to one of them
    if first is not None:
        own.num_experts = first  # type: ignore[assignment]
    own._parameters = {
        name: None if one is None else torch.nn.Parameter(one.new_empty(shape, dtype=dtype, device=device))
        for name, one in module._parameters.items()
        for shape in [() if one is None else (first or len(one), *one.shape[1:])]
    }
    own._buffers = {
        name: None if one is None else torch.zeros_like(one, device=device)
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
        packed_seq_params: PassFacts,
        **other: Any,
    ) -> torch.Tensor:
        """query [N, 1, heads, D], key and value [N, 1, groups, D] -> [N, 1, heads · D]."""
        states = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        out = varlen_attention(self, *states, documents=packed_seq_params.documents)[0]
        return out.reshape(len(query), 1, -1)


class Norm(torch.nn.Module):
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


class _LatentAttention(torch.nn.Module):
    """DeepSeek's (MLA, arXiv:2405.04434, §2.1): keys and values come of a few numbers of each token, which a
    tensor rank computes for its own tokens; what comes of them has its own heads of all tokens. (Megatron's
    own counts positions from the start of a pass, and asks its global state for groups.)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        like: Any,
        device: torch.device,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__()
        self._tensor = pg_collection.tp if config.sequence_parallel else None
        self._latent, self._scaling = int(like.kv_lora_rank), float(like.scaling)
        self._plain, self._turned = int(like.qk_nope_head_dim), int(like.qk_rope_head_dim)
        self._turn = apply_rotary_pos_emb_interleave if like.config.rope_interleave else apply_rotary_pos_emb
        self._again = config.recompute_granularity == "selective"

        def whole(linear: torch.nn.Linear) -> torch.nn.Module:
            own = _empty_like(linear, config.params_dtype, device)
            own.weight.sequence_parallel = config.sequence_parallel  # type: ignore[union-attr]
            return own

        def norm(theirs: Any) -> Norm:
            return Norm(config, len(theirs.weight), theirs.variance_epsilon)

        def product(kind: Any, linear: torch.nn.Linear, **settings: Any) -> Any:
            return kind(
                linear.in_features,
                linear.out_features,
                config=config,
                init_method=config.init_method,
                bias=False,
                tp_group=pg_collection.tp,
                **settings,
            )

        columns, rows = _products(config)
        by_columns = functools.partial(product, columns, gather_output=False)
        if like.q_a_proj is None:
            self.q_proj = by_columns(like.q_proj)
        else:
            self.q_a_proj, self.q_a_layernorm = whole(like.q_a_proj), norm(like.q_a_layernorm)
            self.q_b_proj = by_columns(like.q_b_proj)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = (
            whole(like.kv_a_proj_with_mqa),
            norm(like.kv_a_layernorm),
        )
        self.kv_b_proj = by_columns(like.kv_b_proj)
        self.o_proj = product(rows, like.o_proj, input_is_parallel=True, skip_bias_add=True)

    def forward(
        self,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PassFacts,
        **other: Any,
    ) -> tuple[torch.Tensor, None]:
        """states [n, 1, H] of own tokens, angles [N, 1, 1, D] of all -> [n, 1, H]."""
        if hasattr(self, "q_proj"):
            query = self.q_proj(states)[0]
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(states)))[0]
        latent, shared = self.kv_a_proj_with_mqa(states).split([self._latent, self._turned], -1)
        if self._tensor is not None:
            # All heads have this part of their keys: its gradient is added up over the ranks, too.
            shared = gather_from_sequence_parallel_region(shared, True, self._tensor)
        tokens = len(query)
        query = query.view(1, tokens, -1, self._plain + self._turned).transpose(1, 2)
        known = self.kv_b_proj(self.kv_a_layernorm(latent))[0]
        known = known.view(1, tokens, query.shape[1], -1).transpose(1, 2)
        key, value = known[..., : self._plain], known[..., self._plain :]
        scale, angles = packed_seq_params.rotary_scale, rotary_pos_emb.view(1, tokens, -1)
        cos, sin = ((of * scale).to(query.dtype) for of in (angles.cos(), angles.sin()))
        turned, shared = self._turn(query[..., self._plain :], shared.view(1, 1, tokens, -1), cos, sin)
        query = torch.cat([query[..., : self._plain], turned], -1)
        key = torch.cat([key, shared.expand(-1, key.shape[1], -1, -1)], -1)

        def attend(*states: torch.Tensor) -> torch.Tensor:
            documents = packed_seq_params.documents
            return varlen_attention(self, *states, documents=documents, scaling=self._scaling)[0]

        out = checkpoint(attend, False, query, key, value) if self._again else attend(query, key, value)
        return self.o_proj(out.reshape(out.shape[1], 1, -1))


def _products(config: TransformerConfig) -> tuple[Any, Any]:
    """Returns what products are that are cut by columns, and by rows: Megatron's own, or those of Transformer
    Engine, whose parameters have the same names.
    """
    if config.transformer_impl == "local":
        return ColumnParallelLinear, RowParallelLinear
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    return TEColumnParallelLinear, TERowParallelLinear


def layer_of(like: Any, config: TransformerConfig, device: torch.device) -> ModuleSpec:
    """Says what a layer is made of. like: as transformers has it."""
    mlp = like.mlp
    experts = config.num_moe_experts if hasattr(mlp, "experts") else None
    layer = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.module, own = _Layer, layer.submodules
    own.input_layernorm = own.pre_mlp_layernorm = Norm
    columns, rows = _products(config)
    if hasattr(like.self_attn, "kv_lora_rank"):
        own.self_attention = ModuleSpec(_LatentAttention, params={"like": like.self_attn, "device": device})
    else:
        attention = own.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = columns, rows
        attention.core_attention = _Attention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    dense = own.mlp
    if experts is not None:
        of_mixture = own.mlp.submodules
        of_mixture.router = functools.partial(_Router, mlp.gate, device)
        of_mixture.experts = ModuleSpec(_Experts, params={"like": mlp.experts, "device": device})
        dense = of_mixture.shared_experts
    dense.submodules.linear_fc1, dense.submodules.linear_fc2 = columns, rows
    return layer


# ---- adapters ----
#
# Where A and B of a product lie, and which gradients are added up over tensor ranks:
#
#     cut by columns    A whole, of a rank's own tokens; A x of all tokens; B of its own outputs
#     cut by rows       A of the rank's own inputs; A x added up, of own tokens; B whole
#     not cut           both whole, of own tokens
#
# A product of Megatron's may be several of a checkpoint's (q, k and v): each has adapters of its own.


class Switch:
    """Whether a stage computes with its adapters."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is the one without them, bit for bit."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class _Factors(torch.nn.Module):
    """A and B of one of a checkpoint's weights, as far as this rank has them."""

    def __init__(
        self,
        weight: torch.Tensor,  # the rank's own of the product
        piece: TensorPiece,
        adapters: AdapterSet,
        tensor: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        outputs = piece.view(weight).numel() // weight.shape[1]
        made = functools.partial(torch.empty, dtype=weight.dtype, device=weight.device)
        self.a = torch.nn.Parameter(made(adapters.rank, weight.shape[1]))
        self.b = torch.nn.Parameter(made(outputs, adapters.rank))
        self._piece, self._scaling = piece, adapters.alpha / adapters.rank
        self._tensor = tensor if dist.get_world_size(tensor) > 1 else None
        # Of these a rank has the gradients of its own tokens.
        for one, cut_along in ((self.a, 1), (self.b, 0)):
            one.sequence_parallel = self._tensor is not None and piece.cut != cut_along  # type: ignore[attr-defined]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns alpha / r · B A x, [N, 1, one weight's outputs], of the product's states [n, 1, in]."""
        low = torch.nn.functional.linear(states, self.a)
        if self._tensor is not None and self._piece.cut == 0:
            low = gather_from_sequence_parallel_region(low, True, self._tensor)
        elif self._tensor is not None and self._piece.cut == 1:
            low = reduce_scatter_to_sequence_parallel_region(low, self._tensor)
        return torch.nn.functional.linear(low, self.b) * self._scaling

    def put(self, added: torch.Tensor, out: torch.Tensor) -> None:
        """Adds what `forward` returns where the product, [N, 1, its outputs], has these outputs."""
        seen = self._piece.view(out.view(-1, out.shape[-1]).t())
        seen += added.view(-1, added.shape[-1]).t().view(seen.shape)


def adapt(
    chunk: torch.nn.Module,
    offset: int,
    model: PreTrainedConfig,
    adapters: AdapterSet,
    tensor: dist.ProcessGroup,
    switch: Switch,
) -> None:
    """Puts adapters, without numbers yet, beside the products of a stage's chunk. offset: of its layers."""
    for name, module in list(chunk.named_modules()):
        weight = getattr(module, "weight", None)
        pieces = dict(enumerate(pieces_of(f"{name}.weight", offset, model)))
        own = {number: piece for number, piece in pieces.items() if piece.name in adapters.by_weight}
        if not own:
            continue
        assert isinstance(weight, torch.Tensor)
        if getattr(module, "explicit_expert_comm", False) or getattr(module, "parallel_mode", "") is None:
            raise ConfigError(
                "actor.backend.options.moe_shared_expert_overlap: adapters (lora) of shared experts are not "
                "computed beside the dispatcher; remove it",
                key="actor.backend.options.moe_shared_expert_overlap",
            )
        factors = {str(number): _Factors(weight, piece, adapters, tensor) for number, piece in own.items()}
        module.add_module(FACTORS, torch.nn.ModuleDict(factors))
        module.forward = functools.partial(_forward, module.forward, list(factors.values()), switch)


def _forward(
    plain: Callable[..., Any],
    factors: list[_Factors],
    switch: Switch,
    states: torch.Tensor,
    *arguments: Any,
    **settings: Any,
) -> Any:
    found = plain(states, *arguments, **settings)
    if not switch.is_on:
        return found
    out, *rest = found if isinstance(found, tuple) else (found,)
    added = torch.zeros_like(out)  # into what a collective made autograd lets nobody write
    for one in factors:
        one.put(one(states), added)
    return (out + added, *rest) if isinstance(found, tuple) else out + added
