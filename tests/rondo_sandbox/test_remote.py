"""SandboxFusion's API: our server in a process of its own, asked raw and by our client; and a server that is
another's, as far as a stand-in can be.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rondo.agents.tools import Toolbox, load_tools
from rondo.config.schema import ToolConfig
from rondo.core.errors import ConfigError, SandboxError
from rondo.system.access import SANDBOX_KEY, Access
from rondo_sandbox import Limits, Sandbox, open_sandbox
from rondo_sandbox.code_rewards import code
from rondo_sandbox.escapes import check, processes_named
from rondo_sandbox.server import BODY_BYTES, SandboxServer
from tests.rewards.conftest import make_trajectory
from tests.sandboxes import need_sandbox
from tests.serving.conftest import TOKENIZER
from tests.waiting import served_by, wait_for

TOKEN = "a-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of `rondo sandbox serve`, which wants a key."""
    need_sandbox()
    with served_by("sandbox", "serve", **{SANDBOX_KEY: TOKEN}) as url:
        yield url


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SANDBOX_KEY, TOKEN)


def post(url: str, body: Any, token: str | None = TOKEN) -> tuple[int, Any]:
    """Status and answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def within(url: str, work: Callable[[Sandbox], Awaitable[object]], limits: Limits | None = None) -> None:
    """Does `work` with the sandbox behind a URL."""

    async def opened() -> None:
        async with await open_sandbox(url, limits=limits) as sandbox:
            await work(sandbox)

    asyncio.run(opened())


# ---- the server


def test_programs_by_the_contract(url: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/ping") as answer:
        assert json.load(answer) == "pong"
    given = {"a/b": base64.b64encode(b"in a file").decode(), "left out": None}
    body = {
        "code": "print(input(), open('a/b').read())",
        "language": "python",
        "stdin": "read",
        "files": given,
    }
    status, answer = post(f"{url}/run_code", body)
    ran = answer["run_result"]
    assert ran.pop("execution_time") > 0
    assert (status, answer) == (
        200,
        {
            "status": "Success",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": "Finished",
                "return_code": 0,
                "stdout": "read in a file\n",
                "stderr": "",
            },
            "executor_pod_name": None,
            "files": {},
        },
    )
    _, answer = post(f"{url}/run_code", {"code": "echo said; exit 3", "language": "bash"})
    assert (answer["status"], answer["message"]) == ("Failed", "")
    assert (answer["run_result"]["return_code"], answer["run_result"]["stdout"]) == (3, "said\n")
    _, answer = post(
        f"{url}/run_code", {"code": "while True: pass", "language": "python", "run_timeout": 0.3}
    )
    assert (answer["status"], answer["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert answer["run_result"]["return_code"] is None
    _, answer = post(f"{url}/run_code", {"code": "x", "language": "cpp"})
    assert (answer["status"], answer["run_result"]) == ("SandboxError", None)
    assert "runs python, bash" in answer["message"]


def test_cells_by_the_contract(url: str) -> None:
    cells = ["x = 41", "print('said')\nx + 1", "1 / 0", "open('f').read()"]
    files = {"f": base64.b64encode(b"data").decode()}
    _, answer = post(f"{url}/run_jupyter", {"cells": cells, "files": files})
    driver = answer.pop("driver")
    assert driver.pop("execution_time") > 0
    assert driver == {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""}
    said = answer.pop("cells")
    assert answer == {"status": "Success", "message": "", "executor_pod_name": None, "files": {}}
    assert [cell["stdout"] for cell in said] == ["", "said\n42\n", "", "'data'\n"]
    assert [set(cell) for cell in said] == [{"stdout", "stderr", "display", "error"}] * 4
    (error,) = said[2]["error"]
    assert error == {"ename": "ZeroDivisionError", "evalue": "division by zero", "traceback": []}
    slow = {"cells": ["x = 1", "import time; time.sleep(60)", "x"], "cell_timeout": 0.3}
    _, answer = post(f"{url}/run_jupyter", slow)
    assert (answer["status"], answer["driver"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert len(answer["cells"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 422, "json_invalid"),
        ({"language": "python"}, 422, '"code"'),
        ({"code": "x", "language": "python", "run_timeout": 0}, 422, "run_timeout"),
        ({"code": "x", "language": "python", "memory_limit_MB": 1 << 40}, 422, "memory_limit_MB"),
        ({"code": "x", "language": "python", "files": {"../x": ""}}, 422, "leads out of its folder"),
        ({"code": "x", "language": "python", "files": {"x": "no base64!"}}, 422, "not base64"),
        ({"code": "x", "language": "l" * 65}, 422, "language"),
        ({"code": "x", "language": "python", "fetch_files": ["x"]}, 422, "gives no files back"),
        (b" " * (BODY_BYTES + 1), 413, "exceeded"),
    ],
)
def test_bodies_that_are_not_the_apis(url: str, body: Any, status: int, said: str) -> None:
    got, text = post(f"{url}/run_code", body)
    assert (got, said in text, len(text) <= 4000) == (status, True, True)


def test_what_a_client_sent_is_not_sent_back_whole(url: str) -> None:
    """A name of 100,000 characters, and 10,000 faults."""
    for files in ({"a" * 100_000: 1}, {f"a{number}": 1 for number in range(10_000)}):
        status, text = post(f"{url}/run_code", {"code": "x", "language": "python", "files": files})
        assert (status, len(text)) == (422, 4000)


def test_keys(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"code": "print(1)", "language": "python"}
    assert [post(f"{url}/run_code", body, token)[0] for token in (None, "another", TOKEN)] == [401, 401, 200]
    monkeypatch.delenv(SANDBOX_KEY)
    with pytest.raises(SandboxError, match="answered 401"):
        asyncio.run(open_sandbox(url))


def test_no_more_at_a_time_than_it_may(url: str) -> None:
    """Three requests to a server for one program at a time."""

    async def both() -> list[int]:
        async with await open_sandbox(at_once=1) as sandbox:
            server = SandboxServer(sandbox, Access((TOKEN,)))
            address = await server.start("127.0.0.1", 0)
            body = {"code": "sleep 0.2", "language": "bash"}
            asked = [
                asyncio.create_task(asyncio.to_thread(post, f"{address}/run_code", body)) for _ in range(3)
            ]
            most = []
            while not all(task.done() for task in asked):
                most.append(len(sandbox._heads))
                await asyncio.sleep(0.01)
            await server.close()
            assert [task.result()[0] for task in asked] == [200] * 3
            return most

    assert max(asyncio.run(both())) == 1


# ---- the client, on our server


def test_what_comes_of_programs(url: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        assert sandbox.backend.name == url
        result = await sandbox.run("print(int(input()) + 1)", stdin="41")
        assert (result.status, result.stdout, result.return_code) == ("finished", "42\n", 0)
        result = await sandbox.run(["sh", "-c", 'cat "$0"; exit 3', "a b"], files={"a b": b"data"})
        assert (result.status, result.stdout, result.return_code) == ("error", "data", 3)
        async with sandbox.warm(Limits(seconds=0.5, memory_mb=256)) as warm:
            programs = ("while True: pass", "bytearray(1 << 30)", "print('x' * 2_000_000)", "1 / 0")
            statuses = [(await warm.run(program)).status for program in programs]
        assert statuses == ["time_limit", "memory_limit", "error", "error"]

    within(url, work)


def test_a_session_is_its_cells_sent_anew(url: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            cells = [
                ("x = 41", "finished", ""),
                ("print('a')\nx = x + 1", "finished", "a\n"),
                ("x", "finished", "42\n"),
                ("x = 0\nimport time; time.sleep(60)", "time_limit", ""),
                ("x = 0\nimport os; os._exit(0)", "error", ""),
                ("y = 1\n1 / 0", "error", ""),
                ("x + y", "finished", "43\n"),
            ]
            for cell, status, stdout in cells:
                result = await session.run(cell, seconds=0.5 if "sleep" in cell else 20.0)
                assert (cell, result.status, result.stdout) == (cell, status, stdout)
                if "1 / 0" in cell:
                    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")

    within(url, work)


def test_the_tool_and_the_reward(url: str) -> None:
    async def used() -> tuple[list[str], dict[str, float]]:
        tools = Toolbox(load_tools([ToolConfig("python", options={"backend": url})]), TOKENIZER)
        said = [await tools.call("python", {"code": text}) for text in ("x = 6", "x * 7")]
        await tools.close()
        text = "```python\ndef square(x): return x * x\n```"
        trajectory = make_trajectory(text, cases=["assert square(2) == 4", "assert square(2) == 5"])
        return said, await code(trajectory.prompt, trajectory, backend=url)

    said, scores = asyncio.run(used())
    assert said == ["", "42\n"]
    assert (scores["reward"], scores["wrong_answer"]) == (0.5, 1.0)


def test_whoever_does_not_wait_ends_what_runs(url: str) -> None:
    mark = f"rondo-test-{os.urandom(6).hex()}"

    async def work(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.run(["sh", "-c", f"while :; do sleep 1; done; : {mark}"]))
        while not processes_named(mark):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.to_thread(wait_for, "the end of the program", lambda: not processes_named(mark))

    within(url, work, Limits(seconds=600))


# ---- the client, on what is another's


@asynccontextmanager
async def answering(answer: Callable[[str, Any], bytes]) -> AsyncIterator[str]:
    """A server that answers so, by path and body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        found = re.search(r"Content-Length: (\d+)", head)
        body = await reader.readexactly(int(found[1])) if found else b"null"
        writer.write(answer(head.split()[1], json.loads(body)))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def said(answer: Any, status: int = 200) -> bytes:
    data = json.dumps(answer).encode()
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


