"""The packed attention function against a dense masked softmax, in float64, forward and backward."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.core.errors import ConfigError
from rondo.models.attention import SHORT, Window, choose_kernel, fitting, varlen_attention
from rondo.models.documents import Documents, Kernel, plan_documents
from rondo.models.flash import ScoreRule, _torch, flash_kernel
from rondo.models.kernels import attend, causal_mask
from rondo.platform.cpu import Cpu
from tests.messages import full_text

CPU = torch.device("cpu")


def plan(lengths: list[int], prefixes: list[int] | None = None, kernel: Kernel | None = None) -> Documents:
    index = np.full(len(lengths), -1) if prefixes is None else np.array(prefixes)
    longest = np.array(lengths) + np.where(index >= 0, np.array(lengths)[index], 0)
    kernel = kernel or choose_kernel("auto", CPU, torch.float64, int(longest.max(initial=0)))
    return plan_documents(np.array(lengths), kernel, device=CPU, prefixes=index)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    prefixes: list[int],
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, H, N, D] and a mask built token by token; a document's positions go on where its prefix ends."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    N = len(document)
    position = np.arange(N) - starts[document]
    position += np.array([lengths[prefix] if prefix >= 0 else 0 for prefix in prefixes], int)[document]
    mask = torch.full((N, N), float("-inf"), dtype=q.dtype)
    for i in range(N):
        for j in range(N):
            same = document[i] == document[j] and j <= i
            near = sliding_window is None or position[i] - position[j] < sliding_window
            if near and (same or document[j] == prefixes[document[i]]):
                mask[i, j] = 0
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(1, -1, N, 1)), -1)
    return (torch.softmax(scores, -1)[..., :N] @ v).transpose(1, 2)


def check(
    lengths: list[int],
    heads: tuple[int, int],
    prefixes: list[int] | None = None,
    value_dim: int = 6,
    kernel: Kernel | None = None,
    sinks: bool = False,
    **asks: Any,
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(heads[0], 4), (heads[1], 4), (heads[1], value_dim)]
    tensors = [
        torch.randn(1, h, sum(lengths), d, generator=generator, dtype=torch.float64) for h, d in shapes
    ]
    if sinks:
        tensors.append(torch.randn(heads[0], generator=generator, dtype=torch.float64))
    mine, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    documents = plan(lengths, prefixes, kernel)
    options = [{"s_aux": one[3], **asks} if sinks else asks for one in (mine, theirs)]
    out, _ = varlen_attention(
        torch.nn.Identity(), *mine[:3], None, documents=documents, scaling=0.3, **options[0]
    )
    expected = dense(*theirs[:3], lengths, prefixes or [-1] * len(lengths), **options[1])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    factor = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (out * factor).sum().backward()
    (expected * factor).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


ASKS = st.fixed_dictionaries(
    {},
    optional={
        "sliding_window": st.integers(1, 12),
        "softcap": st.sampled_from([0.5, 3.0]),
        "sinks": st.just(True),
    },
)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
)
def test_short_documents_of_any_lengths(lengths: list[int], heads: tuple[int, int]) -> None:
    check(lengths, heads)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    kernel=st.sampled_from(["short", "sdpa"]),
    asks=ASKS,
)
def test_windows_soft_caps_and_sinks(
    lengths: list[int], heads: tuple[int, int], kernel: Kernel, asks: dict[str, Any]
) -> None:
    check(lengths, heads, kernel=kernel, **asks)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    samples=st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 9)), max_size=6),
    asks=ASKS,
)
def test_shared_prefixes_equal_a_dense_mask(
    prompts: list[int], samples: list[tuple[int, int]], asks: dict[str, Any]
) -> None:
    lengths = [*prompts, *(length for _, length in samples)]
    prefixes = [-1] * len(prompts) + [which if which < len(prompts) else -1 for which, _ in samples]
    check(lengths, (4, 2), prefixes, **asks)


def test_long_and_many_documents() -> None:
    assert [plan([n]).kernel for n in (SHORT, SHORT + 1)] == ["short", "sdpa"]
    check([SHORT + 9, 1, 40, 2], (4, 2), value_dim=4)
    documents = plan([3] * 5000)
    assert len(documents.plans.of((4, 2)).buckets) <= 5  # tiny documents share matrix products
    assert documents.plans.of((4, 2)) is documents.plans.of((4, 2))  # planned once
    for kv_heads in (2, 4):  # and anew for one that has others
        plans = documents.plans.of((4, kv_heads)).buckets
        assert sum(len(bucket.key_rows) for bucket in plans) == 15000 * kv_heads
    buckets = plan([*range(10, 60)] * 3).plans.of((4, 2)).buckets
    assert sum(bucket.docs * bucket.width for bucket in buckets) < 1.1 * 5175


@pytest.mark.parametrize(
    "asks",
    [
        {"sliding_window": 70},
        {"sliding_window": 3, "sinks": True},
        {"softcap": 2.0},
        {"sliding_window": 90, "softcap": 2.0, "sinks": True},
    ],
)
def test_long_documents_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch, asks: dict[str, Any]) -> None:
    """Several blocks per document, the last one shorter, and documents of less than a block among them."""
    monkeypatch.setattr(Cpu, "numbers", replace(Cpu.numbers, scores=1))
    check([SHORT + 40, 1, 70, 2], (4, 2), **asks)


@pytest.mark.parametrize("kernel", ["short", "sdpa"])
def test_gradients_by_finite_differences(kernel: Kernel) -> None:
    """With a window, a soft-cap and sinks at once."""
    documents, generator = plan([5, 3], kernel=kernel), torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 8, 3), (1, 1, 8, 3), (1, 1, 8, 3), (2,))
    ]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        asks = {"sliding_window": 3, "softcap": 0.7, "s_aux": sinks}
        return varlen_attention(torch.nn.Identity(), q, k, v, documents=documents, **asks)[0]

    assert torch.autograd.gradcheck(attention, inputs)


def test_a_window_that_hides_nothing_changes_no_bit() -> None:
    documents, generator = plan([5, 9, 3]), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 17, 4, generator=generator)
    outs = [
        varlen_attention(torch.nn.Identity(), q, k, v, mask, documents=documents, sliding_window=window)[0]
        for mask, window in ((None, None), (None, 9), (Window(9), 9), (Window(200), None))
    ]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_a_window_is_that_of_the_mask() -> None:
    """As Qwen2-MoE and PhiMoE have it, whose attention is told of no window."""
    documents, generator = plan([9]), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 4, generator=generator)
    by_mask = varlen_attention(torch.nn.Identity(), q, k, v, Window(4), documents=documents)[0]
    by_keyword = varlen_attention(torch.nn.Identity(), q, k, v, None, documents=documents, sliding_window=4)[
        0
    ]
    assert torch.equal(by_mask, by_keyword)
    with pytest.raises(ConfigError, match=full_text("window of 4 positions, and its mask")):
        varlen_attention(torch.nn.Identity(), q, k, v, Window(5), documents=documents, sliding_window=4)


def test_the_mask_by_hand() -> None:
    """Two queries after a prefix of two, in a window of three; once per head of a group."""
    out = float("-inf")
    assert causal_mask(2, 2, 3, 2, torch.float32, CPU).tolist() == [[0, 0, 0, out], [out, 0, 0, 0]] * 2
    assert causal_mask(2, 2, None, 1, torch.float32, CPU).tolist() == [[0, 0, 0, out], [0, 0, 0, 0]]


def test_prefixes_only_where_they_can_be_shared() -> None:
    with pytest.raises(AssertionError, match="sdpa takes no shared prefixes"):
        plan([SHORT, 9], [-1, 0])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"temperature_of_scores": 2.0}, "temperature_of_scores"),
        ({"attention_mask": torch.zeros(1)}, "an attention mask of its own"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "not causal"),
        ({"documents": None}, full_text("does not tell its attention function")),
    ],
)
def test_what_it_does_not_know_it_refuses(arguments: dict[str, Any], named: str) -> None:
    q = torch.zeros(1, 2, 5, 4, dtype=torch.float64)
    accepted = {"documents": plan([5]), "softcap": None, "use_cache": False, "sliding_window": None}
    varlen_attention(torch.nn.Identity(), q, q, q, **accepted)
    with pytest.raises(ConfigError, match=named):
        varlen_attention(torch.nn.Identity(), q, q, q, **{**accepted, **arguments})


def test_flash_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="attention=flash needs a CUDA device"):
        choose_kernel("flash", CPU, torch.bfloat16, 10)
    assert choose_kernel("auto", CPU, torch.bfloat16, 10) == "short"


def test_flash_is_chosen_by_the_widths_of_heads() -> None:
    """Latent attention (192 and 128), wide and odd heads go through SDPA; asking for flash is an error."""
    latent = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    narrow_values = {"head_dim": 192, "v_head_dim": 128}
    for changes in (latent, narrow_values, {"head_dim": 512}, {"head_dim": 12}):
        config = SimpleNamespace(model_type="x", hidden_size=64, num_attention_heads=4, **changes)
        assert fitting("auto", config) == "sdpa"
        assert fitting("sdpa", config) == "sdpa"
        with pytest.raises(ConfigError, match="attention=flash: a x model has"):
            fitting("flash", config)
    plain = SimpleNamespace(model_type="x", hidden_size=512, num_attention_heads=4)
    assert [fitting(one, plain) for one in ("auto", "sdpa", "flash")] == ["auto", "sdpa", "flash"]


def test_flash_attn_4_alone_is_no_flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It installs the folder flash_attn without the function: torch's kernel is used then."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    for capability, expected in (((9, 0), "torch"), ((7, 5), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        kernel = flash_kernel.__wrapped__("cuda")
        assert (kernel and kernel.package) == expected


def varlen_of_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """What torch's kernel computes: heads are grouped in it."""
    assert window_size == (-1, 0)
    bounds = cu_seq_q.tolist()
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(one[a:b].transpose(0, 1)[None] for one in (query, key, value)),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat(parts)


