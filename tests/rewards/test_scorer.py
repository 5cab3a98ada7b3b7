"""Policies, timeouts, several functions, groups: a failure is typed, counted and logged, and never a zero."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import math
import os
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

from rondo.config.schema import RewardConfig, RewardFunctionConfig, RewardModelConfig
from rondo.core.errors import ConfigError, RewardError
from rondo.rewards import Scorer, accuracy_score, check_dropped_share, execution, score_names
from tests import begun
from tests.messages import full_text
from tests.rewards.conftest import make_trajectory

FUNCTIONS = """
import asyncio, os, time
from rondo.rewards import reward_function

def length(prompt, trajectory, *, scale=1.0):
    return scale * len(trajectory.text)

async def slow_length(prompt, trajectory):
    await asyncio.sleep(0.01)
    return len(trajectory.text)

def raises(prompt, trajectory):
    raise KeyError("solution")

def nan(prompt, trajectory):
    return float("nan")

def huge(prompt, trajectory):
    return 1e39

def text(prompt, trajectory):
    return "0.5"

def nothing(prompt, trajectory):
    pass

def two(prompt, trajectory):
    return [1.0, 2.0]

def hangs(prompt, trajectory):
    time.sleep(3600)

async def hangs_async(prompt, trajectory):
    await asyncio.sleep(3600)

@reward_function(run_in="process")
def hangs_holding_the_lock(prompt, trajectory):
    import re
    re.fullmatch("(a+)+b", "a" * 50)

@reward_function(run_in="process")
def in_process(prompt, trajectory, *, factor):
    print("not an answer")
    if trajectory.text == "die":
        os._exit(3)
    if trajectory.text == "raise":
        raise ValueError("inside")
    return factor * len(trajectory.text)

arrived = 0
async def wait_for_three(prompt, trajectory):
    global arrived
    arrived += 1
    while arrived < 3:
        await asyncio.sleep(0.01)
    return len(trajectory.text) / 7

async def falls(prompt, trajectory):
    await asyncio.sleep(0.05)
    if trajectory.text == "die":
        os._exit(3)
    if trajectory.text == "block":
        time.sleep(3600)
    return len(trajectory.text) / 7

def crashes(prompt, trajectory):
    if trajectory.text == "segfault":
        import ctypes
        ctypes.string_at(0)
    if trajectory.text == "die":
        os._exit(0)
    if trajectory.text == "leave":
        raise SystemExit(0)
    if trajectory.text == "hang":
        time.sleep(3600)
    return len(trajectory.text) / 7

@reward_function(group=True, score_names=["share", "rank"])
async def shares(trajectories, *, power=1.5, seed):
    lengths = [len(t.text) ** power for t in trajectories]
    return [{"share": x / sum(lengths), "rank": seed % 97 / 3} for x in lengths]

def later(prompt, trajectory):
    return slow_length(prompt, trajectory)

def writes(prompt, trajectory, *, found=[]):
    {"array": lambda: trajectory.response_ids.__setitem__(0, 7),
     "field": lambda: prompt.fields["nested"]["list"].append(1),
     "scores": lambda: trajectory.scores.update(length=1.0),
     "option": lambda: found.append(1)}[trajectory.text]()
    return 1.0

@reward_function(group=True)
def writes_into_a_group(trajectories):
    trajectories.sort(key=lambda t: t.sample_index)  # the list is its own
    first = trajectories[0]
    writes(first.prompt, first)

async def writes_later(prompt, trajectory):
    await asyncio.sleep(0)
    writes(prompt, trajectory)

@reward_function(run_in="loop")
def writes_in_the_loop(prompt, trajectory):
    writes(prompt, trajectory)

def writes_first(prompt, **options):
    prompt.fields["nested"]["list"].append(1)

@reward_function(run_in="process", reference=writes_first)
def writes_as_it_reads(prompt, trajectory):
    return 1.0

calls = []
def third_time(prompt, trajectory):
    calls.append(1)
    if len(calls) % 3:
        raise RuntimeError("not yet")
    return 1.0

@reward_function(score_names=["format", "content"])
def parts(prompt, trajectory):
    return {"format": 0.5, "content": len(trajectory.text)}

