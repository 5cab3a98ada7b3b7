"""Gathered full tensors into the native engine: bits, accounts, and what is wrong is named."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rondo.core.errors import WeightSyncError
from rondo.models import load_model_config
from rondo.models.loading import build_model
from rondo.platform import Residency
from rondo.rollout.weights import WeightStore, build_module
from rondo.training import Engine
from rondo.weights.checksum import checksum
from rondo.weights.disk import version_folder, write_weights
from rondo.weights.sync import SyncReport, gather_along, gather_into
from rondo.workers.transfer import ReceivesWeights
from tests.messages import full_text
from tests.ranks import run_ranks
from tests.training.helpers import one_rank_mesh, source, tiny_engine
from tests.training.layouts import layout
from tests.weights.sinks import Keeping

NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(one_rank_mesh())


def store(dtype: torch.dtype = torch.float32, name: str = "qwen3", **changes: Any) -> WeightStore:
    module = build_module(
        load_model_config(source(name, **changes)),
        "eager",
        dtype,
        torch.device("cpu"),
        trust_remote_code=False,
    )
    return WeightStore(module, None, dtype, torch.device("cpu"))


def test_the_native_engine_confirms_what_it_holds(engine: Engine) -> None:
    sink = store()
    report = gather_into(engine.parameters(), sink, 5, 4000)
    assert (sink.version, sink.complete) == (5, True)
    parameters = sink.tensors
    model = dict(build_model(source(), torch.float32).named_parameters(remove_duplicate=False))
    assert parameters.keys() == model.keys()
    assert "lm_head.weight" in parameters  # tied: came under the other name
    assert all(torch.equal(parameters[name], tensor) for name, tensor in model.items())
    assert (report.bytes_moved, report.bytes_needed, report.peak_bytes) == (0, 0, 0)  # all in this process


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_another_dtype_is_cast_once_and_still_confirmed(engine: Engine, wire: str | None) -> None:
    """wire None: float32 arrives and the sink casts; bfloat16: the trainer does. The bits are the same."""
    sink = store(torch.bfloat16)
    gather_into(engine.parameters(), sink, 1, 4000, dtype=wire)
    expected = dict(engine.parameters().gathered(4000))
    assert all(torch.equal(sink.tensors[name], tensor.bfloat16()) for name, tensor in expected.items())


def test_a_flipped_bit_is_found_and_named(engine: Engine) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        sink = store(dtype)
        original = sink.receive

        def flipping(name: str, tensor: torch.Tensor, original: Any = original) -> None:
            if name == NAME:
                tensor = tensor.clone()
                tensor.view(torch.uint8)[3, 5] ^= 4
            original(name, tensor)

        sink.receive = flipping  # type: ignore[method-assign]
        with pytest.raises(
            WeightSyncError, match=rf"commit\(2\): '{NAME}' is not what was sent \(checksum 0x"
        ):
            gather_into(engine.parameters(), sink, 2)
        assert (sink.version, sink.complete) == (-1, False)


def test_a_tensor_that_changed_in_the_storage_is_found(engine: Engine) -> None:
    """The native engine's checksum is of its storage, not of what passed by."""
    sink = store()
    sink.begin(1)
    for name, tensor in engine.parameters().gathered(1 << 20):
        sink.receive(name, tensor)
    sink.tensors[NAME][0, 0] += 1
    with pytest.raises(WeightSyncError, match=f"'{NAME}' is not what was sent"):
        sink.commit(1, engine.parameters().checksums())


def test_wrong_shapes_names_and_gaps_are_named(engine: Engine) -> None:
    with pytest.raises(WeightSyncError, match=full_text("has shape (61, 32), the model wants")):
        gather_into(engine.parameters(), store(hidden_size=64), 1)
    with pytest.raises(WeightSyncError, match=r"the model has no parameter '.*(q|k)_norm"):
        gather_into(engine.parameters(), store(name="llama", tie_word_embeddings=True), 1)
    sink = store()
    sink.begin(1)
    with pytest.raises(WeightSyncError, match=full_text("commit(1): 24 of 24 tensors")):
        sink.commit(1, engine.parameters().checksums())


