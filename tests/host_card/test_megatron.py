"""Megatron's stages on cards in host memory: what they compute is what torch does in one process."""

from __future__ import annotations

import functools
import gc
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rondo.config.schema import (
    ActorLoraConfig,
    ExpertBalanceConfig,
    MegatronBackendConfig,
    OptimizerConfig,
    RouterConfig,
)
from rondo.core.batch import Batch, ragged_rows
from rondo.core.columns import PROMPT_ROUTED, ROUTED
from rondo.core.errors import CheckpointError, ConfigError, RondoError
from rondo.models import ModelSource
from rondo.models.lora import is_adapter
from rondo.planning.memory import stage_adapters
from rondo.planning.model_run import ModelRun, Spread
from rondo.planning.shapes import find_shape
from rondo.training import Engine, OptimizerStats, offload
from rondo.training.gathering import gather_buckets
from rondo.training.megatron.shards import StageRows
from rondo.training.torch_backend.adapters import Adapters
from rondo.training.views import local_of
from rondo.weights.checksum import checksum
from rondo.weights.sync import Sent
from tests.host_card import on_the_host_card
from tests.models.families import source_of
from tests.ranks import run_ranks
from tests.trainers.test_parallel_roles import Run, compare, run  # noqa: F401 (a fixture)
from tests.training.helpers import (
    PolicyLoss,
    ValueLoss,
    one_rank_mesh,
    relative_difference,
    source,
    tiny_engine,
)
from tests.training.layouts import layout, rows_of

pytestmark = [*on_the_host_card, pytest.mark.slow]
Tensors = dict[str, torch.Tensor]
Sizes = dict[str, int]
SHAPE = {"num_hidden_layers": 4, "vocab_size": 64}  # what stages and tensor ranks divide

PAIRS: list[Sizes] = [
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "context": 2},
    {"pipeline": 2, "context": 2},
]
VIRTUAL: Sizes = {"pipeline": 2, "virtual": 2}  # beside the axes: chunks of each stage
EXPERTS: list[Sizes] = [
    {"expert": 4},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert": 4},
    {"pipeline": 2, "expert": 2},
    {"context": 2, "expert": 2},
    {"tensor": 2, "pipeline": 2, "expert": 2},
    VIRTUAL | {"expert": 2},
]
EACH: list[Sizes] = [{}, {"tensor": 2}, {"pipeline": 2}, {"pipeline": 4}, {"context": 2}, *PAIRS, VIRTUAL]
LORA = ActorLoraConfig(rank=3, alpha=6.0)
SOME = ActorLoraConfig(rank=2, alpha=1.0, targets=("k_proj", "o_proj", "up_proj", "3.mlp.down_proj"))
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: (model, config, arguments)
    "llama": ("llama", {"token_budget": 60, "logits_bytes": 4096}, {}),
    "biases": ("qwen2", {"token_budget": 30, "gradient_checkpointing": True}, {}),
    "tied": ("qwen3", {"token_budget": 10_000}, {}),
    "again": ("qwen3", {"token_budget": 30, "gradient_checkpointing": True}, {}),
    "value": ("qwen3", {"token_budget": 60}, {"head": "value"}),
    "experts": ("qwen3_moe", {"token_budget": 60}, {}),
    "latent": ("deepseek_v3", {"token_budget": 30, "gradient_checkpointing": True}, {}),
    "adapters": ("qwen3", {"token_budget": 30, "gradient_checkpointing": True, "lora": LORA}, {}),
    "some": ("qwen2", {"token_budget": 60, "lora": SOME}, {}),
    "adapted value": ("llama", {"token_budget": 60, "lora": LORA}, {"head": "value"}),
    "adapted latent": ("deepseek_v3", {"token_budget": 30, "lora": LORA}, {}),
}


# With Adam's own epsilon the first step is the sign of a gradient: rounding's where that is nearly zero, as a
# key's bias has it.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4)
SELECTIVE = ("biases", "latent")


def model_of(name: str, layers: int = 4) -> ModelSource:
    """DeepSeek's has scaled positions, and a layer without experts."""
    shape = SHAPE | {"num_hidden_layers": layers}
    if name != "deepseek_v3":
        return source(name, **shape)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    return source_of(name, rope_parameters=yarn | {"mscale": 1.0, "mscale_all_dim": 0.5}, **shape)


