"""Numbers that adapt: the built-in rules by hand, and what a run keeps of them."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rondo.algorithms import bind, check_algorithm, update_kl_coef
from rondo.algorithms.coefficients import adaptive_kl, entropy_target, lagrange
from rondo.config import load
from rondo.config.schema import (
    AlgorithmConfig,
    CoefficientConfig,
    ConstraintConfig,
    FunctionConfig,
    TermConfig,
)
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import ConfigError, TrainError
from rondo.core.types import StepStats
from rondo.trainers.program import Coefficients, plan_program


def test_skyworks_example() -> None:
    """The reference's: entropies .15, .18, .25, .10 under a target of .2."""
    value, seen = 0.0, []
    for entropy in (0.15, 0.18, 0.25, 0.10):
        value, read = entropy_target(value, {"actor/entropy_sampled": entropy}, target=0.2)
        seen.append((value, read))
    kept = [1e-4, 2e-4, 1e-4, 2e-4]
    assert [value for value, _ in seen] == pytest.approx(kept)
    assert [read for _, read in seen] == pytest.approx([1e-4, 2e-4, 0.0, 2e-4])


def test_it_stays_within_its_bounds() -> None:
    low = {"actor/entropy_sampled": 0.0}
    assert entropy_target(5e-3, low, target=0.2) == (5e-3, 5e-3)
    assert entropy_target(0.0, {"actor/entropy_sampled": 1.0}, target=0.2) == (0.0, 0.0)
    with pytest.raises(ConfigError, match="entropy_target needs step"):
        entropy_target(0.0, low, target=0.2, step=-1.0)


def test_the_two_that_have_keys_of_their_own() -> None:
    metrics = {"actor/kl_loss": 0.03, "rows": 64.0, "score/harm": 1.5}
    expected = update_kl_coef(0.5, 0.03, 0.1, 1000, 64)
    assert adaptive_kl(0.5, metrics, metric="actor/kl_loss", target=0.1, horizon=1000) == expected
    (kept, average), read = lagrange(1.0, metrics, cost="harm", limit=0.5, lr=0.1, smoothing=0.9)
    assert (kept, average, read) == (pytest.approx(math.exp(0.1)), 1.5, kept)
    _, then = lagrange([1.0, 0.5], metrics, cost="harm", limit=0.5, lr=0.1, smoothing=0.9)
    assert then == pytest.approx(math.exp(0.1 * 0.1))  # the average is .9 · .5 + .1 · 1.5


ALGORITHM = AlgorithmConfig(
    coefficients={"alpha": CoefficientConfig("entropy_target", {"target": 0.2}, start=1e-4)},
    terms=(TermConfig("entropy", by="alpha", coef=2.0),),
    constraint=ConstraintConfig(cost="harm"),
)


def batch(harm: list[float]) -> BatchRef:
    index = {"trajectory_id": np.arange(len(harm)), "score/harm": np.array(harm, np.float32)}
    index |= {"row_id": np.arange(len(harm)), "step_index": np.zeros(len(harm), np.int64)}
    return cast(BatchRef, Rows(Batch.of(index)))


class Rows(SimpleNamespace):
    """As much of a BatchRef as an adapting number looks at."""

    def __init__(self, index: Batch) -> None:
        super().__init__(index=index)

    def __len__(self) -> int:
        return len(self.index)


def stats(entropy: float) -> StepStats:
    made = StepStats()
    made.add_mean("actor/entropy_sampled", entropy)
    return made


def test_a_checkpoint_goes_on_with_the_same_numbers() -> None:
    """After each of three steps; also from one that an older rondo wrote."""
    whole = Coefficients(ALGORITHM)
    assert whole.read == {"alpha": 1e-4, "multiplier": 1.0}
    for entropy, harm in ((0.1, 2.0), (0.3, 0.0), (0.1, 1.0)):
        other = Coefficients(ALGORITHM)
        other.load_state(whole.state())
        for one in (whole, other):
            one.adapt(batch([harm, harm]), stats(entropy))
        assert other.state() == whole.state()
        assert other.read == whole.read
    older = Coefficients(ALGORITHM)
    older.load_state({"kl_coef": None, "constraint": [2.5, 0.75]})
    assert older.read == {"alpha": 1e-4, "multiplier": 2.5}


