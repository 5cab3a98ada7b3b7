"""One rank of a model on torch's fake process group: the torch backend's own code shards, gathers, computes
and keeps moments, of tensors that have shapes and no data; Megatron's code makes parameters and buffers. No
card, and of a model of 1T some hundred MB.

What is put in the place of rondo's code: parameters are made on `meta` (those of a model that is not read
from a folder are random, and would be there); checks that look at numbers are left out; where a rank asks how
many tokens others send to its experts, all send as many; attention keeps what a flash kernel keeps.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from rondo.config.schema import (  # noqa: E402
    EngineConfig,
    MegatronBackendConfig,
    OptimizerConfig,
    ParallelConfig,
    TorchBackendConfig,
)
from rondo.controller import Mesh, WorkerContext  # noqa: E402
from rondo.controller.distributed import axis_groups  # noqa: E402
from rondo.core.batch import Batch, ragged_rows  # noqa: E402
from rondo.models import ModelSource, kernels, loading  # noqa: E402
from rondo.models.value_head import replace_lm_head  # noqa: E402
from rondo.training import ModelSpec, packed  # noqa: E402
from rondo.training.passes import Passes  # noqa: E402
from rondo.training.torch_backend import activations, build, head  # noqa: E402
from rondo.training.torch_backend.backend import TorchBackend  # noqa: E402
from rondo.training.views import Views, local_of  # noqa: E402
from rondo.workers.models import views_of  # noqa: E402


@dataclass(frozen=True)
class Rank:
    """What one rank had, in bytes."""

    weights: int
    """Its parameters."""
    gradients: int
    """Of those that learn, after a pass."""
    moments: int
    """Of the optimizer."""
    gathered: int
    """The most that FSDP had of other ranks' weights at one time: what it gathers into, and what it made of
    that."""
    passing: int
    """The most beside these that a pass had at one time, with what was gathered."""


def rank_of(
    config: Mapping[str, Any],
    ranks: int,
    sizes: ParallelConfig,
    engine: EngineConfig,
    optimizer: OptimizerConfig,
    tokens: int,
    backend: TorchBackendConfig,
) -> Rank:
    """Makes the first rank of so many, and has it compute two passes of one row. config: as config.json has
    it. engine: without `auto`. tokens: of a row, which ranks of the axis `context` have together.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        spec = ModelSpec(ModelSource(config=dict(config)), engine, optimizer, backend)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _in_place_of_data(mode), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of what fake tensors are asked
            made = TorchBackend(spec, _views(ranks, sizes), torch.device("cpu"))
            return _measured(made, mode, tokens, sizes)
    finally:
        dist.destroy_process_group()


def stage_of(
    config: Mapping[str, Any],
    stage: int,
    ranks: int,
    sizes: ParallelConfig,
    backend: MegatronBackendConfig,
    dtype: torch.dtype,
    head: Literal["lm", "value"] = "lm",
) -> Rank:
    """Makes the first rank of one of Megatron's pipeline stages, which learns, on `meta`: nothing passes.
    config: as config.json has it. dtype: in which it computes.
    """
    from rondo.training.megatron import backend as megatron
    from rondo.training.megatron import stage as stages

    rank, meta = stage * ranks // sizes.pipeline, torch.device("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        source = ModelSource(config=dict(config))
        with meta:
            lm = loading._random_model(loading._config_for_packing(source), source, torch.float32)
            if head == "value":
                replace_lm_head(lm, None, torch.float32)  # the new head itself is next to nothing
        layers = megatron.layers_of_stages(lm.config.num_hidden_layers, sizes, backend)
        grid = megatron._grid_of(_views(ranks, sizes, rank))
        with (
            mock.patch.object(torch.cuda, "current_device", return_value=meta),
            mock.patch.object(torch.cuda, "Stream"),
            mock.patch.object(stages, "model_parallel_cuda_manual_seed"),
        ):
            settings = stages.transformer_config(lm, layers, backend.virtual, grid, dtype, None, {})
            made = stages.ModelStage(lm, layers, grid, settings, meta, None, trains=True)
            made.make_buffers()
        runs = megatron.runs_of(made)
        wide = 0 if dtype == torch.float32 else 4  # weights in float32 beside those that compute
        return Rank(
            sum(one.nbytes for one in made.tensors().values()),
            sum(gradients.nbytes for _, gradients, _ in made.buckets()),
            sum(run.weights.numel() for run in runs.values()) * (8 + wide),
            gathered=0,
            passing=0,
        )
    finally:
        dist.destroy_process_group()


def _views(ranks: int, sizes: ParallelConfig, rank: int = 0) -> Views:
    mesh, every, known = Mesh.parallel(ranks, sizes), range(ranks), {}
    wait = timedelta(seconds=60)
    groups = {name: axis_groups(axes, every, known, wait) for name, axes in mesh.grids.items()}
    context = WorkerContext("actor", rank, ranks, "cpu", 1, {}, mesh, tuple(every), groups)
    return views_of(context)


