"""What a mixture's training asks of its routers: balancing losses against a plain computation of their
equations, the same under every layout and cut; counts and biases by hand; what cannot be asked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rondo.config.schema import (
    ActorRouterConfig,
    ExpertBalanceConfig,
    LoraConfig,
    OptimizerConfig,
    RouterConfig,
    TorchBackendConfig,
)
from rondo.core.batch import Batch, ragged_array, ragged_rows
from rondo.core.columns import PROMPT_ROUTED, ROUTED
from rondo.core.errors import ConfigError, DataError
from rondo.models import ModelSource
from rondo.models.loading import build_model
from rondo.training import Engine
from rondo.training.gathering import gather_buckets
from rondo.training.views import local_of
from tests.messages import full_text
from tests.models.families import source_of
from tests.ranks import run_ranks
from tests.training.helpers import (
    FLOAT64,
    GAP,
    PolicyLoss,
    ValueLoss,
    full_gradients,
    gaps_of_choices,
    make_batch,
    one_rank_mesh,
    relative_difference,
    source,
    tiny_engine,
    with_groups,
)
from tests.training.layouts import layout, rows_of
from tests.training.reads import DeviceReads

Gradients = dict[str, torch.Tensor]
WEIGHT = 0.3


def router(over: str | None, bias_speed: float = 0.0) -> RouterConfig:
    balance = None if over is None else ExpertBalanceConfig(WEIGHT, over)  # type: ignore[arg-type]
    return RouterConfig(balance, bias_speed)


def batch_of(groups: tuple[int, ...] = (4, 3)) -> Batch:
    """Rows of which some share a prompt, one has a response of one token, and one has none."""
    return with_groups(make_batch(), groups)


def gradients_of(engine: Engine, batch: Batch, loss: Any = None) -> Gradients:
    engine.forward_backward(batch, loss or PolicyLoss())
    return {name: one.clone() for name, one in full_gradients(engine).items() if one is not None}


# ---- the equations, as one reads them


def plain_model(source: ModelSource, dtype: torch.dtype) -> Any:
    """The model with transformers' own attention."""
    lm = build_model(source, dtype, kernels="transformers")
    lm.set_attn_implementation("eager")
    return lm


def routing_of_rows(lm: Any, batch: Batch) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(affinities [T, E], experts [T, k]) of each layer, for each row by itself, with transformers' code."""
    rows = []
    for prompt, response in zip(batch.rows("prompt_ids"), batch.rows("response_ids"), strict=True):
        if not len(response):
            continue
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(module: Any, _: Any, out: Any, seen: Any = seen) -> None:
            logits = out[0].double()
            sigmoid = type(module).__name__.startswith(("Deepseek", "MiniMax", "Glm"))
            scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
            scores = scores / scores.sum(-1, keepdim=True)
            others = scores.scatter(1, out[2], -torch.inf).amax(1)
            assert (scores.gather(1, out[2]).amin(1) - others).abs().min() > GAP
            seen.append((scores, out[2]))

        modules = [one for name, one in lm.named_modules() if name.endswith((".gate", ".router"))]
        hooks = [one.register_forward_hook(keep) for one in modules]
        ids = torch.tensor(np.concatenate([prompt, response[:-1]]))[None]
        lm.model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        rows.append(seen)
    return rows


