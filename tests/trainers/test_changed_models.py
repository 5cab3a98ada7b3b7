"""A run goes on with the models, templates and code that it began with, or says that they are others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from rondo.config import load
from rondo.models.files import digests_in
from rondo.trainers.loop.named import changed_files, named_files
from tests.trainers.conftest import RECIPE, inline, metrics, saved_model

KL = "algorithm.kl={name: k3, where: loss, coef: 0.01}"
TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    path = saved_model(tmp_path_factory.mktemp("made") / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def edited(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def trained(folder: Path, change: Callable[[torch.Tensor], Any] = torch.Tensor.zero_) -> None:
    """Changes one tensor of a model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors["model.layers.1.mlp.up_proj.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def begin(folder: Path, made: Path, *settings: str) -> list[str]:
    """One step; returns the arguments that go on with it."""
    for name in ("model", "other"):
        shutil.copytree(made, folder / name)
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "mine.py").write_text(
        "def even(prompt, trajectory):\n    return len(trajectory.text) % 2 * 1.0\n"
    )
    recipe = {**RECIPE, "model": {"path": str(folder / "model")}}
    recipe["reward"] = {"functions": [{"name": f"{folder / 'mine.py'}:even"}]}
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    again = ["train", str(folder / "r.yaml"), f"trainer.run_dir={folder / 'run'}", "checkpoint.every=1"]
    again += ["data.eval=[]", "trainer.evaluation.every=null", "tracking.console=plain", *settings]
    inline(*again, "trainer.total_steps=1")
    return again


def test_another_model_under_the_same_name_is_refused(made: Path, tmp_path: Path) -> None:
    """Nothing of the reference is in a checkpoint: another one would be measured against from there on."""
    again, model = begin(tmp_path, made, KL), tmp_path / "model"
    for change, files in (
        (lambda: trained(model), "model.safetensors"),
        (lambda: edited(model / "config.json", rms_norm_eps=1e-3), "config.json"),
        (lambda: edited(model / "generation_config.json", eos_token_id=[1, 2]), "generation_config.json"),
        (lambda: edited(model / "tokenizer_config.json", model_max_length=7), "tokenizer_config.json"),
        (lambda: (model / "chat_template.jinja").write_text(TEMPLATE + "?"), "chat template"),
    ):
        change()
        done = inline(*again, "trainer.total_steps=2", check=False)
        assert done.returncode == 2
        assert f"\n    model.path: {model} ({files})\n  Put it back" in done.stderr
        assert "damaged" not in done.stderr
        shutil.rmtree(model)
        shutil.copytree(made, model)
    # The same by other means: what programs note of themselves, another order, another place of the template.
    settings = json.loads((model / "config.json").read_text())
    later = {**dict(reversed(settings.items())), "transformers_version": "99.0", "_name_or_path": "x"}
    (model / "config.json").write_text(json.dumps(later))
    (model / "chat_template.jinja").unlink()
    edited(model / "tokenizer_config.json", chat_template=TEMPLATE)
    inline(*again, "trainer.total_steps=2")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


def test_a_file_of_the_template_a_reference_and_code(made: Path, tmp_path: Path) -> None:
    chat, other = tmp_path / "chat.jinja", tmp_path / "other"
    settings = (f"model.chat_template={chat}", f"reference.path={other}", KL)
    again = begin(tmp_path, made, *settings)
    (tmp_path / "model/chat_template.jinja").write_text("which nobody reads")
    chat.write_text(TEMPLATE + "?")
    trained(other)
    done = inline(*again, "trainer.total_steps=2", check=False)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("    ")] == [
        f"    model.chat_template: {chat}",
        f"    reference.path: {other} (model.safetensors)",
    ]
    chat.write_text(TEMPLATE)
    shutil.copy(made / "model.safetensors", other)
    (tmp_path / "mine.py").write_text("def even(prompt, trajectory):\n    return 0.5\n")
    done = inline(*again, "trainer.total_steps=2")
    said = " ".join((done.stdout + done.stderr).split())
    assert f"what has changed under its name: reward.functions.0.name: {tmp_path / 'mine.py'}:even" in said


