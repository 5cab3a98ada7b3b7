"""Episode workers: real processes in which environments live, and agents over HTTP run."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rondo.agents import worker_pool
from rondo.agents.ended import entry_of
from rondo.agents.external import ExternalAgent
from rondo.agents.runner import EpisodeRunner
from rondo.agents.worlds import World, Worlds
from rondo.chat import decode, encode_prompt
from rondo.config.schema import EnvironmentConfig, FunctionConfig
from rondo.core.errors import ConfigError, RolloutError
from rondo.core.types import Completion, GenerateRequest, Prompt, SamplingParams, Trajectory
from rondo.system import forkserver
from rondo.workers.rollout import Unscored
from tests import begun
from tests.agents.scripted import saying
from tests.messages import full_text
from tests.serving.conftest import STOPS, TOKENIZER
from tests.trainers.conftest import PYTHONPATH, metrics, weights
from tests.waiting import is_gone, wait_for, wait_until_gone

WORLDS = "tests/agents/worker_worlds.py"
STEPS = FunctionConfig("steps")


def workers(pid: int | None = None) -> list[int]:
    """The episode workers of this process, or `pid`: forks, under a guard each, of one that forks them."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            guard = child.parent()
            commands = [each.cmdline()[3:4] for each in (child, guard, guard.parent())]
            if commands == [["rondo.system.forkserver"]] * 3:
                found.append(child.pid)
        except (psutil.NoSuchProcess, AttributeError):
            continue
    return found


def started(pid: int) -> list[psutil.Process]:
    """All that a process has started."""
    return psutil.Process(pid).children(recursive=True)


def kill_workers() -> None:
    """All of them, and waits for their end."""
    pids = workers()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(pids)


def freeze_workers() -> None:
    """All of them, for good."""
    for pid in workers():
        os.kill(pid, signal.SIGSTOP)


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """No test leaves a worker, nor what it has started, nor what it is forked from."""
    begun.start()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    for server in forkserver._without_users(0):
        server.close()
    wait_for(
        "the end of the workers",
        lambda: all(is_gone(c.pid) for c in psutil.Process().children(recursive=True) if c.pid not in before),
        60,
    )


def prompt(number: int, **task: Any) -> Prompt:
    messages = ({"role": "user", "content": "Go!"},)
    ids = encode_prompt(TOKENIZER, messages)
    return Prompt(number, f"train/0/{number}", "train", ids, {"seed": number, "task": task}, messages)


def says(text: str, before: Callable[[int], None] = lambda number: None, together: int = 1) -> Any:
    """A policy that says the same always. before: is called with the number of the call. together: how many
    episodes begin at one time, so that no worker of theirs is still loading later.
    """
    asked, all_there = 0, asyncio.Event()

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        nonlocal asked
        number = asked = asked + 1
        if number >= together:
            all_there.set()
        await all_there.wait()
        before(number)
        once = saying(text)
        done: Completion = await once(request)
        return done

    return generate


