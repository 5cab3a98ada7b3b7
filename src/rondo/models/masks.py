"""What a model's masks say, for attention functions that need no mask.

transformers makes a layer's mask beside its attention, and some models (Qwen2-MoE, PhiMoE) tell of a window
in the mask alone. So models with a window get, in the place of each mask, a `Window`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from rondo.core.errors import ConfigError


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
    """The name under which a model of this config asks for the attention function `name`: of models without
    any window no mask is asked for.
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
