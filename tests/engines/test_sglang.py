"""SGLang for itself: what the conformance suite, which all engines pass, does not ask."""

from __future__ import annotations

import asyncio
import fnmatch
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from rondo.core.errors import ConfigError, ReplicaLostError
from rondo.core.types import Completion
from rondo.models.source import ModelSource
from rondo.rollout import check_engine, start_engine
from rondo.rollout.sglang.options import ENGINE, model_module
from tests.engines.conftest import (
    LONG,
    QWEN3,
    TOLERANCE,
    Bench,
    engine_spec,
    gaps,
    greedy,
    no_children_left,
    paused_in_flight,
    prompt,
    request,
)
from tests.messages import full_text

INSTALLED = importlib.util.find_spec("sglang") is not None
# Untied, with biases of queries, keys and values, without norms of heads.
QWEN2 = {key: value for key, value in QWEN3.items() if key != "head_dim"} | {
    "model_type": "qwen2",
    "hidden_size": 128,
    "tie_word_embeddings": False,
}
pytestmark = pytest.mark.timeout(900)  # the start of an engine included, on a machine that is slow
needs_sglang = pytest.mark.skipif(not INSTALLED, reason="needs SGLang: make test-engines")

# ---- without SGLang ----


@pytest.mark.skipif(INSTALLED, reason="SGLang is installed here")
def test_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"needs SGLang.*make test-engines"):
        check_engine("sglang", {}, device="cpu")


def test_on_a_cpu_it_needs_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them its process would die in an import."""
    monkeypatch.setattr(ENGINE, "installed", lambda: ("sglang", "0.5.23"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=full_text("built for GPUs only; `make test-engines`")):
        ENGINE.check({}, "cpu")
    ENGINE.check({}, "cuda:0")


def test_environment_of_the_process() -> None:
    here = ENGINE.environment(engine_spec("sglang"))
    assert here["OMP_NUM_THREADS"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in here
    bound = ENGINE.environment(engine_spec("sglang", tensor_parallel=2))["SGLANG_CPU_OMP_THREADS_BIND"]
    two = bound.split("|")
    assert len(two) == 2
    assert {int(core) for core in two} <= os.sched_getaffinity(0)
    assert "SGLANG_USE_CPU_ENGINE" not in ENGINE.environment(engine_spec("sglang", device="cuda:0"))


def test_stand_ins() -> None:
    """What a .pth file has the processes of .venv-engines import: kernels that are missing."""
    program = """
import rondo_engines_on_cpus
import importlib.util, torch
if importlib.util.find_spec("torchvision") is not None:
    import torchvision
import sgl_kernel
keys = [torch.arange(4.0), torch.arange(4.0)]
sgl_kernel.copy_all_layer_kv_cache_cpu(keys[:1], keys[1:], torch.tensor([0]), torch.tensor([3]))
assert [t.tolist() for t in keys] == [[3.0, 1.0, 2.0, 3.0]] * 2
from sgl_kernel.flash_attn import something
try:
    something(1)
except NotImplementedError as error:
    assert "sgl_kernel.flash_attn.something" in str(error)
try:
    import sgl_kernel.scalar_type
except ModuleNotFoundError:
    print("as expected")
"""
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).with_name("cpu"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "as expected", done.stderr


# ---- options ----


@needs_sglang
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_total_token": 5}, full_text("did you mean 'max_total_tokens'")),
        ({"tp_size": 2}, full_text("tp_size…rollout")),
        ({"sampling_backend": "flashinfer"}, "sampler is rondo's"),
        ({"quantization": "fp8"}, "not supported with rondo"),
        ({"speculative_algorithm": "EAGLE"}, "drafted tokens"),
        ({"dp_size": 2}, r"rollout\.replicas"),
        ({"offload_group_size": 2}, "an update would not reach"),
    ],
)
def test_options_are_checked(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine("sglang", options, device="cpu")


@needs_sglang
def test_options_that_pass_and_what_they_give() -> None:
    ENGINE.check({"max_total_tokens": 4096, "disable_radix_cache": True}, "cpu")
    assert len(ENGINE.arguments) > 300
    assert not ENGINE.capabilities({"enable_memory_saver": True}, "cpu").sleep
    assert ENGINE.capabilities({"enable_memory_saver": True}, "cuda:0").sleep
    with pytest.raises(ConfigError, match=r"rollout\.sleep.*CPU"):
        ENGINE.check({}, "cpu", sleep=True)


@needs_sglang
def test_every_argument_that_rondo_names_exists() -> None:
    for pattern in (*ENGINE.governed, *ENGINE.refused):
        assert fnmatch.filter(ENGINE.arguments, pattern), pattern


@needs_sglang
def test_a_parameter_that_no_tensor_reaches_is_named() -> None:
    program = """
