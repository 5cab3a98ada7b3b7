"""What asynchrony is worth: the same work with trainer.max_staleness 0, 1, 2, 4, simulated and for real.

    python benchmarks/async.py                          # 8 to 512 virtual accelerators, minutes on one core
    python benchmarks/async.py --devices 64 --lengths runs/mine --train-efficiency 0.3
    OMP_NUM_THREADS=1 python benchmarks/async.py --real --start runs/quickstart/warm_start

Simulated: the real buffer, feeder and publisher on a virtual clock; only the devices are arithmetic
(benchmarks/virtual_cluster.py names the rates and where they come from). The baseline is synchronous and
colocated: all devices generate, then all train. The others give some devices to rollout and the rest to
training; the fastest of a few splits is shown. Each run trains the same prompts, from an empty start to the
last update. Deterministic.

For real: the quickstart with a trainer process and a rollout process, beside what the simulation says for
that set-up with the rates measured in the run at max_staleness 0.

--json writes everything to a file; the tables go to the terminal.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from algorithms import machine
from virtual_cluster import Accelerator, Outcome, Rates, Setup, rates_of, run

ROWS = (  # max_staleness, on_update
    (0, "finish"),
    (1, "finish"),
    (1, "resume"),
    (2, "finish"),
    (2, "resume"),
    (4, "finish"),
    (4, "resume"),
    (4, "abort"),
)
TABLE = 65536  # lengths drawn; a run that needs more sees them again


def drawn_lengths(mean: float, sigma: float, longest: int, seed: int) -> np.ndarray:
    """Log-normal with this mean before it is cut to 1 … longest. int [TABLE]."""
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, TABLE)
    return np.clip(draws, 1, longest).astype(np.int64)


def recorded_lengths(folder: Path, seed: int) -> np.ndarray:
    """Lengths of the responses in a run folder's rollouts/*.parquet, drawn from with replacement."""
    import pyarrow.parquet as pq

    files = sorted((folder / "rollouts").glob("step-??????.parquet"))
    if not files:
        raise SystemExit(f"{folder}/rollouts has no step-*.parquet; was tracking.save_rollouts off?")
    found = np.concatenate([pq.read_table(file, columns=["response_length"])[0].to_numpy() for file in files])
    return np.random.default_rng(seed).choice(found.astype(np.int64), TABLE)


class Lengths:
    """length(seq, sample) from a table."""

    def __init__(self, table: np.ndarray, n: int) -> None:
        self._table, self._n = table.tolist(), n

    def __call__(self, seq: int, sample: int) -> int:
        return int(self._table[(seq * self._n + sample) % len(self._table)])


