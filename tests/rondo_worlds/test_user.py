"""A user to talk to, whom a function or a served model plays."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments import Observation, check_environment
from rondo.environments.registry import load_environments
from rondo_worlds import user as served
from rondo_worlds.frozen_lake import FrozenLake, way_to_goal
from rondo_worlds.observed import Observed
from rondo_worlds.user import User
from tests.messages import full_text

WANTS = {"wants": "a refund", "opening": "My kettle is broken."}


def counts(task: Any, conversation: list[dict[str, str]], seed: int) -> str:
    """Says how often it was answered and what last, and ends the fourth time."""
    answers = [message["content"] for message in conversation if message["role"] == "assistant"]
    return f"{task.get('wants')} {len(answers)} {answers[-1:]} {seed % 7}{' [END]' * (len(answers) > 2)}"


async def counts_later(task: Any, conversation: list[dict[str, str]], seed: int) -> str:
    return counts(task, conversation, seed)


@pytest.mark.parametrize("function", [counts, counts_later])
@pytest.mark.parametrize("task", [None, WANTS])
def test_a_function_plays_the_user(function: Any, task: Any) -> None:
    check_environment(lambda: User(function=function), seeds=range(3), task=task, act=lambda seen, _: "Why?")
    user = User(function=function)
    first = user.reset(0, task)
    assert first == Observation(WANTS["opening"] if task else "None 0 [] 5")
    steps = [user.step(text) for text in ("Oh.", "No.", "Yes.")]
    assert [step.observation.text[:-2] for step in steps][:2] == [
        f"{task and 'a refund'} {number} ['{said}']" for number, said in ((1, "Oh."), (2, "No."))
    ]
    assert [(step.done, step.truncated, step.reward) for step in steps] == [
        (False, False, 0.0),
        (False, False, 0.0),
        (True, False, 0.0),
    ]
    assert [said["role"] for said in user.state()["conversation"]] == ["user", "assistant"] * 3 + ["user"]


def test_a_conversation_has_an_end() -> None:
    user = User(function=counts, max_turns=2)
    user.reset(0)
    assert [user.step("Hm.").truncated for _ in range(2)] == [False, True]


async def says(seen: Observation, state: Any, seed: int) -> str:
    return f"You are at {state['at']}, {seed % 9}."


def test_a_function_tells_what_another_environment_shows() -> None:
    """Which keeps its actions, rewards, ends and anchors."""
    plain, told = FrozenLake(size=3), Observed(of={"name": "frozen_lake", "size": 3}, by=says)
    seen, words = plain.reset(0), told.reset(0)
    assert (words.text, words.actions, words.anchor) == ("You are at [0, 0], 4.", seen.actions, seen.text)
    for move in way_to_goal(tuple(plain.state()["level"]), (0, 0)) or ():
        one, other = plain.step(move), told.step(move)
        assert other.observation.text.startswith(f"You are at {plain.state()['at']}")
        assert other.observation.identity == one.observation.text
        assert (other.reward, other.done, other.success) == (one.reward, one.done, one.success)
    assert one.success
    with pytest.raises(EnvironmentFailedError, match="gave NoneType, no text"):
        Observed(of="bandit", by=lambda seen, state, seed: None).reset(0)
    for of, said in (({"size": 3}, "needs the name"), ({"name": "bandit", "arm": 3}, "did you mean 'arms'")):
        with pytest.raises(ConfigError, match=said):
            Observed.check(of=of, by=says)


def test_who_says_nothing_is_no_user() -> None:
    with pytest.raises(EnvironmentFailedError, match="gave NoneType, no text"):
        User(function=lambda task, conversation, seed: None).reset(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "one of the two"),
        ({"base_url": "http://x/v1"}, "one of the two"),
        ({"base_url": "http://x/v1", "model": "m", "function": counts}, "one of the two"),
        ({"base_url": "x/v1", "model": "m"}, "no http:// or https:// URL"),
        ({"function": counts, "max_turns": 0}, "max_turns >= 1"),
        ({"function": counts, "end": ""}, "an end"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        User(**options)


# ---- whom a key is sent to


@contextmanager
def server(asked: list[tuple[str, str | None]], to: str = "") -> Iterator[str]:
    """A server that notes who asks with which key, and answers with its one model, or sends to another."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.command, self.headers["Authorization"]))
            said = {"data": [{"id": "m"}], "choices": [{"message": {"content": "Hello"}}]}
            body = b"" if to else json.dumps(said).encode()
            self.send_response(302 if to else 200)
            if to:
                self.send_header("Location", to + self.path)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None: ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()


@pytest.mark.parametrize("key", ["sk-mine", ""])
def test_a_key_does_not_go_along_to_another_host(key: str) -> None:
    first: list[tuple[str, str | None]] = []
    second: list[tuple[str, str | None]] = []
    with ExitStack() as stack:
        other = stack.enter_context(server(second)).replace("127.0.0.1", "localhost")
        url = stack.enter_context(server(first, to=other))
        if not key:  # then nothing is at stake
            assert served.models(url) == ["m"]
            assert (first, second) == ([("GET", None)], [("GET", None)])
            return
        told = f"HTTP Error 302: it says to ask {other}/models instead, where no key is sent"
        with pytest.raises(EnvironmentFailedError, match=told):
            served.models(url, key)
        with pytest.raises(EnvironmentFailedError, match="if it is right, name that one"):
            served.say(url, "m", [], seed=0, key=key)
        assert [header for _, header in first] == [f"Bearer {key}"] * 2
        assert second == []


@pytest.mark.parametrize(
    ("base_url", "api_key", "sent"),
    [
        ("https://api.openai.com/v1", "", "sk-openai"),
        ("https://eu.api.openai.com/v1", "", "sk-openai"),
        ("https://api.openai.com/v1", "sk-other", "sk-other"),
        *(
            (url, "", "")
            for url in (
                *(
                    "http://api.openai.com/v1",
                    "https://api.openai.com.evil.example/v1",
                    "http://127.0.0.1:8/v1",
                ),
                *("https://api.openai.com@evil.example/v1", "https://notapi.openai.com/v1"),
            )
        ),
        ("http://127.0.0.1:8/v1", "sk-other", "sk-other"),
    ],
)
def test_whose_key_is_sent(base_url: str, api_key: str, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    assert User(base_url=base_url, model="m", api_key=api_key)._key == sent


def test_the_key_of_a_recipe_is_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    asked: list[tuple[str, str | None]] = []
    with server(asked) as url:
        options = {"base_url": url, "model": "m", "api_key": {"env": "JUDGE_KEY"}}
        (choice,) = load_environments([EnvironmentConfig("user", options=options)])
        assert choice.check is not None
        choice.check()
        assert choice.make().reset(0, None).text == "Hello"
    assert asked == [("GET", "Bearer sk-judge"), ("POST", "Bearer sk-judge")]
    older = {"base_url": "http://x/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
    with pytest.raises(ConfigError, match=full_text("rollout.environments.0: api_key_env")):
        load_environments([EnvironmentConfig("user", options=older)])


def test_a_key_over_http_is_said_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rondo_worlds.user.models", lambda url, key: ["m"])
    with caplog.at_level(logging.WARNING):
        for url in ("http://judge:8000/v1", "https://judge/v1", "http://localhost:8000/v1"):
            User.check(base_url=url, model="m", api_key="sk-mine")
        User.check(base_url="http://judge:8000/v1", model="m")
    assert [record.getMessage() for record in caplog.records] == [
        "rollout.environments: user: http://judge:8000/v1: the key goes there unencrypted, as all that is "
        "said: use https://"
    ]
