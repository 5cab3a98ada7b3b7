"""Log-probs at given ids, Σ p², the k likeliest tokens and scores after each token: against plain
transformers, row by row; and pairs of rows that stay together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from rondo.controller.worker import cut
from rondo.core.batch import Batch, wide_array
from rondo.core.errors import DataError, TrainError
from rondo.training import Engine
from rondo.training.packed import dummy
from rondo.training.torch_backend.head import token_log_probs
from tests.messages import full_text
from tests.models.families import config_of
from tests.ranks import run_ranks
from tests.training.helpers import (
    ARCHITECTURES,
    FLOAT64,
    VOCAB,
    full_gradients,
    make_batch,
    relative_difference,
    source,
    tiny_engine,
    with_groups,
)
from tests.training.test_outputs import reference_model


def reference_log_softmax(batch: Batch, temperature: float, name: str = "qwen3") -> list[torch.Tensor]:
    """[R, V] per row with plain transformers in float64, and with autograd."""
    model, out = reference_model(name, "sdpa"), []
    for prompt, response in zip(batch.rows("prompt_ids"), batch.rows("response_ids"), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : len(ids) - 1]
        out.append(torch.log_softmax(logits / temperature, -1))
    return out


def with_teacher(batch: Batch, k: int, seed: int = 1) -> Batch:
    """teacher_topk_ids [N, k]: k different ids per token (k = V: all of them), and a weight for each."""
    rng = np.random.default_rng(seed)
    bounds = batch.ragged("response_ids")[1].numpy()
    ids = np.argsort(rng.random((bounds[-1], VOCAB)), 1)[:, :k].astype(np.int32)
    weights = rng.standard_normal(ids.shape)
    return batch.with_columns(
        {"teacher_topk_ids": wide_array(ids, bounds), "teacher_weight": wide_array(weights, bounds)}
    )


class DistillLoss:
    """Every differentiable output of the LM head, in one loss."""

    outputs = ("topk_log_probs", "log_probs", "entropy", "sum_p_squared")
    columns = ("teacher_weight", "token_weight")

    def __call__(
        self,
        outputs: Mapping[str, torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        assert not outputs["sum_p_squared"].requires_grad
        loss = (columns["teacher_weight"] * outputs["topk_log_probs"]).sum()
        loss = loss + (columns["token_weight"] * (outputs["log_probs"] - 0.3 * outputs["entropy"])).sum()
        return loss, {"loss": (loss.detach(), torch.ones(()))}


@pytest.mark.parametrize("chunk", [3, 100])
def test_log_probs_at_ids_against_autograd(chunk: int) -> None:
    """All ids (K = V) in a shuffled order, one of them twice, beside entropy and the sampled token's."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, dtype=torch.float64, generator=generator) for n in (10, VOCAB))
    targets = torch.randint(0, VOCAB, (10,), generator=generator)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(10)])
    ids = torch.cat([ids, ids[:, :1]], 1)
    mine, theirs = ([t.clone().requires_grad_() for t in (hidden, weight)] for _ in range(2))
    wanted = ("topk_log_probs", "entropy", "sum_p_squared", "log_probs")
    got = token_log_probs(
        *mine, None, targets, wanted, topk=ids.int(), temperature=0.6, chunk_bytes=chunk * VOCAB * 8
    )
    log_softmax = torch.log_softmax(theirs[0] @ theirs[1].T / 0.6, -1)
    expected = {
        "topk_log_probs": log_softmax.gather(1, ids),
        "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
        "sum_p_squared": log_softmax.exp().square().sum(-1),
        "log_probs": log_softmax.gather(1, targets[:, None]).squeeze(1),
    }
    assert list(got) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-13)
    factors = torch.randn(10, VOCAB + 3, dtype=torch.float64, generator=generator)
    for outputs in (got, expected):
        columns = [outputs["topk_log_probs"], outputs["entropy"][:, None], outputs["log_probs"][:, None]]
        (torch.cat(columns, 1) * factors).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def test_sum_p_squared_is_a_difference_of_logsumexps() -> None:
    logits = torch.randn(5, 40, dtype=torch.float64) * 30
    got = token_log_probs(
        torch.eye(5, dtype=torch.float64), logits.T, None, torch.zeros(5).long(), ("sum_p_squared",)
    )
    expected = (torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1)).exp()
    torch.testing.assert_close(got["sum_p_squared"], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("k", [4, VOCAB])
def test_gradient_through_given_ids_for_any_cut(mesh: DeviceMesh, k: int) -> None:
    """Value and gradient equal log_softmax.gather, one document at a time, for several budgets and chunks."""
    batch, temperature = with_teacher(with_groups(make_batch(), (4, 3)), k), 0.8
    model, loss = reference_model("qwen3", "sdpa"), torch.zeros((), dtype=torch.float64)
    for i, (prompt, response) in enumerate(
        zip(batch.rows("prompt_ids"), batch.rows("response_ids"), strict=True)
    ):
        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : len(tokens) - 1]
        log_softmax = torch.log_softmax(logits / temperature, -1)
        ids = torch.from_numpy(batch.rows("teacher_topk_ids")[i].astype(np.int64))
        loss = loss + (torch.from_numpy(batch.rows("teacher_weight")[i]) * log_softmax.gather(1, ids)).sum()
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        chosen = log_softmax.gather(1, tokens[len(prompt) :, None]).squeeze(1)
        loss = loss + (torch.from_numpy(batch.rows("token_weight")[i]) * (chosen - 0.3 * entropy)).sum()
    loss.backward()
    names = dict(model.named_parameters())
    for budget, chunk in ((10_000, 1 << 20), (10_000, 4096), (30, 4096)):
        config = {**FLOAT64, "token_budget": budget, "logits_bytes": chunk}
        engine = tiny_engine(mesh, config=config, temperature=temperature)
        stats = engine.forward_backward(batch, DistillLoss())
        assert stats.means["loss"][0] == pytest.approx(float(loss.detach()), rel=1e-12)
        for name, gradient in full_gradients(engine).items():
            assert relative_difference(gradient, names[name].grad) <= 1e-10, (budget, chunk, name)


