"""vLLM for itself: what the conformance suite, which all engines pass, does not ask."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm_names
from rondo.core.errors import ConfigError, ReplicaLostError, RolloutError, WeightSyncError
from rondo.core.types import Completion, GenerateRequest, SamplingParams
from rondo.models.loading import load_model_config
from rondo.models.source import ModelSource
from rondo.rollout import check_engine, start_engine
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.vllm.options import ENGINE, engine_arguments
from rondo.weights.checksum import checksum
from tests.engines.conftest import paused_in_flight
from tests.messages import full_text

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-engines"),
    pytest.mark.timeout(900),  # starting three processes is 40 CPU-seconds, on a quick machine
]

TINY = {
    "vocab_size": 130,  # no multiple of 64: vLLM pads it
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
TIED = ModelSource(config={"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True, **TINY})
UNTIED = ModelSource(config={"model_type": "qwen2", "tie_word_embeddings": False, **TINY})  # with biases
PROMPT = np.arange(5, 25, dtype=np.int32)
names = itertools.count()


def spec_of(source: ModelSource, tensor_parallel: int = 1, **options: Any) -> EngineSpec:
    return EngineSpec(
        "vllm", source, "float32", "cpu", 256, 16, 1, tensor_parallel=tensor_parallel, options=options
    )


class Policy:
    """A model with two versions of its weights: the trainer's side, and the log-probs that they give."""

    def __init__(self, source: ModelSource) -> None:
        self.models = {}
        for version in (1, 2):
            torch.manual_seed(version)
            config = load_model_config(source)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
            self.models[version] = model.eval()

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.models[version].named_parameters()}

    def send(self, engine: Any, version: int) -> None:
        engine.begin(version)
        for name, tensor in self.tensors(version).items():
            engine.receive(name, tensor)
        sums = {name: checksum(tensor) for name, tensor in self.tensors(version).items()}
        engine.commit(version, sums)

    @torch.no_grad()
    def gap(self, completion: Completion, temperature: float = 1.0) -> float:
        """The largest difference to the log-probs of the version that each token says it is from."""
        ids = torch.tensor(np.concatenate([PROMPT, completion.token_ids])[None], dtype=torch.long)
        gaps = []
        for version in np.unique(completion.policy_versions):
            logits = self.models[int(version)](input_ids=ids, use_cache=False).logits[0].float()
            log_probs = (logits / temperature).log_softmax(-1)[len(PROMPT) - 1 : -1]
            own = log_probs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
            mine = completion.policy_versions == version
            gaps.append(np.abs(own - completion.log_probs)[mine].max())
        return float(max(gaps))


def ask(name: str, num: int, temperature: float = 1.0, seed: int = 0, **more: Any) -> GenerateRequest:
    prefix = more.pop("prefix", None)
    sampling = SamplingParams(num, temperature=temperature, **more)
    return GenerateRequest(name, PROMPT, sampling, seed=seed, prefix=prefix)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 600))


@pytest.fixture(scope="module")
def tied() -> Iterator[tuple[Any, Policy]]:
    policy, engine = Policy(TIED), start_engine(spec_of(TIED, block_size=32), bucket_bytes=40_000)
    policy.send(engine, 1)
    yield engine, policy
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_log_probs_are_after_temperature_and_before_truncation(
    tied: tuple[Any, Policy], temperature: float
) -> None:
    engine, policy = tied

    async def several() -> list[Completion]:
        """Of all kinds in one batch: greedy, plain, truncated."""
        requests = [
            ask("greedy", 30, 0.0),
            ask("plain", 30, 1.3, seed=3),
            ask("cut", 30, temperature, seed=4, top_p=0.8, top_k=20, min_p=0.05),
        ]
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    greedy, plain, cut = run(several())
    assert policy.gap(greedy) < 1e-5
    assert policy.gap(plain, 1.3) < 1e-5
    assert policy.gap(cut, temperature or 1.0) < 1e-5


def test_a_prefix_goes_on_with_the_same_noise_in_any_batch(tied: tuple[Any, Policy]) -> None:
    engine, policy = tied

    async def whole_and_rest() -> tuple[Completion, Completion]:
        whole = await engine.generate(ask("whole", 60, seed=7))
        part = dataclasses.replace(
            whole,
            token_ids=whole.token_ids[:25],
            log_probs=whole.log_probs[:25],
            policy_versions=whole.policy_versions[:25],
        )
        mates = [engine.generate(ask(f"mate{i}", 20 + i, seed=i)) for i in range(5)]
        rest, *_ = await asyncio.gather(engine.generate(ask("rest", 60, seed=7, prefix=part)), *mates)
        return whole, rest

    whole, rest = run(whole_and_rest())
    assert rest.token_ids.tolist() == whole.token_ids.tolist()
    assert len(np.unique(whole.token_ids)) > 20  # it was sampled
    assert rest.prompt_ids.tolist() == PROMPT.tolist()
    np.testing.assert_allclose(rest.log_probs, whole.log_probs, atol=1e-5)
    assert policy.gap(rest) < 1e-5


