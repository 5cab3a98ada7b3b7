"""MCP servers as tools: real ones (served_tools.py), in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from rondo.agents import mcp_servers
from rondo.agents.tools import Tool, Toolbox, ToolFailedError, _lean, end_tools, load_tools
from rondo.chat import decode
from rondo.config.schema import FunctionConfig, ToolConfig
from rondo.core.errors import ConfigError
from rondo.system.pool import Supervision
from tests import begun
from tests.agents.scripted import call, episode, saying
from tests.messages import full_text
from tests.serving.conftest import TOKENIZER
from tests.trainers.conftest import PYTHONPATH, REPOSITORY, inline

SERVER = f"{sys.executable} {REPOSITORY / 'tests/agents/served_tools.py'}"
HOST = """
import signal, sys
from rondo.agents.tools import load_tools
from rondo.config.schema import ToolConfig
load_tools([ToolConfig("mcp", options={"command": sys.argv[1], "env": ["ALIVE"]})])
print("up", flush=True)
signal.pause()
"""


def served(how: str = "", *, timeout_seconds: float = 60.0, **options: Any) -> ToolConfig:
    return ToolConfig("mcp", timeout_seconds, options={"command": f"{SERVER} {how}", **options})


@pytest.fixture(scope="module")
def tools() -> Iterator[tuple[Tool, ...]]:
    """One server for many tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAMED", "with a name")
        patch.setenv("NOT_NAMED", "without")
        loaded = load_tools([served(env=["NAMED"])])
        yield loaded
    end_tools(loaded)


def ask(tools: Sequence[Tool], *calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], Toolbox]:
    """What calls come to that are made at the same time, and the box after them."""
    box = Toolbox(tools, TOKENIZER)

    async def main() -> list[Any]:
        return await asyncio.gather(*(box.call(*each) for each in calls), return_exceptions=True)

    return asyncio.run(main()), box


def test_the_tools_are_the_servers(tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    assert names == ["add", "fail", "meet", "shout", "die", "die_once", "die_when", "much", "see", "paint"]
    assert tools[0].schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }


def test_what_says_nothing_is_left_out_of_a_schema() -> None:
    """True is JSON's schema of anything."""
    kinds = {"title": {"type": "string", "title": "Title"}, "any": True}
    told = {"type": "object", "title": "Arguments", "additionalProperties": False, "properties": kinds}
    expected = {"type": "object", "properties": {"title": {"type": "string"}, "any": {}}}
    assert _lean(told) == expected


def test_results_are_texts_and_errors_are_observations(tools: Sequence[Tool]) -> None:
    said, box = ask(
        tools,
        ("add", {"a": 2, "b": 3}),
        ("add", {"a": "two"}),
        ("fail", {"why": "never"}),
        ("see", {"name": "NAMED"}),
        ("see", {"name": "NOT_NAMED"}),
        ("shout", {}),
    )
    assert said[0] == "5"
    assert said[1].startswith("Error: Error executing tool add: 1 validation error")
    assert said[2] == "Error: Error executing tool fail: no: never"
    assert said[3] == "first\n[image, image/png]\nwith a name"
    assert said[4].endswith("\nunset")
    assert said[5] == "sorry"
    assert box.stats.errors == {"add": 1, "fail": 1}
    assert (box.failure, box.stats.calls.total()) == ("", 6)


def test_arguments_that_are_no_object(tools: Sequence[Tool]) -> None:
    said, box = ask(tools, ("add", "[1, 2]"), ("add", "{"))  # type: ignore[arg-type]
    assert said[0] == "Error: wrong arguments: arguments: Input should be a valid dictionary"
    assert said[1].startswith("Error: the arguments are no JSON object: ")
    assert box.stats.invalid == {"wrong_arguments": 2}


def test_calls_of_many_episodes_run_at_the_same_time(tools: Sequence[Tool]) -> None:
    said, _ = ask(tools, *[("meet", {"others": 19})] * 20)
    assert said == ["19 others"] * 20


@pytest.mark.slow
def test_ten_megabytes_are_cut_off(tools: Sequence[Tool]) -> None:
    (said,), _ = ask(tools, ("much", {}))
    text, _, note = said.rpartition("\n")
    assert note == "[cut off after 1024 tokens]"
    assert ("red " * 2_500_000).startswith(text)


def test_a_call_beyond_its_time_is_a_failure_and_the_server_goes_on(tools: Sequence[Tool]) -> None:
    short = [replace(tool, config=replace(tool.config, timeout_seconds=0.5)) for tool in tools]
    (said,), box = ask(short, ("meet", {"others": 10**6}))
    assert isinstance(said, ToolFailedError)
    assert box.failure == "the tool meet took longer than timeout_seconds = 0.5"
    assert ask(tools, ("add", {"a": 1}))[0] == ["2"]


