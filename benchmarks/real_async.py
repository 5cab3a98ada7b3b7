"""`benchmarks/async.py --real`: the quickstart with one trainer process and one rollout process, and what the
simulation says for exactly that.

Every run does the same work: as many steps, the same prompts and settings (rollout correction on in all of
them, so that old log-probs are computed in all), one thread per process. The rates that the simulation gets
are measured in the run at max_staleness 0: seconds of a decode step, of what the trainer does, of a publish.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pyarrow.parquet as pq

from algorithms import ROOT, Task, run_all
from rondo.config import load
from rondo.planning.admission import OnUpdate
from rondo.tracking import read_metrics
from rondo.trainers.commands import train as runs
from virtual_cluster import Rates, Setup, run

# Where the second process comes from.
PLACES: Mapping[str, tuple[str, ...]] = {
    "ray": (  # one device to train, one to generate
        "cluster.backend=ray",
        "cluster.devices=2",
        "cluster.pools={train: 1, generate: 1}",
        "cluster.placement={rollout: generate}",
    ),
    "own": ("rollout.engine.process=own",),  # the engine in a child of the one host
}
BATCH, SAMPLES, SLOTS = 16, 8, 128  # of the quickstart
# A decode step costs as much beside its sequences as this many of them, by decode path: docs/benchmarks.md,
# tokens per second with 64, 128 and 256 sequences.
FIXED_SEQUENCES = {"compiled": 12.5, "lean": 70.0}


@dataclass(frozen=True)
class Measured:
    """One run. seconds: of all its steps; of those the loop waited `waited` for groups and published for
    `publish`. busy: shares of the seconds. load: the machine's load average over the minute, at the end.
    """

    max_staleness: int
    on_update: str
    seconds: float
    waited: float
    publish: float
    trainer_busy: float
    rollout_busy: float
    staleness: float
    load: float

    @property
    def generation(self) -> float:
        """Seconds in which episodes ran."""
        return self.rollout_busy * self.seconds

    @property
    def trainer(self) -> float:
        """Seconds of all else that the loop does: log-probs, update, files."""
        return self.seconds - self.waited - self.publish


def settings(place: str, steps: int, staleness: int, start: Path, folder: Path, decode: str) -> list[str]:
    return [
        "cluster.threads=1",
        *PLACES[place],
        "trainer.warm_start=null",
        f"model.path={start / 'export' if (start / 'export').is_dir() else start}",
        f"trainer.run_dir={folder}",
        f"trainer.total_steps={steps}",
        f"trainer.max_staleness={staleness}",
        "trainer.evaluation={before: false, after: false, every: null}",
        "algorithm.rollout_correction={mode: decoupled, importance: {level: token, upper: 2.0}}",
        f"rollout.engine.decode={decode}",
        "checkpoint={every: null, export: false}",
        "tracking={console: 'off', plot: false, trackers: [], samples: 0}",
    ]


def training(place: str, steps: int, staleness: int, start: Path, work: Path, decode: str) -> Task:
    folder = work / f"{place}_{decode}_{staleness}"
    overrides = settings(place, steps, staleness, start, folder, decode)
    recipe = "quickstart"

    def train() -> None:
        runs.train(load([recipe], overrides))
        (folder / "load.json").write_text(json.dumps(os.getloadavg()[0]))

    return Task(f"max_staleness {staleness}", 0, folder, train)


def measured(folder: Path, staleness: int) -> Measured:
    lines = [line for line in read_metrics(folder) if "timing/step_s" in line]

    def total(name: str) -> float:
        return sum(line.get(name, 0.0) for line in lines)

    seconds = total("timing/step_s")

    def share(name: str) -> float:
        return sum(line[name] * line["timing/step_s"] for line in lines) / seconds

    return Measured(
        max_staleness=staleness,
        on_update="finish" if staleness <= 1 else "resume",
        seconds=seconds,
        waited=total("timing/generate_s"),
        publish=total("timing/publish_s"),
        trainer_busy=share("perf/trainer_busy_share"),
        rollout_busy=share("perf/rollout_busy_share"),
        staleness=statistics.fmean(line["buffer/staleness_mean"] for line in lines),
        load=json.loads((folder / "load.json").read_text()),
    )


class RecordedLengths:
    """length(seq, sample) as it was in a run; what it never generated is as long as another."""

    def __init__(self, folder: Path) -> None:
        self._lengths: dict[tuple[int, int], int] = {}
        for file in sorted((folder / "rollouts").glob("step-??????.parquet")):
            table = pq.read_table(file, columns=["group_id", "sample_index", "response_length"]).to_pydict()
            keys = zip(table["group_id"], table["sample_index"], strict=True)
            self._lengths |= dict(zip(keys, table["response_length"], strict=True))
        self._all = list(self._lengths.values())

    def __call__(self, seq: int, sample: int) -> int:
        return int(self._lengths.get((seq, sample), self._all[(seq * SAMPLES + sample) % len(self._all)]))

    def mean(self) -> float:
        return statistics.fmean(self._all)


def measured_rates(
    base: Measured, steps: int, lengths: RecordedLengths, decode: str, *, overlap: bool
) -> Rates:
    """The rates of the run at max_staleness 0. overlap: for runs in which episodes go on while the trainer
    works.

    At 0, what the loop does after the release (metrics, files) goes on beside the next step's episodes
    already: it costs nothing there, and the trainer's time everywhere else.
    """
    fixed = FIXED_SEQUENCES[decode]
    relative = Rates(lambda c: c + fixed, SLOTS, train_rate=float("inf"), sync_seconds=0.0)
    scale = base.generation / run(Setup(1, 1, 0, "finish", BATCH, SAMPLES, steps), relative, lengths).seconds
    trainer = base.trainer if overlap else base.seconds - base.generation - base.publish
    return Rates(
        step_seconds=lambda c: scale * (c + fixed),
        slots=SLOTS,
        train_rate=BATCH * SAMPLES * lengths.mean() * steps / trainer,
        sync_seconds=base.publish / steps,
    )


HEAD = (
    "| max_staleness | on update | s | times as fast | simulated: s | times as fast | trainer busy "
    "(simulated) | rollout busy (simulated) | staleness (simulated) | load average |\n" + "|---" * 10 + "|"
)


def report_real(
    start: Path | None, work: Path | None, steps: int, staleness: Sequence[int], place: str, decode: str
) -> dict[str, Any]:
    """Train one after the other, print the table, return what was made. Raises SystemExit without a start."""
    if start is None or 0 not in staleness:
        raise SystemExit("--real needs --start (a run folder or an export), and 0 among --staleness")
    work = (work or Path(tempfile.mkdtemp(prefix="rondo_async_"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    start = start.resolve()
    os.chdir(ROOT)  # recipes name files relative to the repository
    tasks = {k: training(place, steps, k, start, work, decode) for k in staleness}
    run_all(list(tasks.values()), jobs=1)
    missing = [str(task.log) for task in tasks.values() if not (task.folder / "summary.json").exists()]
    if missing:
        raise SystemExit(f"not finished: {', '.join(missing)}")
    found = [measured(task.folder, k) for k, task in tasks.items()]
    lengths = RecordedLengths(tasks[0].folder)
    (base,) = (m for m in found if m.max_staleness == 0)
    at_once, beside = (measured_rates(base, steps, lengths, decode, overlap=x) for x in (False, True))
    print(
        f"{place}, decode path {decode}, {steps} steps; per step at max_staleness 0: generation "
        f"{base.generation / steps:.3f} s, trainer {base.trainer / steps:.3f} s, publish "
        f"{base.publish / steps:.3f} s\n\n{HEAD}"
    )
    rows = []
    synchronous = run(Setup(1, 1, 0, "finish", BATCH, SAMPLES, steps), at_once, lengths).seconds
    for m in found:
        setup = Setup(1, 1, m.max_staleness, cast(OnUpdate, m.on_update), BATCH, SAMPLES, steps)
        predicted = run(setup, beside if m.max_staleness else at_once, lengths)
        cells = [
            str(m.max_staleness),
            "–" if m.max_staleness == 0 else m.on_update,
            f"{m.seconds:.1f}",
            f"{base.seconds / m.seconds:.2f}",
            f"{predicted.seconds:.1f}",
            f"{synchronous / predicted.seconds:.2f}",
            f"{m.trainer_busy:.0%} ({1 - predicted.trainer_idle:.0%})",
            f"{m.rollout_busy:.0%} ({1 - predicted.rollout_idle:.0%})",
            f"{m.staleness:.1f} ({predicted.staleness_mean:.1f})",
            f"{m.load:.1f}",
        ]
        print(f"| {' | '.join(cells)} |")
        rows.append({"measured": asdict(m), "simulated": asdict(predicted)})
    return {"place": place, "decode": decode, "steps": steps, "rows": rows}
