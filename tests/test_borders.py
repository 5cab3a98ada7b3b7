"""Doors × what comes through them: whatever code of the user's raises is an error that names kind, file and
line. Never a hang, a timeout, a zero, or the end of who called it.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from rondo.agents.places import Workers
from rondo.agents.tools import Toolbox, ToolFailedError, load_tools, prepare_tools
from rondo.algorithms import Kind, bind
from rondo.config.schema import (
    EnvironmentConfig,
    FunctionConfig,
    RewardConfig,
    RewardFunctionConfig,
    TaskSourceConfig,
    ToolConfig,
)
from rondo.core.errors import (
    ConfigError,
    DataError,
    EnvironmentFailedError,
    RewardError,
    RondoError,
    TrainError,
)
from rondo.data import ChosenPrompts, Heard, Sampler
from rondo.data.sources import open_source
from rondo.environments.played import Played
from rondo.environments.registry import load_environments
from rondo.models.loading import load_tokenizer
from rondo.models.source import TokenizerSource
from rondo.rewards.functions import load_functions
from rondo.rewards.scorer import Scorer
from rondo.system.border import in_thread, on_agents_loop, said_by, users_code
from rondo.tracking.run_folder import RunFolder
from rondo.tracking.trackers import TrackerContext, make_trackers
from rondo_search.corpus import _rows
from tests import raising
from tests.raising import KINDS
from tests.rewards.conftest import make_trajectory

FILE = "tests/raising.py"
LIMIT = 60.0  # s, of doors that might lose what comes through


def bounded(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT))


def scored(name: str, kind: str, isolation: str = "thread") -> None:
    function = RewardFunctionConfig(f"{FILE}:{name}", options={"kind": kind})
    config = RewardConfig(
        functions=(function,),
        on_error="stop",
        timeout_seconds=2 * LIMIT,
        isolation=isolation,  # type: ignore[arg-type]
    )
    scorer = Scorer(config)
    try:
        bounded(scorer.score(make_trajectory("an answer")))
    finally:
        scorer.close()


def checked_reward(kind: str) -> None:
    function = RewardFunctionConfig(f"{FILE}:reward_checked", options={"kind": kind})
    (loaded,) = load_functions((function,))
    assert loaded.marks.check is not None
    with users_code("its check", ConfigError):  # as trainers.commands.check has it
        loaded.marks.check(**loaded.options)


async def _agent(kind: str) -> str:
    return str(raising.fail(kind))


async def _nothing() -> None: ...


def said(future: Callable[[], Any]) -> None:
    """An agent that fails is a failed trajectory, whose reason says so."""

    async def waited() -> tuple[str, str]:
        return await said_by(asyncio.wrap_future(future()))

    _, failure = bounded(waited())
    raise RondoError(failure)


def tools(name: str, **options: Any) -> Any:
    return load_tools((ToolConfig(f"{FILE}:{name}", options=options),))


def called(name: str, kind: str) -> None:
    bounded(Toolbox(tools(name), None).call(name, {"kind": kind}))


def looked_at(kind: str) -> None:
    (tool,) = tools("ToolChecked", kind=kind)
    assert tool.check is not None
    tool.check()


def environment(kind: str) -> Any:
    (choice,) = load_environments((EnvironmentConfig(f"{FILE}:World", options={"kind": kind}),))
    return choice


def began(kind: str) -> None:
    choice = environment(kind)
    bounded(asyncio.to_thread(Played(choice.make, keep_state=False).reset, 0, None))


def began_elsewhere(kind: str) -> None:
    choice = environment(kind)
    workers = Workers(1, [choice])
    try:
        bounded(workers.open(choice, "an episode").reset(0, None))
    finally:
        workers.close()


def computed(of: Kind, name: str, kind: str) -> None:
    bind(of, FunctionConfig(f"{FILE}:{name}", {"kind": kind}))(torch.ones(1))


def tracked(kind: str, fails_in: str) -> None:
    with tempfile.TemporaryDirectory() as folder, RunFolder(folder) as run:
        options = {"kind": kind, "fails_in": fails_in}
        context = TrackerContext(run, "project", "run", {}, print)
        (tracker,) = make_trackers([FunctionConfig(f"{FILE}:Tracker", options)], context)
        tracker.log(1, {})
        tracker.log_samples(1, ())
        tracker.finish("finished")


def chosen(kind: str, fails_in: str) -> None:
    config = FunctionConfig(f"{FILE}:Sampler", {"kind": kind, "fails_in": fails_in})
    sampler, fits = Sampler(config), iter([False, True])
    sampler.call("check", sources=["a source"], n=2)
    prompts = ChosenPrompts(
        sampler, {"a source": 1}, lambda i: ("a source", 0), lambda *_: next(fits), n=2, batch_size=1, seed=0
    )
    prompts.admit(0, 1, 1)
    prompts.hear(0, Heard([], None, 0, True))
    prompts.end_step()
    prompts.load(prompts.state())


DOORS: dict[str, tuple[Callable[[str], Any], type[Exception]]] = {
    "reward": (functools.partial(scored, "reward"), RewardError),
    "reward in a process": (functools.partial(scored, "reward_elsewhere"), RewardError),
    "reward, isolated": (functools.partial(scored, "reward", isolation="process"), RewardError),
    "reward that waits": (functools.partial(scored, "reward_later"), RewardError),
    "reward that waits, isolated": (
        functools.partial(scored, "reward_later", isolation="process"),
        RewardError,
    ),
    "reward at once": (functools.partial(scored, "reward_at_once"), RewardError),
    "a reward's check": (checked_reward, ConfigError),
    "agent": (lambda kind: said(lambda: in_thread(lambda: raising.fail(kind), "agent")), RondoError),
    "agent that waits": (
        lambda kind: said(lambda: on_agents_loop(lambda: _agent(kind), _nothing)),
        RondoError,
    ),
    "tool": (functools.partial(called, "tool"), ToolFailedError),
    "tool that waits": (functools.partial(called, "tool_later"), ToolFailedError),
    "a tool's check": (looked_at, ConfigError),
    "what a tool prepares": (lambda kind: prepare_tools(tools("ToolChecked", kind=kind)), ConfigError),
    "environment": (began, EnvironmentFailedError),
    "an environment's check": (lambda kind: environment(kind).check(), ConfigError),
    "environment in a process": (began_elsewhere, EnvironmentFailedError),
    "estimator": (functools.partial(computed, "advantage", "estimator"), TrainError),
    "loss": (functools.partial(computed, "policy_loss", "loss"), TrainError),
    "a tracker's beginning": (functools.partial(tracked, fails_in="init"), ConfigError),
    "tracker": (functools.partial(tracked, fails_in="log"), TrainError),
    "a tracker's samples": (functools.partial(tracked, fails_in="log_samples"), TrainError),
    "a tracker's end": (functools.partial(tracked, fails_in="finish"), TrainError),
    "a sampler's beginning": (functools.partial(chosen, fails_in="init"), ConfigError),
    "a sampler's check": (functools.partial(chosen, fails_in="check"), ConfigError),
    **{
        f"a sampler's {part}": (functools.partial(chosen, fails_in=part), DataError)
        for part in ("choose", "heard", "too_long", "metrics", "state", "load")
    },
    "rows": (
        lambda kind: open_source(
            TaskSourceConfig(type="function", task=f"{FILE}:rows", options={"kind": kind})
        ),
        DataError,
    ),
    "tokenizer": (lambda kind: load_tokenizer(TokenizerSource(f"{FILE}:raises_{kind}")), ConfigError),
    "corpus": (lambda kind: _rows(f"{FILE}:raises_{kind}"), DataError),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_raised_is_named_with_its_line(door: str, kind: str) -> None:
    if kind == "KeyboardInterrupt" and door not in ("reward", "agent", "tool", "environment"):
        pytest.skip("in the main thread it is a real Ctrl-C")
    enter, error = DOORS[door]
    with pytest.raises(error) as caught:
        enter(kind)
    told = str(caught.value)
    assert kind in told, told
    assert "raising.py" in told, told
    assert "line " in told, told
