"""The training engine on a CUDA device: what rests in host memory comes back, and memory is given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rondo.algorithms import ActorLoss, lookup, try_functions, try_loss
from rondo.algorithms.trial import call_once
from rondo.config.schema import AlgorithmConfig, FilterConfig, FunctionConfig, OptimizerConfig
from rondo.core.errors import ConfigError, WrongDeviceError
from rondo.models.attention import choose_kernel, varlen_attention
from rondo.models.documents import plan_documents
from rondo.models.family import AS_THEY_ARE, LogitTransform
from rondo.training import Engine
from rondo.training.loss import numbers_of
from rondo.training.torch_backend.head import token_log_probs
from tests.training.helpers import PolicyLoss, make_batch, source, tiny_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = ((4, 3000), (4, 2000))
OUTPUTS = ("log_probs", "entropy", "sum_p_squared")


@pytest.fixture(scope="module")
def cuda_mesh() -> Iterator[DeviceMesh]:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def engine(mesh: DeviceMesh, config: dict[str, Any], **changes: Any) -> Engine:
    model = source(max_position_embeddings=8192, **changes)
    return tiny_engine(mesh, model, OptimizerConfig(lr=1e-2), config, device="cuda:0")


def train(trained: Engine, steps: int) -> None:
    for seed in range(steps):
        trained.forward_backward(make_batch(seed=seed), PolicyLoss())
        trained.optimizer_step()


def moments(trained: Engine) -> dict[str, torch.Tensor]:
    state = trained.backend.state()
    return {name: tensor.to_local().cpu() for name, tensor in state.items() if "exp_avg" in name}


OFFLOAD: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": True},
    {"offload_optimizer": True, "offload_params": True},
]


@pytest.mark.parametrize("config", OFFLOAD, ids=["none", "optimizer", "both"])
def test_a_checkpoint_restores_what_rests_anywhere(
    cuda_mesh: DeviceMesh, tmp_path: Path, config: dict[str, Any]
) -> None:
    first, second = engine(cuda_mesh, config), engine(cuda_mesh, config)
    train(first, 2)
    second.load(str(tmp_path), first.save(str(tmp_path)))
    saved, loaded = moments(first), moments(second)
    assert all(tensor.any() for tensor in saved.values())
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    train(first, 1)
    train(second, 1)
    after, resumed = first.snapshot(), second.snapshot()
    assert all(torch.equal(after[name].cpu(), resumed[name].cpu()) for name in after if "steps" in name)
    for name in (name for name in after if "steps" not in name):
        torch.testing.assert_close(resumed[name].to_local(), after[name].to_local(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("config", OFFLOAD, ids=["none", "optimizer", "both"])
def test_a_snapshot_is_what_it_was(cuda_mesh: DeviceMesh, config: dict[str, Any], tmp_path: Path) -> None:
    trained = engine(cuda_mesh, config)
    train(trained, 1)
    snapshot, before = trained.snapshot(), moments(trained)
    train(trained, 2)
    trained.load(str(tmp_path), trained.save(str(tmp_path), snapshot))
    assert all(torch.equal(tensor, before[name]) for name, tensor in moments(trained).items())


def test_gathering_gives_memory_back(cuda_mesh: DeviceMesh) -> None:
    trained = engine(cuda_mesh, {"logits_bytes": 64 << 20}, hidden_size=256, vocab_size=8000)
    trained.forward_backward(make_batch(LONG), PolicyLoss())
    trained.optimizer_step()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert kept > 100 << 20
    for _ in trained.parameters().gathered(1 << 20):
        pass
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < kept / 4


MINE = """
import torch

def adds(log_probs, advantages):
    return -advantages * log_probs + torch.zeros(len(log_probs)), {}

def gathers(log_probs, advantages):
    return (-advantages * log_probs)[torch.arange(len(log_probs)).roll(1).cuda()], {"mine": torch.ones(())}

def lasts(reward):
    return reward - torch.zeros(len(reward), device="cuda")

def visits(reward):
    return (reward.cuda() - reward.cuda().mean()).cpu()

def keeps(accuracy):
    return None if torch.tensor(accuracy).cuda().numpy().any() else "none is right"
