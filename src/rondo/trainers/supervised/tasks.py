"""The three supervised tasks: rows, loss and its weights.

SFT learns from the assistant's tokens of data.batch_size conversations a step. Preference learning (DPO and
its relatives) and reward models learn from data.batch_size pairs a step; the two sequences of a pair are
computed together, so each may have half of actor.token_budget.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rondo.algorithms import PreferenceLoss, RewardModelLoss, SftLoss, loss_weights, token_mean
from rondo.batch import Batch
from rondo.config import Config
from rondo.data import ConversationStream, PairStream
from rondo.errors import DataError
from rondo.tracking import Kind
from rondo.trainers.program import conversations, open_tokenizer
from rondo.trainers.supervised.trainer import Task
from rondo.training import Loss


def conversation_stream(config: Config, held_out: bool) -> ConversationStream:
    """The conversations of data.train or data.eval."""
    if held_out:
        return conversations(config, config.data.eval, shuffle=False)
    return conversations(config, config.data.train, shuffle=config.data.shuffle)


def mean_over_tokens(rows: Batch) -> np.ndarray:
    """1 / trained tokens of the step on every row: float64 [B]."""
    return loss_weights(token_mean, rows.scalars("num_trained_tokens"), np.zeros(len(rows), np.int64))


SFT = Task(
    kind="sft",
    title="supervised fine-tuning",
    loss=lambda config: SftLoss(),
    stream=conversation_stream,
    weights=mean_over_tokens,
)


def pair_stream(config: Config, held_out: bool, loss: Loss) -> PairStream:
    """Pairs of data.train or data.eval. Raises DataError where they lack what the loss reads."""
    stream = PairStream(
        config.data.eval if held_out else config.data.train,
        open_tokenizer(config),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.actor.token_budget // 2,
        overlong=config.data.overlong_prompts,
        shuffle=config.data.shuffle and not held_out,
        seed=config.trainer.seed,
    )
    if "safe" in loss.columns and not stream.has_safe:
        raise DataError(
            f"data.{'eval' if held_out else 'train'}: the loss reads whether an answer is harmless, and not "
            "every row says so; give each row the booleans chosen_safe and rejected_safe"
        )
    return stream


def mean_over_pairs(rows: Batch) -> np.ndarray:
    """1 / pairs of the step on both rows of each: float64 [2 · pairs]."""
    return np.full(len(rows), 2.0 / len(rows))


def _task(kind: Kind, title: str, loss: Callable[[Config], Loss], *, value_head: bool) -> Task:
    return Task(
        kind=kind,
        title=title,
        loss=loss,
        stream=lambda config, held_out: pair_stream(config, held_out, loss(config)),
        weights=mean_over_pairs,
        value_head=value_head,
    )


PREFERENCE = _task(
    "preference",
    "preference learning",
    lambda c: PreferenceLoss(c.algorithm.preference_loss),
    value_head=False,
)
REWARD_MODEL = _task(
    "reward_model",
    "reward-model training",
    lambda c: RewardModelLoss(c.algorithm.reward_model_loss),
    value_head=True,
)
