"""What is watched in the metrics of a run: one table of checks, for the run while it goes on and for
`rondo doctor RUN`.

A check compares a number of each step with a threshold, and is told once that has held for some steps in a
row. What is known before the first step (AHEAD) is told then; `trainers/commands/ahead.py` looks for it.
`tracking.checks` says of each whether the run then warns, stops, or does not look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rondo.core.errors import TrainError
from rondo.tracking.shown import (
    ENTROPY,
    GRAD_NORM,
    RESPONSE_LENGTH,
    REWARD,
    STALENESS,
    UPDATE_KL,
    Found,
    Sample,
    find,
)
from rondo.tracking.text import format_number, shorten

Metrics = Mapping[str, Any]
Mode = Literal["warn", "stop", "off"]

NO_ADVANTAGE = ("actor/zero_advantage_share",)
HELD_OUT = ("eval/greedy/reward", "eval/sampled/reward")
STILL = "still/"  # before the first of the tensors that a step has left as they were
_SCORES = "reward/score/"
SPREAD = "reward/spread/"  # before a score: the largest of a step less the smallest
_FAILED = "environment/failed_steps/"
_EPISODES = ("steps", "success", "truncated_share", "failed_steps_max")
_EXAMPLE = 200  # characters of an answer


@dataclass
class Course:
    """What has been seen of a run before the line of metrics that is looked at."""

    best_reward: float = -math.inf
    """The largest reward of any answer, that line's among them."""
    least_reward: float = math.inf
    """The smallest one."""
    least_gap: float = math.inf
    """The smallest `_gap` of the first lines that had one."""
    gaps: int = 0
    """How many had one."""
    ends: float = 0.0
    """After how many steps all failed episodes of the line before ended; 0: not all after as many."""
    scores: dict[str, float] = field(default_factory=dict)
    """By reward function, the mean of the first line; NaN since it was another."""
    evaluated: tuple[float, float, float] | None = None
    """Of the best evaluation: its reward, and reward and response length of training then."""


@dataclass(frozen=True)
class MetricCheck:
    """One row of the table."""

    name: str
    """Its key below `tracking.checks`."""
    number: Callable[[Metrics, Course], float | None]
    """The number of a step that is compared; None: this line says nothing about it."""
    threshold: float
    """The number is too large from here on."""
    steps: int
    """For so many steps in a row."""
    what: str
    """What that means, with the number as {value}."""
    remedy: str
    """What to look at, and what to set."""
    at_once: bool = False
    """In a run's first step, once is enough."""


def _of(*names: str) -> Callable[[Metrics, Course], float | None]:
    return lambda line, course: find(line, names)


def _no_advantage(line: Metrics, course: Course) -> float | None:
    """The share of rows without an advantage; 0 in a later step whose answers are all as good as the best."""
    reward, share = find(line, REWARD), find(line, NO_ADVANTAGE)
    if share is None or reward is None or line["step"] <= 1:
        return share
    is_best = course.least_reward < course.best_reward and reward >= course.best_reward - 1e-6
    return 0.0 if is_best else share


def _same_and_wrong(line: Metrics, course: Course) -> float | None:
    """The share of groups whose answers have one reward, where the policy has no entropy left and most
    answers are not as good as the best.
    """
    entropy, reward = find(line, ENTROPY), find(line, REWARD)
    if entropy is None or reward is None:
        return None
    most = course.least_reward + 0.9 * (course.best_reward - course.least_reward)
    if entropy > 0.01 or reward >= most:
        return 0.0
    return find(line, ("reward/constant_group_share",))


def _gap(line: Metrics, course: Course) -> float | None:
    """Mean |log-prob of the trainer - of the sampler|, of rows of the version that learns."""
    return None if find(line, STALENESS) else find(line, ("rollout/log_prob_gap",))


def _gap_since(line: Metrics, course: Course) -> float | None:
    """How many times the gap is that of the run's first three steps with one: engines that go on with old
    weights have a small one at first. Below 1e-3 it is rounding; of a large one the check `gap` speaks.
    """
    gap = _gap(line, course)
    if gap is None:
        return None
    if course.gaps < 3:
        course.gaps += 1
        course.least_gap = min(course.least_gap, gap)
    return 0.0 if gap >= CHECKS["gap"].threshold else gap / max(course.least_gap, 1e-3)


