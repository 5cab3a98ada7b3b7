"""Rows of a batch laid out one after another, and where the responses are predicted from.

Alignment: the model's output at position j predicts token j+1. A document is the prompt and the response
*without its last token* (nothing is predicted from that one), P + R - 1 tokens; response token t is predicted
at P - 1 + t of it. Where something is wanted *after* every response token (a score: at P + t), documents are
`full`: P + R tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch

from rondo.core.batch import Batch, ragged_array
from rondo.core.columns import IMAGES, PROMPT_ROUTED, ROUTED, UNIT
from rondo.core.errors import DataError, TrainError
from rondo.core.images import Grid, ImageRef, places_of_images
from rondo.models.attention import choose_kernel
from rondo.models.context import Context, Places, to_device
from rondo.models.documents import Documents, plan_documents
from rondo.models.family import Family, why_blind
from rondo.models.pixels import ImageReader
from rondo.models.source import Attention
from rondo.models.vision import ImageFamily
from rondo.planning.batches import micro_batches, rows_of_units


@dataclass(frozen=True)
class PackedLayout:
    """What a model needs in order to lay out documents."""

    family: Family
    """What is known of its model type."""
    device: torch.device
    """Where its tensors lie."""
    dtype: torch.dtype
    """The dtype that it computes in."""
    attention: Attention
    """Which kernel is asked for."""
    context: Context | None = None
    """The ranks that divide the tokens of a pass between them."""
    images: ImageReader | None = None
    """Reads the images of rows; None: the model is given none."""
    multiple: int = 1
    """What divides the tokens of each pass, beside the ranks of `context`: further ones share them out."""
    multiple_of_passes: int = 1
    """What divides the passes of a verb: a pipeline may take so many at a time."""

    @property
    def divides(self) -> int:
        """Returns of what the tokens of a pass are a multiple."""
        return self.multiple * (1 if self.context is None else self.context.size)


@dataclass(frozen=True)
class PackedImages:
    """The images of one micro-batch on the device."""

    family: ImageFamily
    """How the model reads them."""
    pixels: torch.Tensor
    """float32 [P, …]: what the tower takes of each distinct image, once, joined."""
    grids: torch.Tensor
    """int64 [U, 3]: the distinct images' grids."""
    order: tuple[int, ...]
    """Which of them the tokens of the pass stand for, in their order; none: the pass of another rank has
    images, and this one's tower takes part."""


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch on the device: N tokens in documents, M response tokens in B rows."""

    rows: np.ndarray
    """[B]: positions in the batch; none in a dummy."""
    input_ids: torch.Tensor
    """int64 [N]; with documents that nothing reads at the end, where ranks divide the tokens between them."""
    position_ids: torch.Tensor
    """int64 [N]; [4, N] with images: the place in the document, then what the rotary embedding turns by."""
    positions: torch.Tensor
    """int64 [M]: the position whose output predicts each response token."""
    targets: torch.Tensor
    """int64 [M]: the response tokens."""
    cu_seqlens: torch.Tensor
    """int32 [B + 1], of the responses."""
    documents: Documents | None
    """How attention keeps documents apart; None for a model whose rows cannot be packed."""
    document_lengths: np.ndarray
    """int64 [D]: the tokens of each document."""
    routes: torch.Tensor | None
    """int64 [N, W]: which experts the routers are to choose, layer after layer; -1: as they would. None: as
    they would everywhere."""
    members: np.ndarray
    """int64 [Q, 2]: (row of the B, document) of whatever a row consists of; a shared prompt is in several."""
    after: torch.Tensor | None = None
    """int64 [M]: the positions of the response tokens themselves; of full documents only."""
    places: Places | None = None
    """Which rank has each of `positions`, where ranks divide the tokens between them."""
    places_after: Places | None = None
    """Likewise, of `after`."""
    topk: torch.Tensor | int | None = None
    """Where wide outputs are: at these ids [M, K], or at so many of the likeliest; None: there are none."""
    images: PackedImages | None = None
    """None: neither these rows nor those of other ranks have any."""


def plan_passes(batch: Batch, family: Family, token_budget: int, full: bool = False) -> list[np.ndarray]:
    """Returns the rows of each pass: whole units of at most `token_budget` tokens, or single rows of a model
    that cannot be packed. Rows without response tokens need no pass.

    Raises DataError for a row with a response but no prompt (nothing predicts its first token), TrainError
    for a unit that cannot have a pass.
    """
    prompts = batch.lengths("prompt_ids").astype(np.int64)
    responses = batch.lengths("response_ids").astype(np.int64)
    orphans = np.flatnonzero((prompts == 0) & (responses > 0))
    if len(orphans):
        raise DataError(
            f"row {int(orphans[0])} has an empty prompt; give every prompt at least one token (e.g. BOS)"
        )
    lengths = np.where(responses > 0, prompts + responses - (not full), 0)
    units = batch.scalars(UNIT) if UNIT in batch.columns else None
    if units is not None:
        _check_units(units, lengths, family)
    if family.not_packable:
        return [np.array([row]) for row in np.flatnonzero(lengths)]
    passes = []
    for rows in _alike(lengths, family):
        for part in micro_batches(lengths[rows], token_budget, None if units is None else units[rows]):
            passes.append(rows[part[lengths[rows][part] > 0]])
    return [part for part in passes if len(part)]


def _alike(lengths: np.ndarray, family: Family) -> list[np.ndarray]:
    """Returns the rows that may share a pass: all, but of a model whose rotary embeddings change with the
    longest document of a pass, the short and the long ones.
    """
    if family.rope_changes_at is None:
        return [np.arange(len(lengths))]
    long = lengths > family.rope_changes_at
    return [np.flatnonzero(long), np.flatnonzero(~long)]


def _check_units(units: np.ndarray, lengths: np.ndarray, family: Family) -> None:
    for rows in rows_of_units(units):
        if len(rows) > 1 and family.not_packable:
            raise TrainError(
                f"unit {units[rows[0]]} has {len(rows)} rows, which need one pass, and a "
                f"{family.model_type} model takes one row at a time: {family.not_packable}"
            )
        if family.rope_changes_at is not None and len(set(lengths[rows] > family.rope_changes_at)) > 1:
            raise TrainError(
                f"unit {units[rows[0]]} has rows of {lengths[rows].min()} and {lengths[rows].max()} tokens, "
                f"which need one pass, and this {family.model_type} model has other rotary embeddings for "
                f"more than {family.rope_changes_at}: lower data.max_prompt_tokens or the length of responses"
            )
        if len(rows) > 1 and not lengths[rows].all():
            raise TrainError(
                f"unit {units[rows[0]]}: row {rows[lengths[rows] == 0][0]} has no response tokens; "
                "each row of a pair needs some"
            )


def dummy(layout: PackedLayout, full: bool = False, *, tower: bool = False) -> PackedRows:
    """Returns one document with a response of one token: what a rank without rows computes, so that all run
    the same passes. tower: other ranks have images.
    """
    token = np.zeros(1, np.int64)
    packed = pack(np.empty(0, np.int64), [token], [token], layout, full)
    return with_idle_tower(packed, layout) if tower else packed


def with_idle_tower(packed: PackedRows, layout: PackedLayout) -> PackedRows:
    """Returns a pass without images whose tower computes a blank one, of which nothing is read: where the
    tower is sharded, all ranks must gather it.
    """
    assert layout.images is not None
    family = layout.images.family
    blank = to_device(layout.images.blank(family.smallest), layout.device)
    grids = torch.tensor([family.smallest], device=layout.device)
    return replace(packed, images=PackedImages(family, blank, grids, ()))


def pack(
    rows: np.ndarray,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    layout: PackedLayout,
    full: bool = False,
    images: Sequence[Sequence[ImageRef]] | None = None,
) -> PackedRows:
    """Lays out `rows` (positions in the batch) with their prompts and responses, of at least one token each.

    Where attention can share prefixes, a prompt that several rows have is laid out (and computed) once, in
    front of their responses: the samples of a prompt group cost their responses only.

    Prompts and responses may have routes beside their tokens (`sequences_of`): [P, 1 + W], [R, 1 + W].
    images: those of each row; None: no row has any. Raises DataError where a row's image tokens are not those
    of its images, or an image cannot be read.
    """
    family, device, kernel = layout.family, layout.device, None
    response_lengths = np.array([len(response) for response in responses], np.int64)
    if not family.not_packable:
        longest = max(len(p) + len(r) - (not full) for p, r in zip(prompts, responses, strict=True))
        kernel = choose_kernel(layout.attention, device, layout.dtype, longest)
        if _sees_images_whole(images, layout):
            kernel = "sdpa"  # which alone takes other masks than causal ones
    keys = _keys(prompts, images) if kernel == "short" else list(range(len(prompts)))
    documents, continues, first, own = _arrange(keys, prompts, responses, full)
    if layout.divides > 1:  # each rank has as many
        missing = -sum(len(part) for document in documents for part in document) % layout.divides
        nothing = np.full_like(prompts[0][:1], -1)
        nothing[..., 0] = 0  # token 0, without routes
        documents += [[nothing]] * missing
        continues += [-1] * missing
    lengths = np.array([sum(len(part) for part in document) for document in documents], np.int64)
    # One more entry than documents: a shared prompt's response of one token, which is not read, has its place
    # in a document that need not come.
    starts = np.append(np.cumsum(lengths) - lengths, 0)
    cu_responses = np.concatenate([[0], np.cumsum(response_lengths)])
    rest = np.array([starts[document] + place for document, place in own])
    after = np.arange(cu_responses[-1]) + np.repeat(rest - cu_responses[:-1], response_lengths)
    positions = after - 1  # right but for each row's first token, whose prompt may lie elsewhere
    positions[cu_responses[:-1]] = [starts[document] + place for document, place in first]
    prefixes = np.array(continues, np.int64)
    # A continuation's positions go on where its prefix ends (-1 indexes the last document, and is not taken).
    first_position = np.where(prefixes >= 0, lengths[prefixes], 0)
    tokens = np.concatenate([part for document in documents for part in document]).astype(np.int64)
    targets, routes = np.concatenate(responses).astype(np.int64), None
    if tokens.ndim > 1:
        routes = to_device(tokens[:, 1:].copy(), device)
        tokens, targets = tokens[:, 0].copy(), targets[:, 0].copy()
    position_ids = np.arange(len(tokens)) - np.repeat(starts[:-1] - first_position, lengths)
    shown = together = None
    if images is not None:
        beside, shown = _with_images(keys, prompts, responses, full, images, layout)
        missing = position_ids.size - len(beside)  # what makes the ranks' parts equal, at the end
        nothing = np.tile(np.array([0, 0, 0, -1, -1], np.int64), (missing, 1))
        beside = np.concatenate([beside, nothing])
        if layout.images is not None and layout.images.family.turns:
            position_ids = np.concatenate([position_ids[None], beside[:, :3].T])
        if _sees_images_whole(images, layout):
            together = to_device(beside[:, 4].copy(), device)
    members = [(row, first[row][0]) for row in range(len(rows))]
    members += [
        (row, own[row][0])
        for row in range(len(rows))
        if own[row][0] != first[row][0] and (full or response_lengths[row] > 1)
    ]
    plan = None
    if kernel is not None:
        plan = plan_documents(
            lengths, kernel, device=device, prefixes=prefixes, context=layout.context, together=together
        )

    def places_of(of: np.ndarray) -> Places | None:
        return None if layout.context is None else layout.context.places(of, len(tokens), device)

    return PackedRows(
        rows=rows,
        input_ids=to_device(tokens, device),
        position_ids=to_device(position_ids, device),
        positions=to_device(positions, device),
        targets=to_device(targets, device),
        cu_seqlens=to_device(cu_responses.astype(np.int32), device),
        documents=plan,
        routes=routes,
        document_lengths=lengths,
        members=np.array(members, np.int64).reshape(-1, 2),
        after=to_device(after, device) if full else None,
        places=places_of(positions),
        places_after=places_of(after) if full else None,
        images=shown,
    )


def _keys(prompts: Sequence[np.ndarray], images: Sequence[Sequence[ImageRef]] | None) -> list[Hashable]:
    """Returns what is equal for rows that can share their prompt: its tokens, and the images in it."""
    if images is None:
        return [prompt.tobytes() for prompt in prompts]
    return [
        (prompt.tobytes(), *(image.sha256 for image in own))
        for prompt, own in zip(prompts, images, strict=True)
    ]


def _sees_images_whole(images: Sequence[Sequence[ImageRef]] | None, layout: PackedLayout) -> bool:
    return layout.images is not None and layout.images.family.sees_itself and any(images or ())


def _with_images(
    keys: Sequence[Hashable],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    full: bool,
    images: Sequence[Sequence[ImageRef]],
    layout: PackedLayout,
) -> tuple[np.ndarray, PackedImages | None]:
    """Returns what is beside the pass's tokens, int64 [N, 5], and its images. Beside a token: three numbers
    that the rotary embedding turns it by; which of the pass's images begins there; which of its row's it
    stands for (-1: none).
    """
    reader = layout.images
    if reader is None:
        raise DataError(f"rows have images, and {why_blind(layout.family)}")
    distinct: dict[tuple[str, Grid], ImageRef] = {}
    along = []
    for prompt, response, own in zip(prompts, responses, images, strict=True):
        ids = np.concatenate([prompt, response])
        ids = ids if ids.ndim == 1 else ids[:, 0]
        beside = np.full((len(ids), 5), -1, np.int64)
        grids = [image.grid for image in own]
        places = places_of_images(ids, [reader.pieces(grid) for grid in grids], reader.token)
        beside[:, :3] = reader.family.positions(ids, grids, reader.config).T
        for number, (at, image) in enumerate(zip(places, own, strict=True)):
            beside[at, 4] = number
            kind = image.sha256, image.grid
            distinct.setdefault(kind, image)
            if image.read_by and not reader.reads_as(image.read_by):
                raise DataError(
                    f"image {image.ref}: where the row was sampled its pixels were made otherwise than here "
                    f"(processor, settings, versions of transformers and Pillow: {image.read_by} there, "
                    f"{reader.fingerprint} here); install the same versions on all hosts"
                )
            beside[at[0], 3] = list(distinct).index(kind)
        along.append((beside[: len(prompt)], beside[len(prompt) :]))
    laid_out, *_ = _arrange(keys, [one for one, _ in along], [other for _, other in along], full)
    joined = np.concatenate([part for document in laid_out for part in document])
    order = tuple(joined[joined[:, 3] >= 0, 3].tolist())
    if not distinct:
        return joined, None
    pixels = np.concatenate([reader.pixels(image) for image in distinct.values()])
    grid_array = np.array([image.grid for image in distinct.values()], np.int64)
    both = to_device(pixels, layout.device), to_device(grid_array, layout.device)
    return joined, PackedImages(reader.family, *both, order)


def images_of(batch: Batch, layout: PackedLayout) -> list[tuple[ImageRef, ...]] | None:
    """Returns the images of each row; None of a batch without any. Raises DataError where the model is given
    none, and where it is and rows without images have tokens of some: it would see nothing in their place.
    """
    found = batch.images()
    if any(found):
        if layout.images is not None:
            return found
        row = next(row for row, own in enumerate(found) if own)
        raise DataError(
            f"row {row} has images, and {why_blind(layout.family)}; take one that reads them (docs/images.md)"
        )
    if layout.images is not None:
        token = layout.images.token
        for name in ("prompt_ids", "response_ids"):
            at = np.flatnonzero(batch.ragged(name)[0].numpy() == token)
            if len(at):
                row = int(np.searchsorted(np.cumsum(batch.lengths(name)), at[0], side="right"))
                raise DataError(
                    f"row {row} has tokens of images ({token}) in its {name}, and no images: the column "
                    f"{IMAGES!r} is empty or missing"
                )
    return None


def sequences_of(batch: Batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the prompts and the responses of all rows, as `pack` takes them: with routes where the batch
    has them, int64 [P, 1 + W] and [R, 1 + W], those of a token beside it (-1: not known).

    Raises DataError for routes that are not aligned with the tokens.
    """
    prompts, responses = batch.rows("prompt_ids"), batch.rows("response_ids")
    if ROUTED not in batch.columns:
        return prompts, responses
    at_responses = batch.aligned(ROUTED, "response_ids").rows(ROUTED)
    at_prompts = batch.rows(PROMPT_ROUTED)
    both = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        before, after = at_prompts[row], at_responses[row]
        if len(before) not in (0, len(prompt) - 1):
            raise DataError(
                f"row {row}: {PROMPT_ROUTED} is of {len(before)} tokens, the prompt has {len(prompt)}: it is "
                "to be of all but the last one, or of none"
            )
        sequence = np.full((len(prompt) + len(response), 1 + after.shape[1]), -1, np.int64)
        sequence[:, 0] = np.concatenate([prompt, response])
        for known, start in ((before, 0), (after, len(prompt) - 1)):
            unknown = known == np.iinfo(known.dtype).max
            sequence[start : start + len(known), 1:] = np.where(unknown, -1, known.astype(np.int64))
        both.append((sequence[: len(prompt)], sequence[len(prompt) :]))
    return [prompt for prompt, _ in both], [response for _, response in both]


