"""Memory that is freed goes back where somebody else waits for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Large blocks with small ones between them; the large ones are freed.
PROGRAM = """
import ctypes, sys
from rondo.system.usage import give_back_free_memory, give_back_large_blocks
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
def made(mib):
    block = library.malloc(mib << 20)
    ctypes.memset(block, 1, mib << 20)
    return block
def resident():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) // 1024
if sys.argv[1] == "blocks":
    give_back_large_blocks()
library.free(made(31))  # from here on glibc keeps blocks of this size in its heap, unless it was told
before = resident()
blocks = [(made(16), made(1)) for _ in range(20)]
for large, _ in blocks:
    library.free(large)
freed = resident() - before
if sys.argv[1] == "memory":
    give_back_free_memory()
print(freed, resident() - before)
"""


def resident(how: str) -> list[int]:
    """Returns MiB beside those of before, when the large blocks are free, and at the end."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, env=os.environ
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
def test_what_is_free_between_small_blocks_goes_back() -> None:
    kept, still = resident("as it is")
    assert kept == still == pytest.approx(20 * 16 + 20, abs=9)
    assert resident("memory") == [kept, pytest.approx(20, abs=9)]
    assert resident("blocks")[0] == pytest.approx(20, abs=9)
