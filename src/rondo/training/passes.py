"""What goes through a model in one verb: micro-batches, as many on every rank. And what comes out beside the
outputs: a mixture's routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from rondo.core.batch import Batch, ragged_rows
from rondo.core.columns import PROMPT_ROUTED, ROUTED, TOPK_IDS
from rondo.core.types import RouteShape
from rondo.system.activity import progress
from rondo.system.border import in_thread
from rondo.training.packed import (
    PackedLayout,
    PackedRows,
    dummy,
    expand_columns,
    images_of,
    pack,
    plan_passes,
    sequences_of,
    with_idle_tower,
)


class Passes:
    """The micro-batches of one verb on this rank; they can be gone through more than once. A rank that has
    fewer than the busiest one, or than a pipeline takes, has dummies at the end: one token, of weight 0.
    """

    def __init__(
        self,
        batch: Batch,
        # What is computed of them.
        outputs: Collection[str],
        packing: PackedLayout,
        token_budget: int,
        # Of all ranks.
        group: dist.ProcessGroup,
        # The wide outputs are at the k likeliest tokens; None: at those of column teacher_topk_ids.
        k: int | None = None,
    ) -> None:
        """Collective. Raises DataError, TrainError (`plan_passes`)."""
        self._batch = batch
        self._packing = packing
        self._full = "scores" in outputs
        self._k = k
        self._from_column = k is None and "topk_log_probs" in outputs
        self._plan = plan_passes(batch, packing.family, token_budget, self._full)
        self._number = len(self._plan)
        if dist.get_world_size(group) > 1:
            most = torch.tensor(self._number, device=packing.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            self._number = int(most)
        self._number += -self._number % packing.multiple_of_passes
        self._prompts, self._responses = sequences_of(batch)
        self._images = images_of(batch, packing)
        self._tower = self._passes_with_images(group)

    def _passes_with_images(self, group: dist.ProcessGroup) -> list[bool]:
        """Says of each pass whether a rank has images in it. Collective, for a model that is given any."""
        own = [False] * self._number
        if self._packing.images is None:
            return own
        for number, rows in enumerate(self._plan if self._images is not None else ()):
            assert self._images is not None
            own[number] = any(self._images[row] for row in rows)
        if dist.get_world_size(group) == 1:
            return own
        everywhere = torch.tensor(own, dtype=torch.uint8, device=self._packing.device)
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=group)
        return [bool(one) for one in everywhere.tolist()]

    @property
    def num_rows(self) -> int:
        """Returns how many rows of this rank have a pass: those with response tokens."""
        return int(np.count_nonzero(self._batch.lengths("response_ids")))

    def __len__(self) -> int:
        """Returns how many passes there are, on every rank."""
        return self._number

    def __iter__(self) -> Iterator[PackedRows]:
        for packed in self.without_topk():
            topk: torch.Tensor | int | None = self._k
            if self._from_column and not len(packed.rows):
                topk = 1  # any
            elif self._from_column:
                topk = expand_columns(self._batch, [TOPK_IDS], packed, self._packing.dtype)[TOPK_IDS]
            yield dataclasses.replace(packed, topk=topk)

    def without_topk(self) -> Iterator[PackedRows]:
        """Yields the same, for passes without outputs."""
        ahead: Future[None] | None = None
        for number, (rows, tower) in enumerate(zip(self._plan, self._tower, strict=False)):
            progress(of=self._number)
            prompts, responses = [self._prompts[row] for row in rows], [self._responses[row] for row in rows]
            images = None if self._images is None else [self._images[row] for row in rows]
            if ahead is not None:
                wait([ahead])
            packed = pack(rows, prompts, responses, self._packing, self._full, images)
            ahead = self._read_ahead(number + 1)
            yield with_idle_tower(packed, self._packing) if tower and packed.images is None else packed
        for tower in self._tower[len(self._plan) :]:
            progress(of=self._number)
            yield dummy(self._packing, self._full, tower=tower)

    def _read_ahead(self, number: int) -> Future[None] | None:
        """Reads the images of a pass in a thread, while the one before it is computed; what is wrong with one
        is said when its own pass is laid out.
        """
        reader, shown = self._packing.images, self._images
        if reader is None or shown is None or number >= len(self._plan):
            return None
        images = {image.sha256: image for row in self._plan[number] for image in shown[row]}

        def read() -> None:
            for image in images.values():
                reader.pixels(image)

        return in_thread(read, "images")


class RecordedRoutes:
    """The routes of a batch's rows, as they come pass by pass."""

    def __init__(self, batch: Batch, shape: RouteShape) -> None:
        self._dtype = shape.dtype
        self._prompts = batch.lengths("prompt_ids")
        nothing = shape.padded(None, 0)
        self._before = [nothing] * len(batch)
        self._after = [nothing] * len(batch)

    def add(self, packed: PackedRows, routes: torch.Tensor) -> None:
        """Adds the routes of a pass. routes: int64 [N, W], of all tokens of the pass."""
        flat, positions = routes.cpu().numpy().astype(self._dtype), packed.positions.cpu().numpy()
        ends = packed.cu_seqlens.cpu().numpy()
        for row, start, stop in zip(packed.rows, ends[:-1], ends[1:], strict=False):
            last = positions[start]  # of the prompt, which lies before it as a whole
            self._before[row] = flat[last + 1 - self._prompts[row] : last]
            self._after[row] = flat[positions[start:stop]]

    def columns(self) -> dict[str, pa.ListArray]:
        """Returns them as columns of the batch; rows without response tokens have none."""
        both = ((PROMPT_ROUTED, self._before), (ROUTED, self._after))
        return {name: ragged_rows(rows, self._dtype) for name, rows in both}