@contextlib.contextmanager
def _in_place_of_data(mode: FakeTensorMode) -> Iterator[None]:
    def empty(source: ModelSource, dtype: torch.dtype, device: Any, how: Any, **_: Any) -> tuple[Any, None]:
        with torch.device("meta"):
            model = loading._random_model(loading._config_for_packing(source), source, torch.float32)
        return loading._finished(model, dtype, device, how), None

    def materialise(model: torch.nn.Module, device: torch.device) -> None:
        with mode:
            real(model, device)

    real = build.materialise
    flash, card = SimpleNamespace(call=_flash, takes_softcap=True), SimpleNamespace(wide_products=True)
    with contextlib.ExitStack() as stack:
        for of, name, other in (
            (build, "build_empty", empty),
            (build, "materialise", materialise),
            (build, "check_head", lambda *_: None),
            (activations._Tiles, "_check", lambda *_: None),
            (packed, "choose_kernel", lambda *_: "flash"),
            (kernels, "flash_kernel", lambda _: flash),
            (head, "platform_of", lambda _: card),
            (head, "on_host", lambda _: False),
        ):
            stack.enter_context(mock.patch.object(of, name, other))
        yield


def _measured(made: TorchBackend, mode: FakeTensorMode, tokens: int, sizes: ParallelConfig) -> Rank:
    text = made.hf_config.get_text_config()
    rng = np.random.default_rng(0)
    # Of the last token of a response nothing is computed.
    row = rng.integers(0, text.vocab_size, tokens + 1)
    columns = {"prompt_ids": [row[:1]] * 2, "response_ids": [row[1:]] * 2}
    batch = Batch.of(
        {"row_id": np.arange(2)} | {name: ragged_rows(one, np.int32) for name, one in columns.items()}
    )
    passes = Passes(batch, ("log_probs",), made.packing, tokens, made.group)
    parameters = list(made.model.parameters())
    pairs = tokens * (getattr(text, "num_experts_per_tok", None) or 0)
    each = pairs // (sizes.context * sizes.tensor * sizes.expert)
    living = _Living([*map(local_of, parameters), *made.model.buffers()], each)

    def use(_: Any, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if all(one.grad is None for one in parameters):
            living.forget_peak()  # the second pass is the one in which gradients are there
        return outputs["log_probs"].sum()

    with mode, living, mock.patch.object(torch.UntypedStorage, "resize_", living.resize):
        made.run(passes, ("log_probs",), use, backward=True)
    gradients = sum(local_of(one.grad).nbytes for one in parameters if one.grad is not None)
    assert made.optimizer is not None
    return Rank(
        sum(local_of(one).nbytes for one in parameters),
        gradients,
        made.optimizer.moments_planned()[0],
        living.most_gathered,
        living.peak - gradients,
    )


class _Living(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and still live; and of these what FSDP gathers."""

    def __init__(self, known: list[torch.Tensor], each: int) -> None:
        """known: what was there before. each: tokens that an expert's rank gets of each other one."""
        super().__init__()
        self.peak = self.most_gathered = 0
        self._each = each
        self._known = {one.untyped_storage()._cdata for one in known}
        self._sizes: dict[int, int] = {}
        self._gathered: set[int] = set()
        self._now = self._now_gathered = 0
        self._resize = torch.UntypedStorage.resize_

    def forget_peak(self) -> None:
        self.peak, self.most_gathered = self._now, self._now_gathered

    @property
    def resize(self) -> Any:
        """Returns a method for storages, which FSDP calls to free what it gathered, and to have it again."""

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._tag(storage._cdata)
                self._add(storage._cdata, storage.nbytes() - self._sizes[storage._cdata])
            return done

        return resized

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return self._each
        if DTensor in types:  # it calls again with this rank's part
            return NotImplemented
        made = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._known and key not in self._sizes:
                    self._sizes[key] = 0
                    self._add(key, storage.nbytes())
                    weakref.finalize(storage, self._gone, key)
                if function.namespace == "fsdp" and key in self._sizes:
                    self._tag(key)
        return made

    def _add(self, key: int, size: int) -> None:
        self._sizes[key] += size
        self._now += size
        self._now_gathered += size if key in self._gathered else 0
        self.peak = max(self.peak, self._now)
        self.most_gathered = max(self.most_gathered, self._now_gathered)

    def _tag(self, key: int) -> None:
        if key not in self._gathered:
            self._gathered.add(key)
            self._now_gathered += self._sizes[key]
            self.most_gathered = max(self.most_gathered, self._now_gathered)

    def _gone(self, key: int) -> None:
        self._add(key, -self._sizes[key])
        del self._sizes[key]
        self._gathered.discard(key)


class _Flash(torch.autograd.Function):
    """Keeps what flash kernels keep: inputs, output, and a float32 for each query's head."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return _Flash.apply(q, k, v)