def engine_on(
    rank: int,
    world: int,
    sizes: Sizes,
    case: str,
    backend: dict[str, Any],
    layers: int = 4,
    optimizer: OptimizerConfig | None = OPTIMIZER,
    **changes: Any,
) -> tuple[Engine, int, int]:
    """The engine of a case, and which of how many cuts of the rows this rank gets."""
    model, config, arguments = CASES[case]
    axes = {name: size for name, size in sizes.items() if name != "virtual"}
    views, index, count = layout(world, device=f"cuda:{rank}", **axes)
    chunks = {"virtual": sizes.get("virtual", 1)}
    engine = tiny_engine(
        views,
        model_of(model, layers),
        optimizer,
        {"compute_dtype": "float32", **config, **changes},
        f"cuda:{rank}",
        backend=MegatronBackendConfig(
            name="megatron", recompute="selective" if case in SELECTIVE else "full", **chunks, **backend
        ),
        **arguments,
    )
    return engine, index, count


def gradients_of(engine: Engine, what: Sent = "merged") -> Tensors:
    """The whole gradients, by a checkpoint's names: each rank has the sum over rows, of its part of each."""
    backend: Any = engine.backend
    backend.stage.finish_gradients()
    whole, layout = {}, engine.parameters(what).layout("float32")
    pieces_of_these = {
        name: pieces for name, pieces in backend.pieces.items() if pieces[0].name in layout.shapes
    }
    for name, pieces in pieces_of_these.items():
        flat = backend._runs.get(name)
        part = None if flat is None else flat.gradients
        summed = backend._turns.joined(name, backend.own[name], flat, part)
        whole[name] = backend._turns.told(name, summed)
        assert pieces
    rows = StageRows(whole, pieces_of_these)
    gathered = gather_buckets(layout, rows, dist.group.WORLD, 4000)
    return {name: one.cpu().clone() for name, one in gathered}


def _loss_of(case: str) -> Any:
    return ValueLoss() if case.endswith("value") else PolicyLoss()


@functools.cache
def one_process(case: str) -> tuple[float, Tensors, Tensors, float]:
    """Loss, gradients, weights after a step and norm, of torch on a CPU."""
    model, config, arguments = CASES[case]
    engine = tiny_engine(one_rank_mesh(), model_of(model), OPTIMIZER, config, **arguments)
    stats = engine.forward_backward(rows_of(0, 1), _loss_of(case))
    gradients = {name: one.grad.clone() for name, one in engine.backend.by_name.items()}
    norm = engine.optimizer_step().grad_norm
    weights = {name: one.clone() for name, one in engine.parameters().gathered(3000)}
    return stats.means["loss"][0], gradients, weights, norm


def _step(rank: int, world: int, layouts: list[Sizes], cases: list[str]) -> dict[tuple[str, str], Any]:
    """(case, layout) -> loss over all ranks, whole gradients, weights after a step, gradient norm. Gradients
    come of two calls, the second of which has no rows on a rank.
    """
    out = {}
    for sizes in layouts:
        for case in cases:
            engine, index, count = engine_on(rank, world, sizes, case, {})
            batch, loss = rows_of(index, count), _loss_of(case)
            few = batch.take(range(2)) if index == 0 else batch.take([])
            rest = batch.take(range(2, len(batch))) if index == 0 else batch
            stats = [engine.forward_backward(part, loss) for part in (rest, few)]
            total = torch.tensor([sum(one.means.get("loss", (0.0, 0.0))[0] for one in stats)])
            dist.all_reduce(total)
            gradients = gradients_of(engine)
            engine.backend.stage.finish_gradients = lambda: None  # type: ignore[attr-defined]  # they are
            norm = engine.optimizer_step().grad_norm
            weights = {name: one.cpu().clone() for name, one in engine.parameters().gathered(3000)}
            assert engine.parameters().checksums() == {name: checksum(one) for name, one in weights.items()}
            out[case, str(sizes)] = float(total) * count / world, gradients, weights, norm
    return out