RAN = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "42\n", "stderr": ""}
SUCCESS = {"status": "Success", "message": "", "compile_result": None, "run_result": RAN, "files": {}}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (said({"status": "SandboxError", "message": "no disk", "run_result": None}), "no disk"),
        (said("busy", 503), "answered 503"),
        (said("pong"), "no answer of SandboxFusion's API"),
        (said({**SUCCESS, "run_result": None}), "no answer of SandboxFusion's API"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nx", "IncompleteRead"),
        (b"no HTTP\r\n\r\n", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_what_is_no_programs_doing_is_infrastructure(answer: bytes, why: str) -> None:
    async def asked() -> None:
        async with answering(
            lambda path, body: said(SUCCESS) if "import os" in body["code"] else answer
        ) as url:
            sandbox = await open_sandbox(f"{url}/run_code")  # as verl writes it
            with pytest.raises(SandboxError, match=why):
                await sandbox.run("print(42)")

    asyncio.run(asked())


def test_cells_of_a_jupyter_kernel() -> None:
    """Values in `display`, tracebacks in `error`, with colours: as SandboxFusion's own server answers."""
    asked: list[list[str]] = []

    def answer(path: str, body: Any) -> bytes:
        if path == "/run_code":
            return said(SUCCESS)
        asked.append(body["cells"])
        cell = {"stdout": "a\n", "stderr": "", "display": [{"text/plain": "42"}], "error": []}
        if "bad" in body["cells"][-1]:
            raised = {
                "ename": "NameError",
                "evalue": "bad",
                "traceback": ["\x1b[0;31mNameError\x1b[0m", "bad"],
            }
            cell |= {"error": [raised], "display": []}
        return said({"status": "Success", "driver": RAN, "cells": [cell] * len(body["cells"])})

    async def work() -> None:
        async with answering(answer) as url, (await open_sandbox(url)).session() as session:
            good, bad = await session.run("good"), await session.run("bad")
        assert (good.status, good.stdout, good.stderr) == ("finished", "a\n42\n", "")
        assert (bad.status, bad.stdout, bad.stderr) == ("error", "a\n", "NameError\nbad")

    asyncio.run(work())
    assert asked == [["good"], ["good", "bad"]]


def test_addresses() -> None:
    for wrong in ("ftp://x", "http://", "http://user:key@x", "http://x:99999", "http://x?y=1"):
        with pytest.raises(ConfigError) as error:
            asyncio.run(open_sandbox(wrong))
        assert error.value.key == "sandbox.backend"
    with pytest.raises(SandboxError, match="ConnectionRefusedError"):
        asyncio.run(open_sandbox("http://127.0.0.1:1"))

    async def tried() -> None:
        async with answering(lambda path, body: said(SUCCESS)) as url:
            with pytest.raises(SandboxError, match="where it is: rondo sandbox check"):
                await check(await open_sandbox(url))

    asyncio.run(tried())
