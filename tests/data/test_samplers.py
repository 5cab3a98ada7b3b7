"""Samplers by themselves: the built-in ones against numbers, and the border to a user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rondo.config.schema import FunctionConfig
from rondo.core.errors import ConfigError, DataError
from rondo.data import ChosenPrompts, Heard, Sampler
from rondo.data.samplers import Knapsack, Stages, SuccessRate, allocate, value

SIZES = {"easy": 4, "hard": 2}


def in_turn(place: int) -> tuple[str, int]:
    """Two of easy, one of hard, each from its first row on."""
    turn, at = divmod(place, 3)
    return ("hard", turn % 2) if at == 2 else ("easy", (2 * turn + at) % 4)


def right(share: float, of: int = 8) -> np.ndarray:
    return np.array([1.0] * round(share * of) + [0.0] * round((1 - share) * of), np.float32)


# ---- knapsack: docs of Knapsack RL (2509.25849), computed examples ----


@pytest.mark.parametrize(
    ("rate", "want"),
    [
        (0.5, (0.0625, 0.109375, 0.124023, 0.124939)),
        (0.1, (0.01458, 0.027848, 0.046132, 0.058123)),
        (0.9, (0.00162, 0.003094, 0.005126, 0.006458)),
    ],
)
def test_the_value_of_2_4_8_and_12_answers(rate: float, want: tuple[float, ...]) -> None:
    assert tuple(round(value(count, rate), 6) for count in (2, 4, 8, 12)) == want


def test_three_prompts_share_24_answers() -> None:
    counts = allocate([0.5, 0.1, 0.9], n=8, low=2, high=20)
    assert counts == [7, 15, 2]
    assert round(sum(map(value, counts, [0.5, 0.1, 0.9])), 6) == 0.188990


def best(rates: Sequence[float], budget: int, low: int, high: int) -> float:
    """The largest sum of values, by a dynamic program over prompts."""
    found = {0: 0.0}
    for rate in rates:
        added: dict[int, float] = {}
        for spent, total in found.items():
            for count in range(low, min(high, budget - spent) + 1):
                worth = total + value(count, rate)
                added[spent + count] = max(added.get(spent + count, 0.0), worth)
        found = added
    return found[budget]


def test_no_other_way_to_share_is_worth_more() -> None:
    draw = np.random.default_rng(0)
    for _ in range(100):
        rates = (draw.integers(1, 16, draw.integers(1, 6)) / 16).tolist()
        n = int(draw.integers(2, 8))
        high = int(draw.integers(n, 13))
        counts = allocate(rates, n=n, low=2, high=high)
        assert sum(counts) == n * len(rates)
        assert min(counts) >= 2
        assert max(counts) <= high
        total = sum(map(value, counts, rates))
        assert total == pytest.approx(best(rates, n * len(rates), 2, high), abs=1e-12)


@pytest.mark.parametrize(
    ("rates", "want"),
    [
        ([None, None, None], [8, 8, 8]),
        ([1.0, 1.0], [8, 8]),  # nothing to gain anywhere
        ([1.0, None, 0.0], [2, 8, 14]),  # all that is over goes to what was never solved
        ([0.0, 0.0, 1.0], [11, 11, 2]),
        ([0.0, 1.0, 1.0], [20, 2, 2]),
        # Needs min(20, ⌊3.32⌋) = 3; of the 13 that are over 6 and 7 go to the prompts at 0, besides their 2.
        ([0.5, 0.0, 0.0], [3, 11, 10]),
        ([0.5, 1.0, 1.0], [20, 2, 2]),
        ([0.5, 1.0, 1.0, 1.0, 1.0], [20, 2, 2, 2, 2]),  # 12 are not spent
    ],
)
def test_prompts_without_a_rate_and_those_at_0_and_1(rates: list[float | None], want: list[int]) -> None:
    assert allocate(rates, n=8, low=2, high=20) == want


def test_knapsack_shares_by_what_it_heard_and_goes_on_from_its_state() -> None:
    one = Knapsack(high=20)
    assert one.choose(3, n=8, order=in_turn) == [("easy", 0, 8), ("easy", 1, 8), ("hard", 0, 8)]
    one.heard("easy", 2, right(0.5))
    one.heard("easy", 3, right(0.1, of=10))
    one.heard("hard", 1, right(0.9, of=10))
    one.heard("hard", 1, right(1.0)[:0])  # none was scored: what was known stays
    other = Knapsack(high=20)
    other.load(one.state())
    want = [("easy", 2, 7), ("easy", 3, 15), ("hard", 1, 2)]
    assert one.choose(3, n=8, order=in_turn) == other.choose(3, n=8, order=in_turn) == want
    assert one.metrics() == {"known": 3, "useful": 3}


# ---- success_rate ----


def test_rows_that_were_always_right_or_wrong_rest_for_as_many_turns() -> None:
    one = SuccessRate(revisit=2)
    assert one.choose(3, SIZES, 8, in_turn) == [("easy", 0, 8), ("easy", 1, 8), ("hard", 0, 8)]
    for source, row, share in (("easy", 0, 1.0), ("easy", 1, 0.5), ("hard", 0, 0.0)):
        one.heard(source, row, right(share))
    rows = [(source, row) for source, row, _ in one.choose(10, SIZES, 8, in_turn)]
    # Of a turn (easy 2, 3, hard 1, easy 0, 1, hard 0) what rests is left out twice, and comes then.
    turn = [("easy", 2), ("easy", 3), ("hard", 1), ("easy", 1)]
    assert rows == [*turn, *turn, ("easy", 2), ("easy", 3)]
    assert one.metrics() == {"skipped": 4, "resting": 0}
    rest = [("hard", 1), ("easy", 0), ("easy", 1), ("hard", 0)]
    assert [(source, row) for source, row, _ in one.choose(4, SIZES, 8, in_turn)] == rest


def test_bounds_are_of_the_share_of_right_answers() -> None:
    one = SuccessRate(low=0.25, high=0.75)
    for row, share in enumerate((0.25, 0.375, 0.625, 0.75)):
        one.heard("easy", row, right(share))
    assert one.metrics()["resting"] == 2
    assert [row for source, row, _ in one.choose(4, SIZES, 8, in_turn) if source == "easy"] == [1, 2]


def test_where_all_rows_rest_those_that_rest_longest_are_asked() -> None:
    one = SuccessRate(revisit=100)
    for source, row in (("hard", 1), ("easy", 3), ("easy", 0), ("easy", 1), ("hard", 0), ("easy", 2)):
        one.heard(source, row, right(1.0))
    other = SuccessRate(revisit=100)
    other.load(one.state())
    want = [("hard", 1, 8), ("easy", 3, 8)]
    assert one.choose(2, SIZES, 8, in_turn) == other.choose(2, SIZES, 8, in_turn) == want
    assert one.choose(1, SIZES, 8, in_turn) == [("easy", 0, 8)]
    one.heard("easy", 3, right(0.5))
    assert one.choose(1, SIZES, 8, in_turn) == [("easy", 3, 8)]


# ---- stages ----


def test_stages_pass_over_other_sources() -> None:
    one = Stages(stages=[{"step": 1, "sources": ["easy"]}, {"step": 3, "sources": ["easy", "hard"]}])
    one.check(["easy", "hard"])
    chosen = [[(source, row) for source, row, _ in one.choose(3, 8, in_turn, step)] for step in (1, 2, 3)]
    assert chosen[0] == [("easy", 0), ("easy", 1), ("easy", 2)]
    assert chosen[1] == [("easy", 3), ("easy", 0), ("easy", 1)]
    assert chosen[2] == [("hard", 0), ("easy", 2), ("easy", 3)]
    assert one.metrics() == {"stage": 2}


# ---- options that cannot be ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "success_rate", "low": 0.8, "high": 0.2}, "low < high"),
        ({"name": "success_rate", "revisit": 0}, "revisit >= 1"),
        ({"name": "success_rate", "lo": 0.2}, "no option 'lo'; did you mean 'low'?"),
        ({"name": "success_rate", "low": "a"}, "must be float"),
        ({"name": "knapsack"}, "needs the option 'high'"),
        ({"name": "knapsack", "high": 4, "low": 5}, "low <= high"),
        ({"name": "knapsak", "high": 4}, "did you mean 'knapsack'?"),
        ({"name": "stages", "stages": []}, "begin at step 1"),
        ({"name": "stages", "stages": [{"step": 2, "sources": ["a"]}]}, "begin at step 1"),
        ({"name": "stages", "stages": [{"step": 1, "sources": "a"}]}, "sources are names"),
        ({"name": "stages", "stages": [{"step": 1, "source": ["a"]}]}, "needs step and sources"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    name = options.pop("name")
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        Sampler(FunctionConfig(name, options))


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (FunctionConfig("knapsack", {"high": 20}), "low <= rollout.n <= high"),
        (FunctionConfig("stages", {"stages": [{"step": 1, "sources": ["eazy"]}]}), "'eazy' is no source"),
        (FunctionConfig("stages", {"stages": [{"step": 1, "sources": ["easy"]}]}), "would never be asked"),
    ],
)
def test_what_does_not_fit_the_run_is_named(sampler: FunctionConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sampler(sampler).call("check", sources=["easy", "hard"], n=32, least=1)


# ---- the border to a user's ----


def chosen(choose: Callable[..., Any] | type, *, least: int = 1, **options: Any) -> ChosenPrompts:
    config = FunctionConfig(choose, options)  # type: ignore[arg-type]
    fits = lambda source, row: (source, row) != ("easy", 3)  # noqa: E731
    wanted: dict[str, Any] = {"n": 8, "batch_size": 2, "seed": 0, "least": least}
    return ChosenPrompts(Sampler(config), SIZES, in_turn, fits, **wanted)


ROW = ("easy", 0, 4)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([], "returned 0 prompts, and was asked for 2"),
        ([ROW], "returned 1 prompts, and was asked for 2"),
        ([ROW, ROW, ROW], "returned 3 prompts"),
        (None, "returned NoneType None; it returns a"),
        ({"easy": 0}, "returned dict"),
        ((entry for entry in (ROW, ROW)), "returned generator"),
        ([ROW, ("easy", 0)], r"\[1\] is tuple .*no \(source, row, n\)"),
        ([ROW, "abc"], r"\[1\] is str 'abc'"),
        ([ROW, ("eazy", 0, 4)], "'eazy' is no source; did you mean 'easy'"),
        ([ROW, (0, 0, 4)], "int 0 is no source. There are: easy"),
        ([ROW, ("easy", 4, 4)], "4 is no row of easy, .*rows 0 to 3"),
        ([ROW, ("easy", -1, 4)], "-1 is no row of easy"),
        ([ROW, ("easy", True, 4)], "bool True is no row"),
        ([ROW, ("easy", 1.0, 4)], "float 1.0 is no row"),
        ([ROW, ("easy", "1", 4)], "str '1' is no row"),
        ([ROW, ("easy", 1, 0)], "n is int 0, and must be 1 to 65536"),
        ([ROW, ("easy", 1, 65537)], "n is int 65537"),
        ([ROW, ("easy", 1, None)], "n is NoneType None"),
        ([ROW, ("easy", 1, 2.0)], "n is float 2.0"),
    ],
)
def test_an_answer_that_is_none_is_named(answer: Any, said: str) -> None:
    def curriculum(k: int, sizes: Any, seed: int) -> Any:
        return answer

    with pytest.raises(DataError, match=f"data.sampler: .*curriculum.*{said}"):
        chosen(curriculum).admit(0, 1, 100)


def test_a_group_that_is_compared_has_two_answers() -> None:
    with pytest.raises(DataError, match="65536; the algorithm compares"):
        chosen(lambda k: [("easy", 0, 1)] * k, least=2).admit(0, 1, 100)
    assert chosen(lambda k: [("easy", np.int64(1), np.int32(1))] * k).admit(0, 1, 100) == ("easy", 1, 1)


class Own:
    """Has all methods, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.place = 0

    def choose(self, k: int, sizes: Any, seed: int, n: int, order: Any, step: int) -> Any:
        self.calls.append((k, step))
        self.place += k
        return [(*order(place), n) for place in range(self.place - k, self.place)]

    def heard(self, source: str, row: int, rewards: Any, accuracy: Any, version: int) -> None:
        self.calls.append((source, row, rewards.tolist(), accuracy.tolist(), version))

    def too_long(self, source: str, row: int) -> None:
        self.calls.append((source, row))

    def state(self) -> Any:
        return [self.calls, self.place]

    def load(self, state: Any) -> None:
        self.calls, self.place = list(state[0]), state[1]


