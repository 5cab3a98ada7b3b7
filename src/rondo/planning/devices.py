"""The devices that plans are made for: a table of what their data sheets say (devices.tsv), or a file with a
row that `rondo plan --measure` has written.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rondo.core.errors import ConfigError, did_you_mean
from rondo.planning.memory import GIB

TABLE = Path(__file__).with_name("devices.tsv")
NEAR_BYTES, FAR_BYTES = 1 << 27, 1 << 30  # of weights that `--measure` has such products read
DECODED_ROWS = 64  # with which `--measure` measures the native engine's products, beside one
KEPT_BLOCK = 32 << 20  # glibc's largest threshold for memory of its own (M_MMAP_THRESHOLD)
# What reading a file raises that holds something else than rows.
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error)


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
    fresh: float | None = None
    """Bytes a second of passes over a host's memory whose results are new memory, which the system fills with
    zeros first; None: as `bandwidth`."""
    decode: float | None = None
    """Operations a second of the native engine's own kernels in float32; None: it has none there."""
    reads: float | None = None
    """Bytes a second of weights that these kernels read, of a model of NEAR_BYTES."""
    far: float | None = None
    """The same of one of FAR_BYTES, which not even caches that processors share hold; None: as `reads`."""

    def flops_of(self, itemsize: int) -> float:
        """Returns operations a second with numbers of so many bytes."""
        return self.flops if itemsize < 4 else self.flops32

    def passing(self, nbytes: float) -> float:
        """Returns bytes a second of passes over memory, whose results have so many bytes each. The C library
        keeps freed blocks of up to 32 MiB for the next ones; larger ones are new each time.
        """
        known = self.bandwidth if self.fresh is None or nbytes <= KEPT_BLOCK else self.fresh
        return known * self.reached.memory

    def reading(self, nbytes: float) -> float | None:
        """Returns `reads` for a model of so many bytes: between the two the time of a byte grows by the
        logarithm of all of them.
        """
        if self.reads is None or self.far is None:
            return self.reads
        share = math.log(max(nbytes, 1.0) / NEAR_BYTES) / math.log(FAR_BYTES / NEAR_BYTES)
        share = min(1.0, max(0.0, share))
        return 1 / ((1 - share) / self.reads + share / self.far)

    def link_over(self, ranks: float) -> float:
        """Returns bytes a second that each of so many ranks with consecutive numbers gets from the others."""
        link = self.link if ranks <= self.together else min(self.link, self.network)
        return link * self.reached.links


# Columns of a measured row that are numbers, by field of the row: what one of the column's unit is.
_UNITS: Mapping[str, float] = {
    "flops": 1e12,
    "flops32": 1e12,
    "bandwidth": 1e9,
    "fresh": 1e9,
    "decode": 1e12,
    "reads": 1e9,
    "far": 1e9,
    "link": 1e9,
    "network": 1e9,
    "host": 1e9,
    "launch": 1e-6,
}


def _row_of(row: Mapping[str, str]) -> DeviceRow:
    measured = "launch" in row  # only such rows have it, and say whether it is the host
    found = {column: float(row[column]) * unit for column, unit in _UNITS.items() if row.get(column)}
    memory, together = int(float(row["memory_gib"]) * GIB), int(row["together"])
    if min(memory, together, *found.values()) <= 0:
        raise ValueError("a number is not above 0")
    return DeviceRow(
        row["name"],
        memory,
        **found,
        together=together,
        source=row["source"],
        is_host=row.get("kind") == "host",
        reached=Reached() if measured else OF_DATA_SHEET,
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


def _rows_in(table: Path) -> Mapping[str, DeviceRow]:
    with table.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(
            (line for line in lines if not line.startswith("#")), delimiter="\t", quoting=csv.QUOTE_NONE
        )
        return {row["name"]: _row_of(row) for row in rows}


@functools.cache
def known_devices() -> Mapping[str, DeviceRow]:
    """Returns the rows of the table."""
    return _rows_in(TABLE)


def row_text(row: DeviceRow) -> str:
    """Returns a measured row as a file has it."""
    columns = {"name": row.name, "memory_gib": f"{row.memory / GIB:.6g}"}
    for column, unit in _UNITS.items():
        found = getattr(row, column)
        columns[column] = "" if found is None else f"{found / unit:.4g}"
    columns["together"], columns["source"] = str(row.together), row.source
    columns["kind"] = "host" if row.is_host else "card"
    return "".join("\t".join(line) + "\n" for line in (columns, columns.values()))


def measured_row(path: Path) -> DeviceRow:
    """Returns the row of a file of `--measure`. Raises ConfigError where it has none."""
    try:
        (row,) = _rows_in(path).values()
        if row.reached != Reached():
            raise ValueError("it is of a data sheet")
    except _DAMAGE as error:
        raise ConfigError(f"{path}: no row of `rondo plan --measure`: {error!r}") from error
    return row


def find_device(name: str) -> DeviceRow:
    """Returns a device by its name, or that of a file of `--measure`. Raises ConfigError, which lists those
    that there are.
    """
    table = known_devices()
    if name.endswith(".tsv"):
        return measured_row(Path(name))
    found = table.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        near = did_you_mean(name.lower(), table)
        raise ConfigError(
            f"there is no card {name!r} in the table{near} There are: {', '.join(table)}; or name a "
            "file (.tsv) that `rondo plan --measure` has written"
        )
    return found
