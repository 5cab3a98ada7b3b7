"""`tools=` and `environment=` of `rondo.train` and its like; demonstrations written with rollout.tools."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import rondo
from rondo.agents.tools import load_tools
from rondo.config import load
from rondo.config.schema import ToolConfig
from rondo.core.errors import ConfigError, DataError
from rondo.environments import episodes
from rondo.trainers.program import load_prompts
from rondo.trainers.supervised import SFT
from tests.agents.own_tools import weather
from tests.environments.worlds import Honest
from tests.trainers.conftest import MODEL, cli, metrics, weights

WEATHER = "tests/agents/own_tools.py:weather"
ASKED = {"role": "user", "content": "How warm is it in Rome?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
DEMONSTRATION = [
    {"role": "system", "content": "Ask before you answer."},
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "Rome: 20 C (all)"},
    {"role": "assistant", "content": "20 degrees."},
]
SETTINGS: dict[str, Any] = {
    "model": {
        "config": {**MODEL, "max_position_embeddings": 2048},
        "tokenizer": "rondo.recipes.quickstart.tokenizer",
    },
    "data": {"batch_size": 2, "max_prompt_tokens": 1200},
    "actor": {"token_budget": 2048},
    "cluster": {"threads": 1},
    "tracking": {"console": "off", "plot": False},
}


def schemas(*names: str) -> list[Any]:
    return [dict(tool.schema) for tool in load_tools([ToolConfig(name) for name in names])]


def sft(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str) -> Any:
    """The configuration of `rondo sft` over these rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(yaml.safe_dump(SETTINGS))
    given = [f"data.train=[{{type: jsonl, path: {path}}}]", "trainer.total_steps=2", *overrides]
    return load([str(recipe)], [*given, f"trainer.run_dir={tmp_path / 'run'}"])


TOOLS = f"rollout.tools=[{WEATHER}, calculator]"


def first_row(loaded: Any) -> Any:
    return SFT.streams(loaded.config)[0].batch([0])


def test_demonstrations_have_the_prompt_of_episodes_token_for_token(tmp_path: Path) -> None:
    """With the schemas of the same rollout.tools; without these the prompt is another."""
    row = first_row(sft(tmp_path, [{"messages": DEMONSTRATION}], TOOLS))
    data = {**SETTINGS["data"], "train": [{"type": "jsonl", "path": str(tmp_path / "prompts.jsonl")}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": DEMONSTRATION[:2], "answer": "4"}))
    recipe = tmp_path / "rl.yaml"
    recipe.write_text(yaml.safe_dump({**SETTINGS, "data": data}))
    rl = load([str(recipe)], [TOOLS, "reward.functions=[exact_match]", "trainer.total_steps=1"])
    prompt = load_prompts(rl.config).train.prompt(0).token_ids
    assert row.rows("prompt_ids")[0].tolist() == prompt.tolist()
    without = first_row(sft(tmp_path, [{"messages": DEMONSTRATION}]))
    assert len(without.rows("prompt_ids")[0]) < len(prompt) - 100
    assert without.rows("response_ids")[0].tolist() == row.rows("response_ids")[0].tolist()


@pytest.mark.parametrize("form", ["list", "text", "texts"])
def test_a_row_may_say_the_same_tools(tmp_path: Path, form: str) -> None:
    same = schemas(WEATHER, "calculator")
    own = {"list": same, "text": json.dumps(same), "texts": [json.dumps(one) for one in same]}[form]
    rows = [{"messages": DEMONSTRATION, "tools": own}]
    both, alone = first_row(sft(tmp_path, rows, TOOLS)), first_row(sft(tmp_path, rows))
    shared = first_row(sft(tmp_path, [{"messages": DEMONSTRATION}], TOOLS))
    for made in (both, alone):
        assert made.rows("prompt_ids")[0].tolist() == shared.rows("prompt_ids")[0].tolist()


def test_a_row_with_other_tools_is_refused(tmp_path: Path) -> None:
    """By its line; one parameter that differs is enough."""
    other = copy.deepcopy(schemas(WEATHER, "calculator"))
    other[0]["function"]["parameters"]["properties"].pop("unit")
    rows = [{"messages": DEMONSTRATION}, {"messages": DEMONSTRATION, "tools": other}]
    with pytest.raises(DataError, match="both say which tools there are") as caught:
        SFT.streams(sft(tmp_path, rows, TOOLS).config)[0].batch([0, 1])
    assert "rows.jsonl" in str(caught.value)
    assert "line 2" in str(caught.value)


def test_sft_with_tools_trains_as_with_the_column(tmp_path: Path) -> None:
    """Three ways to the same bits: the command, `rondo.sft(tools=…)`, and schemas in each row."""
    rows = [{"messages": DEMONSTRATION}] * 4
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(yaml.safe_dump(SETTINGS))
    given = (f"data.train=[{{type: jsonl, path: {path}}}]", "trainer.total_steps=2")
    cli("sft", str(recipe), *given, f"rollout.tools=[{WEATHER}]", f"trainer.run_dir={tmp_path / 'cli'}")
    folder = {"trainer.run_dir": tmp_path / "python"}
    run = rondo.sft(data=rows, tools=weather, steps=2, config=SETTINGS, **folder)
    assert "weather" in yaml.safe_load((run.path / "recipe.yaml").read_text())["rollout"]["tools"][0]["name"]
    own = [{**row, "tools": schemas(WEATHER)} for row in rows]
    rondo.sft(data=own, steps=2, config=SETTINGS, **{"trainer.run_dir": tmp_path / "column"})
    assert weights(tmp_path / "cli") == weights(tmp_path / "python") == weights(tmp_path / "column")


@pytest.mark.parametrize(
    ("command", "override", "said"),
    [
        ("sft", "rollout.tools=[calculater]", "did you mean 'calculator'"),
        ("sft", "rollout.n=3", "rollout.n has no meaning for supervised"),
        ("preference", "rollout.tools=[calculator]", "rollout.tools.0.name has no meaning"),
    ],
)
def test_what_supervised_runs_do_not_read(tmp_path: Path, command: str, override: str, said: str) -> None:
    rows = [{"messages": DEMONSTRATION}]
    if command == "preference":
        rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]  # type: ignore[dict-item]
    function = rondo.sft if command == "sft" else rondo.preference
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=said):
        function(
            data=rows,
            steps=1,
            config=SETTINGS,
            **{key: yaml.safe_load(value), "trainer.run_dir": tmp_path / "run"},
        )