def test_it_is_asked_by_steps_and_by_replacements_and_hears_in_order() -> None:
    prompts = chosen(Own)
    first = [prompts.admit(seq, 2, 100) for seq in range(4)]
    assert first == [("easy", 0, 8), ("easy", 1, 8), ("hard", 0, 8), ("easy", 2, 8)]
    calls = prompts.sampler.call("state")[0]
    assert calls == [(2, 1), (2, 2)]
    assert prompts.admit(1, 2, 100) == first[1]  # begun again
    # In the place of one that was dropped: row 3 of easy is too long, told back, and another asked for.
    assert prompts.admit(4, 2, 100) == ("hard", 1, 8)
    assert calls[2:] == [(1, 2), ("easy", 3), (1, 2)]
    prompts.hear(3, Heard([0.5], [1.0], 0, True))
    prompts.hear(0, Heard([], [], 0, False))
    prompts.hear(2, Heard([0.25, 1.0], [0.0, 1.0], 1, True))
    told = prompts.end_step()
    assert calls[-3:] == [
        ("easy", 0, [], [], 0),
        ("hard", 0, [0.25, 1.0], [0.0, 1.0], 1),
        ("easy", 2, [0.5], [1.0], 0),
    ]
    assert told == {
        "sampler/chosen/easy": 1.0,
        "sampler/chosen/hard": 1.0,
        "sampler/n_mean": 8.0,
        "sampler/n_max": 8.0,
        "sampler/too_long": 1.0,
    }
    with pytest.raises(DataError, match="nothing was chosen for prompt 3"):
        prompts[3]


