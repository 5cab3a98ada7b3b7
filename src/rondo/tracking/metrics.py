"""The lines of metrics.jsonl, written and read."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rondo.core.errors import DataError

# Key of a metrics line: {metric: "nan" | "inf" | "-inf"} for values that are null in it.
NOT_FINITE = "not_finite"


def metrics_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Returns one JSON line. NaN and infinities are null, and named under `not_finite`.

    Raises DataError on another type.
    """
    record: dict[str, Any] = {"step": int(step)}
    odd: dict[str, str] = {}
    for name, value in metrics.items():
        if name in ("step", NOT_FINITE):
            raise DataError(
                f"a metric cannot be called {name!r}: the line of metrics.jsonl uses that key itself"
            )
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
        elif value is not None and not isinstance(value, bool | str):
            raise DataError(f"metric {name!r} is a {type(value).__name__}; log a number, a string or None")
        if isinstance(value, float) and not math.isfinite(value):
            odd[name] = str(value)
            value = None
        record[name] = value
    if odd:
        record[NOT_FINITE] = odd
    return json.dumps(record, allow_nan=False)


def parse_metrics(path: Path) -> list[tuple[str, dict[str, Any] | None]]:
    """Returns (line with its newline, record) of every line; the record is None where that is no metrics."""
    found = []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith("\n") else None
            except ValueError:
                record = None
            is_metrics = isinstance(record, dict) and isinstance(record.get("step"), int)
            found.append((line, record if is_metrics else None))
    return found


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl`, in order. A last line cut off by a kill is left out.

    Raises DataError naming the file when it is missing, and the line when one in the middle is broken.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{path}: no such file; {run_dir} is not the folder of a run that logged anything")
    lines = parse_metrics(path)
    if lines and lines[-1][1] is None:
        lines.pop()
    for number, (_, record) in enumerate(lines, 1):
        if record is None:
            raise DataError(
                f"{path}:{number}: not a metrics line (a JSON object with an integer `step`); remove it"
            )
    return [record for _, record in lines if record is not None]
