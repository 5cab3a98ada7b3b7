"""The metrics that the console, the curves and the summary show, by the names under which they are logged.

Each is a tuple of names: the first that is there counts. A metric that is not there is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REWARD = ("reward/mean",)
RESPONSE_LENGTH = ("rollout/response_length",)
TRUNCATED = ("rollout/truncated_share",)
REFERENCE_KL = ("actor/kl_loss", "actor/kl_reward")  # how far the policy has gone from the reference
UPDATE_KL = ("actor/ppo_kl",)  # how far one update goes: to the policy before it (0 with one optimizer step)
ENTROPY = ("actor/entropy", "actor/entropy_sampled")
GRAD_NORM = ("actor/grad_norm",)
LOG_PROB_GAP = ("rollout/log_prob_gap_mean", "rollout/log_prob_gap")
LOSS = ("sft/loss", "pair/loss")
EVAL_LOSS = ("eval/sft/loss", "eval/pair/loss")
PAIR_ACCURACY = ("pair/accuracy",)
PAIR_MARGIN = ("pair/margin",)
LEARNING_RATE = ("actor/lr",)
VALUE_LOSS = ("critic/loss",)
COST = ("reward/cost_average",)
MULTIPLIER = ("actor/multiplier",)
PRM_LOSS = ("prm/loss",)
FILTERED = ("buffer/filtered_share",)
GENERATED_RATE = ("rollout/tokens_per_second", "perf/generated_tokens_per_s")
TRAINED_RATE = ("perf/trained_tokens_per_s",)
# Of asynchronous runs: staleness of the groups trained on, in versions; groups in flight when weights came;
# seconds of a weight transfer; shares of a step in which the trainer's and the rollout's hosts had work.
STALENESS = ("buffer/staleness_mean",)
STALENESS_MAX = ("buffer/staleness_max",)
IN_FLIGHT = ("buffer/in_flight",)
SYNC_SECONDS = ("timing/weight_sync_s",)
TRAINER_BUSY = ("perf/trainer_busy_share",)
ROLLOUT_BUSY = ("perf/rollout_busy_share",)

# Anything above 0 here is said loudly. The text is what one of them means.
ALARMS: Mapping[str, str] = {
    "actor/skipped_steps": "optimizer step(s) skipped: gradient not finite",
    "critic/skipped_steps": "critic step(s) skipped: gradient not finite",
    "reward/errors": "scorer error(s)",
    "reward/timeouts": "scorer timeout(s)",
    "reward/failed_share": "of the trajectories were not scored and are dropped",
}


def find(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """The first of `names` that has a number; None when none does."""
    for name in names:
        value = metrics.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
