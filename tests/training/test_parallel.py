"""Parallel axes, each alone and together: loss, gradients and updated weights equal those of one process;
state moves between layouts; what cannot be spread is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from rondo.checkpoint import Files
from rondo.config.schema import OptimizerConfig, ParallelConfig
from rondo.controller import Mesh
from rondo.core.batch import ROW_ID
from rondo.core.columns import TOPK_IDS
from rondo.core.errors import ConfigError, TrainError
from rondo.models import ModelSource
from rondo.models.context import Context
from rondo.models.loading import build_model, load_model_config
from rondo.system.usage import process_usage
from rondo.training import Engine
from rondo.training.gathering import gather_buckets
from rondo.training.torch_backend.axes import check_axes
from rondo.training.torch_backend.head import token_log_probs
from rondo.training.views import Vocabulary, local_of
from rondo.weights.checksum import checksum
from tests.messages import full_text
from tests.models.families import source_of
from tests.ranks import run_ranks
from tests.training.helpers import (
    FLOAT64,
    PolicyLoss,
    ValueLoss,
    make_batch,
    one_rank_mesh,
    relative_difference,
    source,
    tiny_engine,
)
from tests.training.layouts import layout, rows_of

Tensors = dict[str, torch.Tensor]
Sizes = dict[str, int]
DENSE: dict[int, list[Sizes]] = {
    2: [{"tensor": 2}, {"context": 2}, {"replicate": 2}],
    4: [
        {"tensor": 2},
        {"context": 2},
        {"context": 4},  # more ranks than key/value heads
        {"replicate": 2},
        {"replicate": 2, "tensor": 2},
        {"tensor": 2, "context": 2},
        {"replicate": 2, "context": 2},
    ],
}
MIXTURE: dict[int, list[Sizes]] = {
    2: [
        {"expert": 2},
        {"tensor": 2},
        {"tensor": 2, "expert": 2},
        {"context": 2},
        {"context": 2, "expert": 2},
    ],
    4: [
        {"expert": 2},
        {"expert": 4},
        {"tensor": 2},
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert": 4},
        {"replicate": 2, "expert": 2},
        {"tensor": 2, "context": 2, "expert": 2},
    ],
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: (model, config, arguments)
    "float64": (
        "llama",
        {**FLOAT64, "token_budget": 30, "gradient_checkpointing": True, "logits_bytes": 4096},
        {},
    ),
    "tied float64": ("qwen3", {**FLOAT64, "token_budget": 10_000}, {}),
    "value float64": ("llama", {**FLOAT64, "token_budget": 30}, {"head": "value"}),
    "float32": ("qwen3", {"token_budget": 30}, {}),
    "bfloat16": ("llama", {"token_budget": 60, "compute_dtype": "bfloat16"}, {}),
}
MIXTURE_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts float64": ("qwen3_moe", {**FLOAT64, "token_budget": 30, "gradient_checkpointing": True}, {}),
    "experts float32": ("qwen3_moe", {"token_budget": 60}, {}),
}
LIMITS = {
    "float64": 1e-10,
    "experts float64": 1e-6,
    "float32": 1e-5,
    "bfloat16": 0.15,
}  # the router is in float32


def _step(
    rank: int, world: int, layouts: list[Sizes], cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]
) -> dict[tuple[str, str], tuple[float, Tensors, Tensors, float]]:
    """(case, layout) -> loss over all ranks, full gradients, weights after a step, gradient norm."""
    out = {}
    for sizes in layouts:
        views, index, count = layout(world, **sizes)
        for case, (model, config, arguments) in cases.items():
            engine = tiny_engine(views, source(model), OptimizerConfig(lr=1e-3), config=config, **arguments)
            loss = ValueLoss() if "value" in case else PolicyLoss()
            stats = engine.forward_backward(rows_of(index, count), loss)
            total = torch.tensor(stats.means.get("loss", (0.0, 0.0))[0], dtype=torch.float64)
            dist.all_reduce(total)
            gradients = {name: local_of(one.grad) for name, one in engine.backend.by_name.items()}
            gathered = gather_buckets(engine.parameters().layout(), gradients, dist.group.WORLD, 4000)
            full = {name: one.clone() for name, one in gathered}  # the step scales what is the storage
            norm = engine.optimizer_step().grad_norm
            weights = {name: one.clone() for name, one in engine.parameters().gathered(3000)}
            assert engine.parameters().checksums() == {name: checksum(one) for name, one in weights.items()}
            loss_of_all = float(total) * count / world  # ranks that have the same rows say the same
            out[case, str(sizes)] = (loss_of_all, full, weights, norm)
    return out


@pytest.mark.parametrize(
    ("world", "layouts", "cases"),
    [
        pytest.param(2, DENSE[2], CASES, marks=pytest.mark.slow),
        (2, MIXTURE[2], MIXTURE_CASES),
        pytest.param(4, DENSE[4], CASES, marks=pytest.mark.slow),
        pytest.param(4, MIXTURE[4], MIXTURE_CASES, marks=pytest.mark.slow),
    ],
)
def test_every_layout_computes_what_one_process_does(world: int, layouts: list[Sizes], cases: Any) -> None:
    alone = run_ranks(1, _step, [{}], cases)[0]
    ranks = run_ranks(world, _step, layouts, cases)
    for (case, sizes), (loss, gradients, weights, norm) in ranks[0].items():
        expected_loss, expected, updated, expected_norm = alone[case, "{}"]
        limit = next(limit for name, limit in reversed(LIMITS.items()) if case.endswith(name) or case == name)
        limit = LIMITS.get(case, limit)
        assert loss == pytest.approx(expected_loss, rel=max(limit, 1e-9)), (case, sizes)
        assert norm == pytest.approx(expected_norm, rel=max(limit, 1e-9)), (case, sizes)
        assert gradients.keys() == expected.keys()
        for name, tensor in expected.items():
            difference = relative_difference(gradients[name], tensor)
            assert difference <= limit, (case, sizes, name, difference)
        for name, tensor in updated.items():
            assert relative_difference(weights[name], tensor) <= max(limit, 1e-6), (case, sizes, name)
            assert all(torch.equal(other[case, sizes][2][name], weights[name]) for other in ranks)


def _columns(rank: int, world: int, layouts: list[Sizes]) -> dict[tuple[str, str], list[np.ndarray]]:
    """(column, layout) -> its values by row, of all rows."""
    out = {}
    for sizes in layouts:
        views, index, count = layout(world, **sizes)
        batch, columns = rows_of(index, count), []
        engine = tiny_engine(views, source("llama"), config={**FLOAT64, "token_budget": 30})
        columns.append(
            engine.forward(batch, {name: name for name in ("log_probs", "entropy", "sum_p_squared")})
        )
        columns.append(engine.forward_topk(batch, 5))
        given = batch.select([*batch.columns]).with_columns({TOPK_IDS: columns[1].array(TOPK_IDS)})
        columns.append(engine.forward(given, {"topk_log_probs": "given_log_probs"}))
        critic = tiny_engine(views, source("llama"), config=FLOAT64, head="value")
        columns.append(critic.forward_scores(batch, "scores"))
        for one in columns:
            for name in set(one.columns) - {ROW_ID}:
                values = one.rows(name) if name != "scores" else one.scalars(name)
                every: list[Any] = [None] * world
                mine = dict(zip(one.scalars(ROW_ID).tolist(), map(np.asarray, values), strict=True))
                dist.all_gather_object(every, mine)
                joined = {row: value for part in every for row, value in part.items()}
                out[name, str(sizes)] = [joined[row] for row in sorted(joined)]
    return out


def test_columns_of_every_layout_are_those_of_one_process() -> None:
    alone = run_ranks(1, _columns, [{}])[0]
    names = {name for name, _ in alone}
    assert len(names) == 8
    layouts = [{"tensor": 2}, {"context": 2}]
    for told in run_ranks(2, _columns, layouts):
        for (name, sizes), values in told.items():
            for value, expected in zip(values, alone[name, "{}"], strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12, err_msg=f"{name} {sizes}")


PLACES: list[tuple[int, Sizes]] = [
    (4, {}),
    (4, {"tensor": 2}),
    (2, {"expert": 2}),
    (4, {"replicate": 2, "context": 2}),
    (1, {}),
]


def _state(engine: Engine) -> Tensors:
    """The whole state: parameters and moments, gathered by the parameters' layout, and the counters."""
    layout_, out = engine.parameters().layout(), {}
    state = engine.backend.state()
    for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        rows = {name: local_of(state[f"{kind}.{name}"]) for name in layout_.shapes}
        gathered = gather_buckets(layout_, rows, dist.group.WORLD, 1 << 20)
        out |= {f"{kind}.{name}": one.clone() for name, one in gathered}
    return out | {"steps": state["optimizer.steps"]}


