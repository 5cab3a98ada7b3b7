"""The journal of a run (`loop/journal.py` writes it), read and followed by another run: a replay.

    recording   buffer ──admit, put, drop, give back, take, publish, resume──▶ journal.jsonl, as they happen
    replaying   journal.jsonl of another run ──whose turn is it?──▶ buffer;  feeder ◀──pieces──▶ episodes

Every line is one change of the buffer's ledger, and all of them together are what is trained when, and what
`buffer/…` says of it. Lines of groups that ended say how each trajectory did (`agents/ended.py`: tokens per
policy version, timeouts), which is all that time decides about its bits. A replay does the same changes in
the same order: what is ready waits for its turn. A trajectory is made in pieces, one per version; `hold`
lets no version pass before every group has its tokens of it. Nothing is aborted: a group that was given back
in the journal is not even started before.

Why a replay never waits forever: look at the first line that is not done yet. All before it are, so
- admit: the feeder waits for nothing else. The trainer serves the version, since the publish line is before.
- put, drop: the group was admitted. Its tokens are of versions that were served when the line was written,
  whose publish lines are before it: the trainer loads them (after a publish line it waits for no line until
  it takes) and `hold` keeps each until the group has its piece. Scoring needs no engine.
- give_back, resume: `ReplayedBuffer.ticket`, in which the feeder is, waits for nothing else.
- take: its groups were put. The trainer comes here from the publish before, without another line.
- publish: the trainer comes here from its take; it waits in `hold` for the line's turn, which it has, and for
  the pieces of the version served: those of groups that were admitted, which engines make that nobody holds.
Where the trainer and the journal do not fit (a take where a publish is next, or no line is left), and where
a line, a length or a digest differs from what happens here, the error says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rondo.agents.ended import entries_of, length_at, spans_in
from rondo.config import Config, changes, leaves_of
from rondo.core.errors import CheckpointError, ConfigError, TrainError
from rondo.system.storage import storing
from rondo.tracking import RunFolder
from rondo.trainers.loop import JOURNAL_FILE, JOURNAL_FORMAT, RunJournal

KINDS = frozenset({"journal", "admit", "put", "drop", "give_back", "take", "publish", "resume"})
OF_THE_TRAINER = ("take", "publish")
ENDINGS = ("put", "drop")

# What a replay may have otherwise than the run that it follows: where and how fast things run, clocks that
# the journal replaces, what is measured and written beside the training. Everything else decides numbers.
FREE = (
    "cluster",
    "tracking",
    "checkpoint",
    "data.eval",
    "trainer.run_dir",
    "trainer.replay",
    "trainer.evaluation",
    "reward.timeout_seconds",
    "rollout.max_concurrent",
    "rollout.deadline_seconds",
    "rollout.engine.cache_bytes",
    "rollout.engine.process",
    "rollout.replicas",
    "rollout.sleep",
    "rollout.weight_transport",
    "rollout.bucket_bytes",
)


def settings_of(config: Config) -> dict[str, Any]:
    """Returns what a replay must share."""
    return leaves_of(config, free=FREE)


class JournalFile:
    """The journal of another run, read to be followed: line by line, since it grows with that run."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming the first line that is none of a journal. A last line that a kill cut off
        is left out.
        """
        self.path = path
        self.num_lines = 0
        self.settings: list[tuple[int, dict[str, Any]]] = []
        """(line, settings) of each start of the run."""
        self.num_steps = 0
        in_flight: dict[int, _Admission] = {}
        ready: set[int] = set()
        with self.open() as file:
            for at, text in enumerate(file):
                if not text.endswith(b"\n"):
                    break
                try:
                    self._check(at, json.loads(text.decode()), in_flight, ready)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ConfigError(
                        f"trainer.replay: {path}:{at + 1} is no line of a journal ({error!r}); the file was "
                        "changed or damaged, and cannot be followed"
                    ) from error
                self.num_lines += 1

    def _check(
        self, at: int, line: Mapping[str, Any], in_flight: dict[int, _Admission], ready: set[int]
    ) -> None:
        """Takes in one line. ready: the groups that are complete."""
        kind = line["kind"]
        if kind not in KINDS or (kind == "journal") != (at == 0):
            raise ValueError(f"kind {kind!r}")
        if kind == "journal" and line["format"] != JOURNAL_FORMAT:
            raise ValueError(f"format {line['format']}, this version of rondo reads {JOURNAL_FORMAT}")
        if kind in ("journal", "resume"):
            self.settings.append((at + 1, dict(line["settings"])))
        _pass(at, line, in_flight)
        if kind == "put" and line["reason"] is None:
            ready.add(line["seq"])
        if kind == "take":
            for seq in line["seqs"]:
                ready.remove(seq)
        if kind == "resume":
            ready.difference_update(line["reissue"])
        if kind in ENDINGS:
            for spans in spans_in(entries_of(line)):
                length_at(spans, 0)
        if kind == "publish":
            self.num_steps = int(line["version"])

    @classmethod
    def read(cls, run: str) -> JournalFile:
        """Reads the journal of a run folder, or a file. Raises ConfigError."""
        path = Path(run)
        path = path / JOURNAL_FILE if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"trainer.replay={run}: there is no {path}; name the folder of a run of `rondo train` that "
                f"has a {JOURNAL_FILE}"
            )
        found = cls(path)
        if not found.num_lines:
            raise ConfigError(f"trainer.replay={run}: {path} has no whole line")
        return found

    def open(self, start: int = 0) -> BinaryIO:
        """Opens the file where a line begins, at this byte."""
        with storing(self.path, "read"):
            file = open(self.path, "rb")
            file.seek(start)
            return file

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError that lists every key with another value."""
        for number, old in self.settings:
            rows = "\n".join(f"  {row}" for row in changes(old, settings, "in the journal"))
            if rows:
                raise ConfigError(
                    f"trainer.replay: {self.path} (line {number}) was written with other settings, which a "
                    f"replay must share:\n{rows}\nSet them back, or train without trainer.replay"
                )