def balance_of(leans: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """E Σ_i f_i P_i of the tokens in leans [T, E] and experts [T, k]."""
    chosen = torch.nn.functional.one_hot(experts, leans.shape[1]).sum(1).double()
    return leans.shape[1] * (chosen.mean(0) / experts.shape[1] * leans.mean(0)).sum()


def expected_balance(lm: Any, batch: Batch, over: str) -> torch.Tensor:
    """The sum over the layers."""
    rows = routing_of_rows(lm, batch)
    if over == "sequence":
        return torch.stack([sum(balance_of(*layer) for layer in row) for row in rows]).mean()  # type: ignore[misc]
    layers = zip(*rows, strict=True)
    joined = ([torch.cat(parts) for parts in zip(*layer, strict=True)] for layer in layers)
    return torch.stack([balance_of(*layer) for layer in joined]).sum()


@pytest.mark.parametrize("over", ["sequence", "mini_batch"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2", "granitemoe"])
def test_the_loss_and_its_gradient_are_those_of_the_equation(family: str, over: str) -> None:
    model, batch = source_of(family), batch_of()
    nothing_else = ragged_rows([np.zeros(n, np.float64) for n in batch.lengths("response_ids")], np.float64)
    batch = batch.with_columns({"token_weight": nothing_else}, replace=True)
    config = {**FLOAT64, "token_budget": 40, "gradient_checkpointing": True, "router": router(over)}
    engine = tiny_engine(one_rank_mesh(), model, config=config)
    balanced = gradients_of(engine, batch)

    lm = plain_model(model, torch.float64)
    loss = expected_balance(lm, batch, over)
    (WEIGHT * loss).backward()
    num_layers = len(engine.backend.routing.routers)
    assert engine.optimizer_step().experts.balance == pytest.approx(float(loss) / num_layers, rel=1e-6)
    seen = 0
    for name, parameter in lm.named_parameters():
        if parameter.grad is not None and float(parameter.grad.norm()) > 1e-9:
            assert relative_difference(balanced[name], parameter.grad) < 2e-6, name  # routers round
            seen += 1
    assert seen > num_layers


def test_counts_of_experts_by_hand() -> None:
    model, batch = source("qwen3_moe"), batch_of()
    engine = tiny_engine(one_rank_mesh(), model, config={"token_budget": 40})
    rows = routing_of_rows(plain_model(model, torch.float32), batch)
    counts = np.stack(
        [sum(np.bincount(row[layer][1].flatten().numpy(), minlength=4) for row in rows) for layer in range(2)]
    )
    engine.forward_backward(batch, PolicyLoss())
    engine.evaluate(batch, PolicyLoss())  # is no part of the step
    load = engine.optimizer_step().experts
    assert load.largest == pytest.approx((counts.max(1) / counts.mean(1)).mean(), rel=1e-12)
    assert (load.idle, load.balance) == ((counts == 0).mean(), None)
    assert load.metrics("actor").means.keys() == {"actor/expert_load_max", "actor/experts_idle"}
    dense = tiny_engine(one_rank_mesh())
    dense.forward_backward(batch, PolicyLoss())
    assert dense.optimizer_step().experts is None


# ---- layouts


def _layouts(rank: int, world: int, layouts: list[dict[str, int]], over: str, head: str) -> dict[str, Any]:
    """layout -> all gradients, the load, and the biases after the step."""
    out = {}
    for sizes in layouts:
        views, index, count = layout(world, **sizes)
        config = {**FLOAT64, "token_budget": 30, "gradient_checkpointing": True}
        config["router"] = router(over, 0.01)
        engine = tiny_engine(
            views, source_of("deepseek_v3"), OptimizerConfig(lr=1e-3), config=config, head=head
        )
        engine.forward_backward(rows_of(index, count), ValueLoss() if head == "value" else PolicyLoss())
        gradients = {name: torch.zeros_like(one.to_local()) for name, one in engine.backend.shards.items()}
        gradients |= {name: local_of(one.grad) for name, one in engine.backend.by_name.items()}
        gathered = gather_buckets(engine.parameters().layout(), gradients, dist.group.WORLD, 4000)
        full = {name: one.clone() for name, one in gathered}
        load = engine.optimizer_step().experts
        biases = {
            name: one.clone()
            for name, one in engine.parameters().gathered(4000)
            if name.endswith("e_score_correction_bias")
        }
        out[str(sizes)] = full, load, biases
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, [{}, {"tensor": 2}, {"context": 2}, {"expert": 2}, {"tensor": 2, "expert": 2}]),
        pytest.param(
            4,
            [{"context": 2, "tensor": 2}, {"replicate": 2, "expert": 2}, {"context": 4, "expert": 2}],
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize(("over", "head"), [("sequence", "lm"), ("mini_batch", "lm"), ("sequence", "value")])
def test_every_layout_balances_as_one_process_does(
    world: int, layouts: list[dict[str, int]], over: str, head: str
) -> None:
    expected, load, biases = run_ranks(1, _layouts, [{}], over, head)[0]["{}"]
    for told in run_ranks(world, _layouts, layouts, over, head):
        for sizes, (gradients, seen, moved) in told.items():
            assert (seen.largest, seen.idle) == pytest.approx((load.largest, load.idle), rel=1e-12), sizes
            assert seen.balance == pytest.approx(load.balance, rel=1e-6), sizes
            for name, tensor in expected.items():
                assert relative_difference(gradients[name], tensor) <= 2e-6, (sizes, name)
            assert moved.keys() == biases.keys()
            assert all(torch.equal(moved[name], one) for name, one in biases.items()), sizes
    assert len(biases) == 1


# ---- biases


def test_biases_go_toward_equal_load_and_are_kept(tmp_path: Any) -> None:
    model, batch = source_of("deepseek_v3"), batch_of()
    config = {"router": router(None, 0.25), "token_budget": 40}
    engine = tiny_engine(one_rank_mesh(), model, OptimizerConfig(lr=1e-9), config=config)
    (name,) = (one for one in engine.backend.shards if one.endswith("e_score_correction_bias"))
    lm = plain_model(model, torch.float32)
    before = dict(lm.named_buffers())[name].clone()
    (layer,) = zip(*routing_of_rows(lm, batch), strict=True)
    counts = sum(np.bincount(one[1].flatten().numpy(), minlength=8) for one in layer)
    gradients_of(engine, batch)
    engine.optimizer_step()
    moved = dict(engine.parameters().gathered(1 << 20))[name].clone()
    expected = before + 0.25 * torch.from_numpy(np.sign(counts.mean() - counts)).float()
    assert torch.equal(moved, expected)
    assert len(set(counts)) > 1

    files = engine.save(str(tmp_path / "state"))
    again = tiny_engine(one_rank_mesh(), model, config=config)
    again.load(str(tmp_path / "state"), files)
    assert torch.equal(dict(again.parameters().gathered(1 << 20))[name], moved)
    engine.export(str(tmp_path / "export"))
    exported = build_model(ModelSource(path=str(tmp_path / "export")), torch.float32)
    assert torch.equal(dict(exported.named_buffers())[name], moved)

    gradients_of(engine, batch)
    next(iter(engine.backend.by_name.values())).grad.fill_(float("nan"))
    stats = engine.optimizer_step()
    assert stats.skipped
    assert torch.equal(dict(engine.parameters().gathered(1 << 20))[name], moved)


def test_a_balanced_mixture_has_a_loss_of_1() -> None:
    """Every token leans to all experts alike, and choices are spread evenly."""
    leans = torch.full((4, 4), 0.25, dtype=torch.float64)
    assert float(balance_of(leans, torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]]))) == 1.0


