"""Whole runs on a CUDA device, a few steps each: every role, engine and way of training that one card can
hold.

Each says of itself whether it is right: the canary and `rollout/log_prob_gap` compare what was sampled with
what the trainer computes, before the run and in every step.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.models.families import config_of
from tests.trainers.conftest import MODEL, RECIPE, SFT_RECIPE, inline, metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

F32 = "actor.compute_dtype=float32"
GAE = ["algorithm.advantage={name: gae, gamma: 1.0, lam: 0.95}", "critic.mini_batch_size=2"]
KL = "algorithm.kl={name: k3, where: loss, coef: 0.01}"
TOOLS = [
    "rollout.tools=[calculator]",
    "rollout.agent={name: tools, max_turns: 2}",
    "data.max_prompt_tokens=900",
    "model.config.max_position_embeddings=1024",
    "actor.token_budget=4096",
]
LAKE = [
    "data.train=[{type: function, name: lakes, task: rondo.environments.episodes, "
    "options: {environment: frozen_lake, size: 64, prompt: Go}}]",
    "data.eval=[]",
    "trainer.evaluation={before: false, after: false, every: null}",
    "rollout.environments=[frozen_lake]",
    "rollout.agent={name: steps, max_steps: 3, prompt: rondo_worlds.recipes.frozen_lake.prompt, "
    "action: rondo_worlds.recipes.frozen_lake.move}",
    "rollout.episode_workers=2",
]
OFFLOAD = ["actor.offload_params=true", "actor.offload_optimizer=true"]
PATHS: dict[str, list[str]] = {
    "defaults": [],
    "float32": [F32],
    "eager attention": ["model.attention=sdpa"],
    "generic decoding": ["rollout.engine.decode=generic"],
    "head without logits": ["actor.logits_bytes=null"],
    "no checkpointing": ["actor.gradient_checkpointing=false"],
    "offload": OFFLOAD,
    "moments in 8 bit": ["actor.optimizer.moments=8bit"],
    "critic": GAE,
    "critic that rests": [*GAE, "critic.offload_params=true", "critic.offload_optimizer=true", *OFFLOAD],
    "reference": [KL],
    "reference that rests": [KL, "reference.offload_params=true"],
    "adapters": ["actor.lora={rank: 4, alpha: 8}"],
    "adapters that rest": ["actor.lora={rank: 4, alpha: 8}", *OFFLOAD],
    "processes": ["cluster.backend=process"],
    "adapters in processes": ["cluster.backend=process", "actor.lora={rank: 4, alpha: 8}"],
    "engine of transformers": ["rollout.engine=transformers"],
    "engine in a process": ["rollout.engine.process=own"],
    "two engines": ["rollout.replicas=2", "rollout.engine.process=own"],
    "weights stay on the card": ["rollout.engine.process=own", "rollout.weight_transport=ipc"],
    "weights through the host": ["rollout.engine.process=own", "rollout.weight_transport=host"],
    "adapters stay on the card": [
        "rollout.engine.process=own",
        "rollout.weight_transport=ipc",
        "actor.lora={rank: 4, alpha: 8, send: adapters}",
    ],
    "asynchronous": ["trainer.max_staleness=1", "trainer.on_update=resume"],
    "asynchronous in a process": ["trainer.max_staleness=1", "rollout.engine.process=own"],
    "tools": TOOLS,
    "an environment in episode workers": LAKE,
    "mixture": [f"model.config={json.dumps(config_of('qwen3_moe', vocab_size=466))}"],
    "mixture, routes replayed": [
        f"model.config={json.dumps(config_of('qwen3_moe', vocab_size=466))}",
        "actor.router.replay=trainer",
    ],
    "sinks and windows": [f"model.config={json.dumps(config_of('gpt_oss', vocab_size=466))}"],
    "soft caps": [f"model.config={json.dumps(config_of('gemma2', vocab_size=466))}"],
}


def recipe_file(folder: Path, recipe: dict[str, Any] = RECIPE) -> str:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


@pytest.mark.parametrize("path", list(PATHS))
def test_a_run(tmp_path: Path, path: str) -> None:
    overrides = [f"trainer.run_dir={tmp_path / 'run'}", "cluster.device=cuda", *PATHS[path]]
    inline("train", recipe_file(tmp_path), *overrides)
    steps = [line for line in metrics(tmp_path / "run") if "actor/grad_norm" in line]
    assert len(steps) == 3
    for line in steps:
        assert 0 <= line["rollout/log_prob_gap"] < (1e-4 if F32 in overrides else 0.1)
        assert line["actor/grad_norm"] > 0
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))


@pytest.mark.parametrize("path", ["defaults", "offload", "adapters", "critic"])
def test_an_interrupted_run_goes_on(tmp_path: Path, path: str) -> None:
    """Two steps, then two more from the checkpoint, against four: the kernels' sums have no fixed order, so
    not to the bit.
    """
    recipe = recipe_file(tmp_path)
    common = ["cluster.device=cuda", "checkpoint.every=2", "actor.compute_dtype=float32", *PATHS[path]]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    inline("train", recipe, f"trainer.run_dir={whole}", "trainer.total_steps=4", *common)
    for steps in (2, 4):
        inline("train", recipe, f"trainer.run_dir={parts}", f"trainer.total_steps={steps}", *common)
    lines = [
        {line["step"]: line for line in metrics(run) if "actor/grad_norm" in line} for run in (whole, parts)
    ]
    assert lines[0].keys() == lines[1].keys() == {1, 2, 3, 4}
    for step in (3, 4):
        for name in ("reward/mean", "actor/grad_norm", "rollout/generated_tokens"):
            assert lines[1][step][name] == pytest.approx(lines[0][step][name], rel=1e-3), (step, name)


def test_what_a_run_leaves_is_used(tmp_path: Path) -> None:
    """Fine-tuning, then its export generates, is evaluated, and is exported again, on the device."""
    sft = {**SFT_RECIPE, "model": {"config": MODEL, "tokenizer": "rondo.recipes.quickstart.tokenizer"}}
    run = tmp_path / "sft"
    inline("sft", recipe_file(tmp_path, sft), f"trainer.run_dir={run}", "cluster.device=cuda")
    losses = [line["sft/loss"] for line in metrics(run)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    prompt = ("Tom has 3 pens.", "--max-tokens", "4", "--temperature", "0")
    assert inline("generate", str(run / "export"), *prompt).stdout
    evaluation = tmp_path / "evaluation"
    inline(
        "eval",
        recipe_file(tmp_path),
        f"model={{path: {run / 'export'}, config: null, tokenizer: null}}",
        f"trainer.run_dir={evaluation}",
        "cluster.device=cuda",
    )
