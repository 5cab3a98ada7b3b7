"""Where rows come from."""

import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rondo.config.schema.types import (
    STRICT,
    Batch,
    Function,
    LocalPath,
    Path,
    Paths,
    Positive,
    Rows,
    Seed,
    Tokens,
    fields_of,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RowsConfig:
    """What all sources of rows have (prompts for RL, conversations for SFT)."""

    type: str
    """Where the rows come from."""
    name: str | None = None
    """Used in prompt ids and metrics of the source; default: from path or task."""
    size: Rows | None = None
    """Use only the first `size` rows; reasoning_gym: make so many."""
    weight: Positive | None = 1.0
    """Share of the stream relative to the other sources; leave a source out to switch it off. null: its
    number of rows; with null for all, each row comes once in an epoch."""
    prompt_key: str = "prompt"
    """The column with a string or a list of chat messages. a.b: what a column of mappings has under b."""
    response_key: str = "response"
    """The column with the answer to it (SFT); a.b likewise."""
    messages_key: str = "messages"
    """The column with whole conversations (SFT)."""
    system_prompt: str | None = None
    """Put before every prompt of the source."""
    drop_columns: tuple[str, ...] = ()
    """Columns that are left out: pictures, say, of which a text model learns nothing."""
    image_key: str | None = None
    """The column with a row's images (a model that reads them); null: `images`, or `image`."""
    image_dir: LocalPath | None = None
    """The folder that images of rows are in: relative paths begin there, and none leads out of it; null: the
    folder of the source's file."""
    ignore_message_keys: tuple[str, ...] = ()
    """Keys of messages that are left out: ids and dates, say, that the chat template does not read."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FileSourceConfig(RowsConfig):
    """The rows of files."""

    type: Literal["parquet", "jsonl"]
    """Where the rows come from."""
    path: Paths
    """A file, a folder (all files below it that end as the type does), a pattern (`shards/*.parquet`), or a
    list of these. Files of a folder or pattern come in the order of their paths."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HuggingfaceSourceConfig(RowsConfig):
    """The rows of a data set of Hugging Face."""

    type: Literal["huggingface"] = "huggingface"
    """Where the rows come from."""
    path: Annotated[Path, Field(min_length=1)]
    """A hub id, or a folder."""
    split: str = "train"
    """Which part of it."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of `datasets.load_dataset`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskSourceConfig(RowsConfig):
    """Rows that a program makes."""

    type: Literal["reasoning_gym", "function"]
    """Where the rows come from."""
    task: Annotated[str, Field(min_length=1)]
    """A task of reasoning_gym, or a function `path.py:name` that returns rows."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Of the task or function."""
    seed: Seed = 0
    """Of the task or function."""


SourceConfig = FileSourceConfig | HuggingfaceSourceConfig | TaskSourceConfig
SOURCE_TYPES = tuple(
    choice
    for source in typing.get_args(SourceConfig)
    for choice in typing.get_args(fields_of(source)["type"])
)
Sources = tuple[Annotated[SourceConfig, Field(discriminator="type")], ...]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """What is learnt from, and how much of it a step takes."""

    train: Sources = ()
    """Sources of what is trained on."""
    eval: Sources = ()
    """Sources of held-out prompts."""
    pretrain: Sources = ()
    """Conversations for algorithm.pretrain_coef (PPO-ptx)."""
    pretrain_batch_size: Batch = 16
    """Conversations of `pretrain` per mini-batch."""
    batch_size: Batch = 16
    """Prompt groups per step (SFT: conversations; preference: pairs)."""
    max_prompt_tokens: Tokens = 1024
    """Tokens of a prompt at most."""
    overlong_prompts: Literal["drop", "error", "truncate_left", "truncate_right"] = "drop"
    """What happens to longer ones."""
    max_tokens: Tokens | None = None
    """Tokens of a whole conversation at most (SFT); null: what actor.token_budget and the model allow."""
    turns: Literal["sampled", "template", "messages", "eos"] = "sampled"
    """How a conversation becomes tokens (SFT). sampled: an answer is learnt up to the token that ends the
    turn, as it would be sampled; template: with all that the template writes behind it, too; messages:
    likewise, each message written by itself; eos: a prompt and one answer, which ends with the tokenizer's
    eos_token in place of what the template writes."""
    drop_last: bool = False
    """Leave out the rows of an epoch that fill no batch (SFT, preference), so that no batch has rows of two
    epochs."""
    shuffle: bool = True
    """Draw prompts in random order, another one in each epoch."""
    sampler: Function | None = None
    """What chooses the prompts of each step, and how many answers each gets, by what came of earlier ones
    (RL): success_rate, knapsack, stages, or a class or function of yours; null: the order of the sources."""
