"""The virtual accelerators of benchmarks/async.py, by hand, and the program itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import real_async
from simulation import run_virtual
from virtual_cluster import Accelerator, Rates, Setup, VirtualDevices, rates_of, run

ROOT = Path(__file__).parents[2]
# A decode step takes a second and another for each sequence; a trainer device trains 10 tokens per second.
RATES = Rates(lambda sequences: 1.0 + sequences, slots=2, train_rate=10.0, sync_seconds=3.0)


def test_rates_of_the_default_accelerator_by_hand() -> None:
    one = Accelerator()
    assert one.kv_bytes == 147_456  # 2 × 36 layers × 8 heads × 128 × 2 bytes
    reached = 3.35e12 * 0.7
    assert one.decode_seconds(1, 1000) == pytest.approx(2e-3 + 16.4e9 / reached + 147_456_000 / reached)
    with_256 = 2 * 8.2e9 * 256 / (989e12 * 0.7)  # arithmetic is still less than reading the weights
    assert with_256 < 16.4e9 / reached
    assert one.slots(1000) == 256
    assert one.slots(4000) == int((72e9 - 16.4e9) / (4000 * 147_456)) == 94
    assert one.train_rate() == pytest.approx(989e12 * 0.4 / 8.2e10)
    assert one.sync_seconds() == pytest.approx(0.656)
    rates = rates_of(one, np.array([100, 300]), prompt=50, overhead=2.0)
    assert rates.context == pytest.approx(50 + (100**2 + 300**2) / (100 + 300) / 2)
    assert rates.step_seconds(1) == one.decode_seconds(1, rates.context)


def test_sequences_share_a_device_and_wait_for_slots() -> None:
    """Lengths 2, 4, 3 on two slots: both run to 6 s (2 tokens of 3 s each); then 4's other two beside 3's
    first two to 12 s; then the last token alone, 2 s."""
    lengths = [2, 4, 3]

    async def main() -> tuple[list[float], list[int], float, float]:
        import asyncio

        loop = asyncio.get_running_loop()
        engines = VirtualDevices(RATES, 1, 1, lambda seq, sample: lengths[seq], recompute=False)
        await engines.pause()
        await engines.load(0)
        await engines.resume()
        done = [0.0] * 3

        async def one(seq: int) -> int:
            ref, _ = await engines.run_group(0, seq)
            done[seq] = loop.time() - 3.0
            return int(ref.index.scalars("oldest_version")[0])

        versions = await asyncio.gather(*(one(seq) for seq in range(3)))
        return done, versions, engines.devices[0].busy_seconds, engines.devices[0].tokens

    done, versions, busy, tokens = run_virtual(main())
    assert done == pytest.approx([6, 12, 14])
    assert versions == [0, 0, 0]
    assert busy == pytest.approx(14)
    assert tokens == pytest.approx(9)


def test_a_pause_a_new_version_recomputation_and_a_withdrawal() -> None:
    rates = Rates(lambda n: 1.0, slots=1, train_rate=1.0, sync_seconds=5.0, context=20.0, prefill_rate=10.0)

    async def main() -> tuple[list[float], list[int], float]:
        import asyncio

        loop = asyncio.get_running_loop()
        engines = VirtualDevices(rates, 1, 1, lambda seq, sample: 4, recompute=True)
        await engines.pause()
        await engines.load(0)
        await engines.resume()
        first = asyncio.create_task(engines.run_group(0, 0))
        second = asyncio.create_task(engines.run_group(0, 1))
        third = asyncio.create_task(engines.run_group(0, 2))
        await asyncio.sleep(3)  # three tokens of the first
        await engines.pause()
        await engines.load(1)
        await engines.resume()  # at 13; its cache of 20 tokens takes 2 s, its last token 1 s
        ends, versions = [], []
        for task in (first, second):
            ref, _ = await task
            ends.append(loop.time())
            versions.append(int(ref.index.scalars("oldest_version")[0]))
        await asyncio.sleep(1.5)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        return ends, versions, engines.devices[0].wasted

    ends, versions, wasted = run_virtual(main())
    assert ends == pytest.approx([5 + 3 + 5 + 2 + 1, 16 + 4])
    assert versions == [0, 1]  # the second began under the new weights
    assert wasted == pytest.approx(1.5)


def test_a_synchronous_run_takes_what_its_parts_take() -> None:
    """Two devices, two groups of one sequence of 10 tokens per step: 10 × 2 s, 20 tokens trained at 20 per
    second (colocated: both train) and 3 s for the weights; the last weights count too."""
    colocated = run(Setup(2, 0, 0, "finish", 2, 1, 3), RATES, lambda seq, sample: 10)
    assert colocated.seconds == pytest.approx(3 * (20 + 1 + 3))
    assert colocated.idle == pytest.approx(1 - 21 / 24)
    split = run(Setup(2, 1, 0, "finish", 2, 1, 3), RATES, lambda seq, sample: 10)
    assert split.seconds == pytest.approx(3 * (20 + 2 + 3))
    assert (split.rollout_idle, split.trainer_idle) == pytest.approx((1 - 20 / 25, 1 - 2 / 25))


@pytest.mark.parametrize("on_update", ["finish", "resume", "abort"])
def test_equal_work_and_the_bound_whatever_happens_on_an_update(on_update: str) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1.0, 4096), 1, 400).astype(int)

    def length(seq: int, sample: int) -> int:
        return int(lengths[seq * 4 + sample])

    rates = Rates(lambda n: 0.1, slots=8, train_rate=100.0, sync_seconds=0.1)
    baseline = run(Setup(4, 0, 0, "finish", 8, 4, 8), rates, length)
    made = run(Setup(3, 1, 4, on_update, 8, 4, 8), rates, length)  # type: ignore[arg-type]
    assert baseline.once
    assert made.once
    assert 1 <= made.staleness_max <= 4
    assert (made.wasted > 0) == (on_update == "abort")
    again = run(Setup(3, 1, 4, on_update, 8, 4, 8), rates, length)  # type: ignore[arg-type]
    assert again == made
    if on_update == "resume":
        assert baseline.seconds / made.seconds > 1.5  # the tail no longer stops everybody


def test_the_simulation_of_a_real_run_takes_as_long_as_that_run() -> None:
    """At max_staleness 0: 20 s of episodes, 4 s of publishes, 16 s of what is left, whatever the lengths."""
    base = real_async.Measured(
        max_staleness=0,
        on_update="finish",
        seconds=40.0,
        waited=18.0,  # 2 s of the episodes ran while the loop wrote files
        publish=4.0,
        trainer_busy=0.4,
        rollout_busy=0.5,
        staleness=0.0,
        load=1.0,
    )

    class Lengths:
        def __call__(self, seq: int, sample: int) -> int:
            return 4 + (seq * 8 + sample) % 9

        def mean(self) -> float:
            return float(np.mean([self(seq, sample) for seq in range(64) for sample in range(8)]))

    at_once = real_async.measured_rates(base, 4, Lengths(), "compiled", overlap=False)
    assert run(Setup(1, 1, 0, "finish", 16, 8, 4), at_once, Lengths()).seconds == pytest.approx(40.0)
    beside = real_async.measured_rates(base, 4, Lengths(), "compiled", overlap=True)
    assert base.trainer == 18.0
    assert at_once.train_rate * 16.0 == pytest.approx(beside.train_rate * 18.0)


@pytest.mark.slow
def test_the_program_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "async.json"
    small = "--devices 4 --staleness 0,2 --groups 4 --n 2 --steps 3 --mean 200 --longest 800".split()
    done = subprocess.run(
        [sys.executable, "benchmarks/async.py", *small, "--json", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    rows = json.loads(target.read_text())["rows"]
    assert [(row["trainers"] == 0, row["max_staleness"], row["on_update"]) for row in rows] == [
        (True, 0, "finish"),
        (False, 0, "finish"),
        (False, 2, "finish"),
        (False, 2, "resume"),
    ]
    assert rows[0]["speedup"] == 1.0
    assert done.stdout.count("\n| 4 |") == 4