def _go_on(
    rank: int, world: int, sizes: Sizes, path: str, files: Files | None, seeds: range, other: str
) -> tuple[Tensors, Tensors, Files]:
    """What was loaded, what it is after some steps (they are saved), and the files."""
    views, index, count = layout(world, **sizes)
    engine = tiny_engine(views, source("qwen3_moe"), OptimizerConfig(lr=1e-2), config=FLOAT64)
    if files is not None:
        engine.load(path, files)
    before = _state(engine)
    for seed in seeds:
        engine.forward_backward(rows_of(index, count, seed), PolicyLoss())
        engine.optimizer_step()
    snapshot = engine.snapshot()
    return before, _state(engine), engine.save(other, snapshot)


@pytest.mark.slow
def test_state_moves_between_layouts_bit_for_bit(tmp_path: Path) -> None:
    """A run that is saved by one layout and goes on in another: nothing changes on the way, and it ends as
    one that never moved.
    """
    files, path, left = None, "", None
    for step, (world, sizes) in enumerate(PLACES):
        folder = str(tmp_path / str(step))
        results = run_ranks(world, _go_on, sizes, path, files, range(step, step + 1), folder)
        before, after, files = results[0]
        if left is not None:
            assert before.keys() == left.keys()
            assert all(torch.equal(before[name], left[name]) for name in left), (world, sizes)
        path, left = folder, after
    assert left is not None
    _, straight, _ = run_ranks(1, _go_on, {}, "", None, range(len(PLACES)), str(tmp_path / "straight"))[0]
    assert float(left["steps"][0]) == len(PLACES)
    for name, tensor in straight.items():
        assert relative_difference(left[name], tensor) < 1e-4, (
            name
        )  # the router's float32, through five steps


