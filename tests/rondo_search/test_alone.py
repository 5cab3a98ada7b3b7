"""The package beside rondo, used by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
for name in ("torch", "transformers", "ray", "pyarrow"):
    sys.modules[name] = None  # an import of it fails
import rondo_search.command, rondo_search.tool
from rondo_search import index_of
index = index_of(sys.argv[1])
print([(hit.passage.id, hit.passage.title) for hit in index.search("star", 2)])
"""


def test_it_searches_where_torch_is_absent(corpus: str, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, corpus], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[('1', 'Sun'), ('4', '')]\n"
