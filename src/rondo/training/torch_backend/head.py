"""From hidden states to log-probs, entropies, values and scores of the response positions, logits of one
chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rondo.core.errors import ConfigError, TrainError
from rondo.models.attention import watched
from rondo.models.context import Places
from rondo.models.family import AS_THEY_ARE, LogitTransform
from rondo.models.stored import random_parameters
from rondo.models.value_head import ValueHead
from rondo.planning.memory import keeps_logits
from rondo.platform import on_host, platform_of
from rondo.training.packed import PackedImages, PackedRows
from rondo.training.views import Vocabulary

LM_OUTPUTS = ("log_probs", "entropy", "sum_p_squared", "topk_log_probs", "topk_ids")
VALUE_OUTPUTS = ("values", "scores")
_LARGE_LOGIT = 20.0  # what the largest logit is where a head is tried


def check_outputs(outputs: Iterable[str], *, values: bool) -> None:
    """Raises TrainError for a name that a head does not compute. values: it is a value head."""
    known = VALUE_OUTPUTS if values else LM_OUTPUTS
    for name in outputs:
        if name not in known:
            raise TrainError(f"this model's head computes {', '.join(known)}, not {name!r}")


class TokenHead(torch.nn.Module):
    """From the hidden states of a micro-batch to the per-token outputs [M] of its response positions."""

    def __init__(
        self,
        value_head: ValueHead | None,
        *,
        temperature: float,
        logits_bytes: int | None,
        transform: LogitTransform = AS_THEY_ARE,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        super().__init__()
        self.value_head = value_head  # makes it a critic; the LM's own head is gone then
        self.temperature = temperature
        self.logits_bytes = logits_bytes
        self.transform = transform
        self.vocabulary = vocabulary
        self._adds = False

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the LM's own head, or this rank's part of its vocabulary."""
        raise NotImplementedError

    def outputs_of(
        self, hidden: torch.Tensor, packed: PackedRows, outputs: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        """Returns `outputs`, names out of LM_OUTPUTS or VALUE_OUTPUTS, as the head is, as [M] in at least
        float32. hidden: [N, H], of own tokens where ranks divide them.

        topk_log_probs and topk_ids are wide, [M, K], where `PackedRows.topk` says. values are those before
        each response token, scores those after it (full documents).
        """
        if not outputs:
            return {}
        if packed.documents is not None and packed.documents.context is not None:
            return self._divided(hidden, packed, outputs)
        if self.value_head is not None:
            return self._values(hidden, {name: _where(name, packed) for name in outputs})
        return self._of_logits(hidden, packed.positions, packed.targets, outputs, packed.topk)

    def _divided(
        self, hidden: torch.Tensor, packed: PackedRows, outputs: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        """Computes outputs where ranks divide the tokens: each at its own, then gathered on all of them."""
        places = {name: _who(name, packed) for name in outputs}
        if self.value_head is not None:
            own = self._values(hidden, {name: one.local for name, one in places.items()})
            return {name: places[name].gathered(own[name]) for name in outputs}
        one = places[outputs[0]]  # they are all at the same positions
        # A rank that has none computes one, of which nothing is kept: it takes part in the backward pass.
        at = one.own if len(one.own) else torch.zeros(1, dtype=torch.int64, device=hidden.device)
        local = one.local if len(one.own) else at
        topk = packed.topk[at] if isinstance(packed.topk, torch.Tensor) else packed.topk
        own = self._of_logits(hidden, local, packed.targets[at], outputs, topk)
        return {name: one.gathered(values[: len(one.own)]) for name, values in own.items()}

    def _values(self, hidden: torch.Tensor, where: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self.value_head is not None
        every = torch.cat(list(where.values()))  # one call: FSDP gathers per call
        parts = self.value_head(hidden.index_select(0, every)).split([len(one) for one in where.values()])
        return {name: part.clone() for name, part in zip(where, parts, strict=True)}  # views upset FSDP

    def _of_logits(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        outputs: tuple[str, ...],
        topk: torch.Tensor | int | None,
    ) -> dict[str, torch.Tensor]:
        weight, bias = self.weight_and_bias()
        return token_log_probs(
            hidden.index_select(0, positions),
            weight,
            bias,
            targets,
            outputs,
            topk=topk,
            transform=self.transform,
            temperature=self.temperature,
            chunk_bytes=self.logits_bytes,
            vocabulary=self.vocabulary,
            adds=self._adds and weight.requires_grad,
        )


class TokenModel(TokenHead):
    """Joins a causal LM and a head; one forward gives the per-token outputs [M] of a micro-batch's response
    positions.
    """

    def __init__(self, lm: PreTrainedModel, value_head: ValueHead | None, **settings: Any) -> None:
        """settings: of `TokenHead`."""
        super().__init__(value_head, **settings)
        del self.value_head  # behind the model: checkpoints have counters in the parameters' order
        self.lm = lm
        self.value_head = value_head
        self._checked = False

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `TokenHead.weight_and_bias`."""
        head = self.lm.get_output_embeddings()
        return head.weight, head.bias

    def add_gradients(self) -> None:
        """From now on the backward pass adds the gradients of the head's weight and of the input embeddings
        to their `grad` itself: on a CPU, of what is plain and in float32 or float64.
        """
        self._adds = True
        _adding_lookup(self.lm.get_input_embeddings())

    def forward(self, packed: PackedRows, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Returns what `outputs_of` does. Raises TrainError for a name that is not among them.

        Without outputs only the hidden states are computed, for what is watched on the way (`Routing`).
        """
        check_outputs(outputs, values=self.value_head is not None)
        hidden = self._hidden(packed) if self._checked else self._first_hidden(packed)
        return self.outputs_of(hidden, packed, outputs)

    def _hidden(self, packed: PackedRows) -> torch.Tensor:
        extra: Mapping[str, Any] = {} if packed.documents is None else {"documents": packed.documents}
        input_ids, position_ids = packed.input_ids, packed.position_ids
        seen: slice | None = None
        if packed.documents is not None and packed.documents.context is not None:
            own = packed.documents.context.own(len(input_ids))
            if packed.images is not None:
                shown = input_ids == self.lm.config.image_token_id
                seen = slice(int(shown[: own.start].sum()), int(shown[: own.stop].sum()))
            input_ids, position_ids = input_ids[own], position_ids[..., own]
        trunk = _trunk(self.lm)
        given: dict[str, Any] = {"input_ids": input_ids[None]}
        if packed.images is not None:
            features, unread = _image_features(trunk, packed.images, seen)
            if unread is None:
                given |= features
            else:
                # Into the first block, as the features elsewhere: gradients are reduced in the order in which
                # they come, which must be the same on all ranks.
                given = {"inputs_embeds": self.lm.get_input_embeddings()(input_ids[None]) + unread}
        hidden: torch.Tensor = trunk(
            **given, position_ids=position_ids[..., None, :], use_cache=False, **extra
        ).last_hidden_state[0]
        return hidden

    def _first_hidden(self, packed: PackedRows) -> torch.Tensor:
        """Computes hidden states for the first time. Raises ConfigError where a layer sees more than its own
        document.
        """
        with watched() as seen:
            hidden = self._hidden(packed)
        config = self.lm.config
        expected = int(config.get_text_config().num_hidden_layers)
        if packed.documents is not None and len(seen) != expected:
            raise ConfigError(
                f"only {len(seen)} of the {expected} layers of this {config.model_type} model attend through "
                "transformers' attention interface; the others would mix the documents of a pass, so rondo "
                "cannot train it: choose another model (docs/models.md has the families that work)"
            )
        self._checked = True
        return hidden


def _image_features(
    trunk: Any, images: PackedImages, seen: slice | None
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Returns what the model's forward takes of a pass's images, each distinct one computed once, in the
    order of their tokens; or, where this rank has none of these, a 0 that ties it to the loss. seen: which of
    these tokens this rank has; None: all.
    """
    places = images.family.features(trunk, images.pixels, images.grids)
    ordered = [[place[one] for one in images.order] for place in places]
    if seen is not None and images.order:
        ordered = [[torch.cat(place)[seen]] for place in ordered]
    if not any(len(one) for one in ordered[0]):
        return {}, torch.stack([place[0].sum() for place in places]).sum() * 0.0
    return images.family.given(ordered), None


def _trunk(lm: PreTrainedModel) -> torch.nn.Module:
    """What makes the hidden states. (Llama 4's class calls it `model`, and its base model another name.)"""
    trunk: torch.nn.Module = lm.model if lm.base_model is lm else lm.base_model
    return trunk


def _where(output: str, packed: PackedRows) -> torch.Tensor:
    """Returns the positions [M] of an output: scores come after each response token, all else before it."""
    if output != "scores":
        return packed.positions
    assert packed.after is not None, "scores need full documents"
    return packed.after


def _who(output: str, packed: PackedRows) -> Places:
    """Returns which rank has each of these positions."""
    places = packed.places_after if output == "scores" else packed.places
    assert places is not None
    return places


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    outputs: Sequence[str] = ("log_probs",),
    *,
    topk: torch.Tensor | int | None = None,
    transform: LogitTransform = AS_THEY_ARE,
    temperature: float = 1.0,
    chunk_bytes: int | None = 512 << 20,
    vocabulary: Vocabulary | None = None,
    adds: bool = False,
) -> dict[str, torch.Tensor]:
    """Computes what `outputs` names of p = softmax(z / temperature), z = transform(hidden · weightᵀ + bias).

    hidden [M, H], weight [V, H], targets int64 [M]. log_probs [M]: log p[target]. entropy [M]. sum_p_squared
    [M]: Σ p², not differentiable. topk_log_probs [M, K]: log p[topk]; topk_ids [M, K]: those ids, int32;
    topk: ids [M, K], or how many of the likeliest (descending). All but ids in float32 (float64 for float64
    inputs). Logits of at most `chunk_bytes`, or of one position, are computed at one time, and again in the
    backward pass, unless all of them together are few enough to be kept (`planning.memory.keeps_logits`).
    chunk_bytes None: no logits are in memory (`fused_head`); CUDA, not in float64, and no topk_*.
    vocabulary: ranks with the same inputs that each have a part of weight and bias, as DTensors: those of
    some tokens. adds: the backward pass adds the gradient of the weight, a leaf, to its `grad` itself.
    """
    if topk is None and {"topk_log_probs", "topk_ids"} & set(outputs):
        raise TrainError(
            "topk_log_probs needs ids: the column teacher_topk_ids, or how many of the likeliest"
        )
    wide_outputs = [name for name in outputs if name.startswith("topk")]
    if chunk_bytes is None and wide_outputs:
        raise TrainError(f"logits_bytes=null: its kernels compute no {wide_outputs[0]}; set it to bytes")
    if isinstance(weight, DTensor):  # this rank's part of it
        weight, bias = weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias
    if chunk_bytes is None:
        from rondo.training.torch_backend.fused_head import fused_log_probs  # needs triton

        fused = fused_log_probs(hidden, weight, bias, targets, transform, temperature, vocabulary)
        return {name: fused[name] for name in outputs}
    wanted = "entropy" in outputs, "sum_p_squared" in outputs
    given = targets.new_empty(len(targets), 0) if topk is None else topk
    wide = torch.promote_types(hidden.dtype, torch.float32)
    # Of the largest part, so that ranks which share a vocabulary cut the same chunks.
    tokens = len(weight) if vocabulary is None else -(-vocabulary.size // vocabulary.ranks)
    row_bytes = tokens * wide.itemsize
    chunk = max(1, chunk_bytes // row_bytes)
    chunk = -(-len(targets) // -(-len(targets) // chunk))  # equal ones: a short last one multiplies slowly
    kept_bytes = len(targets) * row_bytes * (1 if transform.softcap is None else 2)
    keep = torch.is_grad_enabled() and keeps_logits(kept_bytes, chunk_bytes)
    head = Head(transform, temperature, chunk, keep, vocabulary, adds)
    results = _TokenLogProbs.apply(hidden, weight, bias, targets, given, head, wanted)
    named: dict[str, torch.Tensor] = dict(zip(LM_OUTPUTS, results, strict=True))
    return {name: named[name] for name in outputs}


class Head(NamedTuple):
    """How logits are made and handled."""

    transform: LogitTransform
    """The scale and soft-cap of the model's logits."""
    temperature: float
    """Logits are divided by it."""
    chunk: int
    """Positions whose logits are computed at one time."""
    keep: bool
    """Until the backward pass, which otherwise computes them again."""
    vocabulary: Vocabulary | None = None
    """The ranks that share out the tokens; None: all are here."""
    adds: bool = False
    """The backward pass adds the gradient of the weight to its `grad` itself."""


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: Head
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns log p of this rank's tokens, [M, V], in at least float32, and where there is a soft-cap the
    tanh.
    """
    logits, tanh = _product(hidden, weight.mT), None
    if bias is not None:
        logits += bias
    if head.transform.scale != 1.0:
        logits *= head.transform.scale
    if head.transform.softcap is not None:
        tanh = logits.div_(head.transform.softcap).tanh_()
        logits = tanh * head.transform.softcap
    if head.temperature != 1.0:
        logits /= head.temperature
    if head.vocabulary is not None:
        return head.vocabulary.log_softmax(logits), tanh
    if on_host(logits.device):  # its kernel reads a row before it writes it: no second copy
        return torch._log_softmax(logits, -1, False, out=logits), tanh  # type: ignore[call-overload]
    return torch.log_softmax(logits, -1), tanh


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns left · right in at least float32; half-precision products are summed and kept in float32."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == wide:
        return left @ right
    if platform_of(left.device).wide_products:
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


class _TokenLogProbs(torch.autograd.Function):
    """Computes LM_OUTPUTS, of which those that are not wanted are empty, without keeping all logits.

    ∂logp_t/∂z = onehot - p;  ∂H/∂z = -p (log p + H);  ∂z/∂product = (1 - tanh²) · scale / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        topk: torch.Tensor | int,
        head: Head,
        wanted: tuple[bool, bool],
    ) -> tuple[torch.Tensor, ...]:
        want_entropy, want_squares = wanted
        picked, entropies, squares, wide, ids = [], [], [], [], []
        pick, likeliest = _pick, _likeliest
        if head.vocabulary is not None:
            pick, likeliest = head.vocabulary.pick, head.vocabulary.likeliest
        ctx.kept = {}  # start of a chunk -> its log-probs of all tokens and tanh, where they are kept
        for start in range(0, len(targets), head.chunk):
            part = slice(start, start + head.chunk)
            log_softmax, tanh = _log_softmax(hidden[part], weight, bias, head)
            picked.append(pick(log_softmax, targets[part, None]).squeeze(1))
            if want_entropy:
                entropies.append(log_softmax.exp().mul_(log_softmax).sum(-1).neg_())
            if want_squares:
                squares.append((2 * log_softmax).exp_().sum(-1))
            if isinstance(topk, int):
                ids.append(likeliest(log_softmax, topk))
            else:
                ids.append(topk[part].long())
            wide.append(pick(log_softmax, ids[-1]))
            if head.keep:
                ctx.kept[start] = log_softmax, tanh
            del log_softmax, tanh  # before the next chunk's logits
        empty = picked[0].new_empty
        entropy = torch.cat(entropies) if want_entropy else empty(0)
        sum_p_squared = torch.cat(squares) if want_squares else empty(0)
        if head.vocabulary is not None:
            entropy, sum_p_squared = map(head.vocabulary.sum, (entropy, sum_p_squared))
        topk_ids = torch.cat(ids)
        narrow_ids = topk_ids.int()
        # What the backward pass cannot compute again cheaply: the inputs, and of the outputs entropy, which
        # is in its own derivative, and topk's ids, as int64, by which gradients are scattered.
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, topk_ids)
        ctx.head = head
        ctx.leaf = weight if head.adds else None  # itself: what is saved may come back as another tensor
        ctx.set_materialize_grads(False)  # an entropy that is only measured has no gradient, and costs none
        ctx.mark_non_differentiable(sum_p_squared, narrow_ids)
        return torch.cat(picked), entropy, sum_p_squared, torch.cat(wide), narrow_ids

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, topk_ids = ctx.saved_tensors
        head: Head = ctx.head
        grad_picked, grad_entropy, _, grad_wide, _ = grads
        like = {"dtype": torch.promote_types(hidden.dtype, torch.float32), "device": hidden.device}
        grad_picked = torch.zeros(targets.shape, **like) if grad_picked is None else grad_picked
        grad_wide = torch.zeros(topk_ids.shape, **like) if grad_wide is None else grad_wide
        add = _add if head.vocabulary is None else head.vocabulary.add
        grad_hidden = torch.empty_like(hidden)
        grad_weight: torch.Tensor | None = ctx.leaf.grad if head.adds else None
        grad_bias: torch.Tensor | None = None
        for start in range(0, len(targets), head.chunk):
            part = slice(start, start + head.chunk)
            # Taken out, and then written into: a second backward pass computes them again.
            kept = ctx.kept.pop(start, None)
            log_softmax, tanh = kept or _log_softmax(hidden[part], weight, bias, head)
            # Every onehot's gradient also falls on all of p, as -p times it.
            onto_all = grad_picked[part, None] + grad_wide[part].sum(1, keepdim=True)
            if grad_entropy is None:
                grad = log_softmax.exp_().mul_(-onto_all)
            else:
                grad = log_softmax.exp()
                factor = log_softmax.add_(entropy[part, None]).mul_(grad_entropy[part, None])
                grad.mul_(factor.add_(onto_all).neg_())
            add(grad, targets[part, None], grad_picked[part, None])
            add(grad, topk_ids[part], grad_wide[part])
            if head.temperature != 1.0:
                grad.div_(head.temperature)
            if tanh is not None:
                grad.mul_(tanh.square_().neg_().add_(1))
            if head.transform.scale != 1.0:
                grad.mul_(head.transform.scale)
            narrow = grad.to(weight.dtype)
            torch.mm(narrow, weight, out=grad_hidden[part])
            if not ctx.needs_input_grad[1]:
                pass
            elif grad_weight is None:
                grad_weight = _product(narrow.mT, hidden[part])
            elif grad_weight.dtype == narrow.dtype:
                grad_weight.addmm_(narrow.mT, hidden[part])
            else:
                grad_weight.add_(_product(narrow.mT, hidden[part]))
            if bias is not None:
                onto_bias = grad.sum(0)
                grad_bias = onto_bias if grad_bias is None else grad_bias.add_(onto_bias)
            del kept, log_softmax, tanh, grad, narrow  # before the next chunk's logits
        if head.vocabulary is not None:
            head.vocabulary.sum(grad_hidden)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        if head.adds:  # a gradient that autograd adds stands beside the sum until then
            ctx.leaf.grad, grad_weight = grad_weight, None
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        # One for each argument of `forward`: targets and all that follow have none.
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


class _AddingLookup(torch.autograd.Function):
    """Looks rows up, and adds their gradients to the `grad` of the weight, a leaf. Autograd would make a
    gradient of all rows, zeros but for a few, and add all of it.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # itself: what is saved may come back as another tensor
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        weight, (ids,) = ctx.weight, ctx.saved_tensors
        rows, places = ids.unique(return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(grads[0], places, len(rows), -1, False)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, rows, sums)
        return None, None


def _adding_lookup(embeddings: torch.nn.Module) -> None:
    """Has plain embeddings that learn look up by `_AddingLookup`; others stay as they are."""
    if type(embeddings) is not torch.nn.Embedding or not embeddings.weight.requires_grad:
        return
    plain = (embeddings.max_norm, embeddings.scale_grad_by_freq, embeddings.sparse, embeddings.padding_idx)
    if plain == (None, False, False, None):
        given = embeddings.forward

        def forward(ids: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return given(ids)
            looked_up: torch.Tensor = _AddingLookup.apply(embeddings.weight, ids)
            return looked_up

        embeddings.forward = forward


def _pick(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return values.gather(1, ids)


def _likeliest(log_probs: torch.Tensor, k: int) -> torch.Tensor:
    return log_probs.topk(k, -1).indices


def _add(values: torch.Tensor, ids: torch.Tensor, addends: torch.Tensor) -> None:
    values.scatter_add_(1, ids, addends)


def check_fused(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where log-probs cannot be computed without logits in memory (`fused_head`)."""
    key, why = "logits_bytes", platform_of(device).why_no_triton(dtype)
    if why:
        raise ConfigError(f"{key}=null: {why}; or set it to bytes (536870912)", key=key)


class _Hidden:
    """Stands in the place of a base model's output: hidden states and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, _: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


@torch.no_grad()
def check_head(lm: PreTrainedModel, transform: LogitTransform) -> None:
    """Raises ConfigError where a model's logits are not what `token_log_probs` makes of its output head: each
    log-prob would be wrong, and nothing would tell.

    Tried on random hidden states that are long enough for scales and soft-caps to be seen; with random
    weights where the head's are not read yet.
    """
    head = lm.get_output_embeddings()
    with random_parameters(head):
        differs = _differs(lm, head, transform)
    if differs:
        raise ConfigError(
            f"a {lm.config.model_type} model changes its logits after the output head in a way that rondo "
            "does not know, so that its log-probs would be wrong; choose another model (docs/models.md has "
            "the families that work)"
        )


def _differs(lm: PreTrainedModel, head: Any, transform: LogitTransform) -> bool:
    """Says whether the model makes other log-probs of hidden states than `_log_softmax` does."""
    base = _trunk(lm)
    hidden = torch.randn(4, head.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(head.weight)
    largest = _product(hidden, head.weight.mT).abs().amax(1, keepdim=True)
    # Scaled up, so that a soft-cap shows; at least 1e-6, since a new head may be all zeros.
    hidden *= (_LARGE_LOGIT / largest.clamp_min(1e-6)).to(hidden.dtype)
    base.forward = lambda *_, **__: _Hidden(hidden[None])
    try:
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        theirs = lm(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        del base.forward
    ours, _ = _log_softmax(hidden, head.weight, head.bias, Head(transform, 1.0, len(hidden), keep=False))
    tolerance = 1e-3 if hidden.dtype.itemsize >= 4 else 0.25
    return bool((theirs.log_softmax(-1) - ours).abs().max() > tolerance)
