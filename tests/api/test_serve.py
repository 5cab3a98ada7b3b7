"""`rondo.serve`: a server in the background, which answers as the model does, and ends with what it began."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest
import yaml

import rondo
from rondo.core.errors import ConfigError, RolloutError, WeightSyncError
from rondo.rollout import members
from rondo.rollout.native import choose, generic
from rondo.system.pool import Supervision
from rondo.system.signals import ask_elsewhere
from rondo.trainers.commands import serve as command
from tests import begun
from tests.cli.test_serve import ASK, folder  # noqa: F401
from tests.messages import full_text
from tests.serving.test_templates import TWO_ENDS_TEMPLATE
from tests.trainers.conftest import PYTHONPATH
from tests.waiting import engine_processes, wait_for, wait_until_gone

SETTINGS = {"cluster.threads": 1, "rollout.engine.decode": "lean"}
OWN = {**SETTINGS, "rollout.engine.process": "own"}


def test_an_engine_that_computes_another_model_is_found_before_it_answers(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its weights are right. Attention of half the size stands for a family that the engine gets wrong."""
    attend = generic.grouped_attention
    monkeypatch.setattr(generic, "grouped_attention", lambda *given: attend(*given) / 2)
    differs = r"version 0: the log-probs of engine 0 of rollout\[0\] differ .* or computes another model"
    with pytest.raises(WeightSyncError, match=differs):
        rondo.serve(folder, check=True, config={**SETTINGS, "rollout.engine.decode": "generic"})
    for path in ("compiled", "lean"):
        monkeypatch.setattr(choose, f"why_not_{path}", lambda *_: "another path is tried")
    with pytest.raises(WeightSyncError, match=differs):
        rondo.generate(folder, ASK[0]["content"], max_tokens=6)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:  # noqa: F811
    (row,) = rondo.generate(folder, ASK[0]["content"], temperature=0.0, max_tokens=6)
    return list(row["token_ids"])


def answer(server: rondo.Server, **options: Any) -> list[int]:
    with openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0) as client:
        body = {"model": server.model, "messages": ASK, "temperature": 0, "max_tokens": 6, **options}
        body["extra_body"] = {"return_token_ids": True}
        return client.chat.completions.create(**body).choices[0].token_ids  # type: ignore[no-any-return]


def is_open(server: rondo.Server) -> bool:
    address = urlsplit(server.base_url)
    with socket.socket() as client:
        return client.connect_ex((address.hostname, address.port)) == 0


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("rondo-")}


def engines(but: list[int] = []) -> list[int]:
    """but: those of other tests, which end later."""
    return [one.pid for one in engine_processes(but=but)]


