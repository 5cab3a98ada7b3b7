"""Who sits in which slot, whose the blocks of the cache are, and the numbers of every slot as arrays: pure
decisions over small records. No tensors, no clock.

Requests wait in arrival order, the urgent ones in front, and join when a slot and enough blocks are free. A
sequence's blocks hold the keys and values of all its tokens but the last, which the next decode step feeds;
where another block is needed and none is free, the youngest sequence gives its own back and goes to the head
of the line. What a block holds can be found by the tokens up to its end and the prompt's images: whole blocks
are shared, and the last one, which every sequence goes on to write, is copied.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rondo.rollout.images import ReadImages, digest_of
from rondo.rollout.native.blocks import BLOCK, BlockPool, blocks_of, content_keys
from rondo.rollout.requests import Pending


@dataclass(eq=False)
class Sequence(Pending):
    """A generate call here. While it has a slot, its newest tokens are in the slot table only."""

    number: int = field(init=False, default=-1)
    """Its place in the order of arrival: the highest is the youngest; -1 before it is added."""
    together: int = field(init=False)
    """So many of its first tokens get their keys and values in one prefill, those after them one by one."""
    blocks: list[int] = field(init=False, default_factory=list)
    """Its part of the cache, in order of position; none while it waits."""
    most_blocks: int = field(init=False)
    """How many they are when it gets as long as it may."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.together = self.num_tokens
        self.most_blocks = blocks_of(len(self.prompt_ids) + self.request.sampling.max_tokens - 1)

    def take(self, new: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        """Adds tokens, log-probs and versions that only the slot table had."""
        self.append(*(array.tolist() for array in new))


@dataclass(frozen=True)
class Prefill:
    """Compute the keys and values of `tokens` from position `start` on."""

    slot: int
    """The slot whose sequence it is."""
    tokens: np.ndarray
    """int64: all that the slot's blocks are to hold."""
    start: int
    """The first position that is computed; those before it lie in blocks already."""
    together: int
    """The first so many get the bits of one prefill, the others those of decode steps."""
    wave: int = 0
    """It reads blocks that prefills of lower waves fill."""
    shown: ReadImages | None = None
    """The images that some of the tokens stand for."""


@dataclass(frozen=True)
class Copy:
    """Copies the beginning of one cache block to another."""

    source: int
    """The number of the block that is read."""
    target: int
    """The number of the block that is written."""
    length: int
    """How many positions are copied."""


@dataclass
class Plan:
    """What to do before the next decode step."""

    prefills: list[Prefill] = field(default_factory=list)
    """The prompts to compute, first of all."""
    copies: list[Copy] = field(default_factory=list)
    """The blocks to copy, after the prefills, which may fill what is copied."""
    num_shared: int = 0
    """Positions of those who joined that are not computed."""


class Scheduler:
    """Decides which sequences have slots and blocks, and how their blocks get filled."""

    def __init__(self, num_slots: int, num_blocks: int, max_context: int, *, chunk: int | None) -> None:
        """chunk: the path's (`DecodePath.chunk`). Prompts share the blocks of whole chunks before the first
        difference, and the rest where they are prefilled with the same tokens; None: all before the first
        difference.
        """
        assert num_blocks >= blocks_of(max_context)  # else the oldest could wait forever
        self.slots: list[Sequence | None] = [None] * num_slots
        self.table = SlotTable(num_slots, max_context)
        self.pool = BlockPool(num_blocks)
        self.returning: deque[Sequence] = deque()  # lost their blocks; by number, and before those that wait
        self.urgent: deque[Sequence] = deque()  # before `waiting`
        self.waiting: deque[Sequence] = deque()
        self.changed = False  # somebody joined or left since the last plan
        self.num_preempted = 0
        self._chunk = chunk
        self._num_arrived = 0

    @property
    def running(self) -> list[tuple[int, Sequence]]:
        return [(slot, sequence) for slot, sequence in enumerate(self.slots) if sequence is not None]

    @property
    def in_line(self) -> list[Sequence]:
        """Returns those without a slot, in the order in which they get one."""
        return [*self.returning, *self.urgent, *self.waiting]

    def sequences(self) -> list[Sequence]:
        """Returns all that are here, with a slot or without."""
        return [*filter(None, self.slots), *self.in_line]

    # ---- who comes and who goes ----

    def add(self, sequence: Sequence) -> None:
        """Puts it behind those that wait; an urgent one only behind others of its kind."""
        self.changed = True
        sequence.number = self._num_arrived
        self._num_arrived += 1
        (self.urgent if sequence.request.urgent else self.waiting).append(sequence)

    def release(self, slot: int) -> Sequence:
        """Returns the slot's sequence, which leaves with all its tokens; what its blocks hold can be found
        until they are taken.
        """
        sequence = self.slots[slot]
        assert sequence is not None
        self.slots[slot] = None
        self.changed = True
        sequence.take(self.table.response(slot, sequence.num_response))
        tokens = sequence.tokens
        num_whole = (len(tokens) - 1) // BLOCK
        if num_whole:
            keys = self._keys(sequence, tokens, num_whole * BLOCK)
            for block, key in zip(sequence.blocks, keys, strict=False):
                self.pool.publish(block, key)
        for block in reversed(sequence.blocks):  # the end of a sequence is of use to fewer than its beginning
            self.pool.give_back(block)
        sequence.blocks.clear()
        return sequence

    def leave_line(self, sequence: Sequence) -> None:
        """Takes out a sequence that has no slot."""
        lines = (self.returning, self.urgent, self.waiting)
        next(line for line in lines if sequence in line).remove(sequence)
        self.changed = True

    def invalidate(self, *, new_weights: bool) -> None:
        """Drops what is cached, which is lost or belongs to other weights: nothing of it is shared, and all
        sequences that run are prefilled again. new_weights: all their tokens in one prefill, as if they came
        with the request.
        """
        for slot, _ in self.running:
            self._put_back(slot)
        self.pool.forget()
        if new_weights:
            for sequence in self.returning:
                sequence.together = sequence.num_tokens

    # ---- blocks and slots ----

    def grow(self, rows: np.ndarray) -> None:
        """Gives every slot of `rows` (those that run) a block for the position it writes next. While there is
        none, the youngest sequence goes back to the line.
        """
        ends = self.table.num_blocks[rows] * BLOCK
        needy = [self.slots[slot] for slot in rows[self.table.positions[rows] >= ends]]
        for sequence in sorted(filter(None, needy), key=lambda one: one.number):
            while not self.pool.num_free and sequence.blocks:
                _, slot = max((one.number, slot) for slot, one in self.running)
                self._put_back(slot)
                self.num_preempted += 1
            if sequence.blocks:  # it was not the youngest itself
                sequence.blocks.append(self.pool.take())
                self.table.set_blocks(self.slots.index(sequence), sequence.blocks)

    def plan(self) -> Plan:
        """Seats those that wait, in order and in the lowest free slots, while there are blocks for them and
        one more for each that grows. Says how their blocks get filled.
        """
        plan = Plan()
        self.changed = False
        filled: dict[int, int] = {}
        pinned: list[int] = []
        reserve = sum(len(one.blocks) < one.most_blocks for _, one in self.running)
        for slot in [i for i, sequence in enumerate(self.slots) if sequence is None]:
            line = self.returning or self.urgent or self.waiting
            if not line or not self._seat(slot, line[0], reserve, plan, filled, pinned):
                break
            one = line.popleft()
            reserve += len(one.blocks) < one.most_blocks
        for block in pinned:  # nobody takes a block before the next plan: what is copied is still there
            self.pool.give_back(block)
        return plan

    def _seat(
        self,
        slot: int,
        sequence: Sequence,
        reserve: int,
        plan: Plan,
        filled: dict[int, int],
        pinned: list[int],
    ) -> bool:
        """Gives the sequence the slot and its blocks, unless that leaves fewer than `reserve` free ones.

        filled: blocks that this plan's prefills fill, with their waves. pinned: blocks that are copied.
        """
        everything = sequence.tokens
        tokens = everything[:-1]  # the newest is fed by the next decode step
        num_whole, rest = divmod(len(tokens), BLOCK)
        keys = self._keys(sequence, everything, len(tokens))
        shared, source = self._find(keys, num_whole)
        for block in (*shared, *source):  # before any is taken: they may be free, and would be taken then
            self.pool.share(block)
        missing = num_whole + 1 - len(shared)
        if missing + reserve > self.pool.num_free and source:  # without it there is one more to take
            self.pool.give_back(source.pop())
        if missing + reserve > self.pool.num_free:
            for block in reversed(shared):  # the pool takes the earliest first: beginnings are found longest
                self.pool.give_back(block)
            return False
        blocks = shared + [self.pool.take() for _ in range(missing)]
        start = len(tokens) if source else len(shared) * BLOCK
        if source:
            pinned += source
            plan.copies.append(Copy(source[0], blocks[num_whole], rest))
        elif start < len(tokens):
            # Behind all waves that fill a block it reads; 0 where it reads none that this plan fills.
            wave = 1 + max((filled.get(block, -1) for block in shared), default=-1)
            filled.update(dict.fromkeys(blocks[len(shared) :], wave))
            plan.prefills.append(Prefill(slot, tokens, start, sequence.together - 1, wave, sequence.shown))
            for block, key in zip(blocks, keys, strict=False):
                self.pool.publish(block, key)
        plan.num_shared += start
        sequence.blocks = blocks
        self.slots[slot] = sequence
        self.table.seat(slot, sequence, int(everything[-1]))
        return True

    def _find(self, keys: list[bytes], num_whole: int) -> tuple[list[int], list[int]]:
        """Returns the blocks that hold the beginning of a sequence; and, where they hold all whole blocks of
        it, one whose beginning is the rest (or none).
        """
        blocks: list[int] = []
        for key in keys:
            block = self.pool.find(key)
            if block is None:
                return blocks, []
            if len(blocks) == num_whole:
                return blocks, [block]
            blocks.append(block)
        return blocks, []

    def _put_back(self, slot: int) -> None:
        insort(self.returning, self.release(slot), key=lambda one: one.number)

    def _keys(self, sequence: Sequence, tokens: np.ndarray, length: int) -> list[bytes]:
        """Returns a key for each block of the first `length` tokens: a digest of what its bits depend on.
        tokens: all of the sequence.
        """
        shown, chunk = sequence.shown, self._chunk
        if chunk is None:
            return content_keys(digest_of(shown), tokens[:length])
        together = sequence.together - 1
        keys = content_keys(_digest(digest_of(shown), tokens[:together]), tokens[:length])
        key, done = b"", 0
        for block in range(min(together // chunk * chunk, length) // BLOCK):
            # Of the whole chunk with the block's last position.
            end = -(-(block + 1) * BLOCK // chunk) * chunk
            if end > done:
                key = _digest(key + digest_of(shown, done, end), tokens[done:end])
                done = end
            keys[block] = _digest(key, np.array([block]))
        return keys


def _digest(root: bytes, numbers: np.ndarray) -> bytes:
    return hashlib.blake2b(root + numbers.tobytes(), digest_size=16).digest()


class SlotTable:
    """The numbers of every slot; all arrays are indexed by slot."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.tokens = np.zeros(num_slots, np.int64)
        """The one to feed next, at `positions`."""
        self.positions = np.zeros(num_slots, np.int64)
        self.blocks = np.zeros((num_slots, blocks_of(max_context)), np.int32)
        """The blocks of the cache in order of position; those from `num_blocks` on say nothing."""
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.deltas = np.zeros(num_slots, np.int64)
        """What the rotary embedding turns the next token by, less its position: not 0 behind images."""
        self.seeds = np.zeros(num_slots, np.int64)
        self.indices = np.zeros(num_slots, np.int64)
        """Response tokens so far."""
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.ids = np.zeros((num_slots, max_context), np.int32)
        """The response as it grows; so are `log_probs` and `versions`."""
        self.log_probs = np.zeros((num_slots, max_context), np.float32)
        self.versions = np.zeros((num_slots, max_context), np.int32)
        self.stops = np.full((num_slots, 1), -1, np.int64)
        """Stop tokens, -1 (no token has that id) where there are fewer than columns."""

    def seat(self, slot: int, sequence: Sequence, newest: int) -> None:
        """Fills the slot's row; the response goes on behind the tokens that there are, `newest` the last."""
        sampling = sequence.request.sampling
        done = self.indices[slot] = sequence.num_response
        self.tokens[slot] = newest
        self.positions[slot] = len(sequence.prompt_ids) + done - 1
        self.set_blocks(slot, sequence.blocks)
        self.deltas[slot] = 0 if sequence.shown is None else sequence.shown.delta
        # A seed of 2^63 or more becomes the int64 of the same bits.
        self.seeds[slot] = (sequence.request.seed + 2**63) % 2**64 - 2**63
        self.max_tokens[slot] = sampling.max_tokens
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        stops, missing = sampling.stop_token_ids, len(sampling.stop_token_ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        if done:
            response = sequence.completion("length")
            self.ids[slot, :done] = response.token_ids
            self.log_probs[slot, :done] = response.log_probs
            self.versions[slot, :done] = response.policy_versions

    def set_blocks(self, slot: int, blocks: list[int]) -> None:
        self.blocks[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray, version: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds one token in each slot of `rows`. Returns bool [R] twice: ended by a stop token, by length."""
        at = self.indices[rows]
        self.ids[rows, at] = tokens
        self.log_probs[rows, at] = log_probs
        self.versions[rows, at] = version
        self.indices[rows] = at + 1
        self.positions[rows] += 1
        self.tokens[rows] = tokens
        return (self.stops[rows] == tokens[:, None]).any(1), at + 1 >= self.max_tokens[rows]

    def response(self, slot: int, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns ids, log_probs and versions from response token `start` on."""
        new = slice(start, int(self.indices[slot]))
        return self.ids[slot, new], self.log_probs[slot, new], self.versions[slot, new]