def test_forward_gives_several_columns_in_one_pass(mesh: DeviceMesh) -> None:
    config = {**FLOAT64, "token_budget": 40, "logits_bytes": 4096}
    engine = tiny_engine(mesh, optimizer=None, config=config, temperature=0.7)
    batch = with_teacher(make_batch(), 3)
    out = engine.forward(
        batch,
        {"log_probs": "old_log_probs", "sum_p_squared": "sum_p_squared", "topk_log_probs": "now_topk"},
    )
    top = engine.forward_topk(batch, 5)
    assert top.columns == ["row_id", "teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs"]
    assert top.ragged("teacher_topk_ids")[0].dtype == torch.int32
    for i, log_softmax in enumerate(reference_log_softmax(batch, 0.7)):
        log_softmax, targets = log_softmax.detach(), torch.from_numpy(batch.rows("response_ids")[i]).long()
        given = torch.from_numpy(batch.rows("teacher_topk_ids")[i]).long()
        likeliest = log_softmax.topk(5, -1)
        for name, expected, where in (
            ("old_log_probs", log_softmax.gather(1, targets[:, None]).squeeze(1), out),
            ("sum_p_squared", log_softmax.exp().square().sum(-1), out),
            ("now_topk", log_softmax.gather(1, given), out),
            ("teacher_log_probs", log_softmax.gather(1, targets[:, None]).squeeze(1), top),
            ("teacher_topk_ids", likeliest.indices, top),
            ("teacher_topk_log_probs", likeliest.values, top),
        ):
            np.testing.assert_allclose(where.rows(name)[i], expected.numpy(), rtol=1e-10, atol=1e-10)
    everything = engine.forward_topk(batch, VOCAB).ragged("teacher_topk_log_probs")[0]
    assert (everything[:, :-1] >= everything[:, 1:]).all()
    torch.testing.assert_close(everything.exp().sum(1), torch.ones(len(everything), dtype=torch.float64))


