"""The Python side of the host card: what `torch.cuda` does, fused kernels, graphs, and counts.

sitecustomize.py loads this module under a name of its own in every process that imports torch on the card;
tests get it by `card()`. README.md says what the card does not know.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CAPABILITY = (9, 0)
NAME = "Host card"
SOURCE = f"{os.sep}src{os.sep}"
SELF = __file__


def _extension() -> Any:
    spec = importlib.util.spec_from_file_location("rondo_host_card", os.environ["RONDO_HOST_CARD"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ext = _extension()


# ---- counts ------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What ran on the cards, in this process."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Ops by name. One may be several kernels on a card; views and empty tensors are none."""
    bytes: int = 0
    """What all of them read and write: arguments and results."""
    replays: int = 0
    """Of captured graphs; what is in them is not counted again."""
    reads: Counter[str] = field(default_factory=Counter)
    """Where the host waits for the card, by the line that asks for it: values, sizes, copies out, waits."""
    copies_in: Counter[str] = field(default_factory=Counter)
    """Copies to the card that wait, likewise."""
    copies: Counter[str] = field(default_factory=Counter)
    """Those that do not wait, by kind: "in, async" and "out, async" (pinned memory), "in, staged" (other)."""
    pinned: int = 0
    """Allocations of pinned memory."""
    collectives: Counter[str] = field(default_factory=Counter)
    """By name."""
    collective_bytes: int = 0

    @property
    def stalls(self) -> int:
        """Returns how often the host waits."""
        return self.reads.total() + self.copies_in.total()


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Counts what runs within; the numbers are there at the end. Not within another one."""
    counts = Counts()

    def stalled(kind: str, name: str, _: int) -> None:
        (counts.reads if kind == "read" else counts.copies_in)[f"{name} at {_line()}"] += 1

    ext.begin_counts(stalled)
    try:
        yield counts
    finally:
        for (kind, name), (times, size) in ext.end_counts().items():
            if kind == "kernel":
                counts.kernels[name] += times
                counts.bytes += size
            elif kind == "replay":
                counts.replays += times
            elif kind == "pinned":
                counts.pinned += times
            elif kind == "collective":
                counts.collectives[name] += times
                counts.collective_bytes += size
            elif kind.startswith("copy ") and kind != "copy in":
                counts.copies[kind.removeprefix("copy ")] += times


def _line() -> str:
    """Returns the innermost line of src/ that is being executed, else that of anything but torch."""
    frame, other = sys._getframe(1), "a thread without Python"
    while frame is not None:
        path = frame.f_code.co_filename
        if SOURCE in path:
            return f"{path.rpartition(SOURCE)[2]}:{frame.f_lineno}"
        if other == "a thread without Python" and path != SELF and f"{os.sep}torch{os.sep}" not in path:
            other = f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other


# ---- streams and graphs ------------------------------------------------------------------------------------


class Event:
    """Has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> Event:
        return self

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        ext.stall("read", "Event.synchronize", 0)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    """There is one per card, in which everything has happened."""

    cuda_stream = native_handle = stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", _index(device))
        self.device_index = self.device.index
        self._within: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return ext.capturing()

    def synchronize(self) -> None:
        ext.stall("read", "Stream.synchronize", 0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class CUDAGraph:
    """The ops of a capture, which a replay does again into the same tensors."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._ops: list[tuple[Any, Any, Any, Any]] = []

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def reset(self) -> None:
        self._ops = []

    def replay(self) -> None:
        ext.note("replay", "graph", 0)
        ext.silence(True)
        try:
            for op, args, kwargs, results in self._ops:
                for old, new in zip(_tensors(results), _tensors(op(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        finally:
            ext.silence(False)


class _Capture(TorchDispatchMode):
    """Records ops. They run, for their shapes, but a card only writes them down: what they changed is put
    back at the end, and what they returned holds no numbers until a replay.
    """

    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph
        self._fresh: list[torch.Tensor] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {one.untyped_storage().data_ptr() for one in _tensors([args, list(kwargs.values())])}
        for value, argument in zip(args, op._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        if "out" in kwargs:
            self._keep(kwargs["out"])
        results = op(*args, **kwargs)
        self._graph._ops.append((op, args, kwargs, results))
        made = [one for one in _tensors(results) if one.untyped_storage().data_ptr() not in given]
        self._fresh += [one for one in made if one.is_cuda and one.numel()]
        return results

    def _keep(self, value: Any) -> None:
        for tensor in _tensors(value):
            address = tensor.untyped_storage().data_ptr()
            known = self._before.keys() | {one.untyped_storage().data_ptr() for one in self._fresh}
            if address not in known:
                whole = tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._before[address] = (whole, whole.clone())

    def forget(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)
        for tensor in self._fresh:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


@contextlib.contextmanager
def capture(
    graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """`torch.cuda.graph`."""
    recorder, everywhere = _Capture(graph), capture_error_mode == "global"
    ext.capture(True, everywhere)
    try:
        with recorder:
            yield
    finally:
        ext.capture(False, everywhere)
    recorder.forget()


# ---- fused kernels -----------------------------------------------------------------------------------------


def fused(name: str, reference: Callable[..., Any]) -> None:
    """Registers one op of a card, which a CPU build has no kernel for: `reference` computes it from tensors
    in host memory. It counts as one kernel; its bytes are those of its arguments and results.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = _tensors(args)
        assert all(one.is_cuda for one in given), f"{name} takes tensors on a card"
        results = reference(*(ext.host(a) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        ext.note("kernel", f"aten::{name}", sum(one.nbytes for one in given + _tensors(results)))
        if isinstance(results, torch.Tensor):
            return ext.adopt(results, given[0].device.index)
        return tuple(one if one is None else ext.adopt(one, given[0].device.index) for one in results)

    _library.impl(name, kernel, "CUDA")


_library = torch.library.Library("aten", "IMPL")


def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


def _addmm(
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    return beta * bias.to(out_dtype) + alpha * (a.to(out_dtype) @ b.to(out_dtype))


def _histc(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    return torch.histc(tensor.double(), bins, min, max).to(tensor.dtype)  # the CPU's takes no integers


def _depthwise(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    size: list[int],
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> torch.Tensor:
    return torch.nn.functional.conv2d(tensor, weight, bias, stride, padding, dilation, tensor.shape[1])


def _documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    causal: bool,
    scale: float | None,
    left: int | None,
    right: int | None,
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """Yields, of each document, its queries and keys, q, k and v in float32 with a head for each query head
    [tokens, heads, width], and the scores [heads, queries, keys].
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        queries, keys = slice(int(a), int(b)), slice(int(c), int(d))
        x, y, z = q[queries].float(), k[keys].float(), v[keys].float()
        y, z = y.repeat_interleave(group, 1), z.repeat_interleave(group, 1)
        n, m = len(x), len(y)
        row, column = torch.arange(n)[:, None] + (m - n), torch.arange(m)[None]
        seen = torch.ones(n, m, dtype=torch.bool)
        if causal or right == 0:
            seen &= column <= row
        if left is not None and left >= 0:
            seen &= column >= row - left
        scores = torch.einsum("nhd,mhd->hnm", x, y) * factor
        yield queries, keys, y, z, scores.masked_fill(~seen, float("-inf")), factor


def _flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    debug: bool = False,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    """q [queries, heads, width], k and v [keys, groups, width], of documents that lie one behind another."""
    asked = {
        "half precision": q.dtype in (torch.bfloat16, torch.float16),
        "a width that is a multiple of 8, up to 256": q.shape[-1] % 8 == 0 and q.shape[-1] <= 256,
        "a multiple of the key heads": q.dim() == 3 and q.shape[1] % k.shape[1] == 0,
        "offsets in int32": cu_q.dtype == cu_k.dtype == torch.int32,
        "dense rows": all(one.stride(-1) == 1 for one in (q, k, v)),
        "no longer documents": int(cu_q.diff().max()) <= longest_q and int(cu_k.diff().max()) <= longest_k,
        "no dropout, pages or biases (here)": not dropout and all(one is None for one in others.values()),
    }
    if not all(asked.values()):
        raise RuntimeError(f"flash attention asks for {[what for what, given in asked.items() if not given]}")
    out, sums = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    window = (window_size_left, window_size_right)
    for queries, _, _, z, scores, _ in _documents(q, k, v, cu_q, cu_k, causal, scale, *window):
        sums[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), z).to(q.dtype)
    seed = torch.zeros(2, dtype=torch.uint64)
    return out, sums, seed, seed.clone(), torch.empty(0, dtype=q.dtype)


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    *_: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups, window = k.shape[1], (window_size_left, window_size_right)

    def of_groups(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(1, (groups, -1)).sum(2).to(q.dtype)

    for queries, keys, y, z, scores, factor in _documents(q, k, v, cu_q, cu_k, causal, scale, *window):
        weights, given = scores.softmax(-1), grad[queries].float()
        of_weights = torch.einsum("nhd,mhd->hnm", given, z)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
        grads[0][queries] = torch.einsum("hnm,mhd->nhd", of_scores, y).to(q.dtype)
        grads[1][keys] = of_groups(torch.einsum("hnm,nhd->mhd", of_scores, q[queries].float()))
        grads[2][keys] = of_groups(torch.einsum("hnm,nhd->mhd", weights, given))
    return grads


# ---- torch.cuda --------------------------------------------------------------------------------------------


def _index(device: Any) -> int:
    if device is None:
        return ext.current()
    if isinstance(device, int):
        return device
    found = torch.device(device).index
    return ext.current() if found is None else found


def _set_device(device: Any) -> None:
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else int(device)
    if index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    if index >= 0:
        ext.number(index)  # CUDA is initialised, and the number looked at
        ext.exchange(index)


def _limit(fraction: float, device: Any = None) -> None:
    ext.set_limit(_index(device), int(fraction * ext.total()))


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        total_memory=ext.total(),
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=132,
        warp_size=32,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448,
        gcnArchName="",
        uuid=f"host-card-{ext.number(_index(device))}",
    )


def _nothing() -> Callable[..., None]:
    """Returns a function of its own: torch.compile's tables refuse one under two names."""
    return lambda *_, **__: None


CUDA: dict[str, Any] = {
    "is_available": lambda: ext.device_count() > 0,
    "is_initialized": lambda: ext.begun(),
    "_lazy_init": _nothing(),
    "init": _nothing(),
    "device_count": lambda: ext.device_count(),
    "current_device": lambda: ext.current(),
    "set_device": _set_device,
    "_exchange_device": lambda index: ext.exchange(index),
    "_maybe_exchange_device": lambda index: ext.exchange(index),
    "get_device_properties": _properties,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: NAME,
    "is_bf16_supported": lambda *_, **__: True,
    "can_device_access_peer": lambda device, peer: True,
    "mem_get_info": lambda device=None: (ext.free(_index(device)), ext.total()),
    "empty_cache": lambda: ext.empty_cache(),
    "memory_allocated": lambda device=None: ext.allocated(_index(device)),
    "memory_reserved": lambda device=None: ext.reserved(_index(device)),
    "max_memory_allocated": lambda device=None: ext.peak_allocated(_index(device)),
    "max_memory_reserved": lambda device=None: ext.peak_reserved(_index(device)),
    "reset_peak_memory_stats": lambda device=None: ext.reset_peak(_index(device)),
    "set_per_process_memory_fraction": _limit,
    "ipc_collect": lambda: ext.collect(),
    "synchronize": lambda device=None: ext.stall("read", "synchronize", 0),
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda device=None: Stream(device),
    "default_stream": lambda device=None: Stream(device),
    "stream": lambda stream: contextlib.nullcontext(),
    "set_stream": _nothing(),
    "CUDAGraph": CUDAGraph,
    "graph": capture,
    "is_current_stream_capturing": lambda: ext.capturing(),
    # Random numbers are those of the CPU's generator, which torch.manual_seed sets anyway.
    "manual_seed": _nothing(),
    "manual_seed_all": _nothing(),
    "seed_all": _nothing(),
    "_is_in_bad_fork": lambda: False,
    "get_rng_state": lambda device=None: torch.cuda.default_generators[_index(device)].get_state(),
    "get_rng_state_all": lambda: [],
    "set_rng_state": _nothing(),
    "set_rng_state_all": _nothing(),
}
BINDINGS: dict[str, Any] = {  # of torch._C, which a CPU build lacks
    "_cuda_isCurrentStreamCapturing": lambda: ext.capturing(),
    "_cuda_getDevice": lambda: ext.current(),
    "_cuda_setDevice": lambda index: _set_device(index),
    "_cuda_getDeviceCount": lambda: ext.device_count(),
    "_cuda_exchangeDevice": lambda index: ext.exchange(index),
    "_cuda_maybeExchangeDevice": lambda index: ext.exchange(index),
    "_cuda_emptyCache": lambda: ext.empty_cache(),
    "_cuda_getCurrentRawStream": lambda index=0: 0,
    "_cuda_init": _nothing(),
    "_cuda_memoryStats": lambda index: {},
    "_cuda_resetPeakMemoryStats": lambda index: ext.reset_peak(index),
    "_cuda_clearCublasWorkspaces": _nothing(),
    "_nccl_version_suffix": lambda: b"",
    "_nccl_version": lambda: 2 << 32 | 27 << 16 | 3,
}


class NcclOptions:
    """`ProcessGroupNCCL.Options`: torch sets what it wants on it."""

    is_high_priority_stream = False
    split_from = None


def _make_nccl(make: Callable[..., Any]) -> Callable[..., None]:
    """Two ranks on one card are refused, as NCCL does."""

    def init(group: Any, store: Any, rank: int, size: int, options: NcclOptions) -> None:
        if size > 1:
            store.set(f"card/{rank}", f"{os.uname().nodename}/{ext.number(ext.current())}")
            taken = Counter(store.get(f"card/{one}").decode() for one in range(size))
            twice = [place for place, ranks in taken.items() if ranks > 1]
            if twice:
                raise torch.distributed.DistBackendError(f"Duplicate GPU detected: {twice} (NCCL, host card)")
        make(group, store, rank, size, options)

    return init


def _storages() -> None:
    """Storages that Python makes, resizes, or shares with processes: a CPU build refuses those of a card."""
    base = torch._C.StorageBase

    def new(kind: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return base.__new__(kind, *args, **kwargs, **({} if device is None else {"device": device}))
        return torch.empty(args[0], dtype=torch.uint8, device=device).untyped_storage()

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return base.resize_(storage, size)
        ext.resize_storage(storage, size)
        return storage

    def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        if not storage.nbytes():  # as torch does: there is nothing to open
            return storage.device.index, None, 0, 0, b"", 0, b"", False
        handle = repr(ext.share(storage)).encode()
        return storage.device.index, handle, storage.nbytes(), 0, handle, 0, b"", False

    def opened(device: int, handle: bytes, size: int, offset: int, *_: Any) -> torch.UntypedStorage:
        assert offset == 0
        return ext.open_shared(device, ast.literal_eval(handle.decode()), size)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    torch.UntypedStorage._share_cuda_ = share  # type: ignore[method-assign]
    torch.UntypedStorage._new_shared_cuda = staticmethod(opened)  # type: ignore[method-assign, assignment]
    torch.UntypedStorage._release_ipc_counter_cuda = staticmethod(  # type: ignore[method-assign, assignment]
        lambda handle, offset: ext.close_handle(ast.literal_eval(handle.decode()))
    )


def install() -> None:
    """Makes torch have CUDA, in this process; called once, right after torch is imported."""
    for name, value in CUDA.items():
        setattr(torch.cuda, name, value)
    for name, value in BINDINGS.items():
        setattr(torch._C, name, value)
    # Whose states are kept and set, and from which nothing is drawn.
    torch.cuda.default_generators = tuple(torch.Generator() for _ in range(ext.device_count()))
    torch.accelerator.synchronize = CUDA["synchronize"]
    torch.accelerator.current_stream = CUDA["current_stream"]
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    # torch's own takes no stream but one of its classes.
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]
    _storages()
    fused("mm.dtype", _mm)
    fused("addmm.dtype", _addmm)
    fused("histc", _histc)
    fused("_conv_depthwise2d", _depthwise)
    fused("convolution_backward", torch.ops.aten.convolution_backward)
    fused("_flash_attention_forward", _flash_forward)
    fused("_flash_attention_backward", _flash_backward)

    import torch.distributed.distributed_c10d as c10d

    nccl = ext.ProcessGroupNCCL
    nccl.Options = NcclOptions
    nccl.__init__ = _make_nccl(nccl.__init__)
    for module in (torch.distributed, c10d):
        module.ProcessGroupNCCL = nccl
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