@pytest.mark.parametrize(
    ("layouts", "cases"),
    [
        (EACH, ["llama", "again"]),
        ([*PAIRS, VIRTUAL | {"tensor": 2}], ["biases", "tied", "value"]),
        ([*EXPERTS, {}, {"tensor": 2}, *PAIRS], ["experts"]),
        ([*EXPERTS, *PAIRS, {"pipeline": 4}], ["latent"]),
    ],
    ids=["each", "pairs", "experts", "latent"],
)
def test_gradients_and_a_step_are_those_of_one_process(layouts: list[Sizes], cases: list[str]) -> None:
    found = run_ranks(4, _step, layouts, cases, cards=True, timeout=500)[0]
    for (case, sizes), (loss, gradients, weights, norm) in found.items():
        expected = one_process(case)
        assert loss == pytest.approx(expected[0], rel=1e-5), (case, sizes)
        assert norm == pytest.approx(expected[3], rel=1e-5), (case, sizes)
        biases = {name for name in expected[2] if name.endswith("e_score_correction_bias")}  # of no gradient
        assert gradients.keys() == expected[1].keys() | biases
        for name, gradient in expected[1].items():
            assert relative_difference(gradients[name], gradient) < 1e-5, (case, sizes, name)
        for name, weight in expected[2].items():
            assert relative_difference(weights[name], weight) < 1e-4, (case, sizes, name)


# ---- adapters ----------------------------------------------------------------------------------------------

ADAPTED: dict[str, list[Sizes]] = {
    "adapters": [*EACH, VIRTUAL | {"tensor": 2}],
    "some": [{}, *PAIRS, {"pipeline": 4}],
    "adapted value": [{"tensor": 2, "pipeline": 2}],
    "adapted latent": [*EXPERTS, *PAIRS],
}
Adapted = tuple[Tensors, Tensors, Tensors, Tensors, tuple[float, int], Any]


def _start_of(case: str, folder: Path) -> dict[str, Any]:
    """Changes of the engine's config: adapters that start as a file of torch's says, with B that is not 0."""
    model, config, arguments = CASES[case]
    engine = tiny_engine(one_rank_mesh(), model_of(model), None, config, **arguments)
    torch.manual_seed(0)
    for name, one in engine.backend.by_name.items():
        if is_adapter(name):
            one.data.normal_(std=0.2)
    engine.backend.export_adapters(str(folder))
    return {"lora": replace(config["lora"], path=str(folder))}


def _with_adapters(engine: Engine, index: int, count: int, case: str, gradients: Any) -> Adapted:
    """Whole gradients of A and B; these, the weights with them merged, and all that a checkpoint has but for
    its counters, after a step; the norm, and the number of parameters; and outputs without adapters.
    """
    batch, value = rows_of(index, count), case.endswith("value")
    engine.forward_backward(batch, _loss_of(case))
    found = gradients(engine)
    norm = engine.optimizer_step().grad_norm
    factors, merged = (
        {name: one.cpu().clone() for name, one in engine.parameters(what).gathered(3000)}
        for what in ("adapters", "merged")
    )
    everything = {name: one.cpu().clone() for name, one in engine.parameters("all").gathered(3000)}
    for what, one in (("adapters", factors), ("merged", merged), ("all", everything)):
        assert engine.parameters(what).checksums() == {name: checksum(its) for name, its in one.items()}
    with engine.without_adapters():
        outputs = engine.forward(batch, {"values": "x"} if value else {"log_probs": "x"})
    ids = outputs.scalars("row_id").tolist()
    rows = {row: own.tolist() for row, own in zip(ids, outputs.rows("x"), strict=True)}
    return found, factors, merged, everything, (norm, engine.backend.num_parameters()), rows


def _adapted(rank: int, world: int, case: str, changes: dict[str, Any], folder: str) -> dict[str, Adapted]:
    def whole(engine: Engine) -> Tensors:
        found = gradients_of(engine, "adapters")
        engine.backend.stage.finish_gradients = lambda: None  # type: ignore[attr-defined]  # they are
        return found

    out = {}
    for number, sizes in enumerate(ADAPTED[case]):
        engine, index, count = engine_on(rank, world, sizes, case, {}, **changes)
        own: Any = engine.backend
        learns = sum(one.numel() for one in own.own.values() if one.requires_grad)
        axes = {name: sizes.get(name, 1) for name in ("tensor", "pipeline", "virtual")}
        shape = find_shape(None, own.hf_config.to_dict())
        planned = stage_adapters(ModelRun(shape, Spread(world, **axes), trains=True, lora=3))
        assert case != "adapters" or learns == planned, sizes
        out[str(sizes)] = _with_adapters(engine, index, count, case, whole)
        engine.backend.export_adapters(f"{folder}/{number}")
    return out


