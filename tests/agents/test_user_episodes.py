"""Training with a user whom another model plays, behind a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import rondo
from rondo.core.errors import ConfigError, EnvironmentFailedError, TrainError
from rondo_worlds import user as served
from rondo_worlds.observed import Observed
from rondo_worlds.user import User
from tests.agents.test_updates import rows_of
from tests.trainers.conftest import RECIPE, metrics
from tests.trainers.test_journal import assert_equal


@pytest.fixture(scope="module")
def server() -> Iterator[rondo.Server]:
    """A tiny model of random weights, with room for what is said."""
    config = {**RECIPE["model"]["config"], "max_position_embeddings": 1024}
    settings = {"model.config": config, "model.tokenizer": RECIPE["model"]["tokenizer"], "cluster.threads": 1}
    with rondo.serve(name="tiny", config=settings) as made:
        yield made


def talks_to(server: rondo.Server, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[str, ...]:
    monkeypatch.setenv("OF_THE_USER_KEY", server.api_key)
    options = "max_turns: 2, max_tokens: 8, temperature: 1.0, api_key: {env: OF_THE_USER_KEY}"
    rows = "options: {environment: user, size: 8, task: {wants: tea}}"
    return (
        f"data.train=[{{type: function, task: rondo.environments.episodes, {rows}}}]",
        f"rollout.environments=[{{name: user, base_url: '{server.base_url}', model: tiny, {options}}}]",
        "rollout.agent={name: concatenated, action: whole}",
        "reward.functions=[tests/trainers/scorers.py:even_share]",
        "trainer.evaluation={before: false, after: false, every: null}",
        "rollout.max_tokens=100",
        *more,
    )


def test_a_served_model_is_asked_as_a_user(server: rondo.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the conversation from its side, and says the same again for the same seed."""
    monkeypatch.setenv("OPENAI_API_KEY", server.api_key)  # for OpenAI alone
    there: dict[str, Any] = {"base_url": server.base_url, "model": "tiny", "api_key": server.api_key}
    sent: list[Any] = []
    original = served.ask

    def noting(*asked: Any) -> Any:
        sent.append(asked[-1])
        return original(*asked)

    monkeypatch.setattr(served, "ask", noting)
    said = []
    for _ in range(2):
        user = User(**there, max_tokens=6, temperature=1.0)
        first = user.reset(3, {"wants": "tea"})
        said.append([first.text, user.step("Why?").observation.text])
    assert said[0] == said[1]
    assert said[0][0] != said[0][1]
    assert sent[0]["seed"] == sent[2]["seed"] != sent[1]["seed"]
    persona, begin, *conversation = sent[1]["messages"]
    assert "What you want: tea" in persona["content"]
    assert (persona["role"], begin["role"]) == ("system", "user")
    assert conversation == [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Why?"},
    ]
    User.check(**there)
    with pytest.raises(ConfigError, match="has no model 'other', but tiny"):
        User.check(**{**there, "model": "other"})
    with pytest.raises(ConfigError, match="cannot be asked for its models"):
        User.check(**{**there, "base_url": "http://127.0.0.1:9/v1"})
    for key in ("guess", ""):
        with pytest.raises(EnvironmentFailedError, match="HTTP Error 401"):
            User(**{**there, "api_key": key}).reset(0)


def test_a_served_model_tells_what_there_is_to_see(server: rondo.Server) -> None:
    """And who asks it is told the same for the same seed."""

    def tells(seen: Any, state: Any, seed: int) -> str:
        messages = [{"role": "user", "content": f"Tell: {seen.text}"}]
        sampling = {"max_tokens": 6, "temperature": 1.0}
        return served.say(server.base_url, "tiny", messages, seed=seed, key=server.api_key, **sampling)

    told = []
    for _ in range(2):
        world = Observed(of={"name": "frozen_lake", "size": 2}, by=tells)
        told.append([world.reset(4).text, world.step("right").observation.text])
    assert told[0] == told[1]
    assert told[0][0] != told[0][1]
    with pytest.raises(EnvironmentFailedError, match="HTTP Error 401"):
        served.models(server.base_url, "guess")


@pytest.mark.slow
def test_a_run_with_it_is_replayed(run: Any, server: rondo.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits, where the user says the same again; where it does not, the run says so."""
    settings = talks_to(server, monkeypatch, "trainer.max_staleness=1", "trainer.on_update=resume")
    first = run("first", *settings)
    rows = rows_of(first)
    assert {row["outcome"] for row in rows} == {"scored"}
    assert any(row["turn_kinds"] == [0, 2, 0] for row in rows)
    assert all(line.get("environment/truncated_share/user", 1) == 1 for line in metrics(first))
    assert_equal(first, run("again", *settings, f"trainer.replay={first}"))
    speak = User._speak
    monkeypatch.setattr(User, "_speak", lambda self: f"{speak(self)}?")
    with pytest.raises(TrainError, match="left the journal"):
        run("other", *settings, f"trainer.replay={first}")


@pytest.mark.slow
def test_a_user_who_is_not_there_is_no_reward_of_0(
    run: Any, server: rondo.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, and trained on by nobody."""
    original = User._served

    def at_times(self: User, seed: int) -> str:
        if self._said and self._seed % 4 == 0:  # half of the rows
            self._base_url = "http://127.0.0.1:9/v1"
        return original(self, seed)

    monkeypatch.setattr(User, "_served", at_times)
    folder = run("down", *talks_to(server, monkeypatch, "reward.max_dropped_share=1.0"))
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    failed = [one for line in journal for one in line.get("trajectories", ()) if one["failure"]]
    assert all(one["reward"] is None and "does not answer" in one["failure"] for one in failed)
    lines = metrics(folder)
    assert len(failed) == sum(line["environment/failures/user"] for line in lines) > 0
    assert {row["outcome"] for row in rows_of(folder)} == {"scored"}
