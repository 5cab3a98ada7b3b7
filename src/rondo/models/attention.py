"""Attention over packed documents: the one function that all models' attention goes through.

Queries, keys and values of all documents of a micro-batch lie one after another in a single row [1, heads, N,
D]. No document sees another one. Everything that depends on the documents' lengths only is computed once per
micro-batch (`documents.plan_documents`) and travels with the forward call as the keyword `documents`.

Kernels (`kernels`): `flash` (flash-attn, or torch's own varlen_attn: CUDA, half precision); `short`
(documents of similar length side by side, two batched matrix products and a softmax: everywhere, for
documents of at most SHORT tokens; on a CPU 2-3 times faster than SDPA there); `sdpa`
(scaled_dot_product_attention document by document). Windows, soft-caps and sinks work with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from rondo.core.errors import ConfigError
from rondo.models.documents import Documents, Kernel
from rondo.models.family import head_widths
from rondo.models.flash import ScoreRule, flash_kernel, why_not_flash
from rondo.models.kernels import attend
from rondo.models.source import Attention

IMPLEMENTATION = "rondo_varlen"
SHORT = 128  # up to this many tokens the scores of a document are kept for the backward pass

_SEEN: ContextVar[set[int] | None] = ContextVar("rondo_varlen_seen", default=None)
# Keywords that carry nothing this function needs (rotary embeddings are applied already; positions are in the
# plan).
_IRRELEVANT = {"position_ids", "position_embeddings", "cache_position", "use_cache", "num_items_in_batch"}


def register_varlen() -> None:
    """Makes transformers know `rondo_varlen`; called when a model is built (importing has no effect)."""
    register(IMPLEMENTATION, varlen_attention)


@contextmanager
def watched() -> Iterator[set[int]]:
    """Yields a set that gets the id of every module which calls `varlen_attention` inside."""
    seen: set[int] = set()
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


def fitting(attention: Attention, config: Any) -> Attention:
    """Returns `attention` for a model of this transformers config: sdpa in the place of auto where the flash
    kernels do not take its heads (latent attention). Raises ConfigError where flash is asked for.
    """
    why_not = why_not_flash(*head_widths(config))
    if why_not and attention == "flash":
        raise ConfigError(
            f"model.attention=flash: a {config.model_type} model has {why_not}, which no flash kernel takes; "
            "use model.attention=auto"
        )
    return "sdpa" if why_not else attention


def choose_kernel(attention: Attention, device: torch.device, dtype: torch.dtype, max_length: int) -> Kernel:
    """Returns the kernel for documents of at most `max_length` tokens. Raises ConfigError when `flash` is
    asked for and absent.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    flash = half and flash_kernel(device.type) is not None
    if attention == "flash" and not flash:
        raise ConfigError(
            "model.attention=flash needs a CUDA device, compute_dtype bfloat16 or float16, and a kernel "
            f"(flash-attn, or torch's varlen_attn); here: {device}, {dtype}, {_kernel_name(device.type)}. "
            "Use model.attention=auto"
        )
    if flash and attention != "sdpa":
        return "flash"
    return "short" if max_length <= SHORT else "sdpa"


def _kernel_name(kind: str) -> str:
    kernel = flash_kernel(kind)
    return "no kernel" if kernel is None else f"kernel of {kernel.package}"


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Window | torch.Tensor | None = None,
    *,
    documents: Documents | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention within each document. query [1, H, N, D], key and value [1, K, N, D]; returns
    [1, N, H, Dv].

    Follows transformers' AttentionInterface: a query sees `sliding_window` positions, its own included, and
    those of the document that its own continues count as before it; scores s become softcap · tanh(s /
    softcap); s_aux [H] are sinks, scores without a value. Refuses (ConfigError) what it does not know: a
    keyword ignored here would be a silent error of the loss.
    """
    asked_for = [
        name for name, v in other.items() if v is not None and v is not False and name not in _IRRELEVANT
    ]
    if documents is None or dropout or is_causal is False or asked_for:
        _refuse(module, documents, dropout, is_causal, asked_for)
    assert documents is not None
    seen = _SEEN.get()
    if seen is not None:
        seen.add(id(module))
    window = window_of_call(module, attention_mask, sliding_window)
    if window is not None and documents.max_length <= window:
        window = None
    rule = ScoreRule(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    context = documents.context
    if context is None:
        return attend(q, k, v, s_aux, documents, rule)[None], None
    q, k, v = (context.all_tokens(tensor) for tensor in (q, k, v))
    return context.all_heads(attend(q, k, v, context.own_heads(s_aux), documents, rule))[None], None


def _refuse(
    module: torch.nn.Module,
    documents: Documents | None,
    dropout: float,
    is_causal: bool | None,
    asked_for: list[str],
) -> None:
    if documents is None:
        raise ConfigError(
            f"{type(module).__name__} does not tell its attention function which documents share a pass (it "
            "was called past the training engine, or hands no keywords on), so that they would be mixed; "
            "choose another model (docs/models.md has the families that work)"
        )
    what = ", ".join(asked_for)
    if dropout:
        what = f"dropout={dropout}"
    elif is_causal is False:
        what = "attention that is not causal"
    raise ConfigError(
        f"{type(module).__name__} calls packed attention with {what}, which it does not support; choose "
        "another model"
    )


# ---- what a model's masks say, for attention functions that need no mask ----


@dataclass(frozen=True)
class Window:
    """Stands in the place of a causal mask."""

    positions: int | None
    """How many positions a query sees, its own included; None: all up to its own."""


def register(name: str, attention: Callable[..., Any]) -> None:
    """Makes transformers know an attention function under the names that `implementation` gives (idempotent;
    importing has no effect).
    """
    AttentionInterface.register(name, attention)
    AttentionInterface.register(_with_windows(name), attention)
    AttentionMaskInterface.register(_with_windows(name), _window_for_mask)


def implementation(name: str, config: PreTrainedConfig) -> str:
    """Returns the name under which a model of this config asks for the attention function `name`: of models
    without any window no mask is asked for.
    """
    has_window = getattr(config.get_text_config(), "sliding_window", None) is not None
    return _with_windows(name) if has_window else name


def _with_windows(name: str) -> str:
    return f"{name}_with_windows"


def _window_for_mask(
    *, config: PreTrainedConfig, local_size: int | None = None, use_vmap: bool = False, **_: Any
) -> Window:
    """Takes the arguments of transformers' AttentionMaskInterface."""
    if use_vmap:  # transformers' own sign of a mask function that a model has added
        raise ConfigError(
            f"a {config.model_type} model changes its causal mask in a way of its own "
            "(attention that is not causal?), which rondo does not do; choose another model"
        )
    return Window(local_size)


def window_of_call(
    module: torch.nn.Module, mask: Window | torch.Tensor | None, asked_for: int | None
) -> int | None:
    """Returns the window of one call of attention, of its mask and its keyword `sliding_window`. Raises
    ConfigError for another mask, or where the two contradict each other.
    """
    if mask is None:
        return asked_for
    if not isinstance(mask, Window):
        raise ConfigError(
            f"{type(module).__name__} makes an attention mask of its own, which rondo does not know; choose "
            "another model"
        )
    if asked_for is not None and asked_for != mask.positions:
        raise ConfigError(
            f"{type(module).__name__} asks its attention for a window of {asked_for} positions, and its mask "
            f"for {mask.positions or 'none'}: transformers' own implementations would disagree; choose "
            "another model"
        )
    return mask.positions
