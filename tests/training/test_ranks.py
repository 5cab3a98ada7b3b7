"""Several ranks: equal loss and gradients however rows are cut; state that moves between numbers of ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from rondo.checkpoint import Files
from rondo.checkpoint.checked import Piece, faults_in, num_bytes, placed, read_piece
from rondo.config.schema import FallingScheduleConfig, OptimizerConfig, TorchBackendConfig
from rondo.core.errors import CheckpointError
from rondo.planning.batches import balance
from rondo.training import Engine, checkpoint
from tests.models.families import source_of
from tests.ranks import run_ranks
from tests.training.helpers import (
    FLOAT64,
    PolicyLoss,
    ValueLoss,
    full_gradients,
    make_batch,
    relative_difference,
    source,
    tiny_engine,
    with_groups,
)

Gradients = dict[str, torch.Tensor]


def shard(rank: int, world: int, seed: int = 0) -> Any:
    batch = with_groups(make_batch(seed=seed), (4, 3))  # their prompts are shared, or not, as the cut falls
    costs = batch.lengths("prompt_ids") + batch.lengths("response_ids")
    return batch.take(balance(costs, world)[rank])


def _gradients(rank: int, world: int) -> dict[str, tuple[float, Gradients]]:
    """Name of a case -> (loss summed over ranks, full gradients)."""
    mesh, out = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), {}
    whole = 10_000
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "float64": ({**FLOAT64, "token_budget": whole}, {}),
        "float64 micro": (
            {**FLOAT64, "token_budget": 30, "logits_bytes": 4096, "gradient_checkpointing": True},
            {},
        ),
        "float32": ({"token_budget": whole}, {}),
        "float32 micro": ({"token_budget": 30}, {}),
        "value float64": ({**FLOAT64, "token_budget": 30}, {"head": "value"}),
        "experts float64": ({**FLOAT64, "token_budget": 30}, {}),
        "windows and sinks float64": ({**FLOAT64, "token_budget": 30, "gradient_checkpointing": True}, {}),
        "bfloat16": ({"compute_dtype": "bfloat16", "token_budget": 60}, {}),
    }
    for name, (config, arguments) in cases.items():
        model = source("qwen3_moe" if name.startswith("experts") else "llama")
        if name.startswith("windows"):
            model = source_of("gpt_oss")
        engine = tiny_engine(mesh, model, config=config, **arguments)
        loss = ValueLoss() if name.startswith("value") else PolicyLoss()
        stats = engine.forward_backward(shard(rank, world), loss)
        total = torch.tensor(stats.means.get("loss", (0.0, 0.0))[0], dtype=torch.float64)
        dist.all_reduce(total)
        out[name] = (float(total), full_gradients(engine))
    return out


def test_loss_and_gradients_do_not_depend_on_ranks_or_micro_batches() -> None:
    results = {world: run_ranks(world, _gradients)[0] for world in (1, 2, 4)}
    tolerance = {
        "float64": 1e-10,
        "float64 micro": 1e-10,
        "value float64": 1e-10,
        "experts float64": 1e-6,  # the router rounds to float32
        "windows and sinks float64": 1e-6,
        "float32": 1e-5,
        "float32 micro": 1e-5,
    }
    for world, cases in results.items():
        for name, limit in tolerance.items():
            base = name.removesuffix(" micro")
            loss, gradients = results[1][base]
            assert cases[name][0] == pytest.approx(loss, rel=max(limit, 1e-9))
            for parameter, expected in gradients.items():
                difference = relative_difference(cases[name][1][parameter], expected)
                assert difference <= limit, (world, name, parameter, difference)
        for parameter, expected in results[1]["float32"][1].items():
            assert relative_difference(cases["bfloat16"][1][parameter], expected) < 0.15, (world, parameter)


def _few_rows(rank: int, world: int) -> list[float]:
    """Two rows on the last rank, none elsewhere: every rank still runs the same passes."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    engine = tiny_engine(mesh, config={**FLOAT64, "token_budget": 25})
    batch = make_batch().take([0, 5, 8] if rank == world - 1 else [])
    old = engine.forward(batch, {"log_probs": "old_log_probs"})
    assert len(old) == len(batch)
    with torch.no_grad():
        engine.evaluate(batch, PolicyLoss())
    engine.forward_backward(batch, PolicyLoss())
    step = engine.optimizer_step()
    return [step.grad_norm, *(float(t.sum()) for _, t in engine.parameters().gathered(3000))]