def varlen_of_2_12(*arguments: Any, enable_gqa: bool = False, **named: Any) -> torch.Tensor:
    """The function in front of it refuses groups that nobody names, as torch's does."""
    if not enable_gqa and arguments[0].shape[1] != arguments[1].shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return varlen_of_2_11(*arguments, **named)


@pytest.mark.parametrize(
    ("function", "heads", "repeated"),
    [
        (varlen_of_2_11, (8, 2), True),
        (varlen_of_2_11, (4, 4), False),
        (varlen_of_2_12, (8, 2), False),
        (varlen_of_2_12, (4, 4), False),
    ],
)
def test_torchs_flash_gets_keys_and_values_as_they_are_where_it_takes_groups(
    monkeypatch: pytest.MonkeyPatch, function: Any, heads: tuple[int, int], repeated: bool
) -> None:
    seen = []

    @functools.wraps(function)
    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any) -> Any:
        seen.append((key.data_ptr(), value.data_ptr()))
        return function(query, key, value, *more, **named)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", noted)
    (H, K), lengths = heads, [5, 1, 9]
    q, k, v = (torch.randn(15, heads, 8, dtype=torch.float64) for heads in (H, K, K))
    documents, rule = plan(lengths, kernel="sdpa"), ScoreRule(0.3)
    ours = _torch().call(q, k, v, documents.cu_seqlens, 9, rule)
    assert (seen == [(k.data_ptr(), v.data_ptr())]) is not repeated
    torch.testing.assert_close(ours, attend(q, k, v, None, documents, rule), rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_cpu_cuts_buckets_for_its_cache(device: str) -> None:
    lengths = np.full(64, 100)
    documents = plan_documents(lengths, "short", device=torch.device(device))
    assert (len(documents.plans.of((4, 2)).buckets) == 1) == (device == "meta")
