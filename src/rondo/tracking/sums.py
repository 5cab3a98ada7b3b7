"""What each step of a run was made of, as a 64-bit sum for each column and each weight: sums.jsonl, a line
per step; and where two runs begin to differ.

{"step": 1, "names": ["prompt_ids", …, "actor:lm_head.weight"], "sums": "…"}     sums: base64, 8 bytes each

A line without names has those of the line before. A column's sum is `Batch.sums` of the rows that the step
trained on; a weight's is its checksum (`rondo.weights.checksum`) after the step, behind the role's name.
"""

from __future__ import annotations

import base64
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rondo.core.columns import SCORE_PREFIX, TABLE
from rondo.core.errors import DataError
from rondo.tracking.metrics import parse_metrics
from rondo.tracking.run_folder import SUMS

# What a step makes of what: columns of a later line follow from those of the lines above.
_STAGES = (
    ("row_id", "seq", "group_id", "prompt_id", "source", "trajectory_id", "sample_index", "step_index"),
    ("prompt_ids", "prompt_length", "images"),
    ("response_ids", "response_length", "policy_versions", "oldest_version", "finish_reason", "outcome"),
    ("turn_stops", "turn_kinds", "turn_flags", "anchor_id"),
    ("rollout_log_probs",),
    ("turn_rewards", SCORE_PREFIX, "greedy_reward", "reward", "accuracy", "step_reward", "branch_values"),
    ("selected", "sample_weight", "mini_batch"),
    ("old_log_probs", "sum_p_squared", "entropy"),
    ("ref_log_probs",),
    # Here: what other models make.
    ("token_rewards", "token_costs"),
    ("advantages", "returns", "cost_returns"),
    ("rollout_weights", "response_mask", "num_trained_tokens"),  # a correction may reject tokens
    # Here: all else, such as the weights of tokens in the loss, and columns of the user's.
)
_OF_MODELS = _STAGES.index(("token_rewards", "token_costs")) - 0.5
_RANKS = {name: float(rank) for rank, names in enumerate(_STAGES) for name in names}
_RANKS |= {
    one.name: _OF_MODELS for one in TABLE if one.made_by in ("critic", "cost_critic", "prm", "teacher")
}


def weight_name(role: str, tensor: str) -> str:
    """Returns the name of a weight's sum. role: of the worker group that has it."""
    return f"{role}:{tensor}"


class SumsWriter:
    """Makes the lines of one process, of which the first names everything."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def line(self, step: int, sums: Mapping[str, int]) -> str:
        """Returns a step's line. sums: each in [0, 2^64)."""
        names, record = list(sums), {"step": step}
        named = {} if names == self._names else {"names": names}
        self._names = names
        packed = base64.b64encode(np.array(list(sums.values()), "<u8").tobytes()).decode()
        return json.dumps({**record, **named, "sums": packed})


def each_sums(run_dir: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, int]]]:
    """Yields each step's number and sums, in order. A last line cut off by a kill is left out. Raises
    DataError naming the file when it is missing, or broken.
    """
    path, names = Path(run_dir) / SUMS, list[str]()
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; {run_dir} is not the folder of a run of `rondo train` or of a program "
            "that has made a step, or an older rondo made it"
        )
    broken = False
    for number, (_, record) in enumerate(parse_metrics(path)):
        if broken:
            raise DataError(f"{path}:{number}: not a line of sums; copy the file again")
        if record is None:
            broken = True
            continue
        names = record.get("names", names)
        values = np.frombuffer(base64.b64decode(record["sums"]), "<u8").tolist()
        yield record["step"], dict(zip(names, values, strict=True))


def last_sums(run_dir: str | os.PathLike[str]) -> dict[str, int]:
    """Returns the sums of a run's last step; empty: it has none yet. Raises DataError for a broken file."""
    if not (Path(run_dir) / SUMS).is_file():
        return {}
    return next(iter(deque(each_sums(run_dir), maxlen=1)), (0, {}))[1]


@dataclass(frozen=True)
class Compared:
    """Two runs, step by step up to the first that differs."""

    first: int
    """The first step that both have."""
    last: int
    """The last step that was compared: the one that differs, or the last that both have."""
    differ: tuple[str, ...]
    """The columns and weights that differ in it, the cause before what follows from it; none: they are
    equal, bit for bit."""
    only_one: tuple[str, ...]
    """Columns and weights of the last step compared that only one of them has, which nothing is said of."""

    def line(self) -> str:
        """Says it in a sentence."""
        if not self.differ:
            said = f"equal, bit for bit, in steps {self.first} to {self.last}: all columns and weights"
        else:
            before = f"equal in steps {self.first} to {self.last - 1}; " if self.last > self.first else ""
            said = f"{before}in step {self.last} the first difference is {_told(self.differ[0])}"
            rest = [_told(name) for name in self.differ[1:4]]
            more = len(self.differ) - 1 - len(rest)
            said += f"; then {', '.join(rest)}" if rest else ""
            said += f" and {more} more" if more else ""
        return f"{said} (only one has {', '.join(self.only_one[:4])})" if self.only_one else said


def compared(run_dir: str | os.PathLike[str], other: str | os.PathLike[str]) -> Compared:
    """Finds the first step in which two runs differ, and what differs in it. Raises DataError where they have
    no step in common.
    """
    theirs, first, last = each_sums(other), None, 0
    step, sums = next(theirs, (0, dict[str, int]()))
    only_one: tuple[str, ...] = ()
    for number, own in each_sums(run_dir):
        while step and step < number:
            step, sums = next(theirs, (0, {}))
        if step != number:
            continue
        first, last = number if first is None else first, number
        differ = [name for name in own if name in sums and sums[name] != own[name]]
        only_one = tuple(sorted(own.keys() ^ sums.keys(), key=_rank))
        if differ:
            return Compared(first, number, tuple(sorted(differ, key=_rank)), only_one)
    if first is None:
        raise DataError(f"{run_dir} and {other} have no step in common in {SUMS}")
    return Compared(first, last, (), only_one)


def _rank(name: str) -> tuple[float, bool, int]:
    """Says how late in a step something is made: columns, weights of what learns beside the actor, the
    actor's. Within a stage the order is that of `_STAGES`; weights keep theirs.
    """
    role, is_weight, _ = name.partition(":")
    if is_weight:
        return len(_STAGES) + 1.0, role == "actor", 0
    known = SCORE_PREFIX if name.startswith(SCORE_PREFIX) else name
    rank = _RANKS.get(known, float(len(_STAGES)))
    return rank, False, _STAGES[int(rank)].index(known) if known in _RANKS and rank.is_integer() else 0


def _told(name: str) -> str:
    role, is_weight, tensor = name.partition(":")
    return f"the weight {tensor} of {role} (after the step)" if is_weight else f"column {name}"
