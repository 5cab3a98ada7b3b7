"""model.chat_template_options: the same tokens in training, evaluation, SFT, preference pairs, workers,
serving and generation, and those of transformers.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from rondo.chat import encode, encode_prompt
from rondo.config import Config, load
from rondo.core.errors import ConfigError
from rondo.models import load_tokenizer
from rondo.recipes.quickstart import tokenizer
from rondo.serving import Endpoint, Sessions
from rondo.serving.problems import ApiError
from rondo.serving.sessions import EndpointSession
from rondo.trainers.commands.check import check_rl
from rondo.trainers.commands.evaluate import generate
from rondo.trainers.program import conversations, create_rollout, load_prompts, open_tokenizer, settled
from rondo.trainers.program.roles import tokenizer_source
from rondo.trainers.supervised import PREFERENCE
from tests.chat.test_options import TEMPLATE
from tests.chat.test_trial import LOOPS, TIME
from tests.messages import full_text
from tests.trainers.conftest import RECIPE, inline

PROMPT = "Tom has 3 apples, buys 4. How many?"
ANSWER = "3+4=7"
OFF = "model.chat_template_options.enable_thinking=false"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe whose tokenizer has the template, and rows for every command."""
    made = tokenizer()
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path / "tokenizer")
    row = {"prompt": PROMPT, "response": ANSWER, "chosen": ANSWER, "rejected": "8", "answer": "7"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    source = {"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    recipe = {**RECIPE, "model": {**RECIPE["model"], "tokenizer": str(tmp_path / "tokenizer")}}
    recipe["data"] = {**RECIPE["data"], "train": [source], "eval": [{**source, "name": "held_out"}]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def theirs(folder: Path, **options: Any) -> list[int]:
    """The prompt's tokens by transformers."""
    tok = AutoTokenizer.from_pretrained(folder / "tokenizer")
    messages = [{"role": "user", "content": PROMPT}]
    return list(tok.apply_chat_template(messages, add_generation_prompt=True, **options)["input_ids"])


@pytest.mark.parametrize("what", ["prompts", "conversations", "generate"])
def test_a_template_without_end_is_a_named_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """At the first row, and not in this process."""
    monkeypatch.setattr(encode, "_tried", set())
    monkeypatch.setattr(encode, "_TRIAL_SECONDS", 1)
    (folder / "endless.jinja").write_text(LOOPS)
    config = configured(folder, f"model.chat_template={folder / 'endless.jinja'}")
    doors = {
        "prompts": lambda: load_prompts(config),
        "conversations": lambda: conversations(config, config.data.train, shuffle=False),
        "generate": lambda: encode_prompt(open_tokenizer(config), PROMPT),
    }
    with pytest.raises(ConfigError, match=TIME) as caught:
        doors[what]()
    assert caught.value.key == "model.chat_template"


def configured(folder: Path, *overrides: str) -> Config:
    return load([str(folder / "tiny.yaml")], overrides).config


def served(config: Config, **asked: Any) -> list[int]:
    """The prompt's tokens as `rondo serve` gives them to its engine."""

    async def never(*_: Any) -> Any:
        raise AssertionError

    endpoint = Endpoint(
        open_tokenizer(config), model="m", max_context=200, sessions=Sessions(1), generate=never
    )
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], **asked}
    prepared = asyncio.run(endpoint.prepare("chat", json.dumps(body).encode(), EndpointSession("")))
    return list(prepared.requests[0].token_ids)


@pytest.mark.parametrize(("overrides", "options"), [((OFF,), {"enable_thinking": False}), ((), {})])
def test_every_place_writes_what_transformers_writes(
    folder: Path, overrides: tuple[str, ...], options: dict[str, Any]
) -> None:
    config, expected = configured(folder, *overrides), theirs(folder, **options)
    assert (expected == theirs(folder)) is (not options)
    prompts = load_prompts(config)
    assert prompts.train.prompt(0).token_ids.tolist() == expected
    assert [prompt.token_ids.tolist() for prompt in prompts.eval] == [expected]
    assert conversations(config, config.data.train, shuffle=False).row(0)[0].tolist() == expected
    pairs = PREFERENCE.stream(config, False).batch([0])
    assert pairs.ragged("prompt_ids")[0].tolist() == 2 * expected
    assert served(config) == expected


def test_a_run_with_an_agent_says_where_conversations_cannot_go_on(folder: Path) -> None:
    """The template raises where there are tools."""
    assert load_prompts(configured(folder)).notes == ()
    (note,) = load_prompts(configured(folder, "rollout.agent=agent.py:solve")).notes
    assert note.startswith("chat template: what goes on behind an answer that calls tools is tokenised whole")
    assert "the chat template refuses messages with roles ['user', 'assistant']" in note


def test_workers_are_told(folder: Path) -> None:
    """Their tokenizer is that of agents and of the endpoint in a run."""
    told: dict[str, Any] = {}

    class NoCluster:
        threads = 1
        device = "cpu"

        async def create_group(self, role: str, worker: type, **settings: Any) -> None:
            told["tokenizer"] = settings["kwargs"]["spec"].tokenizer

    config = settled(configured(folder, OFF, "model.tool_format=mistral"))
    asyncio.run(create_rollout(NoCluster(), config, (1,), devices=(0,)))  # type: ignore[arg-type]
    assert told["tokenizer"] == tokenizer_source(config)
    assert load_tokenizer(told["tokenizer"]).chat_template_options == {"enable_thinking": False}
    assert load_tokenizer(told["tokenizer"]).tool_format == "mistral"


def test_a_request_may_say_what_is_configured(folder: Path) -> None:
    config = configured(folder, OFF)
    same = served(config, chat_template_kwargs={"enable_thinking": False})
    assert same == theirs(folder, enable_thinking=False)
    for other in ({"enable_thinking": True}, {"reasoning_effort": "low"}):
        with pytest.raises(ApiError, match=full_text("model.chat_template_options says")):
            served(config, chat_template_kwargs=other)


def test_unknown_ones_are_found_before_anything_starts(folder: Path) -> None:
    wrong = "model.chat_template_options.enable_thinkng=false"
    said = rf"argument '{wrong}': model.chat_template_options.* did you mean 'enable_thinking'"
    with pytest.raises(ConfigError, match=said):
        check_rl(load([str(folder / "tiny.yaml")], [wrong]))
    model = ["model={config: null, tokenizer: null}", f"trainer.warm_start={folder / 'sft.yaml'}", wrong]
    (folder / "sft.yaml").write_text(yaml.safe_dump({"model": RECIPE["model"], "include": "tiny.yaml"}))
    with pytest.raises(ConfigError, match=full_text("'enable_thinkng' (it reads none).")):
        check_rl(load([str(folder / "tiny.yaml")], model))


@pytest.mark.slow
def test_a_run_and_generate_take_them(folder: Path) -> None:
    run = folder / "run"
    inline("train", str(folder / "tiny.yaml"), OFF, f"trainer.run_dir={run}", "trainer.total_steps=1")
    options = {"enable_thinking": False}
    settings = {"max_tokens": 4, "temperature": 0.0}
    on, off = (
        generate(str(run / "export"), [PROMPT], chat_template_options=given, **settings)[0]
        for given in ({}, options)
    )
    assert on["log_probs"] != off["log_probs"]
    arguments = ("--max-tokens", "4", "--temperature", "0", "--json", "--template-option")
    said = inline("generate", str(run / "export"), PROMPT, *arguments, "enable_thinking=false")
    assert json.loads(said.stdout) == off
    said = inline("generate", str(run / "export"), PROMPT, *arguments, "thinking=false", check=False)
    assert said.returncode == 2
    assert "did you mean 'enable_thinking'" in said.stderr
