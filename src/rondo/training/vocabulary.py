"""Ranks that share out the tokens of the vocabulary where they compute the same rows (tensor parallel), so
that no rank ever has a row of logits, or the output head's weight, whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Vocabulary:
    """size: tokens of all ranks. rank: this one's number among `ranks`. A rank's are those of its part of the
    weight, as DTensor cuts rows.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    size: int

    @property
    def own(self) -> slice:
        """Returns this rank's tokens."""
        each = -(-self.size // self.ranks)
        return slice(min(self.rank * each, self.size), min((self.rank + 1) * each, self.size))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up what each rank has of the sums over all tokens, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Takes the largest of what each rank has, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns log p of own tokens, [M, own], p being the softmax over all of them."""
        largest = self.largest(logits.max(-1, keepdim=True).values)
        logits = logits - largest
        return logits.sub_(self.sum(logits.exp().sum(-1, keepdim=True)).log_())

    def pick(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Gathers [M, K] out of [M, own] of each rank, by the tokens' ids."""
        here, at = self._located(ids)
        return self.sum(values.gather(1, at).masked_fill_(~here, 0))

    def add(self, values: torch.Tensor, ids: torch.Tensor, addends: torch.Tensor) -> None:
        """Adds [M, K] to [M, own] of each rank, by the tokens' ids."""
        here, at = self._located(ids)
        values.scatter_add_(1, at, addends.masked_fill(~here, 0))

    def likeliest(self, log_probs: torch.Tensor, k: int) -> torch.Tensor:
        """Returns the ids [M, k] of the largest of all ranks' [M, own], in descending order."""
        width = min(k, -(-self.size // self.ranks))
        most = log_probs.new_full((len(log_probs), width), -torch.inf)
        ids = torch.zeros(most.shape, dtype=torch.int64, device=most.device)
        found = log_probs.topk(min(width, log_probs.shape[1]), -1)
        most[:, : found.values.shape[1]] = found.values
        ids[:, : found.values.shape[1]] = found.indices + self.own.start
        every = [torch.empty_like(most) for _ in range(self.ranks)]
        every_id = [torch.empty_like(ids) for _ in range(self.ranks)]
        dist.all_gather(every, most, group=self.group)
        dist.all_gather(every_id, ids, group=self.group)
        best = torch.cat(every, -1).topk(k, -1).indices
        return torch.cat(every_id, -1).gather(1, best)

    def _located(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which ids are own tokens, and where these are among them (the others anywhere)."""
        own = self.own
        return (ids >= own.start) & (ids < own.stop), (ids - own.start).clamp(0, own.stop - own.start - 1)