def test_the_last_step_is_asked_for_what_is_left_and_a_state_goes_on() -> None:
    prompts = chosen(Own)
    prompts.admit(0, 3, 100)
    prompts.hear(0, Heard([0.1], [1.0], 0, False))
    again = chosen(Own)
    again.load(prompts.state())
    assert again.state() == prompts.state()
    for one in (prompts, again):  # of five prompts in all, which are two for each of three steps
        rest = [one.admit(seq, 3, 5 - seq)[:2] for seq in range(1, 5)]
        assert rest == [("easy", 1), ("hard", 0), ("easy", 2), ("hard", 1)]
    assert again.state() == prompts.state()
    assert json.loads(prompts.state()["own"])[0] == [[2, 1], [2, 2], [1, 3], ["easy", 3], [1, 3]]


def test_one_that_keeps_choosing_what_is_too_long_is_named() -> None:
    with pytest.raises(DataError, match=r"1000 times, .* row 3 of easy"):
        chosen(lambda k: [("easy", 3, 8)] * k).admit(0, 1, 100)


def test_what_it_is_lent_is_read_only() -> None:
    def writes(k: int, sizes: Any) -> Any:
        sizes["more"] = 1

    with pytest.raises(DataError, match="read-only"):
        chosen(writes).admit(0, 1, 100)

    class Writes(Own):
        def heard(self, rewards: Any) -> None:
            rewards[0] = 1.0

    prompts = chosen(Writes)
    prompts.admit(0, 1, 100)
    prompts.hear(0, Heard([0.5], None, 0, True))
    with pytest.raises(DataError, match=r"Writes.heard raised .*read-only"):
        prompts.end_step()


