"""What a script prints of an error: its own lines and the message, at most 30 lines, nothing behind."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path

import pytest
import yaml

from tests import begun
from tests.api.test_training import ROWS, SETTINGS
from tests.trainers.conftest import PYTHONPATH, RECIPE

FUNCTIONS = """
import asyncio
import torch
from rondo.rewards import reward_function

def even(prompt, trajectory):
    return float((trajectory.response_ids % 2 == 0).mean())

def raising(prompt, trajectory):
    return 1 / len(prompt.fields.get("nothing", ""))

async def lost(prompt, policy):
    raise LookupError("no such page")

def estimator(reward, group_id):
    return reward[:3] + reward[:2] if len(reward) == 16 else reward

def loss(log_probs, advantages, response_mask):
    if len(log_probs) > 30:  # not in the trial before the run
        return torch.ones(3) + torch.ones(4), {}
    return -advantages * log_probs, {}

async def unclean(prompt, trajectory):
    try:
        await asyncio.sleep(3600 * (trajectory.sample_index > 0))
        raise LookupError("no such answer")
    finally:
        if trajectory.sample_index > 0:  # they are cancelled, as one has failed
            raise OSError("cannot be closed")

async def unclean_agent(prompt, policy):
    try:
        await asyncio.sleep(0)
        raise LookupError("no such page")
    finally:
        raise OSError("cannot be closed")

def agent_over_http(messages, base_url, api_key, model):
    raise LookupError("no such page")

@reward_function(run_in="loop")
def at_once(prompt, trajectory):
    return 1 / len(prompt.fields.get("nothing", ""))

class World:
    instructions = ""
    def reset(self, seed, task=None):
        raise LookupError("no such level")
    def step(self, action): ...
    def state(self):
        return {}
    def close(self): ...

def no_filter(reward):
    raise LookupError("no such row")

def callback(*arguments):
    raise ZeroDivisionError("mine")

class Tracker:
    def __init__(self, context): ...
    def log(self, step, metrics):
        raise LookupError("no such page")
    def finish(self, status):
        raise OSError("cannot be closed")
"""
HEAD = """import asyncio, json, rondo
from functions import *
rows, settings = json.load(open("given.json"))
"""
CALL = "rondo.train(data=rows, config=settings, steps=1, "
TWO = "cluster={'backend': 'process', 'devices': 2}, "
ALONE = "'data.eval': [], 'trainer.evaluation.every': None"  # without an evaluation, which would fail first
AHEAD = f"**{{'trainer.max_staleness': 1, {ALONE}}}, "
# What is written, the kind of error, and what else is among the lines.
CALLS = {
    CALL + "reward=even, **{'reward.on_eror': 'stop'})": ("ConfigError", "did you mean 'reward.on_error'?"),
    CALL + "reward=raising)": ("RewardError", "return 1 / len(prompt.fields"),
    CALL + "reward=even, algorithm={'advantage': estimator})": ("TrainError", "(functions.py, line 16)"),
    CALL + "reward=even, algorithm={'policy_loss': loss})": ("TrainError", "(functions.py, line 20)"),
    CALL + "reward=even, **{'rollout.agent': lost})": ("RewardError", "rollout_error"),
}
# What fails in all samples of a group at once, or in several places one after the other.
SIBLINGS = {
    CALL + "reward=lambda p, t: 1/0)": ("RewardError", "reward=lambda p, t: 1/0)"),
    CALL + "reward=unclean)": ("RewardError", "no such answer"),
    CALL + AHEAD + "reward=unclean)": ("RewardError", "no such answer"),
    CALL + TWO + "reward=unclean)": ("RewardError", "no such answer"),
    CALL + "reward=at_once)": ("RewardError", "ZeroDivisionError: division by zero"),
    CALL + "reward=unclean, **{'reward.isolation': 'process'})": ("RewardError", "no such answer"),
    CALL + AHEAD + "reward=even, **{'rollout.agent': unclean_agent})": ("RewardError", "rollout_error"),
    CALL + TWO + "reward=even, **{'rollout.agent': agent_over_http})": ("RewardError", "rollout_error"),
    CALL + "reward=even, **{'rollout.environments': [{'name': World}]})": (
        "RewardError",
        "environment_error",
    ),
    CALL + TWO + "reward=even, algorithm={'policy_loss': loss})": ("TrainError", "(functions.py, line 20)"),
    CALL + AHEAD + "reward=even, algorithm={'filter': no_filter})": ("TrainError", "no such row"),
    CALL + "reward=even, on_step=callback)": ("ZeroDivisionError", "mine"),
    CALL + AHEAD + "reward=even, on_checkpoint=callback, **{'checkpoint.every': 1})": (
        "ZeroDivisionError",
        "mine",
    ),
    CALL + TWO + "reward=even, on_evaluation=callback)": ("ZeroDivisionError", "mine"),
    CALL + "reward=even, tracking={'trackers': ['functions.py:Tracker']})": (
        "TrainError",
        "Tracker.log raised LookupError: no such page",
    ),
}
ACTOR = "batch = await actor.compute_log_prob(await actor.generate_sequences(prompts))"
UPDATE = f"{ACTOR}; await actor.update_actor(await session.compute_advantages(batch))"
STEPS = {
    "session.prompt([])": ("DataError", "prompt"),
    "await actor.generate_sequences(prompts, n=0)": ("DataError", "n=0"),
    f"{ACTOR}; await session.compute_advantages(batch, estimator)": ("TrainError", "(functions.py, line 16)"),
    UPDATE: ("WorkerError", "(functions.py, line 20)"),
}


def ended(folder: Path, lines: str, **environment: str) -> list[str]:
    """What a script of these lines prints."""
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "given.json").write_text(json.dumps([ROWS, SETTINGS]))
    recipe = {**RECIPE, "reward": {"functions": [{"name": "functions.py:even"}]}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "script.py").write_text(HEAD + lines + "\n")
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **environment}
    done = begun.run(
        ["script.py"],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return (done.stdout + done.stderr).splitlines()


def program(line: str, backend: str = "local") -> str:
    settings = ["algorithm.rollout_correction=null", f"cluster.backend={backend}"]
    loss = "loss" if "update" in line else None
    return f"""
