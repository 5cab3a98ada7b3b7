"""`python -m tests.engines.beside_cards ARGUMENTS…`: `rondo ARGUMENTS…` with vLLM or SGLang for CPUs beside a
trainer on cards in host memory (`tests/host_card`), which those engines' builds for CUDA cannot use.

Replaced are the check that an engine was built for the run's device, and that device in the engine's own
process. All between them is what engines on cards have: weights come from the trainer's cards through the
host's memory.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from rondo.cli.main import main
from rondo.rollout.build import CLASSES, third_party
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.server.child import EngineServer


class OnTheHost(EngineServer):
    """An engine on the CPU, whatever device its host says."""

    def __init__(self, spec: EngineSpec) -> None:
        spec = replace(spec, device="cpu")
        os.environ.update(third_party(spec.engine).environment(spec))
        super().__init__(spec)


def python_without_cards(python: str, folder: Path) -> str:
    """Writes an interpreter of that environment whose engines are `OnTheHost`; returns its path."""
    ours, theirs = (f"{one.__module__}:{one.__qualname__}" for one in (OnTheHost, EngineServer))
    path = folder / "python"
    path.write_text(
        '#!/bin/bash\nunset "${!RONDO_HOST_CARD@}"\n'
        f'exec {os.path.abspath(python)} "${{@/#{theirs}/{ours}}}"\n'
    )
    path.chmod(0o755)
    return str(path)


if __name__ == "__main__":
    for name in CLASSES:
        type(third_party(name)).check_build = lambda *_: None  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
