"""Adapters along parallel axes: they learn what those of one process do, whatever is cut beneath them; their
state moves between layouts; exports and engines get the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rondo.checkpoint import Files
from rondo.config.schema import LoraConfig, OptimizerConfig
from rondo.core.errors import ConfigError
from rondo.models import ModelSource
from rondo.training import Engine
from rondo.training.gathering import gather_buckets
from rondo.training.torch_backend.adapters import Adapters
from rondo.training.views import Views, local_of
from rondo.weights.checksum import checksum
from tests.models.families import FAMILIES, source_of
from tests.ranks import run_ranks
from tests.training.helpers import (
    FLOAT64,
    PolicyLoss,
    ValueLoss,
    relative_difference,
    source,
    tiny_engine,
)
from tests.training.layouts import layout, rows_of
from tests.training.test_parallel_families import PAGE

pytest.importorskip("peft")
Tensors = dict[str, torch.Tensor]
Sizes = dict[str, int]


def _engine(views: Views, model: ModelSource, **config: Any) -> Engine:
    given = {"token_budget": 40, "lora": LoraConfig(rank=4), **FLOAT64, **config}
    return tiny_engine(views, model, OptimizerConfig(lr=1e-2), config=given)


def _factors_of(engine: Engine, rows: Tensors) -> Tensors:
    """Something of A and B, whole."""
    spread = engine.parameters("adapters").layout()
    return {name: one.clone() for name, one in gather_buckets(spread, rows, dist.group.WORLD, 3000)}


def _gradients(engine: Engine) -> Tensors:
    factors = Adapters.split(engine.backend.by_name)[1]
    return _factors_of(engine, {name: local_of(one.grad) for name, one in factors.items()})


LORA_CASES = {
    "llama": ("llama", {}),
    "qwen3_moe": ("qwen3_moe", {"gradient_checkpointing": True}),
    "value": ("qwen2", {}),
}


def _adapted(
    rank: int, world: int, layouts: list[Sizes], cases: tuple[str, ...]
) -> dict[tuple[str, str], tuple[Tensors, Tensors, list[float]]]:
    """(case, layout) -> the adapters' gradients of the third step, the weights as engines get them after it,
    the norms of all.
    """
    out = {}
    for sizes in layouts:
        views, index, count = layout(world, **sizes)
        for case in cases:
            model, config = LORA_CASES[case]
            config = {**FLOAT64, "token_budget": 40, "lora": LoraConfig(rank=4), **config}
            arguments: dict[str, Any] = {"head": "value"} if case == "value" else {}
            loss = ValueLoss() if case == "value" else PolicyLoss()
            engine = tiny_engine(views, source(model), OptimizerConfig(lr=1e-2), config=config, **arguments)
            norms, gradients = [], {}
            for seed in range(3):
                engine.forward_backward(rows_of(index, count, seed), loss)
                if seed == 2:
                    gradients = _gradients(engine)
                norms.append(engine.optimizer_step().grad_norm)
            weights = {name: one.clone() for name, one in engine.parameters().gathered(3000)}
            assert engine.parameters().checksums() == {name: checksum(one) for name, one in weights.items()}
            engine.parameters("all").checksums()  # compares what several ranks hold, A and B too
            out[case, str(sizes)] = gradients, weights, norms
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layouts", "cases"),
    [
        (2, [{"tensor": 2}], ("llama", "value")),
        (2, [{"replicate": 2}, {"context": 2}, {"expert": 2}, {"tensor": 2}], ("qwen3_moe",)),
        pytest.param(
            4, [{"tensor": 2}, {"replicate": 2, "tensor": 2}], ("llama", "value"), marks=pytest.mark.slow
        ),
        pytest.param(4, [{"tensor": 2, "expert": 2}], ("qwen3_moe",), marks=pytest.mark.slow),
    ],
)
def test_adapters_learn_the_same_on_every_axis(
    world: int, layouts: list[Sizes], cases: tuple[str, ...]
) -> None:
    alone = run_ranks(1, _adapted, [{}], cases)[0]
    for told in run_ranks(world, _adapted, layouts, cases):
        for (case, sizes), (gradients, weights, norms) in told.items():
            limit = 1e-6 if case == "qwen3_moe" else 1e-10  # the router is in float32
            expected, updated, expected_norms = alone[case, "{}"]
            assert norms == pytest.approx(expected_norms, rel=limit)
            assert gradients.keys() == expected.keys()
            for name, tensor in expected.items():
                assert float(tensor.norm()) > 0, name
                assert relative_difference(gradients[name], tensor) <= limit, (case, sizes, name)
            for name, tensor in updated.items():
                assert relative_difference(weights[name], tensor) <= limit, (case, sizes, name)


PLACES: list[tuple[int, Sizes]] = [(2, {"tensor": 2}), (4, {"tensor": 2, "expert": 2}), (1, {}), (2, {})]


def _state(engine: Engine) -> Tensors:
    state, out = engine.backend.state(), {}
    for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        names = {name: f"{kind}.{name}" for name in engine.backend.factors}
        if kind != "model":  # the optimizer has the module's names
            own = [name for name in state if name.startswith(f"{kind}.")]
            names = dict(zip(engine.backend.factors, own, strict=True))
        rows = {name: local_of(state[entry]) for name, entry in names.items()}
        out |= {f"{kind}.{name}": one for name, one in _factors_of(engine, rows).items()}
    return out | {"steps": state["optimizer.steps"]}


def _go_on(
    rank: int, world: int, sizes: Sizes, path: str, files: Files | None, seed: int, other: str
) -> tuple[Tensors, Tensors, Files]:
    """What was loaded, what it is after a step (it is saved and exported), and the files."""
    views, index, count = layout(world, **sizes)
    engine = _engine(views, source("qwen3_moe"))
    if files is not None:
        engine.load(path, files)
    before = _state(engine)
    engine.forward_backward(rows_of(index, count, seed), PolicyLoss())
    engine.optimizer_step()
    engine.export(f"{other}-export")
    return before, _state(engine), engine.save(other)


def _unchanged(rank: int, world: int, sizes: Sizes, path: str, files: Files, other: str) -> Tensors:
    views, _, _ = layout(world, **sizes)
    engine = _engine(views, source("qwen3_moe"))
    engine.load(path, files)
    engine.export(other)
    return _state(engine)


@pytest.mark.slow
def test_state_moves_between_layouts_bit_for_bit_and_exports_are_those_of_one_process(tmp_path: Path) -> None:
    files, path, left = None, "", None
    for step, (world, sizes) in enumerate(PLACES):
        folder = str(tmp_path / str(step))
        before, after, files = run_ranks(world, _go_on, sizes, path, files, step, folder)[0]
        if left is not None:
            assert before.keys() == left.keys()
            assert all(torch.equal(before[name], left[name]) for name in left), (world, sizes)
        path, left = folder, after
        exported, alone = Path(f"{folder}-export"), tmp_path / f"{step}-alone"
        same = run_ranks(1, _unchanged, {}, path, files, str(alone))[0]
        assert all(torch.equal(same[name], left[name]) for name in left), (world, sizes)
        adapter = "adapter/adapter_model.safetensors"
        theirs, ours = (load_file(one / adapter) for one in (alone, exported))
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        theirs, ours = (load_file(one / "model.safetensors") for one in (alone, exported))
        assert theirs.keys() == ours.keys()
        for name, tensor in theirs.items():  # a part of a product is summed in another order than the whole
            assert relative_difference(ours[name], tensor) <= 1e-15, name
    assert left is not None
    assert float(left["steps"][0]) == len(PLACES)


def _families(rank: int, world: int, sizes: Sizes) -> tuple[dict[str, Tensors], dict[str, str | None]]:
    """Family -> the adapters' gradients of the second step, or the key for which it is refused."""
    out, refused = {}, {}
    views, index, count = layout(world, **sizes)
    for family in FAMILIES:
        try:
            engine = _engine(views, source_of(family))
        except ConfigError as error:
            refused[family] = error.key
            continue
        engine.forward_backward(rows_of(index, count), PolicyLoss())
        engine.optimizer_step()
        engine.forward_backward(rows_of(index, count, 1), PolicyLoss())
        out[family] = _gradients(engine)
    return out, refused


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_of_every_family_that_is_spread_along_tensor() -> None:
    (alone, none), (spread, refused) = (
        run_ranks(n, _families, {"tensor": n}, timeout=500)[0] for n in (1, 2)
    )
    assert not none
    assert set(refused.values()) == {"parallel.tensor"}
    table = re.findall(r"^\| (\w+) \| yes \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(spread) == sorted(table)
    for family, gradients in spread.items():
        for name, tensor in alone[family].items():
            limit = 1e-6 * float(tensor.norm()) + 1e-12  # some families compute in float32 here and there
            assert float((gradients[name] - tensor).norm()) <= limit, (family, name)


def _half(rank: int, world: int, sizes: Sizes) -> tuple[list[float], set[str]]:
    """A base in bfloat16, with adapters in float32: norms, and the adapters' dtypes."""
    views, index, count = layout(world, **sizes)
    engine = _engine(views, source("llama"), param_dtype="bfloat16", compute_dtype="bfloat16")
    norms = []
    for seed in range(2):
        engine.forward_backward(rows_of(index, count, seed), PolicyLoss())
        norms.append(engine.optimizer_step().grad_norm)
    return norms, {str(one.dtype) for one in engine.backend.factors.values()}


@pytest.mark.slow
def test_a_base_in_half_precision_keeps_adapters_in_float32() -> None:
    norms, _ = run_ranks(1, _half, {})[0]
    for found, dtypes in run_ranks(2, _half, {"tensor": 2}):
        assert found == pytest.approx(norms, rel=0.05)
        assert dtypes == {"torch.float32"}
