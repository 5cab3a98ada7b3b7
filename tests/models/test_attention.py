"""The packed attention function against a dense masked softmax, in float64, forward and backward."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.errors import ConfigError, TrainError
from rondo.models.attention import (
    SHORT,
    Documents,
    choose_kernel,
    fitting,
    plan_documents,
    varlen_attention,
)
from rondo.models.flash import flash_kernel

CPU = torch.device("cpu")


def plan(lengths: list[int], heads: tuple[int, int], prefixes: list[int] | None = None) -> Documents:
    index = np.full(len(lengths), -1) if prefixes is None else np.array(prefixes)
    longest = np.array(lengths) + np.where(index >= 0, np.array(lengths)[index], 0)
    kernel = choose_kernel("auto", CPU, torch.float64, int(longest.max(initial=0)))
    return plan_documents(np.array(lengths), kernel, heads=heads, device=CPU, prefixes=index)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], prefixes: list[int]
) -> torch.Tensor:
    """[1, H, N, D] and a mask built token by token."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    N = len(document)
    mask = torch.full((N, N), float("-inf"), dtype=q.dtype)
    for i in range(N):
        for j in range(N):
            same = document[i] == document[j] and j <= i
            if same or document[j] == prefixes[document[i]]:
                mask[i, j] = 0
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * 0.3 + mask
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def check(
    lengths: list[int], heads: tuple[int, int], prefixes: list[int] | None = None, value_dim: int = 6
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(heads[0], 4), (heads[1], 4), (heads[1], value_dim)]
    tensors = [
        torch.randn(1, h, sum(lengths), d, generator=generator, dtype=torch.float64) for h, d in shapes
    ]
    mine, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    documents = plan(lengths, heads, prefixes)
    out, _ = varlen_attention(torch.nn.Identity(), *mine, None, documents=documents, scaling=0.3)
    expected = dense(*theirs, lengths, prefixes or [-1] * len(lengths))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    factor = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (out * factor).sum().backward()
    (expected * factor).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
)
def test_short_documents_of_any_lengths(lengths: list[int], heads: tuple[int, int]) -> None:
    check(lengths, heads)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    samples=st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 9)), max_size=6),
)
def test_shared_prefixes_equal_a_dense_mask(prompts: list[int], samples: list[tuple[int, int]]) -> None:
    lengths = [*prompts, *(length for _, length in samples)]
    prefixes = [-1] * len(prompts) + [which if which < len(prompts) else -1 for which, _ in samples]
    check(lengths, (4, 2), prefixes)


def test_long_and_many_documents() -> None:
    assert [plan([n], (2, 2)).kernel for n in (SHORT, SHORT + 1)] == ["short", "sdpa"]
    check([SHORT + 9, 1, 40, 2], (4, 2), value_dim=4)
    documents = plan([3] * 5000, (4, 2))
    assert len(documents.buckets) <= 5  # tiny documents share matrix products
    assert (
        sum(bucket.docs * bucket.width for bucket in plan([*range(10, 60)] * 3, (4, 2)).buckets) < 1.1 * 5175
    )


def test_prefixes_only_where_they_can_be_shared() -> None:
    with pytest.raises(TrainError, match="need the short kernel"):
        plan([SHORT, 9], (2, 2), [-1, 0])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"softcap": 50.0}, "softcap"),
        ({"attention_mask": torch.zeros(1)}, "an attention mask"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "not causal"),
        ({"documents": None}, "no `documents`"),
        ({"sliding_window": 4}, "sliding window of 4 tokens and a document has 5"),
    ],
)
def test_what_it_does_not_know_it_refuses(arguments: dict[str, Any], named: str) -> None:
    q = torch.zeros(1, 2, 5, 4, dtype=torch.float64)
    accepted = {"documents": plan([5], (2, 2)), "softcap": None, "use_cache": False, "sliding_window": 5}
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
    for changes in (latent, {"head_dim": 512}, {"head_dim": 12}):
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((9, 0), "torch"), ((7, 5), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        kernel = flash_kernel.__wrapped__()
        assert (kernel and kernel[0]) == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_cpu_cuts_buckets_for_its_cache(device: str) -> None:
    lengths = np.full(64, 100)
    documents = plan_documents(lengths, "short", heads=(4, 2), device=torch.device(device))
    assert (len(documents.buckets) == 1) == (device == "meta")
