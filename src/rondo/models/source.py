"""Where a model and a tokenizer come from: small picklable records that travel to every worker. No torch
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rondo.core.errors import ConfigError
from rondo.system.hub import Hub

Attention = Literal["auto", "flash", "sdpa"]


@dataclass(frozen=True)
class ModelSource:
    """Either a pretrained model (`path`) or one with random weights (`config`), never both."""

    path: str | None = None
    """A local folder, a URL or a hub id."""
    hub: Hub = "huggingface"
    """Where an id is looked up."""
    config: Mapping[str, Any] | None = None
    """transformers' keys, e.g. {"model_type": "qwen3", "hidden_size": 128, ...}; what it leaves out has the
    default there."""
    override: Mapping[str, Any] = field(default_factory=dict)
    """Other values than those of the folder's config.json."""
    section: str = "model"
    """Of the configuration, for messages."""
    trust_remote_code: bool = False
    """Whether code in the folder may run."""
    attention: Attention = "auto"
    """The kernel behind packed attention."""
    seed: int = 0
    """Of a random initialisation."""
    min_pixels: int | None = None
    """Smaller images are enlarged to so many; None: as the folder (or the family) says."""
    max_pixels: int | None = None
    """Larger images are made smaller; None: likewise."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            given = "both" if self.path is not None else "neither"
            raise ConfigError(f"a model needs exactly one of model.path and model.config; {given} is set")


@dataclass(frozen=True)
class TokenizerSource:
    """Which tokenizer, and how it writes conversations."""

    name: str
    """A local folder, a hub id, or a function without arguments that makes it (`path.py:fn`, `module:fn`)."""
    hub: Hub = "huggingface"
    """Where an id is looked up."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's own template."""
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template; `rondo.chat.options`."""
    tool_format: str = "auto"
    """How the model writes tool calls; `rondo.chat.tools`."""
    trust_remote_code: bool = False
    """Whether code in the folder may run."""
    model: str | None = None
    """The folder or hub id of the model that it is for, which may name more tokens that end an answer."""