def test_ranks_without_rows_do_not_hang_and_change_nothing() -> None:
    alone = run_ranks(1, _few_rows)[0]
    for result in run_ranks(3, _few_rows):
        assert result == pytest.approx(alone, rel=1e-9)


def _engine(rank: int, world: int, seed: int = 3) -> Engine:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    optimizer = OptimizerConfig(lr=0.01, schedule=FallingScheduleConfig("cosine", warmup_steps=2))
    return tiny_engine(mesh, source(), optimizer, total_optimizer_steps=9)


def _steps(engine: Engine, rank: int, world: int, seeds: range) -> list[float]:
    norms = []
    for seed in seeds:
        engine.forward_backward(shard(rank, world, seed), PolicyLoss())
        norms.append(engine.optimizer_step().grad_norm)
    return norms


def _everything(engine: Engine) -> dict[str, torch.Tensor]:
    state = engine.backend.state()
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in state.items()}


def _train_and_save(rank: int, world: int, path: str) -> tuple[dict[str, torch.Tensor], Files]:
    engine = _engine(rank, world)
    _steps(engine, rank, world, range(3))
    snapshot, now = engine.snapshot(), _everything(engine)
    _steps(engine, rank, world, range(3, 5))
    files = engine.save(path, snapshot)  # the copy, though training went on
    return now, files


def _load(rank: int, world: int, path: str, files: Files) -> dict[str, torch.Tensor]:
    engine = _engine(rank, world)
    engine.load(path, files)
    return _everything(engine)


