"""Log-probs, entropies and values: against a direct computation with transformers' eager attention, row by
row.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from rondo.core.batch import Batch, ragged_rows
from rondo.core.errors import DataError, TrainError
from rondo.models import load_model_config
from rondo.models.family import AS_THEY_ARE, LogitTransform
from rondo.planning import memory
from rondo.training.torch_backend import build, head
from rondo.training.torch_backend.head import token_log_probs
from tests.models.families import config_of
from tests.training.helpers import (
    ARCHITECTURES,
    FLOAT64,
    SHAPE,
    VOCAB,
    PolicyLoss,
    full_gradients,
    make_batch,
    source,
    tiny_engine,
    with_groups,
)


def reference_model(name: str, attention: str) -> Any:
    """The same random weights as the engine's, in plain transformers, float64 (eager's softmax is float32
    even so).
    """
    model_source = source(name)
    with torch.random.fork_rng():
        torch.manual_seed(model_source.seed)
        model = AutoModelForCausalLM.from_config(
            load_model_config(model_source), attn_implementation=attention
        )
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):  # transformers' norms round to float32
            module.forward = functools.partial(exact_norm, module)
    model.set_experts_implementation("eager")  # the other one has no float64
    return model.to(torch.float64)


def exact_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


def reference_outputs(
    model: Any, batch: Batch, temperature: float = 1.0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(log_probs, entropy) per row: one document at a time, direct log_softmax."""
    out = []
    for prompt, response in zip(batch.rows("prompt_ids"), batch.rows("response_ids"), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logits = (
            model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : len(ids) - 1]
            / temperature
        )
        log_softmax = torch.log_softmax(logits, -1)
        targets = torch.from_numpy(response.astype(np.int64))
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        out.append((log_softmax.gather(1, targets[:, None]).squeeze(1), entropy))
    return out


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("temperature", "budget", "chunk"), [(1.0, 10_000, 1 << 20), (0.7, 24, 4096)])
def test_packed_outputs_equal_separate_documents(
    mesh: DeviceMesh, name: str, temperature: float, budget: int, chunk: int
) -> None:
    config = {"token_budget": budget, "logits_bytes": chunk}
    engine = tiny_engine(mesh, source(name), None, config, temperature=temperature)
    batch = make_batch()
    result = engine.forward(batch, {"log_probs": "old_log_probs", "entropy": "entropy"})
    assert result.columns == ["row_id", "old_log_probs", "entropy"]
    assert result.scalars("row_id").tolist() == batch.scalars("row_id").tolist()
    expected = reference_outputs(reference_model(name, "eager"), batch, temperature)
    for i, (log_probs, entropy) in enumerate(expected):
        np.testing.assert_allclose(
            result.rows("old_log_probs")[i], log_probs.detach().numpy(), atol=1e-5, rtol=1e-5
        )
        np.testing.assert_allclose(result.rows("entropy")[i], entropy.detach().numpy(), atol=1e-5, rtol=1e-5)
    assert result.rows("old_log_probs")[0].dtype == np.float32


