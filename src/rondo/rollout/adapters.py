"""Adapters that come by themselves, in an engine that serves several versions of them at one time: each is a
folder of peft's format under a name of its own, and stays until the last request that began with it ends.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from rondo.models.lora import CONFIG, WEIGHTS, AdapterSet


@dataclass(frozen=True)
class Served:
    """Adapters as an engine has them."""

    number: int
    """From 1, never given twice in an engine's life: engines know adapters by it and by the name, and would
    go on with the old ones."""
    version: int
    """The policy version."""
    folder: Path
    """Where they lie as files, as an engine reads them."""

    @property
    def name(self) -> str:
        return f"adapters-{self.number}"


class Shelf:
    """The adapters of one engine. Not for several threads at once.

    folder: where to make a temporary one; None: the machine's.
    """

    def __init__(self, adapters: AdapterSet, folder: str | None) -> None:
        self._adapters = adapters
        self._folder = Path(tempfile.mkdtemp(prefix="rondo-adapters-", dir=folder))
        self._came: dict[str, torch.Tensor] = {}
        self._made = 0
        self._users: Counter[Served] = Counter()
        # What new requests begin with; None: nothing has come yet.
        self.current: Served | None = None

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copies A or B of the version that is arriving."""
        self._came[name] = tensor.clone()

    def write(self, version: int) -> Served:
        """Writes what has come to a folder; not yet for new requests."""
        self._made += 1
        served = Served(self._made, version, self._folder / str(self._made))
        served.folder.mkdir()
        modules = sorted(one.module for one in self._adapters.by_weight.values())
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._adapters.rank,
            "lora_alpha": self._adapters.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        }
        (served.folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        save_file(self._came, served.folder / WEIGHTS, metadata={"format": "pt"})
        self._came = {}
        return served

    def serve(self, served: Served) -> list[Served]:
        """Gives these to new requests. Returns those that no request uses any more."""
        before, self.current = self.current, served
        return [] if before is None or self._users[before] else [self._removed(before)]

    def begin(self) -> Served:
        """Returns what a request begins with, which is there until its `end`."""
        assert self.current is not None
        self._users[self.current] += 1
        return self.current

    def end(self, served: Served) -> list[Served]:
        """Notes that a request has ended. Returns those that no request uses any more."""
        self._users[served] -= 1
        if self._users[served]:
            return []
        del self._users[served]
        return [] if served == self.current else [self._removed(served)]

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _removed(self, served: Served) -> Served:
        shutil.rmtree(served.folder, ignore_errors=True)
        return served