@reward_function(score_names=["style"])
def with_total(prompt, trajectory):
    return {"reward": 10.0, "style": 3.0}

def undeclared(prompt, trajectory):
    return {"a": 1.0}

@reward_function(group=True)
def longest_wins(trajectories, *, bonus=1.0):
    most = max(len(t.text) for t in trajectories)
    return [bonus if len(t.text) == most else 0.0 for t in trajectories]

@reward_function(group=True)
def too_few(trajectories):
    return [1.0]

def seeded(prompt, trajectory, *, seed):
    return seed % 1000

def no_arguments():
    return 1.0
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture
def scorer(path):
    """Make a Scorer of functions in the file above; closed at the end."""
    made = []

    def make(*functions, seed=0, **config):
        configs = [
            f if isinstance(f, RewardFunctionConfig) else RewardFunctionConfig(f"{path}:{f}")
            for f in functions
        ]
        made.append(Scorer(RewardConfig(functions=tuple(configs), **config), seed))
        return made[-1]

    yield make
    for one in made:
        one.close()


def named(path, name, weight=1.0, sources=None, **options):
    return RewardFunctionConfig(f"{path}:{name}", weight, sources, options)


def run(scorer, *trajectories):
    async def all_of_them():
        return await asyncio.gather(*(scorer.score(t) for t in trajectories))

    return asyncio.run(all_of_them())


# -------------------------------------------------------------------------------------------------------
# scores


def test_weighted_sum_of_sync_and_async(scorer, path):
    s = scorer(named(path, "length", 2.0, scale=0.5), named(path, "slow_length", 0.1))
    assert s.names == ("length", "slow_length")
    one, other = run(s, make_trajectory("abcd"), make_trajectory(""))
    assert one.scores == {"length": 2.0, "slow_length": 4.0}
    assert one.reward == pytest.approx(2.0 * 2.0 + 0.1 * 4.0)
    assert (other.reward, other.outcome) == (0.0, "scored")


def test_named_scores_and_their_total(scorer):
    s = scorer("parts", "with_total", "parts")
    assert s.names == (
        "parts", "parts/format", "parts/content", "with_total", "with_total/style",
        "parts_2", "parts_2/format", "parts_2/content",
    )  # fmt: skip
    (t,) = run(s, make_trajectory("ab"))
    assert t.scores["parts"] == 2.5
    assert t.scores["with_total"] == 10.0
    assert t.scores["with_total/style"] == 3.0
    assert t.reward == 2.5 + 10.0 + 2.5
    assert set(t.scores) == set(s.names)


def test_per_source_functions(scorer, path):
    s = scorer(named(path, "length", sources=("a",)), named(path, "slow_length", 3.0, sources=("b",)))
    a, b = run(s, make_trajectory("xy", source="a"), make_trajectory("xy", source="b"))
    assert (a.reward, a.scores) == (2.0, {"length": 2.0})
    assert (b.reward, b.scores) == (6.0, {"slow_length": 2.0})
    with pytest.raises(RewardError, match="source 'c' has no reward function"):
        run(s, make_trajectory("xy", source="c"))


def test_every_source_has_a_function_and_every_function_its_sources(path):
    one, two = named(path, "length", sources=("a",)), named(path, "slow_length", sources=("b",))
    config = RewardConfig((one, two))
    assert score_names(config, ["a", "b"]) == ("length", "slow_length")
    with pytest.raises(ConfigError, match=r"there is no source 'a'.*Sources: b, aa"):
        score_names(config, ["b", "aa"])
    with pytest.raises(ConfigError, match="source 'c' has no reward function"):
        score_names(config, ["a", "b", "c"])


def test_a_weight_of_zero_is_a_named_score_only(scorer, path):
    s = scorer(named(path, "length"), named(path, "slow_length", 0.0))
    (t,) = run(s, make_trajectory("abcd"))
    assert (t.reward, t.scores) == (4.0, {"length": 4.0, "slow_length": 4.0})


