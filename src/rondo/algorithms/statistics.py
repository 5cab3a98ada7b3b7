"""Group and masked statistics, in float64 and relative to the smallest value, so that equal values give exact
zeros.

(A float32 mean of eight rewards of 0.9 is not 0.9, and its rounding error divided by a vanishing standard
deviation is a spurious advantage: D7 in docs/algorithms.md.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# What a loss reports: (numerator, denominator), which add up over any split, or a 0-dim tensor, a maximum.
Metrics = dict[str, tuple[Tensor, Tensor] | Tensor]


@dataclass(frozen=True)
class Groups:
    """Knows which rows are a group, and makes statistics of each group."""

    index: Tensor
    """[B], the group 0..G-1 of each row."""
    size: Tensor
    """float64 [G], rows per group."""

    @classmethod
    def of(cls, group_id: Tensor) -> Groups:
        """Numbers the groups of `group_id`, integers [B] of any values in any order."""
        assert group_id.ndim == 1
        _, index, size = torch.unique(group_id, return_inverse=True, return_counts=True)
        return cls(index, size.to(torch.float64))

    def sums(self, values: Tensor) -> Tensor:
        """Sums values [B] per group: float64 [G]."""
        return values.new_zeros(len(self.size), dtype=torch.float64).index_add(
            0, self.index, values.to(torch.float64)
        )

    def above_minimum(self, values: Tensor) -> Tensor:
        """Subtracts from each value the smallest one of its group: float64 [B], exactly 0 in a group of equal
        values.
        """
        wide = values.to(torch.float64)
        lowest = wide.new_full((len(self.size),), torch.inf).scatter_reduce(0, self.index, wide, "amin")
        return wide - lowest[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """Subtracts the group's mean: float64 [B]; exactly 0 in a group of one or of equal values."""
        raised = self.above_minimum(values)
        return raised - (self.sums(raised) / self.size)[self.index]

    def sample_std(self, values: Tensor) -> Tensor:
        """Returns the group's sample standard deviation (n - 1): float64 [B]; 0 in a group of one."""
        squares = self.sums(self.centred(values).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()[self.index]

    def is_constant(self, values: Tensor) -> Tensor:
        """Says of each group whether all its values are equal: bool [G]."""
        return self.sums(self.above_minimum(values)) == 0


@dataclass(frozen=True)
class Answers:
    """The answers of a mini-batch that have trained tokens, in the groups of their prompts: A of B rows."""

    counted: Tensor
    """bool [B, T], which tokens are trained."""
    there: Tensor
    """bool [B], which rows have any."""
    groups: Groups
    """Of the A answers."""

    @classmethod
    def of(cls, group_id: Tensor, response_mask: Tensor) -> Answers:
        """Finds them. group_id and response_mask: [B, T], as a `prepare` has them."""
        counted = response_mask > 0
        there = counted.any(1)
        lowest = torch.iinfo(torch.int64).min
        return cls(counted, there, Groups.of(torch.where(counted, group_id, lowest).amax(1)[there]))

    def sums(self, values: Tensor) -> Tensor:
        """Sums values [B, T] over the trained tokens of each answer: float64 [A]."""
        return torch.where(self.counted, values.to(torch.float64), 0.0).sum(1)[self.there]

    def on_tokens(self, *columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Puts numbers of answers, [A] each, on every token of theirs: [B, T]; 0 in other rows."""
        out = columns[0].new_zeros(len(columns), len(self.there), dtype=dtype)
        out[:, self.there] = torch.stack(columns).to(dtype)
        return out[..., None].expand(len(columns), *self.counted.shape).unbind()


def whiten(values: Tensor, weights: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Gives zero mean and unit variance over entries counted `weights` times; 0 where the weight is 0.

    values, weights: any equal shape; weights are a mask or numbers of tokens. Returns float64:
    (x - mean) / sqrt(var + eps), var with Bessel's correction over N = Σ weights (N <= 1 gives 0).
    """
    assert values.shape == weights.shape
    counted = weights > 0
    wide = torch.where(counted, values.to(torch.float64), 0.0)
    share = torch.where(counted, weights.to(torch.float64), 0.0)
    number = share.sum()
    lowest = wide[counted].min() if bool(counted.any()) else wide.new_zeros(())
    raised = torch.where(counted, wide - lowest, 0.0)
    deviation = torch.where(counted, raised - (share * raised).sum() / number.clamp(min=1), 0.0)
    variance = (share * deviation.square()).sum() / (number - 1).clamp(min=1)
    return deviation * (variance + eps).rsqrt()


def moments(values: Tensor, weights: Tensor) -> Tensor:
    """Returns what `Whitening.of` needs to know of each row of values [B, T], which count `weights` times:
    float64 [B, 4]. Their number, the smallest, their mean above that, the sum of squares about the mean.
    """
    counted = weights > 0
    wide = torch.where(counted, values.to(torch.float64), torch.inf)
    share = torch.where(counted, weights.to(torch.float64), 0.0)
    number = share.sum(1)
    lowest = torch.cat([wide, wide.new_full((len(wide), 1), torch.inf)], 1).amin(1)
    raised = torch.where(counted, wide - lowest[:, None], 0.0)
    mean = (share * raised).sum(1) / number.clamp(min=1)
    squares = (share * (raised - mean[:, None]).square()).sum(1)
    return torch.stack([number, torch.where(number > 0, lowest, 0.0), mean, squares], 1)


@dataclass(frozen=True)
class Whitening:
    """What `whiten` does to the values of a batch, where its rows are apart: it takes `lowest` and then
    `mean` off, and multiplies by `scale`.
    """

    lowest: float
    """What is subtracted first."""
    mean: float
    """What is subtracted then."""
    scale: float
    """What the rest is multiplied by."""

    @classmethod
    def of(cls, rows: Tensor, *, eps: float = 1e-8) -> Whitening:
        """Joins the `moments` of all rows, [B, 4], in any fixed order (Chan, Golub & LeVeque 1979)."""
        number, lowest, mean, squares = rows[rows[:, 0] > 0].unbind(1)
        total = number.sum()
        if total == 0:
            return cls(0.0, 0.0, 0.0)
        least = lowest.min()
        raised = lowest - least + mean
        middle = (number * raised).sum() / total
        spread = squares.sum() + (number * (raised - middle).square()).sum()
        variance = spread / (total - 1).clamp(min=1)
        return cls(float(least), float(middle), float((variance + eps).rsqrt()))

    def __call__(self, values: Tensor, weights: Tensor) -> Tensor:
        """Returns float64 of the same shape, 0 where the weight is 0."""
        above = values.to(torch.float64) - self.lowest - self.mean
        return torch.where(weights > 0, above, 0.0) * self.scale


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Averages the last dimension's masked entries, 0 where there are none; the others may be NaN."""
    counted = mask > 0
    return torch.where(counted, values, 0.0).sum(-1) / counted.sum(-1).clamp(min=1)


def share(condition: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the trained tokens for which `condition` holds, as (numerator, denominator)."""
    return (condition * mask).sum(), mask.sum()


def row_index(cu_seqlens: Tensor, num_entries: int) -> Tensor:
    """Returns the row of each of the `num_entries` entries of a packed [N]: int64, from cu_seqlens [B+1].
    (Their number is not read from the tensor: on a GPU that would wait for it.)
    """
    assert cu_seqlens.ndim == 1
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)
    rows = torch.arange(len(lengths), device=cu_seqlens.device)
    return torch.repeat_interleave(rows, lengths, output_size=num_entries)


def row_means(values: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Returns the masked mean of each packed row, [N] -> [B]; 0 for a row without trained tokens.
    Differentiable.
    """
    assert values.ndim == mask.ndim == rows.ndim == 1
    sums = values.new_zeros(num_rows).index_add(0, rows, values * mask)
    counts = mask.new_zeros(num_rows).index_add(0, rows, mask)
    return sums / counts.clamp(min=1)