def play(
    prompts: Sequence[Prompt],
    config: EnvironmentConfig | None,
    *,
    count: int = 1,
    agent: FunctionConfig = STEPS,
    policy: Any = None,
    seconds: float | None = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """An episode of each prompt, all at once, and their metrics. config: of the environment."""

    async def main() -> tuple[list[Trajectory], dict[str, float]]:
        worlds = Worlds([config], episode_workers=count) if config else None
        runs = ExternalAgent(agent, TOKENIZER, max_context=3000, worlds=worlds, episode_workers=count)
        runner = EpisodeRunner(
            policy or says("<action>go</action>"),
            Unscored(),
            lambda ids: decode(TOKENIZER, ids),
            run_seed=0,
            agent=runs,
        )
        sampling = SamplingParams(1000, stop_token_ids=STOPS)
        try:
            groups = await asyncio.gather(
                *(runner.run_group(each, sampling, 1, deadline_seconds=seconds) for each in prompts)
            )
            return [made for group in groups for made in group], runs.stats().values()
        finally:
            await asyncio.to_thread(runs.close)

    return asyncio.run(main())


def counts(name: str = "Counts", seconds: float = 30.0, **options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(f"{WORLDS}:{name}", timeout_seconds=seconds, **options)


def told(made: Sequence[Trajectory]) -> list[Any]:
    """All that an episode is."""
    return [
        (
            entry_of(t),
            t.transcript,
            [(turn.reward, turn.anchor, turn.flags) for r in t.rows for turn in r.turns],
        )
        for t in made
    ]


# ---- environments


@pytest.mark.parametrize("count", [0, 1])
def test_a_task_is_read_only(count: int) -> None:
    """Wherever the environment lives: other samples of the prompt have the same task."""
    asked = prompt(0, goals=["red"])
    (made,), _ = play([asked], counts("Writes"), count=count)
    assert made.outcome == "environment_error"
    assert "ValueError: this list is lent and read-only" in made.failure
    assert asked.fields["task"] == made.prompt.fields["task"] == {"goals": ["red"]}


@pytest.mark.slow
def test_episodes_are_what_they_are_in_threads() -> None:
    prompts = [prompt(number) for number in range(6)]
    lake = EnvironmentConfig("frozen_lake", options={"size": 3, "slippery": True})
    policy = "<action>down</action>"
    for config, text in ((counts(), "<action>go</action>"), (lake, policy)):
        here, _ = play(prompts, config, count=0, policy=says(text))
        there, values = play(prompts, config, count=2, policy=says(text))
        assert told(here) == told(there)
        assert [t.outcome for t in there] == ["scored"] * 6
        name = "Counts" if config.name != "frozen_lake" else "frozen_lake"
        assert values[f"environment/reissued/{name}"] == 0
        assert values[f"environment/seconds/{name}"] > 0


@pytest.mark.slow
def test_one_call_at_a_time_in_few_processes_that_see_no_device() -> None:
    """200 episodes at once; no thread waits for one."""
    most = 0

    def look(number: int) -> None:
        nonlocal most
        most = max(most, threading.active_count())

    before = threading.active_count()
    config = counts("Somewhere", keep_state=True)
    made, values = play(
        [prompt(number) for number in range(200)], config, count=2, policy=says("<action>go</action>", look)
    )
    assert [t.outcome for t in made] == ["scored"] * 200
    states = [state for t in made for row in t.rows for turn in row.turns for state in turn.states]
    assert len(states) == 200 * 3 * 2
    by_episode = [
        {state["pid"] for row in t.rows for turn in row.turns for state in turn.states} for t in made
    ]
    assert all(len(pids) == 1 for pids in by_episode)
    assert len(set.union(*by_episode)) == 2
    assert os.getpid() not in set.union(*by_episode)
    assert {(state["main"], state["devices"]) for state in states} == {(True, "")}
    assert {state["most"] for state in states} == {0, 1}
    assert most <= before + 12  # the agents' loop, the endpoint's two, three for each process
    assert values["environment/steps/Somewhere"] == 3


def test_what_is_printed_breaks_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    made, _ = play([prompt(0, **{"1": "prints"})], counts())
    assert [t.outcome for t in made] == ["scored"]
    assert "hello" not in "".join(capfd.readouterr())


def test_episodes_of_a_worker_that_died_between_turns_are_as_if_it_had_not() -> None:
    prompts = [prompt(number) for number in range(5)]
    whole, _ = play(prompts, counts(), count=2)

    def kill(number: int) -> None:
        if number == 8:
            kill_workers()

    made, values = play(prompts, counts(), count=2, policy=says("<action>go</action>", kill))
    assert told(made) == told(whole)
    assert 1 <= values["environment/reissued/Counts"] <= 5
    assert values["environment/failures/Counts"] == 0


@pytest.mark.parametrize("seconds", [30.0, 2.0])
def test_episodes_of_a_worker_that_was_frozen_are_as_if_it_had_not(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended in a second; or, long before it would be, by the limit of a call, which is nobody's fault
    then. All calls have that limit: a busy machine keeps it.
    """
    monkeypatch.setattr(worker_pool, "STOPPED_SECONDS", 1.0 if seconds == 30.0 else 60.0)
    prompts = [prompt(number) for number in range(5)]
    whole, _ = play(prompts, counts(), count=2)

    def freeze(number: int) -> None:
        if number == 8:
            freeze_workers()

    policy = says("<action>go</action>", freeze, together=len(prompts))
    made, values = play(prompts, counts(seconds=seconds), count=2, policy=policy)
    assert told(made) == told(whole)
    assert 1 <= values["environment/reissued/Counts"] <= 5
    assert values["environment/failures/Counts"] == 0


def test_what_freezes_its_process_each_time_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "STOPPED_SECONDS", 1.0)
    made, values = play([prompt(0, **{"2": "freezes"}), prompt(1)], counts())
    assert [t.outcome for t in made] == ["environment_error", "scored"]
    assert made[0].failure.endswith("so it was 3 times")
    assert values["environment/failures/Counts"] == 1


def test_a_process_that_dies_again_and_again_is_told_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "rondo.agents.worker_pool")
    made, _ = play([prompt(number, **{"1": "exits"}) for number in range(3)], counts())
    assert [t.outcome for t in made] == ["environment_error"] * 3
    again = [record for record in caplog.records if "it is started again" in record.message]
    assert [f"({number} so far)" in record.message for number, record in enumerate(again, 1)] == [True] * len(
        again
    )
    shown = [number for number, record in enumerate(again, 1) if record.levelno == logging.WARNING]
    assert shown == [1, 2, 4, 8][: len(shown)]
    assert len(again) >= 8
    assert len(shown) == 4


def test_workers_that_are_closed_as_they_start_leave_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        worlds = Worlds([counts()], episode_workers=2)
        runs = ExternalAgent(STEPS, TOKENIZER, max_context=3000, worlds=worlds, episode_workers=2)
        play_one = functools.partial(runs, sampling=SamplingParams(1000), sample_index=0, run_seed=0)
        playing = [asyncio.ensure_future(play_one(prompt(n), says("go"))) for n in range(4)]
        while not workers():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(runs.close)
        for each in playing:
            each.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        del playing
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize(
    ("what", "why"),
    [("exits", "exit code 7; it printed last: no memory is left"), ("crashes", "signal SIGSEGV")],
)
def test_what_kills_its_process_each_time_is_no_reward_of_0(what: str, why: str) -> None:
    """And the episodes beside it are made."""
    prompts = [prompt(number, **({"2": what} if number == 1 else {})) for number in range(4)]
    made, values = play(prompts, counts())
    assert [t.outcome for t in made] == ["scored", "environment_error", "scored", "scored"]
    assert made[1].failure.startswith(f"the environment Counts: step: its process died, {why}")
    assert made[1].failure.endswith("so it was 3 times")
    assert "[action] go · reward 1" in made[1].transcript
    assert told(made[:1]) == told(play(prompts[:1], counts())[0])
    assert values["environment/failures/Counts"] == 1
    assert values["environment/reissued/Counts"] >= 2


def test_what_hangs_ends_with_its_process_and_all_that_it_started() -> None:
    prompts = [prompt(number, **({"2": "hangs"} if number == 1 else {})) for number in range(4)]
    made, values = play(prompts, counts(seconds=1.0))
    assert [t.outcome for t in made] == ["scored", "environment_error", "scored", "scored"]
    assert made[1].failure == "the environment Counts: step took longer than timeout_seconds = 1.0"
    assert values["environment/failures/Counts"] == 1


def test_a_process_that_cannot_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDO_TEST_NOT_THERE", "1")
    with pytest.raises(RolloutError, match=full_text("after 5 others that also died before")):
        play([prompt(0)], counts("NotThere"))


def test_what_cannot_travel_is_named() -> None:
    made, _ = play([prompt(0, function=lambda: None)], counts())
    assert made[0].outcome == "environment_error"
    assert "reset cannot be asked in another process" in made[0].failure


# ---- vectorised


@pytest.mark.slow
def test_steps_that_wait_are_one_call() -> None:
    prompts = [prompt(number) for number in range(16)]
    one_by_one, _ = play(prompts, counts())
    made, _ = play(prompts, counts("Vectorised"))
    assert [t.transcript for t in made] == [t.transcript for t in one_by_one]
    assert [t.rows[-1].turns[-1].reward for t in made] == [3.0] * 16
    made, _ = play(prompts, counts("Tells", keep_state=True))
    calls = max(turn.states[-1]["calls"] for t in made for row in t.rows for turn in row.turns)
    assert 3 <= calls < 16 * 3


@pytest.mark.slow
@pytest.mark.parametrize(("what", "why"), [("raises", "step raised OSError"), ("exits", "step: its process")])
def test_one_that_fails_in_a_call_of_several_fails_alone(what: str, why: str) -> None:
    prompts = [prompt(number, **({"2": what} if number == 3 else {})) for number in range(6)]
    made, values = play(prompts, counts("Vectorised"))
    assert [t.outcome for t in made] == [
        "environment_error" if number == 3 else "scored" for number in range(6)
    ]
    assert made[3].failure.startswith(f"the environment Vectorised: {why}")
    assert values["environment/failures/Vectorised"] == 1


# ---- agents over HTTP


@pytest.mark.slow
def test_coroutines_share_the_loop_of_their_process() -> None:
    made, values = play(
        [prompt(number) for number in range(60)], None, count=2, agent=FunctionConfig(f"{WORLDS}:asks")
    )
    assert [t.outcome for t in made] == ["scored"] * 60
    where = [tuple(map(int, t.text.split())) for t in made]
    assert len({pid for pid, _ in where}) == 2
    assert os.getpid() not in {pid for pid, _ in where}
    assert max(threads for _, threads in where) < 12
    assert values["agent/reissued"] == 0


@pytest.mark.slow
def test_agents_of_a_worker_that_died_are_as_if_it_had_not() -> None:
    prompts = [prompt(number) for number in range(4)]
    agent = FunctionConfig(f"{WORLDS}:computes")
    whole, _ = play(prompts, None, agent=agent)

    def kill(number: int) -> None:
        if number == 6:
            kill_workers()

    made, values = play(prompts, None, agent=agent, policy=says("<action>go</action>", kill))
    assert [entry_of(t) for t in made] == [entry_of(t) for t in whole]
    assert [t.outcome for t in made] == ["scored"] * 4
    assert values["agent/reissued"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [None, 8.0])
def test_agents_of_a_worker_that_was_frozen_are_as_if_it_had_not(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a deadline that is over before the worker is ended for it, too."""
    monkeypatch.setattr(worker_pool, "STOPPED_SECONDS", 1.0 if seconds is None else 60.0)
    prompts = [prompt(number) for number in range(4)]
    agent = FunctionConfig(f"{WORLDS}:computes")
    whole, _ = play(prompts, None, agent=agent)

    def freeze(number: int) -> None:
        if number == 6:
            freeze_workers()

    policy = says("<action>go</action>", freeze)
    made, values = play(prompts, None, agent=agent, policy=policy, seconds=seconds)
    assert [entry_of(t) for t in made] == [entry_of(t) for t in whole]
    assert [t.outcome for t in made] == ["scored"] * 4
    assert values["agent/reissued"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("exits", "so it was 3 times"),
        ("raises", "the agent raised OSError: no such file (worker_worlds.py"),
        ("hangs", "the agent took longer than rollout.deadline_seconds = 2.0"),
    ],
)
def test_a_bad_agent_is_a_failed_episode(what: str, why: str) -> None:
    agent = FunctionConfig(f"{WORLDS}:computes", {"what": what})
    seconds = 2.0 if what == "hangs" else None
    (made,), _ = play([prompt(0)], None, agent=agent, seconds=seconds)
    assert made.outcome == "rollout_error"
    assert why in made.failure


@pytest.mark.slow
def test_only_the_agent_that_ends_its_process_fails(tmp_path: Path) -> None:
    """It is in the process with seven others, twice, and then alone, as each of them is."""
    agent = FunctionConfig(f"{WORLDS}:falls", {"folder": str(tmp_path)})
    made, values = play([prompt(number) for number in range(8)], None, agent=agent)
    assert [t.outcome for t in made] == ["scored"] * 3 + ["rollout_error"] + ["scored"] * 4
    assert {t.text for t in made if t.outcome == "scored"} == {"lived"}
    assert "with 1 episodes in it" in made[3].failure
    assert made[3].failure.endswith("so it was 3 times, the last one alone")
    assert values["agent/reissued"] == 8 + 8


# ---- runs

ROWS = f"options: {{environment: '{WORLDS}:Counts', prompt: Go!, size: 8}}"
IN_WORKERS = (
    f"data.train=[{{type: function, task: rondo.environments.episodes, {ROWS}}}]",
    "data.eval=[]",
    f"rollout.environments=[{{name: '{WORLDS}:Counts', keep_state: true}}]",
    f"rollout.agent={{name: steps, max_steps: 4, history: 0, action: '{WORLDS}:half'}}",
    f"reward.functions=[environment, '{WORLDS}:truth']",
    "algorithm.advantage={name: gigpo, gamma: 0.9, normalize_std: false}",
    "trainer.evaluation.every=null",
)


@pytest.mark.slow
def test_a_run_in_which_a_worker_was_killed_or_frozen_ends_with_the_same_bits(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in threads does; and a reward function reads the state of every turn."""
    here = run("threads", *IN_WORKERS)
    whole = run("whole", *IN_WORKERS, "rollout.episode_workers=2")
    original, steps = World.step, 0

    async def step(self: World, *arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps in (9, 80):
            await asyncio.to_thread(disturb)
        return await original(self, *arguments, **options)

    monkeypatch.setattr(World, "step", step)
    monkeypatch.setattr(worker_pool, "STOPPED_SECONDS", 1.0)
    for disturb in (kill_workers, freeze_workers):
        steps = 0
        disturbed = run(disturb.__name__, *IN_WORKERS, "rollout.episode_workers=2")
        assert weights(here) == weights(whole) == weights(disturbed)
        lines, others = metrics(disturbed), metrics(here)
        assert sum(line["environment/reissued/Counts"] for line in lines) >= 2
        for name in ("environment/failures/Counts", "reward/score/truth", "agent/calls"):
            assert [line[name] for line in lines] == [line[name] for line in others]
        assert all(line["reward/score/truth"] > 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "ray"])
def test_on_other_backends(run: Any, backend: str) -> None:
    settings = (*IN_WORKERS, "rollout.episode_workers=1", "cluster.devices=2")
    here = run("here", *IN_WORKERS)
    there = run("there", *settings, f"cluster.backend={backend}")
    assert metrics(there)[-1]["environment/steps/Counts"] == metrics(here)[-1]["environment/steps/Counts"]
    assert metrics(there)[-1]["reward/score/truth"] == metrics(here)[-1]["reward/score/truth"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_run(run: Any, recipe: Path, tmp_path: Path, number: signal.Signals) -> None:
    """With all that an environment has started, and however the run ends."""
    hanging = IN_WORKERS[0].replace("size: 8", "size: 8, task: {'1': hangs}")
    settings = [*IN_WORKERS[1:], hanging, "rollout.episode_workers=2", "rollout.max_tokens=48"]
    room = ["data.max_prompt_tokens=700", "actor.token_budget=2048"]
    room += ["model.config.max_position_embeddings=1024", f"trainer.run_dir={tmp_path / 'ends'}"]
    command = ["-m", "rondo", "train", str(recipe), *settings, *room]
    process = begun.Program(command, env={**os.environ, "PYTHONPATH": PYTHONPATH})
    try:
        sleeps = wait_for(
            "a call that hangs", lambda: [p.pid for p in started(process.pid) if p.name() == "sleep"]
        )
        wait_for("the other worker", lambda: len(workers(process.pid)) == 2)
        pids = [p.pid for p in started(process.pid)]
        process.send_signal(number)
        process.wait(120)
    finally:
        process.kill()
    wait_until_gone([*sleeps, *pids])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.episode_workers=-1"], "rollout.episode_workers"),
        (["rollout.episode_workers=2"], "nothing would run in them"),
        (["rollout.episode_workers=2", "rollout.tools=[calculator]"], "nothing would run in them"),
    ],
)
def test_what_cannot_be_is_said_before_the_run(run: Any, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run("none", *overrides)