def _gathered(rank: int, world: int, lone: bool) -> SyncReport | None:
    engine = tiny_engine(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    if lone and rank == 1:
        gather_along(engine.parameters(), 5000, "bfloat16")
        engine.parameters().checksums("bfloat16")  # as the other rank does below
        return None
    sink = Keeping()
    report = gather_into(engine.parameters(), sink, 3, 5000, dtype="bfloat16", processes=2)
    expected = dict(build_model(source(), torch.float32).named_parameters())
    assert all(torch.equal(sink.tensors[n], t.bfloat16()) for n, t in expected.items())
    assert engine.parameters().checksums("bfloat16") == {n: checksum(t) for n, t in sink.tensors.items()}
    return report


@pytest.mark.parametrize("lone", [False, True])
def test_ranks_gather_at_wire_dtype(lone: bool) -> None:
    report = run_ranks(2, _gathered, lone)[0]
    size = sum(p.numel() * 2 for p in build_model(source(), torch.float32).parameters())
    rounded = 2 * (61 % 2) * 32  # bytes: the embedding's 61 rows are 62 on two ranks
    assert report.bytes_moved == size + rounded + 4 * size  # the all-gather; two engines beside each rank
    assert report.bytes_needed == 4 * size
    assert report.peak_bytes < 5000 * 5 + 2 * 61 * 32 * 2


class Waking(Keeping):
    """An engine that sleeps: it takes memory when it begins."""

    def __init__(self, happened: list[tuple[str, float]]) -> None:
        super().__init__()
        self._happened = happened

    def begin(self, version: int) -> None:
        self._happened.append(("wake", time.monotonic()))
        super().begin(version)


def _beside_an_engine(rank: int, world: int) -> list[tuple[str, float]]:
    """What a rank does in order, on a device that is called cuda, and moves nothing."""
    engine = tiny_engine(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    happened: list[tuple[str, float]] = []

    def release() -> None:
        time.sleep(0.2 * rank)  # the rank without the engine is the late one
        happened.append(("release", time.monotonic()))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.backend, "residency", Residency("cuda:0"))
        patched.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patched.setattr(torch.cuda, "empty_cache", release)
        if rank == 1:
            gather_along(engine.parameters(), 5000, "bfloat16")
        else:
            gather_into(engine.parameters(), Waking(happened), 3, 5000, dtype="bfloat16")
    return happened


def test_all_ranks_give_memory_back_before_an_engine_wakes() -> None:
    """An engine over both devices maps its weights on both; and once more after all is gathered."""
    leading, along = run_ranks(2, _beside_an_engine)
    assert [name for name, _ in leading] == ["release", "wake", "release"]
    assert [name for name, _ in along] == ["release", "release"]
    assert along[0][1] < leading[1][1]


def test_models_beside_an_engine_that_receives_give_memory_back_first(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights(engine.parameters(), tmp_path, 1, 1 << 20)
    assert version_folder(tmp_path, 1).is_dir()
    happened: list[tuple[str, float]] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append(("release", time.monotonic())))
    sink: Any = Waking(happened)
    sink.peak_bytes = 0
    worker = ReceivesWeights()
    worker.context = SimpleNamespace(device="cuda:1", rank=0)  # type: ignore[assignment]
    worker.replicas = SimpleNamespace(  # type: ignore[assignment]
        sink=lambda what: sink, num_processes=1, loaded=lambda version: None
    )
    worker.read_weights(str(tmp_path), 1)
    assert [name for name, _ in happened] == ["release", "wake"]
    assert sink.version == 1


LAYOUTS: list[dict[str, int]] = [{}, {"context": 2}, {"tensor": 2}, {"replicate": 2}]


def _accounts(rank: int, world: int) -> list[tuple[int, int, int]]:
    out = []
    for sizes in LAYOUTS:
        engine = tiny_engine(layout(world, **sizes)[0], source(vocab_size=64))
        report = gather_into(engine.parameters(), Keeping(), 1, 4096)
        out.append((report.bytes_moved, report.bytes_needed, report.peak_bytes))
    return out


@pytest.mark.slow
def test_what_ranks_hold_already_is_neither_moved_nor_needed() -> None:
    """All sizes divide. Along `tensor` norms are whole on both ranks, along `replicate` all is."""
    model = dict(build_model(source(vocab_size=64), torch.float32).named_parameters())
    size = sum(one.numel() * 4 for one in model.values())
    norms = sum(one.numel() * 4 for one in model.values() if one.ndim == 1)
    largest = 64 * 32 * 4  # the embedding, more than a bucket
    peak = 2 * largest + largest // 2 + largest
    expected = [(size, size, peak), (size, size, peak), (size - norms, size - norms, peak), (0, 0, 0)]
    for told in run_ranks(2, _accounts):
        assert told == expected
