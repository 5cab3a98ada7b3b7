"""Where rows come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rondo.config.schema.types import STRICT, Count, Int, Positive


@dataclass(frozen=True, config=STRICT)
class SourceConfig:
    """One named source of rows (prompts for RL, conversations for SFT)."""

    type: Literal["parquet", "jsonl", "huggingface", "reasoning_gym", "function"]
    """Where the rows come from."""
    name: str | None = None
    """Used in prompt ids and metrics of the source; default: from path or task."""
    path: str | None = None
    """A file (parquet, jsonl), a dataset id or folder (huggingface)."""
    split: str = "train"
    """Of a Hugging Face dataset."""
    task: str | None = None
    """A reasoning_gym task, or a function `path.py:name` that returns rows."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Of the task or function."""
    size: Count | None = None
    """reasoning_gym: how many; others: use only the first `size` rows."""
    seed: Int = 0
    """Of a procedural source."""
    weight: Positive = 1.0
    """Share of the stream relative to the other sources; leave a source out to switch it off."""
    prompt_key: str = "prompt"
    """The column with a string or a list of chat messages."""
    system_prompt: str | None = None
    """Put before every prompt of the source."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """What is learnt from, and how much of it a step takes."""

    train: tuple[SourceConfig, ...] = ()
    """Sources of what is trained on."""
    eval: tuple[SourceConfig, ...] = ()
    """Sources of held-out prompts."""
    pretrain: tuple[SourceConfig, ...] = ()
    """Conversations for algorithm.pretrain_coef (PPO-ptx)."""
    pretrain_batch_size: Count = 16
    """Conversations of `pretrain` per mini-batch."""
    batch_size: Count = 16
    """Prompt groups per step (SFT: conversations; preference: pairs)."""
    max_prompt_tokens: Count = 1024
    """Tokens of a prompt at most."""
    overlong_prompts: Literal["drop", "error", "truncate_left", "truncate_right"] = "drop"
    """What happens to longer ones."""
    shuffle: bool = True
    """Draw prompts in random order, another one in each epoch."""
