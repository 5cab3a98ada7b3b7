"""Log-probs without logits in memory against the chunks that they replace. The kernels run in triton's
interpreter, on a CPU: what it interprets is decided where triton is imported, so a process of its own runs
this file once more, with TRITON_INTERPRET=1. Where triton is not installed only the refusals are tested.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rondo.core.errors import ConfigError, TrainError
from rondo.models.family import AS_THEY_ARE, LogitTransform
from rondo.training.torch_backend import build, head
from rondo.training.torch_backend.head import token_log_probs
from rondo.training.views import Vocabulary
from tests.interpreted import check_compiled, interpreted, needs_triton, run_interpreted
from tests.ranks import run_ranks
from tests.training.helpers import (
    PolicyLoss,
    full_gradients,
    make_batch,
    relative_difference,
    source,
    tiny_engine,
)

Tensors = dict[str, torch.Tensor]
OUTPUTS = ("log_probs", "entropy", "sum_p_squared")
# Rows, tokens, hidden size: one tile and one more, less than one, more tiles than parts. Tiles are 32 x 64
# with 32 of the hidden size in float32, 64 x 128 with 64 else.
SIZES = [(1, 65, 6), (70, 129, 70), (33, 1100, 33), (64, 128, 64)]


@pytest.mark.slow
@needs_triton
def test_all_of_this_file_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("capability", "most_shared"), [(80, 99 << 10), (90, 227 << 10), (100, 227 << 10), (120, 99 << 10)]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, capability: int, most_shared: int
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from rondo.training.torch_backend import fused_head

    shape = fused_head._SHAPES[2 if dtype == "bf16" else 4]
    types = dict.fromkeys(("hidden", "weight", "bias"), f"*{dtype}") | {"targets": "*i64"}
    types |= dict.fromkeys(("inner", "outer"), "fp32")
    types |= dict.fromkeys(("num_rows", "num_tokens", "width", "part_tiles"), "i32")
    for kernel in (fused_head._read_kernel, fused_head._onto_hidden_kernel, fused_head._onto_weight_kernel):
        constants = {"ROWS": shape.ROWS, "TOKENS": shape.TOKENS, "WIDTH": shape.WIDTH, "SOFTCAP": True}
        constants |= {} if kernel is fused_head._read_kernel else {"ENTROPY": True}
        check_compiled(
            kernel,
            {name: types.get(name, "*fp32") for name in kernel.arg_names},
            constants,
            capability,
            {"num_warps": shape.num_warps, "num_stages": shape.num_stages},
            multiplies=dtype == "bf16",
            most_shared=most_shared,
            multiples_of_16=["width"],
        )


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the interpreter round to bfloat16 as devices do, and multiply the numbers: that of triton 3.9 cuts
    bits off, and multiplies bits as integers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    inner, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def rounded(values: Any, narrow_from: Any, narrow_to: Any, mode: Any) -> Any:
        if (narrow_from, narrow_to) != (tl.float32, tl.bfloat16):
            return convert(values, narrow_from, narrow_to, mode)
        return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return inner(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def outputs_and_gradients(
    chunk_bytes: int | None,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
    read: str,
    **options: Any,
) -> Tensors:
    """read: what the loss is made of, log_probs, entropy or both."""
    own = [None if one is None else one.detach().clone().requires_grad_() for one in inputs[:3]]
    hidden, weight, bias = own
    assert hidden is not None
    assert weight is not None
    out = token_log_probs(hidden, weight, bias, inputs[3], OUTPUTS, chunk_bytes=chunk_bytes, **options)
    generator = torch.Generator().manual_seed(1)
    factors = {name: torch.randn(len(hidden), generator=generator) for name in ("log_probs", "entropy")}
    wanted = [name for name in factors if read in (name, "both")]
    torch.stack([out[name] @ factors[name].to(out[name]) for name in wanted]).sum().backward()
    assert not out["sum_p_squared"].requires_grad
    names = ("hidden", "weight", "bias")
    gradients = {name: one.grad for name, one in zip(names, own, strict=True) if one is not None}
    return {name: one.detach() for name, one in out.items()} | {
        k: g for k, g in gradients.items() if g is not None
    }


def inputs_of(
    size: tuple[int, int, int], dtype: torch.dtype, bias: bool, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Hidden states, weight, bias and targets, some of them at the edges of tiles."""
    generator = torch.Generator().manual_seed(0)
    M, V, H = size
    hidden = torch.randn(M, H, generator=generator).to(dtype)
    weight = (torch.randn(V, H, generator=generator) * scale / H**0.5).to(dtype)
    targets = torch.randint(0, V, (M,), generator=generator)
    edges = torch.tensor([one for one in (V - 1, 0, 63, 64, 127, 128) if one < V])[:M]
    targets[: len(edges)] = edges
    return hidden, weight, torch.randn(V, generator=generator).to(dtype) if bias else None, targets


