"""kernels.c as Python calls it: its records and functions; compiled once per machine, and loaded from the
user's cache folder (named by content).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from rondo.core.errors import RolloutError
from rondo.system.storage import cache_folder, is_ours

SOURCE = Path(__file__).with_name("kernels.c")
# No -ffast-math: it would drop the C code's test for logits that are not finite.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno")

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")
# The C products of a layer, each of these linear layers of `lean.LayerWeights`.
PRODUCTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
_LAYER_POINTERS = (*NORMS, *PRODUCTS, *(f"{name}_bias" for name in PRODUCTS), "keys", "values")


class Layer(ctypes.Structure):
    """The addresses of one layer: its weights, and its part of the cache."""

    _fields_ = [(name, _POINTER) for name in _LAYER_POINTERS]


class Model(ctypes.Structure):
    """Sizes and addresses of a whole model."""

    _fields_ = [
        *(
            (name, _INT)
            for name in "hidden heads kv_heads head_dim intermediate vocab num_layers capacity".split()
        ),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, _POINTER) for name in "embedding cos sin final_norm head head_bias layers".split()),
    ]


TABLE_COLUMNS = "seeds indices top_k temperature top_p min_p".split()


class Decoding(ctypes.Structure):
    """The addresses of the slot table's columns that a decode step reads."""

    _fields_ = [(name, _POINTER) for name in TABLE_COLUMNS]


def compiler() -> str | None:
    """Returns the path of the C compiler: $CC, or cc, gcc, clang; None where there is none."""
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the kernels, compiled if need be. Raises RolloutError with the compiler's message."""
    command = compiler()
    if command is None:
        raise RolloutError(
            "no C compiler (cc, gcc or clang) found; install one, or set rollout.engine.decode=lean"
        )
    key = hashlib.sha256("\0".join((SOURCE.read_text(), command, *FLAGS, _processor())).encode()).hexdigest()[
        :24
    ]
    path = cache_folder() / f"kernels-{key}.so"
    if not is_ours(path):  # or there is none
        _compile(command, path)
    try:
        return _declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise RolloutError(
            f"the compiled kernels {path} cannot be loaded: {error}; delete the file"
        ) from error


def zeros_in_huge_pages(*shape: int) -> torch.Tensor:
    """Returns float32 zeros, in pages of 2 MiB where the kernel grants them. A decode step reads all weights
    once; with pages of 4 KiB it spends a tenth of its time on looking up where they are.
    """
    memory = mmap.mmap(-1, 4 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def random_product(rows: int, inputs: int, columns: int) -> Callable[[], object]:
    """Returns a call of one product, [rows, inputs] × [inputs, columns], of random numbers."""
    kernels = library()
    left, weights, out = torch.rand(rows, inputs), torch.rand(columns, inputs), torch.empty(rows, columns)
    packed = zeros_in_huge_pages(-(-columns // kernels.rondo_panel()), inputs, kernels.rondo_panel())
    kernels.rondo_pack(weights.data_ptr(), columns, inputs, packed.data_ptr(), 0)

    def call() -> torch.Tensor:
        kernels.rondo_gemm(left.data_ptr(), packed.data_ptr(), rows, inputs, columns, out.data_ptr())
        return out

    return call


def give_back(tensor: torch.Tensor) -> None:
    """Gives the memory of `zeros_in_huge_pages` back; the tensor stays where it is, and is all zeros."""
    if sys.platform == "linux":  # elsewhere the advice means something else
        # Through libc, as the tensor holds its mapping, and not the other way round.
        advised = ctypes.CDLL(None).madvise(_POINTER(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), 4)
        assert advised == 0, "MADV_DONTNEED"


def _compile(command: str, path: Path) -> None:
    """Compiles into a temporary name first: another process may be doing the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        arguments = [command, *FLAGS, "-o", str(out), str(SOURCE), "-lm"]
        result = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RolloutError(f"compiling {SOURCE} failed ({' '.join(arguments)}):\n{result.stderr[-2000:]}")
        out.chmod(0o700)
        os.replace(out, path)


def _processor() -> str:
    """Returns what -march=native depends on; a shared home folder serves different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.rondo_lanes.restype = library.rondo_panel.restype = library.rondo_page.restype = _INT
    library.rondo_pack.argtypes = [_POINTER, _INT, _INT, _POINTER, _INT]
    library.rondo_pack.restype = None
    library.rondo_gemm.argtypes = [_POINTER, _POINTER, _INT, _INT, _INT, _POINTER]
    library.rondo_gemm.restype = None
    library.rondo_copy.argtypes = [_POINTER, _INT, _INT, _INT]
    library.rondo_copy.restype = None
    library.rondo_scratch_floats.argtypes = [_POINTER]
    library.rondo_scratch_floats.restype = _INT
    library.rondo_step.argtypes = [_POINTER, _POINTER, _INT, *([_POINTER] * 7)]
    library.rondo_step.restype = _INT
    return library
