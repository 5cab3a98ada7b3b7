"""A run folder that holds an earlier attempt: is this command the same run, a longer one, or another one by
mistake?
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rondo.config import Config, changes, leaves_of, load
from rondo.errors import ConfigError
from rondo.tracking import Console, RunFolder

# Where and how a run runs, and what it tells, may change at will; so may its length.
FREE = (
    *("trainer.run_dir", "trainer.total_steps", "trainer.epochs", "trainer.evaluation"),
    *("cluster", "tracking", "checkpoint"),
)


def already_finished(folder: RunFolder, config: Config, console: Console) -> dict[str, Any] | None:
    """Returns the summary of a run that is complete as asked for, or None when there is something to do.

    Settings that differ from those that the folder was made with are said where the run goes on; where the
    earlier run is now, when it cannot go on. Raises ConfigError where it is finished: nothing would be
    trained with them.
    """
    if folder.moved_to is not None:
        console.note(f"the earlier run here has no checkpoint to go on from: it is now in {folder.moved_to}")
    written = folder.path / "config.yaml"
    if not folder.resuming or not written.exists():
        return None
    old = load([str(written)]).config
    changed = differences(old, config)
    summary = folder.path / "summary.json"
    same_length = (old.trainer.total_steps, old.trainer.epochs) == (
        config.trainer.total_steps,
        config.trainer.epochs,
    )
    if summary.exists() and same_length:
        if changed:
            raise ConfigError(
                f"{folder.path}: this run is finished, and these settings are others than it was made with:\n"
                + "\n".join(f"  {line}" for line in changed)
                + "\nNothing would be trained with them. Begin another run: trainer.run_dir=…"
            )
        return dict(json.loads(summary.read_text(encoding="utf-8")))
    for line in changed:
        console.warn(f"goes on with another setting than it began with: {line}")
    return None


def differences(old: Config, new: Config, *, free: Sequence[str] = ()) -> list[str]:
    """Returns a line for every setting with which two runs are not the same. free: keys that may differ
    besides.
    """
    return changes(leaves_of(old), leaves_of(new), "before", free=(*FREE, *free))