"""


def test_a_users_tensor_on_the_cpu_is_named_before_models_are_there(tmp_path: Path) -> None:
    """As tests/algorithms/test_devices.py; a number on the CPU does no harm."""
    (tmp_path / "mine.py").write_text(MINE)
    adds, gathers = (
        ActorLoss(AlgorithmConfig(policy_loss=FunctionConfig(f"{tmp_path / 'mine.py'}:{name}")))
        for name in ("adds", "gathers")
    )
    with pytest.raises(ConfigError, match=r"adds raised.*columns are on cuda:0") as caught:
        try_loss(adds, torch.device("cuda:0"))
    assert caught.value.key == "algorithm.policy_loss"
    try_loss(gathers, torch.device("cuda:0"))
    total, metrics = call_once(gathers, torch.device("cuda:0"))
    numbers = dict(numbers_of(metrics, total.device))
    assert [one.tolist() for one in numbers["mine"]] == [1.0]
    assert all(part.device == total.device for parts in numbers.values() for part in parts)


def test_a_users_tensor_on_the_card_is_named_where_columns_are_on_the_cpu(tmp_path: Path) -> None:
    """Estimators and filters; one that goes to the card and comes back does no harm."""
    (tmp_path / "mine.py").write_text(MINE)
    lasts, visits = (FunctionConfig(f"{tmp_path / 'mine.py'}:{name}") for name in ("lasts", "visits"))
    with pytest.raises(WrongDeviceError, match=r"lasts raised.*columns are on cpu") as caught:
        try_functions(AlgorithmConfig(advantage=lasts), "cuda:0")
    assert caught.value.key == "algorithm.advantage"
    try_functions(AlgorithmConfig(advantage=visits), "cuda:0")
    assert lookup("advantage", visits.name)(torch.tensor([0.0, 1.0])).tolist() == [-0.5, 0.5]
    keeps = FilterConfig(f"{tmp_path / 'mine.py'}:keeps")
    with pytest.raises(WrongDeviceError, match=r"keeps raised TypeError: can.t convert") as caught:
        try_functions(AlgorithmConfig(filter=keeps), "cuda:0")
    assert caught.value.key == "algorithm.filter"


def test_positions_do_not_depend_on_the_dtype_of_parameters(cuda_mesh: DeviceMesh) -> None:
    """As tests/training/test_precision.py, through the kernels for CUDA."""
    half = engine(cuda_mesh, {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"})
    wide = engine(cuda_mesh, {"compute_dtype": "bfloat16"})
    wide.copy_parameters_from(half)
    batch = make_batch(((1, 4096),))
    x, y = (one.forward(batch, {"log_probs": "x"}).ragged("x")[0] for one in (half, wide))
    assert torch.equal(x, y)


def test_the_head_of_a_large_vocabulary_needs_little_memory() -> None:
    """8192 positions of 151,936 logits: chunks of 512 MiB, and the same gradient as with smaller ones."""
    torch.manual_seed(0)
    hidden = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(151_936, 512, device="cuda") / 512**0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, len(weight), (len(hidden),), device="cuda")
    results = []
    for chunk_bytes in (512 << 20, 64 << 20):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log_probs = token_log_probs(hidden, weight, None, targets, chunk_bytes=chunk_bytes)["log_probs"]
        gradients = torch.autograd.grad(log_probs.sum(), (hidden, weight))
        assert torch.cuda.max_memory_allocated() - before < 3 << 30
        results.append((log_probs.detach(), *gradients))
    expected = torch.log_softmax(hidden[:64].float() @ weight.float().T, -1)
    expected = expected.gather(1, targets[:64, None]).squeeze(1)
    torch.testing.assert_close(results[0][0][:64], expected.detach(), rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).float().norm() <= 1e-2 * theirs.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("transform", [AS_THEY_ARE, LogitTransform(1.5, 20.0)])
def test_log_probs_without_logits_equal_those_of_chunks(
    dtype: torch.dtype, transform: LogitTransform
) -> None:
    """Ragged sizes, a bias, a temperature, entropies; the same bits twice."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    hidden = torch.randn(300, 200, device="cuda")
    weight = torch.randn(5001, 200, device="cuda") / 200**0.5
    bias = torch.randn(5001, device="cuda")
    inputs = [one.to(dtype).requires_grad_() for one in (hidden, weight, bias)]
    targets = torch.randint(0, 5001, (300,), device="cuda")
    factors = torch.randn(2, 300, device="cuda")
    options: dict[str, Any] = {"transform": transform, "temperature": 0.8}
    results = []
    for chunk_bytes in (None, None, 1 << 20):
        out = token_log_probs(*inputs, targets, OUTPUTS, chunk_bytes=chunk_bytes, **options)
        loss = out["log_probs"] @ factors[0] + out["entropy"] @ factors[1]
        results.append([*(one.detach() for one in out.values()), *torch.autograd.grad(loss, inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    for place, (ours, theirs) in enumerate(zip(*results[1:], strict=True)):
        limit = 1e-2 if dtype != torch.float32 and place >= len(OUTPUTS) else 1e-5
        assert (ours - theirs).float().norm() <= limit * theirs.float().norm(), place


def test_log_probs_without_logits_need_less_memory() -> None:
    """8192 positions of 151,936 tokens: gradients of the weight in float32 and bfloat16, 445 MiB, are most of
    it, where chunks also need several times their 512 MiB.
    """
    pytest.importorskip("triton")
    torch.manual_seed(0)
    hidden = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(151_936, 512, device="cuda") / 512**0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, len(weight), (len(hidden),), device="cuda")
    peaks, results = [], []
    for chunk_bytes in (None, 512 << 20):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = token_log_probs(hidden, weight, None, targets, OUTPUTS, chunk_bytes=chunk_bytes)
        loss = out["log_probs"].sum() + 0.1 * out["entropy"].sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append((*(one.detach() for one in out.values()), *gradients))
    assert peaks[0] < 512 << 20
    assert peaks[0] < peaks[1] / 2
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).float().norm() <= 1e-2 * theirs.float().norm()


@pytest.mark.parametrize("asks", [{}, {"sliding_window": 100}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_flash_equals_sdpa(heads: tuple[int, int], asks: dict[str, Any]) -> None:
    torch.manual_seed(0)
    lengths, (H, K) = np.array([700, 3, 260]), heads
    n, device = int(lengths.sum()), torch.device("cuda:0")
    q = torch.randn(1, H, n, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, K, n, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    weight = torch.randn(1, n, H, 64, device=device, dtype=torch.bfloat16)
    if "sinks" in asks:
        asks = {"s_aux": torch.randn(H, device=device, dtype=torch.bfloat16)}
    results = []
    for attention, kernel in (("auto", "flash"), ("sdpa", "sdpa")):
        chosen = choose_kernel(attention, device, q.dtype, int(lengths.max()))
        assert chosen == kernel
        documents = plan_documents(lengths, chosen, device=device)
        out, _ = varlen_attention(torch.nn.Identity(), q, k, v, documents=documents, **asks)
        results.append((out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).float().norm() <= 1e-2 * theirs.float().norm()