@pytest.mark.parametrize("case", list(ADAPTED))
def test_adapters_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    """Which alone learn, and a value head: gradients, a step, what is sent of them, alone and merged, the
    model without them, and the folders that peft reads.
    """
    changes = _start_of(case, tmp_path / "start")
    model, config, arguments = CASES[case]
    mine = tiny_engine(one_rank_mesh(), model_of(model), OPTIMIZER, config | changes, **arguments)

    def plain(engine: Engine) -> Tensors:
        factors = Adapters.split(engine.backend.by_name)[1]
        return {name: one.grad.clone() for name, one in factors.items()}  # type: ignore[union-attr]

    expected = _with_adapters(mine, 0, 1, case, plain)
    found = run_ranks(4, _adapted, case, changes, str(tmp_path), cards=True, timeout=500)
    for of_rank in found:
        for number, (sizes, ours) in enumerate(of_rank.items()):
            assert ours[4] == pytest.approx(expected[4], rel=1e-5), sizes
            for part, limit in zip(range(4), (1e-5, 1e-4, 1e-4, 1e-4), strict=True):
                assert (
                    list(ours[part]) == list(expected[part]) if part else ours[0].keys() == expected[0].keys()
                )
                for name, one in expected[part].items():
                    assert float(one.norm()) > 0 or not float(ours[part][name].norm()), (sizes, name)
                    assert relative_difference(ours[part][name], one) < limit, (sizes, part, name)
            for row, values in ours[5].items():
                np.testing.assert_allclose(values, expected[5][row], rtol=0, atol=2e-5)
            folder = tmp_path / str(number)
            written = load_file(folder / "adapter_model.safetensors")
            assert written.keys() == ours[1].keys()
            assert all(torch.equal(written[name], one) for name, one in ours[1].items())


# ---- outputs -----------------------------------------------------------------------------------------------

ASKED = ("log_probs", "entropy", "topk_log_probs", "topk_ids")


def _columns(engine: Engine, batch: Batch) -> dict[str, Any]:
    names = {name: f"teacher_{name}" for name in ASKED if not name.startswith("topk")}
    plain, wide = engine.forward(batch, names), engine.forward_topk(batch, 5)
    found = {name: plain.ragged(name)[0].numpy() for name in names.values()}
    return found | {
        name: wide.ragged(name)[0].numpy() for name in ("teacher_topk_log_probs", "teacher_topk_ids")
    }


def _outputs(rank: int, world: int, sizes: Sizes, layers: int) -> Any:
    backend = {"first_stage_layers": sizes.get("virtual", 1)} if "pipeline" in sizes else {}
    engine = engine_on(rank, world, sizes, "tied", backend, layers)[0]
    batch = rows_of(0, 1)
    assert len(engine.forward(batch.take([]), {"log_probs": "old_log_probs"})) == 0  # nobody has a pass
    return _columns(engine, batch)


@pytest.mark.parametrize(
    ("sizes", "layers"), [({"tensor": 2}, 4), ({"pipeline": 2}, 4), (VIRTUAL, 6)], ids=str
)
def test_each_stage_has_the_outputs_of_one_process(sizes: Sizes, layers: int) -> None:
    """Of the likeliest tokens, too, where tensor ranks share out the vocabulary; stages of 1 and 3 layers, or
    of two chunks of 1 and of 2.
    """
    found = run_ranks(2, _outputs, sizes, layers, cards=True)
    model, config, _ = CASES["tied"]
    expected = _columns(tiny_engine(one_rank_mesh(), model_of(model, layers), None, config), rows_of(0, 1))
    for columns in found:
        for name, one in expected.items():
            assert columns[name].shape == one.shape
            np.testing.assert_allclose(columns[name], one, rtol=0, atol=2e-5, err_msg=name)


# ---- routers -----------------------------------------------------------------------------------------------


