"""What of a forward pass is in memory: what the backward pass computes again instead of keeping it, where it
waits, and how many tokens are in an MLP at one time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from rondo.core.errors import ConfigError

# The place of an MLP's first token in the pass; None: what it computes is no part of one.
TILE_START: ContextVar[int | None] = ContextVar("rondo_tile_start", default=0)
_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp")  # as blocks of transformers call theirs
_MOST_ROUNDING = 0.05  # between a token's output with and without others, in half precision
_again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def checkpoint_blocks(blocks: Sequence[Any], how: Literal["auto", "offload"] | bool) -> None:
    """Has each transformer block computed again in the backward pass, from its input; "offload": which waits
    in host memory, pinned. (No "auto" comes here: `config.auto`.)

    Around `forward`, inside of FSDP's hooks: what is computed again finds its parameters gathered.
    """
    for block in blocks:
        if how == "offload":
            block.forward = functools.partial(_from_host_memory, block.forward)
        elif how is True:
            block.forward = functools.partial(_again, block.forward)


def _from_host_memory(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Only what `checkpoint` itself keeps, the arguments without a name, meets these hooks: inside, its own
    # take their place. What all blocks share (rotary tables) has a name, and stays.
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return _again(forward, *args, **kwargs)


def lean_mlps(blocks: Sequence[Any]) -> None:
    """Has gated MLPs (Llama's and its relatives': gate, up, down) keep the two products of their input, of
    the four tensors of that size which autograd keeps. The others are made again of them, without a product.
    """
    for block in blocks:
        mlp: Any = getattr(block, "mlp", None)
        if all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            mlp.forward = _Gated(mlp)


class _Gated:
    """The forward of a gated MLP, if it is one: the first pass compares."""

    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp
        self._forward = mlp.forward
        self._is_gated: bool | None = None

    def __call__(self, hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        if others or named or self._is_gated is False or not torch.is_grad_enabled():
            return self._forward(hidden, *others, **named)
        if self._is_gated is None:
            with torch.no_grad():
                self._is_gated = torch.equal(self._forward(hidden), self._down(*self._inner(hidden)))
            return self(hidden)
        return _again(self._down, *self._inner(hidden))

    def _inner(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._mlp.gate_proj(hidden), self._mlp.up_proj(hidden)

    def _down(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        # What is computed again ends where its last input is known, before the last product.
        down: torch.Tensor = self._mlp.down_proj(self._mlp.act_fn(gate) * up)
        return down


def tile_mlps(blocks: Sequence[Any], num_tokens: int | None, *, exchanging: bool = False) -> None:
    """Has the MLPs of each block take at most `num_tokens` tokens at one time, and compute each such tile
    again in the backward pass (Bekman et al., Arctic Long Sequence Training, arXiv:2506.13996, "TiledMLP").
    None: leaves them as they are. exchanging: ranks send each other tokens in them (expert parallel).

    Raises ConfigError for a block without an MLP of its own, or where ranks exchange tokens; the first pass
    raises it for one whose tokens are not computed each by itself.
    """
    if num_tokens is None:
        return
    for block in blocks:
        if exchanging:  # they would have to wait for each other once per tile, and have not as many tiles
            raise _cannot(block, "sends tokens to experts on other ranks (parallel.expert, parallel.tensor)")
        mlps = [getattr(block, name) for name in _MLPS if hasattr(block, name)]
        if not mlps:
            raise _cannot(block, "has no MLP of its own")
        for mlp in mlps:
            mlp.forward = _Tiles(mlp, num_tokens)


class _Tiles:
    """The forward of an MLP, dense or of experts, over tiles of tokens."""

    def __init__(self, mlp: torch.nn.Module, num_tokens: int) -> None:
        self._mlp = mlp
        self._forward = mlp.forward
        self._num_tokens = num_tokens
        self._checked = False

    def __call__(self, hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        """hidden [1, N, H]. What the module returns beside the like of it has tokens as its first dimension
        (scores of routers).
        """
        if others or named:
            raise _cannot(self._mlp, "takes more than hidden states")
        if hidden.shape[1] <= self._num_tokens:
            return self._forward(hidden)
        if not self._checked:
            self._check(hidden[:, : self._num_tokens])
        run = functools.partial(_again, self._run) if torch.is_grad_enabled() else self._run
        starts = range(0, hidden.shape[1], self._num_tokens)
        tiles = hidden.split(self._num_tokens, 1)
        return _joined([run(tile, start) for tile, start in zip(tiles, starts, strict=True)])

    def _run(self, tile: torch.Tensor, start: int | None) -> Any:
        token = TILE_START.set(start)
        try:
            return self._forward(tile)
        finally:
            TILE_START.reset(token)

    @torch.no_grad()
    def _check(self, tile: torch.Tensor) -> None:
        """Raises ConfigError where the last token gives something else by itself than behind the others."""
        together, alone = (
            _first(self._run(part, None)).flatten()[-tile.shape[2] :] for part in (tile, tile[:, -1:])
        )
        if not bool((together - alone).norm() <= _MOST_ROUNDING * together.norm()):
            raise _cannot(self._mlp, "does not compute each token by itself")
        self._checked = True


def _first(made: Any) -> torch.Tensor:
    tensor: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return tensor


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(each)) for each in zip(*parts, strict=True))
    return torch.cat(parts, 1 if parts[0].ndim == 3 else 0)


def _cannot(module: torch.nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"actor.backend.mlp_chunk: a {type(module).__name__} of this model {why}, and cannot be cut into "
        "tiles; leave the key out, and lower token_budget instead",
        key="actor.backend.mlp_chunk",
    )