@pytest.mark.slow
def test_saved_on_two_ranks_loads_exactly_on_one_two_and_four(tmp_path: Path) -> None:
    (saved, files), (_, files_of_other) = run_ranks(2, _train_and_save, str(tmp_path / "state"))
    assert float(saved["optimizer.steps"][0]) == 3
    assert files == files_of_other
    assert sorted(files) == [".metadata", "rank-0.bin", "rank-1.bin"]
    assert faults_in(tmp_path / "state", files) == []
    for world in (1, 2, 4):
        loaded = run_ranks(world, _load, str(tmp_path / "state"), files)[0]
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def _interrupted(rank: int, world: int, path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Five steps in one go, and three steps, a new engine from disk, two more."""
    straight = _engine(rank, world)
    _steps(straight, rank, world, range(5))
    first = _engine(rank, world)
    _steps(first, rank, world, range(3))
    files = first.save(path)
    second = _engine(rank, world)
    second.load(path, files)
    _steps(second, rank, world, range(3, 5))
    third = _engine(rank, world)
    copy = f"{path}-snapshot"
    third.load(copy, third.save(copy, first.snapshot()))
    _steps(third, rank, world, range(3, 5))
    resumed, from_copy = _everything(second), _everything(third)
    assert all(torch.equal(from_copy[name], resumed[name]) for name in resumed)
    return _everything(straight), resumed


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_going_on_from_a_checkpoint_is_bit_for_bit(world: int, tmp_path: Path) -> None:
    for straight, resumed in run_ranks(world, _interrupted, str(tmp_path / "state")):
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def _gathered(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    engine = _engine(rank, world)
    whole = {name: shard.full_tensor() for name, shard in engine.backend.shards.items()}
    for bucket_bytes in (1, 5000, 1 << 30):
        gathered = dict(engine.parameters().gathered(bucket_bytes))
        assert list(gathered) == list(whole)
        assert all(torch.equal(gathered[n], whole[n]) for n in whole)
    engine.export(path)
    return whole


def test_gathered_and_exported_from_three_ranks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = run_ranks(3, _gathered, str(tmp_path))[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in whole.items())
    np.testing.assert_array_equal(model.lm_head.weight.data_ptr(), model.model.embed_tokens.weight.data_ptr())


def _traced(rank: int, world: int, path: str) -> tuple[Files, list[str], list[str], list[tuple[str, str]]]:
    """(files, opened while saving, opened while resuming, pieces read while resuming) of this rank."""
    engine = _engine(rank, world)
    opened: list[str] = []
    pieces: list[tuple[str, str]] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(path):
            opened.append(f"{Path(arguments[0]).name} {arguments[1]}")

    def read(file: Any, path: Path, start: int, piece: Piece, into: Any) -> None:
        pieces.append((path.name, piece.name))
        read_piece(file, path, start, piece, into)

    sys.addaudithook(note)  # of this process, which ends with the test
    checkpoint.read_piece = read  # type: ignore[attr-defined]
    files = engine.save(path)
    saved, opened[:] = list(opened), []
    engine.load(path, files)
    return files, saved, opened, pieces


def test_nothing_is_read_at_a_save_and_every_piece_once_at_a_resume(tmp_path: Path) -> None:
    (files, save_0, load_0, read_0), (_, save_1, load_1, read_1) = run_ranks(2, _traced, str(tmp_path))
    assert save_0 == ["rank-0.bin x", ".metadata x"]
    assert save_1 == ["rank-1.bin x"]
    everything = {(file, piece.name) for file in files for piece in files[file] if piece.name}
    (counters,) = [one for one in everything if one[1] == "optimizer.steps"]  # every rank needs them
    own = [{one for one in everything if one[0] == f"rank-{rank}.bin"} | {counters} for rank in (0, 1)]
    assert sorted(read_0) == sorted(own[0])  # lists: none is there twice
    assert sorted(read_1) == sorted(own[1])
    assert sorted(load_0) == sorted([".metadata r", *(f"{name} r" for name in {n for n, _ in own[0]})])
    assert sorted(load_1) == sorted(f"{name} r" for name in {n for n, _ in own[1]})


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _load_damaged(rank: int, world: int, path: str, files: Files) -> str:
    with pytest.raises(CheckpointError) as caught:
        _engine(rank, world).load(path, files)
    return str(caught.value)


@pytest.mark.slow
def test_damage_is_named_on_every_rank_whichever_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    _, files = run_ranks(2, _train_and_save, str(folder))[0]
    start, piece = list(placed(files["rank-1.bin"]))[3]
    _flip(folder / "rank-1.bin", start + piece.num_bytes - 1)
    place = f"bytes {start} to {start + piece.num_bytes} (tensor {piece.name})"
    wanted = f"{folder / 'rank-1.bin'}: damaged: {place} do not have the checksum that the manifest lists"
    assert run_ranks(2, _load_damaged, str(folder), files) == [wanted, wanted]
    assert faults_in(folder, files) == [wanted]
    _flip(folder / "rank-1.bin", start + piece.num_bytes - 1)
    size = num_bytes(files["rank-0.bin"])
    os.truncate(folder / "rank-0.bin", size - 1)
    short = run_ranks(2, _load_damaged, str(folder), files)
    assert short[0] == short[1]
    assert f"{folder / 'rank-0.bin'}: damaged: it ends after {size - 1} bytes (tensor " in short[0]
    _flip(folder / ".metadata", 100)
    wanted = f"{folder / '.metadata'}: damaged: bytes 0 to {num_bytes(files['.metadata'])} do not have"
    assert all(wanted in message for message in run_ranks(2, _load_damaged, str(folder), files))


def _load_into_other(rank: int, world: int, path: str, files: Files) -> str:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    engine = tiny_engine(mesh, source("qwen3", hidden_size=64))
    with pytest.raises(CheckpointError, match="cannot be loaded into this model") as caught:
        engine.load(path, files)
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine.load(path + "-nowhere", files)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _, files = run_ranks(1, _train_and_save, str(tmp_path / "state"))[0]
    assert "another" in run_ranks(1, _load_into_other, str(tmp_path / "state"), files)[0]


def _gathers(rank: int, world: int) -> dict[bool, tuple[int, int, Gradients]]:
    """reshard -> all-gathers of a forward and of a training pass, and the gradients."""
    mesh, out = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), {}
    for reshard in (True, False):
        engine = tiny_engine(mesh, backend=TorchBackendConfig(reshard=reshard))
        counts = []
        for verb in (
            lambda engine=engine: engine.forward(shard(rank, world), {"log_probs": "old_log_probs"}),
            lambda engine=engine: engine.forward_backward(shard(rank, world), PolicyLoss()),
        ):
            with CommDebugMode() as calls:
                verb()
            counts.append(calls.get_comm_counts()[torch.ops.c10d._allgather_base_])
        out[reshard] = (*counts, full_gradients(engine))
    return out


def test_what_is_kept_between_forward_and_backward_is_not_gathered_twice() -> None:
    result = run_ranks(2, _gathers)[0]
    blocks = source().config["num_hidden_layers"]
    assert result[True][:2] == (blocks + 1, 2 * blocks + 1)  # the root is never given back in between
    assert result[False][:2] == (blocks + 1, blocks + 1)
    for name, gradient in result[True][2].items():
        assert torch.equal(gradient, result[False][2][name]), name