def _rerouted(line: Metrics, course: Course) -> float | None:
    """The share of a mixture's choices that the trainer's routers would not make, in rows of the version that
    learns.
    """
    return None if find(line, STALENESS) else find(line, ("actor/rerouted",))


def _below(prefix: str) -> Callable[[Metrics, Course], float | None]:
    """Returns the largest of the metrics whose names begin with `prefix`."""
    return lambda line, course: max((line[name] for name in line if name.startswith(prefix)), default=None)


def _still(line: Metrics, course: Course) -> float | None:
    """How many tensors of a role were left as they were by a step that changed others; 0 where the step has
    an update, and none was.
    """
    return _below(STILL)(line, course) or (None if find(line, GRAD_NORM) is None else 0.0)


def _no_gradient(line: Metrics, course: Course) -> float | None:
    """1 where rows have advantages and the gradient is 0."""
    norm, share = find(line, GRAD_NORM), find(line, NO_ADVANTAGE)
    return None if norm is None or share is None else float(norm == 0 and share < 1)


def _length_for_reward(line: Metrics, course: Course) -> float | None:
    """By how much the held-out reward has fallen since it was best, where that of training has risen since
    and answers have other lengths, by half or more.
    """
    held_out, reward, length = (find(line, names) for names in (HELD_OUT, REWARD, RESPONSE_LENGTH))
    if held_out is None or reward is None or length is None:
        return None
    best = course.evaluated
    if best is None or held_out > best[0]:
        course.evaluated = (held_out, reward, length)
        return 0.0
    longer, shorter = max(length, best[2]), max(min(length, best[2]), 1e-9)
    return best[0] - held_out if reward > best[1] and longer >= 1.5 * shorter else 0.0


def _same_end(line: Metrics, course: Course) -> float | None:
    """After how many steps episodes without success ended by the rules, where it is as many for all, they are
    a quarter of the episodes at least, and others are shorter; else 0, as where it was another number before.
    """
    before, course.ends = course.ends, 0.0
    names = [name.removeprefix(_FAILED) for name in line if name.startswith(_FAILED)]
    for name in names:
        own = {key: line.get(f"environment/{key}/{name}", 0.0) for key in _EPISODES}
        failed, most = line[f"{_FAILED}{name}"], own["failed_steps_max"]
        share = 1 - own["success"] - own["truncated_share"]
        if failed == most and own["steps"] < most and share >= 0.25:
            course.ends = max(course.ends, most)
    if not names:
        return None
    return course.ends if before in (0.0, course.ends) else 0.0


def _same_scores(course: Course) -> list[str]:
    """Names the scores that are not 0 and were the same for all answers so far, where another score was not.
    (A score of 0 may be a penalty that nobody has earned.)
    """
    varied = any(map(math.isnan, course.scores.values()))
    return [name for name, mean in course.scores.items() if varied and mean and not math.isnan(mean)]


def _same_score(line: Metrics, course: Course) -> float | None:
    """How many of the scores are such, of a run that is seen from its first step on."""
    scores = {name.removeprefix(_SCORES): line[name] for name in line if name.startswith(_SCORES)}
    if line["step"] == 1:
        course.scores = scores
    for name, mean in course.scores.items():
        varies = line.get(f"{SPREAD}{name}", 0.0) > 0  # as do ranks within a group, whose mean is the same
        if varies or not math.isclose(scores.get(name, mean), mean, rel_tol=1e-9):
            course.scores[name] = math.nan
    return float(len(_same_scores(course))) if course.scores else None


def _off(line: Metrics, course: Course) -> float | None:
    """How much worse than a constant the critic predicts returns (the explained variance, turned round),
    where they vary by a twentieth of the rewards so far; 0 where they vary less.
    """
    explained, squared = (
        find(line, (f"critic/{name}",)) for name in ("explained_variance", "return_squared")
    )
    if explained is None or squared is None:
        return None
    spread = math.sqrt(max(squared - line["critic/return"] ** 2, 0.0))
    return -explained if spread >= 0.05 * (course.best_reward - course.least_reward) > 0 else 0.0