def splits(devices: int, rates: Rates) -> list[int]:
    """Numbers of rollout devices worth trying, in eighths: where both sides would be equally busy with full
    engines, and two steps towards more rollout (engines that are not full answer sooner)."""
    generate = rates.step_seconds(rates.slots) / rates.slots
    train = 1 / rates.train_rate
    best = min(range(1, 8), key=lambda eighths: max(generate / eighths, train / (8 - eighths)))
    return sorted({max(1, devices * e // 8) for e in range(best, min(best + 3, 8))})


def simulate(
    options: argparse.Namespace, accelerator: Accelerator, table: np.ndarray
) -> Iterator[dict[str, Any]]:
    """A record per number of devices and row: the baseline first."""
    rates = rates_of(accelerator, table, options.prompt, options.overhead)
    length = Lengths(table, options.n)
    for devices in options.devices:
        batch = max(options.groups, devices)
        common = {"batch_size": batch, "n": options.n, "steps": options.steps}
        baseline = run(Setup(devices, 0, 0, "finish", **common), rates, length)
        yield _record(Setup(devices, 0, 0, "finish", **common), baseline, baseline)
        for staleness, on_update in ROWS:
            if staleness not in options.staleness:
                continue
            tried = [
                (run(setup, rates, length), setup)
                for rollouts in options.rollouts or splits(devices, rates)
                for setup in [Setup(rollouts, devices - rollouts, staleness, on_update, **common)]
            ]
            outcome, setup = min(tried, key=lambda pair: pair[0].seconds)
            yield _record(setup, outcome, baseline)


def _record(setup: Setup, outcome: Outcome, baseline: Outcome) -> dict[str, Any]:
    record = dataclasses.asdict(setup) | dataclasses.asdict(outcome)
    record["speedup"] = baseline.seconds / outcome.seconds
    return record


def middle(record: dict[str, Any]) -> float:
    """Seconds per step without the start, when nothing is stale yet, and the end, when nothing new begins."""
    times = record["complete_at"]
    first, last = len(times) // 3, 3 * len(times) // 4
    return (times[last] - times[first]) / (last - first) if last > first else float("nan")


def simulated_row(record: dict[str, Any]) -> str:
    """One line of the Markdown table."""
    devices = record["rollouts"] + record["trainers"]
    colocated = record["trainers"] == 0
    where = "colocated" if colocated else f"{record['rollouts']} + {record['trainers']}"
    cells = [
        str(devices),
        str(record["max_staleness"]),
        "–" if record["max_staleness"] == 0 else record["on_update"],
        where,
        f"{record['seconds'] / record['steps']:.0f}",
        f"{record['speedup']:.2f}",
        f"{middle(record):.0f}",
        f"{record['idle']:.0%}",
        "–" if colocated else f"{record['rollout_idle']:.0%}",
        "–" if colocated else f"{record['trainer_idle']:.0%}",
        f"{record['staleness_mean']:.1f} ({record['staleness_max']})",
        f"{record['wasted']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


SIMULATED_HEAD = (
    "| devices | max_staleness | on update | rollout + trainer | s per step | times as fast "
    "| s per step, middle | idle | rollout idle | trainer idle | staleness: mean (most) | thrown away |\n"
    + "|---" * 12
    + "|"
)


def report_simulation(options: argparse.Namespace) -> dict[str, Any]:
    """Run, print as it goes, return what was made."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Accelerator)}
    accelerator = Accelerator(**given)
    if options.lengths:
        table = recorded_lengths(options.lengths, options.seed)
    else:
        table = drawn_lengths(options.mean, options.sigma, options.longest, options.seed)
    rates = rates_of(accelerator, table, options.prompt, options.overhead)
    full = rates.slots / rates.step_seconds(rates.slots)
    quantiles = np.percentile(table, (50, 90, 99)).astype(int)
    print(
        f"lengths: mean {table.mean():.0f}, median {quantiles[0]}, 90 % {quantiles[1]}, 99 % {quantiles[2]}, "
        f"longest {table.max()}; {options.n} samples per prompt, {options.groups} prompts per step (at least "
        f"one per device), {options.steps} steps\n"
        f"a device: {rates.slots} sequences at once, {full:.0f} tokens/s with all of them, "
        f"{1 / rates.step_seconds(1):.0f} with one; trains {rates.train_rate:.0f} tokens/s; weights in "
        f"{rates.sync_seconds:.2f} s\n\n{SIMULATED_HEAD}",
        flush=True,
    )
    records = []
    for record in simulate(options, accelerator, table):
        records.append(record)
        print(simulated_row(record), flush=True)
    return {"accelerator": dataclasses.asdict(accelerator), "rows": records}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; those of the accelerator have the names of its fields."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--devices", type=numbers, default=[8, 32, 128, 512])
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 2, 4])
    parser.add_argument(
        "--rollouts", type=numbers, default=[], help="rollout devices to try (default: a few)"
    )
    parser.add_argument("--groups", type=int, default=128, help="prompts per step, at least one per device")
    parser.add_argument("--n", type=int, default=16, help="samples per prompt")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mean", type=float, default=2048.0, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal")
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument(
        "--overhead", type=float, default=2.0, help="seconds of a step that no device shortens"
    )
    parser.add_argument("--lengths", type=Path, help="a run folder whose rollouts give the lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    for field in dataclasses.fields(Accelerator):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    parser.add_argument("--real", action="store_true", help="train the quickstart instead of simulating")
    parser.add_argument("--start", type=Path, help="--real: a run folder or export to start from")
    parser.add_argument(
        "--work", type=Path, help="--real: where the runs are kept (default: a temporary folder)"
    )
    parser.add_argument("--real-steps", type=int, default=20)
    parser.add_argument("--place", default="ray", help="--real: ray (two devices), or own (a child process)")
    parser.add_argument("--decode", default="lean", help="--real: lean (about as slow as training), compiled")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, or train; tables to stdout."""
    options = parse(arguments)
    print(machine())
    if options.real:
        from real_async import report_real

        made = report_real(
            options.start, options.work, options.real_steps, options.staleness, options.place, options.decode
        )
    else:
        made = report_simulation(options)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **made}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