def test_the_accuracy_is_the_only_score_or_the_one_that_is_named(scorer, path):
    one, two = named(path, "length"), named(path, "slow_length")
    model = RewardModelConfig(name="judge")
    assert accuracy_score(RewardConfig((one,), (model,))) == "length"
    assert accuracy_score(RewardConfig((one, two))) is None
    assert accuracy_score(RewardConfig((named(path, "parts"),))) is None  # the total, or a part of it?
    assert accuracy_score(RewardConfig((), (model,))) is None
    assert accuracy_score(RewardConfig((one, two), accuracy="slow_length")) == "slow_length"
    assert accuracy_score(RewardConfig((named(path, "parts"),), accuracy="parts/format")) == "parts/format"
    assert scorer(one, two, accuracy="length").accuracy == "length"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("lenght", full_text("reward.accuracy=lenght is no score")),
        ("judge", "It is a reward model's.*Scores: length"),
    ],
)
def test_an_accuracy_that_does_not_exist(path, name, wrong):
    config = RewardConfig((named(path, "length"),), (RewardModelConfig(name="judge"),), accuracy=name)
    with pytest.raises(ConfigError, match=wrong):
        accuracy_score(config)
    with pytest.raises(ConfigError, match=wrong):
        Scorer(config)


def test_every_source_has_the_accuracy(path):
    one, two = named(path, "length", sources=("a",)), named(path, "slow_length")
    config = RewardConfig((one, two), accuracy="length")
    score_names(config, ["a"], reads_accuracy=True)
    score_names(config, ["a", "b"])  # nobody reads it
    with pytest.raises(ConfigError, match=full_text("reward.accuracy=length, is no score")):
        score_names(config, ["a", "b"], reads_accuracy=True)


def test_the_only_score_is_an_accuracy_where_it_applies(path):
    """Sources that only a reward model scores have none."""
    models = (RewardModelConfig(name="judge"),)
    config = RewardConfig((named(path, "length", sources=("a",)),), models)
    assert score_names(config, ["a", "b"]) == ("length",)
    with pytest.raises(ConfigError, match=full_text("reward.accuracy=length, is no score")):
        score_names(config, ["a", "b"], reads_accuracy=True)


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.int64(1), np.bool_(True), np.array(1.0)])
def test_numbers_of_every_kind(scorer, tmp_path, value):
    import rondo.rewards.scorer as module

    assert module._number(value, "it") == 1.0


def test_a_seed_is_a_function_of_what_is_scored(scorer):
    a, b, again = run(scorer("seeded", seed=1), *(make_trajectory("x", sample_index=i) for i in (0, 1, 0)))
    assert a.reward == again.reward != b.reward
    assert run(scorer("seeded", seed=2), make_trajectory("x"))[0].reward != a.reward


def test_failed_trajectories_pass_through(scorer):
    from dataclasses import replace

    failed = replace(make_trajectory("x"), outcome="rollout_error")
    assert run(scorer("raises"), failed) == [failed]


# -----------------------------------------------------------------------------------------------------
# failures


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("raises", "KeyError: 'solution'"),
        ("nan", "must be a finite number, got nan"),
        ("huge", r"finite number, got 1e\+39 \(float32 ends"),
        ("text", "must be a number, got str: '0.5'"),
        ("nothing", "must be a number, got NoneType"),
        ("two", "must be a number, got list"),
        ("undeclared", r"returned scores named \['a'\].*@reward_function\(score_names"),
    ],
)
def test_error_stops_by_default_and_shows_the_sample(scorer, caplog, name, wrong):
    s = scorer(name)
    with pytest.raises(
        RewardError,
        match=rf"(?s)reward function {name}: .*{wrong}.*prompt s/0/0.*the answer.*reward.on_error",
    ):
        run(s, make_trajectory("the answer"))
    assert s.stats().sums["reward/errors"] == 1
    assert not caplog.records  # the error that stops the run has it all


@pytest.mark.parametrize("name", ["raises", "nan", "text", "nothing"])
def test_error_dropped_is_typed_and_no_zero(scorer, path, name):
    s = scorer("length", name, on_error="drop")
    (t,) = run(s, make_trajectory("x"))
    assert t.outcome == "reward_error"
    assert math.isnan(t.reward)
    assert t.scores == {}
    assert t.failure.startswith(f"{name}: ")
    assert s.stats().sums == {"reward/errors": 1, "reward/timeouts": 0, "reward/retries": 0}
    assert s.stats().sums["reward/errors"] == 0  # counted since the last call


