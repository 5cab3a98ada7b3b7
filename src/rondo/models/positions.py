"""How many tokens a sequence may have: the positions that a model's config gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rondo.core.errors import ConfigError

# Rotary embeddings whose `factor` says how far beyond the trained length they reach. With llama3 and longrope
# max_position_embeddings is the length that they reach; dynamic, beyond it, turns with the longest sequence
# that is computed beside it, so that the trainer's log-probs would not be the sampler's.
_STRETCHED = ("linear", "yarn")


def longest_context(config: Any) -> int | None:
    """Returns the tokens of the longest sequence that a model has positions for; None: its config sets no
    limit.
    """
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if stated is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds_of_layers = [part for part in rope.values() if isinstance(part, Mapping)]
    return min(_reach(part, int(stated)) for part in kinds_of_layers or [rope])


def _reach(rope: Mapping[str, Any], stated: int) -> int:
    factor = rope.get("factor")
    if rope.get("rope_type") not in _STRETCHED or factor is None:
        return stated
    trained = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(factor * trained))


STRETCH = "or stretch its rotary embedding with model.override (docs/model-options.md)"


def check_positions(config: Any, tokens: int, asked: str, remedy: str, *, model: str = "the model") -> None:
    """Raises ConfigError where a model has fewer positions than `tokens`. asked: what wants them, with its
    numbers.
    """
    longest = longest_context(config)
    if longest is not None and tokens > longest:
        has = f"has positions for {longest} tokens only (max_position_embeddings)"
        raise ConfigError(f"{asked}, but {model} {has}; {remedy}")