CHECKS: Mapping[str, MetricCheck] = {
    check.name: check
    for check in (
        MetricCheck(
            "no_signal",
            _no_advantage,
            1.0,
            3,
            "{value:.0%} of the rows have no advantage: nothing is learnt",
            "Read answers (`rondo show RUN`) and score a right one by hand. Rewards within a group differ "
            "with more answers (rollout.n), easier prompts, a warm start; algorithm.filter leaves equal "
            "groups out",
            at_once=True,
        ),
        MetricCheck(
            "truncated",
            _of("rollout/truncated_share"),
            0.5,
            3,
            "{value:.0%} of the answers are cut off before their end",
            "Raise rollout.max_tokens; if answers do not end by themselves, look for the end-of-turn token "
            "(`rondo show RUN`) in the template and in what the warm start has learnt",
        ),
        MetricCheck(
            "same_and_wrong",
            _same_and_wrong,
            0.9,
            5,
            "in {value:.0%} of the groups all answers have one reward, mostly not the best, and the policy "
            "has no entropy left",
            "It says the same each time. Go back to a checkpoint before that; lower actor.optimizer.lr, "
            "raise clip_high, add algorithm.entropy_coef or a KL to the reference (algorithm.kl)",
        ),
        MetricCheck(
            "gap",
            _gap,
            0.1,
            1,
            "sampler and trainer differ by {value:.2g} nats per token, with the same weights",
            "They compute another model, or one in another precision: compare rollout.dtype with "
            "actor.compute_dtype and the settings of the engine, read docs/weights.md; "
            "algorithm.rollout_correction weights what cannot be made equal",
        ),
        MetricCheck(
            "gap_grows",
            _gap_since,
            8.0,
            2,
            "sampler and trainer are {value:.0f} times as far apart as in the first steps",
            "Is the engine still at the weights of an earlier version, or without some of them? Compare "
            "weights/canary_gap, restart from the last checkpoint: if the gap is small again, it is that",
        ),
        MetricCheck(
            "rerouted",
            _rerouted,
            0.3,
            3,
            "the trainer's routers would send {value:.0%} of the choices to other experts than they were "
            "sent to",
            "Are the routes those of these tokens, and of these weights? Compare rollout.dtype with "
            "actor.compute_dtype, lower actor.optimizer.lr; actor.router.replay=null trains without them",
        ),
        MetricCheck(
            "micro_batch",
            _below("split_difference/"),
            1e-3,
            1,
            "a loss of yours is another ({value:.2g} of its largest entry) when its rows are in two "
            "micro-batches",
            "It must be a function of each row: what is taken over the whole mini-batch (a mean, a standard "
            "deviation) is computed in `prepare` (docs/method.md)",
        ),
        MetricCheck(
            "stale",
            _of(*STALENESS),
            4.0,
            3,
            "rows are {value:.1f} versions old, on average",
            "Lower trainer.max_staleness, or give the engines more devices",
        ),
        MetricCheck(
            "update_kl",
            _of(*UPDATE_KL),
            0.2,
            3,
            "a step moves the policy by {value:.2g} nats per token",
            "Lower actor.optimizer.lr, actor.epochs or clip_high; raise actor.mini_batch_size",
        ),
        MetricCheck(
            "clipped",
            _of("actor/clip_fraction"),
            0.5,
            3,
            "{value:.0%} of the tokens are clipped and have no gradient",
            "Lower actor.optimizer.lr or actor.epochs, or widen clip_low and clip_high",
        ),
        MetricCheck(
            "no_gradient",
            _no_gradient,
            1.0,
            3,
            "there are advantages, and the gradient is 0",
            "Is anything trained (actor.freeze), does the loss depend on log_probs, is its weight 0",
        ),
        MetricCheck(
            "still",
            _still,
            1.0,
            3,
            "{value:.0f} tensors are as they were before the step, while others learn",
            "The metric still/<name> has the first of them. Does a hook of yours, or a module that the loss "
            "never reaches, keep its gradient at 0; or is each update smaller than what actor.param_dtype "
            "rounds? What is not to learn is named in actor.freeze",
        ),
        MetricCheck(
            "length_for_reward",
            _length_for_reward,
            0.05,
            1,
            "the held-out reward has lost {value:.2g} since it was best, while that of training rose and "
            "answers changed in length by half or more",
            "The reward pays for length: read the best and the worst answers (`rondo show RUN --best`), and "
            "take the model of the best evaluation (checkpoint.best)",
        ),
        MetricCheck(
            "same_score",
            _same_score,
            1.0,
            10,
            "{value:.0f} of the scores are the same for every answer since the run began, and teach nothing",
            "Score a wrong answer by hand: does that function, or judge, say yes to it, too? Else give it no "
            "weight (reward.functions)",
        ),
        MetricCheck(
            "critic_off",
            _off,
            1.0,
            5,
            "the critic predicts returns worse than a constant would: its explained variance is -{value:.2g}",
            "Is its value head one of other rewards (critic.path: a reward model's, say), or "
            "critic.optimizer.lr too high? Without critic.path it begins with values of 0; "
            "critic.warmup_steps has it learn alone first",
        ),
        MetricCheck(
            "same_end",
            _same_end,
            5.0,
            3,
            "all episodes without success end by the rules, and after {value:.0f} steps each; others are "
            "shorter",
            "If that is a limit of the environment's own, and no rule of the game, it must say truncated and "
            "not done (gymnasium: its TimeLimit says truncated, a limit inside of the environment may say "
            "terminated): read last steps (`rondo show RUN --worst`)",
        ),
        MetricCheck(
            "failed",
            _of("reward/failed_share"),
            0.1,
            3,
            "{value:.0%} of the trajectories have no score and are dropped",
            "`rondo show RUN --failed` has them, with the scorer's error",
        ),
    )
}


