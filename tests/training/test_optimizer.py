"""Schedules by hand, clipping against torch, skipping, memory sharing."""

from __future__ import annotations

import gc
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rondo.config.schema import (
    ConstantScheduleConfig,
    FallingScheduleConfig,
    LoraConfig,
    OptimizerConfig,
    ScheduleConfig,
    TorchBackendConfig,
    WsdScheduleConfig,
)
from rondo.core.batch import Batch
from rondo.core.errors import ConfigError, TrainError
from rondo.core.types import StepStats
from rondo.models import ModelSource
from rondo.planning import memory
from rondo.platform import Residency, cpu, residency
from rondo.system.activity import pulse
from rondo.training import offload
from rondo.training.offload import HostMemory, blocks_of, cut, room_for
from rondo.training.torch_backend.optimizer import ShardedAdamW, lr_ratio
from rondo.training.views import Views, as_shard, local_of
from rondo.workers import ActorWorker, CriticWorker
from tests.platform.streams import Late, Noted
from tests.training.helpers import PolicyLoss, ValueLoss, full_gradients, make_batch, tiny_engine

SCHEDULES = [
    (ConstantScheduleConfig(warmup_steps=4), None, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0}),
    (FallingScheduleConfig("linear", min_ratio=0.2), 8, {0: 1.0, 4: 0.6, 8: 0.2, 12: 0.2}),
    (FallingScheduleConfig("linear", warmup_steps=2), 6, {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.75, 5: 0.25}),
    (
        FallingScheduleConfig("cosine", min_ratio=0.1),
        4,
        {0: 1.0, 1: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 2: 0.55, 4: 0.1},
    ),
    (
        WsdScheduleConfig(warmup_steps=1, decay_steps=4),
        10,
        {0: 1.0, 5: 1.0, 6: 1.0, 7: 0.75, 9: 0.25, 10: 0.0},
    ),
    (WsdScheduleConfig(), 20, {17: 1.0, 18: 1.0, 19: 0.5}),
]


@pytest.mark.parametrize(("schedule", "total", "expected"), SCHEDULES)
def test_schedules_by_hand(schedule: ScheduleConfig, total: int | None, expected: dict[int, float]) -> None:
    assert {step: lr_ratio(step, schedule, total) for step in expected} == pytest.approx(expected, abs=1e-12)


def test_a_falling_schedule_needs_its_end(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="needs the number of optimizer steps"):
        tiny_engine(mesh, optimizer=OptimizerConfig(schedule=FallingScheduleConfig("cosine")))


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_step_equals_torch_adamw_with_clip_grad_norm(mesh: DeviceMesh, clip: float | None) -> None:
    config = OptimizerConfig(lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, grad_clip=clip)
    engine = tiny_engine(mesh, optimizer=config)
    plain = {n: p.clone().requires_grad_() for n, p in engine.parameters_in_place().items()}
    theirs = torch.optim.AdamW(plain.values(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    for seed in range(3):
        engine.forward_backward(make_batch(seed=seed), PolicyLoss())
        for name, gradient in full_gradients(engine).items():
            plain[name].grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), clip or math.inf)
        theirs.step()
        step = engine.optimizer_step()
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert (step.skipped, step.lr) == (False, 0.01)
    for name, tensor in engine.parameters_in_place().items():
        torch.testing.assert_close(tensor, plain[name].detach(), rtol=1e-5, atol=1e-6)


def test_the_norm_of_half_precision_is_summed_in_float32(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh, optimizer=OptimizerConfig(lr=0.01), config={"param_dtype": "bfloat16"})
    engine.forward_backward(make_batch(), PolicyLoss())
    squares = [gradient.double().square().sum() for gradient in full_gradients(engine).values()]
    norm = math.sqrt(sum(map(float, squares)))
    assert engine.optimizer_step().grad_norm == pytest.approx(norm, rel=1e-6)


