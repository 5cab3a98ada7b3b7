"""The event loop of a command under code that blocks it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from rondo.core.errors import DataError
from rondo.data.files import counted
from rondo.trainers.commands.event_loop import LoopWatch, read_beside
from tests import begun
from tests.trainers.conftest import PYTHONPATH, REPOSITORY
from tests.waiting import wait_for, wait_until_gone


class Heard(logging.Handler):
    """Keeps what is said, and sets an event at each message."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.event.set()


@pytest.fixture
def heard():
    handler = Heard()
    logger = logging.getLogger("rondo.trainers.commands.event_loop")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_who_blocks_the_loop_is_named_and_that_it_turns_again(heard: Heard) -> None:
    async def blocks() -> None:
        assert heard.event.wait(60)
        heard.event.clear()

    async def main() -> None:
        with LoopWatch(0.1):
            await blocks()
            while not heard.event.is_set():
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert "blocks (test_event_loop.py, line " in heard.said[0]
    assert "has kept the event loop from turning" in heard.said[0]
    assert heard.said[1].startswith("the event loop turns again")


def test_the_loop_turns_while_data_is_read_and_hears_how_far_it_is(heard: Heard) -> None:
    told: list[str] = []
    turned = threading.Event()

    def read() -> list[int]:
        rows = list(counted(range(2000), "rows"))
        assert turned.wait(240)
        return rows

    async def main() -> list[int]:
        asyncio.get_running_loop().call_later(1.0, turned.set)
        with LoopWatch(0.2):
            return await read_beside(read, told.append)

    assert asyncio.run(main()) == list(range(2000))
    assert told[-1] == "rows: 1536 rows read"
    assert heard.said == []


def test_an_error_of_reading_is_raised_where_it_is_waited_for() -> None:
    def read() -> None:
        raise DataError("row 7 is broken")

    with pytest.raises(DataError, match="row 7 is broken"):
        asyncio.run(read_beside(read))


def test_nothing_is_said_of_a_loop_that_waits(heard: Heard) -> None:
    async def main() -> None:
        with LoopWatch(0.05):
            await asyncio.sleep(0.5)

    asyncio.run(main())
    assert not heard.said


def test_only_code_on_the_loop_is_named(heard: Heard) -> None:
    """Not the program that the loop runs in, and nobody's code in a library."""

    async def main() -> None:
        with LoopWatch(0.05):
            asyncio.get_running_loop().call_soon(time.sleep, 0.5)
            await asyncio.sleep(0.6)

    asyncio.run(main())
    assert not heard.said


CODE = """
import os, time
from pathlib import Path
from rondo.rewards import reward_function

def held():
    Path(__file__).with_name("held").touch()

async def coroutine(prompt, trajectory):
    held()
    time.sleep(3600)

@reward_function(run_in="loop")
def on_the_loop(prompt, trajectory):
    held()
    time.sleep(3600)

async def stubborn(prompt, trajectory):
    held()
    while True:
        try:
            time.sleep(3600)
        except KeyboardInterrupt:
            pass

def thread(prompt, trajectory):
    held()
    while True:
        time.sleep(3600)

def loss(log_probs, advantages):
    held()
    time.sleep(3600)
"""
# The command, with a shorter time until it ends what does not end.
PROGRAM = """
import sys
from rondo.system import signals
from rondo.cli.main import main

signals.END_SECONDS = 3.0
sys.exit(main())
"""


def descendants(process: int) -> set[int]:
    """All that it has started, and they have."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines())
    found = {process}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


HOURS = "reward.timeout_seconds=3600"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "signals"),
    [
        ("coroutine", (), 2),
        ("on_the_loop", (), 2),
        ("stubborn", (), 2),
        ("loss", ("reward.functions=[tests/trainers/scorers.py:even_share]",), 2),
        ("coroutine", ("cluster.backend=process", "cluster.devices=2"), 2),
        ("thread", (HOURS,), 1),
        ("coroutine", ("reward.isolation=process", HOURS), 1),
    ],
)
def test_ctrl_c_ends_a_run_that_users_code_holds(
    name: str, overrides: tuple[str, ...], signals: int, recipe: Path, tmp_path: Path
) -> None:
    """A real process, by Ctrl-C twice, and by one where the loop turns and nothing is trained yet: the code
    is named where it holds the loop, and no process is left.
    """
    named = not overrides
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    mine = f"algorithm.policy_loss={file}:loss" if name == "loss" else f"reward.functions=['{file}:{name}']"
    settings = [mine, f"trainer.run_dir={tmp_path / 'run'}", "data.eval=[]", "trainer.evaluation.every=null"]
    settings += ["cluster.hang_seconds=0.5"] * named
    process = begun.Program(
        ["-c", PROGRAM, "train", str(recipe), *settings, *overrides],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said: list[str] = []
    assert process.stderr is not None
    try:
        reader = threading.Thread(target=said.extend, args=(process.stderr,))
        reader.start()
        held = tmp_path / "held"
        wait_for("a call of the code", lambda: held.exists() or process.poll() is not None)
        assert held.exists(), "".join(said)
        if named:
            wait_for("the warning", lambda: any("has kept the event loop" in line for line in said))
        started = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        if signals == 2:
            time.sleep(0.5)  # or the kernel makes one of two
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, "".join(said)
        reader.join(60)
        wait_until_gone(started)
    finally:
        process.kill()
        process.wait()
    if named:
        assert f"{name} (mine.py, line " in next(line for line in said if "has kept the event loop" in line)
