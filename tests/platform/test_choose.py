"""Which platform: of a device, of cluster.device, of a process that rondo starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from rondo.config import load
from rondo.config.schema import ClusterConfig
from rondo.controller.ray_backend import assigned_device, bundle_of
from rondo.controller.remote import worker_environment
from rondo.core.errors import ConfigError
from rondo.models.source import ModelSource
from rondo.platform import built_in, hidden, named_in_environment, on_host, planned, platform_of
from rondo.platform.cuda import Cuda
from rondo.rollout import EngineSpec, check_engine
from rondo.rollout.server.client import visible_devices
from tests.platform.own import LOG
from tests.trainers.conftest import PYTHONPATH, RECIPE, inline, metrics

OWN = str(Path(__file__).parent / "own.py") + ":Own"


def test_rondo_has_two() -> None:
    assert [one.kind for one in built_in()] == ["cpu", "cuda"]
    assert platform_of("cuda:3") is platform_of(torch.device("cuda")) is planned("cuda")
    assert [on_host(device) for device in ("cpu", "cuda:1", "meta")] == [True, False, False]
    assert hidden() == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(("sees", "kind"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_cuda_where_torch_sees_it(monkeypatch: pytest.MonkeyPatch, sees: bool, kind: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    assert planned("auto").kind == kind


def test_a_kind_that_nobody_described() -> None:
    with pytest.raises(ConfigError, match="no platform for 'xpu' devices"):
        platform_of("xpu:0")


def test_one_of_a_path_is_that_of_its_kind(only_here: None) -> None:
    own = planned(OWN)
    assert (own.name, own.path, planned("cuda").path) == (OWN, OWN, "")
    assert platform_of("cpu") is own
    assert hidden() == {"OWN_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}
    assert named_in_environment(own) == {"RONDO_PLATFORM": OWN}
    assert bundle_of("cpu") == {"CPU": 1, "own_core": 1}
    assert own.ray_options() == {"resources": {"own_core": 1}}
    assert assigned_device(own, ["1"]) == "cpu"
    assert planned("cpu") is platform_of("cpu") is not own  # the next recipe says so


@pytest.mark.slow
def test_a_process_finds_what_its_parent_named(only_here: None) -> None:
    config = ClusterConfig(device=OWN, env={"A": 1})
    told = worker_environment(config, 2)
    assert (told["RONDO_PLATFORM"], told["A"], told["OMP_NUM_THREADS"]) == (OWN, "1", "2")
    code = "from rondo.platform import platform_of; print(type(platform_of('cpu')).__name__)"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    for extra, name in (({}, "Cpu"), (named_in_environment(planned(OWN)), "Own")):
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment | extra, capture_output=True, text=True, check=True
        )
        assert ran.stdout.strip() == name


def test_an_engines_process_sees_its_devices(only_here: None) -> None:
    planned(OWN)
    spec = EngineSpec(
        ModelSource(config={}),
        "native",
        device="cpu",
        dtype="float32",
        threads=1,
        max_context=8,
        max_concurrent=1,
    )
    own = {"RONDO_PLATFORM": OWN, "OWN_VISIBLE_DEVICES": "5"}
    assert visible_devices(spec, ["5", "7"]) == (spec, own)


def test_engines_of_others_are_refused_where_nobody_has_seen_them(only_here: None) -> None:
    planned(OWN)
    check_engine("native", {}, device="cpu")
    with pytest.raises(ConfigError, match="nobody has seen vLLM run"):
        check_engine("vllm", {}, device="cpu")


BROKEN = {
    "a driver that is gone": (OWN.replace(":Own", ":Broken"), "driver gone"),
    "a count that is no number": (OWN.replace(":Own", ":Words"), "count() is 'two'"),
    "no such file": ("nowhere.py:Own", "there is no file"),
    "no such name": (OWN.replace(":Own", ":Onw"), "Onw"),
    "no platform": (OWN.replace(":Own", ":Half"), "it makes Half"),
    "one that fails": (OWN.replace(":Own", ":Fails"), ":Fails raised RuntimeError: no driver"),
    "no such device": (OWN.replace(":Own", ":Unsaid"), "no devices of kind 'abacus'"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_path_that_leads_to_none(broken: str) -> None:
    path, says = BROKEN[broken]
    with pytest.raises(ConfigError, match=re.escape(says)):
        planned(path)


def test_what_a_recipe_may_say() -> None:
    settings = ["model.path=m", "trainer.total_steps=1"]
    assert load([], [*settings, f"cluster.device={OWN}"]).config.cluster.device == OWN
    with pytest.raises(ConfigError, match="did you mean 'cuda'"):
        load([], [*settings, "cluster.device=cdua"])


def test_its_variable_is_rondos(only_here: None) -> None:
    config = ClusterConfig(device=OWN, env={"OWN_VISIBLE_DEVICES": "3"})
    with pytest.raises(ConfigError, match=r"cluster\.env\.OWN_VISIBLE_DEVICES"):
        worker_environment(config, 1)


def test_rocm_is_cuda_with_another_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `rondo doctor` says where there is no device."""
    for version, says in (
        (SimpleNamespace(cuda=None, hip=None), "this torch is built without CUDA: rondo runs on the CPU"),
        (SimpleNamespace(cuda="13.0", hip=None), "torch is built for CUDA 13.0, but sees no device"),
        (SimpleNamespace(cuda=None, hip="7.1"), "torch is built for ROCm 7.1, but sees no device"),
    ):
        monkeypatch.setattr(torch, "version", version)
        assert Cuda().why_none()[0] == says


@pytest.mark.slow
def test_a_run_on_one_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_here: None) -> None:
    """Its processes compute as it says, and each sees its own device."""
    told, run, recipe = tmp_path / "told", tmp_path / "run", tmp_path / "tiny.yaml"
    told.mkdir()
    recipe.write_text(yaml.safe_dump(RECIPE))
    monkeypatch.setenv(LOG, str(told))
    backend = ("cluster.backend=process", "cluster.devices=2")
    inline("train", str(recipe), f"cluster.device={OWN}", *backend, f"trainer.run_dir={run}")
    assert sorted(path.read_text() for path in told.iterdir()) == ["0", "1"]
    said = yaml.safe_load((run / "config.yaml").read_text())
    assert (said["cluster"]["device"], said["actor"]["compute_dtype"]) == (OWN, "bfloat16")
    steps = [line for line in metrics(run) if "actor/grad_norm" in line]
    assert len(steps) == 3
    assert all(0 < line["rollout/log_prob_gap"] < 0.1 for line in steps)