def test_retry_until_it_works_then_drop(scorer):
    s = scorer("third_time", on_error="retry", max_retries=2)
    assert run(s, make_trajectory("x"))[0].reward == 1.0
    assert s.stats().sums == {"reward/errors": 2, "reward/timeouts": 0, "reward/retries": 2}
    s = scorer("raises", on_error="retry", max_retries=2)
    assert run(s, make_trajectory("x"))[0].outcome == "reward_error"
    assert s.stats().sums == {"reward/errors": 3, "reward/timeouts": 0, "reward/retries": 2}


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
def test_hang_is_a_timeout_and_the_loop_goes_on(scorer, name):
    """If one held the loop, this would take an hour."""
    s = scorer(name, timeout_seconds=0.2)
    scored = run(s, *(make_trajectory("x", i) for i in range(3)))
    assert {t.outcome for t in scored} == {"reward_timeout"}
    assert "no score after 0.2 s" in scored[0].failure
    assert s.stats().sums["reward/timeouts"] == 3


def test_timeout_can_stop(scorer):
    with pytest.raises(RewardError, match=r"reward.on_timeout"):
        run(scorer("hangs", timeout_seconds=0.1, on_timeout="stop"), make_trajectory("x"))


def test_too_many_hanging_threads_are_an_error(scorer):
    s = scorer("hangs", timeout_seconds=0.02)
    with pytest.raises(RewardError, match=r"\d\d calls.*run_in='process'"):
        run(s, *(make_trajectory("x", i) for i in range(40)))