def _routed(engine: Engine, batch: Batch, gradients: Any) -> tuple[dict[int, Any], Tensors, Any]:
    """Where the tokens of each row go; then gradients and numbers of an update whose tokens go to the expert
    beside each of these.
    """
    found = engine.forward(batch, {"log_probs": "old_log_probs"}, routes=True)
    routes = {name: found.rows(name) for name in (PROMPT_ROUTED, ROUTED)}
    others = {name: ragged_rows([one ^ 1 for one in rows], np.uint8) for name, rows in routes.items()}
    engine.forward_backward(batch.with_columns(others), PolicyLoss())
    whole = gradients(engine)
    ids = batch.scalars("row_id").tolist()
    by_row = {row: [rows[at].tolist() for rows in routes.values()] for at, row in enumerate(ids)}
    load = engine.optimizer_step().experts
    biases = {name: one.cpu().clone() for name, one in engine.parameters().gathered(3000) if "bias" in name}
    return by_row, whole | biases, load


ROUTERS: dict[str, Any] = {
    "experts": RouterConfig(ExpertBalanceConfig(0.3, "sequence")),
    "latent": RouterConfig(ExpertBalanceConfig(0.3, "mini_batch"), bias_speed=0.01),
}


def _balanced(case: str) -> dict[str, Any]:
    return {"router": ROUTERS[case], "gradient_checkpointing": True}


def _told(rank: int, world: int, layouts: list[Sizes], case: str) -> list[Any]:
    out = []
    for sizes in layouts:
        engine, index, count = engine_on(rank, world, sizes, case, {}, **_balanced(case))
        out.append(_routed(engine, rows_of(index, count), gradients_of))
    return out


@pytest.mark.parametrize("case", list(ROUTERS))
def test_routers_balance_are_told_and_tell_as_in_one_process(case: str) -> None:
    """Choices, gradients with a loss that balances, in layers that are computed again, numbers, and biases
    that go toward equal load.
    """
    layouts: list[Sizes] = [
        {"tensor": 2, "expert": 4},
        {"tensor": 2, "expert": 2} | VIRTUAL,
        {"context": 2, "tensor": 2},
    ]
    model, config, _ = CASES[case]
    config = {**config, **_balanced(case)}
    engine = tiny_engine(one_rank_mesh(), model_of(model), OPTIMIZER, config)

    def plain(engine: Engine) -> Tensors:
        return {name: one.grad.clone() for name, one in engine.backend.by_name.items()}

    routes, gradients, load = _routed(engine, rows_of(0, 1), plain)
    for of_rank in run_ranks(4, _told, layouts, case, cards=True):
        for sizes, (mine, ours, seen) in zip(layouts, of_rank, strict=True):
            assert all(routes[row] == one for row, one in mine.items()), sizes
            for name, gradient in gradients.items():
                assert relative_difference(ours[name], gradient) < 1e-5, (sizes, name)
            assert vars(seen) == pytest.approx(vars(load), rel=1e-5), sizes
    assert case == "experts" or any(bool(one.any()) for name, one in gradients.items() if "bias" in name)
    assert load.replayed == 1.0
    assert load.rerouted > 0.5


# ---- checkpoints -------------------------------------------------------------------------------------------


def _trained(engine: Engine, index: int, count: int, seeds: range, loss: Any) -> None:
    for seed in seeds:
        engine.forward_backward(rows_of(index, count, seed), loss)
        engine.optimizer_step()


def _loaded_and_saved(
    rank: int, world: int, sizes: Sizes, case: str, path: str, files: Any, to: str
) -> tuple[Any, Tensors]:
    """Reads a checkpoint and writes it again; and the weights after another step."""
    engine, index, count = engine_on(rank, world, sizes, case, {})
    engine.load(path, files)
    again = engine.save(to)
    _trained(engine, index, count, range(2, 3), _loss_of(case))
    return again, {name: one.cpu().clone() for name, one in engine.parameters().gathered(3000)}


MANY: dict[str, list[tuple[int, Sizes]]] = {
    "tied": [(2, {"tensor": 2}), (4, {"tensor": 2, "pipeline": 2}), (2, VIRTUAL), (2, {})],
    "latent": [(4, {"tensor": 2, "expert": 4}), (4, {"pipeline": 2, "expert": 2})],
    "adapters": [(2, {"tensor": 2}), (4, {"tensor": 2, "pipeline": 2}), (2, VIRTUAL), (2, {})],
}