def test_wide_columns_have_their_type_without_tokens(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh, optimizer=None)
    some = engine.forward_topk(make_batch(((2, 3),)), 4)
    for lengths in ((), ((3, 0), (2, 0))):
        none = engine.forward_topk(make_batch(lengths), 4)
        assert none.table.schema.equals(some.table.schema)
        assert len(Batch.concat([some, none])) == 1 + len(lengths)


def with_head(engine: Engine) -> Engine:
    """A value head that is not 0."""
    generator = torch.Generator().manual_seed(5)
    for name in ("value_head.weight", "value_head.bias"):
        local = engine.backend.shards[name].to_local()
        local.copy_(torch.randn(local.shape, generator=generator, dtype=local.dtype))
    return engine


@pytest.mark.parametrize("name", ["qwen3", "llama", "lfm2"])
@pytest.mark.parametrize("budget", [10_000, 40])
def test_scores_are_read_after_each_token(
    mesh: DeviceMesh, name: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """values and scores in one pass; shared prompts, a response of one token, a model that is not packed."""
    monkeypatch.setitem(ARCHITECTURES, "lfm2", config_of("lfm2"))
    batch = with_groups(make_batch(((4, 7), (4, 1), (4, 12), (2, 4), (9, 1), (2, 0), (3, 5))), (3,))
    config = {**FLOAT64, "token_budget": budget}
    engine = with_head(tiny_engine(mesh, source(name), None, config, head="value"))
    head = {n: engine.backend.shards[f"value_head.{n}"].to_local() for n in ("weight", "bias")}
    out = engine.forward(batch, {"scores": "scores", "values": "values"})
    rewards = engine.forward_scores(batch, "score/rm")
    assert rewards.columns == ["row_id", "score/rm"]
    model = reference_model(name, "eager").base_model
    for i, (prompt, response) in enumerate(
        zip(batch.rows("prompt_ids"), batch.rows("response_ids"), strict=True)
    ):
        if len(response) == 0:
            assert np.isnan(rewards.scalars("score/rm")[i])
            continue
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            every = model(input_ids=ids[None], use_cache=False).last_hidden_state[0] @ head["weight"][0]
        every = (every + head["bias"]).numpy()
        for column, expected in (
            ("scores", every[len(prompt) :]),
            ("values", every[len(prompt) - 1 : -1]),
        ):
            np.testing.assert_allclose(out.rows(column)[i], expected, rtol=2e-5, atol=2e-5)
        assert rewards.scalars("score/rm")[i] == pytest.approx(every[-1], rel=2e-5, abs=2e-5)
    assert rewards.scalars("score/rm").dtype == np.float32
    np.testing.assert_allclose(
        engine.forward(batch, {"values": "v"}).ragged("v")[0], out.ragged("values")[0], rtol=1e-6, atol=1e-6
    )


def test_full_documents_count_in_the_budget(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh, optimizer=None, head="value", config={"token_budget": 10})
    batch = make_batch(((5, 6),))
    engine.forward(batch, {"values": "v"})
    with pytest.raises(TrainError, match=full_text("row 0 has 11 tokens")):
        engine.forward(batch, {"scores": "s"})
    assert dummy(engine.backend.packing, full=True).after is not None


class PairLoss:
    """Rows two by two: the loss only makes sense when pairs arrive whole and in order."""

    outputs = ("scores",)
    columns = ("unit", "side")

    def __call__(
        self,
        outputs: Mapping[str, torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        last = cu_seqlens[1:].long() - 1
        unit, side, score = columns["unit"][last], columns["side"][last], outputs["scores"][last]
        assert torch.equal(unit[0::2], unit[1::2])
        assert side[0::2].eq(0).all()
        assert side[1::2].eq(1).all()
        loss = -torch.nn.functional.logsigmoid(score[0::2] - score[1::2]).sum()
        return loss, {"loss": (loss.detach(), torch.ones(()))}


def pair_batch(pairs: int = 7) -> Batch:
    rng = np.random.default_rng(2)
    lengths = tuple((int(rng.integers(1, 6)), int(rng.integers(1, 12))) for _ in range(2 * pairs))
    batch = with_groups(make_batch(lengths), (2,) * pairs)
    return batch.with_columns(
        {
            "unit": np.repeat(rng.permutation(pairs), 2).astype(np.int64),
            "side": np.tile(np.arange(2), pairs),
            "prompt_length": batch.lengths("prompt_ids"),
            "response_length": batch.lengths("response_ids"),
        }
    )


def _pair_gradients(rank: int, world: int) -> dict[int, tuple[float, dict[str, torch.Tensor]]]:
    mesh, out = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), {}
    batch = pair_batch()
    mine = batch.take(cut(batch, world)[rank])
    for budget in (10_000, 36):
        engine = tiny_engine(mesh, source("llama"), config={**FLOAT64, "token_budget": budget}, head="value")
        weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        head = engine.backend.shards["value_head.weight"]
        head.detach().copy_(distribute_tensor(weight, head.device_mesh, head.placements))
        stats = engine.forward_backward(mine, PairLoss())
        out[budget] = (stats.means.get("loss", (0.0, 0.0))[0], full_gradients(engine))
    return out


@pytest.mark.slow
def test_pairs_give_one_gradient_on_any_number_of_ranks_and_micro_batches() -> None:
    results = {world: run_ranks(world, _pair_gradients) for world in (1, 2)}
    loss, expected = results[1][0][10_000]
    assert loss > 0
    for world, ranks in results.items():
        for budget in (10_000, 36):
            assert sum(rank[budget][0] for rank in ranks) == pytest.approx(loss, rel=1e-12), (world, budget)
            for name, gradient in ranks[0][budget][1].items():
                if name == "value_head.bias":  # cancels in every pair
                    assert gradient.abs() < 1e-12
                else:
                    assert relative_difference(gradient, expected[name]) <= 1e-10, (world, budget, name)


def test_errors_name_what_is_wrong(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh, config={"token_budget": 20})
    batch = make_batch(((2, 3), (3, 4), (4, 9), (4, 9)))
    with pytest.raises(TrainError, match=f"62 likeliest tokens of a vocabulary of {VOCAB}"):
        engine.forward_topk(batch, VOCAB + 1)
    with pytest.raises(DataError, match="no column 'teacher_topk_ids'"):
        engine.forward_backward(
            batch.with_columns({"teacher_weight": batch.array("token_weight")}), DistillLoss()
        )
    with pytest.raises(TrainError, match="computes values, scores, not 'log_probs'"):
        tiny_engine(mesh, head="value").forward(batch, {"log_probs": "x"})
    paired = batch.with_columns({"unit": np.array([4, 4, 7, 7])})
    with pytest.raises(TrainError, match=full_text("unit 7 (rows 2, 3) has 24 tokens")):
        engine.forward(paired, {"log_probs": "x"})
    half = make_batch(((2, 3), (3, 0))).with_columns({"unit": np.array([4, 4])})
    with pytest.raises(TrainError, match="unit 4: row 1 has no response tokens"):
        engine.forward(half, {"log_probs": "x"})
    short = batch.with_columns({"teacher_topk_ids": wide_array(np.zeros((4, 2), np.int32), np.arange(5))})
    with pytest.raises(DataError, match="'teacher_topk_ids' is not aligned"):
        engine.forward(short, {"topk_log_probs": "x"})


def test_copied_parameters_are_the_other_models(mesh: DeviceMesh) -> None:
    batch = make_batch()
    actor = tiny_engine(mesh)
    reference = tiny_engine(mesh, source(initializer_range=0.1), None, {"param_dtype": "bfloat16"})
    reference.copy_parameters_from(actor)
    for name, shard in reference.backend.shards.items():
        assert shard.dtype == torch.bfloat16
        assert torch.equal(shard.to_local(), actor.backend.shards[name].to_local().bfloat16())
    exact = tiny_engine(mesh, source(initializer_range=0.1), None)
    assert exact.forward(batch, {"log_probs": "x"}) != actor.forward(batch, {"log_probs": "x"})
    exact.copy_parameters_from(actor)
    assert exact.forward(batch, {"log_probs": "x"}) == actor.forward(batch, {"log_probs": "x"})
    with pytest.raises(TrainError, match=full_text("differ in shape or in how ranks share")):
        tiny_engine(mesh, source("qwen2")).copy_parameters_from(actor)
