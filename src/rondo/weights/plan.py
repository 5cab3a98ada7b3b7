"""Transfer plans: who sends which box to whom, in rounds of bounded size. Pure and deterministic, so that
both sides work it out for themselves and no plan needs to travel. Lazy, too: a rank works out its own moves,
round by round, and never those of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from rondo.core.errors import WeightSyncError
from rondo.weights.layout import Box, Layout, Parameter, Spec


@dataclass(frozen=True)
class Move:
    """One box of one parameter from a rank to another."""

    name: str
    """The parameter's name."""
    box: Box
    """The part of it that is moved."""
    source: int
    """The rank that has it."""
    target: int
    """The rank that needs it; where it is the source, the box is copied within that rank."""
    num_bytes: int
    """The bytes of the box."""


@dataclass(frozen=True)
class Unit:
    """What is moved at one time: a parameter, or a part of one that is larger than a bucket."""

    parameter: Parameter
    """The parameter."""
    box: Box
    """The part of it that is moved."""
    turn: int
    """Its number, by which ranks that hold the same take turns in sending it."""


@dataclass(frozen=True)
class TransferPlan:
    """Which units are moved, and in which order.

    Of a unit there is at most one move from one rank to another, so that both have their moves in one order:
    messages have no names.
    """

    source: Layout
    """Which rank has what."""
    target: Layout
    """Which rank needs what."""
    rounds: tuple[tuple[Unit, ...], ...]
    """The units of each round; each rank finishes its moves of one before it begins the next."""

    def sends(self, rank: int) -> Iterator[list[Move]]:
        """Gives of each round what this rank sends to others, in order."""
        for units in self.rounds:
            yield [move for unit in units for move in self._sent(unit, rank) if move.target != rank]

    def receives(self, rank: int) -> Iterator[list[Move]]:
        """Gives of each round what this rank receives, in order; also what it has and copies."""
        for units in self.rounds:
            yield [move for unit in units for move in self._received(unit, rank)]

    def targets(self, rank: int) -> list[int]:
        """Returns to whom this rank sends anything."""
        return sorted({move.target for moves in self.sends(rank) for move in moves})

    def sources(self, rank: int) -> list[int]:
        """Returns from whom this rank receives anything."""
        return sorted({move.source for moves in self.receives(rank) for move in moves} - {rank})

    def moves(self) -> Iterator[Move]:
        """Gives the moves of all ranks, by round and target. There may be very many: for tests and pictures
        only.
        """
        for units in self.rounds:
            for unit in units:
                for rank in self.target.ranks:
                    yield from self._received(unit, rank)

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)

    @cached_property
    def bytes_moved(self) -> int:
        """Returns the bytes that pass between ranks: what every target rank is to hold and does not hold
        already, which is the least that any plan must move.
        """
        source, target = self.source.specs, self.target.specs
        return sum(
            _needed(source[one.name], target[one.name], one.shape) * one.item_bytes
            for one in self.target.parameters
        )

    @cached_property
    def peak_bytes(self) -> int:
        """Returns a bound of what is in transit at any rank in one round: sent (every box once, however many
        receive it) and received, with the tensors that are put together there.
        """
        both = bool(set(self.source.ranks) & set(self.target.ranks))
        peak = 0
        for units in self.rounds:
            sent = sum(self._largest(self.source, unit) for unit in units)
            if self.target.whole_tensors:  # a tensor of several units is there until the last of them
                received = sum({unit.parameter.name: unit.parameter.num_bytes for unit in units}.values())
            else:
                received = sum(self._largest(self.target, unit) for unit in units)
            peak = max(peak, sent + received if both else max(sent, received))
        return peak

    @staticmethod
    def _largest(layout: Layout, unit: Unit) -> int:
        parameter = unit.parameter
        return _largest_part(layout.specs[parameter.name], parameter.shape, unit.box) * parameter.item_bytes

    def _sent(self, unit: Unit, rank: int) -> Iterator[Move]:
        name, shape = unit.parameter.name, unit.parameter.shape
        source, target = self.source.specs[name], self.target.specs[name]
        mine = self.source.held(rank, name)
        if mine is not None:
            holders = source.holders(shape)[mine]
            for cell, receivers in _cells(target, shape, mine, unit.box):
                for receiver in receivers:
                    if _sender(holders, target, receiver, unit.turn) == rank:
                        yield self._move(unit, cell, rank, receiver)

    def _received(self, unit: Unit, rank: int) -> Iterator[Move]:
        name, shape = unit.parameter.name, unit.parameter.shape
        source, target = self.source.specs[name], self.target.specs[name]
        wanted = self.target.held(rank, name)
        if wanted is not None:
            for cell, holders in _cells(source, shape, wanted, unit.box):
                yield self._move(unit, cell, _sender(holders, target, rank, unit.turn), rank)

    @staticmethod
    def _move(unit: Unit, cell: Box, source: int, target: int) -> Move:
        return Move(unit.parameter.name, cell, source, target, cell.size * unit.parameter.item_bytes)


