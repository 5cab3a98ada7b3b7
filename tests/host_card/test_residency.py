"""What rests in host memory: the same bits both ways, and how many copies, buffers and waits it takes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig

from rondo.config.schema import LoraConfig, OptimizerConfig, TorchBackendConfig
from rondo.core.batch import Batch
from rondo.platform.cuda import Cuda
from rondo.rollout import NativeEngine
from rondo.training import Engine, offload
from rondo.training.offload import HostMemory
from rondo.training.views import local_of
from tests import begun
from tests.host_card import card, on_the_host_card
from tests.platform.streams import Late
from tests.ranks import run_ranks
from tests.rollout.conftest import own_engine
from tests.training.helpers import ARCHITECTURES, PolicyLoss, make_batch, source, tiny_engine
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


def every_phase(engine: Engine, batch: Batch) -> dict[str, int]:
    """What was there in each phase of a second step."""
    for _ in range(2):
        engine.forward(batch, {"log_probs": "x"})
        with engine.on_device():
            engine.forward_backward(batch, PolicyLoss())
            engine.optimizer_step()
        engine.parameters().checksums()
        found = engine.backend.residency.measured()
    return found


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


@pytest.mark.parametrize(
    ("config", "changes"),
    [pytest.param(*case, id=name, marks=() if name == "half" else pytest.mark.slow) for name, *case in CASES],
)
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


@pytest.mark.parametrize("way", ["streamed", "plain"])
def test_a_frozen_model_that_rests_keeps_what_it_takes_over(mesh: DeviceMesh, way: str) -> None:
    """A reference that rests, refreshed from the actor: nothing of it learns, and all of it changes."""
    actor, batch = made(mesh, {"token_budget": 60}), make_batch()
    config = {"offload_params": True, "token_budget": 60}
    backend = TorchBackendConfig(offload=way)
    reference = tiny_engine(mesh, source(head_dim=16), None, config, "cuda:0", backend=backend)
    actor.forward_backward(batch, PolicyLoss())
    actor.optimizer_step()
    reference.copy_parameters_from(actor)
    expected = actor.forward(batch, {"log_probs": "x"}).ragged("x")[0]
    for _ in range(2):
        assert torch.equal(reference.forward(batch, {"log_probs": "x"}).ragged("x")[0], expected)
    assert reference.parameters().checksums() == actor.parameters().checksums()


@pytest.mark.parametrize("way", ["streamed", "plain"])
def test_adapters_that_rest_are_loaded(mesh: DeviceMesh, way: str, tmp_path: Path) -> None:
    config = {**BOTH, "lora": LoraConfig(rank=4)}
    wrote, reads = made(mesh, config, way), made(mesh, config, way)
    trained(wrote)
    files = wrote.save(str(tmp_path / "state"))
    reads.load(str(tmp_path / "state"), files)
    first, second = wrote.snapshot(), reads.snapshot()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(local_of(second[name]), local_of(tensor)), name
    batch = make_batch()
    sums = [one.forward(batch, {"log_probs": "x"}).ragged("x")[0] for one in (wrote, reads)]
    assert torch.equal(*sums)


@pytest.mark.parametrize("way", ["streamed", "plain"])
@pytest.mark.parametrize(
    "rests",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ((), ("params",), ("optimizer",))),
        ("params", "optimizer"),
    ],
    ids=str,
)
def test_what_is_there_in_each_phase_is_what_was_planned(
    mesh: DeviceMesh, rests: tuple[str, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By owner, to the byte; between phases the allocator has no more than that and small buffers."""
    monkeypatch.setattr(offload, "BLOCK_BYTES", 20_000)
    gc.collect()  # engines of other tests
    before = torch.cuda.memory_allocated()
    engine = made(mesh, {"token_budget": 60, **{f"offload_{name}": True for name in rests}}, way)
    parameters = {name: local_of(one) for name, one in engine.backend.by_name.items()}
    weights = sum(one.nbytes for one in parameters.values())
    batch, held = make_batch(), engine.backend.residency
    found = every_phase(engine, batch)
    at_rest = torch.cuda.memory_allocated() - before
    moments = 0 if "optimizer" in rests else 2 * weights
    stays = (0 if "params" in rests else weights) + moments
    # The allocator rounds up to 512: weights, two moments, and the counter of steps, of each.
    assert stays <= at_rest < stays + 4 * 512 * len(parameters)
    assert held.plan is not None
    passing = held.plan.of("update")["moments"]
    if "optimizer" in rests:
        blocks = 2 if way == "streamed" else 1
        assert 2 * max(one.nbytes for one in parameters.values()) * blocks <= passing <= 20_000 * blocks
    else:
        assert passing == moments
    for phase in ("rest", "forward", "update", "gather"):
        planned = {
            "weights": 0 if phase == "rest" and "params" in rests else weights,
            "moments": passing if phase == "update" else moments,
            **({"gradients": weights} if phase == "update" else {}),
        }
        for owner, size in planned.items():
            assert found.pop(f"{phase}_{owner}_planned_bytes") == size, (phase, owner)
            exactly = pytest.approx(size, abs=0 if way == "streamed" else 1024)  # without what fills up
            assert found.pop(f"{phase}_{owner}_bytes") == exactly, (phase, owner)
    peaks = {phase: found.pop(f"{phase}_peak_bytes") - before for phase in ("forward", "update", "gather")}
    assert not found
    assert peaks["update"] > 2 * weights + moments
    assert peaks["forward"] > weights + moments
    assert engine.peak_memory_bytes() >= before + max(peaks.values())


