"""A recipe names a secret, and does not contain it: the doors where options go in × the ways to write one."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rondo.agents.external import load_agent
from rondo.agents.mcp_servers import McpServer
from rondo.agents.tools import end_tools, load_tools
from rondo.algorithms.registry import bind
from rondo.api.run import _write_recipe
from rondo.config import Config, SourceConfig, changes, leaves_of, load, show, to_yaml
from rondo.config.functions import NEVER_HANDED_OVER, called_with
from rondo.config.schema import (
    EnvironmentConfig,
    FunctionConfig,
    RewardConfig,
    RewardFunctionConfig,
    ToolConfig,
)
from rondo.config.schema.data import FileSourceConfig, HuggingfaceSourceConfig, TaskSourceConfig
from rondo.core.errors import ConfigError, DataError
from rondo.core.masking import digest
from rondo.data.sources import open_sources, source_name
from rondo.environments import Observation, StepResult
from rondo.environments.registry import load_environments
from rondo.rewards.functions import load_functions
from rondo.system.access import SANDBOX_KEY
from rondo.system.storage import AppendedFile, write_atomic
from rondo.system.urls import Far, place_of, spelled
from rondo.tracking.run_folder import RunFolder
from rondo.tracking.trackers import TrackerContext, make_trackers
from rondo.trainers.commands.export import export_checkpoint
from rondo_sandbox.remote import server
from rondo_search.tool import RetrieverError
from tests.messages import full_text

HERE = "tests/test_secrets.py"


def judge(prompt: Any, trajectory: Any, *, api_key: str = "", url: str = "", size: int = 0) -> float:
    return 0.0


def ask(question: str, *, api_key: str = "") -> str:
    """Asks.

    question: what
    """
    return api_key


async def solve(messages: Any, policy: Any, *, api_key: str = "") -> None: ...


def rows(*, api_key: str = "") -> list[dict[str, str]]:
    return [{"prompt": api_key}]


def advantage(rewards: Any, *, api_key: str = "") -> Any: ...


class World:
    def __init__(self, *, api_key: str = "") -> None:
        self.api_key = api_key

    def reset(self, seed: int, task: Any = None) -> Observation:
        raise NotImplementedError

    def step(self, action: str) -> StepResult:
        raise NotImplementedError

    def state(self) -> Any: ...

    def close(self) -> None: ...


class Tracker:
    made: ClassVar[list[str]] = []

    def __init__(self, context: TrackerContext, *, api_key: str = "") -> None:
        self.made.append(api_key)

    def finish(self, status: str) -> None: ...


def reward_key(options: dict[str, Any], folder: Path) -> Any:
    (found,) = load_functions([RewardFunctionConfig(f"{HERE}:judge", options=options)])
    return found.options["api_key"]


def tool_key(options: dict[str, Any], folder: Path) -> Any:
    tools = load_tools([ToolConfig(f"{HERE}:ask", options=options)])
    try:
        return tools[0].make()(question="?")
    finally:
        end_tools(tools)


def agent_key(options: dict[str, Any], folder: Path) -> Any:
    return load_agent(FunctionConfig(f"{HERE}:solve", options)).keywords["api_key"]  # type: ignore[attr-defined]


def environment_key(options: dict[str, Any], folder: Path) -> Any:
    (choice,) = load_environments([EnvironmentConfig(f"{HERE}:World", options=options)])
    return choice.make().api_key  # type: ignore[attr-defined]


def tracker_key(options: dict[str, Any], folder: Path) -> Any:
    with RunFolder(folder / "run") as run:
        make_trackers([FunctionConfig(f"{HERE}:Tracker", options)], TrackerContext(run, "", "", {}, print))
    return _known(f"{HERE}:Tracker").made[-1]


def data_key(options: dict[str, Any], folder: Path) -> Any:
    source: SourceConfig = TaskSourceConfig(type="function", task=f"{HERE}:rows", options=options)
    return open_sources([source])[0].rows[0]["prompt"]


def algorithm_key(options: dict[str, Any], folder: Path) -> Any:
    return bind("advantage", FunctionConfig(f"{HERE}:advantage", options)).keywords["api_key"]


def _known(name: str) -> Any:
    from rondo.config.functions import resolve_function

    return resolve_function(name)


DOORS = [reward_key, tool_key, agent_key, environment_key, tracker_key, data_key, algorithm_key]
KEPT = digest("sk-written")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("written", "opened", "said"),
    [
        ("sk-written", "sk-written", None),
        ({"env": "JUDGE_KEY"}, "sk-judge", None),
        ({"env": "NO_SUCH_KEY"}, None, full_text("variable NO_SUCH_KEY is not set")),
        ({"env": "HOME"}, None, full_text("_TOKEN, _PASSWORD or _SECRET")),
        ({"env": "judge_key"}, None, full_text("_TOKEN, _PASSWORD or _SECRET")),
        ({"env": "sk-written"}, None, full_text("api_key: {env: …}: only variables")),
        ({"env": "HF_TOKEN"}, None, full_text("HF_TOKEN opens what is yours elsewhere")),
        ({"env": "AWS_SECRET_ACCESS_KEY"}, None, "is never handed over"),
        (KEPT, None, f"api_key is {KEPT}, which stands for a secret"),
    ],
)
def test_every_door(
    door: Callable[[dict[str, Any], Path], Any],
    written: Any,
    opened: str | None,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "judge_key"):
        monkeypatch.setenv(name, "sk-mine")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    if said is None:
        assert door({"api_key": written}, tmp_path) == opened
        return
    with pytest.raises((ConfigError, DataError), match=said) as caught:
        door({"api_key": written}, tmp_path)
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": {"env": "JUDGE_KEY"}}, full_text("0.url: {env: JUDGE_KEY}: only options")),
        ({"api_key_env": "JUDGE_KEY"}, full_text("reward.functions.0: api_key_env: NAME")),
        ({"api_key": 3}, full_text("option 'api_key' of judge must be str")),
        ({"size": {"env": "HALF"}}, full_text("option 'size' of judge must be int, got")),
    ],
)
def test_what_is_written_where_it_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_functions([RewardFunctionConfig(f"{HERE}:judge", options=options)])


def test_a_secret_of_a_wrong_type_is_not_said() -> None:
    def counted(*, token: int = 0) -> None: ...

    from rondo.config.functions import check_options

    for written in ("sk-1", {"env": "JUDGE_KEY"}):
        with pytest.raises(ConfigError, match=full_text("option 'token' of counted must be int")) as caught:
            check_options(counted, {"token": written}, "x")
        assert "sk-1" not in str(caught.value)


def test_below_an_option_and_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    options = {
        "of": {"name": "user", "api_key": {"env": "JUDGE_KEY"}},
        "make": {"env": "CartPole-v1"},
        "n": [1],
    }
    assert called_with(options, "x") == {**options, "of": {"name": "user", "api_key": "sk-judge"}}
    with pytest.raises(ConfigError, match=full_text("@h, which stands for a secret")):
        called_with({"url": f"http://{digest('u:p')}@h"}, "x")
    with pytest.raises(ConfigError, match="name the URL anew"):
        Far(f"https://h/x?{digest('k=v')}")
    assert {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AZURE_CLIENT_SECRET"} < set(NEVER_HANDED_OVER)


# ---- what is kept and shown

SECRETS = (
    "reward.functions=[{name: f.py:judge, api_key: sk-1, url: 'http://u:sk-2@h/x?k=sk-3'}, "
    "{name: f.py:judge, api_key: {env: JUDGE_KEY}, max_tokens: 3}]",
    "tracking.trackers=[{name: t.py:T, token: sk-4}]",
    "rollout.tools=[{name: t.py:tool, deep: {password: sk-5}}]",
    "data.train=[{type: jsonl, path: 'https://u:sk-6@h/rows.jsonl'}]",
    "data.eval=[{type: function, task: d.py:rows, options: {secret: sk-7}}]",
    "cluster={backend: process, env: {WANDB_API_KEY: sk-8, NCCL_DEBUG: INFO}}",
)


def test_a_configuration_is_kept_and_shown_without_its_secrets(tmp_path: Path) -> None:
    loaded = load(["quickstart"], SECRETS)
    texts = (
        to_yaml(loaded.config),
        show(loaded.config, loaded.origins),
        repr(leaves_of(loaded.config)),
        "\n".join(loaded.notes),
    )
    assert not any("sk-" in text for text in texts)
    leaves = leaves_of(loaded.config)
    assert leaves["reward.functions.0.api_key"] == digest("sk-1")
    assert leaves["reward.functions.0.url"] == f"http://{digest('u:sk-2')}@h/x?{digest('k=sk-3')}"
    assert leaves["reward.functions.1.api_key.env"] == "JUDGE_KEY"
    assert leaves["reward.functions.1.max_tokens"] == 3
    assert (leaves["cluster.env.WANDB_API_KEY"], leaves["cluster.env.NCCL_DEBUG"]) == (digest("sk-8"), "INFO")
    # Whoever uses it has it as it was written.
    assert loaded.config.reward.functions[0].options["api_key"] == "sk-1"
    assert loaded.config.cluster.env["WANDB_API_KEY"] == "sk-8"

    kept = tmp_path / "config.yaml"
    kept.write_text(to_yaml(loaded.config))
    again = load([str(kept)])
    assert leaves_of(again.config) == leaves
    assert again.notes == ()


def test_a_secret_in_a_recipe_is_noted_once_with_its_place(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "include: quickstart.yaml\nreward:\n  functions:\n  - name: f.py:judge\n    api_key: sk-1\n"
    )
    loaded = load([str(recipe)], ["data.train=[{type: jsonl, path: 'https://h/x.jsonl?sig=sk-2'}]"])
    data, reward = loaded.notes
    assert reward.startswith(f"{recipe}:5: reward.functions.0.api_key holds a secret: ")
    assert reward.endswith("; write api_key: {env: NAME_OF_A_VARIABLE}")
    assert data.startswith(
        "argument 'data.train=[{type: jsonl, path: 'https://h/x.jsonl?***'}]': data.train.0.path "
    )
    assert data.endswith("; name a variable there, or a URL without user and query")
    assert load([str(recipe)], ["reward.functions.0.api_key={env: JUDGE_KEY}"]).notes == ()
    with pytest.raises(ConfigError, match=full_text("'reward.functions.0.weight.token=***'")) as caught:
        load([str(recipe)], ["reward.functions.0.weight.token=sk-3"])
    assert "sk-" not in str(caught.value)
    with pytest.raises(ConfigError, match=full_text("and cluster.backend.name = local")) as caught:
        load([str(recipe)], ["cluster.env={WANDB_API_KEY: sk-3}"])
    assert "sk-" not in str(caught.value)
    with pytest.raises(ConfigError, match="setting ") as caught:
        load([str(recipe)], settings={"reward.functions.0": {"weight": "x", "api_key": "sk-3"}})
    assert "sk-" not in str(caught.value)


def test_settings_are_compared_by_digests() -> None:
    def leaves(**options: Any) -> dict[str, Any]:
        functions = (RewardFunctionConfig(f"{HERE}:judge", options=options),)
        return leaves_of(dataclasses.replace(Config(), reward=RewardConfig(functions=functions)))

    one, other = leaves(api_key="sk-1"), leaves(api_key="sk-2")
    assert changes(one, leaves(api_key="sk-1"), "before") == []
    assert changes(one, other, "before") == [
        f'reward.functions.0.api_key: "{digest("sk-1")}" before, "{digest("sk-2")}" now'
    ]
    named = leaves(api_key={"env": "JUDGE_KEY"})
    assert changes(named, leaves(api_key={"env": "OTHER_KEY"}), "before") == [
        'reward.functions.0.api_key.env: "JUDGE_KEY" before, "OTHER_KEY" now'
    ]
    assert "sk-" not in "".join(changes(named, leaves(api_key={"env": "sk-1"}), "before"))
    # What an older rondo has written, with its secrets.
    older = {**one, "reward.functions.0.api_key": "sk-1"}
    assert changes(older, one, "before") == []
    assert "sk-" not in "".join([*changes(older, other, "before"), *changes(older, leaves(), "before")])


def speaks_of_mcp(url: str) -> str:
    pytest.importorskip("mcp")
    return str(McpServer("rollout.tools.0", url=url))


@pytest.mark.slow
def test_a_server_of_tools_gets_no_credentials_of_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    for name in ("HF_TOKEN", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "sk-mine")
        with pytest.raises(ConfigError, match=f"^x: env: {name} opens what is yours elsewhere"):
            McpServer("x", command="cat", env=["HOME", name])


def test_an_export_wants_a_place_that_was_kept_whole(tmp_path: Path) -> None:
    tokenizer = "model.tokenizer=rondo.recipes.quickstart.tokenizer"
    model = ("model.config={model_type: qwen3}", "trainer.warm_start=null", tokenizer)
    loaded = load(["quickstart"], ["checkpoint.path=https://u:sk-1@h/x", *model])
    (tmp_path / "config.yaml").write_text(to_yaml(loaded.config))
    with pytest.raises(ConfigError, match=full_text("@h/x: a part of this URL stands")):
        export_checkpoint(str(tmp_path), str(tmp_path / "out"))


SPEAKING: list[Callable[[str], str]] = [
    speaks_of_mcp,
    lambda url: str(RetrieverError(f"the retriever {url} does not answer")),
    lambda url: str(Far(url)),
    lambda url: repr(Far(url) / "x"),
    lambda url: source_name(FileSourceConfig(type="jsonl", path=url)),
    lambda url: source_name(HuggingfaceSourceConfig(path=url)),
]


@pytest.mark.parametrize("speaks", SPEAKING)
def test_who_speaks_of_a_url_leaves_out_what_may_be_a_secret(speaks: Callable[[str], str]) -> None:
    said = speaks("https://u:sk-1@h/rows.jsonl?key=sk-2.x")
    assert "rows" in said
    assert "sk-" not in said


def test_a_url_is_used_as_it_is_written(tmp_path: Path) -> None:
    """The text of a place is for people; what opens it has all of it."""
    url = "https://u:sk-1@h/x?key=sk-2"
    assert (Far(url).url, spelled(Far(url)), spelled(tmp_path)) == (url, url, str(tmp_path))
    assert place_of(spelled(Far(url))) == Far(url) == pickle.loads(pickle.dumps(Far(url)))


def test_keys_over_http_are_said_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SANDBOX_KEY, "sk-1")
    with caplog.at_level(logging.WARNING):
        for url in ("http://10.0.0.3:8080", "https://10.0.0.3:8080", "http://127.0.0.1:8080"):
            server(url)
        monkeypatch.delenv(SANDBOX_KEY)
        server("http://10.0.0.3:8080")
    assert [record.getMessage() for record in caplog.records] == [
        "sandbox: http://10.0.0.3:8080: the key goes there unencrypted, as all that is said: use https://"
    ]


def test_files_of_a_configuration_are_for_their_owner(tmp_path: Path) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    (tmp_path / "older").write_text("x")
    (tmp_path / "older").chmod(0o644)
    for path in (tmp_path / "new", tmp_path / "older"):
        write_atomic(path, "y", private=True)
        assert (path.read_text(), mode(path)) == ("y", 0o600)
        path.chmod(0o644)
        file = AppendedFile(path, private=True)
        file.append(b"z")
        file.close()
        assert (path.read_text(), mode(path)) == ("yz", 0o600)
    write_atomic(tmp_path / "other", "y")
    assert mode(tmp_path / "other") & 0o077

    with RunFolder(tmp_path / "run") as run:
        run.begin("a: 1\n")
        assert mode(run.path / "config.yaml") == 0o600
        (run.path / "config.yaml").chmod(0o644)
        run.begin("a: 1\n")  # a run that an older rondo began
        assert mode(run.path / "config.yaml") == 0o600
        assert mode(run.trackers_dir("own").parent) == 0o700
        _write_recipe("train", run.path, load(["quickstart"]))
        assert mode(run.path / "recipe.yaml") == 0o600
        (run.path / "journal.jsonl").write_text("1\n2\n")
        run.discard_rest("journal.jsonl", 2)
        for path in (run.path / "journal.jsonl", *run.path.glob("discarded/*/journal.jsonl")):
            assert mode(path) == 0o600