def broken(policy: Policy, fault: str) -> dict[str, torch.Tensor]:
    tensors = policy.tensors(2)
    name = "model.layers.1.self_attn.k_proj.weight"
    if fault == "shape":
        tensors[name] = tensors[name][:16].contiguous()
    elif fault == "name":
        tensors["model.layers.9.self_attn.k_proj.weight"] = tensors.pop(name)
    else:
        del tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shape", full_text("k_proj.weight' has shape (16, 128)")),
        ("name", full_text("no parameter 'model.layers.9.self_attn")),
        ("missing", full_text("did not arrive: model.layers.1.self_attn")),
        ("bytes", full_text("self_attn.k_proj.weight' is not what was")),
    ],
)
def test_a_failed_update_stops_serving_until_the_next(
    tied: tuple[Any, Policy], fault: str, message: str
) -> None:
    engine, policy = tied
    before = run(engine.generate(ask("before", 20, 0.0)))

    async def fail_in_mid_generation() -> None:
        held = await paused_in_flight(engine, lambda: [ask(f"waiting{next(names)}", 200, seed=1)], 1)
        with pytest.raises(WeightSyncError, match=message):
            await asyncio.to_thread(update)
        await engine.resume()
        with pytest.raises(WeightSyncError, match="update of the weights failed"):
            await held.tasks[0]
        with pytest.raises(WeightSyncError, match="update of the weights failed"):
            await engine.generate(ask("after", 3))

    def update() -> None:
        tensors = policy.tensors(2) if fault == "bytes" else broken(policy, fault)
        engine.begin(2)
        for name, tensor in tensors.items():
            engine.receive(name, tensor)
        sums = {name: checksum(tensor) for name, tensor in policy.tensors(2).items()}
        if fault == "bytes":
            sums["model.layers.1.self_attn.k_proj.weight"] += 1
        engine.commit(2, sums)

    run(fail_in_mid_generation())
    policy.send(engine, 1)  # a whole update later it is as before
    after = run(engine.generate(ask("again", 20, 0.0)))
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert policy.gap(after) < 1e-5


def test_prompts_are_found_in_the_cache_but_not_across_an_update(tied: tuple[Any, Policy]) -> None:
    engine, policy = tied
    long = np.tile(PROMPT, 8)  # five blocks of 32

    async def hit_rate(name: str) -> float:
        await engine.stats()
        await engine.generate(GenerateRequest(name, long, SamplingParams(2), seed=1))
        return float((await engine.stats()).values()["rollout/cache_hit_rate"])

    assert run(hit_rate("first")) == 0
    assert run(hit_rate("second")) == 128 / 160  # the last block is computed always
    policy.send(engine, 1)
    assert run(hit_rate("third")) == 0


def test_tensor_parallel_with_untied_weights_and_a_lost_worker() -> None:
    """Two workers: greedy tokens of transformers, a swap in mid-generation, and a worker that is killed."""
    policy, engine = Policy(UNTIED), start_engine(spec_of(UNTIED, 2), bucket_bytes=40_000)
    processes = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    policy.send(engine, 1)

    async def swap() -> Completion:
        held = await paused_in_flight(engine, lambda: [ask(f"swap{next(names)}", 150, seed=5)], 1)
        await asyncio.to_thread(policy.send, engine, 2)
        await engine.resume()
        return await held.tasks[0]

    async def lose_a_worker() -> ReplicaLostError:
        held = await paused_in_flight(engine, lambda: [ask(f"lost{next(names)}", 200, seed=5)], 1)
        next(process for process in processes if "Worker_TP1" in process.name()).kill()
        with contextlib.suppress(ReplicaLostError):  # it may have been noticed
            await engine.resume()
        with pytest.raises(ReplicaLostError) as lost:
            await held.tasks[0]
        return lost.value

    greedy = run(engine.generate(ask("greedy", 30, 0.0)))
    model = policy.models[1]
    expected = model.generate(
        torch.tensor(PROMPT[None], dtype=torch.long), max_new_tokens=30, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :]
    assert greedy.token_ids.tolist() == expected.tolist()
    swapped = run(swap())
    assert 0 < (swapped.policy_versions == 1).sum() < 150
    assert policy.gap(greedy) < 1e-5
    assert policy.gap(swapped) < 1e-5
    partial = run(lose_a_worker()).partial
    assert isinstance(partial, Completion)
    assert len(partial.token_ids) > 0
    assert policy.gap(partial) < 1e-5
    engine.close()
    assert not psutil.wait_procs(processes, timeout=60)[1]