class Without:
    def choose(self, k: int) -> Any:
        return [ROW] * k


class Misspelt(Own):
    def heard(self, source: str, row: int, reward: Any) -> None:  # type: ignore[override]
        """rewards"""


class Hears(Without):
    """It would hear nothing."""

    def state(self) -> Any:
        return 0

    def load(self, state: Any) -> None: ...

    def hears(self, row: int) -> None: ...


def asks_for_more(k: int, *, level: int) -> Any:
    return [("easy", level, 4)] * k


@pytest.mark.parametrize(
    ("choose", "options", "said"),
    [
        (Without, {}, "Without has no method state"),
        (Misspelt, {}, "'reward'; did you mean 'rewards'"),
        (Hears, {}, "hears is nothing that it is asked"),
        (Own, {"low": 1}, "no option 'low'"),
        (asks_for_more, {}, "needs the option 'level'"),
        (asks_for_more, {"k": 3, "level": 1}, "no option 'k'"),
    ],
)
def test_one_that_cannot_be_called_is_named(choose: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen(choose, **options)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": np.float32(1)}, "Object of type float32"),
        ({"a": float("nan")}, "not JSON compliant"),
        ({"a": {3: 1}}, "keys that are no text"),
        ({"a": {1, 2}}, "Object of type set"),
    ],
)
def test_a_state_that_json_would_lose_is_named(state: Any, said: str) -> None:
    class Keeps(Own):
        def state(self) -> Any:
            return state

    with pytest.raises(DataError, match=f"Keeps.state.*{said}"):
        chosen(Keeps).state()


@pytest.mark.parametrize("state", [None, 3, "text", [], {"a": [1.5, {"b": True}]}])
def test_any_other_state_comes_back(state: Any) -> None:
    class Keeps(Own):
        def state(self) -> Any:
            return state

    assert json.loads(chosen(Keeps).state()["own"]) == state


def test_a_sampler_may_take_up_a_whole_number_as_a_float() -> None:
    class Sums(Own):
        total: float = 0

        def state(self) -> Any:
            return {"total": self.total}

        def load(self, state: Any) -> None:
            self.total = float(state["total"])

    one = chosen(Sums).sampler
    one.load('{"total": 3}')
    assert json.loads(one.state()) == {"total": 3.0}


@pytest.mark.parametrize("told", [[1], {"a": "b"}, {"a": float("inf")}, {3: 1.0}])
def test_metrics_that_are_none_are_named(told: Any) -> None:
    class Tells(Own):
        def metrics(self) -> Any:
            return told

    with pytest.raises(DataError, match=r"Tells.metrics returned .*numbers by name"):
        chosen(Tells).end_step()


def test_a_metric_that_every_sampler_has_is_not_told_otherwise() -> None:
    class Tells(Own):
        def metrics(self) -> Any:
            return {"too_long": 7.0}

    with pytest.raises(DataError, match=r"Tells.metrics tells 'too_long'"):
        chosen(Tells).end_step()
