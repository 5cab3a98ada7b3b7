"""Moments in 8 bits: what is rounded to what, the update against torch's and torchao's, state that moves
between numbers of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rondo.checkpoint import Files
from rondo.config.schema import LoraConfig, OptimizerConfig
from rondo.core.errors import CheckpointError
from rondo.planning.batches import balance
from rondo.platform.cpu import Cpu
from rondo.training import Engine
from rondo.training.torch_backend import adamw_8bit
from rondo.training.torch_backend.adamw_8bit import AdamW8bit, block_of, dynamic_map, moments_8bit, shape_of
from rondo.training.views import local_of
from tests.installed import needs
from tests.ranks import run_ranks
from tests.training.helpers import FLOAT64, PolicyLoss, make_batch, relative_difference, source, tiny_engine
from tests.training.layouts import layout, rows_of

EIGHT = OptimizerConfig(moments="8bit", lr=0.01)
# Every matrix has rows that can be cut into blocks (96 numbers, 128), and all but norms have 4,096 numbers.
WIDE = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 24}


def _optimizer(parameters: list[torch.nn.Parameter], **settings: Any) -> AdamW8bit:
    optimizer = AdamW8bit(parameters, **settings)
    for one in parameters:
        optimizer.state[one] = {"step": torch.zeros(()), **moments_8bit(one, one.data)}
    return optimizer


def _moment(state: dict[str, torch.Tensor], name: str, *, signed: bool) -> torch.Tensor:
    codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
    numbers = torch.tensor(dynamic_map(signed=signed))[codes.int()]
    return (numbers.view(scales.numel(), -1) * scales.view(-1, 1)).view(codes.shape)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((64, 512), 128),
        ((896, 4864), 128),
        ((64, 1000), 125),
        ((4, 30, 100), 100),
        ((151_936, 96), 96),
        ((1000, 257), None),  # prime
        ((500, 62), None),  # shorter than a block may be
        ((50, 30, 4), None),
        ((100_000,), None),
        ((31, 128), None),  # 3,968 numbers
    ],
)
def test_a_block_divides_the_last_dimension(shape: tuple[int, ...], block: int | None) -> None:
    parameter = torch.empty(shape, device="meta")
    assert block_of(parameter) == block
    entries = moments_8bit(parameter, parameter)
    assert all(shape_of(name, parameter) == entries[name].shape for name in entries)
    assert len(entries) == (2 if block is None else 4)


def test_the_256_numbers() -> None:
    """By hand, of the paper's data type: the smallest, the largest, and how many there are of each size."""
    for signed in (False, True):
        numbers = dynamic_map(signed=signed)
        assert len(set(numbers)) == 256
        assert list(numbers) == sorted(numbers)
        assert {0.0, 1.0} <= set(numbers)
    signed, positive = dynamic_map(signed=True), dynamic_map(signed=False)
    assert sum(number > 0 for number in signed) == 128  # 1, and 1 + 2 + … + 64
    assert positive[1:4] == pytest.approx((3.25e-7, 7.75e-7, 2.125e-6))
    assert min(number for number in signed if number > 0) == pytest.approx(5.5e-7)
    assert positive[-2] == pytest.approx(1 - 0.9 / 256)
    assert signed[0] == pytest.approx(-(1 - 0.9 / 128))


def test_the_first_step_by_hand() -> None:
    """A step from moments of 0 is the sign of the gradient, whatever they are rounded to afterwards."""
    parameter = torch.nn.Parameter(torch.zeros(32, 128))
    optimizer = _optimizer([parameter], lr=0.5, betas=(0.75, 0.5), eps=1e-12, weight_decay=0.0)
    gradient = torch.full((32, 128), 2.0)
    gradient[:, 64:] = -1.0
    parameter.grad = gradient
    optimizer.step()
    torch.testing.assert_close(parameter.data, -0.5 * gradient.sign())
    state = optimizer.state[parameter]
    assert state["exp_avg_codes"].shape == (32, 128)
    assert torch.equal(state["exp_avg_scales"], torch.full((32, 1), 0.5))  # a quarter of 2
    assert torch.equal(state["exp_avg_sq_scales"], torch.full((32, 1), 2.0))
    mean = _moment(state, "exp_avg", signed=True)
    assert torch.equal(mean[:, :64], torch.full((32, 64), 0.5))
    # -0.25 is -0.5 of the largest: the nearest middle of 64 parts of [0.1, 1] is 0.1 + 28.5 · 0.9 / 64.
    torch.testing.assert_close(mean[:, 64:], torch.full((32, 64), -0.5 * (0.1 + 28.5 * 0.9 / 64)))


