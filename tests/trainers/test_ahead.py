"""What is known before a run begins is told then: faults of templates and rewards that are worth a warning,
data that a warm start would come before.
"""

from __future__ import annotations

import json
from dataclasses import replace
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
from rondo.trainers.commands.ahead import before_warm_start, check_data, found_in_data, known_ahead
from rondo.trainers.commands.supervised import sft
from rondo.trainers.commands.train import train
from rondo.trainers.program import load_prompts
from rondo.trainers.supervised import SFT
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
    assert learns_to_end(with_template(ENDLESS), "eos")  # data.turns=eos: behind what the template writes
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


def test_instructions_of_an_environment_are_no_repeated_rows() -> None:
    task = {"type": "function", "task": "rondo.environments.episodes"}
    options = {"environment": "frozen_lake", "size": 4}
    data = {**RECIPE["data"], "train": [{**task, "options": options}], "max_prompt_tokens": 512}
    settings = {**RECIPE, "data": data, "reward": {"functions": ["environment"]}}
    settings["rollout"] = {**RECIPE["rollout"], "environments": [{"name": "frozen_lake", "size": 4}]}
    config = load([], settings=settings).config
    stream = load_prompts(config).train
    assert list(stream.repeats().values()) == [(3, 4)]
    assert found_in_data(config, stream, {}, {}) == []
    alone = replace(config, rollout=load([], settings=RECIPE).config.rollout)
    (found,) = found_in_data(alone, stream, {}, {})
    assert found.check == "repeated_rows"


def test_rows_that_are_trained_on_and_evaluated_on_are_counted(tmp_path: Path) -> None:
    def lines(name: str, answers: range, **more: Any) -> dict[str, Any]:
        rows = [{"prompt": f"{i}?", "response": str(i), "answer": str(i)} for i in answers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"type": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), **more}

    train = [lines("one", range(4)), lines("two", range(4, 6), system_prompt="Add.")]
    held_out = [lines("known", range(2, 8)), lines("new", range(8, 9))]
    data = {**RECIPE["data"], "train": train, "eval": held_out}
    loaded = load([], settings={**RECIPE, "data": data})
    prompts = load_prompts(loaded.config)
    # Rows 2 and 3 are the same prompts there; 4 and 5 are others, behind another message.
    (found,) = found_in_data(loaded.config, prompts.train, {}, prompts.held_out())
    assert found.check == "held_out_trained"
    assert found.says.endswith("new ones: known: 2 of 6 rows")
    (said,) = [line for line in check_data(loaded) if "held_out_trained" in line]
    assert "known: 2 of 6 rows" in said
    learnt = {**SFT_RECIPE["data"], "train": train, "eval": held_out}
    lines_of_sft = check_data(load([], settings={**SFT_RECIPE, "data": learnt}), SFT)
    (said,) = [line for line in lines_of_sft if "held_out_trained" in line]
    assert "known: 2 of 6 rows" in said


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
    loaded = load([str(warm)], [f"trainer.run_dir={warm.parent / 'run'}", "model.tool_format=hermes"])
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


# ---- what rewards read of rows ----


def rows_of(folder: Path, *rows: dict[str, Any], name: str = "d") -> str:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return json.dumps([{"type": "jsonl", "path": str(folder / f"{name}.jsonl")}])


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "answer": None}, "reads column 'answer', which is null"),
        ({"prompt": "a", "anser": "1"}, "reads column 'answer', which is missing"),
        ({"prompt": "a", "answer": "one"}, "answer 'one' (column 'answer') is no number"),
    ],
)
@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_row_that_cannot_be_scored_is_found_as_it_is_read(
    row: dict[str, Any], said: str, part: str, tmp_path: Path
) -> None:
    bad = rows_of(tmp_path, *[GOOD] * 5, row, GOOD)
    overrides = [
        "reward.functions=[{name: gsm8k}]",
        "reward.on_error=drop",
        "data.train=[]",
        f"data.{part}={bad}",
    ]
    if part == "eval":
        overrides[2] = f"data.train={rows_of(tmp_path, GOOD, name='t')}"
    loaded = load([str(written(tmp_path))], [*overrides, f"trainer.run_dir={tmp_path / 'run'}"])
    with pytest.raises(DataError) as raised:
        train(loaded)
    assert str(raised.value).startswith(f"source 'd' ({tmp_path / 'd.jsonl'}, line 6): ")
    assert said in str(raised.value)


def test_rows_of_other_sources_and_those_left_out_are_not_asked(tmp_path: Path) -> None:
    long = {"prompt": "apples " * 60}
    overrides = [f"data.train={rows_of(tmp_path, GOOD, long)}", "reward.functions=[{name: gsm8k}]"]
    overrides += ["data.eval=[]", "trainer.evaluation.every=null"]
    assert len(load_prompts(load([str(written(tmp_path))], overrides).config).train.source_names) == 1
    bare = json.loads(rows_of(tmp_path, {"prompt": "a"}, name="bare"))
    both = json.dumps([*json.loads(rows_of(tmp_path, GOOD)), *bare])
    scored = "reward.functions=[{name: gsm8k, sources: [d]}, {name: overlong, max_tokens: 8, buffer: 4}]"
    config = load([str(written(tmp_path))], [f"data.train={both}", scored, *overrides[2:]]).config
    assert load_prompts(config).train.source_names == ("d", "bare")


def test_the_rows_of_a_large_source_are_checked_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RONDO_CACHE", str(tmp_path / "cache"))
    for name, small in (("WHOLE", 8), ("FIRST", 4)):
        monkeypatch.setattr(f"rondo.data.stream.{name}", small)
    bad = rows_of(tmp_path, *[GOOD] * 40, {"prompt": "a"})
    recipe = str(written(tmp_path))
    overrides = [f"data.train={bad}", "reward.functions=[{name: gsm8k}]", "data.eval=[]"]
    overrides += ["trainer.evaluation.every=null"]
    stream = load_prompts(load([recipe], overrides).config).train
    with pytest.raises(DataError, match=r"line 41.* reads column 'answer'"):
        stream.look_at_rest()
    assert main(["check", "--data", recipe, *overrides]) == 2
    assert "line 41" in capsys.readouterr().err
    # A function that reads none of it has looked at no row yet: what was found is by function.
    with_another = [
        *overrides[:1],
        "reward.functions=[{name: exact_match, answer_key: prompt}]",
        *overrides[2:],
    ]
    with pytest.raises(DataError, match=r"line 1.* reads column 'prompt', which"):
        load_prompts(load([recipe], with_another).config)


def test_a_parameter_that_has_the_name_of_a_column(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(prompt, answer): return 1.0\n")
    overrides = [f"data.train={rows_of(tmp_path, GOOD)}", "data.eval=[]", "trainer.evaluation.every=null"]
    overrides += [f"reward.functions=[{{name: '{tmp_path / 'own.py'}:score'}}]"]
    with pytest.raises(ConfigError, match=full_text("score(prompt, answer): answer is")) as raised:
        load_prompts(load([str(written(tmp_path))], overrides).config)
    assert raised.value.key == "reward.functions.0"
