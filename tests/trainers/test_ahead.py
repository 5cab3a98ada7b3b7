"""What is known before a run begins is told then: faults of templates and rewards that are worth a warning,
data that a warm start would come before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.chat import has_clock, learns_to_end
from rondo.cli.main import main
from rondo.config import load
from rondo.core.errors import ConfigError, DataError
from rondo.recipes.quickstart import tokenizer
from rondo.tracking import AHEAD
from rondo.trainers.commands.ahead import before_warm_start, known_ahead
from rondo.trainers.commands.supervised import sft
from rondo.trainers.commands.train import train
from tests.messages import full_text
from tests.trainers.conftest import RECIPE, SFT_RECIPE

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = CHATML.replace("<|im_end|>", "")
OPENED = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
# As Llama 3's: an option takes the clock's place.
CLOCK = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
CLOCK += "{{ date_string }}\n" + CHATML
OVERLONG = {"name": "overlong", "max_tokens": 24, "buffer": 16}
FORMAT = {"name": "format", "tags": ["answer"]}


def with_template(text: str, **options: Any) -> Any:
    made = tokenizer()
    made.chat_template, made.chat_template_options, made.end_token_ids = text, options, ()
    return made


@pytest.mark.parametrize(("text", "ends"), [(CHATML, True), (ENDLESS, False), (OPENED, True)])
def test_a_template_that_never_ends_a_turn(text: str, ends: bool) -> None:
    assert learns_to_end(with_template(text)) is ends


def test_a_template_that_takes_no_such_conversation_is_not_judged() -> None:
    assert learns_to_end(with_template("{{ raise_exception('no') }}"))
    assert not has_clock(with_template("{{ raise_exception('no') }}"))


def test_a_clock_is_one_where_it_is_read() -> None:
    assert has_clock(with_template(CLOCK))
    assert not has_clock(with_template(CLOCK, date_string="1 Jan 2000"))
    # Only before tools, and only to say the year.
    assert has_clock(with_template("{% if tools %}{{ strftime_now('%Y') }}{% endif %}" + CHATML))
    assert not has_clock(
        with_template("{% if tools is string %}{{ strftime_now('%Y') }}{% endif %}" + CHATML)
    )


def written(folder: Path, template: str = CHATML, base: dict[str, Any] = RECIPE, **sections: Any) -> Path:
    (folder / "t.jinja").write_text(template)
    recipe = {**base, **sections}
    recipe["model"] = {**base["model"], "chat_template": str(folder / "t.jinja")}
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "r.yaml"


def rewards(*functions: dict[str, Any]) -> dict[str, Any]:
    return {"functions": [*RECIPE["reward"]["functions"], *functions]}


@pytest.mark.parametrize(
    ("sections", "overrides", "found", "said"),
    [
        ({}, [], [], ""),
        ({"template": ENDLESS}, [], ["template_end"], "answers end only at '<|im_end|>'"),
        ({"template": ENDLESS}, ["rollout.stop=[User]"], [], ""),
        ({"template": CLOCK}, [], ["template_clock"], "(the template reads date_string)"),
        ({"template": CLOCK}, ["model.chat_template_options.date_string=today"], [], ""),
        # It begins above 8 tokens, of 8.
        (
            {"reward": rewards(OVERLONG)},
            [],
            ["overlong_unreached"],
            "above 8 tokens, and rollout.max_tokens is 8",
        ),
        ({"reward": rewards(OVERLONG)}, ["rollout.max_tokens=9"], [], ""),
        ({"reward": rewards(FORMAT)}, [], [], ""),
        (
            {"reward": rewards(FORMAT), "template": OPENED},
            [],
            ["format_opened"],
            "opens <think>, and tags begins with answer",
        ),
        ({"reward": rewards({"name": "format", "tags": ["think"]}), "template": OPENED}, [], [], ""),
    ],
)
def test_what_is_warned_of(
    sections: dict[str, Any], overrides: list[str], found: list[str], said: str, tmp_path: Path
) -> None:
    recipe = written(tmp_path, **sections)
    known = known_ahead(load([str(recipe)], overrides), "rl")
    assert [one.check for one in known] == found
    assert all(said in one.says and (one.began, one.step, one.value) == (0, 0, None) for one in known)
    for name in found:
        assert known_ahead(load([str(recipe)], [*overrides, f"tracking.checks.{name}=off"]), "rl") == []
        with pytest.raises(ConfigError, match=f"tracking.checks.{name}=warn goes on") as raised:
            known_ahead(load([str(recipe)], [*overrides, f"tracking.checks.{name}=stop"]), "rl")
        assert raised.value.key == f"tracking.checks.{name}"


def test_a_run_warns_once_and_the_summary_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path, ENDLESS, SFT_RECIPE)
    overrides = [f"trainer.run_dir={tmp_path / 'run'}", "checkpoint.export=false", "tracking.console=plain"]
    summary = sft(load([str(recipe)], overrides))
    told = capsys.readouterr().out
    assert told.count("WARNING template_end: ") == 1
    assert told.index("WARNING template_end: ") < told.index("starting local backend")
    assert [one["check"] for one in summary["checks"]] == ["template_end"]
    assert AHEAD["template_end"].remedy == summary["checks"][0]["remedy"]


def test_check_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(written(tmp_path, CLOCK))
    assert main(["check", recipe]) == 0
    assert "WARNING template_clock: the chat template writes the time" in capsys.readouterr().out
    assert main(["check", str(written(tmp_path, CLOCK, SFT_RECIPE)), "--for", "sft"]) == 0
    assert "WARNING template_clock: " in capsys.readouterr().out


# ---- data before a warm start ----


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A recipe that takes its model from a warm start, and has tools that its prompts have no room for."""
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SFT_RECIPE))
    (tmp_path / "tools.py").write_text(
        "def weather(city: str, day: str) -> str:\n"
        '    """Tells the weather of a city on some day, in words that readers of newspapers know."""\n'
        "    return city\n"
    )
    made = written(
        tmp_path,
        "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML,
        rollout={**RECIPE["rollout"], "tools": [{"name": f"{tmp_path / 'tools.py'}:weather"}]},
        trainer={**RECIPE["trainer"], "warm_start": "sft.yaml"},
    )
    recipe = yaml.safe_load(made.read_text())
    del recipe["model"]["config"], recipe["model"]["tokenizer"]
    made.write_text(yaml.safe_dump(recipe))
    return made