# ---- replay


LOG_PROBS = {"log_probs": "old_log_probs"}
REPLAYED = [
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "granitemoe",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "qwen3_next",
]


def with_routes(engine: Engine, batch: Batch) -> tuple[Batch, Batch]:
    """The batch with its routes under the engine's weights, and what else the pass made."""
    made = engine.forward(batch, LOG_PROBS, routes=True)
    return batch.with_columns(made.select([ROUTED, PROMPT_ROUTED])), made


def shaken(engine: Engine, by: float) -> None:
    """Changes the engine's weights a little."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in engine.backend.by_name.values():
            local = local_of(one)
            local += by * local.std() * torch.randn(local.shape, generator=generator).to(local)


@pytest.mark.parametrize("family", REPLAYED)
def test_own_choices_replayed_change_nothing(family: str) -> None:
    config = {"token_budget": 40, "gradient_checkpointing": True, "router": router("sequence")}
    engine = tiny_engine(one_rank_mesh(), source_of(family), config=config)
    batch = batch_of() if family != "qwen3_next" else make_batch()
    told, made = with_routes(engine, batch)
    again = engine.forward(told, LOG_PROBS, routes=True)
    assert again == made
    plain = gradients_of(engine, batch)
    for one in engine.backend.by_name.values():
        one.grad = None
    replayed = gradients_of(engine, told)
    assert plain.keys() == replayed.keys()
    assert all(torch.equal(replayed[name], one) for name, one in plain.items())


def test_routes_are_those_that_transformers_computes() -> None:
    model, batch = source("qwen3_moe"), batch_of()
    engine = tiny_engine(one_rank_mesh(), model, config={"token_budget": 40})
    told, _ = with_routes(engine, batch)
    rows = iter(routing_of_rows(plain_model(model, torch.float32), batch))
    for before, after, prompt in zip(
        told.rows(PROMPT_ROUTED), told.rows(ROUTED), told.rows("prompt_ids"), strict=True
    ):
        if not len(after):
            assert len(before) == 0
            continue
        assert len(before) == len(prompt) - 1
        expected = np.concatenate([layer[1].numpy() for layer in next(rows)], 1)
        np.testing.assert_array_equal(np.concatenate([before, after]), expected)
        assert after.dtype == np.uint8


@pytest.mark.parametrize("over", ["sequence", "mini_batch"])
def test_nothing_of_a_mini_batch_is_read_from_the_device(over: str) -> None:
    """Neither in a pass nor in a layer; the step reads the norm, and by `tolist` what it says of experts."""
    # (In bfloat16, because gradients are added elsewhere on a CPU in float32, which a GPU does not do.)
    config = {"token_budget": 40, "compute_dtype": "bfloat16", "router": router(over)}
    engine = tiny_engine(one_rank_mesh(), source("qwen3_moe"), config=config)
    told, _ = with_routes(engine, batch_of())
    gradients_of(engine, told)  # what is looked at in the first pass only
    with DeviceReads() as passes:
        engine.forward_backward(told, PolicyLoss())
    assert passes.seen == []
    with DeviceReads() as step:
        assert engine.optimizer_step().experts.replayed == 1
    assert step.seen == ["aten._local_scalar_dense.default"]


def test_what_is_replayed_holds_when_the_weights_have_changed() -> None:
    model, batch = source("qwen3_moe"), batch_of()
    engine = tiny_engine(one_rank_mesh(), model, config={**FLOAT64, "token_budget": 40})
    told, made = with_routes(engine, batch)
    shaken(engine, 0.3)
    live = engine.forward(batch, LOG_PROBS, routes=True)
    replayed = engine.forward(told, LOG_PROBS, routes=True)
    for name in (ROUTED, PROMPT_ROUTED):
        assert replayed.array(name) == made.array(name) != live.array(name)
    assert replayed.array("old_log_probs") != live.array("old_log_probs")
    engine.forward_backward(told, PolicyLoss())
    load = engine.optimizer_step().experts
    assert load.replayed == 1
    assert 0 < load.rerouted < 1
    assert load.metrics("actor").means["actor/rerouted"] == (load.rerouted, 1.0)
    # Unknown everywhere: what the routers choose by themselves.
    unknown = {name: np.full_like(told.ragged(name)[0].numpy(), 255) for name in (ROUTED, PROMPT_ROUTED)}
    offsets = {name: told.ragged(name)[1].numpy() for name in unknown}
    columns = {name: ragged_array(unknown[name], offsets[name]) for name in unknown}
    engine = tiny_engine(one_rank_mesh(), model, config={**FLOAT64, "token_budget": 40})
    assert engine.forward(told.with_columns(columns, replace=True), LOG_PROBS, routes=True) == made


def test_routes_of_more_experts_than_a_byte_can_name() -> None:
    model, batch = source("qwen3_moe", num_experts=300), batch_of()
    engine = tiny_engine(one_rank_mesh(), model, config={"token_budget": 40})
    told, made = with_routes(engine, batch)
    assert told.rows(ROUTED)[0].dtype == np.uint16
    assert max(int(one.max()) for one in told.rows(ROUTED) if len(one)) > 255
    assert engine.forward(told, LOG_PROBS, routes=True) == made
    shaken(engine, 0.3)
    assert engine.forward(told, LOG_PROBS, routes=True).array(ROUTED) == made.array(ROUTED)


def test_a_prompt_with_other_routes_is_not_shared() -> None:
    """Rows of one prompt that were sampled by different engines."""
    model, batch = source("qwen3_moe"), with_groups(make_batch(((4, 5), (4, 3), (4, 6))), (3,))
    engine = tiny_engine(one_rank_mesh(), model, config={**FLOAT64})
    told, _ = with_routes(engine, batch)
    other = told.rows(PROMPT_ROUTED)
    other[1] = 3 - other[1]  # of four experts, two in each layer: two others
    told = told.with_columns({PROMPT_ROUTED: ragged_rows(other, np.uint8)}, replace=True)
    together = engine.forward(told, LOG_PROBS).rows("old_log_probs")
    for row in range(3):
        (alone,) = engine.forward(told.take([row]), LOG_PROBS).rows("old_log_probs")
        np.testing.assert_allclose(together[row], alone, rtol=1e-6)
    (live,) = engine.forward(batch.take([1]), LOG_PROBS).rows("old_log_probs")
    assert np.abs(live - together[1]).max() > 1e-3


def test_routes_of_another_length_are_an_error() -> None:
    engine = tiny_engine(one_rank_mesh(), source("qwen3_moe"))
    told, _ = with_routes(engine, make_batch(((3, 4), (2, 5))))
    wrong = ragged_rows([told.rows(PROMPT_ROUTED)[0][:1], told.rows(PROMPT_ROUTED)[1]], np.uint8)
    with pytest.raises(DataError, match=full_text("row 0: prompt_routed_experts is of 1")):
        engine.forward(told.with_columns({PROMPT_ROUTED: wrong}, replace=True), LOG_PROBS)


def _replayed(rank: int, world: int, layouts: list[dict[str, int]]) -> dict[str, dict[int, Any]]:
    """layout -> row id -> its routes and, replayed under other weights, log-probs."""
    out = {}
    for sizes in layouts:
        views, index, count = layout(world, **sizes)
        engine = tiny_engine(views, source("qwen3_moe"), config={**FLOAT64, "token_budget": 30})
        gaps = gaps_of_choices(engine)
        told, _ = with_routes(engine, rows_of(index, count))
        engine.forward_backward(told, PolicyLoss())
        others = engine.optimizer_step().experts.rerouted
        made = engine.forward(told, LOG_PROBS)
        mine = {
            row: parts
            for row, *parts in zip(
                told.scalars("row_id").tolist(),
                told.rows(PROMPT_ROUTED),
                told.rows(ROUTED),
                made.rows("old_log_probs"),
                strict=True,
            )
        }
        every: list[Any] = [None] * world
        dist.all_gather_object(every, mine)
        assert others == 0
        assert min(gaps) > GAP
        out[str(sizes)] = {row: parts for part in every for row, parts in part.items()}
    return out


@pytest.mark.slow
def test_every_layout_replays_as_one_process_does() -> None:
    expected = run_ranks(1, _replayed, [{}])[0]["{}"]
    layouts = [{}, {"tensor": 2}, {"context": 2}, {"expert": 2}, {"context": 2, "expert": 2}]
    for sizes, told in run_ranks(2, _replayed, layouts)[1].items():
        for row, (before, after, log_probs) in expected.items():
            np.testing.assert_array_equal(told[row][0], before, err_msg=sizes)
            np.testing.assert_array_equal(told[row][1], after, err_msg=sizes)
            np.testing.assert_allclose(told[row][2], log_probs, rtol=1e-6, err_msg=sizes)


def test_tiles_count_balance_and_replay_as_the_whole() -> None:
    """Of MLPs that take eight tokens at a time: `backend.mlp_chunk`."""
    batch, told = batch_of(), []
    config = {**FLOAT64, "token_budget": 40, "router": router("mini_batch")}
    for backend in (TorchBackendConfig(), TorchBackendConfig(mlp_chunk=8)):
        engine = tiny_engine(one_rank_mesh(), source("qwen3_moe"), config=config, backend=backend)
        gaps = gaps_of_choices(engine)
        rows, _ = with_routes(engine, batch)
        shaken(engine, 0.3)
        gradients = gradients_of(engine, rows)
        told.append((rows, gradients, engine.optimizer_step().experts))
        assert min(gaps) > GAP
    (rows, whole, load), (tiled_rows, tiled, tiled_load) = told
    assert tiled_rows == rows
    assert 0 < load.rerouted < 1
    # Counts are whole numbers. The balancing loss is a sum of affinities in float64, which tiles add up in
    # another order, of logits from products of other shapes. Where such a logit is rounded to float32, as
    # routers do for their weights, it may fall to the other side: that is half an eps of a weight, which the
    # affinities of the next layer, the last one, follow.
    assert dataclasses.replace(tiled_load, balance=load.balance) == load
    assert tiled_load.balance == pytest.approx(load.balance, rel=torch.finfo(torch.float32).eps)
    for name, one in whole.items():
        assert relative_difference(tiled[name], one) < 1e-6, name


# ---- what cannot be asked


@pytest.mark.parametrize(
    ("model", "config", "key"),
    [
        ("qwen3", {"router": router("sequence")}, "router.balance"),
        ("qwen3", {"router": router(None, 0.1)}, "router.bias_speed"),
        ("qwen3_moe", {"router": router(None, 0.1)}, "router.bias_speed"),
        ("ernie4_5_moe", {"router": router(None, 0.1)}, "router.bias_speed"),
        ("deepseek_v3", {"router": router(None, 0.1), "lora": LoraConfig()}, "router.bias_speed"),
        ("llama4_text", {"router": router("sequence")}, "router.balance"),
        ("qwen3", {"router": ActorRouterConfig(replay="trainer")}, "router.replay"),
        ("phimoe", {"router": ActorRouterConfig(replay="trainer")}, "router.replay"),
        ("deepseek_v2", {"router": ActorRouterConfig(replay="sampler")}, "router.replay"),
    ],
)
def test_what_a_model_cannot_do_is_refused(model: str, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_engine(one_rank_mesh(), source_of(model), config=config)
    assert refused.value.key == key


@pytest.mark.parametrize("family", ["llama4_text", "phimoe", "qwen3_next", "hunyuan_v1_moe", "ernie4_5_moe"])
def test_mixtures_of_other_makes_train_all_the_same(family: str) -> None:
    engine = tiny_engine(one_rank_mesh(), source_of(family), config={"token_budget": 40})
    engine.forward_backward(make_batch(((3, 4), (2, 5))), PolicyLoss())
    load = engine.optimizer_step().experts
    assert (load is None) == (family == "llama4_text")
    assert load is None or 1 <= load.largest <= 4


def test_a_row_alone_in_a_pass_balances_as_in_company() -> None:
    batch = batch_of()
    rows = ragged_rows([np.ones(n, np.uint8) for n in batch.lengths("response_ids")], np.uint8)
    batch = batch.with_columns({"response_mask": rows}, replace=True)
    told = []
    for budget in (30, 10_000):
        config = {**FLOAT64, "token_budget": budget, "router": router("sequence")}
        engine = tiny_engine(one_rank_mesh(), source("qwen3_moe"), config=config)
        told.append(gradients_of(engine, batch))
    for name, one in told[0].items():
        assert relative_difference(one, told[1][name]) < 1e-6, name