@pytest.mark.slow
def test_hanging_function_does_not_keep_the_program(path):
    program = f"""
import asyncio
from rondo.config.schema import RewardConfig, RewardFunctionConfig
from rondo.rewards import Scorer
from tests.rewards.conftest import make_trajectory
for name in ("hangs", "hangs_holding_the_lock"):
    s = Scorer(RewardConfig(functions=(RewardFunctionConfig("{path}:" + name),), timeout_seconds=0.2))
    print(asyncio.run(s.score(make_trajectory("x"))).outcome)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{os.getcwd()}/src", os.getcwd()])}
    done = begun.run(["-c", program], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["reward_timeout", "reward_timeout"]


# ----------------------------------------------------------------------------------------------------
# processes


def test_process_functions(scorer, path):
    s = scorer(named(path, "in_process", factor=2.0), on_error="drop")
    texts = ["abc", "raise", "ab", "die", "a"]

    async def main():
        return [await s.score(make_trajectory(text)) for text in texts]

    scored = asyncio.run(main())
    assert [t.outcome for t in scored] == ["scored", "reward_error", "scored", "reward_error", "scored"]
    assert [scored[i].reward for i in (0, 2, 4)] == [6.0, 4.0, 2.0]
    assert scored[1].failure == "in_process: ValueError: inside"
    assert "process died (exit code 3)" in scored[3].failure


def test_many_calls_share_few_processes(scorer, path):
    s = scorer(named(path, "in_process", factor=1.0))
    scored = run(s, *(make_trajectory("x" * i, i) for i in range(30)))
    assert [t.reward for t in scored] == [float(i) for i in range(30)]


def test_call_that_holds_the_lock_is_killed(scorer):
    s = scorer("hangs_holding_the_lock", timeout_seconds=0.3)
    (t,) = run(s, make_trajectory("x"))
    assert t.outcome == "reward_timeout"


BUILT_IN = (
    RewardFunctionConfig("gsm8k", options={"method": "flexible"}),
    RewardFunctionConfig("overlong", options={"max_tokens": 4, "buffer": 3}),
)


@pytest.mark.slow
def test_processes_score_as_threads_do(scorer, path):
    """Bit for bit: built-in and own, with named scores, seeds, options, coroutines and whole groups."""
    own = [named(path, name, 0.3) for name in ("slow_length", "parts", "seeded", "later", "shares")]
    group = [make_trajectory(text, i, answer="3") for i, text in enumerate(("ab", "3", "c" * 9))]
    threads, processes = (
        run_group(scorer(*own, *BUILT_IN, isolation=isolation, seed=5), group)
        for isolation in ("thread", "process")
    )
    assert [t.reward.hex() for t in threads] == [t.reward.hex() for t in processes]
    assert [t.scores for t in threads] == [t.scores for t in processes]
    assert {t.outcome for t in threads} == {"scored"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "outcome", "said"),
    [
        ("segfault", "reward_error", r"process died \(signal SIGSEGV\)"),
        ("die", "reward_error", r"process died \(exit code 0\)"),
        ("leave", "reward_error", r"SystemExit\(0\) would end or cancel the run"),
        ("hang", "reward_timeout", "over its time limit"),
    ],
)
def test_a_scorer_that_ends_its_process_is_one_failure(scorer, caplog, text, outcome, said):
    s = scorer("crashes", isolation="process", on_error="drop", timeout_seconds=1.0)

    async def main():
        return [await s.score(make_trajectory(each)) for each in ("abc", text, "a")]

    before, failed, after = asyncio.run(main())
    assert (before.reward, after.reward) == (3 / 7, 1 / 7)
    assert failed.outcome == outcome
    assert re.search(said, failed.failure)
    kind = "reward/timeouts" if outcome == "reward_timeout" else "reward/errors"
    assert s.stats().sums[kind] == 1
    if text == "segfault":  # the line is the user's
        assert re.search(r'mine\.py", line \d+ in crashes', caplog.text)


def test_coroutines_wait_together_in_one_process(scorer):
    """They end when three of them have begun."""
    s = scorer("wait_for_three", isolation="process")
    scored = run(s, *(make_trajectory("x" * i, i) for i in range(3)))
    assert [t.reward for t in scored] == [0.0, 1 / 7, 2 / 7]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "outcome"), [("die", "reward_error"), ("block", "reward_timeout")])
def test_only_the_coroutine_that_ended_the_process_fails(scorer, text, outcome):
    s = scorer("falls", isolation="process", on_error="drop", timeout_seconds=1.0)
    scored = run(s, *(make_trajectory(each, i) for i, each in enumerate(("a", text, "abc"))))
    assert [t.outcome for t in scored] == ["scored", outcome, "scored"]
    assert (scored[0].reward, scored[2].reward) == (1 / 7, 3 / 7)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("what", ["array", "field", "scores", "option"])
def test_what_a_function_is_lent_is_read_only(scorer, path, isolation, what):
    s = scorer(named(path, "writes", found=[3]), isolation=isolation)
    shown = make_trajectory(what, nested={"list": []})
    with pytest.raises(RewardError, match=full_text("reward function writes: ValueError")):
        run(s, shown)
    assert shown.response_ids.tolist() == [0]
    assert shown.prompt.fields == {"nested": {"list": []}}


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("function", ["writes_later", "writes_in_the_loop", "writes_as_it_reads"])
def test_so_it_is_wherever_the_function_runs(scorer, isolation, function):
    shown = make_trajectory("field", nested={"list": []})
    with pytest.raises(RewardError, match=r"(?s)ValueError: .*read-only"):
        run(scorer(function, isolation=isolation), shown)
    assert shown.prompt.fields == {"nested": {"list": []}}


@pytest.mark.parametrize("function", ["writes", "writes_later", "writes_into_a_group"])
def test_an_array_that_can_be_written_when_it_is_unpickled_is_lent_again(scorer, function):
    """As one that is not contiguous."""
    shown = make_trajectory("array")
    row = dataclasses.replace(shown.rows[0], response_ids=np.zeros(4, np.int32)[::2])
    shown = dataclasses.replace(shown, rows=(row,)).lent()
    assert pickle.loads(pickle.dumps(shown)).response_ids.flags.writeable
    with pytest.raises(RewardError, match=r"(?s)ValueError: .*read-only"):
        run_group(scorer(function, isolation="process"), [shown])


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("what", ["array", "field", "scores"])
def test_so_it_is_of_a_group(scorer, isolation, what):
    s = scorer("length", "writes_into_a_group", isolation=isolation)
    shown = [make_trajectory(what, i, nested={"list": []}) for i in (1, 0)]
    scored = run(s, *shown)
    with pytest.raises(RewardError, match=r"(?s)ValueError: .*read-only"):
        asyncio.run(s.score_group(scored))
    assert [t.scores for t in scored] == [{"length": len(what)}] * 2
    assert [t.response_ids.tolist() for t in scored] == [[0], [0]]
    assert [t.prompt.fields for t in scored] == [{"nested": {"list": []}}] * 2


def test_a_module_that_its_process_does_not_import_is_no_time_limit(tmp_path, monkeypatch):
    """It imports here, and waits in the process for what never comes."""
    file = tmp_path / "waits.py"
    file.write_text(
        f"import os, time\nif os.getpid() != {os.getpid()}:\n    time.sleep(1000)\n"
        "def score(prompt, trajectory): return 1.0\n"
    )
    monkeypatch.setattr(execution, "_START_SECONDS", 2.0)
    s = Scorer(RewardConfig((RewardFunctionConfig(f"{file}:score"),), isolation="process", on_error="drop"))
    (scored,) = run(s, make_trajectory("abc"))
    s.close()
    assert scored.outcome == "reward_error"
    assert "was not imported within 2 s" in scored.failure


@pytest.mark.slow
def test_a_process_that_died_between_two_calls_is_no_failure(scorer):
    s = scorer("crashes", isolation="process")

    async def main():
        before = await s.score(make_trajectory("abc"))
        (pool,) = s._pools.values()
        process = pool.processes[0]
        process.child.close()
        return before, await s.score(make_trajectory("abc"))

    before, after = asyncio.run(main())
    assert before.reward == after.reward == 3 / 7
    assert s.stats().sums["reward/errors"] == 0


def test_a_function_object_goes_into_a_process_by_its_place(scorer):
    import rondo.rewards.builtin as builtin

    s = Scorer(RewardConfig((RewardFunctionConfig(builtin.exact_match),), isolation="process"))
    try:
        assert run(s, make_trajectory("3", answer="3"))[0].reward == 1.0
    finally:
        s.close()
    with pytest.raises(ConfigError, match=full_text("<lambda> cannot be imported by a process")):
        Scorer(RewardConfig((RewardFunctionConfig(lambda prompt, trajectory: 1.0),), isolation="process"))


# -------------------------------------------------------------------------------------------------------
# groups


def run_group(scorer, trajectories):
    async def main():
        return await scorer.score_group([await scorer.score(t) for t in trajectories])

    return asyncio.run(main())


def test_group_functions_see_scored_trajectories_only(scorer, path):
    s = scorer(
        named(path, "longest_wins", 0.5, bonus=4.0), named(path, "in_process", factor=1.0), on_error="drop"
    )
    assert s.has_group_functions
    assert math.isnan(run(s, make_trajectory("ab"))[0].reward)  # not final before score_group
    group = run_group(s, [make_trajectory(text, i) for i, text in enumerate(["ab", "raise", "abc", "a"])])
    assert [t.outcome for t in group] == ["scored", "reward_error", "scored", "scored"]
    assert [t.reward for t in (group[0], *group[2:])] == [2.0, 3.0 + 2.0, 1.0]
    assert group[2].scores == {"longest_wins": 4.0, "in_process": 3.0}


def test_group_function_that_fails_fails_the_group(scorer):
    group = run_group(scorer("too_few", on_error="drop"), [make_trajectory("a", i) for i in range(3)])
    assert {t.outcome for t in group} == {"reward_error"}
    assert "must return 3 scores" in group[0].failure


def test_without_group_functions_score_group_changes_nothing(scorer):
    s = scorer("length")
    one = run(s, make_trajectory("ab"))
    assert asyncio.run(s.score_group(one)) == one


# -------------------------------------------------------------------------------------------------------
# config


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (RewardFunctionConfig("gsm8"), full_text("unknown name 'gsm8'; did you mean")),
        (
            RewardFunctionConfig("gsm8k", options={"metod": "strict"}),
            "no option 'metod'; did you mean 'method'",
        ),
        (
            RewardFunctionConfig("gsm8k", options={"method": "stric"}),
            full_text("'method' of gsm8k must be 'strict'"),
        ),
        (RewardFunctionConfig("countdown", options={"format_score": "x"}), "format_score.*must be float"),
        (RewardFunctionConfig("format"), "needs the option 'tags'"),
        (RewardFunctionConfig("rondo.rewards.builtin.nothing"), "has no 'nothing'"),
    ],
)
def test_wrong_config_is_told_before_the_start(config, wrong):
    with pytest.raises(ConfigError, match=wrong):
        Scorer(RewardConfig(functions=(config,)))


def test_wrong_signature(scorer):
    with pytest.raises(ConfigError, match=full_text("no_arguments() cannot be called")):
        scorer("no_arguments")


FOREIGN = {
    "verifiers": "async def theirs(prompt, completion, answer, **_): return [prompt, completion, answer]",
    "slime": "async def theirs(args, sample, **_): return [sample.prompt, sample.response, sample.label]",
    "rLLM": "def theirs(task_info, action): return [task_info['question'], action, task_info['answer']]",
    "OpenRLHF": "def theirs(queries, prompts, labels): return [[prompts[0], queries[0][8:], labels[0]]]",
}


@pytest.mark.parametrize("library", FOREIGN)
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_function_for_another_library_is_never_called(tmp_path, library, is_chat):
    """The lines that the error shows give it what that library does; verifiers' get messages of a chat."""
    file = tmp_path / "theirs.py"
    file.write_text(FOREIGN[library])
    with pytest.raises(ConfigError, match=f"written for {library}; ") as caught:
        Scorer(RewardConfig((RewardFunctionConfig(f"{file}:theirs"),)))
    names = {"SimpleNamespace": SimpleNamespace}
    shown_lines = str(caught.value).partition(":\n")[2]
    exec(f"{FOREIGN[library]}\n{shown_lines}", names)
    shown = make_trajectory("four", answer="4", question="two twos")
    asked, said = "two twos", "four"
    prompt = dataclasses.replace(shown.prompt, text=asked)
    if is_chat and library == "verifiers":
        asked = [{"role": "user", "content": "two twos"}]
        said = [{"role": "assistant", "content": "four"}]
        prompt = dataclasses.replace(prompt, text="", messages=tuple(asked))
    scored = names["score"](prompt, shown)
    if inspect.iscoroutine(scored):
        scored = asyncio.run(scored)
    assert scored == [asked, said, "4"]


