"""Trajectories to training rows: the one place where an episode becomes columns of a Batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rondo.batch import ROW_ID, Batch, ragged_rows
from rondo.columns import EPISODE, GREEDY_ANSWER, SCORE, made_by
from rondo.errors import DataError
from rondo.types import SCORED, Prompt, Trajectory, request_seed


def index_columns(score_names: Iterable[str] = (), *, greedy_baseline: bool = False) -> tuple[str, ...]:
    """Returns the per-row columns of a group, which controller, buffer and loop hold; the rest stays where it
    was made.
    """
    greedy = made_by(GREEDY_ANSWER) if greedy_baseline else ()
    return (*made_by(EPISODE, per="row"), *greedy, *map(SCORE, score_names))


def row_id(seq: int, sample_index: int, step_index: int = 0) -> int:
    """A number that no other row of the run has: 20 bits for the sample, 12 for the step within the
    trajectory.
    """
    if not (0 <= sample_index < 1 << 20 and 0 <= step_index < 1 << 12):
        raise DataError(f"sample {sample_index}, step {step_index}: beyond what a row id can hold")
    return (seq << 32) | (sample_index << 12) | step_index


def rows_from_trajectories(
    trajectories: Sequence[Trajectory], score_names: Sequence[str] = (), *, accuracy: str | None = None
) -> Batch:
    """One row per single-context trajectory, with the identity, token, structure and outcome columns of
    DESIGN §5. accuracy: the score that is the column of this name; None: it is NaN.
    """
    for t in trajectories:
        _check(t)
    columns: dict[str, object] = {
        ROW_ID: np.array([row_id(t.prompt.seq, t.sample_index) for t in trajectories], np.int64),
        "seq": np.array([t.prompt.seq for t in trajectories], np.int64),
        "group_id": np.array([t.prompt.seq for t in trajectories], np.int64),
        "prompt_id": [t.prompt.prompt_id for t in trajectories],
        "source": [t.prompt.source for t in trajectories],
        "trajectory_id": [t.trajectory_id for t in trajectories],
        "sample_index": np.array([t.sample_index for t in trajectories], np.int32),
        "step_index": np.zeros(len(trajectories), np.int32),
        "prompt_length": np.array([len(t.prompt.token_ids) for t in trajectories], np.int32),
        "response_length": np.array([len(t.response_ids) for t in trajectories], np.int32),
        "num_trained_tokens": np.array([int(t.response_mask.sum()) for t in trajectories], np.int32),
        "oldest_version": np.array([_oldest_version(t) for t in trajectories], np.int32),
        "finish_reason": [t.finish_reason for t in trajectories],
        "outcome": [t.outcome for t in trajectories],
        "reward": np.array([t.reward for t in trajectories], np.float32),
        "accuracy": _scores(trajectories, accuracy),
        # For step-level credit (GiGPO). A row is a whole trajectory: one step, which starts at the prompt.
        "step_reward": np.array([_step_reward(t) for t in trajectories], np.float32),
        "anchor_id": np.array([_anchor_id(t) for t in trajectories], np.int64),
    }
    for name in score_names:
        columns[SCORE(name)] = _scores(trajectories, name)
    columns |= {
        "prompt_ids": ragged_rows([t.prompt.token_ids for t in trajectories], np.int32),
        "response_ids": ragged_rows([t.response_ids for t in trajectories], np.int32),
        "response_mask": ragged_rows([t.response_mask for t in trajectories], np.uint8),
        "rollout_log_probs": ragged_rows([t.rollout_log_probs for t in trajectories], np.float32),
        "policy_versions": ragged_rows([t.policy_versions for t in trajectories], np.int32),
        "prompt_text": [prompt_text(t.prompt) for t in trajectories],
        "text": [t.text for t in trajectories],
    }
    return Batch.of(columns)  # type: ignore[arg-type]


def prompt_text(prompt: Prompt) -> str:
    """The prompt as people read it: the messages' contents, or the raw text."""
    if prompt.messages:
        return "\n".join(str(message.get("content") or "") for message in prompt.messages)
    return str(prompt.fields.get("prompt", ""))


def is_scored(batch: Batch) -> np.ndarray:
    """bool [B]: rows whose trajectory has a reward; the others are typed failures, on which nothing
    is trained.
    """
    return np.asarray(batch.scalars("outcome") == SCORED)


def _scores(trajectories: Sequence[Trajectory], name: str | None) -> np.ndarray:
    return np.array([t.scores.get(name or "", float("nan")) for t in trajectories], np.float32)


def _step_reward(t: Trajectory) -> float:
    """Returns the reward of the last policy turn, where the agent loop gave it one; else the trajectory's."""
    rewards = [turn.reward for turn in t.turns if turn.kind == "policy"]
    return t.reward if not rewards or rewards[-1] is None else rewards[-1]


def _anchor_id(t: Trajectory) -> int:
    """The same number for the same observation before the first policy turn; by default that is the
    prompt.
    """
    anchors = [turn.anchor for turn in t.turns if turn.kind == "policy"]
    return request_seed(0, (anchors and anchors[0]) or t.prompt.prompt_id)


def _oldest_version(trajectory: Trajectory) -> int:
    policy = trajectory.policy_versions[trajectory.response_mask.astype(bool)]
    return int(policy.min()) if len(policy) else -1


def _check(t: Trajectory) -> None:
    length = len(t.response_ids)
    for name in ("response_mask", "rollout_log_probs", "policy_versions"):
        if len(getattr(t, name)) != length:
            raise DataError(
                f"trajectory {t.trajectory_id}: {name} has {len(getattr(t, name))} entries for {length} "
                f"response tokens; "
                "an agent loop must give one per token (mask 0, log-prob 0 and version -1 for tokens it did "
                "not sample)"
            )
    if t.outcome == SCORED and not np.isfinite(t.reward):
        raise DataError(f"trajectory {t.trajectory_id}: outcome is {SCORED!r} but its reward is {t.reward}")
