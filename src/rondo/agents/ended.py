"""How a trajectory ended, as a run's journal keeps it: entries, their column on the way from a worker, and
what a replay reads of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rondo.types import Trajectory

GREEDY = "greedy"

Entry = Mapping[str, Any]


def spans_of(versions: np.ndarray) -> list[list[int]]:
    """[[version, number of tokens], …] of the tokens of a response, in order."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    counts = np.diff([*starts, len(versions)])
    return [[int(versions[at]), int(count)] for at, count in zip(starts, counts, strict=True)]


def entry_of(trajectory: Trajectory) -> dict[str, Any]:
    """spans (`spans_of`), finish reason, outcome, reward (None: none), and a digest of the bits of prompt,
    response and log-probs.
    """
    digest = hashlib.blake2b(digest_size=8)
    for values, kind in (
        (trajectory.prompt.token_ids, np.int32),
        (trajectory.response_ids, np.int32),
        (trajectory.rollout_log_probs, np.float32),
    ):
        digest.update(np.ascontiguousarray(values, kind).tobytes())
    return {
        "spans": spans_of(np.asarray(trajectory.policy_versions)),
        "finish": trajectory.finish_reason,
        "outcome": trajectory.outcome,
        "reward": None if math.isnan(trajectory.reward) else float(np.float32(trajectory.reward)),
        "digest": digest.hexdigest(),
    }


def ended_column(trajectories: Sequence[Trajectory], greedy: Sequence[Trajectory] = ()) -> list[str]:
    """The column ENDED: an entry per row; the first also has that of the greedy answer, if there is one."""
    entries = [entry_of(trajectory) for trajectory in trajectories]
    for answer in greedy:
        entries[0][GREEDY] = entry_of(answer)
    return [json.dumps(entry) for entry in entries]


def ended_of(column: Sequence[str]) -> dict[str, Any]:
    """The column as the part of a journal's line: trajectories, and greedy where there is one."""
    entries = [json.loads(text) for text in column]
    greedy = entries[0].pop(GREEDY, None)
    return {"trajectories": entries} | ({} if greedy is None else {GREEDY: greedy})


def entries_of(ended: Mapping[str, Any]) -> list[Entry]:
    """Of the samples, and of the greedy answer after them."""
    return [*ended["trajectories"], *([ended[GREEDY]] if GREEDY in ended else [])]


def versions_of(entries: Sequence[Entry]) -> list[int]:
    """Those that made a token of one of them, rising."""
    return sorted({version for entry in entries for version, _ in entry["spans"]})


def length_at(entry: Entry, version: int) -> int:
    """Tokens made under `version` and those before it."""
    return sum(count for made_by, count in entry["spans"] if made_by <= version)
