"""A run folder that holds an earlier attempt: is this command the same run, a longer one, or another one by
mistake?
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rondo.config import Config, changes, leaves_of, load
from rondo.core.errors import CheckpointError, ConfigError
from rondo.system.storage import DAMAGE, storing
from rondo.tracking import Console, RunFolder

LENGTH = ("trainer.total_steps", "trainer.epochs", "checkpoint.best")
# Where and how a run runs, and what it tells, may change at will; so may its length and what ends it.
FREE = (
    "trainer.run_dir",
    "trainer.max_restarts",
    "trainer.profile",
    *LENGTH,
    "trainer.evaluation",
    "model.images.check_seen",
    "cluster",
    "tracking",
    "checkpoint",
)


def already_finished(folder: RunFolder, config: Config, console: Console) -> dict[str, Any] | None:
    """Returns the summary of a run that is complete as asked for, or None when there is something to do.

    Settings that differ from those that the folder was made with are said where the run goes on. Raises
    ConfigError where it is finished, and nothing would be trained with them.
    """
    written, summary = folder.path / "config.yaml", folder.path / "summary.json"
    finished = summary.exists()
    if not written.exists() or not (finished or folder.resuming):
        return None
    old = config_of(folder.path)
    changed = differences(old, config)
    length = changes(leaves_of(old, only=LENGTH), leaves_of(config, only=LENGTH), "before")
    if finished and not changed and not length:
        return read_summary(summary)
    if finished and not (length and folder.resuming):
        without = "" if folder.resuming else " It has no checkpoint to go on from (checkpoint.every)."
        raise ConfigError(
            f"{folder.path}: this run is finished, and these settings are others than it was made with:\n"
            + "\n".join(f"  {line}" for line in (*length, *changed))
            + f"\nNothing would be trained with them.{without} Begin another run: trainer.run_dir=…"
        )
    for line in changed:
        console.warn(f"goes on with another setting than it began with: {line}")
    return None


def config_of(run: Path, settings: Mapping[str, Any] = {}) -> Config:
    """Returns the configuration that a run has written into its folder. settings: by key, in the place of
    what it says. Raises CheckpointError where it is damaged.
    """
    path = run / "config.yaml"
    try:
        with storing(path, "read"):
            return load([str(path)], settings=settings).config
    except (ConfigError, UnicodeError) as error:
        raise CheckpointError(
            f"{path} was changed, damaged, or written by another version of rondo: {error}\n"
            f"Put it back (those of earlier attempts are in {run / 'discarded'}), or choose another folder"
        ) from error


def read_summary(path: Path) -> dict[str, Any]:
    """Returns what summary.json says. Raises CheckpointError where it is damaged."""
    try:
        with storing(path, "read"):
            summary = dict(json.loads(path.read_bytes()))
        int(summary["steps"]), dict(summary["eval_before"] or {}), dict(summary["eval_after"] or {})
    except DAMAGE as error:
        raise CheckpointError(
            f"{path}: damaged ({error!r}). Remove it: the same command then writes it again, without "
            "training where there is a checkpoint of the last step"
        ) from error
    return summary


def differences(old: Config, new: Config, *, free: Sequence[str] = ()) -> list[str]:
    """Returns a line for every setting with which two runs are not the same. free: keys that may differ
    besides.
    """
    return changes(leaves_of(old), leaves_of(new), "before", free=(*FREE, *free))
