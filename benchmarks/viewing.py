"""What `rondo view` costs with a run of 100,000 rollouts in 840 step files: the first page, filters, memory.

    python benchmarks/viewing.py [--steps 840] [--rows 119] [--asked 40]

A made-up run (no model): answers of 100 to 3,000 characters, curves of 30 metrics. In a real Chromium (`apt
install chromium`): the time from opening the address to drawn curves, with no index yet; then that of filters
and orders over all rollouts, each asked as the page asks; and the most memory that the server ever had.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rondo.tracking.metrics import metrics_line

WORDS = "the sum of two numbers is then twelve so we add four and five which gives nine therefore".split()
ASKED = (
    {"text": "four and five"},
    {"text": "nowhere to be found"},
    {"text": "ANSWER: 7", "order": "best"},
    {"least": ".5", "shortest": "200", "order": "longest"},
    {"most": ".1", "from": "100", "to": "700", "order": "worst"},
    {"tool": "calculator"},
    {"source": "geometry", "text": "therefore"},
    {"outcome": "failed"},
    {"step": "420"},
    {"order": "shortest"},
)
"""Filters and orders, as a page asks for them."""


def answer(rng: random.Random, prompt: int) -> str:
    """Returns an answer of 100 to 3,000 characters."""
    length, text = rng.randint(100, 3000), " ".join(rng.choices(WORDS, k=40))
    return (text * (1 + length // len(text)))[:length] + f"\nAnswer: {prompt}"


def table(step: int, rows: int) -> pa.Table:
    """Returns the rollouts of a step: groups of 8."""
    rng = random.Random(step)
    made: list[dict[str, Any]] = []
    for row in range(rows):
        prompt, failed = step * 100 + row // 8, rng.random() < 0.01
        said, called = answer(rng, prompt), rng.random() < 0.3
        call = '[policy] {"name": "calculator", "arguments": {}}\n[tool] 9\n[policy] '
        length = len(said) // 4
        made.append(
            {
                "row_id": step * rows + row, "trajectory_id": f"train/made/{step}/{row}", "step_index": 0,
                "prompt_id": f"made/0/{prompt}", "source": ("algebra", "geometry")[prompt % 2],
                "sample_index": row % 8, "oldest_version": max(0, step - 1 - rng.choice((0, 0, 1, 2))),
                "finish_reason": "length" if length > 700 else "stop", "response_length": length,
                "outcome": "failed" if failed else "scored", "failure": "made to" if failed else "",
                "reward": math.nan if failed else rng.random(), "score/made": rng.random(),
                "prompt_text": f"Question {prompt}: {' '.join(WORDS)}?", "text": said,
                "transcript": call + said if called else f"[policy] {said}",
                "response_ids": list(range(length)), "response_mask": [1] * length,
                "rollout_log_probs": [-0.5] * length, "policy_versions": [step - 1] * length,
            }
        )  # fmt: skip
    return pa.Table.from_pylist(made)


def make_run(folder: Path, steps: int, rows: int) -> None:
    """Writes a run's folder: metrics, settings, rollouts."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"trainer:\n  total_steps: {steps}\n")
    lines = []
    for step in range(1, steps + 1):
        numbers = {f"made/{number}": math.sin(step / (number + 5)) for number in range(26)}
        usual = {"reward/mean": step / steps, "actor/entropy": 1 / step, "actor/grad_norm": 1.0}
        lines.append(metrics_line(step, {**usual, "timing/step_s": 3.0, **numbers}))
        pq.write_table(table(step, rows), folder / "rollouts" / f"step-{step:06d}.parquet")
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def get(address: str, view: str, query: dict[str, str]) -> tuple[float, Any]:
    """Returns the seconds of an answer, and the answer."""
    began = time.perf_counter()
    with urllib.request.urlopen(f"{address}{view}?{urllib.parse.urlencode(query)}") as found:
        body = found.read()
    return time.perf_counter() - began, json.loads(body)


def peak_mib(pid: int) -> float:
    """Returns the most memory that a process has had resident."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 1024


def first_page(address: str) -> float:
    """Returns the seconds from opening the address to drawn curves."""
    from rondo_worlds.chromium import Page, find_chromium

    page = Page(find_chromium("chromium"))
    try:
        began = time.perf_counter()
        page.open(address)
        while not page.evaluate("document.querySelectorAll('.plot .main-svg').length > 2"):
            time.sleep(0.01)
        return time.perf_counter() - began
    finally:
        page.close()


def typed_filter(address: str, run: str, rows: int) -> tuple[float, float]:
    """Returns the seconds from opening the list of all rollouts to its first page, and from the last key of a
    search for text to what was found: `rows` at first, and fewer then.
    """
    from rondo_worlds.chromium import Page, find_chromium

    page, total = Page(find_chromium("chromium")), "document.querySelector('[role=status] b')?.textContent"
    try:
        began = time.perf_counter()
        page.open(f"{address}#/rollouts?run={urllib.parse.quote(run, safe='')}")
        while page.evaluate(total) != f"{rows} trajectories":
            time.sleep(0.01)
        opened = time.perf_counter() - began
        page.evaluate("document.querySelector('input[type=search]').focus()")
        page.type("answer: 420")
        began = time.perf_counter()
        while page.evaluate(total) == f"{rows} trajectories":
            time.sleep(0.01)
        return opened, time.perf_counter() - began
    finally:
        page.close()


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=840)
    parser.add_argument("--rows", type=int, default=119, help="of a step")
    parser.add_argument("--asked", type=int, default=40, help="how many times filters are asked for")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        run = Path(made) / "run"
        make_run(run, args.steps, args.rows)
        command = [sys.executable, "-m", "rondo", "view", str(run)]
        environ = os.environ | {"XDG_CACHE_HOME": f"{made}/cache"}
        began = time.perf_counter()
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            print(f"the command, until it says its address: {time.perf_counter() - began:.2f} s")
            print(f"first page: {first_page(address):.2f} s")
            seconds, _ = get(address, "rollouts", {"run": str(run)})
            print(f"first list of rollouts: {seconds:.2f} s")
            began = time.perf_counter()
            while get(address, "rollouts", {"run": str(run)})[1]["state"]["read"] < args.steps:
                time.sleep(0.2)
            print(
                f"all {args.steps * args.rows:,} rollouts in the index: {time.perf_counter() - began:.1f} s"
            )
            took = [
                get(address, "rollouts", {"run": str(run), **ASKED[number % len(ASKED)]})[0]
                for number in range(args.asked)
            ]
            worst = statistics.quantiles(took, n=20)[-1]
            print(f"filters: median {1e3 * statistics.median(took):.0f} ms, 95 %: {1e3 * worst:.0f} ms")
            opened, found = typed_filter(address, str(run), args.steps * args.rows)
            print(f"in the browser: the list of all {opened:.2f} s, a text that was typed {found:.2f} s")
            size = sum(path.stat().st_size for path in Path(made, "cache").rglob("*.sqlite"))
            print(f"server: at most {peak_mib(server.pid):.0f} MiB resident; index {size / 2**20:.0f} MiB")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
