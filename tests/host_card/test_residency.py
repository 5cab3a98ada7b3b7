"""What rests in host memory: the same bits both ways, and how many copies, buffers and waits it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rondo.config.schema import LoraConfig, OptimizerConfig, TorchBackendConfig
from rondo.platform.cuda import Cuda
from rondo.training import Engine, offload
from rondo.training.offload import HostMemory
from rondo.training.views import local_of
from tests.host_card import card, on_the_host_card
from tests.platform.streams import Late
from tests.ranks import run_ranks
from tests.training.helpers import PolicyLoss, make_batch, source, tiny_engine
from tests.training.test_ranks import shard

pytestmark = on_the_host_card

BOTH = {"offload_params": True, "offload_optimizer": True, "token_budget": 60}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def made(mesh: DeviceMesh, config: dict[str, Any], way: Any = "streamed", **changes: Any) -> Engine:
    model = source(head_dim=16, **changes.pop("model", {}))
    optimizer = OptimizerConfig(lr=1e-2, **changes)
    backend = TorchBackendConfig(offload=way)
    return tiny_engine(mesh, model, optimizer, config, f"cuda:{dist.get_rank()}", backend=backend)


def trained(engine: Engine) -> dict[str, torch.Tensor]:
    """The state after four steps of several phases: gradients that rest meanwhile, and verbs of one phase."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(4):
        batch = shard(rank, world, seed)
        if seed % 2:
            engine.forward_backward(batch, PolicyLoss())
            engine.optimizer_step()
        else:
            with engine.on_device():
                engine.forward_backward(batch, PolicyLoss())
                engine.optimizer_step()
        engine.forward(batch, {"log_probs": "log_probs"})
    return {name: local_of(tensor) for name, tensor in engine.snapshot().items()}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("half", {}, {}),
    ("float32", {"compute_dtype": "float32"}, {}),
    ("8 bits", {}, {"moments": "8bit"}),
    ("adapters", {"lora": LoraConfig(rank=4)}, {}),
]


@pytest.mark.parametrize(("config", "changes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_both_ways_have_the_bits_of_what_stays(
    mesh: DeviceMesh, config: dict[str, Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "BLOCK_BYTES", 20_000)  # several, and tensors that are larger than one
    config = {**BOTH, **config}
    stays = trained(made(mesh, {**config, "offload_params": False, "offload_optimizer": False}, **changes))
    for way in ("streamed", "plain"):
        rests = trained(made(mesh, config, way, **changes))
        assert rests.keys() == stays.keys()
        for name, tensor in stays.items():
            assert torch.equal(rests[name], tensor), (way, name)


def _on_two(rank: int, world: int, config: dict[str, Any], way: str) -> dict[str, torch.Tensor]:
    engine = made(init_device_mesh("cuda", (world,), mesh_dim_names=("dp",)), config, way)
    state = trained(engine)
    assert any(one.shape[0] % world for one in engine.backend.by_name.values())
    return state


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_what_stays() -> None:
    """FSDP pads the rows of the vocabulary, which two ranks do not share evenly."""
    config = {**BOTH, "compute_dtype": "float32"}
    stays = run_ranks(
        2, _on_two, {**config, "offload_params": False, "offload_optimizer": False}, "plain", cards=True
    )
    for way in ("streamed", "plain"):
        rests = run_ranks(2, _on_two, config, way, cards=True)
        for ours, theirs in zip(rests, stays, strict=True):
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_copy_that_comes_late_changes_nothing(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK_BYTES", 20_000)
    stays = trained(made(mesh, {"token_budget": 60}))
    monkeypatch.setattr(Cuda, "stream", lambda self, device: Late())
    rests = trained(made(mesh, BOTH))
    assert all(torch.equal(rests[name], tensor) for name, tensor in stays.items())


@pytest.mark.parametrize("layers", [2, 6])
def test_copies_and_buffers_do_not_grow_with_the_tensors(mesh: DeviceMesh, layers: int) -> None:
    """All fits one buffer here: weights are one copy each way, moments one, with a wait for each way out."""
    with card().counted() as building:
        engine = made(mesh, BOTH, model={"num_hidden_layers": layers})
    assert building.pinned == 2  # of weights, and of moments
    batch, memory = make_batch(), HostMemory(engine.device)
    with card().counted() as held, engine.on_device():
        engine.forward_backward(batch, PolicyLoss())
        engine.optimizer_step()
    with engine.on_device(), card().counted() as inside:
        engine.forward_backward(batch, PolicyLoss())
        engine.optimizer_step()
    assert held.pinned == inside.pinned  # of rows on their way
    moved = {way: held.copies[way] - inside.copies[way] for way in ("in, async", "out, async")}
    assert moved == {"in, async": 1, "out, async": 1}  # weights
    assert held.reads.total() - inside.reads.total() == 1
    with engine.on_device():
        engine.forward_backward(batch, PolicyLoss())
        with card().counted() as step:
            engine.optimizer_step()
    assert (step.copies["in, async"], step.copies["out, async"], step.pinned) == (1, 1, 0)  # moments
    with card().counted() as looking:
        engine.forward(batch, {"log_probs": "x"})
    assert looking.copies["out, async"] == 0  # nothing has changed
    engine.snapshot(memory)
    with card().counted() as again:
        engine.snapshot(memory)
    assert again.pinned == 0
    assert again.reads.total() <= 3