def test_options_are_vllms_own() -> None:
    check_engine("vllm", {"block_size": 32, "max_num_batched_tokens": 512}, device="cpu")
    cases = {
        "max_num_batch_tokens": "no engine argument .*; did you mean 'max_num_batched_tokens'",
        "dtype": "rondo sets this; it is governed by rollout.dtype",
        "tensor_parallel_size": "rollout.engine.tensor_parallel",
        "generation_config": "governed by the keys of rollout",
        "speculative_config": "not supported with rondo",
        "kv_offloading_size": "not supported with rondo: keys and values of old weights",
        "logits_processors": "not supported with rondo",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=rf"rollout.engine.{name}.*{message}"):
            check_engine("vllm", {name: 1}, device="cpu")
    with pytest.raises(ConfigError, match="the CPU build, but the device is cuda:0"):
        check_engine("vllm", {}, device="cuda:0")


def test_capabilities_and_environment_by_device() -> None:
    assert not ENGINE.capabilities({}, "cpu").sleep
    assert not ENGINE.capabilities({"enable_sleep_mode": True}, "cpu").sleep
    assert ENGINE.capabilities({"enable_sleep_mode": True}, "cuda:0").sleep
    assert ENGINE.environment(spec_of(TIED))["OMP_NUM_THREADS"] == "1"


def test_a_temperature_that_vllm_would_change_is_refused(tied: tuple[Any, Policy]) -> None:
    with pytest.raises(RolloutError, match=full_text("temperature 0.005, only at 0 (greedy)")):
        run(tied[0].generate(ask("cold", 3, 0.005)))


def test_sleep_is_an_error_on_a_cpu(tied: tuple[Any, Policy]) -> None:
    with pytest.raises(RolloutError, match="cannot sleep here"):
        run(tied[0].sleep())


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    """Of a model type that is known to work in another version."""
    from rondo.rollout.vllm.core import _check_architecture

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["CodeGenForCausalLM"]}))
    with pytest.raises(ConfigError, match=full_text("does not know the architecture")):
        _check_architecture(tmp_path, spec_of(ModelSource(config={"model_type": "qwen3"})))


def test_a_bad_value_of_an_option_carries_vllms_message() -> None:
    with pytest.raises(RolloutError, match=full_text("max_num_batched_tokens")):
        start_engine(spec_of(TIED, max_num_batched_tokens=1))


def test_the_installed_vllm_is_what_the_table_says() -> None:
    """Of 0.32.0, which benchmarks/vllm_names.py read in the wheel for CUDA."""
    version = ENGINE.installed()[1].split("+")[0]
    rows = [line.split("\t") for line in Path("benchmarks/vllm_names.tsv").read_text().splitlines()]
    listed = sorted((name, what) for name, what, versions in rows if version in versions.split())
    assert listed == sorted(vllm_names.names_in(ENGINE.folder()))


def with_vllm(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process that may import vLLM."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | ENGINE.environment(spec_of(TIED)),
        capture_output=True,
        text=True,
        check=False,
    )


def test_tokens_without_log_probs_are_never_sampled() -> None:
    """Where nobody asks for them vLLM 0.33 samples by itself on ROCm."""
    program = """
from types import SimpleNamespace

import torch

from rondo.rollout.vllm.worker import VllmCountedSampler

runner = SimpleNamespace(sampler=SimpleNamespace(use_fp64_gumbel=False))
metadata = SimpleNamespace(max_num_logprobs=None)
try:
    VllmCountedSampler(runner, [])(torch.zeros(2, 5), metadata)
except AssertionError:
    print("refused")
"""
    done = with_vllm(program)
    assert done.stdout.split()[-1:] == ["refused"], done.stderr


def test_vllm_starts_beside_a_trainer_and_knows_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check of the device's memory, on a card of which the trainer has left 9 of 80 GiB."""
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * gib, 80 * gib))
    arguments = engine_arguments(dataclasses.replace(spec_of(TIED), device="cuda:0"), Path("folder"))
    assert arguments.keys() <= ENGINE.arguments
    program = f"""
from types import SimpleNamespace
from vllm.v1.worker.utils import request_memory

card = SimpleNamespace(total_memory=80 << 30, free_memory=9 << 30, device_="cuda:0")
print(request_memory(card, SimpleNamespace(gpu_memory_utilization={arguments["gpu_memory_utilization"]})))
"""
    done = with_vllm(program)
    assert done.stdout.split()[-1:] == [str(4 * gib)], done.stderr