def plan_transfer(source: Layout, target: Layout, bucket_bytes: int) -> TransferPlan:
    """Plans from any layout to any other, in rounds in which no rank sends or receives more than
    `bucket_bytes`.

    Of several ranks that hold a box the target itself is taken, else they take turns. With
    target.whole_tensors a tensor larger than bucket_bytes still arrives in pieces, and peak_bytes counts it
    whole. Raises WeightSyncError for a parameter that only one side knows, or that has another shape or dtype
    there; ValueError for a bucket smaller than one element.
    """
    _match(source, target)
    rounds: list[list[Unit]] = []
    filled, turn = 0, 0
    for parameter in target.parameters:
        if bucket_bytes < parameter.item_bytes:
            raise ValueError(f"bucket_bytes={bucket_bytes} holds no element of {parameter.name!r}")
        boxes = Box.whole(parameter.shape).split(bucket_bytes // parameter.item_bytes)
        for box in boxes:
            unit = Unit(parameter, box, turn)
            turn += 1
            if target.whole_tensors:
                # Put together there; a large one over several rounds, with nothing beside it.
                size = parameter.num_bytes if len(boxes) == 1 else bucket_bytes
            else:
                size = max(TransferPlan._largest(source, unit), TransferPlan._largest(target, unit))
            if not rounds or filled + size > bucket_bytes:
                rounds.append([])
                filled = 0
            rounds[-1].append(unit)
            filled += size
    return TransferPlan(source, target, tuple(map(tuple, rounds)))


def _sender(holders: tuple[int, ...], target: Spec, receiver: int, turn: int) -> int:
    """Returns which of the ranks that hold a box sends it to a receiver."""
    if receiver in holders:
        return receiver
    # Units follow each other, and so do the receivers of one: each shift asks another of the holders.
    return holders[(turn + target.number(receiver)) % len(holders)]


@lru_cache(maxsize=1 << 14)
def _cells(
    spec: Spec, shape: tuple[int, ...], box: Box, part: Box
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """Returns what is both in a box and in a part of a tensor, as the other side cuts it, and who holds it
    there. Most tensors of a model have one of a few shapes, so that this is worked out a few times.
    """
    both = box.intersection(part)
    if both is None:
        return ()
    cells = ((held.intersection(both), ranks) for held, ranks in spec.holders(shape).items())
    return tuple((cell, ranks) for cell, ranks in cells if cell is not None)


@lru_cache(maxsize=1 << 14)
def _largest_part(spec: Spec, shape: tuple[int, ...], box: Box) -> int:
    """Returns the most elements of a box that one rank holds."""
    return max((part.size for part, _ in _cells(spec, shape, Box.whole(shape), box)), default=0)


@lru_cache(maxsize=1 << 12)
def _needed(source: Spec, target: Spec, shape: tuple[int, ...]) -> int:
    """Returns how many elements the target's ranks are to hold, and do not hold already, together."""
    total = 0
    for rank in target.ranks:
        wanted = target.box(shape, rank)
        there = source.box(shape, rank).intersection(wanted) if source.has(rank) else None
        total += wanted.size - (0 if there is None else there.size)
    return total


def _match(source: Layout, target: Layout) -> None:
    """Raises WeightSyncError for the first parameter that the two sides do not agree on."""
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