from rondo.trainers.sessions import open_session
async def main():
    async with open_session(["tiny.yaml"], {settings}) as session:
        actor = await session.actor(policy_loss={loss})
        async for prompts in session.prompts():
            {line}
asyncio.run(main())
"""


def check(lines: list[str], line: str, kind: str, said: str) -> None:
    text = "\n".join(lines)
    assert len(lines) <= 30, text
    assert line in text
    assert said in text
    assert text.count("Traceback (most recent call last)") <= 2, text  # that of the user's function is one
    assert "never retrieved" not in text
    assert "unhandled" not in text
    start = kind if hasattr(builtins, kind) else f"rondo.core.errors.{kind}"
    starts = [number for number, one in enumerate(lines) if one.startswith(f"{start}: ")]
    assert len(starts) == 1, text
    assert not any(one.lstrip().startswith("File ") and "rondo/trainers" in one for one in lines), text


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_a_call_is_its_line_and_the_message(call: str, tmp_path: Path) -> None:
    check(ended(tmp_path, call), call, *CALLS[call])


@pytest.mark.slow
@pytest.mark.parametrize("call", SIBLINGS)
def test_siblings_that_fail_together_are_one_error(call: str, tmp_path: Path) -> None:
    lines = ended(tmp_path, call)
    check(lines, call, *SIBLINGS[call])
    assert not any(line.startswith("[rank") for line in lines), "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "backend"), [*((line, "local") for line in STEPS), (UPDATE, "process")])
def test_an_error_of_a_program_is_its_line_and_the_message(line: str, backend: str, tmp_path: Path) -> None:
    check(ended(tmp_path, program(line, backend)), line, *STEPS[line])


@pytest.mark.slow
def test_all_frames_are_there_where_they_are_asked_for(tmp_path: Path) -> None:
    lines = ended(tmp_path, program("session.prompt([])"), RONDO_TRACEBACK="1")
    assert any("rondo/trainers/program/given.py" in line for line in lines), "\n".join(lines)


def test_a_bug_keeps_its_frames(tmp_path: Path) -> None:
    """Neither rondo's own errors nor those of a worker that are none of rondo's are cut."""
    broken = "import rondo.api.run as run\nrun.load_recipe = lambda *a, **k: {}['a bug']\nrondo.train()"
    lines = ended(tmp_path, broken)
    assert any("rondo/api/run.py" in line and "_trained" in line for line in lines)
    assert lines[-1] == "KeyError: 'a bug'"