@pytest.mark.parametrize("case", list(MANY))
def test_a_checkpoint_goes_to_megatron_and_another_layout_and_back(tmp_path: Path, case: str) -> None:
    """Weights, moments and counters come back bit for bit, and the step behind it is torch's."""
    model, config, _ = CASES[case]

    def of_torch() -> Engine:
        return tiny_engine(one_rank_mesh(), model_of(model), OPTIMIZER, config)

    first = of_torch()
    _trained(first, 0, 1, range(2), _loss_of(case))
    before, path = first.snapshot(), str(tmp_path / "torch")
    files = first.save(path)
    _trained(first, 0, 1, range(2, 3), _loss_of(case))
    expected = {name: one.clone() for name, one in first.parameters().gathered(3000)}
    for number, (world, sizes) in enumerate(MANY[case]):
        to = str(tmp_path / str(number))
        files, weights = run_ranks(world, _loaded_and_saved, sizes, case, path, files, to, cards=True)[0]
        for name, one in expected.items():
            assert relative_difference(weights[name], one) < 1e-4, (sizes, name)
        path = to
    back = of_torch()
    back.load(path, files)
    after = back.snapshot()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(local_of(tensor), local_of(after[name])), name


def _read_what_is_cut_off(rank: int, world: int, sizes: Sizes, folder: str) -> tuple[str, str]:
    """What is said of a checkpoint, and of a model, whose last bytes are missing."""
    engine, index, count = engine_on(rank, world, sizes, "tied", {})
    saved, model = f"{folder}/saved", f"{folder}/model"
    files = engine.save(saved)
    engine.export(model)
    _trained(engine, index, count, range(1), PolicyLoss())
    before = engine.snapshot()
    if rank == 0:
        for file in (f"{saved}/rank-1.bin", f"{model}/model.safetensors"):
            os.truncate(file, os.path.getsize(file) - 8)
    dist.barrier()
    with pytest.raises(CheckpointError) as of_checkpoint:
        engine.load(saved, files)
    after = engine.snapshot()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(local_of(tensor), local_of(after[name])), name
    views, backend = layout(world, device=f"cuda:{rank}", **sizes)[0], MegatronBackendConfig("megatron")
    with pytest.raises(RondoError) as of_model:
        tiny_engine(views, ModelSource(path=model), device=f"cuda:{rank}", backend=backend)
    return str(of_checkpoint.value), str(of_model.value)


def test_what_is_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    """On all ranks, and none of it is read into the weights and moments that are there."""
    found = run_ranks(2, _read_what_is_cut_off, {"pipeline": 2}, str(tmp_path), cards=True)
    for of_checkpoint, of_model in found:
        assert of_checkpoint.startswith(f"{tmp_path / 'saved' / 'rank-1.bin'}: damaged: it ends after ")
        assert of_model.startswith(f"{tmp_path / 'model' / 'model.safetensors'} is cut off: 8 of its bytes")