import torch
from rondo.rollout.sglang.worker import Delivery, _carried_out
from rondo.weights.bucket import BucketWriter
from rondo.weights.checksum import checksum

class Model(torch.nn.Linear):
    def load_weights(self, tensors):  # as SGLang's: what it does not know it passes over
        for name, tensor in tensors:
            if name in dict(self.named_parameters()):
                self.get_parameter(name).data.copy_(tensor)

model, answers = Model(3, 2), []
def send(bucket):
    delivery = Delivery.of_name(Delivery("bucket", "", bucket).as_name())
    assert delivery.bucket == bucket
    answers.append(_carried_out(delivery, model))
    return lambda: None

_carried_out(Delivery("blank", ""), model)
weight = torch.randn(2, 3)
writer = BucketWriter(1 << 10, send)
writer.add("weight", weight)
writer.add("other", torch.ones(2))
writer.finish()
assert answers == [{"checksums": {"weight": checksum(weight), "other": checksum(torch.ones(2))}}]
assert torch.equal(model.weight, weight)
print(_carried_out(Delivery("inspect", ""), model))
"""
    variables = os.environ | ENGINE.environment(engine_spec("sglang"))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["{'unset': ['bias']}"], done.stderr


@needs_sglang
def test_models() -> None:
    assert model_module(["Qwen3ForCausalLM"]) == "sglang.srt.models.qwen3"
    with pytest.raises(ConfigError, match=full_text("no model GPTNeoXForCausalLM")):
        model_module(["GPTNeoXForCausalLM"])


# ---- in its process ----


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "gpt_neox", "hidden_size": 64},
            full_text("a gpt_neox model has not been seen"),
        ),
        (QWEN3 | {"max_position_embeddings": 500}, "positions for 500 tokens"),
    ],
    ids=["model", "length"],
)
def test_why_it_cannot_be_built(config: dict[str, object], words: str) -> None:
    left = no_children_left({child.pid for child in psutil.Process().children(recursive=True)})
    with pytest.raises(ConfigError, match=words):
        start_engine(engine_spec("sglang", source=ModelSource(config=config)))
    assert not left()


@needs_sglang
@pytest.mark.slow
def test_tensor_parallel_with_untied_weights_and_a_lost_worker() -> None:
    """Two workers: greedy tokens of transformers, a swap in mid-generation, and a worker that is killed."""
    left = no_children_left({child.pid for child in psutil.Process().children(recursive=True)})
    source = ModelSource(config=QWEN2)
    engine = start_engine(engine_spec("sglang", source=source, tensor_parallel=2), bucket_bytes=1 << 16)
    bench = Bench("sglang", engine, QWEN2)
    first = bench.load(bench.model)
    prompts = [prompt(length) for length in (3, 17, 40)]
    for ids, out in zip(
        prompts, bench.run(request(ids, 16, temperature=0.0) for ids in prompts), strict=True
    ):
        np.testing.assert_array_equal(out.token_ids, greedy(bench.model, ids, 16))
        assert gaps(bench.model, out).max() < TOLERANCE

    async def swap_and_lose() -> tuple[Completion, ReplicaLostError]:
        held = await paused_in_flight(engine, lambda: [request(prompt(6), LONG, seed=5)], 5)
        await asyncio.to_thread(bench.load, bench.other)
        await engine.resume()
        await held.seen[0].at_least(len(held.seen[0].token_ids) + 5, held.tasks[0])
        await engine.cancel(held.requests[0].request_id)
        swapped = await held.tasks[0]
        held = await paused_in_flight(engine, lambda: [request(prompt(6), LONG)], 5)
        children = psutil.Process(engine.pid).children(recursive=True)
        next(child for child in children if "sglang::schedul" in child.name()).kill()
        with pytest.raises(ReplicaLostError) as lost:
            await held.tasks[0]
        return swapped, lost.value

    try:
        swapped, lost = asyncio.run(swap_and_lose())
    finally:
        engine.close()
    old = swapped.policy_versions == first
    assert 5 <= old.sum() < len(old)
    assert gaps(bench.model, swapped)[old].max() < TOLERANCE
    assert gaps(bench.other, swapped)[~old].max() < TOLERANCE
    assert isinstance(lost.partial, Completion)
    assert len(lost.partial.token_ids) >= 5
    assert gaps(bench.other, lost.partial).max() < TOLERANCE
    assert not left()