def test_what_a_step_used_is_in_its_metrics() -> None:
    said, numbers = stats(0.1), Coefficients(ALGORITHM)
    numbers.adapt(batch([2.0, 4.0]), said)
    values = said.values()
    assert values["actor/coefficient/alpha"] == 1e-4
    assert values["actor/multiplier"] == 1.0
    assert values["reward/cost_average"] == 3.0
    assert numbers.read["alpha"] == pytest.approx(2e-4)


def broken(value: float, metrics: Any) -> Any:
    return metrics["actor/entropy_sampled"] * math.inf


def test_what_is_no_number_stops_the_run() -> None:
    chosen = {"alpha": CoefficientConfig(f"{__name__}.broken")}
    numbers = Coefficients(dataclasses.replace(ALGORITHM, coefficients=chosen))
    with pytest.raises(TrainError, match="alpha became inf"):
        numbers.adapt(batch([1.0]), stats(0.1))


def test_a_metric_that_is_not_there_is_named() -> None:
    """A number that follows nothing would stay as it is without a word."""
    options = {"metric": "actor/entropy_smapled", "target": 0.1, "horizon": 10}
    chosen = {"alpha": CoefficientConfig("adaptive_kl", options, start=1.0)}
    numbers = Coefficients(dataclasses.replace(ALGORITHM, coefficients=chosen))
    with pytest.raises(TrainError, match="did you mean 'actor/entropy_sampled'"):
        numbers.adapt(batch([1.0]), stats(0.1))


def test_a_mean_over_nothing_moves_no_number() -> None:
    """All tokens of the step are masked, and no answer has the score."""
    numbers, said = Coefficients(ALGORITHM), StepStats()
    said.add_mean("actor/entropy_sampled", 0.0, 0.0)
    before = numbers.state()
    numbers.adapt(batch([math.nan, math.nan]), said)
    assert numbers.state() == before
    assert "reward/cost_average" not in said.values()


def test_where_the_actors_update_fell_out_what_it_tells_moves_no_number() -> None:
    """Each mini-batch was left out: its loss told nothing. What else there is moves the others."""
    numbers, said = Coefficients(ALGORITHM), StepStats(sums={"actor/idle_mini_batches": 2.0})
    numbers.adapt(batch([2.0, 4.0]), said)
    assert numbers.read["alpha"] == 1e-4
    assert numbers.read["multiplier"] > 1.0
    said.add_mean("actor/loss", 0.0)  # of another mini-batch, which was not
    with pytest.raises(TrainError, match="did not measure"):
        numbers.adapt(batch([2.0, 4.0]), said)


def test_answers_without_a_score_are_in_no_mean() -> None:
    numbers, said = Coefficients(ALGORITHM), stats(0.1)
    numbers.adapt(batch([2.0, math.nan, 4.0]), said)
    assert said.values()["reward/cost_average"] == 3.0


def three(value: float, metrics: Any) -> Any:
    return 1.0, 2.0, 3.0


def a_tuple(value: float, metrics: Any) -> Any:
    return (1, 2), 0.5


def writes(value: float, metrics: Any) -> float:
    metrics["rows"] = 0.0
    return value


WRONG = {three: r"returned.*two things", a_tuple: r"keeps .*give back as something else", writes: "read-only"}


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_what_a_rule_may_not_do(rule: Any) -> None:
    chosen = {"alpha": CoefficientConfig(f"{__name__}.{rule.__name__}")}
    numbers = Coefficients(dataclasses.replace(ALGORITHM, coefficients=chosen))
    with pytest.raises(TrainError, match=WRONG[rule]):
        numbers.adapt(batch([1.0]), stats(0.1))


def narrow(value: float, metrics: Any) -> Any:
    return np.float32(0.5)


