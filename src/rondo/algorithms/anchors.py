"""Observations that are nearly the same: one anchor for texts that are alike, of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np


def alike(
    anchor_id: np.ndarray, texts: Sequence[str], group_id: np.ndarray, row_id: np.ndarray, similarity: float
) -> np.ndarray:
    """Returns the anchor of each row, int64 [B]: that of the first observation of its group whose text is as
    similar as that, or its own.

    As GiGPO's code has it: rows are taken one after the other (by row_id, so that a batch's order does not
    matter), and compared with the first of each cluster so far by `difflib.SequenceMatcher.ratio`.
    """
    out = anchor_id.copy()
    clusters: dict[int, list[tuple[int, str]]] = {}  # of each group: anchor and text of the first
    known: dict[tuple[int, int], int] = {}  # group and own anchor: that of its cluster
    matcher = SequenceMatcher()
    for row in np.argsort(row_id, kind="stable"):
        group, own, text = int(group_id[row]), int(anchor_id[row]), texts[row]
        if (group, own) not in known:
            firsts = clusters.setdefault(group, [])
            matcher.set_seq2(text)
            found = next((anchor for anchor, first in firsts if _is_similar(matcher, first, similarity)), own)
            if found == own:
                firsts.append((own, text))
            known[group, own] = found
        out[row] = known[group, own]
    return out


def _is_similar(matcher: SequenceMatcher[str], text: str, similarity: float) -> bool:
    """The first two bound the third from above, and cost little."""
    matcher.set_seq1(text)
    return all(
        ratio() >= similarity for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    )