def test_each_number_is_rounded_to_the_nearest() -> None:
    for signed in (False, True):
        numbers = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
        values = torch.rand(32, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 4
        values = values * (2 * (torch.arange(128) % 2) - 1) if signed else values
        name = "exp_avg" if signed else "exp_avg_sq"
        state = moments_8bit(values, values)
        adamw_8bit._write(state, name, slice(0, 32), 128, values)
        scaled = values / state[f"{name}_scales"].view(32, 1)
        nearest = (scaled[..., None] - numbers).abs().argmin(-1)
        assert torch.equal(state[f"{name}_codes"].long(), nearest)


@pytest.mark.parametrize("signed", [False, True])
def test_the_table_of_upper_bits_finds_what_a_search_finds(signed: bool) -> None:
    """At both ends of each run of numbers with the same upper bits, at the edges between codes, beside."""
    numbers = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    halfway = ((numbers[1:] + numbers[:-1]) / 2).float()
    upper = (torch.arange(1 << 16) << 16)[:, None] + torch.tensor([0, 0xFFFF])
    ends = upper.to(torch.int32).view(torch.float32).flatten()
    beside = [torch.nextafter(halfway, torch.tensor(end)) for end in (-2.0, 2.0)]
    values = torch.cat([ends[ends.abs() <= 1], halfway, *beside, torch.tensor([1.0])])
    values = values if signed else values[values >= 0]
    name = "exp_avg" if signed else "exp_avg_sq"
    rows = torch.ones(len(values), 128)  # the largest of each block is 1
    state = moments_8bit(rows, rows)
    rows[:, 0] = values
    adamw_8bit._write(state, name, slice(0, len(values)), 128, rows)
    expected = torch.bucketize(values, halfway, right=True)
    assert torch.equal(state[f"{name}_codes"][:, 0].long(), expected)


def test_what_is_too_small_for_codes_is_torchs_adamw(mesh: DeviceMesh) -> None:
    settings = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1}
    plain = tiny_engine(mesh, optimizer=OptimizerConfig(**settings), config=FLOAT64)
    ours = tiny_engine(mesh, optimizer=OptimizerConfig(moments="8bit", **settings), config=FLOAT64)
    assert plain.backend.optimizer is not None
    assert not any("codes" in name for name in ours.backend.state())  # a width of 32
    for seed in range(3):
        for engine in (plain, ours):
            engine.forward_backward(make_batch(seed=seed), PolicyLoss())
        assert plain.optimizer_step().grad_norm == pytest.approx(ours.optimizer_step().grad_norm, rel=1e-10)
    for name, tensor in plain.parameters_in_place().items():
        assert relative_difference(ours.parameters_in_place()[name], tensor) < 1e-10


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        parameter = torch.nn.Parameter(torch.randn(50, 192, generator=generator))
        optimizer = _optimizer([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        for _ in range(4):
            parameter.grad = torch.randn(50, 192, generator=generator)
            optimizer.step()
        return {"parameter": parameter.data, **optimizer.state[parameter]}

    whole = run()
    monkeypatch.setattr(Cpu, "numbers", replace(Cpu.numbers, moments=7 * 192))
    sliced = run()
    assert all(torch.equal(sliced[name], whole[name]) for name in whole)


def test_it_is_torchaos_where_blocks_are_alike() -> None:
    """The same codes but for numbers halfway between two, and the same parameters."""
    needs("torchao")
    import torchao.optim

    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 512), (30,))]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    mine, other = _optimizer(ours, **settings), torchao.optim.AdamW8bit(theirs, block_size=128, **settings)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(8):
            for one, same in zip(ours, theirs, strict=True):
                one.grad = torch.randn(one.shape, generator=generator)
                same.grad = one.grad.clone()
            mine.step()
            other.step()
    for one, same in zip(ours, theirs, strict=True):
        assert relative_difference(one.data, same.data) < 1e-5
    codes = mine.state[ours[0]]["exp_avg_codes"], other.state[theirs[0]]["exp_avg"].codes
    assert int((codes[0] != codes[1]).sum()) <= 3