class _BrokenLoss(PolicyLoss):
    def __call__(self, *given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return super().__call__(*given)[0] * torch.nan, {}


def _skipped(engine: Engine, index: int, count: int) -> OptimizerStats:
    """A step that is not finite on one stage or rank; weights and moments are as before on all."""
    before = engine.snapshot()
    loss: Any = _BrokenLoss() if index == 0 else PolicyLoss()
    engine.forward_backward(rows_of(index, count), loss)
    stats = engine.optimizer_step()
    after = engine.snapshot()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name != "optimizer.steps":  # the schedule goes on
            assert torch.equal(local_of(tensor), local_of(after[name])), name
    return stats


HALF = {"tied": {}, "adapters": {"param_dtype": "bfloat16"}}


def _goes_on(rank: int, world: int, layouts: list[Sizes], case: str, folder: str) -> list[tuple[Any, Any]]:
    """Four steps, and two with two more in another engine that reads what the first wrote, in bfloat16."""
    sums = []
    for number, sizes in enumerate(layouts):
        config = {"compute_dtype": "bfloat16", **HALF[case]}
        whole, index, count = engine_on(rank, world, sizes, case, {}, **config)
        _trained(whole, index, count, range(2), PolicyLoss())
        files = whole.save(f"{folder}/{number}")
        _trained(whole, index, count, range(2, 4), PolicyLoss())
        resumed = engine_on(rank, world, sizes, case, {}, **config)[0]
        resumed.load(f"{folder}/{number}", files)
        _trained(resumed, index, count, range(2, 4), PolicyLoss())
        stats = _skipped(resumed, index, count)
        assert (math.isnan(stats.grad_norm), stats.skipped) == (True, True)
        for engine in (whole, resumed):  # what computes, and is sent, is what steps add to, rounded
            backend: Any = engine.backend
            for name, flat in backend._runs.items():
                assert torch.equal(flat.weights, backend.optimizer.weights_of(name).bfloat16())
        sums.append((dict(whole.parameters().checksums()), dict(resumed.parameters().checksums())))
        if case == "adapters":  # what is sent of them, and merged, is what steps add to, not rounded
            rounded = {
                name: torch.equal(one, one.bfloat16().float())
                for name, one in resumed.parameters("adapters").gathered(3000)
            }
            assert not any(rounded.values())
    return sums


@pytest.mark.parametrize("case", list(HALF))
def test_half_precision_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, case: str) -> None:
    layouts: list[Sizes] = [{}, {"tensor": 2}, {"pipeline": 2}, VIRTUAL]
    for of_rank in run_ranks(2, _goes_on, layouts, case, str(tmp_path), cards=True):
        for undisturbed, resumed in of_rank:
            assert resumed == undisturbed


def _exported(rank: int, world: int, sizes: Sizes, case: str, folder: str) -> Any:
    engine, index, count = engine_on(rank, world, sizes, case, {})
    engine.forward_backward(rows_of(index, count), PolicyLoss())
    engine.optimizer_step()
    engine.export(folder)
    return engine.parameters().layout("bfloat16").parameters


@pytest.mark.parametrize(("case", "axis"), [("biases", "tensor"), ("latent", "expert")])
def test_an_export_is_the_model_that_was_trained(tmp_path: Path, case: str, axis: str) -> None:
    """transformers reads it: its weights are those of torch after the same step. What engines of any kind are
    sent is what torch sends them: the same tensors, in the same order, each in the same type.
    """
    sent = run_ranks(4, _exported, {axis: 2, "pipeline": 2}, case, str(tmp_path / "out"), cards=True)
    weights = one_process(case)[2]
    by_torch = tiny_engine(one_rank_mesh(), model_of(CASES[case][0])).parameters().layout("bfloat16")
    assert all(parameters == by_torch.parameters for parameters in sent)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert read.keys() == weights.keys()
    for name, one in weights.items():
        assert relative_difference(read[name], one) < 1e-4, name


# ---- what rests in host memory -----------------------------------------------------------------------------

RESTS: list[dict[str, bool]] = [
    {},
    {"offload_params": True},
    {"offload_optimizer": True},
    {"offload_params": True, "offload_optimizer": True},
]


def _rests(rank: int, world: int, sizes: Sizes, case: str, dtype: str, folder: str) -> list[Any]:
    """For each way to rest: sums of weights, state and log-probs after some steps, one of which is behind a
    checkpoint that another engine reads, and of a frozen model that has taken them over; what was on the
    card in each phase, and what should have been; bytes on the card at the end; and those that a snapshot
    adds, of the largest parameter in float32, and of the snapshot.
    """
    offload.BLOCK_BYTES = 20_000  # several, and parameters that are larger than one
    found = []
    for number, rests in enumerate(RESTS):
        before = torch.cuda.memory_allocated()
        config = {"compute_dtype": dtype, **rests}
        engine, index, count = engine_on(rank, world, sizes, case, {}, **config)
        batch, loss = rows_of(index, count), _loss_of(case)
        _trained(engine, index, count, range(2), loss)  # gradients rest between the pass and the step
        files = engine.save(f"{folder}/{number}")
        engine = engine_on(rank, world, sizes, case, {}, **config)[0]
        engine.load(f"{folder}/{number}", files)
        with engine.on_device():
            _trained(engine, index, count, range(2, 3), loss)
        engine.forward(batch, {"log_probs": "x"} if case != "value" else {"values": "x"})
        sums = dict(engine.parameters().checksums(dtype))
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        at = torch.cuda.memory_allocated()
        snapshot = engine.snapshot()
        room = torch.cuda.max_memory_allocated() - at
        largest = max(4 * one.numel() for one in engine.backend.own.values())  # type: ignore[attr-defined]
        of_snapshot = room, largest, sum(local_of(one).nbytes for one in snapshot.values())
        state = {name: checksum(local_of(one)) for name, one in snapshot.items()}
        measured = engine.backend.residency.measured()
        gc.collect()
        held, plan = torch.cuda.memory_allocated() - before, engine.backend.residency.plan
        without = {"lora": None} if "adapt" in case else {}
        frozen = engine_on(rank, world, sizes, case, {}, optimizer=None, **config, **without)[0]
        frozen.copy_parameters_from(engine)
        for _ in range(2):
            frozen.forward(batch, {"log_probs": "x"} if case != "value" else {"values": "x"})
        assert dict(frozen.parameters().checksums(dtype)) == sums
        frozen_state = {name: checksum(local_of(one)) for name, one in frozen.snapshot().items()}
        found.append((sums, (state, frozen_state), measured, held, plan, of_snapshot))
        del engine, frozen
        gc.collect()
    return found