def test_a_nan_gradient_skips_the_step(mesh: DeviceMesh) -> None:
    schedule = FallingScheduleConfig("linear")
    engine = tiny_engine(mesh, optimizer=OptimizerConfig(lr=1.0, schedule=schedule), total_optimizer_steps=4)
    before = engine.snapshot()
    batch = make_batch()
    poisoned = batch.with_columns({"advantages": [float("nan")] + [1.0] * (len(batch) - 1)}, replace=True)
    engine.forward_backward(poisoned, PolicyLoss())
    step = engine.optimizer_step()
    assert (step.skipped, math.isnan(step.grad_norm), step.lr) == (True, True, 1.0)
    after = engine.backend.state()
    assert all(
        torch.equal(after[n].to_local(), before[n].to_local()) for n in before if n != "optimizer.steps"
    )
    engine.forward_backward(batch, PolicyLoss())
    step = engine.optimizer_step()
    assert (step.skipped, step.lr) == (
        False,
        0.75,
    )  # a skipped step counts for the schedule; its gradient is gone


def test_parameters_in_place_are_the_storage(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh)
    shared = engine.parameters_in_place()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in shared.items()}
    for _ in range(2):
        engine.forward(make_batch(), {"log_probs": "x"})
        engine.forward_backward(make_batch(), PolicyLoss())
        engine.optimizer_step()
    assert [name for name in shared if "lm_head" in name or "embed" in name] == [
        "model.embed_tokens.weight"
    ]  # tied
    for name, tensor in engine.parameters_in_place().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, shared[name])
        assert not torch.equal(tensor, before[name][1])
    assert engine.num_parameters() == sum(tensor.numel() for tensor in shared.values())
    gathered = dict(engine.parameters().gathered(1000))
    assert gathered.keys() == shared.keys()
    assert all(torch.equal(gathered[n], shared[n]) for n in shared)
    assert engine.peak_memory_bytes() > 1 << 20


def test_the_critic_learns_its_targets(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh, optimizer=OptimizerConfig(lr=0.02, weight_decay=0.0), head="value")
    batch = make_batch()
    values = engine.forward(batch, {"values": "values"}).ragged("values")[0]
    assert torch.equal(values, torch.zeros(values.shape, dtype=torch.float32))
    first = engine.evaluate(batch, ValueLoss()).values()["loss"]
    for _ in range(30):
        engine.forward_backward(batch, ValueLoss())
        engine.optimizer_step()
    assert engine.evaluate(batch, ValueLoss()).values()["loss"] < 0.2 * first
    heads = {name for name in engine.backend.shards if "head" in name}
    assert heads == {"value_head.weight", "value_head.bias"}


def test_a_critic_is_exported_with_its_head(mesh: DeviceMesh, tmp_path: Path) -> None:
    engine = tiny_engine(mesh, head="value")
    batch = make_batch()
    for _ in range(3):
        engine.forward_backward(batch, ValueLoss())
        engine.optimizer_step()
    engine.export(str(tmp_path))
    loaded = tiny_engine(mesh, ModelSource(path=str(tmp_path)), head="value")
    outputs = {"values": "values"}
    assert engine.forward(batch, outputs) == loaded.forward(batch, outputs)
    assert loaded.forward(batch, outputs).ragged("values")[0].any()


def test_a_frozen_engine_refuses_to_train(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh, optimizer=None)
    with pytest.raises(TrainError, match="frozen model"):
        engine.forward_backward(make_batch(), PolicyLoss())
    with pytest.raises(TrainError, match="frozen model"):
        engine.optimizer_step()
    assert not any(parameter.requires_grad for parameter in engine.backend.by_name.values())


