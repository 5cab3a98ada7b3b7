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
from pathlib import Path
from typing import Any

from rondo.agents.ended import entries_of, length_at, spans_in
from rondo.config import Config, changes, leaves_of
from rondo.core.errors import CheckpointError, ConfigError, TrainError
from rondo.tracking import RunFolder
from rondo.trainers.loop import JOURNAL_FILE, JOURNAL_FORMAT, RunJournal

KINDS = frozenset({"journal", "admit", "put", "drop", "give_back", "take", "publish", "resume"})
OF_THE_TRAINER = ("take", "publish")

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
    """The journal of another run, read to be followed."""

    def __init__(self, path: Path, lines: Sequence[str]) -> None:
        """lines: as text; the first is the head. Raises ConfigError naming the first line that is none of a
        journal.
        """
        self.path = path
        self.lines = lines
        self.endings: dict[int, int | None] = {}
        """The line of each admission, and the one that ends it."""
        self.settings: list[tuple[int, dict[str, Any]]] = []
        """(line, settings) of each start of the run."""
        self.num_steps = 0
        admitted: dict[int, int] = {}
        ready: set[int] = set()
        for at, text in enumerate(lines):
            try:
                self._index(at, json.loads(text), admitted, ready)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"trainer.replay: {path}:{at + 1} is no line of a journal ({error!r}); the file was "
                    "changed or damaged, and cannot be followed"
                ) from error

    def _index(self, at: int, line: Mapping[str, Any], admitted: dict[int, int], ready: set[int]) -> None:
        """Takes in one line. admitted: the groups in flight, and the lines that started them. ready: those
        that are complete.
        """
        kind = line["kind"]
        if kind not in KINDS or (kind == "journal") != (at == 0):
            raise ValueError(f"kind {kind!r}")
        if kind == "journal" and line["format"] != JOURNAL_FORMAT:
            raise ValueError(f"format {line['format']}, this version of rondo reads {JOURNAL_FORMAT}")
        if kind in ("journal", "resume"):
            self.settings.append((at + 1, dict(line["settings"])))
        if kind in ("put", "drop"):
            ended = [line["seq"]]
        elif kind == "give_back":
            ended = line["seqs"]
        else:
            ended = list(admitted) if kind == "resume" else []
        for seq in ended:
            self.endings[admitted.pop(seq)] = at
        if kind == "admit":
            admitted[line["seq"]], self.endings[at] = at, None
        if kind == "put" and line["reason"] is None:
            ready.add(line["seq"])
        if kind == "take":
            for seq in line["seqs"]:
                ready.remove(seq)
        if kind == "resume":
            ready.difference_update(line["reissue"])
        if kind in ("put", "drop"):
            for spans in spans_in(entries_of(line)):
                length_at(spans, 0)
        if kind == "publish":
            self.num_steps = int(line["version"])

    @classmethod
    def read(cls, run: str) -> JournalFile:
        """Reads the journal of a run folder, or a file. A last line that a kill cut off is left out."""
        path = Path(run)
        path = path / JOURNAL_FILE if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"trainer.replay={run}: there is no {path}; name the folder of a run of `rondo train` that "
                f"has a {JOURNAL_FILE}"
            )
        text = path.read_bytes().decode("utf-8", errors="replace")
        lines = text.split("\n")[:-1]  # what follows the last newline is no line
        if not lines:
            raise ConfigError(f"trainer.replay={run}: {path} has no whole line")
        return cls(path, lines)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError that lists every key with another value."""
        for number, old in self.settings:
            rows = "\n".join(f"  {row}" for row in changes(old, settings, "in the journal"))
            if rows:
                raise ConfigError(
                    f"trainer.replay: {self.path} (line {number}) was written with other settings, which a "
                    f"replay must share:\n{rows}\nSet them back, or train without trainer.replay"
                )

    def line(self, at: int) -> Mapping[str, Any]:
        return json.loads(self.lines[at]) if at < len(self.lines) else {}

    def fate(self, at: int) -> Mapping[str, Any] | None:
        """Returns how the group that was admitted in this line ended: its put or drop; None where it was
        given back, or was in flight at the end.
        """
        end = self.endings[at]
        line = self.line(end) if end is not None else {}
        return line if line.get("kind") in ("put", "drop") else None

    def open_at(self, position: int) -> list[int]:
        """Returns the lines that admitted what is in flight before line `position`."""
        return [at for at, end in self.endings.items() if at < position and (end is None or end >= position)]


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
        self._upcoming: tuple[int, Mapping[str, Any]] = (-1, {})

    def note(self, kind: str, **what: Any) -> None:
        if kind == "resume":
            what["settings"] = self._settings
        line = {"step": self._step, "kind": kind, **what}
        if json.loads(json.dumps(line)) != self.upcoming:
            raise self.left(_difference(line, self.upcoming))
        super().note(kind, **what)
        if kind == "admit":
            self._fates[what["seq"]] = self._followed.fate(self.position - 1)

    @property
    def upcoming(self) -> Mapping[str, Any]:
        at = max(self.position, 1)  # not the head, which no change waits for
        if self._upcoming[0] != at:
            self._upcoming = (at, self._followed.line(at))
        return self._upcoming[1]

    def turn(self, kind: str, **what: Any) -> bool:
        line = self.upcoming
        if kind in OF_THE_TRAINER:
            if not line:
                raise self._ended()
            if line["kind"] in OF_THE_TRAINER and line["kind"] != kind:
                raise self.left(f"a {line['kind']} is next there, and a {kind} here")
        return line.get("kind") == kind and all(line.get(key) == value for key, value in what.items())

    def open_groups(self) -> Mapping[int, int]:
        lines = [self._followed.line(at) for at in self._followed.open_at(self.position)]
        return {line["seq"]: line["version"] for line in lines}

    def fate(self, seq: int) -> Mapping[str, Any] | None:
        return self._fates[seq]

    def left(self, what: str) -> TrainError:
        return TrainError(
            f"the replay left the journal {self._followed.path} in step {self._step}, line "
            f"{self.position + 1}: {what}. Something gives other bits here: a data file or a reward function "
            "that has changed, an agent or tool that does not do the same again, another machine, library or "
            "number of threads (docs/async.md)"
        )

    def _ended(self) -> TrainError:
        return TrainError(
            f"the replay is at the end of the journal {self._followed.path}, in step {self._step}: there "
            "that run was stopped, and nothing says how it goes on. To go on without it, remove "
            "trainer.replay and start the same command again"
        )

    def restore(self, position: int | None) -> None:
        """Goes on as any journal does, and where the one that is followed is at this position."""
        super().restore(position)
        kept = self.path.read_text(encoding="utf-8").splitlines() if self.position else []
        if kept != list(self._followed.lines[: self.position]):
            raise CheckpointError(
                f"trainer.replay: {self.path} is not the beginning of {self._followed.path}, so this "
                "run cannot follow it from here; begin another one: trainer.run_dir=…"
            )
        opened = self._followed.open_at(self.position)
        self._fates = {self._followed.line(at)["seq"]: self._followed.fate(at) for at in opened}

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