def test_prompts_are_read_before_a_warm_start(warm: Path) -> None:
    loaded = load([str(warm)], [f"trainer.run_dir={warm.parent / 'run'}"])
    with pytest.raises(DataError, match=full_text("are the schemas of rollout.tools; raise")) as raised:
        train(loaded)
    assert not (warm.parent / "run" / "warm_start").exists()
    config = before_warm_start(loaded)
    assert config is not None
    assert config.model.chat_template == str(warm.parent / "t.jinja")
    assert config.model.tokenizer == SFT_RECIPE["model"]["tokenizer"]
    words = str(raised.value).split()
    in_all, schemas = (int(words[words.index(after) + 1]) for after in ("has", "which"))
    assert 0 < in_all - schemas <= 64 < schemas


def test_all_data_can_be_checked_where_a_warm_start_makes_the_model(
    warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--data", str(warm), "rollout.tools=[]"]) == 0
    assert "train: 64 rows, 0 of them too long" in capsys.readouterr().out


def test_a_prompt_that_is_an_error_says_what_its_tokens_are(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "answer": "1", "tools": tools}) + "\n")
    source = {"type": "jsonl", "path": str(tmp_path / "p.jsonl")}
    recipe = written(tmp_path, "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML)
    overrides = [f"data.train=[{json.dumps(source)}]", "data.max_prompt_tokens=8"]
    overrides += ["data.overlong_prompts=error", f"trainer.run_dir={tmp_path / 'run'}"]
    with pytest.raises(DataError, match=full_text("are the schemas of column 'tools'")):
        train(load([str(recipe)], overrides))
