"""In the processes that hold a part of the model (SGLang's schedulers): weights in, and the sampler.

run (in place of SGLang's run_scheduler_process) ─ prepare ──▶ SGLang's own scheduler
                                                            ├─ SglangCountedSampler  draws the tokens
                                                            └─ load                  takes a bucket of weights
"""

from __future__ import annotations

import base64
import importlib
import json
import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from rondo.models.lora import WEIGHTS
from rondo.models.names import Parts, separate
from rondo.platform import planned
from rondo.rollout.native.sampling import draw, truncate, uniforms_on_device
from rondo.rollout.sglang.options import ENGINE, model_module
from rondo.rollout.third_party import Hook
from rondo.weights.bucket import SharedBucket, close_opened
from rondo.weights.checksum import checksums

SAMPLER = "pytorch"  # SglangCountedSampler takes this backend's place; SGLang has no other on CPUs
LOADER = "rondo.rollout.sglang.worker.load"  # the name that SGLang imports `load` by
PAUSED_SECONDS = 0.002  # a paused scheduler looks for messages this often, instead of all the time


# What rondo replaces in SGLang: checked before the engine is made (launch.py); what only adapters or routes
# need, in `prepare_adapters` and `prepare_routes`.
HOOKS = (
    Hook(Sampler, "_sample_from_probs", "probs sampling_info positions simple_sampling_case"),
    Hook(SamplingBatchInfo, "from_schedule_batch", "batch vocab_size"),
    Hook(Scheduler, "_record_scheduler_state_for_paused_engine"),
)


def run(*args: Any, **kwargs: Any) -> None:
    """The target of a scheduler's process; arguments are SGLang's, the server's first."""
    register_model(Path(args[0].model_path))
    prepare()
    if args[0].enable_lora:
        prepare_adapters()
    if args[0].enable_return_routed_experts and planned("auto").host:
        prepare_routes()
    run_scheduler_process(*args, **kwargs)


