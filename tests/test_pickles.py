"""Whoever writes a pickle may have whoever reads it run code. Each place that reads one stands here, with who
wrote the bytes: never a file, an answer or a message of somebody else.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
OURS = "another process of this run, over a socket pair or Ray's connection"
READS = {
    "rondo/agents/places.py": "its own episode workers, over a pipe",
    "rondo/api/rows.py": "this process, in an unnamed temporary file",
    "rondo/config/functions.py": "the program that the recipe belongs to, which names the file",
    "rondo/controller/remote.py": OURS,
    "rondo/models/shards.py": "anybody: by torch's reader of tensors, which knows the classes of DTensor",
    "rondo/rollout/sglang/worker.py": "its own engine's process, which started it",
    "rondo_sandbox/inside/wire.py": "the host, over a pipe; read in the sandbox (marshal: no code runs)",
    "rondo/training/checkpoint.py": "anybody: by a reader that knows ten classes",
    "rondo/system/actor.py": OURS,
    "rondo/system/forkserver.py": OURS,
    "rondo/system/frames.py": OURS,
}
# What unpickles: by module and name, and what hands objects to others by pickles in collectives.
MODULES = ("pickle", "cloudpickle", "dill", "marshal")
READERS = {
    *(f"{module}.{name}" for module in MODULES for name in ("load", "loads")),
    *("pickle.Unpickler", "torch.load", "joblib.load", "pandas.read_pickle", "shelve.open", "shelve.Shelf"),
}
COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def reads(path: Path) -> list[str]:
    """Returns what of the above a file names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found += [ast.unparse(node), node.attr]
        elif isinstance(node, ast.ImportFrom):
            found += [name for each in node.names for name in (f"{node.module}.{each.name}", each.name)]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":  # numpy's
            if ast.unparse(node.value) != "False":
                found.append("pickle.load")
    return [name for name in found if name in READERS or name in COLLECTIVES]


def test_every_place_that_reads_a_pickle_is_known() -> None:
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if reads(path)}
    assert found == READS.keys()


def test_no_objects_go_through_collectives() -> None:
    """Ranks may be on a network. (torch's own planner of checkpoints does it: SECURITY.md names it.)"""
    for path in SOURCE.rglob("*.py"):
        assert not set(reads(path)) & set(COLLECTIVES), path


@pytest.mark.parametrize(
    "line",
    [
        "import pickle; pickle.loads(b'')",
        "from pickle import load",
        "import torch; torch.load('x')",
        "import torch.distributed as dist; dist.all_gather_object([], 1)",
        "import numpy as np; np.load('x', allow_pickle=True)",
    ],
)
def test_each_way_is_seen(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(line)
    assert reads(tmp_path / "x.py")
