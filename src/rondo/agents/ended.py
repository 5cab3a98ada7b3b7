"""How the trajectories of a group ended, as a run's journal keeps it, and what a replay reads of that."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rondo.core.images import ImageRef
from rondo.core.types import Ended, Trajectory

GREEDY = "greedy"

Entry = Mapping[str, Any]
"""How one trajectory ended: see `entry_of`."""
Spans = Sequence[Sequence[int]]
"""See `spans_of`."""


def spans_of(versions: np.ndarray) -> list[list[int]]:
    """Returns [[version, number of tokens], …] of the tokens of a response, in order."""
    changes = np.flatnonzero(versions[1:] != versions[:-1]) + 1
    bounds = [0, *changes.tolist(), len(versions)] if len(versions) else [0]
    return [[int(versions[start]), stop - start] for start, stop in itertools.pairwise(bounds)]


def prompt_digest(token_ids: np.ndarray, images: Sequence[ImageRef]) -> str:
    """Names a call by its prompt; with those of one episode that it asked again, in their order."""
    digest = hashlib.blake2b(np.ascontiguousarray(token_ids, np.int32).tobytes(), digest_size=6)
    for image in images:
        digest.update(image.sha256.encode())
    return digest.hexdigest()


def entry_of(trajectory: Trajectory) -> dict[str, Any]:
    """Returns spans (`spans_of`, one row after the other), finish reason, outcome, reward (None: none), and
    a digest of the bits of prompts, responses and log-probs, and of images. Of an agent also
    [`prompt_digest`, spans] of each call, in the order in which they ended, and why the episode failed.
    """
    digest = hashlib.blake2b(digest_size=8)
    for row in trajectory.rows:
        for values, kind in (
            (row.prompt_ids, np.int32),
            (row.response_ids, np.int32),
            (row.rollout_log_probs, np.float32),
        ):
            digest.update(np.ascontiguousarray(values, kind).tobytes())
        for image in row.images:
            digest.update(image.sha256.encode())
    entry: dict[str, Any] = {
        "spans": spans_of(np.concatenate([row.policy_versions for row in trajectory.rows])),
        "finish": trajectory.finish_reason,
        "outcome": trajectory.outcome,
        "reward": None if math.isnan(trajectory.reward) else float(np.float32(trajectory.reward)),
        "digest": digest.hexdigest(),
    }
    if trajectory.calls:
        made = [call.completion for call in trajectory.calls]
        entry["calls"] = [
            [prompt_digest(one.prompt_ids, one.images), spans_of(one.policy_versions)] for one in made
        ]
        entry["failure"] = trajectory.failure
    return entry


def ended_of(trajectories: Sequence[Trajectory], greedy: Sequence[Trajectory] = ()) -> Ended:
    """Returns {"trajectories": an entry each, GREEDY: that of the greedy answer, if there is one}."""
    ended: dict[str, Any] = {"trajectories": [entry_of(trajectory) for trajectory in trajectories]}
    for answer in greedy:
        ended[GREEDY] = entry_of(answer)
    return ended


def entries_of(ended: Ended) -> list[Entry]:
    """Returns the entries of the samples, and that of the greedy answer after them."""
    return [*ended["trajectories"], *([ended[GREEDY]] if GREEDY in ended else [])]


def calls_of(entry: Entry) -> list[tuple[str | None, Spans]]:
    """Returns the name (`prompt_digest`) and spans of its calls; without an agent it is one, with any
    prompt.
    """
    return [(name, spans) for name, spans in entry.get("calls", [(None, entry["spans"])])]


def spans_in(entries: Sequence[Entry]) -> list[Spans]:
    """Returns the spans of all calls of all entries, one after the other."""
    return [spans for entry in entries for _, spans in calls_of(entry)]


def versions_of(entries: Sequence[Entry]) -> list[int]:
    """Returns the policy versions that made at least one token, ascending."""
    return sorted({version for spans in spans_in(entries) for version, _ in spans})


def length_at(spans: Spans, version: float) -> int:
    """Returns how many tokens were made under `version` and those before it."""
    return sum(count for made_by, count in spans if made_by <= version)
