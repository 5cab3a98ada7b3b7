"""The language-model term beside the policy loss: what tokens weigh in it (column lm_weight), and the
conversations that join the mini-batches for it (algorithm.pretrain_coef).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rondo.config import Config
from rondo.controller import Cluster
from rondo.core.batch import ROW_ID, BatchRef, ragged_array, wide_array
from rondo.core.columns import per_row
from rondo.trainers.program.inputs import conversations


def lm_weights(tokens: np.ndarray, mini_batch: np.ndarray, coef: float) -> np.ndarray:
    """Returns coef / (all of `tokens` in the row's mini-batch), 0 for rows without: the mean over those
    tokens.
    """
    # Without rows the last number is -1, and there are no totals.
    totals = np.bincount(mini_batch, weights=tokens, minlength=int(mini_batch.max(initial=-1)) + 1)
    return np.where(tokens > 0, coef / np.maximum(totals[mini_batch], 1), 0.0)


class Pretraining:
    """data.pretrain_batch_size conversations of data.pretrain join every mini-batch.

    Their rows have loss_weight 0 (no part in the policy loss) and an lm_weight that makes the term
    algorithm.pretrain_coef times their mean negative log-likelihood per token.
    """

    def __init__(self, config: Config) -> None:
        self._coef = config.algorithm.pretrain_coef
        self._size = config.data.pretrain_batch_size
        self._stream = conversations(config, config.data.pretrain, shuffle=config.data.shuffle)
        self._per_step = -(
            -config.data.batch_size // (config.actor.mini_batch_size or config.data.batch_size)
        )

    async def join(self, batch: BatchRef, columns: tuple[str, ...], step: int, cluster: Cluster) -> BatchRef:
        """Returns batch and this step's conversations, which have every one of `columns` (zeros where none
        belongs).

        The conversations of a step are a function of its number, so a resumed run sees the same.
        """
        number = int(batch.index.scalars("mini_batch").max()) + 1
        first = step * self._per_step * self._size
        rows = self._stream.batch(range(first, first + number * self._size))
        mini_batch = np.repeat(np.arange(number), self._size)
        offsets = np.concatenate([[0], np.cumsum(rows.lengths("response_ids"))])
        tokens = [name for name in rows.columns if name not in per_row(rows.columns)]
        missing = [name for name in columns if name not in (*batch.index.columns, *tokens)]
        like = await batch.take([0]).fetch(missing)
        per_token = {name: _zeros(like.array(name).type, offsets) for name in missing}
        lengths = ("prompt_length", "response_length", "num_trained_tokens")
        planned = {
            # Negative: no row of an episode has such a number. Less 1, since there is no -0.
            ROW_ID: -1 - rows.scalars(ROW_ID),
            "mini_batch": mini_batch,
            "loss_weight": np.zeros(len(rows)),
            "lm_weight": lm_weights(rows.scalars("num_trained_tokens"), mini_batch, self._coef),
        }
        planned |= {name: rows.scalars(name) for name in lengths}
        repeated = batch.index.take(np.zeros(len(rows), np.int64))  # the same columns, whatever they are
        index = repeated.with_columns(planned, replace=True)
        whole = index.with_columns(rows.select(tokens)).with_columns(per_token)
        return BatchRef.concat([batch, cluster.put(whole, tuple(index.columns))])


def _zeros(kind: pa.ListType, offsets: np.ndarray) -> pa.ListArray:
    """Makes a per-token column of the type `kind`, all 0."""
    value, number = kind.value_type, int(offsets[-1])
    if pa.types.is_fixed_size_list(value):
        dtype = value.value_type.to_pandas_dtype()
        return wide_array(np.zeros((number, value.list_size), dtype), offsets)
    return ragged_array(np.zeros(number, value.to_pandas_dtype()), offsets)
