"""What must hold on a CUDA device; run by benchmarks/gpu/run.sh. Skipped without one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from rondo.config import load
from rondo.core.types import GenerateRequest, SamplingParams
from rondo.rollout import NativeEngine
from rondo.trainers.commands.train import train
from tests.rollout.conftest import own_engine
from tests.trainers.conftest import MODEL, RECIPE, metrics

pytestmark = pytest.mark.gpu

PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (4, 9, 17, 30)]


def model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**MODEL, "vocab_size": 128})
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype).eval()


@pytest.mark.parametrize("decode", ["generic", "lean", "auto"])
def test_greedy_equals_generate_on_cuda(decode: str) -> None:
    reference = model(torch.float32)
    sizes = {"max_concurrent": 8, "max_context": 128}
    engine = own_engine(NativeEngine, reference.config, device="cuda", decode=decode, **sizes)
    engine.begin(0)
    for name, tensor in reference.state_dict().items():
        if name in engine.parameters():
            engine.receive(name, tensor)
    engine.commit(0)

    async def generate() -> list[list[int]]:
        sampling = SamplingParams(max_tokens=24, temperature=0.0)
        requests = [GenerateRequest(str(i), ids, sampling) for i, ids in enumerate(PROMPTS)]
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        return [completion.token_ids.tolist() for completion in done]

    ours = asyncio.run(generate())
    engine.close()
    for ids, tokens in zip(PROMPTS, ours, strict=True):
        prompt = torch.tensor(ids, device="cuda")[None].long()
        theirs = reference.generate(prompt, max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        assert tokens == theirs


@pytest.mark.parametrize(
    ("dtype", "gap"), [("float32", 1e-4), ("bfloat16", 0.1)], ids=["float32", "bfloat16"]
)
def test_sampler_and_trainer_agree_on_cuda(tmp_path: Path, dtype: str, gap: float) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    overrides = [
        f"trainer.run_dir={tmp_path / 'run'}",
        "cluster.device=cuda",
        f"actor.compute_dtype={dtype}",
        "checkpoint.every=2",
    ]
    train(load([str(recipe)], overrides))
    for line in metrics(tmp_path / "run")[1:]:
        assert line["rollout/log_prob_gap"] < gap
        assert line["actor/grad_norm"] > 0


def test_cuda_and_cpu_take_the_same_first_step(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    lines = {}
    for device in ("cpu", "cuda"):
        run = tmp_path / device
        overrides = [f"trainer.run_dir={run}", f"cluster.device={device}", "trainer.total_steps=1"]
        overrides.append("actor.compute_dtype=float32")  # the default on CUDA is bfloat16
        train(load([str(recipe)], overrides))
        lines[device] = metrics(run)[1]
    assert lines["cuda"]["reward/mean"] == pytest.approx(lines["cpu"]["reward/mean"], abs=0.05)
    assert lines["cuda"]["actor/grad_norm"] == pytest.approx(lines["cpu"]["actor/grad_norm"], rel=0.05)