@pytest.mark.slow
def test_a_server_that_dies_is_started_again(tools: Sequence[Tool], tmp_path: Path) -> None:
    """What was asked of it meanwhile is asked once more; what it dies of each time is a failure."""
    once = ("die_once", {"file": str(tmp_path / "died")})
    waits = [("meet", {"others": 0})] * 3
    assert ask(tools, once, *waits)[0] == ["lived", *["0 others"] * 3]
    said, box = ask(tools, ("die", {}), *waits)
    assert said[1:] == ["0 others"] * 3
    assert isinstance(said[0], ToolFailedError)
    assert box.stats.failures == {"die": 1}
    assert "died" in box.failure


@pytest.mark.slow
def test_an_episode_ends_with_a_server_that_is_down() -> None:
    """As outcome tool_error, without a reward."""
    policy = saying(call("add", a=3, b=4), call("die"))
    trajectory, values = episode(policy, FunctionConfig("tools"), [served(tools=["add", "die"])])
    assert trajectory.outcome == "tool_error"
    assert trajectory.failure.startswith("the tool die raised ServerDownError")
    assert "<tool_response>7</tool_response>" in policy.asked[1]
    assert (values["agent/tool_calls/add"], values["agent/tool_failures/die"]) == (1, 1)


@pytest.mark.slow
def test_only_calls_that_a_server_dies_of_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two of 22 that are under way at its first death, which are made again alone."""
    starts = tmp_path / "starts"
    monkeypatch.setenv("STARTS", str(starts))
    loaded = load_tools([served("counted", timeout_seconds=200, env=["STARTS"])])
    mild = [("meet", {"others": 0})] * 10
    deadly = ("die_when", {"came": 22, "file": str(tmp_path / "came")})
    said, box = ask(loaded, *mild, deadly, deadly, *mild)
    assert [text for text in said if isinstance(text, str)] == ["0 others"] * 20
    assert box.stats.failures == {"die_when": 2}
    for _ in range(3):
        ask(loaded, ("die", {}))
    assert ask(loaded, ("add", {"a": 1}))[0] == ["2"]  # deaths that a call is guilty of cost no restart
    end_tools(loaded)
    assert len(starts.read_text()) == 1 + (2 + 3) * 2  # each such call costs two, and each death a start


@pytest.mark.slow
def test_it_is_not_started_again_without_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that cannot be started a second time."""
    monkeypatch.setattr(mcp_servers, "SUPERVISION", Supervision(restarts=1, deaths=2))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    loaded = load_tools([served("once", env=["STARTS"])])
    _, box = ask(loaded, ("die", {}))
    assert "ended before it said which tools it has" in box.failure
    for _ in range(2):
        _, box = ask(loaded, ("add", {"a": 1}))
        assert "died 2 times and answered nothing between; it is not started again" in box.failure
    assert (tmp_path / "starts").read_text() == "++"
    end_tools(loaded)


def wrong(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tools([ToolConfig("calculator"), ToolConfig("mcp", options=options)])
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "is a command (command: python server.py) or a url, one of the two"),
        ({"command": "a", "url": "http://b"}, "one of the two"),
        ({"comand": "python"}, "has no option 'comand'; did you mean 'command'?"),
        ({"command": "no-such-program -v"}, "there is no program 'no-such-program' that could be run"),
        ({"command": "'a"}, "is no command line: No closing quotation"),
        ({"command": "cat", "env": ["NO_SUCH"]}, "env: there is no variable 'NO_SUCH' in the environment"),
        ({"command": "cat", "tools": "add"}, "option 'tools' of mcp must be list of str, got str 'add'"),
        ({"command": "cat", "start_seconds": 0}, "start_seconds must be above 0"),
        ({"url": "localhost:80"}, "is no http:// or https:// URL"),
        ({"url": "http://localhost", "env": ["HOME"]}, "env is for a command"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be reached: ConnectError"),
        ({"command": "sh -c 'echo the database is gone >&2'"}, "which tools it has:\nthe database is gone"),
        ({"command": f"{SERVER} mute", "start_seconds": 0.5}, "has not said within start_seconds = 0.5"),
        ({"command": SERVER, "tools": ["add", "ad"]}, "has no tool 'ad'; it has add, fail, "),
    ],
)  # fmt: skip
def test_what_is_no_server_is_said_at_the_start(options: dict[str, Any], said: str) -> None:
    before = children()
    message = wrong(options)
    assert message.startswith("rollout.tools.1: ")
    assert said in message
    assert children() == before


@pytest.mark.slow
def test_two_tools_of_one_name() -> None:
    before = children()
    with pytest.raises(ConfigError, match=full_text("are two tools called add; rename one, or")):
        load_tools([served(tools=["add"]), served()])
    assert children() == before


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert 'pip install "rondo-rl[mcp]"' in wrong({"command": "cat"})


def children() -> set[int]:
    """The processes under this one."""
    begun.start()
    return {child.pid for child in psutil.Process().children(recursive=True)}


# ---- no process is left behind


