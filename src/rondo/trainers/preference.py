"""Learning from preference pairs: the policy itself (DPO and its relatives), or a reward model.

A step trains on data.batch_size pairs; the two sequences of a pair are computed together, so each may have
half of actor.token_budget.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rondo.algorithms import preference_loss, reward_model_loss
from rondo.batch import Batch
from rondo.config.schema import Config
from rondo.data import PairStream
from rondo.errors import DataError
from rondo.tracking.view import Kind
from rondo.trainers.setup import open_tokenizer
from rondo.trainers.supervised import Task
from rondo.training import Loss


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
    "preference", "preference learning", lambda c: preference_loss(c.algorithm), value_head=False
)
REWARD_MODEL = _task(
    "reward_model", "reward-model training", lambda c: reward_model_loss(c.algorithm), value_head=True
)