def register_model(folder: Path) -> None:
    """Registers the model where SGLang looks first; otherwise SGLang imports all models that it has. Raises
    ConfigError.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    module = importlib.import_module(model_module(config["architectures"]))
    entry = module.EntryClass
    models = entry if isinstance(entry, list | tuple) else [entry]
    for model in models:
        ModelRegistry.models.setdefault(model.__name__, model)


def prepare() -> None:
    """Makes this process's SGLang know the sampler, gives it the requests' seeds, and lets a paused scheduler
    rest.
    """
    register_sampler_backend(SAMPLER, SglangCountedSampler)
    make_batch = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls: type, batch: Any, vocab_size: int) -> Any:
        info = make_batch(cls, batch, vocab_size)  # it has seeds in SGLang's deterministic mode only
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device)
        return info

    record = Scheduler._record_scheduler_state_for_paused_engine

    def rest(self: Any) -> None:
        record(self)
        time.sleep(PAUSED_SECONDS)

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)
    Scheduler._record_scheduler_state_for_paused_engine = rest


def prepare_adapters() -> None:
    """Has SGLang read adapters from their file; by itself it would look for them where the model is read
    from, and there is no such file.
    """
    from sglang.srt.lora.lora import LoRAAdapter

    by_tensors = Hook(LoRAAdapter, "initialize_weights_from_tensors", "tensors")
    ENGINE.check_hooks((by_tensors, Hook(LoRAAdapter, "initialize_weights")))

    def read(self: Any) -> None:
        self.initialize_weights_from_tensors(load_file(Path(self.config.path) / WEIGHTS))

    LoRAAdapter.initialize_weights = read
    if planned("auto").host:
        _never_pin()


def prepare_routes() -> None:
    """Has SGLang keep where tokens went in plain memory; it registers it with CUDA, also without any."""
    from sglang.srt.state_capturer import base

    ENGINE.check_hooks([Hook(base, "ALLOC_MEMORY_FUNCS")])

    def plain(shape: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    base.ALLOC_MEMORY_FUNCS = {"cpu": plain}


def _never_pin() -> None:
    """Keeps SGLang's adapters from pinning memory: they pin host memory without asking whether there is an
    accelerator to copy it to; torch refuses where there is none. This process is SGLang's alone.
    """

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            return make(*args, **{**kwargs, "pin_memory": False})

        return made

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


# ---- the sampler ----


class SglangCountedSampler(Sampler):
    """SGLang's sampler with the native engine's noise: one uniform number per token, a function of the
    request's seed and the token's index alone, and the inverse of the cumulative distribution.

    Log-probs are SGLang's: after temperature, before top-k, top-p and min-p; of greedy requests at 1.
    """

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> tuple[torch.Tensor, None]:
        """Samples token ids int32 [B] from probs [B, V]; positions [B] are those of the last known tokens."""
        if sampling_info.sampling_mask_batch_indices is not None:
            raise NotImplementedError("rondo's sampler returns no sampling masks")
        weights = probs
        if not simple_sampling_case:
            weights = truncate(probs, sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
        uniforms = uniforms_on_device(sampling_info.sampling_seed, positions)
        return draw(weights, uniforms).to(torch.int32), None


# ---- weights ----

DeliveryTask = Literal["blank", "bucket", "inspect", "look", "close"]
_UNSET = float("nan")


@dataclass(frozen=True)
class Delivery:
    """What the schedulers are to do with the model, and where they write what came of it. SGLang carries it
    as a tensor's name: its messages may hold nothing but tensors and their names.
    """

    task: DeliveryTask
    """blank: make every parameter NaN. bucket: load it. inspect: say which parameters are still NaN. look:
    open the bucket, and load nothing. close: what is open of the memory that buckets are in.
    """
    answer: str
    """A path, to which each scheduler adds `.RANK`."""
    bucket: SharedBucket | None = None
    """The tensors to load or to look at, where that is the task."""
    parts: Parts = field(default_factory=dict)
    """How the bucket's tensors become a checkpoint's."""

    def as_name(self) -> str:
        return base64.b64encode(pickle.dumps(self)).decode()

    @staticmethod
    def of_name(name: str) -> Delivery:
        delivery: Delivery = pickle.loads(base64.b64decode(name))
        return delivery

    def write(self, rank: int, answer: dict[str, Any]) -> None:
        Path(f"{self.answer}.{rank}").write_text(json.dumps(answer), encoding="utf-8")

    def read(self, rank: int) -> dict[str, Any]:
        """{"checksums": {name: int}} of a bucket, {"unset": [name]} of an inspection, or {"error": text}. The
        file is removed.
        """
        path = Path(f"{self.answer}.{rank}")
        answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return answer


def load(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Does what the tensor's name says; SGLang calls this in every scheduler."""
    ((name, _),) = named_tensors
    delivery = Delivery.of_name(name)
    rank = int(get_parallel().tp_rank)
    try:
        answer = _carried_out(delivery, model)
    except Exception as error:  # the documented boundary: SGLang would end the process with it
        answer = {"error": f"{type(error).__name__}: {error}"}
    delivery.write(rank, answer)


def _carried_out(delivery: Delivery, model: Any) -> dict[str, Any]:
    parameters = [(name, p.data) for name, p in model.named_parameters() if p.is_floating_point()]
    if delivery.task == "blank":
        for _, tensor in parameters:
            tensor.fill_(_UNSET)
        return {}
    if delivery.task == "inspect":
        return {"unset": [name for name, tensor in parameters if bool(tensor.isnan().any())]}
    if delivery.task == "close":
        close_opened()
        return {}
    assert delivery.bucket is not None
    with delivery.bucket.tensors() as tensors:
        sums = checksums(dict(tensors))
        if delivery.task == "bucket":
            model.load_weights(separate(tensors, delivery.parts))
    return {"checksums": sums}