# ---- of RL

RL: dict[str, Any] = {**SETTINGS, "rollout": {"n": 2, "max_tokens": 8}}


def test_tools_are_rollout_tools(tmp_path: Path) -> None:
    """One or a list, as objects, names, or with options: the run acts as with the key."""
    rows = [{"prompt": "How warm is it in Rome?", "answer": "20"}] * 4
    given = {"data": rows, "reward": "exact_match", "config": RL, "steps": 1}
    tools = [weather, {"name": "calculator", "timeout_seconds": 5}]
    run = rondo.train(**given, tools=tools, **{"trainer.run_dir": tmp_path / "argument"})
    chosen = load([str(run.path / "recipe.yaml")]).config.rollout.tools
    assert [tool.name for tool in chosen] == [WEATHER, "calculator"]
    assert [tool.timeout_seconds for tool in chosen][1] == 5
    again = rondo.train(**given, **{"rollout.tools": tools, "trainer.run_dir": tmp_path / "key"})
    assert metrics(run.path) == metrics(again.path)
    assert "agent/invalid_calls" in metrics(run.path)[-1]
    assert weights(run.path) == weights(again.path)


def test_environment_is_rollout_environments(tmp_path: Path) -> None:
    """In training, and in an evaluation of the model that comes of it."""
    steps = {"rollout.agent": {"name": "steps", "max_steps": 2}}
    rows = episodes("tests/environments/worlds.py:Honest", size=4)
    run = rondo.train(
        data=rows,
        reward="environment",
        environment=Honest,
        config=RL,
        steps=1,
        **{"trainer.run_dir": tmp_path / "run", **steps},
    )
    (chosen,) = load([str(run.path / "recipe.yaml")]).config.rollout.environments
    assert chosen.name == "tests/environments/worlds.py:Honest"
    assert metrics(run.path)[-1]["environment/steps/Honest"] == 2
    settings = {"data.max_prompt_tokens": 1200, "rollout.max_tokens": 8, "cluster.threads": 1, **steps}
    found = rondo.evaluate(run.model, rows, "environment", environment=[Honest], **settings)
    assert len(found.samples) == 4
    assert found.metrics["eval/greedy/failed_share"] == 0


@pytest.mark.parametrize(
    ("argument", "key", "settings"),
    [
        ("tools", "rollout.tools", {"config": {"rollout": {"tools": ["calculator"]}}}),
        ("tools", "rollout.tools", {"config": {"rollout.tools": ["calculator"]}}),
        ("tools", "rollout.tools", {"rollout.tools": ["calculator"]}),
        ("environment", "rollout.environments", {"rollout": {"environments": ["bandit"]}}),
        ("environment", "rollout.environments", {"config": {"rollout.environments": ["bandit"]}}),
    ],
)
def test_an_argument_and_its_key_are_an_error(
    tmp_path: Path, argument: str, key: str, settings: dict[str, Any]
) -> None:
    """Whichever would win: nothing is written."""
    given = {argument: "bandit" if argument == "environment" else weather, **settings}
    folder = tmp_path / "run"
    for function in (rondo.train, rondo.sft) if argument == "tools" else (rondo.train,):
        with pytest.raises(ConfigError, match=f"{argument}=… and the setting {key} both say the same"):
            function(**given, **{"trainer.run_dir": folder})
    with pytest.raises(ConfigError, match="both say the same"):
        rondo.evaluate(tmp_path / "model", [{"prompt": "a"}], "exact_match", **given)
    assert not folder.exists()