DocumentPlace = tuple[int, int]  # a document and an index in it


def _arrange(
    keys: Sequence[Hashable], prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], full: bool
) -> tuple[list[list[np.ndarray]], list[int], list[DocumentPlace], list[DocumentPlace]]:
    """Returns the documents, each the arrays that it is joined from; which document each one continues, or -1
    where it is on its own; and of each row the places of its prompt's last token, which predicts the first of
    the response, and of that first token. keys: equal for rows that share their prompt.
    """
    counts = Counter(keys)
    documents: list[list[np.ndarray]] = []
    continues: list[int] = []
    last_of_prompt: list[DocumentPlace] = []
    first_of_response: list[DocumentPlace] = []
    prompt_at: dict[Hashable, int] = {}  # shared prompt -> its document
    for key, prompt, response in zip(keys, prompts, responses, strict=True):
        alone = counts[key] == 1
        if not alone and key not in prompt_at:
            prompt_at[key] = len(documents)
            documents.append([prompt])
            continues.append(-1)
        last_of_prompt.append((len(documents) if alone else prompt_at[key], len(prompt) - 1))
        first_of_response.append((len(documents), len(prompt) if alone else 0))
        read = response if full else response[:-1]
        if alone or len(read):
            documents.append([prompt, read] if alone else [read])
            continues.append(-1 if alone else prompt_at[key])
    return documents, continues, last_of_prompt, first_of_response


