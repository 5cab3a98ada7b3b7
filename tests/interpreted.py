"""Kernels in triton on a machine without a device: run by its interpreter, and compiled by its own ptxas.

What triton interprets is decided where it is imported, so a process of its own runs a test file once more,
with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_TRITON = importlib.util.find_spec("triton") is None
interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 is not set")
needs_triton = pytest.mark.skipif(INTERPRETED or NO_TRITON, reason="needs triton")


def run_interpreted(file: str) -> None:
    """Runs a test file in triton's interpreter, without its tests that interpret or compile by name."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    command += ["-k", "not interpreter and not compile"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout


def check_compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    options: Mapping[str, int],
    *,
    multiplies: bool,
    most_shared: int,
    multiples_of_16: Collection[str] = (),
) -> None:
    """Compiles a kernel to machine code for devices of a compute capability, by triton's own ptxas: with
    tensor cores where it multiplies in half precision, no TensorFloat-32, no atomics, and no more shared
    memory than a program may have there.

    types: of all parameters but the constants; pointers are aligned to 16 bytes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    even = [name for name in kernel.arg_names if signature[name].startswith("*") or name in multiples_of_16]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
    asked = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(asked, target=GPUTarget("cuda", capability, 32), options=dict(options))
    ptx = made.asm["ptx"]
    assert ("mma" in ptx) == multiplies
    assert "tf32" not in ptx
    assert "atom" not in ptx
    assert made.metadata.shared <= most_shared
    assert made.asm["cubin"]
