"""A run that follows another's journal ends with its bits, however fast its parts are."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rondo.config import load
from rondo.core.batch import BatchRef
from rondo.core.errors import CheckpointError, ConfigError, TrainError, WorkerError
from rondo.core.types import Completion, Ended, GenerateRequest, Trajectory
from rondo.planning.admission import OnUpdate, Order
from rondo.rewards import Scorer
from rondo.rollout import NativeEngine
from rondo.tracking import RunFolder
from rondo.trainers.loop.buffer import Buffer, Group
from rondo.trainers.loop.feeder import EpisodeFeeder
from rondo.trainers.loop.journal import RunJournal
from rondo.trainers.replay.journal import FollowedJournal, JournalFile, check_replay, followed_journal
from rondo.trainers.replay.replay import ReplayedBuffer, ReplayedFeeder
from rondo.workers.models import ActorWorker
from simulation import Lengths, SimulatedEngines, Simulation, run_virtual, simulate
from tests.messages import full_text
from tests.trainers.conftest import hold_an_answer, inline, metrics, weights
from tests.trainers.test_async import unlucky
from tests.trainers.test_partial import RESUME

ASYNCHRONOUS = (
    *RESUME,
    "rollout.max_tokens=24",
    "trainer.total_steps=5",
    "reward.max_dropped_share=0.5",
)


# ---- with the real engine ----


def record(run: Path, recipe: Path, *overrides: str, breaks: bool = False) -> None:
    """A run in which answers are in flight when the first weights come, one answer passes its deadline, and
    one score does not come in time. breaks: off in step 4, and goes on from the checkpoint of step 3.
    """
    generate, score = NativeEngine.generate, Scorer.score

    async def late(self: NativeEngine, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        done = await generate(self, request, on_tokens)
        if request.affinity != "train/2" or not request.request_id.endswith("/3"):
            return done
        cut = {name: getattr(done, name)[:3] for name in ("token_ids", "log_probs", "policy_versions")}
        return dataclasses.replace(done, **cut, finish_reason="deadline")

    async def slow(self: Scorer, trajectory: Trajectory) -> Trajectory:
        if (trajectory.prompt.seq, trajectory.sample_index) == (5, 1):
            return dataclasses.replace(trajectory, outcome="reward_timeout")
        return await score(self, trajectory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeEngine, "generate", late)
        patch.setattr(Scorer, "score", slow)
        hold_an_answer(patch)
        arguments = ("train", str(recipe), *ASYNCHRONOUS, *overrides, f"trainer.run_dir={run}")
        if breaks:
            with broken_off(4):
                assert inline(*arguments, "checkpoint.every=1", check=False).returncode == 2
        inline(*arguments)


@contextmanager
def broken_off(step: int, how: Callable[[], None] | None = None) -> Iterator[None]:
    """Something happens (an error) in the update of `step`."""
    update, calls = ActorWorker.update_actor, 0

    def updating(self: ActorWorker, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            if how is None:
                raise TrainError("broken off")
            how()
        return update(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActorWorker, "update_actor", functools.wraps(update)(updating))
        yield


def entries(run: Path) -> list[Mapping[str, Any]]:
    """Of all trajectories of the journal."""
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [entry for line in lines for entry in line.get("trajectories", ())]


def assert_equal(a: Path, b: Path) -> None:
    assert (a / "journal.jsonl").read_text() == (b / "journal.jsonl").read_text()
    files = [sorted((run / "rollouts").iterdir()) for run in (a, b)]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    for one, other in zip(*files, strict=True):
        rows = [repr(pq.read_table(file).to_pydict()) for file in (one, other)]  # NaN is equal to itself
        assert rows[0] == rows[1], one
    assert weights(a) == weights(b)
    here = ("buffer/wasted_tokens", "reward/timeouts", "weights/bytes", "weights/peak")
    here += ("agent/", "environment/", "rollout/reencoded_share")  # of episodes that ended, in whichever step
    here += tuple(f"rollout/{name}" for name in ("cache_bytes", "preemptions", "reissued", "engine_restarts"))
    lines = [[{k: v for k, v in m.items() if not k.startswith(here)} for m in metrics(run)] for run in (a, b)]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_a_replay_equals_its_run_even_if_both_were_interrupted(recipe: Path, tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    record(run, recipe, "trainer.order=completion", breaks=True)
    assert any(len(entry["spans"]) > 1 for entry in entries(run))
    assert {"reward_timeout", "rollout_error"} <= {entry["outcome"] for entry in entries(run)}
    kinds = [json.loads(line)["kind"] for line in (run / "journal.jsonl").read_text().splitlines()]
    assert kinds.count("resume") == 1
    arguments = ("train", str(recipe), *ASYNCHRONOUS, "trainer.order=completion", f"trainer.run_dir={again}")
    arguments = (*arguments, f"trainer.replay={run}", "rollout.max_concurrent=5")
    with broken_off(2):  # goes on from the snapshot of step 1, with what was in flight there
        assert inline(*arguments, "checkpoint.every=1", check=False).returncode == 2
    cut = again / "checkpoints" / "step-00000001"
    assert json.loads((cut / "controller.json").read_text())["extra"]["partial"]
    with broken_off(2, lambda: os.kill(os.getpid(), signal.SIGINT)):  # of step 3, after which it saves
        assert inline(*arguments, check=False).returncode == 130
    inline(*arguments)
    assert_equal(run, again)


@pytest.mark.slow
def test_a_run_with_aborts_is_replayed_without_any(recipe: Path, tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    record(run, recipe, "trainer.on_update=abort")
    assert sum(line["buffer/aborted"] for line in metrics(run)) > 0
    arguments = (*ASYNCHRONOUS, "trainer.on_update=abort", "rollout.max_concurrent=16")
    inline("train", str(recipe), *arguments, f"trainer.replay={run}", f"trainer.run_dir={again}")
    assert_equal(run, again)
    assert sum(line["buffer/wasted_tokens"] for line in metrics(again)) == 0
    done = inline("train", str(recipe), *arguments, f"trainer.replay={again}", "rollout.n=2", check=False)
    assert done.returncode == 2
    assert "rollout.n: 4 in the journal, 2 now" in done.stderr


# ---- on a virtual clock ----


class Mortal(SimulatedEngines):
    """Rank 1 dies when its eighth group arrives; those that it works on are lost when they would end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ranks=2, **options)
        self.calls, self.ranks = 0, [0, 1]

    def alive(self) -> list[int]:
        return self.ranks

    async def run_group(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        self.calls += rank
        if self.calls == 8:
            self.ranks = [0]
        done = await super().run_group(rank, seq) if rank in self.ranks else None
        if done is None or rank not in self.ranks:
            raise WorkerError("rollout", rank, "run_group", f"rollout[{rank}] is gone")
        return done


def a_third(group: Group) -> str | None:
    return "unlucky" if unlucky(0, 1 / 3, group.seq) else None


def simulated(
    folder: Path,
    k: int,
    mode: OnUpdate,
    order: Order,
    *,
    follow: JournalFile | None = None,
    keep: Callable[[Group], str | None] = a_third,
    engines: type[SimulatedEngines] = SimulatedEngines,
    update_seconds: float = 0.2,
    **options: Any,
) -> Simulation:
    """Four steps of three groups of two, a filter that drops a third, and scoring that fails."""

    async def main() -> Simulation:
        with RunFolder(folder) as run:
            journal = RunJournal(run, {}) if follow is None else FollowedJournal(run, {}, follow)
            wanted: dict[str, Any] = {"slots": 8, "length": Lengths(120, 1.0, 900)} | options
            rollout = engines(n=2, fails=lambda seq, sample: unlucky(0, 0.2, seq, sample, 1), **wanted)
            buffer = (ReplayedBuffer if isinstance(journal, FollowedJournal) else Buffer)(
                batch_size=3,
                max_staleness=k,
                total_steps=4,
                total_groups=10**9,
                order=order,
                keep=keep,
                n=2,
                journal=journal,
            )
            wanted = {"on_update": mode, "max_aborts": 1}
            if isinstance(journal, FollowedJournal):
                feeder: EpisodeFeeder = ReplayedFeeder(journal, buffer, rollout, **wanted)
            else:
                feeder = EpisodeFeeder(buffer, rollout, **wanted)
            try:
                return await simulate(buffer, rollout, feeder, update_seconds=update_seconds)
            finally:
                journal.close()

    return run_virtual(main())


MODES: list[tuple[int, OnUpdate, Order]] = [
    (0, "finish", "prompt"),
    (1, "finish", "completion"),
    (2, "resume", "prompt"),
    (2, "resume", "completion"),
    (4, "abort", "completion"),
]


@pytest.mark.parametrize(("k", "mode", "order"), MODES)
def test_who_is_faster_makes_no_difference(tmp_path: Path, k: int, mode: OnUpdate, order: Order) -> None:
    """Engines and trainer fast and slow, more ranks and fewer: the same steps, the same account of them."""

    def score_seconds(seq: int, sample: int) -> float:
        return 0.5 * unlucky(0, 0.3, seq, sample, 2)

    run = simulated(tmp_path / "run", k, mode, order, engines=Mortal, score_seconds=score_seconds)
    written = (tmp_path / "run" / "journal.jsonl").read_text()
    assert ('"give_back"' in written) or k == 0
    for number, options in enumerate(
        [
            {"slots": 1, "update_seconds": 0.01},
            {"slots": 99, "ranks": 3, "token_seconds": 1e-5, "update_seconds": 3.0},
        ]
    ):
        follow = JournalFile.read(str(tmp_path / "run"))
        again = simulated(tmp_path / str(number), k, mode, order, follow=follow, **options)
        assert (tmp_path / str(number) / "journal.jsonl").read_text() == written
        assert again.steps == run.steps
        assert again.staleness == run.staleness
        assert again.statistics == run.statistics  # aborts and what was in flight included


@pytest.fixture(scope="module")
def simulated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated") / "run"
    simulated(folder, *MODES[3])
    return folder


def follow_changed(
    run: Path, folder: Path, change: Callable[[list[dict[str, Any]]], Any], **options: Any
) -> str:
    """What a replay says of a journal in which something was changed."""
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    change(lines)
    changed = folder.with_name(f"{folder.name}.jsonl")
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    follow = JournalFile.read(str(changed))
    with pytest.raises(TrainError) as error:
        simulated(folder, *MODES[3], follow=follow, **options)
    return str(error.value)


def first(lines: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == kind)


def test_a_replay_that_leaves_the_journal_says_where(simulated_run: Path, tmp_path: Path) -> None:
    def shorten(lines: list[dict[str, Any]]) -> None:
        del lines[next(i for i, line in enumerate(lines) if line["kind"] == "take") + 2 :]

    def without_a_take(lines: list[dict[str, Any]]) -> None:
        lines.remove(first(lines, "take"))

    said = functools.partial(follow_changed, simulated_run)
    text = said(tmp_path / "1", shorten)
    assert f"at the end of the journal {tmp_path}/1.jsonl, in step 1: there that run was stopped" in text
    assert "in step 1, line" in (text := said(tmp_path / "2", without_a_take))
    assert "a publish is next there, and a take here" in text
    text = said(tmp_path / "3", lambda lines: None, length=lambda seq, sample: 7)
    assert re.search(
        r"left the journal \S+/3.jsonl in step 1, line \d+: group \d+, trajectory \d: its answer "
        r"ends after 7 tokens, and there it has \d+ by version 0\. Something gives other bits here",
        text,
    )
    text = said(
        tmp_path / "4", lambda lines: first(lines, "put")["trajectories"][1].update(digest="0", reward=1.0)
    )
    assert "trajectory 1: the bits of its prompt, tokens or log-probs: 0 there,  here" in text
    text = said(tmp_path / "5", lambda lines: None, keep=lambda group: "all")
    assert re.search(r'put of group \d+: reason is "unlucky" there, "all" here', text)


def test_what_cannot_be_replayed_is_refused_before_the_start(
    simulated_run: Path, recipe: Path, tmp_path: Path
) -> None:
    def config(*overrides: str) -> Any:
        return load([str(recipe)], ["trainer.replay=runs/a", *overrides]).config

    for override, why in (
        ("rollout.engine=vllm", "rollout.engine=vllm: its bits depend on what else is in the batch"),
        ("rollout.recorded=runs/a", "rollout.recorded: it trains on what is recorded"),
    ):
        with pytest.raises(ConfigError, match=f"^trainer.replay=runs/a cannot be followed with {why}"):
            check_replay(config(override))
    journal = (simulated_run / "journal.jsonl").read_text()
    damaged = tmp_path / "damaged.jsonl"
    for text, error in (
        ("", r"has no whole line"),
        (journal[:40], r"has no whole line"),
        (journal.replace('"take"', '"tale"', 1), r"damaged.jsonl:\d+ is no line of a journal \(.*'tale'"),
        (journal.replace('"spans": ', '"pans": ', 1), r"damaged.jsonl:\d+ is no line of a journal \(.*spans"),
        (journal.replace("\n", "", 1), r"damaged.jsonl:1 is no line of a journal"),
        (journal.replace('"format": 1', '"format": 2'), r"format 2, this version of rondo reads 1"),
    ):
        damaged.write_text(text)
        with pytest.raises(ConfigError, match=error):
            JournalFile.read(str(damaged))
    damaged.write_text(journal[:-10])  # where a kill cut it off
    assert JournalFile.read(str(damaged)).num_lines == journal.count("\n") - 1
    with pytest.raises(ConfigError, match=full_text("trainer.replay=nowhere")):
        JournalFile.read("nowhere")
    with RunFolder(tmp_path / "old") as folder:  # goes on from a checkpoint that knows of no journal
        (tmp_path / "old" / "journal.jsonl").write_text(journal)
        said: list[str] = []
        unknown = RunJournal(folder, {}, say=said.append)
        unknown.restore(None)
        unknown.note("admit", seq=0, version=0)
        assert "this run cannot be replayed" in said[0]
        assert unknown.mark is None
        assert not (tmp_path / "old" / "journal.jsonl").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_text(journal)
    own = config(f"trainer.replay={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=full_text("is the folder of this run; choose")):
        followed_journal(own, str(tmp_path / "run"))
    other = config(f"trainer.replay={simulated_run}", "trainer.seed=7")
    with pytest.raises(ConfigError, match=full_text("trainer.seed: not set in the journal, 7")):
        followed_journal(other, str(tmp_path / "other"))


def made_up(number: int, seed: int) -> list[dict[str, Any]]:
    """Groups that come and go by chance: put, dropped, given back, started again by a resume, never ended."""
    chance = random.Random(seed)
    lines: list[dict[str, Any]] = [{"kind": "journal", "format": 1, "settings": {}}]
    in_flight: list[int] = []
    for seq in range(number):
        lines.append({"step": 1, "kind": "admit", "seq": seq, "version": seq % 3})
        in_flight.append(seq)
        while len(in_flight) > 6 or (in_flight and chance.random() < 0.4):
            ended = in_flight.pop(chance.randrange(len(in_flight)))
            kind = chance.choice(["put", "put", "drop", "give_back"])
            if kind == "give_back":
                lines.append({"step": 1, "kind": kind, "seqs": [ended], "aborted": True})
            else:
                lines.append({"step": 1, "kind": kind, "seq": ended, "reason": None, "trajectories": []})
        if chance.random() < 0.02:
            resume = {"version": 0, "reissue": sorted(in_flight), "settings": {}}
            lines.append({"step": 1, "kind": "resume", **resume})
            in_flight.clear()
    return lines


def do_next(journal: FollowedJournal) -> None:
    line = journal.upcoming
    what = {key: value for key, value in line.items() if key not in ("step", "kind", "settings")}
    journal.note(line["kind"], **what)


def do_all(journal: FollowedJournal) -> None:
    with closing(journal):
        while journal.upcoming:
            do_next(journal)


def test_how_groups_end_is_looked_up_ahead_and_not_kept(tmp_path: Path) -> None:
    """At every line, of a replay from the start and of one that goes on there, against all lines at once."""
    lines = made_up(400, seed=3)
    texts = [json.dumps(line) + "\n" for line in lines]
    (tmp_path / "followed.jsonl").write_text("".join(texts))
    followed = JournalFile.read(str(tmp_path / "followed.jsonl"))
    assert followed.num_lines == len(lines)

    def known(at: int) -> dict[int, tuple[int, Any]]:
        """Of each group in flight before line `at`: the version, and the line that ends it."""
        found: dict[int, tuple[int, Any]] = {}
        for number, line in enumerate(lines[:at]):
            ended = [line["seq"]] if line["kind"] in ("put", "drop") else line.get("seqs", [])
            for seq in list(found) if line["kind"] == "resume" else ended:
                found.pop(seq)
            if line["kind"] == "admit":
                ends = (
                    one
                    for one in lines[number:]
                    if line["seq"] in one.get("seqs", [])
                    or one["kind"] == "resume"
                    or (one["kind"] in ("put", "drop") and one["seq"] == line["seq"])
                )
                end = next(ends, None)
                found[line["seq"]] = (line["version"], end if end and "seq" in end else None)
        return found

    with RunFolder(tmp_path / "run") as folder:
        journal = FollowedJournal(folder, {}, followed)
        for at, line in enumerate(lines[1:], 1):
            assert journal.upcoming == line
            do_next(journal)
            wanted = known(at + 1)
            assert journal.open_groups() == {seq: version for seq, (version, _) in wanted.items()}
            assert journal._fates == {seq: end for seq, (_, end) in wanted.items()}
            assert {seq: journal.fate(seq) for seq in wanted} == journal._fates
            assert len(journal._endings) < 60
            if at % 37 == 0:
                with RunFolder(tmp_path / f"run-{at}") as other:
                    (other.path / "journal.jsonl").write_text("".join(texts[: at + 1]))
                    again = FollowedJournal(other, {}, followed)
                    again.restore(at + 1)
                    assert (again.upcoming, again.open_groups()) == (journal.upcoming, journal.open_groups())
                    assert again._fates == journal._fates
                    again.close()
        assert journal.upcoming == {}
        assert journal.path.read_text() == "".join(texts)
        journal.close()


def test_a_journal_goes_on_from_the_bytes_of_a_mark_as_from_its_lines(tmp_path: Path) -> None:
    wide = [
        "x" * width for width in (1, 70_000, 1, (1 << 17) - 90, 5, 1 << 18)
    ]  # beside the piece that is read
    with RunFolder(tmp_path / "run") as folder:
        written = RunJournal(folder, {})
        marks = [written.mark]
        for number, reason in enumerate(wide, 1):
            written.note("put", seq=number, reason=reason)
            written.note("publish", version=number)
            marks.append(written.mark)
        written.close()
        whole = written.path.read_bytes()
        assert [lines for lines, _ in marks] == [0, *range(3, 14, 2)]  # type: ignore[misc]
        for number, mark in reversed(list(enumerate(marks))):
            assert mark is not None
            for given in (json.loads(json.dumps(mark)), mark[0]):
                written.path.write_bytes(whole)
                again = RunJournal(folder, {})
                again.restore(given)
                assert (again.mark, again._step) == (mark, number + 1)
                assert (written.path.read_bytes() if mark[0] else b"") == whole[: mark[1]]


def test_a_mark_where_no_line_ends_is_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        written = RunJournal(folder, {})
        for number in range(3):
            written.note("publish", version=number)
        written.close()
        assert written.mark is not None
        lines, end = written.mark
        said = list[str]()
        for wrong in (1, 20):
            with pytest.raises(CheckpointError, match=rf"journal.jsonl:{lines}: damaged \("):
                RunJournal(folder, {}).restore((lines, end - wrong))
        assert written.path.stat().st_size == end  # nothing was moved
        shorter = RunJournal(folder, {}, said.append)
        shorter.restore((lines, end + 1))
        assert shorter.mark is None
        assert "does not reach back to the start of this run" in said[0]


def test_a_journal_that_is_another_one_or_changes_is_not_followed(tmp_path: Path) -> None:
    texts = [json.dumps(line) + "\n" for line in made_up(40, seed=1)]
    path = tmp_path / "followed.jsonl"
    path.write_text("".join(texts))
    followed = JournalFile.read(str(path))
    with RunFolder(tmp_path / "run") as folder:
        own = folder.path / "journal.jsonl"
        own.write_text("".join([*texts[:9], texts[9].replace('"step": 1', '"step": 2')]))
        journal = FollowedJournal(folder, {}, followed)
        with pytest.raises(CheckpointError, match=r"is not the beginning of .*followed.jsonl"):
            journal.restore(10)
        journal.restore(9)
        journal.close()
        os.truncate(path, len("".join(texts[:20])) + 5)  # its run goes on from an earlier checkpoint
        with pytest.raises(TrainError, match=full_text("changed while it was followed")):
            do_all(FollowedJournal(folder, {}, followed))