def expand_columns(
    batch: Batch, names: Sequence[str], packed: PackedRows, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns the columns of the micro-batch's rows as [M] on its device: see `response_columns`."""
    return response_columns(batch, names, packed.rows, dtype, packed.targets.device)


def response_columns(
    batch: Batch, names: Sequence[str], rows: np.ndarray, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns columns at the response tokens of `rows`, [M]: per-token ones as they are, per-row ones
    repeated.

    Floats and uint8 masks become `dtype`. Raises DataError naming a per-token column that is not aligned with
    the responses.
    """
    # Each pass looks at its own rows only: a batch may have as many passes as rows.
    lengths = batch.lengths("response_ids", rows)
    out = {}
    for name in names:
        if pa.types.is_list(batch.array(name).type):
            values = np.concatenate(batch.aligned(name, "response_ids", rows).rows(name, rows))
        else:
            values = np.repeat(batch.scalars(name)[rows], lengths)
        tensor = to_device(values, device)
        out[name] = tensor.to(dtype) if tensor.is_floating_point() or tensor.dtype == torch.uint8 else tensor
    return out


def in_row_order(batch: Batch, order: list[np.ndarray], parts: list[torch.Tensor]) -> object:
    """Returns micro-batch results as one list column in the batch's row order (rows without response tokens
    are empty).
    """
    lengths = batch.lengths("response_ids").astype(np.int64)
    rows = np.concatenate([*order, np.flatnonzero(lengths == 0)])
    flat = torch.cat(parts).cpu()
    offsets = np.concatenate([[0], np.cumsum(lengths[rows])])
    shuffled = Batch.of({"values": ragged_array(flat, offsets)})
    return shuffled.take(np.argsort(rows, kind="stable")).array("values")
