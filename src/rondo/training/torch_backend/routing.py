"""What a mixture's training asks of its routers: how many tokens go to which expert, a loss that balances
them, and biases that do so without one.

With count_i the tokens of T that chose expert i among their k, and p_ti a token's affinity to it, a layer's
balancing loss is E Σ_i (count_i / kT) (Σ_t p_ti / T): 1 where all experts get as many. The layers' are added.

    sequence     counted in each row by itself; the mean over the rows of the mini-batch
                 (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20)
    mini_batch   over all tokens of the mini-batch, on all ranks (arXiv:2501.11873)

Counts have no gradient. The loss's enters where the layer's weights are, so that nothing of a layer outlives
its backward pass, and checkpointing computes it again like all else.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rondo.config.schema import ActorRouterConfig, RouterConfig
from rondo.core.errors import ConfigError
from rondo.core.types import RouteShape
from rondo.models.context import Context, to_device
from rondo.models.routers import (
    ExpertRouter,
    Told,
    affinities,
    routers_of,
    shape_of_routes,
    why_not_replayed,
)
from rondo.training.backend import ExpertLoad
from rondo.training.packed import PackedRows
from rondo.training.torch_backend.activations import TILE_START
from rondo.training.views import Views


@dataclass(frozen=True)
class Parts:
    """The ranks that have the same rows and other tokens of them."""

    axes: tuple[Context, ...] = ()
    """Along which tokens are divided, one after the other."""

    @property
    def size(self) -> int:
        """Returns how many ranks there are."""
        return math.prod(axis.size for axis in self.axes)

    def own(self, num_tokens: int) -> slice:
        """Returns which of a pass's tokens, a multiple of `size`, this rank has."""
        start = 0
        for axis in self.axes:
            part = axis.own(num_tokens)
            start, num_tokens = start + part.start, part.stop - part.start
        return slice(start, start + num_tokens)

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        """Adds up what each rank has of its tokens, in place."""
        for axis in self.axes:
            dist.all_reduce(numbers, group=axis.group)
        return numbers

    def all_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """[N / size, …] of own tokens -> [N, …] on every rank."""
        for axis in reversed(self.axes):
            parts = [torch.empty_like(own) for _ in range(axis.size)]
            dist.all_gather(parts, own.contiguous(), group=axis.group)
            own = torch.cat(parts)
        return own


class Recorder(Protocol):
    """Gets the routes of each pass."""

    def add(self, packed: PackedRows, routes: torch.Tensor) -> None:
        """Adds those of a pass: int64 [N, W], of all its tokens."""


Again = Callable[[], AbstractContextManager[None]]
Around = Callable[[PackedRows], AbstractContextManager[Again]]


def around_passes(routing: Routing | None, **what: Any) -> Around:
    """Returns what has a mixture's routers know of each pass: see `Routing.during`. routing: None: of a model
    without.
    """
    if routing is None:
        return lambda packed: contextlib.nullcontext(contextlib.nullcontext)
    return functools.partial(routing.during, **what)