def test_what_rests_elsewhere_than_its_mesh_is_no_copy(mesh: DeviceMesh) -> None:
    """As moments in host memory under a mesh of CUDA devices: loading fills the storage itself."""
    elsewhere = DeviceMesh.from_group(mesh.get_group(), "meta", mesh_dim_names=("dp",))
    shard = DTensor.from_local(torch.empty(6, 4, device="meta"), elsewhere, [Shard(0)])
    resting = torch.zeros(6, 4)
    tensor = as_shard(shard, resting, elsewhere)
    assert (tensor.device_mesh.device_type, tensor.shape) == ("cpu", shard.shape)
    assert tensor.to_local().data_ptr() == resting.data_ptr()
    tensor.to_local().fill_(3.0)
    assert torch.equal(resting, torch.full((6, 4), 3.0))


def test_an_error_leaves_the_model_at_rest(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, moves = tiny_engine(mesh), list[str]()
    monkeypatch.setattr(engine.backend, "residency", Residency("meta", resting=Noted(moves)))
    with pytest.raises(TrainError, match="computes"):
        engine.forward(make_batch(), {"values": "x"})
    assert moves == ["bring", "rest"]


class Looked(PolicyLoss):
    """The loss, while the watch for hangs looks where everybody is."""

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        watch = threading.Thread(target=pulse, args=(True,))
        watch.start()
        watch.join()
        return super().__call__(*arguments)


def test_an_update_leaves_no_tensor_behind(mesh: DeviceMesh) -> None:
    def in_use() -> int:
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())

    engine, batch = tiny_engine(mesh, config={"token_budget": 64}), make_batch()

    def update() -> None:
        engine.forward_backward(batch, Looked())
        engine.optimizer_step()

    update()  # what is made once
    gc.collect()
    gc.disable()
    try:
        before = in_use()
        for _ in range(3):
            update()
        assert in_use() == before > 0
    finally:
        gc.enable()


@pytest.mark.parametrize("yields", [False, True])
def test_on_a_cpu_a_phase_ends_as_on_a_card(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, yields: bool
) -> None:
    happened = list[str]()
    monkeypatch.setattr(residency, "give_back_large_blocks", lambda: happened.append("large blocks"))
    monkeypatch.setattr(cpu, "give_back_free_memory", lambda: happened.append("release"))
    engine = tiny_engine(mesh, yields_memory=yields)
    assert happened == ["large blocks"] * yields
    happened.clear()
    with engine.on_device(), engine.on_device():
        happened.append("update")
    assert happened == ["update", *["release"] * yields]


@pytest.mark.parametrize(("lora", "chunk"), [(None, None), (LoraConfig(rank=2), None), (None, 4)])
def test_on_a_cpu_a_large_model_that_leaves_holes_gives_large_blocks_back(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, lora: LoraConfig | None, chunk: int | None
) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    happened = list[str]()
    monkeypatch.setattr(residency, "give_back_large_blocks", lambda: happened.append("large blocks"))
    arguments: dict[str, Any] = {"config": {"lora": lora}, "backend": TorchBackendConfig(mlp_chunk=chunk)}
    tiny_engine(mesh, **arguments)
    assert happened == []  # it has less than 1 GiB
    monkeypatch.setattr(memory, "GIB", 1 << 10)
    tiny_engine(mesh, **arguments)
    assert happened == ["large blocks"] * (lora is not None or chunk is not None)


