"""The three supervised tasks: rows, loss and its weights.

SFT learns from the assistant's tokens of data.batch_size conversations a step. Preference learning (DPO and
its relatives) and reward models learn from data.batch_size pairs a step; the two sequences of a pair are
computed together, so each may have half of actor.token_budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rondo.algorithms import PreferenceLoss, RewardModelLoss, SftLoss, bind, loss_weights
from rondo.config import Config
from rondo.core.batch import Batch
from rondo.core.errors import ConfigError, DataError
from rondo.data import ConversationStream, PairStream
from rondo.planning import reference_in_actor
from rondo.tracking import Kind
from rondo.trainers.program import (
    check_profile,
    conversations,
    images_of,
    longest_row,
    open_tokenizer,
    tool_schemas,
)
from rondo.training import Loss


class RowStream(Protocol):
    """Source rows by sequence number, without end."""

    @property
    def content(self) -> Mapping[str, Any]: ...

    def changes_since(self, content: Mapping[str, Any]) -> list[str]: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def rows_per_epoch(self) -> int: ...

    @property
    def large_sources(self) -> Sequence[str]: ...

    def batch(self, seqs: Sequence[int]) -> Batch: ...

    def look_at_rest(self) -> None: ...

    def describe(self) -> list[str]: ...

    def repeats(self) -> Mapping[str, tuple[int, int]]: ...

    def digests(self) -> Mapping[str, Sequence[bytes]]: ...

    def looked_at(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Task:
    """A kind of supervised training."""

    kind: Kind
    """Which of the kinds it is."""
    title: str
    """What messages call it."""
    loss: Callable[[Config], Loss]
    """Returns the loss that a configuration asks for."""
    stream: Callable[[Config, bool], RowStream]
    """Reads data.train, or data.eval where its second argument (held out) is true."""
    weights: Callable[[Config, Batch], np.ndarray]
    """Returns the loss_weight of each row of one optimizer step."""
    value_head: bool = False
    """Whether the model gives a score instead of tokens."""

    def roles(self, config: Config) -> tuple[str, ...]:
        """Returns the names of its worker groups."""
        own = self.needs_reference(config) and not reference_in_actor(config)
        return ("actor", "reference") if own else ("actor",)

    def streams(self, config: Config) -> tuple[RowStream, RowStream | None]:
        """Reads what is trained on, and what is held out, where there is any."""
        return self.stream(config, False), self.stream(config, True) if config.data.eval else None

    def needs_reference(self, config: Config) -> bool:
        """Says whether the loss compares with the model as it was at the start."""
        return "ref_log_probs" in self.loss(config).columns


def rows_taken(config: Config, rows_per_epoch: int) -> int:
    """Returns the rows of an epoch that are trained on: with data.drop_last those of whole batches. Raises
    ConfigError where there is no such batch.
    """
    size = config.data.batch_size
    if not config.data.drop_last:
        return rows_per_epoch
    if rows_per_epoch < size:
        raise ConfigError(
            f"data.drop_last=true leaves out what fills no batch, and all {rows_per_epoch} rows fill none of "
            f"data.batch_size={size}: lower that",
            key="data.batch_size",
        )
    return rows_per_epoch // size * size


def total_steps(config: Config, rows_per_epoch: int) -> int:
    """Returns the optimizer steps of the run: one per batch. rows_per_epoch: those that are trained on."""
    steps, epochs = config.trainer.total_steps, config.trainer.epochs
    if epochs is not None:
        in_epochs = math.ceil(epochs * rows_per_epoch / config.data.batch_size)
        steps = in_epochs if steps is None else min(steps, in_epochs)
    if steps is None or steps < 1:
        raise ConfigError("trainer.epochs gives a run of 0 steps; ask for at least one")
    check_profile(config, steps)
    return steps


def conversation_stream(config: Config, held_out: bool) -> ConversationStream:
    """Reads the conversations of data.train or data.eval, written with the schemas of rollout.tools."""
    sources = config.data.eval if held_out else config.data.train
    shuffle = config.data.shuffle and not held_out
    return conversations(config, sources, shuffle=shuffle, whole=held_out, tools=tool_schemas(config))


def sft_weights(config: Config, rows: Batch) -> np.ndarray:
    """Returns the weight of each row's tokens in a step, float64 [B], as algorithm.aggregation says: 1 / all
    trained tokens for token-mean.
    """
    aggregate = bind("aggregation", config.algorithm.aggregation)
    return loss_weights(aggregate, rows.scalars("num_trained_tokens"), np.zeros(len(rows), np.int64))


def sft_loss(config: Config) -> SftLoss:
    """Returns the loss. Raises ConfigError for an aggregation that there is not, or wrong options of it."""
    sft_weights(config, Batch.of({"num_trained_tokens": np.ones(1, np.int32)}))
    return SftLoss()


SFT = Task("sft", "supervised fine-tuning", sft_loss, conversation_stream, sft_weights)


def pair_stream(config: Config, held_out: bool, loss: Loss) -> PairStream:
    """Reads the pairs of data.train or data.eval. Raises DataError where they lack what the loss reads."""
    roles = ("actor", "reference") if "ref_log_probs" in loss.columns else ("actor",)
    tokenizer = open_tokenizer(config)
    stream = PairStream(
        config.data.eval if held_out else config.data.train,
        tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=longest_row(config, config.actor.token_budget // 2, roles),
        overlong=config.data.overlong_prompts,
        shuffle=config.data.shuffle and not held_out,
        seed=config.trainer.seed,
        whole=held_out,
        images=images_of(config, tokenizer),
    )
    if "safe" in loss.columns and not stream.has_safe:
        raise DataError(
            f"data.{'eval' if held_out else 'train'}: the loss reads whether an answer is harmless, and not "
            "every row says so; give each row the booleans chosen_safe and rejected_safe"
        )
    return stream


def mean_over_pairs(config: Config, rows: Batch) -> np.ndarray:
    """Returns 1 / pairs of the step for both rows of each: float64 [2 · pairs]."""
    return np.full(len(rows), 2.0 / len(rows))


def _of_pairs(kind: Kind, title: str, loss: Callable[[Config], Loss], *, value_head: bool = False) -> Task:
    def stream(config: Config, held_out: bool) -> PairStream:
        return pair_stream(config, held_out, loss(config))

    return Task(kind, title, loss, stream, mean_over_pairs, value_head)


PREFERENCE = _of_pairs(
    "preference", "preference learning", lambda config: PreferenceLoss(config.algorithm.preference_loss)
)
REWARD_MODEL = _of_pairs(
    "reward_model",
    "reward-model training",
    lambda config: RewardModelLoss(config.algorithm.reward_model_loss),
    value_head=True,
)