def test_what_rests_is_in_no_phase_s_peak(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are in none, since an update has more activations than what passes of them; and beside another
    model's phase there is nothing of it at all.
    """
    monkeypatch.setattr(offload, "BLOCK_BYTES", 20_000)
    batch, peaks = make_batch(), []
    for config in ({}, BOTH):
        gc.collect()
        before = torch.cuda.memory_allocated()
        engine = made(mesh, {"token_budget": 60, **config})
        parameters = [local_of(one) for one in engine.backend.by_name.values()]
        found = every_phase(engine, batch)
        phases = ("forward", "update", "gather")
        peaks.append({phase: found[f"{phase}_peak_bytes"] - before for phase in phases})
        weights, rounding = sum(one.nbytes for one in parameters), 2 * 512 * len(parameters)
        torch.cuda.reset_peak_memory_stats()
        other = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")  # another model's phase
        beside = torch.cuda.max_memory_allocated() - before - other.nbytes
        assert beside == pytest.approx(0 if config else 3 * weights, abs=2 * rounding)
        del engine, parameters, other
    for phase in phases:
        assert peaks[0][phase] - peaks[1][phase] == pytest.approx(2 * weights, abs=rounding), phase


@pytest.mark.parametrize("config", [{}, {"lora": LoraConfig(rank=4)}], ids=["cast", "merged"])
def test_sums_hold_no_second_model(mesh: DeviceMesh, config: dict[str, Any]) -> None:
    """On one rank, too, what is cast or merged for its sum is gone before the next one is made."""
    engine = made(mesh, {"token_budget": 60, **config}, model={"num_hidden_layers": 8})
    shapes = engine.parameters().layout("bfloat16").parameters
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.parameters().checksums("bfloat16")
    largest, rounding = max(one.num_bytes for one in shapes), 512 * 2 * len(shapes)
    # Of one tensor: itself, in float32 and merged, and its words as integers; and all sums.
    assert torch.cuda.max_memory_allocated() - before < 12 * largest + rounding
    assert 12 * largest + rounding < sum(one.num_bytes for one in shapes)


def without_room(way: str) -> None:
    """Finds none for a step, and takes it later; on a small card."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh, batch = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)), make_batch()
    undisturbed, engine = made(mesh, BOTH, way), made(mesh, BOTH, way)
    for one in (undisturbed, engine):
        one.forward_backward(batch, PolicyLoss())
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - 60_000, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):  # weights are 94,720 bytes
        engine.optimizer_step()
    del taken
    torch.cuda.empty_cache()
    for one in (undisturbed, engine):
        one.optimizer_step()
        one.forward_backward(batch, PolicyLoss())
        one.optimizer_step()
    first, second = undisturbed.snapshot(), engine.snapshot()
    assert all(torch.equal(local_of(second[name]), local_of(tensor)) for name, tensor in first.items())
    print("the same")


