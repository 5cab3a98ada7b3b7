"""The matrix product of the compiled path: right, and the same for a row whatever its batch mates are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rondo.rollout.native import kernels

# (K, N): below, at and beside the panel's columns and the depth of one pass (512).
SIZES = [(1, 1), (7, 23), (40, 48), (127, 49), (512, 24), (513, 97), (1100, 70)]
MOST_ROWS = 20  # whole tiles of rows (4 or 8) and every remainder


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] as the product reads it."""
    library = kernels.library()
    (columns, K), panel = weight.shape, library.rondo_panel()
    packed = kernels.zeros_in_huge_pages(-(-columns // panel), K, panel)
    library.rondo_pack(weight.data_ptr(), columns, K, packed.data_ptr(), 0)
    return packed


def product(a: torch.Tensor, packed: torch.Tensor, columns: int) -> torch.Tensor:
    rows, K = a.shape
    out = torch.full((rows, columns), float("nan"))
    kernels.library().rondo_gemm(a.data_ptr(), packed.data_ptr(), rows, K, columns, out.data_ptr())
    return out


@pytest.mark.parametrize(("K", "N"), SIZES)
def test_product_and_its_rows(K: int, N: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(MOST_ROWS, K, generator=generator)
    weight = torch.randn(N, K, generator=generator)
    packed = pack(weight)
    whole = product(a, packed, N)
    exact = a.double() @ weight.double().T
    scale = a.double().abs() @ weight.double().abs().T
    assert ((whole - exact).abs() <= 1e-6 * scale).all()
    for rows in range(1, MOST_ROWS):
        np.testing.assert_array_equal(product(a[:rows].contiguous(), packed, N), whole[:rows])
        np.testing.assert_array_equal(product(a[-rows:].contiguous(), packed, N), whole[-rows:])


def test_a_matrix_that_comes_in_parts_is_packed_side_by_side() -> None:
    library = kernels.library()
    weight = torch.randn(61, 30, generator=torch.Generator().manual_seed(0))
    packed = torch.zeros_like(pack(weight))
    for first, stop in ((0, 5), (5, 50), (50, 61)):
        part = weight[first:stop].contiguous()
        library.rondo_pack(part.data_ptr(), stop - first, 30, packed.data_ptr(), first)
    np.testing.assert_array_equal(packed, pack(weight))
    assert float(packed.sum()) == pytest.approx(float(weight.sum()), abs=1e-4)  # zeros beside the columns