@dataclass(frozen=True)
class AheadCheck:
    """A row of the table that is looked at once, before the first step."""

    name: str
    """Its key below `tracking.checks`."""
    what: str
    """What that means, with what is known of this run as {told}."""
    remedy: str
    """What to look at, and what to set."""

    def found(self, told: str) -> Found:
        """Returns what was found."""
        return Found(self.name, 0, 0, None, f"{self.name}: {self.what.format(told=told)}", self.remedy)


AHEAD: Mapping[str, AheadCheck] = {
    check.name: check
    for check in (
        AheadCheck(
            "template_end",
            "the chat template writes no end of turn, a token behind an answer: {told}",
            "Write the tokenizer's end-of-sequence token behind the assistant's content, in a template of "
            "your own (model.chat_template)",
        ),
        AheadCheck(
            "template_clock",
            "the chat template writes the time: the same rows are other prompts tomorrow, and so for a run "
            "that goes on, a second run and what serves the model{told}",
            "Give the date as an option of the template (model.chat_template_options), or take its "
            "strftime_now out (model.chat_template)",
        ),
        AheadCheck(
            "template_thoughts",
            "the chat template leaves the thoughts of earlier answers out: {told}",
            "Use a template that keeps them, in training and where the model is served (model.chat_template "
            "goes into the export), or have only last answers learnt (a row per answer, or `trainable: "
            "false` at the earlier ones)",
        ),
        AheadCheck(
            "foreign_end",
            "the model's folder ends answers at what is no special token of the tokenizer: {told}",
            "Are both of one model? Correct eos_token_id in generation_config.json (or config.json), or mark "
            "the token as special in the tokenizer's files",
        ),
        AheadCheck(
            "overlong_unreached",
            "the reward function overlong is 0 for every answer: {told}",
            "Lower its max_tokens or raise its buffer (DAPO: max_tokens is rollout.max_tokens), or remove it",
        ),
        AheadCheck(
            "format_opened",
            "the reward function format is 0 for every answer: {told}",
            "Begin its tags with the one that the template opens, or switch that off "
            "(model.chat_template_options)",
        ),
        AheadCheck(
            "repeated_rows",
            "more than half of the rows have the tokens of another one ({told})",
            "Look at the rows, and at what has written them",
        ),
        AheadCheck(
            "held_out_trained",
            "data.eval has rows of data.train, and does not say how the model does at new ones: {told}",
            "Take these rows out of data.train, or evaluate on others",
        ),
        AheadCheck(
            "warm_up",
            "the learning rate is still warming up when the run ends: {told}",
            "Lower warmup_steps, or train for more steps",
        ),
    )
}


