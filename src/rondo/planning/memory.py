"""Whether what a run will certainly hold fits the memory: a lower bound, so that none is refused that fits.
What depends on the data (activations, logits, caches beyond one request) is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rondo.core.errors import ConfigError

# Of the least that a process with torch, and a row on the controller, take.
PROCESS_BYTES = 32 << 20
ROW_BYTES = 128
_GIB = 1 << 30


@dataclass(frozen=True)
class Need:
    """What one owner will hold."""

    owner: str
    """Who will hold it, as messages say it."""
    nbytes: int
    """How many bytes it will hold."""
    keys: tuple[str, ...]
    """What to lower."""


def model_bytes(parameters: int, itemsize: float, moments: str | None = None) -> int:
    """Returns what an engine holds of a model: the parameters, and of one that is trained as much for
    gradients, and the two moments of Adam (moments: full or 8bit).
    """
    if moments is None:
        return int(parameters * itemsize)
    moment = 1 if moments == "8bit" else itemsize
    return int(parameters * 2 * (itemsize + moment))


def check_fits(needs: Sequence[Need], free: int, where: str) -> None:
    """Raises ConfigError where the needs together are more than what is free. where: of which memory."""
    total = sum(need.nbytes for need in needs)
    if total <= free:
        return
    ordered = sorted((need for need in needs if need.nbytes), key=lambda need: -need.nbytes)
    listed = ", ".join(f"{need.owner} {need.nbytes / _GIB:,.2f}" for need in ordered)
    raise ConfigError(
        f"this run will hold at least {total / _GIB:,.2f} GiB of {where}, and {free / _GIB:,.2f} GiB are "
        f"free: {listed}; lower {' or '.join(ordered[0].keys)}, or use a machine with more",
        key=ordered[0].keys[0],
    )
