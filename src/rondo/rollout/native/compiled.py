"""The compiled path: one C call per token step (kernels.c), for Llama-family models in float32 on a CPU.

Rows are independent of each other by construction, so threads simply share them out, and a request's bits
depend neither on its batch mates nor on the number of threads. Weights are held a second time, packed for
the C products, with their biases joined; `weights_changed` does both again, and `let_go` gives them back
until they are needed. Everything else (norms, embeddings) is read in place: a parameter's storage never
moves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rondo.core.errors import RolloutError
from rondo.platform import give_back, on_host
from rondo.rollout.native import kernels
from rondo.rollout.native.blocks import BLOCK, blocks_of
from rondo.rollout.native.cache import LayerShape, block_bytes, layer_shapes
from rondo.rollout.native.lean import layer_weights, rotary_tables, why_not_lean
from rondo.rollout.native.scheduler import Copy, Prefill, SlotTable

PREFILL_ROWS = 4096  # prompt tokens per C call


def why_not_compiled(
    module: torch.nn.Module, max_context: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Returns the reason why the compiled path cannot run this model here; "" if it can (and is compiled)."""
    if not on_host(device):
        return f"it runs on a CPU only, not on {device}"
    if dtype != torch.float32:
        return f"it computes in float32 only, not in {dtype}"
    reason = why_not_lean(module, max_context)
    if reason:
        return reason
    head_dim = layer_shapes(module.config)[0].key_dim
    try:
        lanes = kernels.library().rondo_lanes()
    except RolloutError as error:
        return str(error)
    return f"head_dim {head_dim} is not a multiple of {lanes}" if head_dim % lanes else ""


@dataclass(frozen=True)
class _Product:
    """Linear layers of one input, computed as one C product."""

    linears: Sequence[torch.nn.Linear]
    """The layers whose output columns stand side by side in the product's."""
    packed: torch.Tensor
    """Their weights as the C code reads them: [columns / panel, K, panel]."""
    bias: torch.Tensor | None
    """[columns]; None where no layer has one."""