def differences(got: Tensors, expected: Tensors) -> dict[str, float]:
    """Of each tensor the norm of the difference over the norm."""
    assert got.keys() == expected.keys()
    return {name: relative_difference(got[name], expected[name]) for name in expected}


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "output", "gradient"),
    [(torch.float32, 2e-6, 3e-6), (torch.bfloat16, 2e-6, 5e-4), (torch.float16, 2e-6, 5e-4)],
)
def test_outputs_and_gradients_equal_those_of_chunks(
    dtype: torch.dtype, output: float, gradient: float, size: tuple[int, int, int]
) -> None:
    """With and without a bias, a scale, a soft-cap, a temperature; the loss reads log-probs, entropies, both.

    Half-precision gradients of logits are rounded before they are multiplied, by both, and not always alike.
    """
    for bias, transform, temperature, read in (
        (True, LogitTransform(1.5, 2.0), 1.7, "both"),
        (False, AS_THEY_ARE, 1.0, "log_probs"),
        (False, LogitTransform(0.3), 0.6, "entropy"),
        (True, LogitTransform(1.0, 30.0), 1.0, "both"),
    ):
        inputs = inputs_of(size, dtype, bias)
        options: dict[str, Any] = {"transform": transform, "temperature": temperature}
        got = outputs_and_gradients(None, inputs, read, **options)
        expected = outputs_and_gradients(1 << 20, inputs, read, **options)
        for name, difference in differences(got, expected).items():
            assert got[name].dtype == expected[name].dtype
            assert difference <= (output if name in OUTPUTS else gradient), (name, transform, read)


@interpreted
def test_peaked_distributions_are_as_exact_as_in_chunks() -> None:
    """Logits of a hundred, entropies near 0: against float64, no larger errors than those of the chunks."""
    inputs = inputs_of((40, 300, 20), torch.float32, False, scale=60.0)
    hidden, weight, _, targets = inputs
    exact = outputs_and_gradients(1 << 20, (hidden.double(), weight.double(), None, targets), "both")
    assert exact["entropy"].min() < 1e-8
    ours = differences(outputs_and_gradients(None, inputs, "both"), exact)
    chunked = differences(outputs_and_gradients(1 << 20, inputs, "both"), exact)
    assert all(ours[name] <= 1.1 * chunked[name] for name in exact)


@interpreted
def test_a_head_that_does_not_learn_and_a_second_backward_pass() -> None:
    """The hidden states' gradient has the same bits as where the head learns; the weight gets none."""
    inputs = inputs_of((40, 130, 20), torch.float32, True)
    expected = outputs_and_gradients(None, inputs, "both")
    hidden, weight, bias, targets = inputs
    hidden.requires_grad_()
    out = token_log_probs(hidden, weight, bias, targets, OUTPUTS, chunk_bytes=None)
    generator = torch.Generator().manual_seed(1)
    log_probs, entropy = (torch.randn(40, generator=generator) for _ in range(2))
    loss = out["log_probs"] @ log_probs + out["entropy"] @ entropy
    for _ in range(2):
        (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        assert torch.equal(gradient, expected["hidden"])
    assert weight.grad is None


def _shared_vocabulary(rank: int, world: int) -> tuple[Tensors, Tensors]:
    """Of a vocabulary of 131 tokens, 66 of which are the first rank's: what this rank has, and the whole."""
    hidden, weight, bias, targets = inputs_of((70, 131, 20), torch.float32, True)
    assert bias is not None
    vocabulary = Vocabulary(dist.group.WORLD, rank, world, 131)
    own = vocabulary.own
    transform = LogitTransform(1.5, 20.0)
    part = (hidden, weight[own], bias[own], targets)
    got = outputs_and_gradients(None, part, "both", vocabulary=vocabulary, transform=transform)
    whole = outputs_and_gradients(1 << 20, (hidden, weight, bias, targets), "both", transform=transform)
    return got, whole | {name: whole[name][own] for name in ("weight", "bias")}


@interpreted
def test_ranks_that_share_a_vocabulary() -> None:
    for got, expected in run_ranks(2, _shared_vocabulary):
        for name, difference in differences(got, expected).items():
            assert difference <= 3e-6, name


@interpreted
def test_an_engine_computes_the_same_columns_and_gradients(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "check_fused", lambda *_: None)  # it is on a CPU
    made = []
    for logits_bytes in (None, 1 << 20):
        engine = tiny_engine(mesh, source("qwen2"), config={"logits_bytes": logits_bytes}, temperature=0.8)
        columns = engine.forward(make_batch(), {name: name for name in OUTPUTS})
        engine.forward_backward(make_batch(), PolicyLoss())
        made.append({name: columns.ragged(name)[0] for name in OUTPUTS} | full_gradients(engine))
    found = differences(*made)
    assert "lm_head.weight" in found
    assert max(found.values()) <= 1e-5, found


@pytest.mark.slow
def test_what_the_kernels_cannot_do_is_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="this model is on cpu") as caught:
        tiny_engine(mesh, config={"logits_bytes": None})
    assert caught.value.key == "logits_bytes"
    device = torch.device("cuda:0")
    with pytest.raises(ConfigError, match="float64") as caught:
        head.check_fused(device, torch.float64)
    assert caught.value.key == "logits_bytes"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install triton") as caught:
        head.check_fused(device, torch.bfloat16)
    assert caught.value.key == "logits_bytes"
    inputs = inputs_of((4, 10, 3), torch.float32, False)
    for name in ("topk_log_probs", "topk_ids"):
        with pytest.raises(TrainError, match=f"compute no {name}"):
            token_log_probs(*inputs, ("log_probs", name), topk=2, chunk_bytes=None)
