"""Transfer plans: who sends which box to whom, in rounds of bounded size. Pure and deterministic, so that
both sides work it out for themselves and no plan needs to travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rondo.errors import WeightSyncError
from rondo.weights.layout import Box, Layout, Parameter


@dataclass(frozen=True)
class Move:
    """One box of one parameter from a rank to another. source == target: it is there already, and is copied
    within that rank.
    """

    name: str
    box: Box
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True)
class TransferPlan:
    """rounds: of moves; each rank finishes one before it begins the next.

    bytes_moved: between ranks. bytes_needed: the least that any plan must move: what every target rank is to
    hold and does not hold already. peers: pairs of ranks (from, to) that exchange anything. peak_bytes: per
    rank, the most that is in transit there in one round (sent: every box once, however many receive it;
    received), with the tensors that are put together there.
    """

    rounds: tuple[tuple[Move, ...], ...]
    bytes_moved: int
    bytes_needed: int
    peers: tuple[tuple[int, int], ...]
    peak_bytes: Mapping[int, int]

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)

    def moves(self) -> Iterator[Move]:
        """Gives all moves in order."""
        for moves in self.rounds:
            yield from moves


def plan_transfer(source: Layout, target: Layout, bucket_bytes: int) -> TransferPlan:
    """Plans from any layout to any other, in rounds in which no rank sends or receives more than
    `bucket_bytes`.

    Of several ranks that hold a box the target itself is taken, else the one that has sent least so far (the
    lowest of equals). With target.whole_tensors a tensor larger than bucket_bytes still arrives in pieces,
    and peak_bytes counts it whole. Raises WeightSyncError for a parameter that only one side knows, that has
    another shape or dtype there, or of which nobody holds a part; ValueError for a bucket smaller than one
    element.
    """
    known = _matched(source, target)
    planner = _Planner(source, target, bucket_bytes)
    for parameter in target.parameters:
        planner.add(known[parameter.name])
    return planner.plan()


class _Planner:
    def __init__(self, source: Layout, target: Layout, bucket_bytes: int) -> None:
        self._source = source
        self._target = target
        self._bucket_bytes = bucket_bytes
        self._sent: dict[int, int] = defaultdict(int)  # bytes so far, by rank
        self._rounds: list[list[Move]] = [[]]
        self._out: dict[int, dict[tuple[str, Box], int]] = defaultdict(dict)  # of the round, by rank
        self._in: dict[int, int] = defaultdict(int)
        self._needed = 0
        self._peak: dict[int, int] = dict.fromkeys((*source.ranks, *target.ranks), 0)
        self._open: dict[int, dict[str, int]] = defaultdict(dict)  # tensors put together in the round

    def add(self, parameter: Parameter) -> None:
        """Plans the moves of one parameter."""
        if self._bucket_bytes < parameter.item_bytes:
            raise ValueError(f"bucket_bytes={self._bucket_bytes} holds no element of {parameter.name!r}")
        held = {rank: self._source.held(rank, parameter.name) for rank in self._source.ranks}
        all_boxes = [box for boxes in held.values() for box in boxes]
        moves: list[Move] = []
        for rank in self._target.ranks:
            for wanted in self._target.held(rank, parameter.name):
                if not wanted.size:
                    continue
                touching = [box for box in all_boxes if box.intersection(wanted) is not None]
                for cell in wanted.cells(touching):
                    moves += self._moves_of(parameter, cell, rank, held)
        open_bytes = max((sum(tensors.values()) for tensors in self._open.values()), default=0)
        if open_bytes + parameter.num_bytes > self._bucket_bytes:
            self._close_round()  # where whole tensors are put together, no more than a bucket of them
        for move in moves:
            self._place(move, parameter)

    def _moves_of(
        self, parameter: Parameter, cell: Box, target: int, held: Mapping[int, tuple[Box, ...]]
    ) -> list[Move]:
        holders = [rank for rank, boxes in held.items() if any(box.contains(cell) for box in boxes)]
        if not holders:
            raise WeightSyncError(
                f"no rank of the trainer holds {parameter.name!r} at {cell.offset} + {cell.shape}, which "
                f"rank {target} is to receive: the source's layout has a hole"
            )
        if target not in holders:
            self._needed += cell.size * parameter.item_bytes
        moves = []
        for part in cell.split(self._bucket_bytes // parameter.item_bytes):
            num_bytes = part.size * parameter.item_bytes
            chosen = target if target in holders else min(holders, key=lambda rank: (self._sent[rank], rank))
            self._sent[chosen] += num_bytes if chosen != target else 0
            moves.append(Move(parameter.name, part, chosen, target, num_bytes))
        return moves

    def _place(self, move: Move, parameter: Parameter) -> None:
        """Adds a move to the current round, or, where a rank would have too much in transit, to a new one."""
        key = (move.name, move.box)
        sending = sum(self._out[move.source].values())
        sending += 0 if key in self._out[move.source] else move.num_bytes
        if max(sending, self._in[move.target] + move.num_bytes) > self._bucket_bytes:
            self._close_round()
        self._out[move.source][key] = move.num_bytes
        self._in[move.target] += move.num_bytes
        if self._target.whole_tensors:
            self._open[move.target][move.name] = parameter.num_bytes
        self._rounds[-1].append(move)

    def _close_round(self) -> None:
        if not self._rounds[-1]:
            return
        for rank in self._peak:
            received = sum(self._open[rank].values()) if self._target.whole_tensors else self._in[rank]
            self._peak[rank] = max(self._peak[rank], sum(self._out[rank].values()) + received)
        self._rounds.append([])
        self._out.clear()
        self._in.clear()
        self._open.clear()

    def plan(self) -> TransferPlan:
        """Returns the plan of all parameters that were added."""
        self._close_round()
        rounds = tuple(tuple(moves) for moves in self._rounds if moves)
        between = [move for moves in rounds for move in moves if move.source != move.target]
        return TransferPlan(
            rounds,
            bytes_moved=sum(move.num_bytes for move in between),
            bytes_needed=self._needed,
            peers=tuple(sorted({(move.source, move.target) for move in between})),
            peak_bytes=self._peak,
        )


def _matched(source: Layout, target: Layout) -> dict[str, Parameter]:
    """Returns the parameters by name. Raises WeightSyncError for the first one that the two sides do not
    agree on.
    """
    sent = {parameter.name: parameter for parameter in source.parameters}
    wanted = {parameter.name: parameter for parameter in target.parameters}
    for name in (*sent, *wanted):
        if name not in sent or name not in wanted:
            side = "the rollout engine does not take" if name in sent else "the trainer does not have"
            raise WeightSyncError(f"{side} the parameter {name!r}: the two sides have different models")
        if sent[name] != wanted[name]:
            raise WeightSyncError(
                f"{name!r} is {sent[name].shape} {sent[name].dtype} at the trainer, and "
                f"{wanted[name].shape} {wanted[name].dtype} at the rollout engine"
            )
    return sent
