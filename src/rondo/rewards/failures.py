"""When a reward function fails: what stops the run, what is dropped or tried again, and what is shown."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

from rondo.config.schema import RewardConfig
from rondo.core.errors import RewardError, users_frames
from rondo.core.types import Outcome, Trajectory
from rondo.rewards.execution import ScorerCrashError
from rondo.rewards.functions import RewardFunction

logger = logging.getLogger(__name__)

_LOGGED_FAILURES = 3  # of one kind
_LOGGED_CHARACTERS = 2000  # of one failure


class ScoringError(Exception):
    """A scorer failed for good and the policy does not stop the run."""

    def __init__(self, outcome: Outcome, text: str) -> None:
        super().__init__(text)
        self.outcome: Outcome = outcome
        self.text = text


class FailurePolicy:
    """Judges failures by reward.on_error and reward.on_timeout, logs and counts them.

    counts: metric -> failures and attempts that were repeated, until its reader starts anew.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._logged: dict[tuple[str, str], int] = {}
        self.counts = {"reward/errors": 0.0, "reward/timeouts": 0.0, "reward/retries": 0.0}

    def judge(
        self, function: RewardFunction, trajectory: Trajectory, error: Exception, *, last: bool
    ) -> ScoringError | None:
        """Returns the typed failure; None where the function is tried again, which `last` forbids.

        A TimeoutError of the function's own is one, too. Raises RewardError where the policy says stop.
        """
        if isinstance(error, TimeoutError):
            self.counts["reward/timeouts"] += 1
            text = str(error) or f"no score after {self._config.timeout_seconds} s (reward.timeout_seconds)"
            failure = ScoringError("reward_timeout", f"{function.name}: {text}")
            policy, detail = self._config.on_timeout, ""
        else:
            self.counts["reward/errors"] += 1
            detail = str(error) if isinstance(error, ScorerCrashError) else _users_part(error)
            text = detail.strip().rsplit("\n", 1)[-1]
            failure = ScoringError("reward_error", f"{function.name}: {text}")
            policy = self._config.on_error
        if policy == "stop":
            raise RewardError(_stop_message(function, trajectory, failure, detail)) from error
        self._log(function, trajectory, failure, detail)
        if policy == "drop" or last:
            return failure
        self.counts["reward/retries"] += 1
        return None

    def _log(
        self, function: RewardFunction, trajectory: Trajectory, failure: ScoringError, detail: str
    ) -> None:
        """Shows the first failures of a kind in full; the others are only counted (reward/errors, …)."""
        kind = (function.name, failure.text)
        self._logged[kind] = self._logged.get(kind, 0) + 1
        if self._logged[kind] > _LOGGED_FAILURES:
            return
        logger.error(
            "reward function %s failed (%s) on prompt %s, trajectory %s: %s\nresponse: %.*r\n%s",
            function.name,
            failure.outcome,
            trajectory.prompt.prompt_id,
            trajectory.trajectory_id,
            failure.text,
            _LOGGED_CHARACTERS,
            trajectory.text,
            detail,
        )
        if self._logged[kind] == _LOGGED_FAILURES:
            logger.error("further failures of this kind are counted and not shown: %s", failure.text)


def _users_part(error: Exception) -> str:
    """Returns the traceback without rondo's and asyncio's own frames; of our checks, the message only."""
    ours = ("asyncio", "concurrent/futures", "/threading.py")
    theirs = [f for f in users_frames(error) if not any(part in f.filename for part in ours)]
    shown = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)] if theirs else []
    return "".join([*shown, *traceback.format_exception_only(error)])


def _stop_message(
    function: RewardFunction, trajectory: Trajectory, failure: ScoringError, detail: str
) -> str:
    key = "on_timeout" if failure.outcome == "reward_timeout" else "on_error"
    remedy = f"Fix {function.spec}"
    if "signal" in failure.text and "thread" in failure.text:  # Python's own words, and math-verify's
        remedy = (
            "Signals work in no thread, where this function runs; in a process of its own they do: set "
            f"reward.isolation=process, or mark it @reward_function(run_in='process'). Else f{remedy[1:]}"
        )
    where = f"prompt {trajectory.prompt.prompt_id}, trajectory {trajectory.trajectory_id}"
    return (
        f"reward function {failure.text} ({where}, response {trajectory.text[:200]!r}). "
        f"{remedy}, or set reward.{key} to drop or retry\n{detail}"
    ).rstrip()


_REMEDIES = {
    "rollout_error": (
        "Fix the agent (rollout.agent), raise rollout.deadline_seconds, or see what engines died of"
    ),
    "context_full": "Raise rollout.max_tokens, or take fewer turns, or set rollout.on_full=score",
    "tool_error": "Fix the tool (rollout.tools), or raise its timeout_seconds",
    "environment_error": "Fix the environment (rollout.environments), or raise its timeout_seconds",
    "reward_error": "Fix the reward function, or raise reward.timeout_seconds",
}


def check_dropped_share(failures: Sequence[str], step_size: int, max_share: float) -> None:
    """Raises RewardError when more trajectories failed since the last step than `max_share` of a step's.

    failures: their outcomes, those of groups that were dropped included. step_size: trajectories per step.
    """
    if len(failures) > max_share * step_size:
        kinds = ", ".join(f"{failures.count(kind)} {kind}" for kind in sorted(set(failures)))
        remedies = {_REMEDIES.get(kind, _REMEDIES["reward_error"]) for kind in failures}
        raise RewardError(
            f"{len(failures)} trajectories failed ({kinds}) for one step of {step_size}, more than "
            f"reward.max_dropped_share={max_share}; the log has samples. {'. '.join(sorted(remedies))}"
        )
