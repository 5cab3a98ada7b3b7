"""The table of checks: each finds its own, at the step where it began, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from rondo.config import load
from rondo.config.schema import ChecksConfig
from rondo.core.errors import TrainError
from rondo.tracking import Health
from rondo.tracking.checks import AHEAD, CHECKS, why_flat

ROOT = Path(__file__).parents[2]
WELL: dict[str, float] = {
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/constant_group_share": 0.25,
    "reward/failed_share": 0.0,
    "actor/zero_advantage_share": 0.25,
    "actor/grad_norm": 0.3,
    "actor/entropy_sampled": 0.4,
    "actor/ppo_kl": 0.01,
    "actor/clip_fraction": 0.02,
    "actor/rerouted": 0.02,
    "split_difference/algorithm.policy_loss": 1e-7,
    "rollout/log_prob_gap": 1e-3,
    "rollout/response_length": 20.0,
    "rollout/response_length_max": 31.0,
    "rollout/truncated_share": 0.1,
    "buffer/staleness_mean": 0.0,
    "critic/explained_variance": 0.5,
    "critic/return": 0.5,
    "critic/return_squared": 0.3,
    "environment/steps/maze": 8.0,
    "environment/success/maze": 0.5,
    "environment/truncated_share/maze": 0.0,
    "environment/failed_steps/maze": 9.5,
    "environment/failed_steps_max/maze": 12.0,
}
# By check: how a step differs from a healthy one, the number that is told.
ILL: dict[str, tuple[dict[str, float], float]] = {
    "no_signal": ({"actor/zero_advantage_share": 1.0, "reward/mean": 0.0, "reward/max": 0.0}, 1.0),
    "truncated": ({"rollout/truncated_share": 0.75}, 0.75),
    "same_and_wrong": ({"actor/entropy_sampled": 1e-3, "reward/constant_group_share": 0.95}, 0.95),
    "gap": ({"rollout/log_prob_gap": 0.2}, 0.2),
    "gap_grows": ({"rollout/log_prob_gap": 0.02}, 20.0),
    "rerouted": ({"actor/rerouted": 0.4}, 0.4),
    "micro_batch": ({"split_difference/algorithm.policy_loss": 0.02}, 0.02),
    "stale": ({"buffer/staleness_mean": 5.5}, 5.5),
    "update_kl": ({"actor/ppo_kl": 0.3}, 0.3),
    "clipped": ({"actor/clip_fraction": 0.6}, 0.6),
    "no_gradient": ({"actor/grad_norm": 0.0}, 1.0),
    "still": ({"still/actor:model.norm.weight": 2.0}, 2.0),
    "length_for_reward": (
        {"reward/mean": 0.8, "rollout/response_length": 60.0, "eval/greedy/reward": 0.25},
        0.25,
    ),
    "same_score": ({}, 1.0),
    "critic_off": ({"critic/explained_variance": -3.0}, 3.0),
    "same_end": ({"environment/failed_steps/maze": 12.0}, 12.0),
    "failed": ({"reward/failed_share": 0.2}, 0.2),
}
BEST = WELL | {"eval/greedy/reward": 0.5}


def looked(*steps: dict[str, float]) -> Health:
    health = Health()
    for number, step in enumerate(steps, 1):
        health.add({"step": number, **step})
    return health


def test_every_check_has_its_key_and_its_case() -> None:
    names = [field.name for field in dataclasses.fields(ChecksConfig)]
    assert names == [*AHEAD, *CHECKS]
    assert list(CHECKS) == list(ILL)


@pytest.mark.parametrize("name", [name for name in ILL if name != "same_score"])
def test_a_check_finds_what_lasts_and_says_when_it_began_and_ended(name: str) -> None:
    changed, value = ILL[name]
    ill, steps = WELL | changed, CHECKS[name].steps
    assert looked(BEST, WELL, *[ill] * (steps - 1), WELL).found == []
    health = looked(BEST, WELL, *[ill] * (steps + 2), WELL, WELL)
    (found,) = health.found
    assert (found.check, found.began, found.step) == (name, 3, steps + 4)
    assert found.value == pytest.approx(value)
    # Once more, later: another finding.
    again = looked(BEST, *[ill] * steps, BEST, *[ill] * steps)
    assert [(one.check, one.began) for one in again.found] == [(name, 2), (name, steps + 3)]


def test_no_signal_is_told_in_the_first_step_and_not_when_all_is_learnt() -> None:
    flat = WELL | {"actor/zero_advantage_share": 1.0, "reward/mean": 0.0, "reward/max": 0.0}
    assert [one.began for one in looked(flat).found] == [1]
    assert looked(flat, flat, flat).found[0].step == 3
    learnt = WELL | {"actor/zero_advantage_share": 1.0, "reward/mean": 1.0, "reward/min": 1.0}
    assert looked(WELL, *[learnt] * 5).found == []
    always = looked(*[learnt] * 4).found  # there is nothing to learn
    assert [one.began for one in always] == [1]


def test_sampler_and_trainer_are_not_compared_over_versions() -> None:
    stale = WELL | {"rollout/log_prob_gap": 0.5, "buffer/staleness_mean": 1.0}
    assert looked(WELL, stale, stale).found == []


def test_a_policy_that_says_the_same_and_is_right_is_well() -> None:
    sure = WELL | {"actor/entropy_sampled": 1e-4, "reward/constant_group_share": 1.0, "reward/mean": 0.95}
    assert looked(WELL, *[sure] * 9).found == []


def test_longer_answers_are_no_fault_while_the_held_out_reward_rises() -> None:
    """The quickstart's own course: lengths are doubled, and rewards with them."""
    long = WELL | {"reward/mean": 0.9, "rollout/response_length": 60.0, "eval/greedy/reward": 0.9}
    assert looked(BEST, long, long).found == []


