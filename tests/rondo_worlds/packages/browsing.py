"""For tests of MiniWoB: who acts at random, and which processes a browser has."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

from rondo.environments import Observation


def any_act(seen: Observation, rng: random.Random) -> str:
    """Clicks, types or selects something that is there."""
    acts = []
    for line in seen.text.split("\n"):
        shown = re.match(r"\[(\d+)\] (\w+)", line)
        if shown is None:
            continue
        acts.append(f"click[{shown[1]}]")
        if shown[2] in ("input_text", "textarea"):
            acts.append(f"type[{shown[1]}] ab{rng.randrange(9)}")
        if " of [" in line:
            acts.append(f"select[{shown[1]}] {rng.choice(json.loads(line.split(' of ')[1]))}")
    return rng.choice(acts or ["nothing"])


def browsers(parent: int) -> dict[int, str]:
    """Command lines of the browsers that this process has started, and of what these have, by process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            said = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"/rondo-chromium-{parent}-" in said:
            found[int(path.name)] = said
    return found


def mains(parent: int) -> list[int]:
    """Those that have the others."""
    return [number for number, said in browsers(parent).items() if " --type=" not in said]


def none_left(parent: int, seconds: float = 20.0) -> bool:
    """Says whether they are all gone before so much time."""
    until = time.monotonic() + seconds
    while browsers(parent) and time.monotonic() < until:
        time.sleep(0.02)
    return not browsers(parent)