def _exported(rank: int, world: int, sizes: Sizes, path: str) -> tuple[Tensors, dict[str, int]]:
    views, _, _ = layout(world, **sizes)
    engine = tiny_engine(views, source("qwen3_moe"))
    engine.export(path)
    read = tiny_engine(views, ModelSource(path=path))
    return {n: one.clone() for n, one in engine.parameters().gathered(1 << 20)}, read.parameters().checksums()


@pytest.mark.parametrize("sizes", [{"tensor": 2, "expert": 2}, {"expert": 2, "context": 2}], ids=str)
def test_exports_of_a_layout_are_the_model_and_are_read_by_boxes(sizes: Sizes, tmp_path: Path) -> None:
    whole = dict(build_model(source("qwen3_moe"), torch.float32).named_parameters())
    for gathered, read in run_ranks(2, _exported, sizes, str(tmp_path)):
        assert all(torch.equal(gathered[name], tensor) for name, tensor in whole.items())
        assert read == {name: checksum(tensor) for name, tensor in whole.items()}


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 48,
}
REFUSED: dict[str, tuple[ModelSource, Sizes, dict[str, Any], str]] = {
    "heads": (
        source("llama", num_attention_heads=1, num_key_value_heads=1),
        {"tensor": 2},
        {},
        "parallel.tensor=2: the model's num_attention_heads=1 cannot be divided by it",
    ),
    "key/value heads": (
        source("llama", num_key_value_heads=1),
        {"tensor": 2},
        {},
        "parallel.tensor=2: the model's num_key_value_heads=1 cannot be divided by it",
    ),
    "no experts": (
        source("llama"),
        {"expert": 2},
        {},
        "parallel.expert=2: the model has no experts",
    ),
    "experts": (
        source("qwen3_moe", num_experts=3),
        {"expert": 2},
        {},
        "parallel.expert=2: it does not divide the 3 experts",
    ),
    "no plan": (
        source_of("gpt2"),
        {"tensor": 2},
        {},
        "parallel.tensor=2: transformers' plan for gpt2 does not exist",
    ),
    "not packable": (
        source_of("qwen3_next"),
        {"context": 2},
        {},
        "parallel.context=2: rows of a qwen3_next model cannot be packed",
    ),
    "long rope": (
        source_of("phi3", rope_parameters=LONG_ROPE),
        {"context": 2},
        {},
        "parallel.context=2: phi3 with these rope_parameters: its rotary embeddings change with the length",
    ),
    "dynamic rope": (
        source("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        {"context": 2},
        {},
        "parallel.context=2: llama with these rope_parameters: its rotary embeddings change with the length",
    ),
    "context": (
        source("llama", num_attention_heads=1, num_key_value_heads=1),
        {"context": 2},
        {},
        "parallel.context=2: it does not divide the 1 heads and 1 key/value heads that a rank would have",
    ),
}


def _refusals(rank: int, world: int) -> dict[str, tuple[str, str | None]]:
    out = {}
    for name, (model, sizes, config, _) in REFUSED.items():
        views, _, _ = layout(world, **sizes)
        with pytest.raises(ConfigError) as caught:
            tiny_engine(views, model, config=config)
        out[name] = str(caught.value), caught.value.key
    return out


def test_what_cannot_be_spread_is_refused() -> None:
    for told in run_ranks(2, _refusals):
        for name, (_, sizes, _, message) in REFUSED.items():
            assert told[name][0].startswith(message), name
            assert told[name][1] == f"parallel.{next(iter(sizes))}"


@pytest.mark.parametrize(
    ("size", "sizes", "message"),
    [
        (6, {"tensor": 4}, "parallel: replicate=1 · tensor=4 does not divide the 6 ranks"),
        (
            4,
            {"replicate": 2, "tensor": 4},
            "parallel: replicate=2 · tensor=4 does not divide the 4 ranks",
        ),
        (4, {"tensor": 2, "context": 4}, "parallel.context=4 does not divide the 2 ranks that shard"),
        (6, {"expert": 4}, "parallel.expert=4 does not divide the 6 ranks of one copy of the model"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks(size: int, sizes: Sizes, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Mesh.parallel(size, ParallelConfig(**sizes))


@pytest.mark.parametrize("axis", ["tensor", "expert"])
def test_an_older_transformers_is_refused_where_its_plans_are_needed(
    axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config(source("qwen3_moe"))
    sizes = ParallelConfig(**{axis: 2})
    check_axes(config, sizes)
    monkeypatch.setattr("rondo.training.torch_backend.axes.installed", "5.19.0")
    with pytest.raises(ConfigError, match=full_text("it needs transformers ≥ 5.23, and 5.19.0")) as caught:
        check_axes(config, sizes)
    assert caught.value.key == f"parallel.{axis}"
    check_axes(config, ParallelConfig(context=2))


def test_heads_of_a_layer_that_ranks_cannot_divide() -> None:
    """By the config, where it tells layers apart (Gemma 4); else by what the layer hands to attention (of
    MiMo's, every second has twice the key/value heads that its config names).
    """
    config = AutoConfig.for_model("gemma4_text", num_attention_heads=6, num_key_value_heads=2)
    check_axes(config, ParallelConfig(context=2))
    odd = AutoConfig.for_model(
        "gemma4_text",
        num_attention_heads=6,
        num_key_value_heads=2,
        num_global_key_value_heads=3,
        attention_k_eq_v=True,
    )
    with pytest.raises(ConfigError, match=full_text("does not divide the 6 heads and 3")) as caught:
        check_axes(odd, ParallelConfig(context=2))
    assert caught.value.key == "parallel.context"
    with pytest.raises(ConfigError, match=full_text("context=6: it does not divide the 4")) as caught:
        Context(one_rank_mesh().get_group(), 0, 6).all_tokens(torch.zeros(5, 4, 8))
    assert caught.value.key == "parallel.context"


def test_a_mesh_of_all_axes_by_hand() -> None:
    """Eight ranks: two copies, each of two ranks that divide tokens times two that divide products."""
    mesh = Mesh.parallel(8, ParallelConfig(replicate=2, context=2, tensor=2, expert=4))
    assert mesh.axes == (("dp", 2), ("cp", 2), ("tp", 2))
    assert mesh.dp_shards == (0, 0, 0, 0, 1, 1, 1, 1)
    assert mesh.collect_ranks == (0, 4)
    assert mesh.grids == {
        "data": mesh.axes,
        "dense": (("replicate", 2), ("shard", 2), ("tensor", 2)),
        "single": (("everyone", 8), ("alone", 1)),
        "expert": (("replicate", 2), ("expert_shard", 1), ("expert", 4)),
    }


def _copies(rank: int, world: int) -> str:
    """What is said where an actor's experts lie on other ranks than the reference's."""
    spread, _, _ = layout(world, expert=2)
    alike, _, _ = layout(world)
    actor = tiny_engine(spread, source("qwen3_moe"))
    same = tiny_engine(spread, source("qwen3_moe", initializer_range=0.1), None)
    same.copy_parameters_from(actor)
    assert same.parameters().checksums() == actor.parameters().checksums()
    with pytest.raises(TrainError) as caught:
        tiny_engine(alike, source("qwen3_moe"), None).copy_parameters_from(actor)
    return str(caught.value)


@pytest.mark.slow
def test_parameters_are_not_copied_to_another_layout() -> None:
    """Four ranks: two by two experts, and four rows of them, have parts of one shape."""
    for told in run_ranks(4, _copies):
        assert "differ in shape or in how ranks share them: model.layers.0.mlp.experts" in told


def _shared_vocabulary(rank: int, world: int, count: int) -> Tensors:
    """Log-probs, entropies and gradients of `count` positions, in chunks that both ranks cut alike."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 4, generator=generator).requires_grad_()
    weight = torch.randn(7, 4, generator=generator)
    targets = torch.randint(0, 7, (count,), generator=generator)
    vocabulary, own = None, weight.clone().requires_grad_()
    if world > 1:
        vocabulary = Vocabulary(dist.group.WORLD, rank, world, 7)
        own = weight[vocabulary.own].clone().requires_grad_()
    out = token_log_probs(
        hidden, own, None, targets, ("log_probs", "entropy"), chunk_bytes=4096, vocabulary=vocabulary
    )
    (out["log_probs"].sum() + out["entropy"].sum()).backward()
    assert hidden.grad is not None
    return {name: one.detach() for name, one in out.items()} | {"hidden": hidden.grad}


@pytest.mark.parametrize("count", [1, 200, 300, 500])
def test_a_vocabulary_that_does_not_divide_is_cut_into_the_same_chunks(count: int) -> None:
    """Seven tokens, four and three: a position's logits are 16 bytes on one rank, and 12 on the other."""
    alone = run_ranks(1, _shared_vocabulary, count)[0]
    for told in run_ranks(2, _shared_vocabulary, count):
        for name, tensor in alone.items():
            torch.testing.assert_close(told[name], tensor)


def _long_row(rank: int, world: int, sizes: Sizes, tokens: int) -> tuple[Tensors, int]:
    """The gradients of one row, and the bytes that its pass took beside the model."""
    views, index, _ = layout(world, **sizes)
    batch = make_batch(((8, tokens),))
    model = source("llama", max_position_embeddings=16_384, hidden_size=64, intermediate_size=256)
    engine = tiny_engine(views, model, config={"token_budget": 1 << 17, "gradient_checkpointing": True})
    before = process_usage().peak_memory_bytes
    engine.forward_backward(batch if index == 0 else batch.take([]), PolicyLoss())
    took = process_usage().peak_memory_bytes - before
    gradients = {name: local_of(one.grad) for name, one in engine.backend.by_name.items()}
    gathered = gather_buckets(engine.parameters().layout(), gradients, dist.group.WORLD, 1 << 20)
    return {name: one.clone() for name, one in gathered}, took


@pytest.mark.slow
def test_a_long_row_is_divided_with_its_memory() -> None:
    """8,192 tokens: what is kept of each, forward and backward, is 64 to 256 numbers in a few places."""
    expected, alone = run_ranks(1, _long_row, {}, 8192)[0]
    for gradients, took in run_ranks(4, _long_row, {"context": 4}, 8192):
        assert took < 0.6 * alone  # a quarter of it, and what attention has of all tokens, a head of it
        for name, tensor in expected.items():
            assert relative_difference(gradients[name], tensor) < 1e-5, name