class Routing:
    """Watches the routers of one model."""

    def __init__(
        self,
        # Of all layers: those that are on meta are another pipeline stage's.
        routers: Sequence[ExpertRouter],
        model_type: str,
        config: RouterConfig,
        views: Views,
        # Where the model computes.
        device: torch.device,
        # How tokens are divided: ranks along an axis that is not in it have the same ones.
        parts: Parts,
    ) -> None:
        self.routers = routers
        self._model_type = model_type
        self._config = config
        self._views = views
        self._device = device
        self._parts = parts
        self._pass: _Pass | None = None
        self._num_rows: float | torch.Tensor = 0.0
        # Of the whole mini-batch, once known; [layers, E].
        self._known: torch.Tensor | None = None
        for layer, router in enumerate(self.routers):
            router.module.forward = functools.partial(self._route, layer, router.module.forward)
        self._start()

    @classmethod
    def of(
        cls, lm: PreTrainedModel, config: RouterConfig, views: Views, device: torch.device
    ) -> Routing | None:
        """Returns what watches this model's routers from now on; None: it has none."""
        routers, model_type = routers_of(lm), lm.config.get_text_config().model_type
        parts = Parts(() if views.context is None else (views.context,))
        return cls(routers, model_type, config, views, device, parts) if routers else None

    @property
    def routes(self) -> RouteShape:
        """Returns what the routes of the model are."""
        return shape_of_routes(self.routers)

    def _start(self) -> None:
        """Forgets what was counted."""
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=self._device)
        self._counts = zeros(len(self.routers), self.routers[0].num_experts)
        self._balance = zeros(())
        # Of passes with routes: assignments that would have been others, those that were told, and all.
        self._told = zeros(3)

    # ---- what the engine says ----

    def begin(self, num_rows: int, ahead: Callable[[Around], None]) -> None:
        """Begins a mini-batch, of which this rank has so many rows that have passes. ahead: goes forward
        through its passes, so surrounded, where the loss that balances has to know all their tokens first.
        Collective.
        """
        self._known, self._num_rows = None, num_rows
        if self._config.balance is not None and self._config.balance.over == "sequence":
            rows = torch.tensor(num_rows, dtype=torch.float64, device=self._device)
            dist.all_reduce(rows, group=self._views.everyone)
            sizes = self._views.sizes
            # These have the same rows.
            self._num_rows = rows / (sizes.tensor * sizes.context * sizes.pipeline)
        if self._counts_first:
            with torch.no_grad():
                ahead(functools.partial(self.during, counts=True))
            self._known = self._of_all_ranks(self._counts)
            self._start()

    @property
    def _counts_first(self) -> bool:
        balance = self._config.balance
        return balance is not None and balance.over == "mini_batch"

    @contextlib.contextmanager
    def during(
        self, packed: PackedRows, *, counts: bool = False, recorded: Recorder | None = None
    ) -> Iterator[Again]:
        """Surrounds one pass, a forward and perhaps its backward pass, over these rows; routers choose what
        the rows' routes say. counts: it is a part of an update. recorded: gets the routes.

        Yields what surrounds layers that are computed again after it has ended.
        """
        if not counts and recorded is None and packed.routes is None:
            yield contextlib.nullcontext
            return
        here = _Pass(packed, self._parts, counts=counts)
        with self._in_pass(here):
            yield functools.partial(self._in_pass, here)
        if counts:
            for (layer, _), seen in here.seen.items():
                self._counts[layer] += seen.counts
                self._balance += seen.balance
                self._told += seen.told
        if recorded is not None:
            recorded.add(packed, here.routes(self.routers))

    @contextlib.contextmanager
    def _in_pass(self, here: _Pass) -> Iterator[None]:
        before, self._pass = self._pass, here
        try:
            yield
        finally:
            self._pass = before

    def finish(self, *, skipped: bool) -> ExpertLoad | None:
        """Ends an optimizer step: moves the biases, unless it was skipped, and says what was counted since
        the last one; None: nothing. Collective.
        """
        counts = self._of_all_ranks(self._counts)
        mean = counts.mean(1, keepdim=True)
        largest = (counts.amax(1) / mean.squeeze(1).clamp_min(1)).mean()
        idle = (counts == 0).double().mean()
        balance, told = self._of_all_ranks(self._balance), self._of_all_ranks(self._told)
        numbers = torch.stack([counts.sum(), largest, idle, balance, *told]).tolist()  # one read
        if not numbers[0]:
            return None
        if self._config.bias_speed and not skipped:
            for router, more in zip(self.routers, (mean - counts).sign(), strict=True):
                bias = router.bias
                assert bias is not None
                bias += self._config.bias_speed * more.to(bias)
        self._start()
        _, most, without, loss, others, replayed, assignments = numbers
        return ExpertLoad(
            most,
            without,
            None if self._config.balance is None else loss / len(self.routers),
            replayed / assignments if assignments else None,
            others / replayed if replayed else None,
        )

    def _of_all_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        """Adds up what ranks have of their tokens."""
        total = numbers.clone()
        dist.all_reduce(total, group=self._views.everyone)
        sizes = self._views.sizes
        return total / (sizes.tensor * sizes.context // self._parts.size)  # so many have the same tokens

    # ---- inside the model ----

    def _route(self, layer: int, forward: Callable[..., Any], *arguments: torch.Tensor) -> Any:
        here, router, start = self._pass, self.routers[layer], TILE_START.get()
        if here is None or start is None:
            return forward(*arguments)
        # Of the tokens that the router gets here: all, or those of a tile.
        tokens = slice(start, start + arguments[0].numel() // arguments[0].shape[-1])
        told = here.told(layer, router.top_k, tokens)
        with contextlib.nullcontext() if told is None else Told(told, router.num_experts) as mode:
            out = forward(*arguments)
        if not _is_choice(out, router):  # of a family that rondo has not seen yet
            if self._config != type(self._config)():
                raise ConfigError(
                    f"{router.name}: the router of this {self._model_type} model does not return logits, "
                    "weights and experts, so that rondo cannot count where tokens go: leave out `router`"
                )
            return out
        logits, weights, chosen = out
        seen = here.seen[layer, start] = _Seen(chosen.detach(), self._counts.new_zeros(3))
        if told is not None:
            assert mode is not None
            seen.told = _told(mode, told, router, here.rows_of_tokens[tokens])
        if not here.counts:
            return out
        by_document = here.counts_of(chosen, router.num_experts, tokens)
        seen.counts = here.by_row(by_document).sum(0)
        if self._config.balance is not None and (self._known is not None or not self._counts_first):
            toward = self._toward(layer, here, by_document)
            leans = affinities(logits, self._model_type)
            loss = (toward.to(leans)[here.document_of[tokens]] * leans).sum()
            seen.balance = loss.detach().double() / self._config.balance.weight
            weights = _WithLoss.apply(weights, loss)
        return logits, weights, chosen

    def _toward(self, layer: int, here: _Pass, by_document: torch.Tensor) -> torch.Tensor:
        """Returns the derivative [D, E] of the loss by each token's affinities, of the tokens of a document:
        that of each of the rows that it belongs to, added up.
        """
        balance, num_experts, top_k = self._config.balance, by_document.shape[1], self.routers[layer].top_k
        assert balance is not None
        if self._known is not None:
            counts, share = self._known[None, layer], 1.0
        else:
            counts, share = here.by_row(self._parts.add_up(by_document)), 1 / self._num_rows
        # At least 1: a document, or row, without tokens here has the loss 0 and no 0 / 0.
        tokens = counts.sum(1, keepdim=True).clamp_min(1) / top_k
        of_row = balance.weight * share * num_experts * counts / (top_k * tokens) / tokens
        return here.by_document(of_row.expand(here.num_rows, -1))


def _is_choice(out: Any, router: ExpertRouter) -> bool:
    """Says whether a router returned its logits, weights and experts."""
    if not isinstance(out, tuple) or not all(isinstance(one, torch.Tensor) for one in out):
        return False
    return tuple(one.shape[-1] for one in out) == (router.num_experts, router.top_k, router.top_k)


def _told(mode: Told, told: torch.Tensor, router: ExpertRouter, rows: torch.Tensor) -> torch.Tensor:
    """Returns how many tokens were told and would have chosen others, how many were told, and how many there
    are. rows: how many each token belongs to.
    """
    if mode.own is None:
        raise ConfigError(
            f"{router.name} does not choose by a top-k over its experts, and cannot be told which: leave out "
            "actor.router.replay",
            key="actor.router.replay",
        )
    known = told[:, 0] >= 0
    differ = (told.sort(-1).values != mode.own.sort(-1).values).any(-1) & known
    return torch.stack([(rows * differ).sum(), (rows * known).sum(), rows.sum()]).double()


@dataclass
class _Seen:
    """What one layer's router did in a pass."""

    chosen: torch.Tensor
    """[tokens, k]: the experts that compute."""
    told: torch.Tensor
    """[3], in tokens: told and otherwise chosen, told, all."""
    counts: torch.Tensor | float = 0.0
    """[E], tokens of each expert; 0.0: nobody counts."""
    balance: torch.Tensor | float = 0.0
    """The balancing loss, without its weight."""


class _Pass:
    """The tokens of one pass that this rank has: N' of them, in D documents of R rows."""

    def __init__(self, packed: PackedRows, parts: Parts, *, counts: bool) -> None:
        device = packed.input_ids.device
        lengths = to_device(packed.document_lengths, device)
        self.counts = counts
        self._parts = parts
        self._own = parts.own(len(packed.input_ids))
        self._told = None if packed.routes is None else packed.routes[self._own]
        self._rows, self._documents = to_device(packed.members, device).unbind(1)
        self.num_rows, self._num_documents = len(packed.rows), len(lengths)
        # What is known here is counted here: of a tensor on a GPU it would be waited for.
        every = torch.repeat_interleave(lengths, output_size=int(packed.document_lengths.sum()))
        self.document_of = every[self._own]
        rows_of_documents = np.bincount(packed.members[:, 1], minlength=self._num_documents)
        self.rows_of_tokens = to_device(rows_of_documents, device)[self.document_of]
        # By layer and tile: computed again in a backward pass, it is the same again.
        self.seen: dict[tuple[int, int], _Seen] = {}

    def told(self, layer: int, top_k: int, tokens: slice) -> torch.Tensor | None:
        """Returns which experts a layer is to choose, int64 [n, k]; all layers choose as many."""
        return None if self._told is None else self._told[tokens, layer * top_k : (layer + 1) * top_k]

    def routes(self, routers: Sequence[ExpertRouter]) -> torch.Tensor:
        """Returns what the layers chose, int64 [N, W], of the tokens of all ranks; 0 in those of another
        pipeline stage.
        """
        nothing = self.document_of.new_zeros(len(self.document_of), 1)
        layers = []
        for layer, router in enumerate(routers):
            tiles = [self.seen[at].chosen for at in sorted(self.seen) if at[0] == layer]
            layers.append(torch.cat(tiles) if tiles else nothing.expand(-1, router.top_k))
        return self._parts.all_tokens(torch.cat(layers, 1))

    def counts_of(self, chosen: torch.Tensor, num_experts: int, tokens: slice) -> torch.Tensor:
        """Returns how many of these tokens of each document chose each expert, float64 [D, E]."""
        at = (self.document_of[tokens, None] * num_experts + chosen).flatten()
        counts = torch.zeros(self._num_documents * num_experts, dtype=torch.float64, device=at.device)
        return counts.scatter_add_(0, at, torch.ones_like(at, dtype=torch.float64)).view(-1, num_experts)

    def by_row(self, by_document: torch.Tensor) -> torch.Tensor:
        """[D, E] -> [R, E], of a row's documents together: a prompt that rows share counts in each."""
        rows = by_document.new_zeros(self.num_rows, by_document.shape[1])
        return rows.index_add_(0, self._rows, by_document[self._documents])

    def by_document(self, by_row: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [D, E], of a document's rows together."""
        documents = by_row.new_zeros(self._num_documents, by_row.shape[1])
        return documents.index_add_(0, self._documents, by_row[self._rows])


class _WithLoss(torch.autograd.Function):
    """Hands on the first argument; the second, a loss, is part of what is minimised wherever the first is."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.new_ones(())
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], ctx.like


def check_router(lm: PreTrainedModel, config: RouterConfig, *, lora: bool, tiles: bool) -> None:
    """Raises ConfigError where a model cannot do what is asked of its routers; its key is the setting's.
    tiles: its MLPs take some tokens at a time.
    """
    asked = [key for key in ("balance", "bias_speed", "replay") if getattr(config, key, None)]
    if not asked:
        return
    model_type, routers = lm.config.get_text_config().model_type, routers_of(lm)
    if not routers:
        key = f"router.{asked[0]}"
        why = f"{key}: this {model_type} model has no experts, or does not say which ones it chose"
        raise ConfigError(f"{why}; leave it out", key=key)
    if tiles and config.balance is not None and config.balance.over == "sequence":
        raise ConfigError(
            "router.balance.over=sequence counts the experts of whole rows, and with actor.backend.mlp_chunk "
            "there is a part of them at a time; set over=mini_batch, or leave out the chunks",
            key="router.balance.over",
        )
    if config.bias_speed:
        why = _why_no_bias(routers, lora=lora)
        if why:
            why = (
                f"router.bias_speed={config.bias_speed}: {why.format(model_type)}; set router.balance instead"
            )
            raise ConfigError(why, key="router.bias_speed")
    why = why_not_replayed(lm.config) if isinstance(config, ActorRouterConfig) and config.replay else ""
    if why:
        message = f"router.replay: a {model_type} model cannot be told which experts to choose: {why}"
        raise ConfigError(f"{message}; leave it out", key="router.replay")


def _why_no_bias(routers: Sequence[ExpertRouter], *, lora: bool) -> str:
    if lora:
        return "with adapters (lora) the model's own weights stay as they are, and its routers' biases too"
    if any(router.bias is None for router in routers):
        return "the routers of a {} model have no biases that are moved beside the gradient"
    if any(router.bias is not None and router.bias.dtype.itemsize < 4 for router in routers):
        return "the routers' biases are in half precision here, in which small steps are lost"
    return ""
