"""What the checks say of runs that are as they should be: nothing, or it is a false alarm.

    OMP_NUM_THREADS=1 python benchmarks/algorithms.py --work runs/algorithms      # an hour or more
    python benchmarks/false_alarms.py runs/algorithms

Reads all finished runs FOLDER/<recipe>_<seed>, each of which learns from nothing, and writes into
docs/trust.md how many there were, and what was said of which: before the first step, and by today's checks of
its metrics.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
from pathlib import Path

from rondo.tracking import Health, read_metrics

PAGE = Path(__file__).parents[1] / "docs" / "trust.md"
BEGIN, END = "<!-- benchmarks/false_alarms.py writes what follows -->\n", "<!-- to here -->"


def read(folder: Path) -> tuple[dict[str, list[int]], int, list[str]]:
    """Returns the seeds of each recipe, how many steps there were in all, and a line for each finding."""
    seeds: dict[str, list[int]] = {}
    steps, found = 0, []
    for file in sorted(folder.glob("*/summary.json")):
        named = re.fullmatch(r"(\w+)_(\d+)", file.parent.name)
        if named is None:
            continue
        summary = json.loads(file.read_text(encoding="utf-8"))
        seeds.setdefault(named[1], []).append(int(named[2]))
        steps += summary["steps"]
        said = [one["says"] for one in summary["checks"] if not one["step"]]
        health = Health()
        for line in read_metrics(file.parent):
            said += [one.says for one in health.add(line)]
        found += [f"`{named[1]}`, seed {named[2]}: {one}" for one in said]
    return seeds, steps, found


def written(seeds: dict[str, list[int]], steps: int, found: list[str], when: str) -> str:
    """Returns the lines of the page."""
    runs = sum(len(own) for own in seeds.values())
    named = ", ".join(
        f"`{name}`" + ("" if len(own) == 3 else f" ({len(own)})") for name, own in seeds.items()
    )
    told = "\n".join(f"- {one}" for one in found) or "None of the checks said anything."
    return f"{when}: {runs} runs, {steps} steps, of three seeds each: {named}.\n\n{told}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    seeds, steps, found = read(parser.parse_args().folder)
    if not seeds:
        raise SystemExit("there is no finished run; benchmarks/algorithms.py makes them")
    when = f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}"
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, PAGE
    PAGE.write_text(f"{before}{BEGIN}{written(seeds, steps, found, when)}{END}{after}", encoding="utf-8")
    print("\n".join(found) or f"{sum(map(len, seeds.values()))} runs, no finding")


if __name__ == "__main__":
    main()
