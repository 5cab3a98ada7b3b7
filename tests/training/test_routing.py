"""What a mixture's training asks of its routers: balancing losses against a plain computation of their
equations, the same under every layout and cut; counts and biases by hand; what cannot be asked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rondo.batch import Batch, ragged_rows
from rondo.config.schema import ExpertBalanceConfig, LoraConfig, OptimizerConfig, RouterConfig
from rondo.errors import ConfigError
from rondo.models import ModelSource
from rondo.models.loading import build_model
from rondo.training import FsdpEngine
from rondo.training.sharding import gather_buckets, local_of
from tests.models.families import source_of
from tests.ranks import run_ranks
from tests.training.helpers import (
    FLOAT64,
    PolicyLoss,
    ValueLoss,
    full_gradients,
    make_batch,
    make_engine,
    one_rank_mesh,
    relative_difference,
    source,
    with_groups,
)
from tests.training.layouts import layout, rows_of

Gradients = dict[str, torch.Tensor]
WEIGHT = 0.3


def router(over: str | None, bias_speed: float = 0.0) -> RouterConfig:
    balance = None if over is None else ExpertBalanceConfig(WEIGHT, over)  # type: ignore[arg-type]
    return RouterConfig(balance, bias_speed)


def batch_of(groups: tuple[int, ...] = (4, 3)) -> Batch:
    """Rows of which some share a prompt, one has a response of one token, and one has none."""
    return with_groups(make_batch(), groups)


def gradients_of(engine: FsdpEngine, batch: Batch, loss: Any = None) -> Gradients:
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
            seen.append((scores / scores.sum(-1, keepdim=True), out[2]))

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
    engine = make_engine(one_rank_mesh(), model, config=config)
    balanced = gradients_of(engine, batch)

    lm = plain_model(model, torch.float64)
    loss = expected_balance(lm, batch, over)
    (WEIGHT * loss).backward()
    num_layers = len(engine._routing.routers)
    assert engine.optimizer_step().experts.balance == pytest.approx(float(loss) / num_layers, rel=1e-6)
    seen = 0
    for name, parameter in lm.named_parameters():
        if parameter.grad is not None and float(parameter.grad.norm()) > 1e-9:
            assert relative_difference(balanced[name], parameter.grad) < 2e-6, name  # routers round
            seen += 1
    assert seen > num_layers


def test_counts_of_experts_by_hand() -> None:
    model, batch = source("qwen3_moe"), batch_of()
    engine = make_engine(one_rank_mesh(), model, config={"token_budget": 40})
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
    dense = make_engine(one_rank_mesh())
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
        engine = make_engine(
            views, source_of("deepseek_v3"), OptimizerConfig(lr=1e-3), config=config, head=head
        )
        engine.forward_backward(rows_of(index, count), ValueLoss() if head == "value" else PolicyLoss())
        gradients = {name: torch.zeros_like(one.to_local()) for name, one in engine._shards.items()}
        gradients |= {name: local_of(one.grad) for name, one in engine._parameters.items()}
        gathered = gather_buckets(engine.layout(), gradients, dist.group.WORLD, 4000)
        full = {name: one.clone() for name, one in gathered}
        load = engine.optimizer_step().experts
        biases = {
            name: one.clone()
            for name, one in engine.gathered_parameters(4000)
            if name.endswith("e_score_correction_bias")
        }
        out[str(sizes)] = full, load, biases
    return out


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
    engine = make_engine(one_rank_mesh(), model, OptimizerConfig(lr=1e-9), config=config)
    (name,) = (one for one in engine._shards if one.endswith("e_score_correction_bias"))
    lm = plain_model(model, torch.float32)
    before = dict(lm.named_buffers())[name].clone()
    (layer,) = zip(*routing_of_rows(lm, batch), strict=True)
    counts = sum(np.bincount(one[1].flatten().numpy(), minlength=8) for one in layer)
    gradients_of(engine, batch)
    engine.optimizer_step()
    moved = dict(engine.gathered_parameters(1 << 20))[name].clone()
    expected = before + 0.25 * torch.from_numpy(np.sign(counts.mean() - counts)).float()
    assert torch.equal(moved, expected)
    assert len(set(counts)) > 1

    files = engine.save(str(tmp_path / "state"))
    again = make_engine(one_rank_mesh(), model, config=config)
    again.load(str(tmp_path / "state"), files)
    assert torch.equal(dict(again.gathered_parameters(1 << 20))[name], moved)
    engine.export(str(tmp_path / "export"))
    exported = build_model(ModelSource(path=str(tmp_path / "export")), torch.float32)
    assert torch.equal(dict(exported.named_buffers())[name], moved)

    gradients_of(engine, batch)
    next(iter(engine._parameters.values())).grad.fill_(float("nan"))
    stats = engine.optimizer_step()
    assert stats.skipped
    assert torch.equal(dict(engine.gathered_parameters(1 << 20))[name], moved)


def test_a_balanced_mixture_has_a_loss_of_1() -> None:
    """Every token leans to all experts alike, and choices are spread evenly."""
    leans = torch.full((4, 4), 0.25, dtype=torch.float64)
    assert float(balance_of(leans, torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]]))) == 1.0


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
    ],
)
def test_what_a_model_cannot_do_is_refused(model: str, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_engine(one_rank_mesh(), source_of(model), config=config)
    assert refused.value.key == key


@pytest.mark.parametrize("family", ["llama4_text", "phimoe", "qwen3_next", "hunyuan_v1_moe", "ernie4_5_moe"])
def test_mixtures_of_other_makes_train_all_the_same(family: str) -> None:
    engine = make_engine(one_rank_mesh(), source_of(family), config={"token_budget": 40})
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
        engine = make_engine(one_rank_mesh(), source("qwen3_moe"), config=config)
        told.append(gradients_of(engine, batch))
    for name, one in told[0].items():
        assert relative_difference(one, told[1][name]) < 1e-6, name
