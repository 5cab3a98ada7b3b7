"""Supervised fine-tuning: loss on the assistant's tokens of conversations."""

from __future__ import annotations

import numpy as np

from rondo.algorithms import sft_loss
from rondo.batch import Batch
from rondo.config.schema import Config, FunctionConfig, SourceConfig
from rondo.data import ConversationStream
from rondo.planning.update import loss_weights
from rondo.trainers.setup import open_tokenizer
from rondo.trainers.supervised import Task

TOKEN_MEAN = FunctionConfig("token-mean")


def conversations(config: Config, sources: tuple[SourceConfig, ...], *, shuffle: bool) -> ConversationStream:
    """Rows of `sources` as token sequences with a loss mask; a whole conversation has at most
    actor.token_budget tokens.
    """
    return ConversationStream(
        sources,
        open_tokenizer(config),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.actor.token_budget,
        overlong=config.data.overlong_prompts,
        shuffle=shuffle,
        seed=config.trainer.seed,
    )


def conversation_stream(config: Config, held_out: bool) -> ConversationStream:
    """The conversations of data.train or data.eval."""
    if held_out:
        return conversations(config, config.data.eval, shuffle=False)
    return conversations(config, config.data.train, shuffle=config.data.shuffle)


def mean_over_tokens(rows: Batch) -> np.ndarray:
    """1 / trained tokens of the step on every row: float64 [B]."""
    return loss_weights(TOKEN_MEAN, rows.scalars("num_trained_tokens"), np.zeros(len(rows), np.int64))


SFT = Task(
    kind="sft",
    title="supervised fine-tuning",
    loss=lambda config: sft_loss(),
    stream=conversation_stream,
    weights=mean_over_tokens,
)
