"""Workers whose models judge the policy's tokens: a teacher, a reward or cost model, an implicit process
reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rondo.controller import WorkerContext, dispatch
from rondo.core.batch import Batch, ragged_array
from rondo.core.columns import MINI_BATCH, SCORE
from rondo.core.types import StepStats
from rondo.workers.models import TOKENS, ModelWorker


class TeacherWorker(ModelWorker):
    """The frozen model that is distilled from. top_k: how many tokens per position `compute_topk` gives."""

    def __init__(self, context: WorkerContext, *, top_k: int, **model: Any) -> None:
        super().__init__(context, **model)
        self._top_k = top_k

    @dispatch("split", reads=TOKENS, writes=("teacher_log_probs",))
    def compute_log_prob(self, batch: Batch) -> Batch:
        """Adds teacher_log_probs: of the response tokens, float32."""
        return self.engine.forward(batch, {"log_probs": "teacher_log_probs"})

    @dispatch(
        "split", reads=TOKENS, writes=("teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs")
    )
    def compute_topk(self, batch: Batch) -> Batch:
        """Adds teacher_log_probs, and per response token the top_k likeliest tokens, descending:
        teacher_topk_ids int32 and teacher_topk_log_probs float32, both wide [N, top_k].
        """
        return self.engine.forward_topk(batch, self._top_k)


class RewardModelWorker(ModelWorker):
    """A frozen reward or cost model, built with head="value". Its role is the name of its score."""

    @dispatch("split", reads=TOKENS)
    def compute_reward(self, batch: Batch) -> Batch:
        """Adds score/<name>, per row: the value head after the last response token; NaN without one."""
        return self.engine.forward_scores(batch, SCORE(self.context.role))


class PrmWorker(ModelWorker):
    """The implicit process reward model (PRIME, arXiv:2502.01456): a causal LM trained on outcomes, whose
    log-ratio to the reference is the reward of a token. beta: its scale.
    """

    def __init__(self, context: WorkerContext, *, beta: float, **model: Any) -> None:
        super().__init__(context, **model)
        self._beta = beta

    @dispatch("split", reads=(*TOKENS, "ref_log_probs"), writes=("process_rewards",))
    def compute_process_reward(self, batch: Batch) -> Batch:
        """Adds process_rewards: beta · (log π_prm - log π_ref) of each response token, float32."""
        own = self.engine.forward(batch, {"log_probs": "process_rewards"})
        log_probs, bounds = own.ragged("process_rewards")
        reference, _ = batch.aligned("ref_log_probs", "response_ids").ragged("ref_log_probs")
        rewards = ragged_array(self._beta * (log_probs - reference), bounds)
        return own.with_columns({"process_rewards": rewards}, replace=True)

    @dispatch("split")
    def update_prm(self, batch: Batch, orders: Sequence[Sequence[int]]) -> StepStats:
        """Takes all optimizer steps of one trainer step: loss "prm", mini-batches in column
        `prm_mini_batch`.
        """
        return self._update(batch, "prm", MINI_BATCH(self.context.role), orders)