@pytest.mark.parametrize(
    ("sizes", "case", "dtype"),
    [
        ({"pipeline": 2}, "tied", "bfloat16"),
        ({"tensor": 2}, "value", "bfloat16"),
        ({"expert": 2}, "experts", "float32"),
        (VIRTUAL, "latent", "bfloat16"),
        ({"tensor": 2}, "adapters", "float32"),
    ],
    ids=str,
)
def test_what_rests_has_the_bits_of_what_stays(tmp_path: Path, sizes: Sizes, case: str, dtype: str) -> None:
    """And there is on the card what was planned: by owner and phase, to the byte. A snapshot, which has 12
    bytes of a parameter that this rank writes, wants room for one parameter at a time.
    """
    for of_rank in run_ranks(2, _rests, sizes, case, dtype, str(tmp_path), cards=True):
        expected, state = of_rank[0][:2]
        for rests, (sums, mine, measured, held, plan, of_snapshot) in zip(RESTS, of_rank, strict=True):
            assert (sums, mine) == (expected, state), rests
            room, largest, nbytes = of_snapshot
            returned = plan.of("gather")["weights"] - plan.of("rest")["weights"]
            assert room - returned < 3 * largest, rests
            assert case == "adapters" or 3 * largest < nbytes / 2
            for phase in ("rest", "forward", "update", "gather"):
                for owner, size in plan.of(phase).items():
                    assert measured.get(f"{phase}_{owner}_planned_bytes", size) == size
                    assert measured.get(f"{phase}_{owner}_bytes", 0) == size, (rests, phase, owner)
            assert (plan.of("rest")["weights"] == 0) == ("offload_params" in rests)
            assert (plan.of("rest")["moments"] == 0) == ("offload_optimizer" in rests)
            if case in ("tied", "value"):  # a mixture's dispatcher keeps what its last pass had
                assert held - sum(plan.of("rest").values()) < 60_000, rests


# ---- options -----------------------------------------------------------------------------------------------


def _refused(rank: int, world: int) -> list[str]:
    said = []
    every: list[tuple[str, dict[str, Any]]] = [
        ("tied", {"hidden_size": 3}),
        ("tied", {"softmax_scale": 2.0}),
        ("tied", {"widht": 1}),
        ("adapted latent", {"moe_shared_expert_overlap": True}),
        ("tied", {"init_method_std": -1.0}),
    ]
    for case, options in every:
        try:
            engine_on(rank, world, {}, case, {"options": options})
        except ConfigError as error:
            said.append(f"{error.key}: {error}")
        else:
            said.append("taken")
    return said


def test_options_are_megatrons_own_and_have_an_effect_or_are_refused() -> None:
    (said,) = run_ranks(1, _refused, cards=True)
    expected = {
        "hidden_size": "is set by rondo",
        "softmax_scale": "would have no effect",
        "widht": "is no field of its TransformerConfig",
        "moe_shared_expert_overlap": "adapters (lora) of shared experts",
    }
    for one, (name, why) in zip(said, expected.items(), strict=False):
        assert one.startswith(f"actor.backend.options.{name}: actor.backend.options.{name}: {why}")
    assert said[4] == "taken"  # nothing is initialised by it
