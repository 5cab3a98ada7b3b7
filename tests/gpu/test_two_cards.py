"""Several CUDA devices: FSDP2 on two ranks, and whole runs along every axis, equal what one device does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rondo.config.schema import OptimizerConfig
from tests.gpu.test_paths import F32, LAKE, recipe_file
from tests.models.families import config_of
from tests.ranks import RankError, run_ranks
from tests.trainers.conftest import inline, metrics
from tests.training.helpers import PolicyLoss, full_gradients, relative_difference, source, tiny_engine
from tests.training.test_ranks import shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_tensors_of_two_cards_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")
    assert (torch.ones(3, device="cuda:1") + 1).device == torch.device("cuda:1")


def _sum_on_one_card(rank: int, world: int) -> None:
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(3, device="cuda:0"), group=group)


def test_two_ranks_on_one_card_are_refused() -> None:
    with pytest.raises(RankError, match="Duplicate GPU"):
        run_ranks(2, _sum_on_one_card)


def _trained(rank: int, world: int, device: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the norm of the gradient of two steps, the gradients of the second, and the checksums of what
    is sent to engines.
    """
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("dp",))
    place = f"cuda:{rank}" if device == "cuda" else "cpu"
    engine = tiny_engine(mesh, source(head_dim=16), OptimizerConfig(lr=1e-2), config, device=place)
    norms = []
    for seed in range(2):
        engine.forward_backward(shard(rank, world, seed), PolicyLoss())
        with engine.on_device():  # else they rest
            gradients = {name: one.cpu() for name, one in full_gradients(engine).items()}
        norms.append(engine.optimizer_step().grad_norm)
    sums = engine.parameters().checksums("bfloat16")
    sent = {name: one.cpu() for name, one in engine.parameters().gathered(1 << 16, "float32")}
    return {
        "norms": norms,
        "gradients": gradients,
        "sums": sums,
        "sent": sent,
    }


OFFLOAD = {"offload_params": True, "offload_optimizer": True}


@pytest.mark.parametrize("config", [{}, OFFLOAD], ids=["plain", "offload"])
def test_two_ranks_equal_one_and_the_cpu(config: dict[str, Any]) -> None:
    config = {"compute_dtype": "float32", "token_budget": 60, **config}
    two = run_ranks(2, _trained, "cuda", config, cards=True)
    one = run_ranks(1, _trained, "cuda", config, cards=True)[0]
    on_cpu = run_ranks(2, _trained, "cpu", {**config, **dict.fromkeys(OFFLOAD, False)})[0]
    assert two[0]["sums"] == two[1]["sums"]
    for other in (one, on_cpu):
        assert two[0]["norms"] == pytest.approx(other["norms"], rel=1e-4)
        for part in ("gradients", "sent"):
            assert two[0][part].keys() == other[part].keys()
            for name, tensor in other[part].items():
                assert relative_difference(two[0][part][name], tensor) < 1e-3, (part, name)


def test_two_ranks_in_half_precision_are_near() -> None:
    config = {"token_budget": 60}  # bfloat16 is the default of a card
    half = run_ranks(2, _trained, "cuda", config, cards=True)[0]
    one = run_ranks(1, _trained, "cuda", config, cards=True)[0]
    assert half["norms"] == pytest.approx(one["norms"], rel=0.1)


DENSE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
}
MIXTURE = f"model.config={json.dumps(config_of('qwen3_moe', vocab_size=466))}"
HEADS = f"model.config={json.dumps(DENSE)}"
LORA = "actor.lora={rank: 4, alpha: 8}"
SPREAD: dict[str, tuple[list[str], list[str]]] = {  # what both runs have, and what the spread one has
    "data": ([], []),
    "tensor": ([HEADS], ["actor.parallel={tensor: 2}"]),
    "context": ([HEADS], ["actor.parallel={context: 2}"]),
    "expert": ([MIXTURE], ["actor.parallel={expert: 2}"]),
    "adapters": ([LORA], []),
    "adapters sent alone": (["actor.lora={rank: 4, alpha: 8, send: adapters}"], []),
    "adapters, tensor": ([HEADS, LORA], ["actor.parallel={tensor: 2}"]),
    "split pools": ([], ["cluster.pools={train: 1, serve: 1}", "cluster.placement={rollout: serve}"]),
    "agents": (LAKE, []),
}


@pytest.mark.parametrize(
    "path", ["data", *(pytest.param(p, marks=pytest.mark.slow) for p in SPREAD if p != "data")]
)
def test_a_run_on_two_devices_is_that_of_one(tmp_path: Path, path: str) -> None:
    both, spread = SPREAD[path]
    common = ["cluster.device=cuda", "trainer.total_steps=2", F32, *both]
    runs = {"one": [], "two": ["cluster.backend=process", "cluster.devices=2", *spread]}
    for name, overrides in runs.items():
        inline("train", recipe_file(tmp_path), f"trainer.run_dir={tmp_path / name}", *common, *overrides)
    one, two = ([m for m in metrics(tmp_path / run) if "actor/grad_norm" in m] for run in runs)
    assert len(one) == len(two) == 2
    for ours, theirs in zip(two, one, strict=True):
        for key in ("actor/grad_norm", "actor/loss", "reward/mean"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
        assert 0 <= ours["rollout/log_prob_gap"] < 1e-4
