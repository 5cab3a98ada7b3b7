"""The devices that plans are made for: a table of what their data sheets say (devices.tsv), or a file with a
row that `rondo plan --measure` has written.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rondo.core.errors import ConfigError, did_you_mean

TABLE = Path(__file__).with_name("devices.tsv")


class Reached(NamedTuple):
    """Which share of a device's numbers programs reach."""

    products: float = 1.0
    """Of `flops`, in products of matrices."""
    attention: float = 1.0
    """Of `flops`, in attention."""
    memory: float = 1.0
    """Of `bandwidth`."""
    links: float = 1.0
    """Of `link`, `network` and `host`."""


# Of what a data sheet says (docs/plan.md has how far off that is); what was measured is reached.
OF_DATA_SHEET = Reached(0.5, 0.6, 0.65, 0.7)


@dataclass(frozen=True)
class DeviceRow:
    """What one device has, and how fast it is."""

    name: str
    """As `--card` takes it."""
    memory: int
    """Bytes, as sold: what is free is a little less."""
    flops: float
    """Operations a second in bfloat16, dense."""
    flops32: float
    """Operations a second in float32."""
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    """Bytes a second to the other devices of its machine, one direction."""
    network: float
    """Bytes a second to other machines."""
    host: float
    """Bytes a second to the memory of its machine."""
    together: int
    """Devices that `link` connects."""
    source: str
    """Where the numbers are from."""
    launch: float = 6e-6
    """Seconds that the host takes for one operation of torch."""
    is_host: bool = False
    """Whether it is the machine itself, where nothing is launched ahead."""
    reached: Reached = OF_DATA_SHEET
    """Which share of these numbers programs reach."""

    def flops_of(self, itemsize: int) -> float:
        """Returns operations a second with numbers of so many bytes."""
        return self.flops if itemsize < 4 else self.flops32

    def link_over(self, ranks: float) -> float:
        """Returns bytes a second that each of so many ranks with consecutive numbers gets from the others."""
        link = self.link if ranks <= self.together else min(self.link, self.network)
        return link * self.reached.links


def _row_of(row: Mapping[str, str]) -> DeviceRow:
    measured = "launch" in row  # only such rows have it (microseconds), and say whether it is the host
    return DeviceRow(
        row["name"],
        int(float(row["memory_gib"]) * (1 << 30)),
        float(row["flops"]) * 1e12,
        float(row["flops32"]) * 1e12,
        float(row["bandwidth"]) * 1e9,
        float(row["link"]) * 1e9,
        float(row["network"]) * 1e9,
        float(row["host"]) * 1e9,
        int(row["together"]),
        row["source"],
        float(row["launch"]) * 1e-6 if measured else 6e-6,
        row.get("kind") == "host",
        Reached() if measured else OF_DATA_SHEET,
    )


def device_like(description: str, memory: int) -> DeviceRow | None:
    """Returns the row of a device by what its platform calls it ("NVIDIA H200, …") and by its bytes; None
    where there is none: a part of a device, or another kind with that name, has other numbers.
    """
    for name, row in known_devices().items():
        words = name.partition("-")[0].replace("rtx", "rtx ?")
        named = re.search(rf"\b{words}\b", description.lower())
        if named and "pcie" not in description.lower() and abs(memory / row.memory - 1) < 0.1:
            return row
    return None


@functools.cache
def known_devices(table: Path = TABLE) -> Mapping[str, DeviceRow]:
    """Returns the rows of a table."""
    with table.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")
        return {row["name"]: _row_of(row) for row in rows}


def find_device(name: str) -> DeviceRow:
    """Returns a device by its name, or that of a file of `--measure`. Raises ConfigError, which lists those
    that there are.
    """
    table = known_devices()
    if name.endswith(".tsv"):
        try:
            return next(iter(known_devices(Path(name)).values()))
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            raise ConfigError(f"{name}: no row of `rondo plan --measure`: {error!r}") from error
    found = table.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        near = did_you_mean(name.lower(), table)
        raise ConfigError(
            f"there is no card {name!r} in the table{near} There are: {', '.join(table)}; or name a "
            "file (.tsv) that `rondo plan --measure` has written"
        )
    return found
