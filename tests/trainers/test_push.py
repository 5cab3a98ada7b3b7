"""The card of an export says what the run was, and `rondo push` sends the folder whole, or nothing. The hub
is a stand-in (tests/hub.py); nothing was sent to the real one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

import rondo
from rondo.config import load
from rondo.core.errors import ConfigError, StorageError
from rondo.system.hub import Repository
from rondo.tracking import read_metrics
from rondo.trainers.commands.card import front_matter, model_card
from rondo.trainers.loop import config_of
from tests import begun
from tests.hub import Hub, hub
from tests.trainers.conftest import MODEL, RECIPE, cli, inline

BASE_CARD = "---\nlicense: cc-by-4.0\nlanguage:\n- fr\nbase_model: somebody/else\n---\n# The base\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub, which this process takes for the only one, with a token that may write."""
    with hub() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield running


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps from a model that was had from a hub, with evaluations before and after."""
    folder = tmp_path_factory.mktemp("push")
    recipe = folder / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    few = ("trainer.total_steps=2", "checkpoint.every=1", "tracking.plot=true", "tracking.console=plain")
    inline("train", str(recipe), f"trainer.run_dir={folder / 'base'}", *few)
    snapshot = folder / "hub" / "models--acme--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(folder / "base" / "export", snapshot)
    (snapshot / "README.md").write_text(BASE_CARD)
    (snapshot / "curves.png").unlink()
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    source = "{type: function, name: sums, task: rondo.recipes.quickstart.train_rows, options: {size: 64}}"
    model = ("model.path=acme/tiny", "model.config=null", "model.tokenizer=null", f"data.train=[{source}]")
    environment = {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    cli("train", str(recipe), *model, *few, f"trainer.run_dir={folder / 'run'}", **environment)
    return folder / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ---- the card


@pytest.mark.slow
def test_the_card_of_a_run(run: Path) -> None:
    export = run / "export"
    card = (export / "README.md").read_text(encoding="utf-8")
    assert front_matter(export / "README.md") == {
        "library_name": "transformers",
        "base_model": "acme/tiny",
        "pipeline_tag": "text-generation",
        "license": "cc-by-4.0",
        "language": ["fr"],
        "tags": ["rondo", "grpo"],
    }
    assert (export / "README.base.md").read_text() == BASE_CARD
    rows = dict(re.findall(r"^\| ([\w ]+) \| ([^|]*) \|$", card, re.M))
    said = rondo.load(run).summary["versions"]
    assert rows == {
        "algorithm": "grpo",
        "steps": "2",
        "data": "sums",
        "batch size": "4",
        "learning rate": "0.001",
        "seed": "0",
        "versions": f"rondo {said['rondo']}, torch {said['torch']}, transformers {said['transformers']}",
    }
    lines = {line["step"]: line for line in read_metrics(run)}
    table = {
        name: (before, after)
        for name, before, after in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", card, re.M)
    }
    for name in ("greedy reward", "sampled reward", "greedy response length"):
        key = f"eval/{name.replace(' ', '/', 1).replace(' ', '_')}"
        assert table[name] == (f"{lines[0][key]:.4g}", f"{lines[2][key]:.4g}")
    assert "![Metrics of the run, by step](curves.png)" in card
    assert (export / "curves.png").read_bytes() == (run / "curves.png").read_bytes()
    assert str(run.parent) not in card
    assert "acme/tiny" in card.partition("# run")[2]


@pytest.mark.slow
def test_what_the_card_says_to_run_runs(run: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (run / "export" / "README.md").read_text(), re.S)
    done = begun.run(["-c", code], cwd=run / "export", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "How many?" in done.stdout


def test_a_card_has_data_without_a_name_and_the_options_of_the_template(tmp_path: Path) -> None:
    train = [
        {"type": "function", "task": "rondo.recipes.quickstart.train_rows"},
        {"type": "jsonl", "path": str(tmp_path / "sums.jsonl")},
        {"type": "huggingface", "path": "acme/sums"},
        {"type": "huggingface", "path": str(tmp_path), "name": "own"},
    ]
    options = {"enable_thinking": False, "today": 'a "day"', "docs": [{"text": "a"}]}
    settings = {**RECIPE, "data": {**RECIPE["data"], "train": train}}
    settings["model"] = {**RECIPE["model"], "chat_template_options": options}
    (tmp_path / "chat_template.jinja").write_text("")
    (tmp_path / "config.json").write_text("{}")
    card = model_card(tmp_path, load([], settings=settings).config, tmp_path, 1)
    assert "| data | train_rows, sums, acme/sums, own |" in card
    (code,) = re.findall(r"```python\n.*?(messages = .*?)print", card, re.S)

    class Tokenizer:
        def apply_chat_template(self, messages: Any, **given: Any) -> Any:
            return messages, given

    names: dict[str, Any] = {"tokenizer": Tokenizer()}
    exec(code, names)
    messages, given = names["prompt"]
    assert messages == [{"role": "user", "content": "How many?"}]
    usual = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    assert given == usual | options


@pytest.mark.slow
def test_a_checkpoint_has_the_evaluation_of_its_own_step(run: Path, tmp_path: Path) -> None:
    """None at step 1; the last one's card is that of the run's end."""
    base = run.parent / "base"
    inline("export", str(base), str(tmp_path / "one"), "--step", "1")
    card = (tmp_path / "one" / "README.md").read_text()
    assert "| steps | 1 |" in card
    assert "## Evaluation" not in card
    inline("export", str(base), str(tmp_path / "two"))
    assert contents(tmp_path / "two") == contents(base / "export")
    assert "A model with new weights, trained with rondo." in (tmp_path / "two" / "README.md").read_text()


@pytest.mark.slow
def test_a_base_that_is_a_run_passes_on_what_it_was_made_of(run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    source = (
        "{type: function, name: chats, task: rondo.recipes.quickstart.demonstrations, options: {size: 64}}"
    )
    of_run = [f"model.path={run / 'export'}", "model.config=null", "model.tokenizer=null"]
    of_run += [f"data.train=[{source}]", "trainer.total_steps=1", "data.batch_size=4", "actor.lora={rank: 2}"]
    settings = {key: RECIPE[key] for key in ("model", "actor", "cluster", "tracking")}
    settings["actor"] = {"token_budget": 512}
    recipe.write_text(yaml.safe_dump(settings))
    inline("sft", str(recipe), *of_run, f"trainer.run_dir={tmp_path / 'sft'}")
    export = tmp_path / "sft" / "export"
    front = front_matter(export / "README.md")
    assert front["base_model"] == "acme/tiny"
    assert (front["license"], front["tags"]) == ("cc-by-4.0", ["rondo", "supervised-fine-tuning"])
    card = (export / "README.md").read_text()
    assert "| LoRA | rank 2 |" in card
    assert "| algorithm | supervised fine-tuning |" in card
    assert str(run) not in card
    assert (export / "README.base.md").read_bytes() == (run / "export" / "README.md").read_bytes()
    assert (export / "README.base.base.md").read_text() == BASE_CARD


@pytest.mark.slow
def test_the_card_of_a_reward_model(tmp_path: Path) -> None:
    """Which hubs have no task for, and transformers no class."""
    few = (
        "trainer.warm_start=null",
        f"model.config={MODEL}",
        "model.tokenizer=rondo.recipes.quickstart.tokenizer",
    )
    few += ("trainer.total_steps=1", "data.batch_size=4", "tracking.console=off")
    inline("reward-model", "reward_model", *few, f"trainer.run_dir={tmp_path / 'scores'}")
    export = tmp_path / "scores" / "export"
    assert front_matter(export / "README.md") == {
        "library_name": "transformers",
        "tags": ["rondo", "reward-model-bradley_terry"],
    }
    card = (export / "README.md").read_text()
    assert "models: [{path: PATH}]" in card
    assert "from_pretrained" not in card
    (line,) = [line for line in read_metrics(tmp_path / "scores") if line["step"] == 1]
    assert f"| pair accuracy |  | {line['eval/pair/accuracy']:.4g} |" in card
    assert "| data | pairs |" in card


# ---- the way to a hub


@pytest.mark.slow
def test_the_export_is_what_the_hub_lists(run: Path, server: Hub, tmp_path: Path) -> None:
    url = rondo.load(run).push_to_hub("acme/answers")
    assert url == f"{server.url}/acme/answers"
    repository = server.repositories["acme/answers"]
    assert repository.private
    assert server.asked == ["create acme/answers", "commit acme/answers"]
    (_, files) = repository.commits
    assert files.pop(".gitattributes")
    assert files == contents(run / "export")
    # By the command, in a process of its own: a checkpoint in place of what is there.
    repository.commits[-1]["old.safetensors"] = server.large["old"] = b"old"
    environment = {
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_writer",
        "HF_HUB_OFFLINE": "0",
    }
    base = run.parent / "base"
    done = cli("push", str(base), "acme/answers", "--replace", "--step", "1", **environment)
    assert done.stdout == f"sent step 1 of {base} to {url}\n"
    assert server.asked[2:] == ["commit acme/answers"]
    inline("export", str(base), str(tmp_path / "one"), "--step", "1")
    assert repository.commits[-1] == contents(tmp_path / "one")
    assert not list((tmp_path / "cache" / "rondo").glob("export-*"))


@pytest.mark.slow
def test_what_is_there_is_neither_lost_nor_shown(run: Path, server: Hub) -> None:
    trained = rondo.load(run)
    trained.push_to_hub("acme/open", private=False)
    assert not server.repositories["acme/open"].private
    before = list(server.repositories["acme/open"].commits)
    with pytest.raises(ConfigError) as caught:
        trained.push_to_hub("acme/open", replace=True)
    assert str(caught.value).startswith("acme/open: is public, and a private one is asked for; --public ")
    with pytest.raises(ConfigError) as caught:
        trained.push_to_hub("acme/open", private=False)
    assert str(caught.value).startswith("acme/open: has files already (README.base.md, README.md, ")
    assert server.repositories["acme/open"].commits == before
    trained.push_to_hub("acme/open", private=False, replace=True)  # nothing has changed: no commit is needed


def test_a_commit_of_somebody_else_in_between_is_not_written_over(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    asked = Repository("acme/both", private=True, replace=True)
    asked.take(tmp_path / "model", "first")
    there = server.repositories["acme/both"]
    late = Repository("acme/both", private=True, replace=True)
    there.commits.append({**there.commits[-1], "theirs.txt": b"1"})
    with pytest.raises(StorageError) as caught:
        late.take(tmp_path / "model", "second", {"more.txt": b"2"})
    assert str(caught.value).startswith("acme/both: cannot be written on Hugging Face: ")
    assert set(there.commits[-1]) == {".gitattributes", "config.json", "theirs.txt"}
    assert server.asked == ["create acme/both", "commit acme/both", "commit acme/both"]


@pytest.mark.slow
def test_an_export_of_an_older_rondo_is_sent_with_a_card(run: Path, server: Hub, tmp_path: Path) -> None:
    older = tmp_path / "run"
    shutil.copytree(run, older, ignore=shutil.ignore_patterns("checkpoints", "rollouts"))
    (older / "export" / "README.md").unlink()
    rondo.load(older).push_to_hub("acme/older")
    sent = server.repositories["acme/older"].commits[-1]
    assert sent["README.md"].decode() == model_card(older, config_of(older), older / "export", 2)
    assert not (older / "export" / "README.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["commit", "commit and delete", "list model.safetensors", "list config.json"]
)
def test_what_goes_wrong_is_an_error(fault: str, run: Path, server: Hub) -> None:
    server.fault = fault
    with pytest.raises(StorageError) as caught:
        rondo.load(run).push_to_hub("acme/broken")
    said = str(caught.value)
    if fault == "commit":  # nothing is left there
        assert said.startswith("acme/broken: cannot be written on Hugging Face: ")
        assert server.repositories == {}
        assert server.asked == ["create acme/broken", "commit acme/broken", "delete acme/broken"]
    elif fault == "commit and delete":  # what is left is said, and why there was no commit
        assert said.startswith(
            "acme/broken: cannot be removed again, which is empty (acme/broken: cannot be "
        )
        assert len(server.repositories["acme/broken"].commits) == 1
    else:
        name = fault.removeprefix("list ")
        assert said.startswith(f"acme/broken: the hub lists other files than were sent: {name}. ")


# Below those that the system gives to whoever asks for a free one.
NOTHING_LISTENS = "http://127.0.0.1:1"

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"token": ""}, "acme/x: there is no token of Hugging Face: `hf auth login`"),
    "a wrong token": ({"token": "hf_nobody"}, "acme/x: cannot be asked on Hugging Face: Invalid user token"),
    "a token that reads": ({"token": "hf_reader"}, "acme/x: the token of me may only read"),
    "offline": ({"HF_HUB_OFFLINE": True}, "acme/x: HF_HUB_OFFLINE is set"),
    "no network": ({"ENDPOINT": NOTHING_LISTENS}, "acme/x: cannot be asked on Hugging Face: "),
    "no owner": ({"name": "x"}, "'x': a repository is called OWNER/NAME"),
    "a path": ({"name": "/a/b/c"}, "'/a/b/c': a repository is called OWNER/NAME: "),
    "a URL": ({"name": "https://a/b"}, "'https://a/b': a repository is called OWNER/NAME: "),
}


@pytest.mark.parametrize("why", list(REFUSALS))
def test_refused_before_anything_is_sent_or_loaded(
    why: str, server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is not even a run."""
    given, said = REFUSALS[why]
    given = dict(given)
    name, token = given.pop("name", "acme/x"), given.pop("token", None)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    for constant, value in given.items():
        monkeypatch.setattr(huggingface_hub.constants, constant, value)
    with pytest.raises((ConfigError, StorageError)) as caught:
        Repository(name, private=True, replace=False)
    assert str(caught.value).startswith(said)
    assert inline("push", str(tmp_path / "none"), name, check=False).returncode == 2
    assert server.asked == []
    assert server.repositories == {}


def test_export_names_the_way_to_a_hub() -> None:
    done = inline("export", "runs/x", "hf://acme/tiny", check=False)
    assert "hf://acme/tiny: a hub takes a model whole: rondo push runs/x acme/tiny" in done.stderr