def why_flat(line: Metrics) -> str:
    """Says what was the same in all rows of a step without an advantage, or that the rewards were not."""
    same = []
    least, most, length = (find(line, (name,)) for name in ("reward/min", "reward/max", *RESPONSE_LENGTH))
    if least is not None and most is not None:
        if least == most:
            same.append(f"all rewards are {format_number(most)}")
        elif (constant := find(line, ("reward/constant_group_share",))) == 1:
            told = f"within each group all rewards are equal, from {format_number(least)} to "
            same.append(told + format_number(most))
        elif constant is not None:
            same.append("rewards differ within groups, and algorithm.advantage made nothing of that")
    zeros = [name.removeprefix(_SCORES) for name in line if name.startswith(_SCORES) and line[name] == 0]
    if zeros and len([name for name in line if name.startswith(_SCORES)]) > 1:
        same.append(f"0 is the score of all by {', '.join(zeros)}")
    if length is not None and length == find(line, ("rollout/response_length_max",)):
        same.append(f"all answers have {format_number(length)} tokens")
    if find(line, ("rollout/truncated_share",)) == 1:
        same.append("all answers are cut off")
    if find(line, ("actor/entropy_sampled",)) == 0:
        same.append("the policy has no entropy")
    return ", ".join(same)


class Health:
    """The checks of one run. Add its lines of metrics in order."""

    def __init__(self, modes: Mapping[str, Mode] = {}) -> None:
        """modes: of checks by name; those that are not named warn."""
        self._modes = modes
        self._course = Course()
        self._begun: dict[str, int] = {}  # where a number is too large, since when
        self._steps: dict[str, int] = {}  # and for how many lines
        self._now: dict[str, Found] = {}
        self.found: list[Found] = []
        """All so far, in the order in which they began."""

    def add(self, line: Metrics, sample: Sample | None = None) -> list[Found]:
        """Takes a line of metrics (`step` among them) in; returns what is found with it. sample: an answer of
        that step.
        """
        course, step = self._course, int(line["step"])
        most, least = find(line, ("reward/max",)), find(line, ("reward/min",))
        course.best_reward = max(course.best_reward, -math.inf if most is None else most)
        course.least_reward = min(course.least_reward, math.inf if least is None else least)
        return [
            found
            for check in CHECKS.values()
            if self._modes.get(check.name) != "off"
            and (found := self._look(check, check.number(line, course), step, line, sample)) is not None
        ]

    def _look(
        self, check: MetricCheck, value: float | None, step: int, line: Metrics, sample: Sample | None
    ) -> Found | None:
        name = check.name
        if value is None:
            return None
        if value < check.threshold or math.isnan(value):
            for kept in (self._begun, self._steps, self._now):
                kept.pop(name, None)
            return None
        began = self._begun.setdefault(name, step)
        self._steps[name] = self._steps.get(name, 0) + 1
        if name in self._now:
            self._now[name].step, self._now[name].value = step, value
            return None
        enough = 1 if check.at_once and step == 1 else check.steps
        if self._steps[name] < enough:
            return None
        says = f"{name}: {check.what.format(value=value)}"
        if name == "no_signal":
            says = "; ".join(filter(None, [says, why_flat(line), _example(sample)]))
        if name == "same_score":
            says += f": {', '.join(_same_scores(self._course))}"
        found = self._now[name] = Found(name, began, step, value, says, check.remedy)
        self.found.append(found)
        return found

    def stops(self, found: Sequence[Found]) -> None:
        """Raises TrainError for the first of these whose check is to stop the run."""
        for one in found:
            if self._modes.get(one.check) == "stop":
                raise TrainError(f"{one.line()}. tracking.checks.{one.check}=warn goes on")


def _example(sample: Sample | None) -> str:
    if sample is None:
        return ""
    answer = shorten(sample.response.replace("\n", " "), _EXAMPLE)
    return f"an answer: {answer!r}, reward {format_number(sample.reward)}"
