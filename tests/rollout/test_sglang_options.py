"""What is said of SGLang without SGLang: its kernels, its environment, the cores of its workers."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rondo.core.errors import ConfigError
from rondo.models.source import ModelSource
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.sglang.options import ENGINE, ROOM, device_arguments
from tests.messages import full_text

SPEC = EngineSpec("sglang", ModelSource(path="/nowhere"), "bfloat16", "cpu", 1000, 4, 2)
CORES = "SGLANG_CPU_OMP_THREADS_BIND"


def test_a_cpu_needs_kernels_that_a_gpus_build_does_not_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=full_text("its kernels (sgl_kernel) are built")):
        ENGINE.check_build("sglang", "0.5.23", "cpu")
    ENGINE.check_build("sglang", "0.5.23", "cuda:0")  # there they come with it
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").touch()
    importlib.invalidate_caches()
    ENGINE.check_build("sglang", "0.5.23", "cpu")


def test_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    everywhere = {
        "OMP_NUM_THREADS": "2",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "rondo.rollout.sglang.models",
    }
    assert ENGINE.environment(replace(SPEC, device="cuda:0")) == everywhere
    on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    assert ENGINE.environment(SPEC) == everywhere | on_cpu


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "bound"),
    [
        ([3, 0, 2, 1], 2, 2, "0,1|2,3"),
        ([0, 1, 2, 3], 1, 2, "0|1"),
        ([4, 5, 6], 8, 2, "4|5"),  # as many as all of them can have
        ([7], 2, 2, "7|7"),
        ([0, 1, 2, 3, 4, 5], 8, 3, "0,1|2,3|4,5"),
    ],
)
def test_workers_have_cores_of_their_own(
    cores: list[int], threads: int, workers: int, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores))
    spec = replace(SPEC, threads=threads, tensor_parallel=workers)
    assert ENGINE.environment(spec)[CORES] == bound
    assert CORES not in ENGINE.environment(replace(spec, tensor_parallel=1))


def test_without_a_device_the_cache_is_for_all_requests() -> None:
    given = device_arguments(SPEC)
    assert (given["device"], given["max_total_tokens"]) == ("cpu", 4 * (1000 + ROOM))
