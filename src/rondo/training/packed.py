"""Rows of a batch laid out one after another, and where the responses are predicted from.

Alignment: the model's output at position j predicts token j+1. A document is the prompt and the response
*without its last token* (nothing is predicted from that one), P + R - 1 tokens; response token t is predicted
at P - 1 + t of it. Where something is wanted *after* every response token (a score: at P + t), documents are
`full`: P + R tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from rondo.batch import Batch
from rondo.errors import DataError
from rondo.models.attention import Documents, Heads, plan_documents, shares_prefixes
from rondo.models.family import Family
from rondo.models.source import Attention


@dataclass(frozen=True)
class PackedLayout:
    """What a model needs in order to lay out documents."""

    family: Family
    heads: Heads
    device: torch.device
    dtype: torch.dtype
    attention: Attention


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch on the device. N tokens in B documents, M response tokens.

    rows: positions in the batch. input_ids, position_ids: int64 [N]. positions: int64 [M], the position whose
    output predicts each response token. targets: int64 [M], the response tokens. cu_seqlens: int32 [B+1] of
    the responses. after: int64 [M], the positions of the response tokens themselves; full documents only.
    """

    rows: np.ndarray
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    documents: Documents | None
    after: torch.Tensor | None = None


def document_lengths(batch: Batch, full: bool = False) -> np.ndarray:
    """Tokens per document, P + R - 1 (full: P + R): int64 [B]; 0 for a row without response tokens, which
    needs no pass.

    Raises DataError for a row with a response but no prompt: nothing predicts its first token.
    """
    prompts, responses = (
        batch.lengths("prompt_ids").astype(np.int64),
        batch.lengths("response_ids").astype(np.int64),
    )
    orphans = np.flatnonzero((prompts == 0) & (responses > 0))
    if len(orphans):
        raise DataError(
            f"row {int(orphans[0])} has an empty prompt; give every prompt at least one token (e.g. BOS)"
        )
    return np.where(responses > 0, prompts + responses - (not full), 0)


def pack(batch: Batch, rows: np.ndarray, layout: PackedLayout, full: bool = False) -> PackedRows:
    """Lay out `rows` (positions in the batch, each with at least one response token).

    Where attention can share prefixes, a prompt that several rows have is laid out (and computed) once, in
    front of their responses: the samples of a prompt group cost their responses only.
    """
    prompts, responses = batch.rows("prompt_ids"), batch.rows("response_ids")
    rows_prompts, rows_responses = [prompts[row] for row in rows], [responses[row] for row in rows]
    return _lay_out(rows, rows_prompts, rows_responses, layout, full)


def dummy(layout: PackedLayout, full: bool = False) -> PackedRows:
    """One document with a response of one token: what a rank without rows computes, so that all run the same
    passes."""
    token = np.zeros(1, np.int64)
    return _lay_out(np.empty(0, np.int64), [token], [token], layout, full)


def _lay_out(
    rows: np.ndarray, prompts: list[np.ndarray], responses: list[np.ndarray], layout: PackedLayout, full: bool
) -> PackedRows:
    prompt_lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    response_lengths = np.array([len(response) for response in responses], np.int64)
    longest = int((prompt_lengths + response_lengths - (not full)).max())
    packable = layout.family.packable
    share = packable and shares_prefixes(layout.attention, layout.device, layout.dtype, longest)
    keys = [prompt.tobytes() if share else i for i, prompt in enumerate(prompts)]
    counts = Counter(keys)
    documents: list[list[np.ndarray]] = []  # each the arrays that it is joined from
    continues: list[int] = []
    prompt_at: dict[bytes | int, int] = {}  # shared prompt -> its document
    last_prompt_token, own = (
        [],
        [],
    )  # per row: (document, place in it) of what predicts the first token; the others'
    for key, prompt, response in zip(keys, prompts, responses, strict=True):
        alone = counts[key] == 1
        if not alone and key not in prompt_at:
            prompt_at[key] = len(documents)
            documents.append([prompt])
            continues.append(-1)
        last_prompt_token.append((len(documents) if alone else prompt_at[key], len(prompt) - 1))
        own.append((len(documents), len(prompt) if alone else 0))
        read = response if full else response[:-1]
        if alone or len(read):
            documents.append([prompt, read] if alone else [read])
            continues.append(-1 if alone else prompt_at[key])
    lengths = np.array([sum(len(part) for part in document) for document in documents], np.int64)
    starts = np.append(np.cumsum(lengths) - lengths, 0)
    cu_responses = np.concatenate([[0], np.cumsum(response_lengths)])
    first = np.array([starts[document] + place for document, place in last_prompt_token])
    rest = np.array([starts[document] + place for document, place in own])
    after = np.arange(cu_responses[-1]) + np.repeat(rest - cu_responses[:-1], response_lengths)
    positions = after - 1
    positions[cu_responses[:-1]] = first
    prefixes = np.array(continues, np.int64)
    tokens = np.concatenate([part for document in documents for part in document])
    return PackedRows(
        rows=rows,
        input_ids=_on(tokens.astype(np.int64), layout),
        position_ids=layout.family.positions(lengths, np.where(prefixes >= 0, lengths[prefixes], 0)).to(
            layout.device
        ),
        positions=_on(positions, layout),
        targets=_on(np.concatenate(responses).astype(np.int64), layout),
        cu_seqlens=_on(cu_responses.astype(np.int32), layout),
        documents=_plan(lengths, prefixes, layout) if packable else None,
        after=_on(after, layout) if full else None,
    )


def _plan(lengths: np.ndarray, prefixes: np.ndarray, layout: PackedLayout) -> Documents:
    return plan_documents(
        lengths,
        prefixes=prefixes,
        heads=layout.heads,
        device=layout.device,
        dtype=layout.dtype,
        attention=layout.attention,
    )


def _on(array: np.ndarray, layout: PackedLayout) -> torch.Tensor:
    return torch.from_numpy(array).to(layout.device)


def expand_columns(
    batch: Batch, names: Sequence[str], packed: PackedRows, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The columns of the micro-batch's rows as [M] on its device: per-token as they are, per-row ones
    repeated.

    Floats and uint8 masks become `dtype`. Raises DataError naming a per-token column that is not aligned with
    the responses.
    """
    lengths = batch.lengths("response_ids")[packed.rows]
    out = {}
    for name in names:
        if pa.types.is_list(batch.array(name).type):
            every = batch.aligned(name, "response_ids").rows(name)
            values = np.concatenate([every[row] for row in packed.rows])
        else:
            values = np.repeat(batch.scalars(name)[packed.rows], lengths)
        tensor = torch.from_numpy(values).to(packed.targets.device)
        out[name] = tensor.to(dtype) if tensor.is_floating_point() or tensor.dtype == torch.uint8 else tensor
    return out