@pytest.mark.slow
def test_a_nan_gradient_leaves_codes_and_scales(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh, source(**WIDE), EIGHT)
    engine.forward_backward(make_batch(), PolicyLoss())
    engine.optimizer_step()
    before = engine.snapshot()
    batch = make_batch()
    poisoned = batch.with_columns({"advantages": [float("nan")] + [1.0] * (len(batch) - 1)}, replace=True)
    engine.forward_backward(poisoned, PolicyLoss())
    assert engine.optimizer_step().skipped
    after = engine.backend.state()
    for name in before.keys() - {"optimizer.steps"}:
        assert torch.equal(local_of(after[name]), local_of(before[name])), name


@pytest.mark.parametrize(("saved", "now"), [("full", "8bit"), ("8bit", "full")])
def test_a_checkpoint_of_the_other_optimizer_is_refused(
    mesh: DeviceMesh, tmp_path: Path, saved: Any, now: Any
) -> None:
    engine, other = (tiny_engine(mesh, source(**WIDE), OptimizerConfig(moments=one)) for one in (saved, now))
    files = engine.save(str(tmp_path))
    with pytest.raises(CheckpointError, match="exp_avg"):
        other.load(str(tmp_path), files)


# ---- several ranks


def _engine(rank: int, world: int, name: str = "llama", **config: Any) -> Engine:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    return tiny_engine(mesh, source(name, **WIDE), EIGHT, config={**FLOAT64, **config})


def _steps(engine: Engine, rank: int, world: int, seeds: range) -> None:
    for seed in seeds:
        batch = make_batch(seed=seed)
        costs = batch.lengths("prompt_ids") + batch.lengths("response_ids")
        engine.forward_backward(batch.take(balance(costs, world)[rank]), PolicyLoss())
        engine.optimizer_step()


def _everything(engine: Engine) -> dict[str, torch.Tensor]:
    state = engine.backend.state()
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
    return {name: tensor.clone() for name, tensor in whole.items()}


def _train_and_save(rank: int, world: int, path: str, name: str) -> tuple[dict[str, torch.Tensor], Files]:
    engine = _engine(rank, world, name)
    _steps(engine, rank, world, range(3))
    state = _everything(engine)
    return state, engine.save(path)


