"""What starting a run costs: one step of the quickstart over the imports that any program with a transformers
model begins with.

    python benchmarks/startup.py [--repeat 5] [--model EXPORT] [KEY=VALUE …]

Each turn runs, one after the other,

    python -c 'import torch; from transformers import Qwen3ForCausalLM'
    rondo train quickstart trainer.total_steps=1 trainer.warm_start=null model.path=EXPORT …

and takes the CPU seconds of each process (user and system, with its children). The run has 4 prompts of 4
responses of at most 16 tokens, no evaluation, no plot, no checkpoint, and a new folder; what the compiled
kernels and Python's byte code need is there from a turn before that does not count
(PYTHONDONTWRITEBYTECODE is not handed on, or every turn would compile rondo's modules). EXPORT: a quickstart
warm start (default: one step of it is trained first; weights do not change what starting costs).
first sign: seconds of wall time until the run has written anything to the console.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

IMPORTS = [sys.executable, "-c", "import torch; from transformers import Qwen3ForCausalLM"]
RONDO = [sys.executable, "-m", "rondo.cli.main"]
SMALL = (
    "trainer.total_steps=1",
    "trainer.warm_start=null",
    "data.batch_size=4",
    "data.eval=[]",
    "trainer.evaluation.every=null",
    "rollout.n=4",
    "rollout.max_tokens=16",
    "actor.mini_batch_size=4",
    "tracking.plot=false",
    "tracking.console=plain",
    "checkpoint.every=null",
)


@dataclass(frozen=True)
class Turn:
    """Of one process."""

    cpu_seconds: float
    wall_seconds: float
    first_sign: float
    """Seconds until it wrote something; until its end where it wrote nothing."""


def turn(command: list[str]) -> Turn:
    """Runs a process to its end. Raises CalledProcessError with what it wrote where it fails."""
    started = time.perf_counter()
    keeps_byte_code = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=keeps_byte_code)
    assert process.stdout is not None
    written = process.stdout.read1(1)  # type: ignore[attr-defined]
    first = time.perf_counter() - started
    written += process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, written.decode())
    return Turn(usage.ru_utime + usage.ru_stime, time.perf_counter() - started, first)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the run")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--model", help="the folder of an exported model")
    args = parser.parse_args()
    imports, runs = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            sft = [*RONDO, "sft", "quickstart_sft", "trainer.total_steps=1", f"trainer.run_dir={folder}/sft"]
            turn(sft)
            model = str(Path(folder) / "sft" / "export")
        for number in range(args.repeat + 1):
            chosen = [f"model.path={model}", f"trainer.run_dir={folder}/run-{number}", *args.settings]
            measured = turn(IMPORTS), turn([*RONDO, "train", "quickstart", *SMALL, *chosen])
            if number:
                imports.append(measured[0])
                runs.append(measured[1])
    ratios = [run.cpu_seconds / alone.cpu_seconds for alone, run in zip(imports, runs, strict=True)]
    print(f"{'':8} {'CPU-s':>6} {'wall':>6} {'first sign':>10}")
    for name, turns in (("imports", imports), ("one step", runs)):
        cpu, wall, first = (
            statistics.median(getattr(one, key) for one in turns)
            for key in ("cpu_seconds", "wall_seconds", "first_sign")
        )
        print(f"{name:8} {cpu:6.2f} {wall:6.2f} {first:10.2f}")
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
