"""The package beside rondo, used by itself."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import asyncio, sys
for name in ("torch", "transformers", "ray", "numpy", "pyarrow"):
    sys.modules[name] = None  # an import of it fails
import rondo_sandbox.command, rondo_sandbox.tool
from rondo_sandbox import open_sandbox

async def main():
    async with await open_sandbox(sys.argv[1]) as sandbox:
        print((await sandbox.run("print(6 * 7)")).stdout)

asyncio.run(main())
"""


def test_it_runs_programs_where_torch_is_absent(backend: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, backend], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "42\n\n"