class _Admission(NamedTuple):
    """Of a group in flight."""

    at: int
    """The line that says so; 0 is the head."""
    version: int
    """The policy's, then."""


def _pass(at: int, line: Mapping[str, Any], in_flight: dict[int, _Admission]) -> dict[int, _Admission]:
    """Takes a line in; returns the groups that it ends."""
    kind = line["kind"]
    if kind in ENDINGS:
        ended = [line["seq"]]
    elif kind == "give_back":
        ended = line["seqs"]
    else:
        ended = list(in_flight) if kind == "resume" else []
    found = {seq: in_flight.pop(seq) for seq in ended}
    if kind == "admit":
        in_flight[line["seq"]] = _Admission(at, line["version"])
    return found


class _Place:
    """A place in a journal, in front of a line. It only moves on, and knows the groups in flight there."""

    def __init__(self, journal: JournalFile, before: _Place | None = None) -> None:
        """before: a place to begin at, instead of the head."""
        self._journal = journal
        self.at: int = before.at if before else 0
        """The number of the line; 0 is the head."""
        self.start: int = before.start if before else 0
        """The byte at which the line begins."""
        self.in_flight: dict[int, _Admission] = dict(before.in_flight) if before else {}
        self._file = journal.open(self.start)
        self._read()

    def _read(self) -> None:
        self.text = self._file.readline() if self.at < self._journal.num_lines else b""
        self.line = _line(self._journal, self.text) if self.text else {}
        if not self.text and self.at < self._journal.num_lines:
            raise _changed(self._journal)

    def move(self) -> dict[int, _Admission]:
        """Moves behind the line. Returns the groups that it ends."""
        ended = _pass(self.at, self.line, self.in_flight)
        self.at += 1
        self.start += len(self.text)
        self._read()
        return ended

    def close(self) -> None:
        self._file.close()


def _line(journal: JournalFile, text: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(text.decode()))
    except (ValueError, TypeError) as error:
        raise _changed(journal) from error


def _changed(journal: JournalFile) -> TrainError:
    return TrainError(
        f"trainer.replay: {journal.path} was changed while it was followed (does its run go on?); start the "
        "same command again when it does not"
    )