def test_a_function_with_names_that_nobody_knows_is_called(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mine(prompt, completion): return len(completion.response_ids)")
    assert (
        run(Scorer(RewardConfig((RewardFunctionConfig(f"{file}:mine"),))), make_trajectory("four"))[0].reward
        == 1
    )


def test_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=full_text("math needs the package math_verify: pip")):
        Scorer(RewardConfig(functions=(RewardFunctionConfig("math"),)))


def test_missing_column_stops_whatever_the_policy(scorer):
    s = scorer(RewardFunctionConfig("gsm8k"), on_error="drop")
    with pytest.raises(RewardError, match="needs column 'answer'"):
        run(s, make_trajectory("#### 1", solution="1"))


def test_dropped_share():
    check_dropped_share(["reward_error"], 2, 0.5)
    check_dropped_share([], 2, 0.5)
    with pytest.raises(RewardError, match=full_text("2 trajectories failed")):
        check_dropped_share(["reward_error", "reward_timeout"], 3, 0.5)


def test_failures_of_one_kind_are_shown_three_times_and_counted_always(scorer, caplog):
    s = scorer("raises", on_error="drop")
    with caplog.at_level(logging.ERROR):
        for _ in range(7):
            assert [t.outcome for t in run(s, make_trajectory("the answer"))] == ["reward_error"]
    assert s.stats().sums["reward/errors"] == 7
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 4
    assert "counted and not shown" in shown[-1]
    assert "rondo/rewards" not in shown[0]  # the user's frames only


def test_failures_are_logged_without_printing(scorer, capsys, caplog):
    with caplog.at_level(logging.ERROR):
        run(scorer("raises", on_error="drop"), make_trajectory("x"))
    assert capsys.readouterr().out == ""
    assert len(caplog.records) == 1