def scored(judge: float, answer: float) -> dict[str, float]:
    return WELL | {"reward/score/judge": judge, "reward/score/answer": answer}


def test_a_score_that_was_always_the_same_is_named_after_ten_steps() -> None:
    answers = [0.25, 0.25, 0.5, 0.25] * 4
    always = looked(*[scored(1.0, answer) for answer in answers])
    (found,) = always.found
    # From the third step on it is known that another one varies.
    assert (found.check, found.began, found.value) == ("same_score", 3, 1.0)
    assert "since the run began, and teach nothing: judge" in found.says


@pytest.mark.parametrize(
    "steps",
    [
        [scored(0.0, 0.1 * n) for n in range(20)],  # a penalty that nobody has earned
        # Ranks within a group: their mean is always the same.
        [scored(0.5, 0.1 * n) | {"reward/spread/judge": 1.0} for n in range(20)],
        [scored(1.0, 0.5)] * 20,  # nothing varies: other checks
        [scored(0.9, 0.4), *[scored(1.0, 0.1 * n) for n in range(20)]],  # it was learnt
        [WELL | {"reward/score/judge": 1.0}] * 20,
    ],
)
def test_a_score_that_is_as_it_may_be_is_not_told(steps: list[dict[str, float]]) -> None:
    assert looked(*steps).found == []


def test_a_score_is_not_judged_from_the_middle_of_a_run() -> None:
    health = Health()
    for step in range(30, 60):
        health.add({"step": step, **scored(1.0, step / 60)})
    assert health.found == []


@pytest.mark.parametrize(
    "changed",
    [
        {"environment/steps/maze": 12.0},  # every episode has so many
        {"environment/success/maze": 0.9},  # too few fail to say
        {"environment/failed_steps_max/maze": 3.0, "environment/steps/maze": 2.0},
    ],
)
def test_episodes_that_may_well_end_together(changed: dict[str, float]) -> None:
    together = WELL | {
        "environment/failed_steps/maze": changed.get("environment/failed_steps_max/maze", 12.0)
    }
    assert looked(*[together | changed] * 5).found == []
    other = WELL | {"environment/failed_steps/maze": 11.0, "environment/failed_steps_max/maze": 11.0}
    assert looked(*[together, other] * 4).found == []


def test_a_critic_is_not_judged_where_returns_are_all_alike() -> None:
    alike = WELL | {"critic/explained_variance": -50.0, "critic/return_squared": 0.2501}
    assert looked(*[alike] * 8).found == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reward/max": 0.0}, "all rewards are 0.000"),
        (
            {"reward/constant_group_share": 1.0},
            "within each group all rewards are equal, from 0.000 to 1.000",
        ),
        ({}, "rewards differ within groups, and algorithm.advantage made nothing of that"),
        ({"rollout/response_length_max": 20.0}, "all answers have 20.0 tokens"),
        ({"rollout/truncated_share": 1.0}, "all answers are cut off"),
        ({"reward/score/format": 0.0, "reward/score/math": 0.5}, "0 is the score of all by format"),
        ({"actor/entropy_sampled": 0.0}, "the policy has no entropy"),
    ],
)
def test_what_was_the_same_in_all_rows(changed: dict[str, float], said: str) -> None:
    assert said in why_flat(WELL | changed)


def test_a_check_stops_the_run_or_does_not_look() -> None:
    flat = {"step": 1, **WELL, **ILL["no_signal"][0]}
    assert Health({"no_signal": "off"}).add(flat) == []
    stopping = Health({"no_signal": "stop"})
    with pytest.raises(TrainError, match=r"tracking\.checks\.no_signal=warn goes on"):
        stopping.stops(stopping.add(flat))
    warning = Health()
    warning.stops(warning.add(flat))


def test_the_page_has_the_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| ([\d.]+) \| (\d+)", (ROOT / "docs/trouble.md").read_text(), re.M
    )
    assert {name: (float(least), int(steps)) for name, _, least, steps in rows} == {
        check.name: (check.threshold, check.steps) for check in CHECKS.values()
    }
    ahead = re.findall(r"^\| `(\w+)` \| [^|]*\| ([^|]*) \|$", (ROOT / "docs/trouble.md").read_text(), re.M)
    assert dict(ahead) == {check.name: check.remedy for check in AHEAD.values()}
    assert load(["quickstart"]).config.tracking.checks == ChecksConfig()