def test_gated_mlps_keep_two_tensors_and_give_the_same_bits(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, width = make_batch(), SHAPE["intermediate_size"]

    def run() -> tuple[dict[str, torch.Tensor], int]:
        engine, kept = tiny_engine(mesh), []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[-1:] == (width,) and tensor.shape != (SHAPE["hidden_size"], width):  # no weight
                kept.append(tensor.data_ptr())
            return tensor

        engine.forward_backward(batch, PolicyLoss())  # the first pass compares
        engine.optimizer_step()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine.forward_backward(batch, PolicyLoss())
        return full_gradients(engine), len(set(kept))

    lean, few = run()
    monkeypatch.setattr(build, "lean_mlps", lambda blocks: None)
    plain, all_four = run()
    assert all(torch.equal(lean[name], value) for name, value in plain.items())
    assert (few, all_four) == (2 * SHAPE["num_hidden_layers"], 4 * SHAPE["num_hidden_layers"])


@pytest.mark.parametrize("name", ["qwen3", "llama"])  # tied, and not
@pytest.mark.parametrize("pad", [None, 7])
@pytest.mark.parametrize("chunk", [1 << 20, 4096])
def test_gradients_that_are_added_in_place_are_autograds(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str, pad: int | None, chunk: int
) -> None:
    """To the bit in one pass; of several passes the sums are in another order."""
    batch = make_batch()
    assert any(7 in row for row in batch.rows("prompt_ids"))

    def gradients(budget: int) -> dict[str, torch.Tensor]:
        config = {"token_budget": budget, "logits_bytes": chunk}
        engine = tiny_engine(mesh, source(name, pad_token_id=pad), config=config)
        engine.forward_backward(batch, PolicyLoss())
        return full_gradients(engine)

    one, several = gradients(10_000), gradients(40)
    monkeypatch.setattr(head.TokenModel, "add_gradients", lambda self: None)
    assert all(torch.equal(one[key], value) for key, value in gradients(10_000).items())
    for key, value in gradients(40).items():
        torch.testing.assert_close(several[key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("case", ["long", "groups"])
def test_gradients_equal_separate_documents(mesh: DeviceMesh, name: str, case: str) -> None:
    """Long documents among short ones, and prompt groups whose prompt is computed once; chunked head; in
    float64.
    """
    batch, model = make_batch((*((3, 7), (1, 1), (5, 12)), (90, 60))), reference_model(name, "sdpa")
    if case == "groups":
        batch = with_groups(make_batch(), (4, 3))
    tolerance = 1e-6 if name == "qwen3_moe" else 1e-10  # its router rounds to float32
    loss = torch.zeros((), dtype=torch.float64)
    for i, (log_probs, entropy) in enumerate(reference_outputs(model, batch, 0.8)):
        weight = torch.from_numpy(batch.rows("token_weight")[i] * batch.rows("response_mask")[i])
        loss = loss - (weight * (batch.scalars("advantages")[i] * log_probs + 0.1 * entropy)).sum()
    loss.backward()
    for budget in (10_000, 150 if case == "long" else 30):
        engine = tiny_engine(
            mesh,
            source(name),
            config={**FLOAT64, "token_budget": budget, "logits_bytes": 4096},
            temperature=0.8,
        )
        stats = engine.forward_backward(batch, PolicyLoss())
        assert stats.means["loss"][0] == pytest.approx(float(loss.detach()), rel=tolerance / 100)
        names = dict(model.named_parameters())
        assert set(engine.backend.shards) == set(names)
        for key, gradient in full_gradients(engine).items():
            expected = names[key].grad
            assert (gradient - expected).norm() <= tolerance * expected.norm(), key


def test_a_prompt_group_is_laid_out_once(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh)
    batch = with_groups(make_batch(((4, 5), (4, 1), (4, 3), (6, 2))), (3,))
    (packed,) = engine._passes(batch, ())
    assert packed.documents is not None
    assert packed.documents.lengths == (
        4,
        4,
        2,
        7,
    )  # prompt, two continuations (one answer is a single token), alone
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 0, 1, 2, 3, 4, 5, 6]
    assert packed.positions.tolist() == [3, 4, 5, 6, 7, 3, 3, 8, 9, 15, 16]
    assert torch.equal(packed.targets, batch.ragged("response_ids")[0].long())


def test_a_model_that_cannot_be_packed_runs_one_document_at_a_time(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LFM 2, whose convolutions look back over documents: slow, but right."""
    monkeypatch.setitem(ARCHITECTURES, "lfm2", config_of("lfm2"))
    batch = make_batch(((3, 7), (1, 1), (2, 0), (5, 12)))
    result = tiny_engine(mesh, source("lfm2")).forward(batch, {"log_probs": "x"})
    expected = reference_outputs(reference_model("lfm2", "eager"), batch)
    for i, (log_probs, _) in enumerate(expected):
        np.testing.assert_allclose(result.rows("x")[i], log_probs.detach().numpy(), atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_nothing(mesh: DeviceMesh) -> None:
    batch, gradients = make_batch(), []
    for checkpointing in (False, True):
        engine = tiny_engine(mesh, config={"gradient_checkpointing": checkpointing, "token_budget": 40})
        engine.forward_backward(batch, PolicyLoss())
        gradients.append(full_gradients(engine))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_bfloat16_compute_stays_close_and_keeps_float32_masters(mesh: DeviceMesh) -> None:
    batch = make_batch()
    exact = tiny_engine(mesh, optimizer=None).forward(batch, {"log_probs": "x"}).ragged("x")[0]
    engine = tiny_engine(mesh, config={"compute_dtype": "bfloat16"})
    rough = engine.forward(batch, {"log_probs": "x"}).ragged("x")[0]
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().mean() < 0.1
    engine.forward_backward(batch, PolicyLoss())
    step = engine.optimizer_step()
    assert step.grad_norm > 0
    assert not step.skipped
    assert all(shard.dtype == torch.float32 for shard in engine.backend.shards.values())


@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("transform", [AS_THEY_ARE, LogitTransform(0.3), LogitTransform(1.5, 2.0)])
def test_log_prob_head_against_autograd(
    monkeypatch: pytest.MonkeyPatch, chunk: int, kept: int, transform: LogitTransform
) -> None:
    """Values and all gradients, with a bias, a scale, a soft-cap, temperature, entropy and the likeliest
    tokens; one chunk or several, kept until the backward pass or computed again, as a second backward pass
    always does.
    """
    monkeypatch.setattr(memory, "KEPT_CHUNKS", kept)
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 6, dtype=torch.float64), torch.randn(VOCAB, 6, dtype=torch.float64)
    bias, targets = torch.randn(VOCAB, dtype=torch.float64), torch.randint(0, VOCAB, (10,))
    mine = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    theirs = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    names = ("log_probs", "entropy", "topk_log_probs", "topk_ids")
    options: dict[str, Any] = {"topk": 3, "temperature": 1.7, "chunk_bytes": chunk * VOCAB * 8}
    got = token_log_probs(*mine, targets, names, transform=transform, **options)
    log_probs, entropy, topk = (got[name] for name in names[:3])
    logits = transform.scale * (theirs[0] @ theirs[1].T + theirs[2])
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_softmax = torch.log_softmax(logits / 1.7, -1)
    expected = log_softmax.gather(1, targets[:, None]).squeeze(1), -(log_softmax.exp() * log_softmax).sum(-1)
    torch.testing.assert_close((log_probs, entropy), expected, rtol=0, atol=1e-13)
    likeliest = log_softmax.topk(3)
    torch.testing.assert_close(topk, likeliest.values, rtol=0, atol=1e-13)
    assert torch.equal(got["topk_ids"].long(), likeliest.indices)
    factors = torch.randn(2, 10, dtype=torch.float64)
    for mine_loss, theirs_loss in (
        (log_probs @ factors[0] + entropy @ factors[1], expected[0] @ factors[0] + expected[1] @ factors[1]),
        (log_probs @ factors[0], expected[0] @ factors[0]),
        (entropy @ factors[1], expected[1] @ factors[1]),
        ((topk.exp() @ topk.new_ones(3)) @ factors[0], likeliest.values.exp().sum(1) @ factors[0]),
    ):
        mine_grads = torch.autograd.grad(mine_loss, mine, retain_graph=True)
        theirs_grads = torch.autograd.grad(theirs_loss, theirs, retain_graph=True)
        torch.testing.assert_close(mine_grads, theirs_grads, rtol=0, atol=1e-13)


def test_chunks_are_cut_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of one chunk take at most chunk_bytes, in both passes; one position always fits. What fits
    in KEPT_CHUNKS chunks is not computed again.
    """
    torch.manual_seed(0)
    seen: list[int] = []
    inner = head._log_softmax

    def recorded(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(hidden))
        return inner(hidden, *rest)

    monkeypatch.setattr(head, "_log_softmax", recorded)
    hidden, weight = torch.randn(10, 6, requires_grad=True), torch.randn(VOCAB, 6)
    targets = torch.randint(0, VOCAB, (10,))
    everything = 10 * VOCAB * 4
    row = VOCAB * 4
    for budget, sizes in ((4 * row + 3, [4, 4, 2]), (9 * row, [5, 5]), (1, [1] * 10), (1 << 20, [10])):
        for kept, again in (((everything - 1) / budget, sizes), ((everything + 0.5) / budget, [])):
            monkeypatch.setattr(memory, "KEPT_CHUNKS", kept)
            seen.clear()
            token_log_probs(hidden, weight, None, targets, chunk_bytes=budget)["log_probs"].sum().backward()
            assert seen == [*sizes, *again]
    monkeypatch.undo()
    assert memory.KEPT_CHUNKS == 2


@pytest.mark.parametrize("learns", [False, True])
def test_a_weight_that_does_not_learn_costs_no_product(monkeypatch: pytest.MonkeyPatch, learns: bool) -> None:
    """Three chunks: logits of each in both passes, and the weight's gradient, if it learns. When a chunk's
    logits are made, those of the one before are gone.
    """
    monkeypatch.setattr(memory, "KEPT_CHUNKS", 0)
    inner, living, before = head._product, [], []

    def counted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if right.shape == (6, VOCAB):  # logits
            before.append(sum(one() is not None for one in living))
            made = inner(left, right)
            living.append(weakref.ref(made.untyped_storage()))
            return made
        gradients.append(1)
        return inner(left, right)

    gradients: list[int] = []
    monkeypatch.setattr(head, "_product", counted)
    hidden, weight = torch.randn(12, 6, requires_grad=True), torch.randn(VOCAB, 6, requires_grad=learns)
    targets = torch.randint(0, VOCAB, (12,))
    token_log_probs(hidden, weight, None, targets, chunk_bytes=4 * VOCAB * 4)["log_probs"].sum().backward()
    assert before == [0] * 6
    assert len(gradients) == learns  # the first chunk's: others are added in place
    assert (weight.grad is not None) == learns


def test_rows_without_response_and_empty_batches(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh)
    empty = engine.forward(make_batch(()), {"log_probs": "x"})
    assert (len(empty), empty.columns) == (0, ["row_id", "x"])
    only = engine.forward(make_batch(((3, 0), (2, 0))), {"log_probs": "x"})
    assert only.lengths("x").tolist() == [0, 0]
    assert engine.forward_backward(make_batch(()), PolicyLoss()).means == {}
    with pytest.raises(DataError, match="row 1 has an empty prompt"):
        engine.forward(make_batch(((1, 1), (0, 2))), {"log_probs": "x"})


def test_errors_name_what_is_wrong(mesh: DeviceMesh) -> None:
    engine = tiny_engine(mesh, config={"token_budget": 15})
    with pytest.raises(TrainError, match="more than token_budget=15"):
        engine.forward(make_batch(((9, 9),)), {"log_probs": "x"})
    with pytest.raises(TrainError, match=r"computes .*, not 'values'"):
        engine.forward(make_batch(((2, 2),)), {"values": "x"})
    batch = make_batch(((2, 2), (3, 3))).with_columns(
        {"response_mask": ragged_rows([np.ones(2), np.ones(2)], np.uint8)}, replace=True
    )
    with pytest.raises(DataError, match="'response_mask' is not aligned"):
        engine.forward_backward(batch, PolicyLoss())