def _resumed(rank: int, world: int, path: str, files: Files, name: str) -> list[dict[str, torch.Tensor]]:
    """As loaded, and after two more steps; then those of a run that was never broken off."""
    engine, other = _engine(rank, world, name), _engine(rank, world, name)
    engine.load(path, files)
    loaded = _everything(engine)
    _steps(engine, rank, world, range(3, 5))
    _steps(other, rank, world, range(5))
    return [loaded, _everything(engine), _everything(other)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_ranks_and_checkpoints(tmp_path: Path, name: str) -> None:
    """Moments do not depend on the number of ranks (two share out 61 rows of 96 numbers unevenly), load into
    any other one exactly, and a resumed run has the bits of an undisturbed one.
    """
    path = str(tmp_path / "two")
    saved, files = run_ranks(2, _train_and_save, path, name)[0]
    coded = [name for name in saved if name.startswith("model.") and block_of(saved[name])]
    assert len([name for name in saved if "_codes." in name]) == 2 * len(coded)
    assert saved["optimizer.exp_avg_codes.lm_head.weight"].dtype == torch.uint8
    alone, _ = run_ranks(1, _train_and_save, str(tmp_path / "one"), name)[0]
    for key, tensor in saved.items():
        same = (alone[key] == tensor).double().mean() if tensor.dtype == torch.uint8 else None
        if same is not None:  # a number may lie on the edge between two
            assert float(same) > 0.999, key
        else:
            assert relative_difference(alone[key], tensor) < 1e-5, key
    for world in (1, 2, 3):
        loaded, resumed, undisturbed = run_ranks(world, _resumed, path, files, name)[0]
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
        if world == 2:
            assert all(torch.equal(resumed[key], undisturbed[key]) for key in resumed)


NARROW = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
TALL = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


def _spread(
    rank: int, world: int, name: str, layouts: list[dict[str, int]], path: str, files: Files
) -> list[tuple[dict[str, torch.Tensor], Files]]:
    """The whole state after three steps in each layout; of one, first what was loaded from the other's."""
    out = []
    for sizes in layouts:
        views, index, count = layout(world, **sizes)
        experts = {"moe_intermediate_size": 256} if name == "qwen3_moe" else {}
        engine = tiny_engine(views, source(name, **TALL, **experts), EIGHT, config=FLOAT64)
        if files:
            engine.load(path, files)
            out.append((_everything(engine), {}))
            continue
        for seed in range(3):
            engine.forward_backward(rows_of(index, count, seed), PolicyLoss())
            engine.optimizer_step()
        state = _everything(engine)
        out.append((state, engine.save(f"{path}/{len(out)}")))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("llama", [{"tensor": 2}, {"context": 2}, {"replicate": 2}]),
        ("qwen3_moe", [{"expert": 2}, {"tensor": 2, "expert": 2}, {"tensor": 2}]),
    ],
)
def test_several_axes(tmp_path: Path, name: str, layouts: list[dict[str, int]]) -> None:
    """Codes and scales are cut as the parameter is, along rows and columns; their state loads into one rank,
    and one rank's into them.
    """
    (tmp_path / "one").mkdir()
    (alone, saved), *_ = run_ranks(1, _spread, name, [{}], str(tmp_path / "one"), {})[0]
    spread = run_ranks(2, _spread, name, layouts, str(tmp_path / "two"), {})[0]
    for place, (state, files) in enumerate(spread):
        for key, tensor in alone.items():
            if tensor.dtype == torch.uint8:
                assert float((state[key] == tensor).double().mean()) > 0.999, (layouts[place], key)
            else:
                assert relative_difference(state[key], tensor) < 1e-4, (layouts[place], key)
        ((loaded, _),) = run_ranks(1, _spread, name, [{}], f"{tmp_path}/two/{place}", files)[0]
        assert all(torch.equal(loaded[key], state[key]) for key in state)
    for loaded, _ in run_ranks(2, _spread, name, layouts, f"{tmp_path}/one/0", saved)[0]:
        assert all(torch.equal(loaded[key], alone[key]) for key in alone)


def _into_one_rank(rank: int, world: int, path: str, files: Files) -> str:
    views, _, _ = layout(world)
    with pytest.raises(CheckpointError) as caught:
        tiny_engine(views, source("llama", **NARROW), EIGHT).load(path, files)
    return str(caught.value)


def _saved_by_two(rank: int, world: int, path: str) -> Files:
    views, _, _ = layout(world, tensor=2)
    return tiny_engine(views, source("llama", **NARROW), EIGHT).save(path)


def test_other_blocks_are_refused(tmp_path: Path) -> None:
    """Where ranks cut the last dimension into pieces of 64, blocks have 64 numbers, and else 128."""
    files = run_ranks(2, _saved_by_two, str(tmp_path))[0]
    assert "exp_avg_scales" in run_ranks(1, _into_one_rank, str(tmp_path), files)[0]


def test_adapters_learn_with_it(mesh: DeviceMesh) -> None:
    pytest.importorskip("peft")
    lora = LoraConfig(rank=48, alpha=8.0)
    engine = tiny_engine(mesh, source("llama", **WIDE), EIGHT, config={"lora": lora})
    before = engine.snapshot()
    for seed in range(2):
        engine.forward_backward(make_batch(seed=seed), PolicyLoss())
        engine.optimizer_step()
    state = engine.backend.state()
    coded = [name for name in state if "_codes." in name]
    assert coded
    assert all("lora_A" in name for name in coded)  # a row of B has 48 numbers
    assert not any(torch.equal(local_of(state[n]), local_of(before[n])) for n in coded)
