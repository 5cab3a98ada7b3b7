"""A replay: the buffer and the feeder of a run that follows another run's journal (`journal.py` says how, and
why it never waits forever).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rondo.agents.ended import Entry, calls_of, entries_of, length_at, spans_in, versions_of
from rondo.agents.replay import PIECE, PIECE_INDEX
from rondo.core.batch import BatchRef
from rondo.core.columns import IMAGES, ROUTES
from rondo.core.errors import TrainError
from rondo.core.types import Ended
from rondo.trainers.loop import Buffer, EngineSide, EpisodeFeeder
from rondo.trainers.replay.journal import FollowedJournal
from rondo.workers import RolloutWorker


class ReplayedBuffer(Buffer):
    """A buffer in which the lines of a journal decide instead of time, credits and selection."""

    def __init__(self, journal: FollowedJournal, **options: Any) -> None:
        super().__init__(journal=journal, **options)
        self._followed = journal

    def _resumed(self) -> None:
        """What is in flight goes on where it was: no line of the journal."""
        ledger = self.ledger
        ledger.open.update(self._followed.open_groups())
        ledger.reissue = [seq for seq in ledger.reissue if seq not in ledger.open]

    async def ticket(self) -> int:
        """Also does, when it is their turn, what happened to the other run only: an abort, a lost rank, a
        resume.
        """
        turn = self._followed.turn
        while True:
            await self.until(lambda: turn("give_back") or turn("resume") or self._may_start())
            line = self._followed.upcoming
            if line["kind"] == "admit":
                return self._admit(line["version"])
            if line["kind"] == "give_back":
                self.give_back(line["seqs"], aborted=line["aborted"])
            else:
                self._start_again(line["version"], line["reissue"])
                self.change("resume", version=line["version"], reissue=line["reissue"])

    def _may_start(self) -> bool:
        return self._followed.turn("admit") and int(self._followed.upcoming["version"]) <= self.version

    def _select(self) -> Sequence[int] | None:
        return self._followed.upcoming["seqs"] if self._followed.turn("take") else None

    def _start_again(self, version: int, reissue: Sequence[int]) -> None:
        """As `restore`, of the run that is followed: what was in flight starts again."""
        self.ledger.open.clear()
        self.ledger.reissue = list(reissue)
        for seq in reissue:
            self.ready.pop(seq, None)
        self._unused = version * self.batch_size - self.ledger.num_trained
        self.num_aborted = self.num_given_back = 0


class ReplayedFeeder(EpisodeFeeder):
    """A feeder that makes each group in pieces, one per policy version that the journal has of it."""

    def __init__(
        self, journal: FollowedJournal, buffer: ReplayedBuffer, side: ReplayedSide, **options: Any
    ) -> None:
        super().__init__(buffer, side, **options)
        self._journal = journal
        self._side = side
        self._make = self._in_pieces
        # Of groups in flight: their responses so far, and the version of the next piece (inf: none is left).
        self._partials: dict[int, BatchRef] = {}
        self._next: dict[int, float] = {}

    async def run(self) -> None:
        for seq in list(self._buffer.ledger.open):  # in flight in the checkpoint that this run goes on from
            self._start(seq)
        await super().run()

    def partial(self) -> dict[int, BatchRef]:
        """Returns the responses so far of groups in flight."""
        return dict(self._partials)

    def restore_partial(self, partial: Mapping[int, BatchRef]) -> None:
        self._partials = dict(partial)

    def _start(self, seq: int) -> None:
        if self._journal.fate(seq) is not None:  # else it was given back in the journal: it is not made
            super()._start(seq)

    def _lost(self, seq: int) -> None:
        self._start(seq)  # no line of the journal: as if it had not happened

    def _put(self, seq: int, version: int, ref: BatchRef, ended: Ended) -> None:
        super()._put(seq, version, ref, ended)
        self._partials.pop(seq, None)
        self._next.pop(seq, None)

    async def hold(self, unless_stranded: Callable[[Awaitable[object]], Awaitable[str]]) -> None:
        """Waits until the publish has its turn, and every token of the version that is served is made. Raises
        TrainError when an engine was started again meanwhile: its weights are gone.
        """
        turn = self._buffer.until(lambda: self._journal.turn("publish") and not self._missing())
        if news := await unless_stranded(turn):
            raise TrainError(
                f"{news}; a replay needs tokens of the weights that it had, and the trainer is beyond them. "
                "Start the same command again: it goes on from the newest checkpoint"
            )
        self._buffer.in_flight = self._journal.upcoming["in_flight"]
        await self._episodes.pause()

    def _missing(self) -> bool:
        return any(self._next_piece(seq) <= self._buffer.version for seq in self._buffer.ledger.open)

    def _next_piece(self, seq: int) -> float:
        """Returns the version of the next piece: -1 for a group without a token; inf where all pieces are
        made, or none is to be.
        """
        fate = self._journal.fate(seq)
        if fate is None:  # this time; it may be admitted again
            return math.inf
        if seq not in self._next:
            self._next[seq] = self._first_missing(seq, entries_of(fate))
        return self._next[seq]

    def _first_missing(self, seq: int, entries: Sequence[Entry]) -> float:
        if seq not in self._partials:
            return min(versions_of(entries), default=-1)
        lengths = self._partials[seq].index.scalars("response_length").tolist()
        for version in versions_of(entries):
            wanted = [length_at(spans, version) for spans in spans_in(entries)]
            if any(want > have for want, have in zip(wanted, lengths, strict=True)):
                return version
        return math.inf

    async def _in_pieces(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        """Returns the rows of a group when it is their turn. Raises TrainError where it ends otherwise than
        in the journal.
        """
        buffer, turn, fate = self._buffer, self._journal.turn, self._journal.fate(seq)
        assert fate is not None
        entries = entries_of(fate)
        while (version := self._next_piece(seq)) < math.inf:
            await buffer.until(lambda: buffer.version >= version)
            if buffer.version > version >= 0:
                raise self._journal.left(
                    f"group {seq} has tokens of version {int(version)}, whose weights are gone: the "
                    "checkpoint from which this run goes on does not hold what was in flight there"
                )
            made = await self._side.continue_group(rank, seq, entries, int(version), self._partials.get(seq))
            self._check_lengths(seq, int(version), entries, made)
            self._partials[seq] = made
            self._next[seq] = self._first_missing(seq, entries)
            buffer.change()
        ref, ended = await self._side.finish_group(rank, seq, self._partials[seq], entries)
        self._check_entries(seq, entries, entries_of(ended))
        await buffer.until(lambda: turn("put", seq=seq) or turn("drop", seq=seq))
        return ref, ended

    def _check_lengths(self, seq: int, version: int, entries: Sequence[Entry], made: BatchRef) -> None:
        lengths = iter(made.index.scalars("response_length").tolist())
        for sample, entry in enumerate(entries):
            for call, (_, spans) in enumerate(calls_of(entry)):
                length, want = next(lengths), length_at(spans, version)
                if length != want:
                    which = f"that of call {call}" if "calls" in entry else "its answer"
                    raise self._journal.left(
                        f"group {seq}, trajectory {sample}: {which} ends after {length} tokens, and there it "
                        f"has {want} by version {version}"
                    )

    def _check_entries(self, seq: int, there: Sequence[Entry], here: Sequence[Entry]) -> None:
        names = {"digest": "the bits of its prompt, tokens or log-probs"}
        for sample, (old, new) in enumerate(zip(there, here, strict=True)):
            for key in ("spans", "finish", "digest", "outcome", "reward"):
                if old[key] != new[key]:
                    raise self._journal.left(
                        f"group {seq}, trajectory {sample}: {names.get(key, key)}: {old[key]} there, "
                        f"{new[key]} here"
                    )


class ReplayedSide(EngineSide):
    """The engines of a run that follows `journal`."""

    def __init__(self, journal: FollowedJournal, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._journal = journal

    def buffer(self, **options: Any) -> Buffer:
        self._buffer = ReplayedBuffer(**self._options(options) | {"journal": self._journal})
        return self._buffer

    def feeder(self, buffer: Buffer, **options: Any) -> EpisodeFeeder:
        assert isinstance(buffer, ReplayedBuffer)
        return ReplayedFeeder(self._journal, buffer, self, on_update=self.on_update, **options)

    def _piece(self, made: BatchRef | None) -> tuple[str, ...]:
        """Names the columns of responses under way, `made`."""
        shown = (IMAGES,) if made is not None and IMAGES in made.columns else ()
        return PIECE + (ROUTES if self._config.actor.router.replay == "sampler" else ()) + shown

    async def continue_group(
        self, rank: int, seq: int, entries: Sequence[Entry], version: int, before: BatchRef | None
    ) -> BatchRef:
        """Makes the tokens of `version` of the calls of a prompt group, the greedy answer's last. before:
        what an earlier call returned, to go on from.
        """
        return await self._rollout.call_rank(
            rank,
            RolloutWorker.continue_group,
            before,
            self._prompts.train.prompt(seq),
            self.sampling(seq),
            entries,
            version,
            greedy_baseline=self._greedy_baseline,
            keep=PIECE_INDEX,
            reads=self._piece(before),
        )

    async def finish_group(
        self, rank: int, seq: int, made: BatchRef, entries: Sequence[Entry]
    ) -> tuple[BatchRef, Ended]:
        """Returns what `run_group` does, of responses that are there, as they ended in the journal."""
        return await self._rollout.call_rank(
            rank,
            RolloutWorker.finish_group,
            made,
            self._prompts.train.prompt(seq),
            self.sampling(seq),
            entries,
            self._config.rollout.deadline_seconds,
            greedy_baseline=self._greedy_baseline,
            keep=self.index_columns,
            reads=self._piece(made),
        )
