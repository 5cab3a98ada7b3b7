"""What a run with planted secrets calls: it has them as they are, and looks whether anybody else has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rondo.core.types import Prompt, Trajectory
from rondo.tracking.trackers import TrackerContext

MARK = "planted-"


def judge(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    api_key: str,
    judge_token: str,
    url: str,
    seen: str,
    **rest: Any,
) -> float:
    """Writes down what it was given, and the command lines of all processes that have one of them."""
    lines = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = place.read_bytes()
        except OSError:  # it has ended, or is somebody else's
            continue
        if MARK.encode() in line:
            lines.append(line.decode(errors="replace"))
    given = [api_key, judge_token, url]
    Path(seen).write_text(json.dumps({"given": given, "processes": lines}))
    return float((trajectory.response_ids % 2 == 0).mean())


class Tracks:
    """Keeps the configuration that trackers get, as those do which send it."""

    def __init__(self, context: TrackerContext, *, token: str, url: str) -> None:
        assert (token, url) == (f"{MARK}tracker", f"https://{MARK}user:{MARK}word@h/x?k={MARK}query")
        self.where = str(context.folder.trackers_dir("own"))
        Path(self.where, "config.json").write_text(json.dumps(context.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Any) -> None: ...

    def finish(self, status: str) -> None: ...