@pytest.fixture
def alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where stubborn servers write their ids and those of their children."""
    monkeypatch.setenv("ALIVE", str(tmp_path / "alive"))
    return tmp_path / "alive"


def assert_gone(alive: Path, servers: int) -> None:
    ids = alive.read_text().split()
    assert len(ids) == 2 * servers
    patience = time.monotonic() + 60
    while left := [pid for pid in ids if psutil.pid_exists(int(pid))]:
        assert time.monotonic() < patience, f"{left} are there still"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_that_ignores_every_request_to_end(alive: Path) -> None:
    """It ignores SIGTERM and the end of its input, and so does what it has started."""
    end_tools(load_tools([served("stubborn", env=["ALIVE"])]))
    assert not [pid for pid in alive.read_text().split() if psutil.pid_exists(int(pid))]


@pytest.mark.slow
def test_who_wants_the_same_server_gets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It runs until the last has ended it, each once; other settings are another server."""
    starts = tmp_path / "starts"
    monkeypatch.setenv("STARTS", str(starts))
    before = children()
    first, second = (load_tools([served("counted", env=["STARTS"])]) for _ in range(2))
    end_tools(first)
    end_tools(first)
    assert ask(second, ("add", {"a": 1}))[0] == ["2"]
    assert len(starts.read_text()) == 1
    other = load_tools([served("counted", env=["STARTS"], tools=["add"])])
    assert len(starts.read_text()) == 2
    end_tools((*second, *other))
    assert children() == before
    end_tools(load_tools([served("counted", env=["STARTS"])]))
    assert len(starts.read_text()) == 3


@pytest.mark.slow
def test_a_host_that_is_killed(alive: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", HOST, f"{SERVER} stubborn"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
        assert psutil.pid_exists(int(alive.read_text().split()[0]))
        host.kill()
    assert_gone(alive, 1)


@pytest.mark.slow
def test_training_with_a_server(run: Any, alive: Path) -> None:
    """Its schemas are in the prompts, and it has ended with the run: what the check of the recipe has started
    writes the prompts and serves the episodes.
    """
    entry = f"{{name: mcp, command: {SERVER} stubborn, env: [ALIVE], tools: [add, die]}}"
    folder = run("served", f"rollout.tools=[calculator, {entry}]")
    assert_gone(alive, 1)
    rows = pq.read_table(folder / "rollouts/step-000002.parquet").to_pydict()
    for ids in rows["prompt_ids"]:
        assert ['"add"' in decode(TOKENIZER, ids), '"meet"' in decode(TOKENIZER, ids)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "backend"), [(signal.SIGINT, "local"), (signal.SIGKILL, "process")])
def test_a_run_that_is_ended(recipe: Path, tmp_path: Path, alive: Path, number: int, backend: str) -> None:
    """At the first step, by Ctrl-C or for good."""
    entry = f"{{name: mcp, command: {SERVER} stubborn, env: [ALIVE], tools: [add]}}"
    room = ["data.max_prompt_tokens=700", "actor.token_budget=2048", "trainer.total_steps=1000000"]
    arguments = [
        *("train", str(recipe), f"rollout.tools=[{entry}]", f"trainer.run_dir={tmp_path / 'run'}", *room),
        *("model.config.max_position_embeddings=1024", f"cluster.backend={backend}"),
    ]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = ["-m", "rondo.cli.main", *arguments]
    with begun.Program(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as host:
        wait_for(tmp_path / "run/rollouts/step-000001.parquet", host)
        host.send_signal(number)
        said, errors = host.communicate(timeout=200)
    assert host.returncode == (130 if number == signal.SIGINT else -number), errors
    assert "served_tools" not in said
    assert_gone(alive, 1 if backend == "local" else 2)  # of each process that needs one


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    patience = time.monotonic() + 200
    while not file.exists():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < patience
        time.sleep(0.05)


# ---- a URL


@pytest.mark.slow
def test_a_server_behind_a_url() -> None:
    """It may be started anew: episodes that ask it while it is down fail, and later ones go on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(REPOSITORY / "tests/agents/served_tools.py"), "http", str(port)]
    first = listening(command, port)
    loaded = load_tools([ToolConfig("mcp", options={"url": f"http://127.0.0.1:{port}/mcp"})])
    waits = [("meet", {"others": 9})] * 10
    assert ask(loaded, *waits, ("fail", {"why": "x"}))[0] == [
        *["9 others"] * 10,
        "Error: Error executing tool fail: no: x",
    ]
    end(first)
    for _ in range(6):
        _, box = ask(loaded, ("add", {"a": 1}))
        assert "cannot be reached: ConnectError" in box.failure
    second = listening(command, port)
    assert ask(loaded, ("add", {"a": 1}))[0] == ["2"]
    end(second)
    third = listening(command, port)  # it does not know the session
    assert ask(loaded, ("add", {"a": 1}))[0] == ["2"]
    end_tools(loaded)
    end(third)


def listening(command: list[str], port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while True:
        assert process.poll() is None
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_recipe_with_a_server_that_is_not_there(recipe: Path) -> None:
    done = inline("train", str(recipe), "rollout.tools=[{name: mcp, command: no-such-program}]", check=False)
    assert done.returncode == 2
    assert "': rollout.tools.0: command: there is no program 'no-such-program'" in done.stderr
