"""The compiled path: one C call per token step (kernels.c), for Llama-family models in float32 on a CPU.

Rows are independent of each other by construction, so threads simply share them out, and a request's bits
depend neither on its batch mates nor on the number of threads. Weights are held a second time, packed for the
C products; `weights_changed` packs them again. Everything small (norms, biases, embeddings) is read in place.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from rondo.errors import RolloutError
from rondo.rollout.native import build
from rondo.rollout.native.cache import LayerShape, layer_shapes
from rondo.rollout.native.lean import layer_weights, rotary_tables, why_not_lean
from rondo.rollout.native.slots import SlotTable

PREFILL_ROWS = 4096  # prompt tokens per C call
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")
_PRODUCTS = ("qkv", "o", "gate_up", "down")
_LAYER_POINTERS = (*_NORMS, *_PRODUCTS, *(f"{name}_bias" for name in _PRODUCTS), "keys", "values")


class _Layer(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in _LAYER_POINTERS]


class _Model(ctypes.Structure):
    _fields_ = [
        *(
            (name, _INT)
            for name in "hidden heads kv_heads head_dim intermediate vocab num_layers capacity".split()
        ),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, _POINTER) for name in "embedding cos sin final_norm head head_bias layers".split()),
    ]


_TABLE_COLUMNS = "seeds indices top_k prefix_slots prefix_lengths temperature top_p min_p".split()


class _Decoding(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in _TABLE_COLUMNS]


def why_not_compiled(
    module: torch.nn.Module, max_context: int, dtype: torch.dtype, device: torch.device
) -> str:
    """The reason why the compiled path cannot run this model here; "" if it can (and is compiled)."""
    if device.type != "cpu":
        return f"it runs on a CPU only, not on {device}"
    if dtype != torch.float32:
        return f"it computes in float32 only, not in {dtype}"
    reason = why_not_lean(module, max_context)
    if reason:
        return reason
    head_dim = layer_shapes(module.config)[0].key_dim
    try:
        lanes = build.library().rondo_lanes()
    except RolloutError as error:
        return str(error)
    return f"head_dim {head_dim} is not a multiple of {lanes}" if head_dim % lanes else ""


class CompiledPath:
    """Same interface as GenericPath."""

    name = "compiled"
    dense = False
    reads_prefixes = True

    @property
    def in_slot_order(self) -> bool:
        """Only one thread computes rows one tile after another."""
        return len(self._scratch) == 1

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        num_slots: int,
        capacity: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
    ) -> None:
        del max_context, dtype, device  # checked by why_not_compiled
        self.module, self._num_slots, self._capacity = module, num_slots, capacity
        self._library = _declare(build.library())
        self._lanes, self._panel = self._library.rondo_lanes(), self._library.rondo_panel()
        self._shape: LayerShape = layer_shapes(module.config)[0]
        self._layers = layer_weights(module)
        self._rotary = rotary_tables(module, capacity, torch.device("cpu"))
        self._packed = [self._empty_packed(i) for i in range(len(self._layers))]
        self._biases: list[dict[str, torch.Tensor | None]] = []
        self._head = self._packed_like(module.lm_head)
        self._layer_records = (_Layer * len(self._layers))()
        self._model = self._model_record()
        floats = self._library.rondo_scratch_floats(ctypes.byref(self._model))
        self._scratch = [torch.zeros(floats) for _ in range(threads)]
        self._pool: ThreadPoolExecutor | None = None
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    # ---- memory ----

    def allocate(self) -> None:
        """keys [layers, slots, kv_heads, capacity / lanes, head_dim, lanes]; values [..., capacity, dim]."""
        layers, heads, dim = len(self._layers), self._shape.kv_heads, self._shape.key_dim
        blocks = self._capacity // self._lanes
        self._keys = torch.zeros(layers, self._num_slots, heads, blocks, dim, self._lanes)
        self._values = torch.zeros(layers, self._num_slots, heads, self._capacity, dim)
        for i, record in enumerate(self._layer_records):
            record.keys, record.values = self._keys[i].data_ptr(), self._values[i].data_ptr()
        if len(self._scratch) > 1:
            self._pool = ThreadPoolExecutor(len(self._scratch), "rondo-kernels")

    def free(self) -> None:
        self._keys = self._values = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    @property
    def cache_nbytes(self) -> int:
        return sum(t.nbytes for t in (self._keys, self._values) if t is not None)

    def copy(self, source: int, target: int, length: int) -> None:
        assert self._keys is not None
        self._library.rondo_copy(ctypes.addressof(self._model), source, target, length)

    # ---- weights ----

    def weights_changed(self) -> None:
        """Pack the products' weights again and read all pointers again."""
        self._biases = []
        for record, layer, packed in zip(self._layer_records, self._layers, self._packed, strict=True):
            groups = {"qkv": (layer.q, layer.k, layer.v), "o": (layer.o,), "gate_up": (layer.gate, layer.up)}
            groups["down"] = (layer.down,)
            biases: dict[str, torch.Tensor | None] = {}
            for name, linears in groups.items():
                self._pack(linears, packed[name])
                setattr(record, name, packed[name].data_ptr())
                biases[name] = _joined_bias(linears)
                setattr(record, f"{name}_bias", _pointer(biases[name]))
            self._biases.append(biases)
            for name in _NORMS:
                setattr(record, name, _pointer(getattr(layer, name)))
        self._pack((self.module.lm_head,), self._head)

    def _pack(self, linears: tuple[torch.nn.Linear, ...], packed: torch.Tensor) -> None:
        first = 0
        for linear in linears:
            weight = linear.weight.detach().contiguous()
            N, K = weight.shape
            self._library.rondo_pack(weight.data_ptr(), N, K, packed.data_ptr(), first)
            first += N

    def _packed_like(self, *linears: torch.nn.Linear) -> torch.Tensor:
        columns, K = sum(linear.weight.shape[0] for linear in linears), linears[0].weight.shape[1]
        return torch.zeros(-(-columns // self._panel), K, self._panel)

    def _empty_packed(self, i: int) -> dict[str, torch.Tensor]:
        layer = self._layers[i]
        return {
            "qkv": self._packed_like(layer.q, layer.k, layer.v),
            "o": self._packed_like(layer.o),
            "gate_up": self._packed_like(layer.gate, layer.up),
            "down": self._packed_like(layer.down),
        }

    def _model_record(self) -> _Model:
        config: Any = self.module.config
        inner: Any = self.module.model
        return _Model(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=self._shape.kv_heads,
            head_dim=self._shape.key_dim,
            intermediate=config.intermediate_size,
            vocab=self.module.lm_head.weight.shape[0],
            num_layers=len(self._layers),
            capacity=self._capacity,
            eps=config.rms_norm_eps,
            scale=self._shape.key_dim**-0.5,
            embedding=inner.embed_tokens.weight.data_ptr(),
            cos=self._rotary[0].data_ptr(),
            sin=self._rotary[1].data_ptr(),
            final_norm=inner.norm.weight.data_ptr(),
            head=self._head.data_ptr(),
            head_bias=_pointer(self.module.lm_head.bias),
            layers=ctypes.addressof(self._layer_records),
        )

    # ---- steps ----

    def prefill(self, prompts: list[tuple[int, np.ndarray]]) -> None:
        """(slot, tokens) pairs: compute their keys and values, many prompts per call."""
        part: list[tuple[int, np.ndarray]] = []
        for slot, tokens in prompts:
            if part and sum(len(t) for _, t in part) + len(tokens) > PREFILL_ROWS:
                self._prefill(part)
                part = []
            part.append((slot, tokens))
        self._prefill(part)

    def _prefill(self, prompts: list[tuple[int, np.ndarray]]) -> None:
        """Threads get whole prompts: a row needs the earlier rows of its own prompt only."""
        shares = [prompts[i :: len(self._scratch)] for i in range(len(self._scratch))]
        jobs = []
        for share in shares:
            if share:
                tokens = np.concatenate([t for _, t in share]).astype(np.int64)
                slots = np.concatenate([np.full(len(t), slot, np.int64) for slot, t in share])
                jobs.append(
                    (tokens, slots, np.concatenate([np.arange(len(t), dtype=np.int64) for _, t in share]))
                )
        self._run(jobs, None)

    def decode(self, rows: np.ndarray, table: SlotTable) -> tuple[np.ndarray, np.ndarray]:
        """One token for each slot of `rows`. Returns ids int64 and log-probs float32."""
        decoding = _Decoding(*(getattr(table, name).ctypes.data for name in _TABLE_COLUMNS))
        parts = [part for part in np.array_split(rows, len(self._scratch)) if len(part)]
        jobs = [(table.tokens[part], part, table.positions[part]) for part in parts]
        results = self._run(jobs, decoding)
        if len(results) == 1:
            return results[0]
        return np.concatenate([ids for ids, _ in results]), np.concatenate([lp for _, lp in results])

    def _run(
        self, jobs: list[tuple[np.ndarray, np.ndarray, np.ndarray]], decoding: _Decoding | None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        assert self._keys is not None
        if self._pool is None or len(jobs) < 2:
            return [self._call(self._scratch[0], decoding, *job) for job in jobs]
        futures = [
            self._pool.submit(self._call, scratch, decoding, *job)
            for scratch, job in zip(self._scratch, jobs, strict=False)
        ]
        return [future.result() for future in futures]

    def _call(
        self,
        scratch: torch.Tensor,
        decoding: _Decoding | None,
        tokens: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        ids, log_probs = np.zeros(len(tokens), np.int64), np.zeros(len(tokens), np.float32)
        slots = np.ascontiguousarray(slots)
        arrays = [array.ctypes.data for array in (tokens, slots, positions)]
        bad = self._library.rondo_step(
            ctypes.addressof(self._model),
            scratch.data_ptr(),
            len(tokens),
            *arrays,
            None if decoding is None else ctypes.addressof(decoding),
            ids.ctypes.data,
            log_probs.ctypes.data,
        )
        if bad >= 0:
            log_probs[bad] = float("nan")
        return ids, log_probs


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else int(tensor.data_ptr())


def _joined_bias(linears: tuple[torch.nn.Linear, ...]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(len(linear.weight)) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.rondo_lanes.restype = library.rondo_panel.restype = _INT
    library.rondo_pack.argtypes = [_POINTER, _INT, _INT, _POINTER, _INT]
    library.rondo_pack.restype = None
    library.rondo_gemm.argtypes = [_POINTER, _POINTER, _INT, _INT, _INT, _POINTER]
    library.rondo_gemm.restype = None
    library.rondo_copy.argtypes = [_POINTER, _INT, _INT, _INT]
    library.rondo_copy.restype = None
    library.rondo_scratch_floats.argtypes = [_POINTER]
    library.rondo_scratch_floats.restype = _INT
    library.rondo_step.argtypes = [_POINTER, _POINTER, _INT, *([_POINTER] * 3), _POINTER, _POINTER, _POINTER]
    library.rondo_step.restype = _INT
    return library
