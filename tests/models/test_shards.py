"""Checkpoints as verl writes them under FSDP, loaded as models: written by two real gloo ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rondo.core.errors import DataError
from rondo.models import ModelSource, TokenizerSource, build_model, load_tokenizer
from rondo.models.loading import build_empty
from rondo.models.names import whole_part
from rondo.models.value_head import replace_lm_head
from rondo.weights.layout import Box
from tests.models.test_loading import TINY, make_tokenizer
from tests.ranks import run_ranks

WORLD = 2
# 31 rows, 5 and 3 heads: no rank has as much as the other.
UNEVEN = {**TINY, "num_attention_heads": 5, "hidden_size": 15, "head_dim": 4, "intermediate_size": 23}


def _save(rank: int, world: int, actor: str, tied: bool, replicas: int) -> None:
    """Shards a model as verl does, and saves this rank's part."""
    config = {**UNEVEN, "tie_word_embeddings": tied}
    model: Any = build_model(ModelSource(config=config, seed=1), torch.float32, kernels="transformers")
    names = ("ddp", "fsdp") if replicas > 1 else ("fsdp",)
    shape = (replicas, world // replicas) if replicas > 1 else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), f"{actor}/model_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        model.config.save_pretrained(f"{actor}/huggingface")


def _save_odd(rank: int, world: int, actor: str) -> None:
    """Saves a tensor that is sharded along two axes."""
    mesh = init_device_mesh("cpu", (world, 1))
    state = {"x": distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0), Shard(1)])}
    torch.save(state, f"{actor}/model_world_size_{world}_rank_{rank}.pt")


def checkpoint(folder: Path, *, tied: bool = False, world: int = WORLD, replicas: int = 1) -> Path:
    actor = folder / "global_step_4" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    run_ranks(world, _save, str(actor), tied, replicas)
    make_tokenizer().save_pretrained(actor / "huggingface")
    return actor


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("verl"))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def assert_loads(path: Path, *, tied: bool = False) -> None:
    made = build_model(ModelSource(config={**UNEVEN, "tie_word_embeddings": tied}, seed=1), torch.float32)
    loaded = build_model(ModelSource(path=str(path)), torch.float32)
    assert weights(loaded).keys() == weights(made).keys()
    for name, tensor in weights(made).items():
        assert torch.equal(weights(loaded)[name], tensor), name


def test_shards_are_joined_to_the_same_weights(actor: Path) -> None:
    files = sorted(file.name for file in actor.glob("*.pt"))
    assert files == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]
    assert_loads(actor)
    assert_loads(actor / "huggingface")
    assert load_tokenizer(TokenizerSource(name=str(actor))).encode("a b") == [1, 2]


def test_a_critic_brings_its_head(tmp_path: Path) -> None:
    """verl's critic is a model with `score` in place of its output head."""
    critic = checkpoint(tmp_path)
    for file in critic.glob("*.pt"):
        state = torch.load(file, weights_only=True)
        state["score.weight"] = torch.arange(15.0).view(1, 15)
        del state["lm_head.weight"]
        torch.save(state, file)
    model = build_model(ModelSource(path=str(critic)), torch.float32, output_head=False)
    head = replace_lm_head(model, str(critic), torch.float32)
    assert torch.equal(head.get_parameter("weight"), torch.arange(15.0).view(1, 15))


def test_each_rank_reads_its_own_box_of_them(actor: Path) -> None:
    made = weights(build_model(ModelSource(config=UNEVEN, seed=1), torch.float32))
    model, stored = build_empty(ModelSource(path=str(actor)), torch.float32, kernels="transformers")
    assert stored is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    part, box = torch.empty(9, 5), Box((8, 7), (9, 5))
    stored.fill([(name, part, box, (23, 15))], {name: (whole_part(name, (23, 15)),)})
    assert torch.equal(part, made[name][8:17, 7:12])


@pytest.mark.parametrize(
    ("tied", "world", "replicas"), [(True, 2, 1), (False, 1, 1), (False, 2, 2), (False, 4, 2)]
)
def test_other_layouts(tmp_path: Path, tied: bool, world: int, replicas: int) -> None:
    """Tied embeddings, which both names have; one rank; each rank with all of it; two replicas."""
    assert_loads(checkpoint(tmp_path, tied=tied, world=world, replicas=replicas), tied=tied)


class _Runs:
    """What a stranger may have put into a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_what_is_no_tensor_is_refused_by_name(
    actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "actor"
    shutil.copytree(actor, copy)
    second = copy / "model_world_size_2_rank_1.pt"
    state = torch.load(second, weights_only=True)

    def said(content: object) -> str:
        torch.save(content, second)
        with pytest.raises(DataError) as caught:
            build_model(ModelSource(path=str(copy)), torch.float32)
        return str(caught.value)

    assert "rank_1.pt is no checkpoint of tensors: it holds posix.system, which" in said(
        {**state, "x": _Runs()}
    )
    assert not (tmp_path / "ran").exists()
    assert "'x' is int, and no tensor" in said({**state, "x": 3})
    assert "holds no tensors by name, but list" in said([1])
    assert "not every rank has 'x'" in said({**state, "x": torch.zeros(1)})
    first, *_, last, _ = state
    assert isinstance(state[first], DTensor)
    assert f"{first!r} is placed as" in said({**state, first: torch.zeros(2)})
    assert f"the shards of {first!r} do not make" in said({**state, first: state[last]})
    second.write_bytes(second.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"rank_1.pt is no checkpoint of tensors"):
        build_model(ModelSource(path=str(copy)), torch.float32)
    second.unlink()
    with pytest.raises(DataError, match="rank 1 of 2 is missing"):
        build_model(ModelSource(path=str(copy)), torch.float32)


def test_shards_along_two_axes_are_refused(actor: Path, tmp_path: Path) -> None:
    copy = tmp_path / "actor"
    shutil.copytree(actor, copy)
    run_ranks(WORLD, _save_odd, str(copy))
    with pytest.raises(DataError, match="one shard along one axis is read"):
        build_model(ModelSource(path=str(copy)), torch.float32)