class FollowedJournal(RunJournal):
    """The journal of a run that does what another's has, line by line. followed: that one."""

    def __init__(
        self,
        folder: RunFolder,
        settings: Mapping[str, Any],
        followed: JournalFile,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        super().__init__(folder, settings, say)
        self._followed = followed
        self._fates: dict[int, Mapping[str, Any] | None] = {}  # of groups in flight: see `fate`
        self._begin(_Place(followed))
        self._here.move()  # behind the head, which no change waits for

    def _begin(self, here: _Place) -> None:
        """Goes on in front of a line."""
        self._here = here
        # How groups end that are admitted from the next line on, as far as it was looked up: by lines that
        # admit them, the byte at which the put or drop begins; None: they are given back.
        self._ahead = _Place(self._followed, here)
        self._endings: dict[int, int | None] = {}

    def note(self, kind: str, **what: Any) -> None:
        if kind == "resume":
            what["settings"] = self._settings
        line = {"step": self._step, "kind": kind, **what}
        if json.loads(json.dumps(line)) != self.upcoming:
            raise self.left(_difference(line, self.upcoming))
        super().note(kind, **what)
        at = self._here.at
        for seq in self._here.move():
            self._fates.pop(seq, None)
        if kind == "admit":
            self._fates[what["seq"]] = self._fate_of(at)

    @property
    def upcoming(self) -> Mapping[str, Any]:
        return self._here.line

    def turn(self, kind: str, **what: Any) -> bool:
        line = self.upcoming
        if kind in OF_THE_TRAINER:
            if not line:
                raise self._ended()
            if line["kind"] in OF_THE_TRAINER and line["kind"] != kind:
                raise self.left(f"a {line['kind']} is next there, and a {kind} here")
        return line.get("kind") == kind and all(line.get(key) == value for key, value in what.items())

    def open_groups(self) -> Mapping[int, int]:
        return {seq: admission.version for seq, admission in self._here.in_flight.items()}

    def fate(self, seq: int) -> Mapping[str, Any] | None:
        """Returns how a group in flight ends: its put or drop; None where it is given back, or was in flight
        at the end.
        """
        return self._fates[seq]

    def _fate_of(self, admitted: int) -> Mapping[str, Any] | None:
        """Looks ahead for it, as far as it takes: about as many lines as come while a group is in flight."""
        ahead = self._ahead
        while admitted not in self._endings and ahead.line:
            start = ahead.start if ahead.line["kind"] in ENDINGS else None
            self._endings |= {admission.at: start for admission in ahead.move().values()}
        start = self._endings.pop(admitted, None)
        if start is None:
            return None
        with self._followed.open(start) as file:
            return _line(self._followed, file.readline())

    def left(self, what: str) -> TrainError:
        return TrainError(
            f"the replay left the journal {self._followed.path} in step {self._step}, line "
            f"{self.position + 1}: {what}. Something gives other bits here: a data file or a reward function "
            "that has changed, an agent or tool that does not do the same again, another machine, library or "
            "number of threads (docs/replay.md)"
        )

    def _ended(self) -> TrainError:
        return TrainError(
            f"the replay is at the end of the journal {self._followed.path}, in step {self._step}: there "
            "that run was stopped, and nothing says how it goes on. To go on without it, remove "
            "trainer.replay and start the same command again"
        )

    def restore(self, mark: Sequence[int] | int | None) -> None:
        """Goes on as any journal does, and where the one that is followed is at this position."""
        super().restore(mark)
        here = _Place(self._followed)
        with open(self.path, "rb") if self.position else BytesIO() as own:
            while here.at < max(self.position, 1):
                if here.at < self.position and own.readline() != here.text:
                    here.close()
                    raise CheckpointError(
                        f"trainer.replay: {self.path} is not the beginning of {self._followed.path}, so this "
                        "run cannot follow it from here; begin another one: trainer.run_dir=…"
                    )
                here.move()
        self._here.close()
        self._ahead.close()
        self._begin(here)
        self._fates = {seq: self._fate_of(admission.at) for seq, admission in here.in_flight.items()}

    def close(self) -> None:
        super().close()
        self._here.close()
        self._ahead.close()

    def _without_a_start(self, why: str) -> None:
        raise CheckpointError(f"trainer.replay: {why}; begin another run: trainer.run_dir=…")


def _difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    keys = [key for key in here if here[key] != there.get(key)]
    if not there:
        return f"there it ends, and here comes {here['kind']}"
    if "kind" in keys:
        return f"a {there['kind']} is next there, and a {here['kind']} here"
    seq = f" of group {here['seq']}" if "seq" in here else ""
    values = "; ".join(f"{key} is {_short(there.get(key))} there, {_short(here[key])} here" for key in keys)
    return f"{here['kind']}{seq}: {values}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


def check_replay(config: Config) -> None:
    """Raises ConfigError for a run that trainer.replay cannot make again."""
    rollout, replay = config.rollout, config.trainer.replay
    why = None
    if rollout.recorded is not None:
        why = "rollout.recorded: it trains on what is recorded, and nothing of it depends on time"
    elif not rollout.engine.exact:
        why = (
            f"rollout.engine={rollout.engine.name}: its bits depend on what else is in the batch, and a "
            "replay has other batches; those of rollout.engine=native and transformers do not"
        )
    if replay is not None and why is not None:
        raise ConfigError(f"trainer.replay={replay} cannot be followed with {why}; remove trainer.replay")


def followed_journal(config: Config, run_dir: str) -> JournalFile | None:
    """Reads what trainer.replay names, checked before anything is made; None where it is not set. run_dir: of
    the run that follows it. Raises ConfigError.
    """
    replay = config.trainer.replay
    if replay is None:
        return None
    followed = JournalFile.read(replay)
    if followed.path.resolve() == (Path(run_dir) / JOURNAL_FILE).resolve():
        raise ConfigError(
            f"trainer.replay={replay} is the folder of this run; choose another trainer.run_dir"
        )
    followed.check_settings(settings_of(config))
    return followed


def open_journal(
    config: Config, folder: RunFolder, followed: JournalFile | None, say: Callable[[str], None]
) -> RunJournal | None:
    """Makes the journal of the run in `folder`; None where time decides nothing (rollout.recorded)."""
    if config.rollout.recorded is not None:
        return None
    if followed is not None:
        say(f"replaying {followed.path}: {followed.num_steps} steps")
        return FollowedJournal(folder, settings_of(config), followed, say)
    return RunJournal(folder, settings_of(config), say)
