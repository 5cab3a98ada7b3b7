"""Where a model comes from: a small picklable record that travels to every worker. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rondo.errors import ConfigError

Attention = Literal["auto", "flash", "sdpa"]


@dataclass(frozen=True)
class ModelSource:
    """Exactly one of `path` (local folder or hub id: pretrained) and `config` (transformers keys: random
    weights).

    config: e.g. {"model_type": "qwen3", "hidden_size": 128, ...}; what it leaves out has the transformers
    default. attention: the kernel behind packed attention. seed: of a random initialisation (and of a
    critic's value head).
    """

    path: str | None = None
    config: Mapping[str, Any] | None = None
    trust_remote_code: bool = False
    attention: Attention = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            given = "both" if self.path is not None else "neither"
            raise ConfigError(f"a model needs exactly one of model.path and model.config; {given} is set")
