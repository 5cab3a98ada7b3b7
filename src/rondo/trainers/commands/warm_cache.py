"""Warm starts that this machine has made before, by all that they depend on.

FOLDER/warm_starts/<key>/: a finished warm start, as a run's folder has it. FOLDER: see `storage.kept_folder`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rondo.config import Config, leaves_of
from rondo.core.errors import StorageError, our_folders
from rondo.data.sources import open_sources
from rondo.system.hub import copy_of
from rondo.system.storage import kept_folder, make_folder, sync_path
from rondo.tracking.metrics import versions
from rondo.trainers.program import open_tokenizer, tool_schemas

# What a warm start's export depends on; where it ran, and what it told, makes no difference.
DEPENDS_ON = ("model", "data", "actor", "trainer", "rollout.tools")
_PARTS = ("export", "summary.json", "config.yaml", "metrics.jsonl")


def entry_of(config: Config) -> Path | None:
    """Returns where the warm start of this (settled) recipe is, or would be; None where nothing is kept."""
    folder = kept_folder()
    if folder is None:
        return None
    digest = hashlib.sha256()
    for part in _depends_on(config):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return folder / "warm_starts" / digest.hexdigest()[:24]


def keep(made: Path, entry: Path) -> None:
    """Copies a finished warm start to its entry, unless another run was first. A full disk is no reason to
    end a run: then nothing is kept.
    """
    if entry.exists():
        return
    try:
        make_folder(entry.parent)
        with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".making-") as alone:
            part = Path(alone) / "part"
            part.mkdir()
            for name in _PARTS:
                source = made / name
                (shutil.copytree if source.is_dir() else shutil.copy2)(source, part / name)
            for file in part.rglob("*"):
                sync_path(file)
            part.rename(entry)  # raises where another run was first
    except (OSError, StorageError):
        return


def _depends_on(config: Config) -> Iterator[bytes]:
    """Yields everything by its content: settings, rows, tokenizer, model, and the code that trains."""
    yield _json(leaves_of(config, only=DEPENDS_ON))
    yield _json([config.cluster.device, config.cluster.devices, versions()])
    yield _json(tool_schemas(config))
    for sources in (config.data.train, config.data.eval):
        for source in open_sources(sources) if sources else ():
            yield _json(len(source))
            for row in source.rows:
                yield _json(dict(row))
    tokenizer = open_tokenizer(config)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    yield (_json(tokenizer.get_vocab()) if backend is None else backend.to_str().encode())
    yield _json([tokenizer.chat_template, tokenizer.special_tokens_map])
    ours = [Path(folder) for folder in our_folders()]
    for folder in [*ours, *([copy_of(config.model.path)] if config.model.path else [])]:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                with file.open("rb") as content:
                    yield str(file.relative_to(folder)).encode()
                    yield hashlib.file_digest(content, "sha256").digest()


def _json(value: Any) -> bytes:
    return json.dumps(value, default=repr, sort_keys=True).encode()