def test_parameters_come_once_for_all_verbs_of_an_update(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, moves = tiny_engine(mesh), list[str]()
    monkeypatch.setattr(engine.backend, "residency", Residency("meta", resting=Noted(moves)))

    def step(rows: Batch, loss: str) -> StepStats:
        for _ in range(2):  # forward and backward, optimizer step
            with engine.on_device():
                moves.append(f"{len(rows)} rows")
        return StepStats()

    worker = SimpleNamespace(
        engine=engine,
        _step=step,
        _replay=None,
        _losses={"policy": PolicyLoss()},
        _memory_told=StepStats,
    )
    batch = make_batch().with_columns({"mini_batch": np.arange(11) % 2})
    ActorWorker.update_actor(worker, batch, [[0, 1]])  # type: ignore[arg-type]
    assert moves == ["bring", *["6 rows"] * 2, *["5 rows"] * 2, "rest, changed"]
    moves.clear()
    CriticWorker._update(worker, batch, "policy", "mini_batch", [[1]])  # type: ignore[arg-type]
    assert moves == ["bring", *["5 rows"] * 2, "rest, changed"]


@pytest.mark.parametrize("moments", ["full", "8bit"])
@pytest.mark.parametrize("way", ["streamed", "plain"])
def test_moments_that_rest_elsewhere_come_a_block_at_a_time(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, way: Any, moments: Any
) -> None:
    """The update is that of all at once, however late a copy is that nobody waits for. (On a CPU there is
    nowhere else to rest: what rests is a copy of it.) One block has no gradient, of one a parameter has none.
    """
    monkeypatch.setattr(offload, "BLOCK_BYTES", 6 << 10)
    monkeypatch.setattr(cpu.Cpu, "stream", lambda self, device: Late())
    shapes = {"a": (40, 64), "b": (8, 16), "c": (7,), "d": (80, 64), "e": (4, 4), "f": (50, 64), "g": (3, 3)}
    frozen = {"c", "d", "e"} if moments == "full" else {"c", "d"}
    made = []
    for offloaded in (None, way):
        torch.manual_seed(0)
        parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        config = OptimizerConfig(lr=1e-2, moments=moments)
        made.append((parameters, ShardedAdamW(parameters, config, None, Views.of(mesh), offloaded)))
    for step in range(3):
        for parameters, optimizer in made:
            torch.manual_seed(step)
            for name in shapes.keys() - frozen if step else shapes:
                parameters[name].grad = torch.randn(shapes[name])
            optimizer.step()
    (all_at_once, first), (by_blocks, second) = made
    assert all(torch.equal(by_blocks[name], one) for name, one in all_at_once.items())
    state = second.state()
    assert len(state) > 2 * len(shapes)
    assert all(torch.equal(local_of(state[name]), local_of(one)) for name, one in first.state().items())


def test_tensors_share_buffers_of_a_bounded_size() -> None:
    """Each begins at a multiple of 256 bytes; what is larger than a buffer has one of its own."""
    sizes = [1, 255, 256, 257, 10_000, 300, 300, 300]
    assert [room_for([size]) for size in sizes] == [256, 256, 256, 512, 10_240, 512, 512, 512]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload, "BLOCK_BYTES", 1280)
        assert blocks_of(sizes) == [[0, 1, 2, 3], [4], [5, 6], [7]]
    parts = cut(torch.arange(2560, dtype=torch.int16).view(torch.uint8), [3, 300, 2])
    assert [(len(part), int(part[0])) for part in parts] == [(3, 0), (300, 128), (2, 128)]
    assert [int(part[:2].view(torch.int16)) for part in parts] == [0, 128, 384]


def test_memory_of_a_copy_is_used_again_while_it_is_large_enough() -> None:
    memory = HostMemory(torch.device("cpu"))
    small, large = torch.ones(3, 5), torch.ones(7, 90, dtype=torch.float64)
    views = memory.views([small, large])
    for view, tensor in zip(views, (small, large), strict=True):
        assert (view.shape, view.dtype, bool(view.any())) == (tensor.shape, tensor.dtype, False)
    assert memory.num_bytes == 256 + 5120
    assert [one.data_ptr() for one in memory.views([large, small])] == [
        views[0].data_ptr(),
        views[0].data_ptr() + 5120,
    ]
    assert memory.num_bytes == 256 + 5120
    memory.views([large, large])
    assert memory.num_bytes == 2 * 5120


def test_a_share_of_the_run_as_warm_up() -> None:
    """0.4 of 9 steps are three."""
    share, steps = ConstantScheduleConfig(warmup_ratio=0.4), ConstantScheduleConfig(warmup_steps=3)
    assert [lr_ratio(step, share, 9) for step in range(5)] == [lr_ratio(step, steps, 9) for step in range(5)]
    with pytest.raises(ConfigError, match="warmup_ratio needs the number"):
        lr_ratio(0, share, None)