def test_numpys_numbers_are_numbers() -> None:
    chosen = {"alpha": CoefficientConfig(f"{__name__}.narrow")}
    numbers = Coefficients(dataclasses.replace(ALGORITHM, coefficients=chosen))
    numbers.adapt(batch([1.0]), stats(0.1))
    assert json.loads(json.dumps(numbers.state()))["coefficients"]["alpha"] == [0.5, 0.5]


def without_value(*, by: float = 1.0) -> float:
    return by


def with_a_start(value: float, metrics: Any, *, start: float = 1.0) -> float:
    return value + start


REFUSED = {
    "a rule without its two parameters": (
        f"coefficients={{a: {{name: '{__name__}.without_value'}}}}",
        "a rule is",
    ),
    "a rule with an option that is a key": (
        f"coefficients={{a: {{name: '{__name__}.with_a_start'}}}}",
        "'start'",
    ),
    "a start above its bound": ("coefficients={a: {name: entropy_target, target: 1, start: 1}}", "start"),
    "a factor that starts at 0": (
        "coefficients={a: {name: adaptive_kl, metric: x, target: 1, horizon: 1}}",
        "start > 0",
    ),
    "an unknown rule": ("coefficients={alpha: {name: entropy_targte, target: 1}}", "entropy_target"),
    "an option out of range": (
        "coefficients={alpha: {name: entropy_target, target: 1, step: -1}}",
        "algorithm.coefficients.*entropy_target needs step",
    ),
    "an unknown option": ("coefficients={alpha: {name: entropy_target, targte: 1}}", "targte"),
    "a name of a column": ("coefficients={reward: {name: entropy_target, target: 1}}", "no column's"),
    "no name of Python's": ("coefficients={a-b: {name: entropy_target, target: 1}}", "no column's"),
    "a term by nothing": ("terms=[{name: entropy, by: alhpa}]", "there is no 'alhpa'"),
    "an unknown term": ("terms=[{name: entopy}]", "did you mean 'entropy'"),
    "a term with another option": ("terms=[{name: entropy, coeff: 1}]", "'coeff'"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_work_is_refused(refused: str) -> None:
    setting, says = REFUSED[refused]
    config = load([], ["model.path=m", "trainer.total_steps=1", f"algorithm.{setting}"]).config
    with pytest.raises(ConfigError, match=says):
        check_algorithm(config.algorithm)


@pytest.mark.parametrize("term", ["name: entopy", "name: entropy, coeff: 1", "name: entropy, by: alhpa"])
def test_a_wrong_term_is_told_by_its_own_key(term: str) -> None:
    settings = ["model.path=m", "trainer.total_steps=1", f"algorithm.terms=[{{{term}}}]"]
    with pytest.raises(ConfigError, match=r"^algorithm\.terms\.0[:.]") as caught:
        check_algorithm(load([], settings).config.algorithm)
    assert str(caught.value.key).startswith("algorithm.terms.0")


def test_a_number_that_nothing_reads_is_refused() -> None:
    setting = "algorithm.coefficients={alpha: {name: entropy_target, target: 1}}"
    config = load([], ["model.path=m", "trainer.total_steps=1", setting]).config
    with pytest.raises(ConfigError, match="alpha is set, but no function"):
        plan_program(config)


def test_options_stand_beside_the_name() -> None:
    settings = [
        "algorithm.coefficients={alpha: {name: entropy_target, target: 0.2, start: 0.1}}",
        "algorithm.coefficients.alpha.step=0.01",
        "algorithm.terms=[{name: entropy, by: alpha}]",
    ]
    algorithm = load([], ["model.path=m", "trainer.total_steps=1", *settings]).config.algorithm
    assert algorithm.coefficients["alpha"] == CoefficientConfig(
        "entropy_target", {"target": 0.2, "step": 0.01}, start=0.1
    )
    assert algorithm.terms == (TermConfig("entropy", by="alpha"),)
    assert bind("term", FunctionConfig("entropy")) is not None