def on_a_small_card(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    alone = {"RONDO_HOST_CARD_BYTES": str(64 << 20), "RONDO_HOST_CARD_LEDGER": str(tmp_path / "ledger")}
    variables = {**os.environ, **alone}
    return begun.run(["-c", program], env=variables, capture_output=True, text=True)


@pytest.mark.parametrize("way", ["streamed", "plain"])
def test_where_there_is_no_room_what_rests_stays_what_it_is(tmp_path: Path, way: str) -> None:
    """Weights, moments, and gradients."""
    program = f"from tests.host_card.test_residency import without_room; without_room({way!r})"
    done = on_a_small_card(tmp_path, program)
    assert done.stdout == "the same\n", done.stderr


def test_what_could_not_rest_is_not_lost(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is full when the gradients are to go there, behind an update: the next phase goes on."""

    def full(*_: Any) -> None:
        raise MemoryError("no pinned memory")

    undisturbed, other = made(mesh, BOTH), made(mesh, BOTH)
    for engine in (undisturbed, other):
        for seed in range(2):
            with monkeypatch.context() as patched, contextlib.ExitStack() as stack:
                if seed and engine is other:
                    patched.setattr(HostMemory, "views", full)
                    stack.enter_context(pytest.raises(MemoryError, match="no pinned memory"))
                with engine.on_device():
                    engine.forward_backward(shard(0, 1, seed), PolicyLoss())
                    engine.optimizer_step()
                    engine.forward_backward(shard(0, 1, seed + 7), PolicyLoss())
            engine.optimizer_step()
    ours, theirs = other.backend.state(), undisturbed.backend.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(local_of(ours[name]), local_of(one)) for name, one in theirs.items())


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


ENGINE = """
import sys, torch
held = None
for line in sys.stdin:
    what, size = line.split()
    try:
        held = torch.empty(int(size), dtype=torch.uint8, device="cuda") if what == "wake" else None
        if what == "sleep":
            torch.cuda.empty_cache()
        print(what, flush=True)
    except torch.OutOfMemoryError:
        print("no room to " + what, flush=True)
"""
STEPS = """
import subprocess
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from rondo.config.schema import OptimizerConfig
from rondo.platform import Residency
from rondo.weights.sync import gather_into
from tests import begun
from tests.training.helpers import ARCHITECTURES, PolicyLoss, make_batch, source, tiny_engine
from tests.weights.sinks import Keeping

torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
model = source(max_position_embeddings=8192, vocab_size=2000)
trainer = tiny_engine(mesh, model, OptimizerConfig(lr=1e-2), {CONFIG}, "cuda:0", yields_memory=True)
batch, keeps, give_back = make_batch(((4, 300), (4, 200))), "{WHO}", Residency.give_back

def update():
    with trainer.on_device():
        trainer.forward_backward(batch, PolicyLoss())
        trainer.optimizer_step()

Residency.give_back = lambda self: None  # to see what the allocator would keep
update()
kept = torch.cuda.mem_get_info()[0]
Residency.give_back = give_back
trainer.backend.residency.give_back()
size = (kept + torch.cuda.mem_get_info()[0]) // 2
if keeps == "trainer":
    Residency.give_back = lambda self: None
engine = begun.Program(["-c", {ENGINE!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def tell(what):
    engine.stdin.write(f"{{what}} {{size}}\\n")
    engine.stdin.flush()
    print(engine.stdout.readline(), end="")

class Sink(Keeping):
    def begin(self, version):
        tell("wake")
        super().begin(version)

for version in range(2):
    try:
        update()
        print("update")
    except torch.OutOfMemoryError:
        print("no room to update")
        break
    gather_into(trainer.parameters(), Sink(), version, 1 << 20, dtype="bfloat16")
    if keeps != "engine":
        tell("sleep")
engine.stdin.close()
engine.wait()
"""


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="stays"),
        pytest.param({"offload_params": True, "offload_optimizer": True}, id="rests", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("keeps", "expected"),
    [
        ("nobody", ["update", "wake", "sleep"] * 2),
        ("trainer", ["update", "no room to wake", "sleep"] * 2),
        ("engine", ["update", "wake", "no room to update"]),
    ],
)
def test_who_is_done_gives_back_before_the_other_takes(
    tmp_path: Path, config: dict[str, Any], keeps: str, expected: list[str]
) -> None:
    """A trainer and an engine in two processes, on a card that has room for one of them at a time."""
    program = STEPS.format(CONFIG=config, WHO=keeps, ENGINE=ENGINE)
    done = on_a_small_card(tmp_path, program)
    assert done.stdout.split("\n")[:-1] == expected, done.stderr


@pytest.mark.parametrize("decode", ["lean", "generic"])
def test_an_engine_that_sleeps_gives_its_cache_to_other_processes(decode: str) -> None:
    config = AutoConfig.for_model(**ARCHITECTURES["qwen3"])
    options = {"max_concurrent": 16, "max_context": 64, "decode": decode}
    engine = own_engine(NativeEngine, config, dtype="bfloat16", device="cuda", cache_bytes=8 << 20, **options)
    try:
        free = torch.cuda.mem_get_info()[0]
        asyncio.run(engine.sleep())
        assert torch.cuda.mem_get_info()[0] - free >= 7 << 20
        asyncio.run(engine.wake())
        # Nearly: what an earlier test has left may go meanwhile.
        assert abs(torch.cuda.mem_get_info()[0] - free) < 1 << 20
    finally:
        engine.close()