def test_it_answers_as_generate_does_and_ends_with_the_block(folder: Path, expected: list[int]) -> None:  # noqa: F811
    before = threads()
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with rondo.serve(folder, check=True, config=SETTINGS) as server:
        assert (server.model, server.base_url[:17]) == ("tiny", "http://127.0.0.1:")
        assert server.engine.startswith("native rollout engine: lean path")
        assert answer(server) == expected
        with openai.OpenAI(base_url=server.base_url, api_key="guess", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                client.models.list()
        assert refused.value.status_code == 401
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert not ask_elsewhere()  # Ctrl-C in a run beside it is not for the server
    assert not is_open(server)
    wait_for("the end of its threads", lambda: threads() <= before)
    server.close()
    server.wait()


def test_a_key_a_name_a_port_and_a_context_of_ones_own(folder: Path) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .* another port"):
            rondo.serve(folder, port=port, config=SETTINGS)
    asked: dict[str, Any] = {"port": port, "api_key": "mine", "name": "it", "max_context": 100}
    with rondo.serve(folder, config=SETTINGS, **asked) as server:
        assert (server.base_url, server.api_key) == (f"http://127.0.0.1:{port}/v1", "mine")
        with openai.OpenAI(base_url=server.base_url, api_key="mine") as client:
            (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("it", 100)  # type: ignore[attr-defined]


def test_it_says_where_conversations_cannot_go_on(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = tmp_path / "two_ends.jinja"
    template.write_text(TWO_ENDS_TEMPLATE)
    with rondo.serve(folder, config={**SETTINGS, "model.chat_template": str(template)}):
        notes = [line for line in caplog.messages if line.startswith("chat template: ")]
    assert [line.partition(" is ")[0] for line in notes] == [
        "chat template: what goes on behind an answer in text",
        "chat template: what goes on behind an answer that calls tools",
    ]


def test_two_at_once_inside_a_running_loop(folder: Path, expected: list[int]) -> None:  # noqa: F811
    async def main() -> list[list[int]]:
        with rondo.serve(folder, config=SETTINGS) as one, rondo.serve(folder, config=SETTINGS) as other:
            assert one.base_url != other.base_url
            assert one.api_key != other.api_key
            return await asyncio.gather(asyncio.to_thread(answer, one), asyncio.to_thread(answer, other))

    assert asyncio.run(main()) == [expected, expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, full_text("host='0.0.0.0' can be reached from other")),
        ({"api_key": "two words"}, "^api_key must be printable ASCII"),
        ({"api_key": ""}, "^api_key must be printable ASCII"),
        ({"max_context": 1}, "^max_context=1 leaves no room"),
        ({"max_context": 257}, full_text("max_context=257 is asked")),
        ({"port": 99999}, "choose another port"),
        ({"replicas": 0}, r"^setting rollout\.replicas=0: "),
        ({"rollout.nn": 1}, r"unknown key 'rollout\.nn'; did you mean"),
        ({"rollout.sleep": True}, full_text("setting rollout.sleep=True")),
        ({"trainer.max_staleness": 2}, full_text("trainer.max_staleness has no meaning")),
    ],
)
def test_what_it_refuses_is_said_in_pythons_words(
    folder: Path,  # noqa: F811
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        rondo.serve(folder, **{**SETTINGS, **options})
    assert "--" not in str(caught.value)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=full_text("setting model.path='nowhere': model.path")):
        rondo.serve("nowhere")
    with pytest.raises(ConfigError, match=full_text("nothing says where the model comes")):
        rondo.serve()


def test_ctrl_c_before_it_is_ready_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    before, load = threads(), command._load

    def interrupted(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        load(*given)

    monkeypatch.setattr(command, "_load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rondo.serve(folder, config=SETTINGS)
    wait_for("the end of its threads", lambda: threads() <= before)


def test_a_recipe_says_what_is_not_given(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    expected: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = tmp_path / "mine.yaml"
    rollout = {"max_tokens": 4, "temperature": 0.5, "n": 3}
    sections = {"model": {"path": str(folder)}, "data": {"max_prompt_tokens": 64}, "rollout": rollout}
    recipe.write_text(yaml.safe_dump(sections, sort_keys=False))
    with rondo.serve(recipe=recipe, config=SETTINGS) as server:
        assert answer(server, max_tokens=None) == expected[:4]
    assert [record.message.partition(" has no meaning")[0] for record in caplog.records] == [
        f"{recipe}:8: rollout.n"
    ]


@pytest.mark.slow
def test_an_engine_that_dies_is_started_again(folder: Path, expected: list[int]) -> None:  # noqa: F811
    others = engines()
    with rondo.serve(folder, replicas=2, config=SETTINGS) as server:
        first = engines(others)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        assert answer(server) == expected
        started = {*first, *engines(others)}
    wait_until_gone(started)


@pytest.mark.slow
def test_an_engine_that_died_for_good_is_not_silent(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(members, "ENGINES", Supervision(restarts=0, deaths=2))
    others = engines()
    server = rondo.serve(folder, config=OWN)
    (engine,) = engines(others)
    os.kill(engine, signal.SIGKILL)
    for say in (server.wait, server.close, server.close):
        with pytest.raises(RolloutError, match=r"no replica left \(0: .*SIGKILL"):
            say()
    assert not is_open(server)
    assert f"the server at {server.base_url} has ended: no replica left" in caplog.text
    assert repr(server) == f"Server({server.base_url!r}, model='tiny', ended)"


def script(folder: Path, body: str) -> begun.Program:  # noqa: F811
    code = f"import rondo\nserver = rondo.serve({str(folder)!r}, config={OWN})\n"
    code += "print(server.base_url, flush=True)\n"
    return begun.Program(
        ["-c", code + body],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Says when its main thread waits: a Ctrl-C that comes before that is none of the server's.
WAITING = """
import sys, threading, time
def tell(main=threading.main_thread().ident):
    while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
        time.sleep(0.01)
    print("waits", flush=True)
threading.Thread(target=tell).start()
server.wait()
print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["with Python", "with Ctrl-C"])
def test_a_script_that_ends_leaves_nothing(folder: Path, ends: str) -> None:  # noqa: F811
    """One that closes nothing and has children of its own, whose end is not the server's; one that waits."""
    fork = "import multiprocessing\nchild = multiprocessing.get_context('fork').Process(target=print)\n"
    fork += "child.start(); child.join()\nimport urllib.request\n"
    fork += "print(urllib.request.urlopen(server.base_url[:-2] + 'health').read())\n"
    with script(folder, fork if ends == "with Python" else WAITING) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if ends == "with Ctrl-C":
            assert process.stdout.readline() == "waits\n"
        started = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
        if ends == "with Ctrl-C":
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.split("\n")[-2] == ('b\'{"status": "ok"}\'' if ends == "with Python" else "ended")
    wait_until_gone(started)