def test_a_checkpoint_of_an_older_rondo_says_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("rondo.trainers.loop.checkpoints.named_files", lambda config: {})
        again = begin(tmp_path, made)
    assert not (tmp_path / "run/checkpoints/step-00000001/named.json").exists()
    edited(tmp_path / "model/config.json", rms_norm_eps=1e-3)
    inline(*again, "trainer.total_steps=2")
    edited(tmp_path / "model/config.json", rms_norm_eps=1e-6)  # from the next one on it does
    done = inline(*again, "trainer.total_steps=3", check=False)
    assert "(config.json)" in done.stderr


def test_no_hub_is_asked_for_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rondo.trainers.loop.named.local_folder", lambda *given, **named: given[0] / 0)
    base = ["model.config={model_type: qwen3}", "trainer.total_steps=1"]
    for name in (
        "rondo.recipes.quickstart.tokenizer",
        "tests/byte_tokenizers.py:made",
        "installed:tokenizer",
    ):
        found = named_files(load([], [*base, f"model.tokenizer={name}"]).config)
        assert list(found) == ["model.tokenizer"] * name.startswith("tests/")


def test_another_name_is_another_setting() -> None:
    def named(name: str, at: str | None, digest: str) -> dict[str, Any]:
        return {"teacher.path": {"name": name, "at": at, "files": {"config.json": digest}}}

    for before, now, lines in (
        (named("acme/a", None, "1"), named("acme/b", None, "2"), []),
        (named("a", "/x/a", "1"), named("b", "/x/b", "2"), []),
        (named("acme/a", None, "1"), named("acme/a", None, "2"), ["teacher.path: acme/a (config.json)"]),
        (named("a", "/x/a", "1"), named("/x/a", "/x/a", "2"), ["teacher.path: /x/a (config.json)"]),
        (named("a", "/x/a", "1"), named("a", "/y/a", "1"), []),
    ):
        assert changed_files(before, now) == ([], lines)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_are_told_apart_without_reading_them(made: Path, tmp_path: Path, name: str) -> None:
    """A change of one whole tensor is seen, and so are other names and sizes."""
    tensors = {"a": torch.arange(100_000.0), "b": torch.ones(3, 4)}

    def written(tensors: dict[str, torch.Tensor], note: str = "") -> str:
        if name.endswith(".bin"):
            torch.save(tensors, tmp_path / name)
        else:
            save_file(tensors, tmp_path / name, metadata={"format": "pt", "note": note})
        return digests_in(tmp_path)[name]

    first = written(tensors)
    assert written(tensors, note="by another program") == first
    others = (
        {**tensors, "a": tensors["a"] + 1},
        {**tensors, "b": 2 * tensors["b"]},
        {**tensors, "b": torch.ones(4, 3)},
        {"a": tensors["a"], "c": tensors["b"]},
    )
    assert len({first, *map(written, others)}) == 5


def test_an_export_from_another_directory_is_of_the_same_model(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both directories there is a folder called model."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    monkeypatch.chdir(here)
    begin(here, made, "model.path=model", "trainer.run_dir=run")
    shutil.copytree(made, there / "model")
    edited(there / "model/config.json", rms_norm_eps=1e-3)
    (there / "model/chat_template.jinja").write_text("another")
    monkeypatch.chdir(there)
    inline("export", str(here / "run"), "out")
    assert json.loads((there / "out/config.json").read_text())["rms_norm_eps"] == 1e-6
    assert (there / "out/chat_template.jinja").read_text() == TEMPLATE
    # Its own folder is gone, or another one by now: nothing is exported with the settings of that.
    trained(here / "model")  # the weights are the checkpoint's
    inline("export", str(here / "run"), "again")
    assert (there / "again/model.safetensors").read_bytes() == (there / "out/model.safetensors").read_bytes()
    shutil.move(here / "model", here / "elsewhere")
    done = inline("export", str(here / "run"), "late", check=False)
    assert done.returncode == 2
    assert f"\n    model.path: {there / 'model'} (chat template, config.json)\n" in done.stderr
    assert not (there / "late").exists()
