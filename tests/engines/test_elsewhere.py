"""Engines of another environment (`rollout.engine.python`): trainer and engine have their own packages.

RONDO_ENGINE_PYTHON names that environment's interpreter; `make test-engines` makes one, and runs these tests
from the trainer's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from rondo.config import load
from rondo.rollout import build_engine, start_engine
from rondo.trainers.commands.train import train
from tests.engines.beside_cards import python_without_cards
from tests.engines.conftest import TOLERANCE, Bench, engine_spec, prompt, request
from tests.host_card.build import environment, why_not
from tests.trainers.conftest import RECIPE, metrics
from tests.trainers.test_images import RL as SEEING
from tests.training.helpers import relative_difference

PYTHON = os.environ.get("RONDO_ENGINE_PYTHON")

pytestmark = pytest.mark.skipif(PYTHON is None, reason="RONDO_ENGINE_PYTHON names no environment of engines")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_it_samples_from_the_same_policy(kind: str) -> None:
    """Greedy tokens and log-probs are those of the native engine here; and so after an update."""
    here = Bench("native", build_engine(engine_spec("native")))
    there = Bench(kind, start_engine(engine_spec(kind, python=PYTHON), bucket_bytes=1 << 16))
    try:
        for model in (here.model, here.other):
            here.load(model)
            there.load(model)
            asked = [request(prompt(9, seed), 20, temperature=0.0) for seed in range(4)]
            for ours, theirs in zip(here.run(asked), there.run(asked), strict=True):
                assert theirs.token_ids.tolist() == ours.token_ids.tolist()
                assert abs(theirs.log_probs - ours.log_probs).max() < TOLERANCE
        command = Path(f"/proc/{there.engine.pid}/cmdline").read_text().split("\0")  # type: ignore[attr-defined]
        assert command[0] == os.path.abspath(str(PYTHON))
        assert command[0] != sys.executable
    finally:
        there.engine.close()
        here.engine.close()


APART = (
    "cluster.backend=process",
    "cluster.devices=3",
    "cluster.pools={train: 2, serve: 1}",
    "cluster.placement={rollout: serve}",
)
# Matrices cut along `tensor`, and gathered for one engine on a device of its own.
ALONG_TENSOR = (
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    *APART,
    "actor.parallel.tensor=2",
)


@pytest.mark.parametrize("trainer", [(), ALONG_TENSOR], ids=["one rank", "along tensor"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_steps_of_training(kind: str, trainer: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    settings = [
        f"rollout.engine={{name: {kind}, python: {PYTHON}}}",
        "model.config.head_dim=32",
        *trainer,
        "trainer.total_steps=2",
        "trainer.evaluation={before: false, after: false, every: null}",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    train(load([str(tmp_path / "tiny.yaml")], settings))
    assert [line["rollout/log_prob_gap"] < 1e-4 for line in metrics(tmp_path / "run")] == [True] * 2


def test_two_steps_of_training_with_images(tmp_path: Path) -> None:
    """In the colocated layout, on images drawn for it: the engine's environment reads the same pixels."""
    (tmp_path / "visual.yaml").write_text(yaml.safe_dump(SEEING))
    settings = [
        f"rollout.engine={{name: vllm, python: {PYTHON}}}",
        "model.config.text_config.head_dim=32",
        "model.config.text_config.rope_parameters.mrope_section=[6, 5, 5]",
        "trainer.total_steps=2",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    train(load([str(tmp_path / "visual.yaml")], settings))
    lines = metrics(tmp_path / "run")
    assert [line["rollout/log_prob_gap_max"] < 2e-5 for line in lines] == [True] * 2
    assert lines[0]["images/seen"] > 1e-2


MIXTURE = (
    "model.config={model_type: qwen3_moe, head_dim: 32, num_attention_heads: 4, num_key_value_heads: 2, "
    "hidden_size: 64, moe_intermediate_size: 64, num_experts: 4, num_experts_per_tok: 2, "
    "norm_topk_prob: true, tie_word_embeddings: false}"
)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_steps_of_a_mixture(kind: str, tmp_path: Path) -> None:
    """Whole experts on each of two ranks, which divide rows' tokens, too; an engine of two tensor-parallel
    workers on devices of its own. SGLang says where tokens went, and the update sends them there.
    """
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    settings = [
        f"rollout.engine={{name: {kind}, python: {PYTHON}, tensor_parallel: 2}}",
        MIXTURE,
        "cluster.backend=process",
        "cluster.devices=4",
        "cluster.pools={train: 2, serve: 2}",
        "cluster.placement={rollout: serve}",
        "actor.parallel={context: 2, expert: 2}",
        f"actor.router.replay={'sampler' if kind == 'sglang' else 'trainer'}",
        "trainer.total_steps=2",
        "trainer.evaluation={before: false, after: false, every: null}",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    train(load([str(tmp_path / "tiny.yaml")], settings))
    for line in metrics(tmp_path / "run"):
        assert line["rollout/log_prob_gap"] < 1e-4
        assert line["actor/replayed"] == 1.0
        assert line["actor/rerouted"] < 0.2


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_adapters_alone_train_as_merged_weights_do(kind: str, tmp_path: Path) -> None:
    """Two steps of GRPO: the same tokens; after the first sync A and B are all that moves."""
    pytest.importorskip("peft")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    settings = [
        f"rollout.engine={{name: {kind}, python: {PYTHON}}}",
        "model.config.head_dim=32",
        "actor.optimizer.lr=0.02",
        "trainer.total_steps=2",
        "trainer.evaluation={before: false, after: false, every: null}",
    ]
    found = {}
    for send in ("merged", "adapters"):
        lora = f"actor.lora={{rank: 4, alpha: 8, send: {send}}}"
        train(load([str(tmp_path / "tiny.yaml")], [*settings, lora, f"trainer.run_dir={tmp_path / send}"]))
        found[send] = metrics(tmp_path / send)
    # Per layer q, k, v, o, gate, up, down: rank 4 times inputs and outputs, float32.
    each = (32 + 64) + 2 * (32 + 32) + (64 + 32) + 3 * (32 + 64)
    for alone, merged in zip(found["adapters"], found["merged"], strict=True):
        assert alone["weights/bytes_moved"] == 4 * 2 * 4 * each < merged["weights/bytes_moved"] / 2
        assert alone["rollout/log_prob_gap_max"] < 1e-4
        assert alone["weights/canary_gap"] < 1e-4
        for name in ("reward/mean", "rollout/response_length", "actor/grad_norm"):
            assert alone[name] == pytest.approx(merged[name], rel=1e-4), name
    assert max(line["actor/grad_norm"] for line in found["adapters"]) > 0


MEGATRON = {
    "vllm": ("model.config.head_dim=32", *ALONG_TENSOR),
    "sglang": (MIXTURE, *APART, "actor.parallel.expert=2", "actor.router.replay=sampler"),
}


@pytest.mark.skipif(why_not() != "", reason=why_not())
@pytest.mark.parametrize("kind", list(MEGATRON))
def test_two_steps_on_megatron(kind: str, tmp_path: Path) -> None:
    """On two cards in host memory: what they send serves the engine as it serves rondo's own, which takes the
    run to the same end. SGLang says where tokens went, and the update sends them there.
    """
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    python = python_without_cards(str(PYTHON), tmp_path)
    settings = [
        *MEGATRON[kind],
        "actor.backend=megatron",
        "actor.compute_dtype=float32",
        "cluster.device=cuda",
        "trainer.total_steps=2",
        "trainer.evaluation={before: false, after: false, every: null}",
    ]
    rondo = [sys.executable, "-m", "tests.engines.beside_cards", "train", f"{tmp_path}/tiny.yaml", *settings]
    runs = {"ours": "native", "theirs": f"{{name: {kind}, python: {python}}}"}
    with environment(cards=3) as variables:
        for name, engine in runs.items():
            command = [*rondo, f"rollout.engine={engine}", f"trainer.run_dir={tmp_path / name}"]
            done = subprocess.run(command, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
    for mine, line in zip(*(metrics(tmp_path / name) for name in runs), strict=True):
        for key in ("reward/mean", "rollout/response_length", "actor/grad_norm"):
            assert line[key] == pytest.approx(mine[key], rel=1e-3), key
        assert line["rollout/log_prob_gap_max"] < 1e-4
        assert line["weights/canary_gap"] < 1e-4
        assert line.get("actor/replayed") == (1.0 if kind == "sglang" else None)
    ours, theirs = (load_file(tmp_path / name / "export" / "model.safetensors") for name in runs)
    for name, weight in ours.items():
        assert relative_difference(theirs[name], weight) < 1e-4, name