class CompiledPath:
    """Decodes and prefills in C; has the interface of GenericPath."""

    name = "compiled"
    chunk = None
    spare_blocks = 0

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
    ) -> None:
        del dtype, device  # checked by why_not_compiled
        self.module = module
        self._capacity = blocks_of(max_context) * BLOCK  # positions of one sequence
        self._library = kernels.library()
        self._lanes = self._library.rondo_lanes()  # numbers in a vector register
        self._panel = self._library.rondo_panel()  # columns of a product that C computes at one time
        assert self._library.rondo_page() == BLOCK
        shapes = layer_shapes(module.config)
        self._shape: LayerShape = shapes[0]
        self.block_nbytes = block_bytes(shapes, torch.float32)
        self._rotary = rotary_tables(module, self._capacity, torch.device("cpu"))
        layers = layer_weights(module)
        # The C code keeps addresses: these records and the products' tensors must live as long as the path.
        self._layer_records = (kernels.Layer * len(layers))()
        self._products: list[_Product] = []
        self._is_packed = True
        for record, layer in zip(self._layer_records, layers, strict=True):
            for name, linears in kernels.PRODUCTS.items():
                product = self._product([getattr(layer, linear) for linear in linears])
                setattr(record, name, product.packed.data_ptr())
                setattr(record, f"{name}_bias", _pointer(product.bias))
            for name in kernels.NORMS:
                setattr(record, name, _pointer(getattr(layer, name)))
        head = self._product([module.lm_head])
        self._model = self._model_record(head)
        floats = self._library.rondo_scratch_floats(ctypes.byref(self._model))
        self._scratch = [torch.zeros(floats) for _ in range(threads)]  # one each: calls run side by side
        self._pool: ThreadPoolExecutor | None = None
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    # ---- memory ----

    def allocate(self, num_blocks: int) -> None:
        """Makes keys [layers, blocks, kv_heads, BLOCK / lanes, head_dim, lanes], which lie so that one vector
        register holds one dimension of `lanes` positions, and values [..., BLOCK, head_dim].
        """
        layers, heads, dim = len(self._layer_records), self._shape.kv_heads, self._shape.key_dim
        self._keys = torch.zeros(layers, num_blocks, heads, BLOCK // self._lanes, dim, self._lanes)
        self._values = torch.zeros(layers, num_blocks, heads, BLOCK, dim)
        for i, record in enumerate(self._layer_records):
            record.keys = self._keys[i].data_ptr()
            record.values = self._values[i].data_ptr()
        if len(self._scratch) > 1:
            self._pool = ThreadPoolExecutor(len(self._scratch), "rondo-kernels")

    def free(self) -> None:
        self._keys = self._values = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def routes(self, blocks: Sequence[int], length: int) -> None:
        """Returns None: no mixture runs here."""

    @property
    def cache_nbytes(self) -> int:
        return sum(t.nbytes for t in (self._keys, self._values) if t is not None)

    def copy(self, copies: Sequence[Copy]) -> None:
        assert self._keys is not None
        for one in copies:
            self._library.rondo_copy(ctypes.addressof(self._model), one.source, one.target, one.length)

    # ---- weights ----

    def weights_changed(self) -> None:
        """Packs the products' weights, and joins their biases, again."""
        if not self._is_packed:  # room for what comes back
            give_back("cpu", is_waited_for=True)
        self._is_packed = True
        for product in self._products:
            first = 0
            for linear in product.linears:
                weight = linear.weight.detach().contiguous()
                N, K = weight.shape
                self._library.rondo_pack(weight.data_ptr(), N, K, product.packed.data_ptr(), first)
                if product.bias is not None and linear.bias is not None:
                    product.bias[first : first + N] = linear.bias.detach()
                first += N

    def let_go(self) -> None:
        """Gives the memory of the packed weights back; they are packed again before the next token."""
        self._is_packed = False
        for product in self._products:
            kernels.give_back(product.packed)

    def _product(self, linears: Sequence[torch.nn.Linear]) -> _Product:
        """Makes one more product; its weights and bias are zero until `weights_changed` fills them."""
        columns, K = sum(linear.weight.shape[0] for linear in linears), linears[0].weight.shape[1]
        packed = kernels.zeros_in_huge_pages(-(-columns // self._panel), K, self._panel)
        without = all(linear.bias is None for linear in linears)
        product = _Product(linears, packed, None if without else torch.zeros(columns))
        self._products.append(product)
        return product

    def _model_record(self, head: _Product) -> kernels.Model:
        config: Any = self.module.config
        inner: Any = self.module.model
        return kernels.Model(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=self._shape.kv_heads,
            head_dim=self._shape.key_dim,
            intermediate=config.intermediate_size,
            vocab=self.module.lm_head.weight.shape[0],
            num_layers=len(self._layer_records),
            capacity=self._capacity,
            eps=config.rms_norm_eps,
            scale=self._shape.key_dim**-0.5,
            embedding=inner.embed_tokens.weight.data_ptr(),
            cos=self._rotary[0].data_ptr(),
            sin=self._rotary[1].data_ptr(),
            final_norm=inner.norm.weight.data_ptr(),
            head=head.packed.data_ptr(),
            head_bias=_pointer(head.bias),
            layers=ctypes.addressof(self._layer_records),
        )

    # ---- steps ----

    def prefill(self, prefills: Sequence[Prefill], table: SlotTable) -> None:
        """Computes the keys and values of many prompts per C call. Threads get whole prompts: a row needs
        only the earlier rows of its own prompt, and it makes no difference whether a token was prefilled or
        decoded.
        """
        parts: list[list[Prefill]] = [[]]
        num_rows = 0
        for one in prefills:
            num_rows += len(one.tokens) - one.start
            if parts[-1] and num_rows > PREFILL_ROWS:
                parts.append([])
                num_rows = len(one.tokens) - one.start
            parts[-1].append(one)
        for part in parts:
            jobs = []
            for first in range(min(len(self._scratch), len(part))):
                share = part[first :: len(self._scratch)]
                positions = [np.arange(one.start, len(one.tokens)) for one in share]
                slots = [np.full(len(at), one.slot) for one, at in zip(share, positions, strict=True)]
                tokens = [one.tokens[one.start :] for one in share]
                jobs.append((np.concatenate(tokens), np.concatenate(slots), np.concatenate(positions)))
            self._run(jobs, table, None)

    def decode(self, rows: np.ndarray, table: SlotTable) -> tuple[np.ndarray, np.ndarray]:
        """Makes one token for each slot of `rows` [R]. Returns ids int64 [R] and log-probs float32 [R]."""
        decoding = kernels.Decoding(*(getattr(table, name).ctypes.data for name in kernels.TABLE_COLUMNS))
        parts = [part for part in np.array_split(rows, len(self._scratch)) if len(part)]
        jobs = [(table.tokens[part], part, table.positions[part]) for part in parts]
        results = self._run(jobs, table, decoding)
        if len(results) == 1:
            return results[0]
        return np.concatenate([ids for ids, _ in results]), np.concatenate([lp for _, lp in results])

    def _run(
        self,
        jobs: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
        table: SlotTable,
        decoding: kernels.Decoding | None,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        assert self._keys is not None
        if not self._is_packed:
            self.weights_changed()
        if self._pool is None or len(jobs) < 2:
            return [self._call(self._scratch[0], table, decoding, *job) for job in jobs]
        futures = [
            self._pool.submit(self._call, scratch, table, decoding, *job)
            for scratch, job in zip(self._scratch, jobs, strict=False)
        ]
        return [future.result() for future in futures]

    def _call(
        self,
        scratch: torch.Tensor,
        table: SlotTable,
        decoding: kernels.Decoding | None,
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
            table.blocks.ctypes.data,
            None if decoding is None else ctypes.addressof(decoding),
            ids.ctypes.data,
            log_probs.ctypes.data,
        )
        if bad >= 0:  # the first row whose logits are not finite; the decoder looks for such a log-prob
            log_probs[bad] = float("nan")
        return ids, log_probs


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else int(tensor.data_ptr())
