"""A run that has gone on for long, made up of one that has not: what it costs to go on from its end.

    python benchmarks/aged.py [--steps 10000] [--groups 512]

The smallest model there is takes a step of so many groups of eight, while groups of the steps that follow are
sampled. The folder as it is then is aged: its checkpoint says that it is that of the last of all those steps,
and journal, metrics, timeline and rollouts are as long as such a run's (of 10,000 steps of 512 groups, 5 GB).
Both then go on for one step, alternately, each time in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rondo.checkpoint import (
    CheckpointStore,
    ControllerState,
    load_compatibility,
    load_controller_state,
    save_controller_state,
)
from rows import N
from rows import arguments as recipe_of_rows

WAITING = 3  # trainer.max_staleness: of how many steps there are groups
SETTINGS = (
    "checkpoint={every: 1, keep: 9, export: false}",
    "tracking.console=off",
    "tracking.plot=false",
)
STEPS_OF_A_FILE = 100  # of a timeline


def command(place: Path, run: Path, groups: int, steps: int) -> list[str]:
    """Returns the arguments of `rondo` for a run of so many steps in the folder `run`; the recipe is in
    `place`.
    """
    own = (f"trainer.run_dir={run}", f"trainer.total_steps={steps}", f"trainer.max_staleness={WAITING}")
    return [*recipe_of_rows(place, rows=N * groups), *own, *SETTINGS]


def cut(run: Path, step: int) -> None:
    """Takes the checkpoints after `step` out of a run's folder, and its end: the same command goes on from
    there, and moves what was logged beyond it aside.
    """
    for later in CheckpointStore(run / "checkpoints").steps():
        if later > step:
            shutil.rmtree(run / "checkpoints" / f"step-{later:08d}")
    (run / "summary.json").unlink()


def age(run: Path, steps: int, groups: int) -> None:
    """Has the folder of a run that was cut after a step look as it would after so many."""
    store = CheckpointStore(run / "checkpoints", keep=1)
    first = store.open(1)
    state, (settings, _) = load_controller_state(first), load_compatibility(first)
    journal = run / "journal.jsonl"
    with journal.open() as file:
        lines = [line for _, line in zip(range(state.extra["journal"][0]), file, strict=False)]
    with journal.open("w") as file:
        file.writelines(lines)
        file.writelines(_journal(next(line for line in lines if '"put"' in line), steps, groups))
    mark = [len(lines) + (steps - 1) * (2 * groups + 2), journal.stat().st_size]
    with store.writing(steps) as draft:
        shutil.copytree(run / "checkpoints" / "step-00000001" / "actor", Path(str(draft.folder)) / "actor")
        draft.note("actor", first.files_in("actor"))
        save_controller_state(draft, _later(state, steps - 1, groups, mark), settings)
    assert store.steps() == [steps]
    metrics = run / "metrics.jsonl"
    with metrics.open() as file:
        line = next(line for line in map(json.loads, file) if line["step"] == 1)
    with metrics.open("w") as file:
        file.writelines(json.dumps({**line, "step": step}) + "\n" for step in range(1, steps + 1))
    rollouts, timeline = run / "rollouts" / "step-000001.parquet", run / "timeline" / "attempt-1"
    for step in range(2, steps + 1):
        rollouts.with_name(f"step-{step:06d}.parquet").unlink(missing_ok=True)
        os.link(rollouts, rollouts.with_name(f"step-{step:06d}.parquet"))
    for step in range(STEPS_OF_A_FILE, steps + 1, STEPS_OF_A_FILE):
        os.link(timeline / "step-000000.json", timeline / f"step-{step:06d}.json")


def _journal(put: str, steps: int, groups: int) -> Iterator[str]:
    """Yields the lines of the second step and those that follow, with groups that ended as in the line `put`.

    After the first step WAITING steps' groups are there already.
    """
    ended = put[put.index('"reason"') :]
    for step in range(2, steps + 1):
        taken = list(range((step - 1) * groups, step * groups))
        made = [seq + WAITING * groups for seq in taken]
        head = f'{{"step": {step}, "kind": '
        yield from (f'{head}"admit", "seq": {seq}, "version": {step - 1}}}\n' for seq in made)
        yield from (f'{head}"put", "seq": {seq}, {ended}' for seq in made)
        yield f'{head}"take", "seqs": {taken}}}\n'
        yield f'{head}"publish", "version": {step}, "in_flight": 0}}\n'


def _later(state: ControllerState, steps: int, groups: int, journal: list[int]) -> ControllerState:
    """Returns what a run that was at `state` would have so many steps later. journal: its mark."""
    head, *others = state.ledger
    counts = {name: head[name] + steps * groups for name in ("next_seq", "num_trained")}
    waiting = [[seq + steps * groups, *(one + steps for one in of)] for seq, *of in state.extra["groups"]]
    return dataclasses.replace(
        state,
        step=state.step + steps,
        version=state.version + steps,
        extra={**state.extra, "groups": waiting, "journal": journal},
        ledger=[{**head, **counts}, *({**one, "seq": one["seq"] + steps * groups} for one in others)],
        groups={seq + steps * groups: rows for seq, rows in state.groups.items()},
    )


def go_on(arguments: list[str]) -> tuple[float, float, float]:
    """Runs a command. Returns seconds, CPU seconds, and the most memory that was resident, in MB."""
    source = Path(__file__).parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "rondo", *arguments], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"rondo train ended with {process.returncode}")
    return time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    """Makes both, measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=512, help="of a step; eight answers each")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place, groups = Path(folder), options.groups
        young, old = place / "young", place / "old"
        go_on(command(place, young, groups, WAITING))
        cut(young, 1)
        shutil.copytree(young, old)
        age(old, options.steps, groups)
        print("| steps before | s | CPU s | most resident, MB |\n|---|---|---|---|")
        for _ in range(options.repeat):
            for run, steps in ((young, 1), (old, options.steps)):
                costs = go_on(command(place, run, groups, steps + 1))
                print(f"| {steps:,} | {' | '.join(f'{cost:.1f}' for cost in costs)} |", flush=True)
                cut(run, steps)


if __name__ == "__main__":
    main()
