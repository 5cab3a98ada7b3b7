"""The devices that plans are made for: a table of what their data sheets say (devices.tsv)."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rondo.core.errors import ConfigError, did_you_mean

TABLE = Path(__file__).with_name("devices.tsv")


@dataclass(frozen=True)
class DeviceRow:
    """What one device has."""

    name: str
    """As `--card` takes it."""
    memory: int
    """Bytes, as sold: what is free is a little less."""
    flops: float
    """Operations a second in bfloat16, dense."""
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    """Bytes a second to the other devices of its machine, all directions together."""
    source: str
    """Where the numbers are from."""


@functools.cache
def known_devices() -> Mapping[str, DeviceRow]:
    """Returns the table."""
    with TABLE.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")
        return {
            row["name"]: DeviceRow(
                row["name"],
                int(float(row["memory_gib"]) * (1 << 30)),
                float(row["flops"]) * 1e12,
                float(row["bandwidth"]) * 1e9,
                float(row["link"]) * 1e9,
                row["source"],
            )
            for row in rows
        }


def find_device(name: str) -> DeviceRow:
    """Returns a device by its name. Raises ConfigError, which lists those that there are."""
    table = known_devices()
    found = table.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        near = did_you_mean(name.lower(), table)
        raise ConfigError(f"there is no card {name!r} in the table{near} There are: {', '.join(table)}")
    return found
