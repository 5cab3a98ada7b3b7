"""The kernels of decoding in triton against what they replace, in PyTorch. They run in triton's interpreter,
on a CPU (tests/interpreted.py). Where triton is not installed only the choice of a path is tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rondo.rollout.native.blocks import BLOCK
from rondo.rollout.native.cache import LayerShape
from rondo.rollout.native.generic import Rule, gathered, grouped_attention, why_copies
from rondo.rollout.native.lean import Ops, _rms_norm
from tests.interpreted import NO_TRITON, check_compiled, interpreted, needs_triton, run_interpreted

EPS = 1e-6


@pytest.mark.slow
@needs_triton
def test_all_of_this_file_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "width"), [("bf16", 128), ("bf16", 256), ("fp32", 128)])
def test_the_kernels_compile_for_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, width: int, capability: int
) -> None:
    """With the shared memory of the smallest devices of capability 8 (99 KiB)."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from rondo.rollout.native import fused

    types = dict.fromkeys(("blocks", "positions", "addresses"), "*i64")
    types |= dict.fromkeys(("parts", "largest_of", "total_of"), "*fp32")
    types |= dict.fromkeys(("scale", "softcap", "eps"), "fp32")
    sizes = "row_stride head_stride num_blocks window splits heads kv_heads width count".split()
    types |= dict.fromkeys(sizes, "i32")
    wide = {"KEY": width, "KEY_WIDE": width, "VALUE": width, "VALUE_WIDE": width}
    attend = {"GROUP": 2, "TILE": 16, "BLOCK": BLOCK, "SPLIT": fused.SPLIT, "WINDOW": True, "SOFTCAP": True}
    asked = [
        (fused._attend_kernel, attend | wide, 2 if dtype == "bf16" else 1),
        (fused._join_kernel, {"VALUE": width, "WIDE": width}, 2),
        (fused._add_norm_kernel, {"WIDE": 8192}, 2),
        (fused._turn_and_store_kernel, {"D": width, "WIDE": width // 2}, 2),
        (fused._gate_kernel, {"WIDE": 1024}, 2),
    ]
    for kernel, constants, stages in asked:
        check_compiled(
            kernel,
            {name: types.get(name, f"*{dtype}") for name in kernel.arg_names},
            constants,
            capability,
            {"num_warps": 4, "num_stages": stages},
            multiplies=dtype == "bf16" and kernel is fused._attend_kernel,
            most_shared=99 << 10,
        )


# Heads, key/value heads, widths of keys and values, blocks of a row, and the rule.
CASES = [
    (4, 2, 32, 32, 6, Rule()),
    (4, 4, 24, 16, 9, Rule(window=70)),
    (8, 2, 16, 16, 2, Rule(scaling=0.4, softcap=5.0)),
    (6, 2, 20, 20, 5, Rule(window=130, softcap=2.0, sinks=torch.linspace(-1, 1, 6))),
]


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_that_over_copies(case: tuple[int, int, int, int, int, Rule]) -> None:
    """Of rows of every length in blocks of any order: one position, a block's edge, all; padding gets 0."""
    from rondo.rollout.native import fused

    heads, kv_heads, D, Dv, n, rule = case
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([n * BLOCK - 1, 0, BLOCK - 1, BLOCK, n * BLOCK])
    R = len(positions)
    order = torch.randperm(R * n, generator=generator).view(R, n)
    blocks = torch.cat([order, torch.full((R, 1), R * n)], 1)
    keys = torch.randn((R * n + 1) * BLOCK, kv_heads, D, generator=generator)
    values = torch.randn((R * n + 1) * BLOCK, kv_heads, Dv, generator=generator)
    query = torch.randn(R, 1, heads, D, generator=generator).transpose(1, 2)  # as a projection leaves it
    scale = D**-0.5 if rule.scaling is None else rule.scaling
    asks = scale, rule.window, rule.softcap, rule.sinks
    out = fused.attention(query[:, :, 0], keys, values, blocks, positions, *asks)
    places = torch.arange(n * BLOCK)
    hidden = places > positions[:, None]
    if rule.window is not None:
        hidden |= places <= positions[:, None] - rule.window
    mask = torch.zeros(R, 1, 1, n * BLOCK).masked_fill_(hidden[:, None, None], float("-inf"))
    copies = gathered(keys, blocks[:, :n]), gathered(values, blocks[:, :n])
    expected = grouped_attention(query, *copies, mask, rule)[:, :, 0]
    torch.testing.assert_close(out[:-1], expected[:-1], rtol=0, atol=2e-6)
    assert not out[-1].any()


@interpreted
def test_no_bit_of_a_row_depends_on_its_mates_or_on_the_width_of_the_table() -> None:
    from rondo.rollout.native import fused

    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(13 * BLOCK, 2, 16, generator=generator) for _ in "kv")
    query = torch.randn(3, 4, 16, generator=generator)
    blocks = torch.arange(12).view(1, 12).repeat(3, 1)
    positions = torch.tensor([300, 30, 700])

    def attended(rows: list[int], n: int) -> torch.Tensor:
        table = torch.cat([blocks[rows, :n], torch.full((len(rows), 1), 12)], 1)
        return fused.attention(query[rows], keys, values, table, positions[rows], 0.25)

    together = attended([0, 1, 2], 12)
    for row, least in ((0, 5), (1, 1), (2, 11)):
        assert torch.equal(attended([row], least)[0], together[row])


@interpreted
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_turned_and_stored_as_by_pytorch(normed: bool) -> None:
    from rondo.rollout.native import fused

    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = some(6, 4, 20), some(6, 2, 20), some(6, 2, 20)
    tables, scales = (some(50, 20), some(50, 20)), (some(20), some(20)) if normed else (None, None)
    positions, addresses = torch.randint(0, 50, (6,)), torch.randperm(100)[:6]
    cache = torch.zeros(100, 2, 20), torch.zeros(100, 2, 20)
    expected = []
    for one, scale in zip((q, k), scales, strict=True):
        normal = one if scale is None else _rms_norm(one, scale, EPS)
        low, high = normal.chunk(2, -1)
        cos, sin = (table[positions][:, None] for table in tables)
        expected.append(normal * cos + torch.cat((-high, low), -1) * sin)
    fused.turn_and_store(q, k, v, scales, tables, (positions, addresses), cache, EPS)
    torch.testing.assert_close(q, expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(cache[0][addresses], expected[1], rtol=0, atol=2e-6)
    assert torch.equal(cache[1][addresses], v)
    rest = torch.ones(100, dtype=torch.bool).index_fill_(0, addresses, False)
    assert not any(tensor[rest].any() for tensor in cache)


@interpreted
def test_norms_and_gates_equal_those_of_pytorch() -> None:
    from rondo.rollout.native import fused

    generator = torch.Generator().manual_seed(0)
    x, delta, gate, up = (torch.randn(5, 1, 700, generator=generator) for _ in range(4))
    weight = torch.randn(700, generator=generator)
    plain = Ops((x, x), EPS)
    for added in (None, delta):
        total, normed = plain.add_norm(x, added, weight)
        mine = x.clone()
        torch.testing.assert_close(fused.add_norm(mine, added, weight, EPS), normed, rtol=0, atol=4e-6)
        assert torch.equal(mine, total)
    expected = F.silu(gate) * up
    torch.testing.assert_close(fused.gated(gate, up), expected, rtol=0, atol=2e-6)


def test_where_rows_are_copied_and_why() -> None:
    shapes, card = [LayerShape(2, 128, 128)], torch.device("cuda:0")
    assert "CUDA devices" in why_copies(shapes, torch.bfloat16, torch.device("cpu"))
    assert "float64" in why_copies(shapes, torch.float64, card)
    wide, missing = [LayerShape(2, 192, 128)], "triton is not installed"
    assert (missing if NO_TRITON else "wider than 128") in why_copies(wide, torch.float32, card)
    said = why_copies(wide, torch.bfloat16, card)
    assert missing in said if NO_TRITON else said == ""
