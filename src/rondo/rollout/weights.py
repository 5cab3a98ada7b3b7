"""Whose storage the decoder's model uses: the trainer's, in place, or its own (begin, receive, commit)."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from rondo.core.errors import ConfigError, WeightSyncError
from rondo.models.family import auto_class
from rondo.models.loading import attention_by_part
from rondo.models.lora import AdapterSet
from rondo.models.names import persistent_buffers, weights_of
from rondo.models.precision import kept_in_float32
from rondo.models.stored import NoFilling
from rondo.weights.checksum import read, whole_sum
from rondo.weights.intake import Intake


class _ParametersOnMeta(NoFilling):
    """Inside, `torch.empty`, which makes every large parameter, allocates nothing; buffers become real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return super().__torch_function__(func, types, args, kwargs)


def build_module(
    model_config: Any, attention: str, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Returns the causal LM of a transformers config with real buffers, and parameters that await a storage.
    Raises ConfigError where a buffer cannot be made, or for a model that is no causal LM.
    """
    # The constructor draws random numbers that nobody uses: the fork keeps the caller's generator as it is.
    with torch.random.fork_rng(devices=[]), _ParametersOnMeta():
        module = auto_class(
            model_config
        ).from_config(  # a copy: it writes the attention's name into the config
            copy.deepcopy(model_config),
            attn_implementation=attention_by_part(model_config, attention),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise ConfigError(
                    f"{type(owner).__name__}.{name} is not initialised by the model's constructor; "
                    "rondo's own engines cannot build this model: set rollout.engine=vllm"
                )
            owner._buffers[name] = buffer.to(device)
    return module.eval()


class WeightStore(Intake):
    """Holds the weights of `module`, and the version that they are.

    shared: the trainer's storage, to be used in place. adapters: come by themselves. They are merged here,
    into weights of the store's own: the decoder computes with those, and knows of no adapters. `shared` is
    the base then, and where it is None, the store has that, too.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        shared: Mapping[str, torch.Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
        adapters: AdapterSet | None = None,
    ) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(module)}
        super().__init__(weights_of(module), None if adapters is None else adapters.shapes(shapes))
        # All that the decoder reads is the trainer's.
        self.shared = shared is not None and adapters is None
        self._base_shared = shared is not None and adapters is not None
        self._adapters = {} if adapters is None else adapters.by_weight
        # Of the weights that have an adapter: without it.
        self._base: dict[str, torch.Tensor] = {}
        # A and B, by name.
        self._came: dict[str, torch.Tensor] = {}
        # Of what came in another type than it is kept in: on the device until `commit` reads all.
        self._sums_of_came: dict[str, torch.Tensor] = {}
        self._device = device
        # Every name, tied ones included, to the storage that the decoder reads.
        self.tensors: dict[str, torch.Tensor] = {}
        given_tensors: Mapping[str, torch.Tensor] = shared or {}
        for name in given_tensors:
            self.canonical(name)  # called for its error: a name that the model does not have
        # What stays precise has the trainer's dtype, whatever the constructor made here.
        dtypes = dict.fromkeys(kept_in_float32(module, dtype), torch.float32)
        for name, buffer in persistent_buffers(module):
            wide = torch.promote_types(torch.promote_types(buffer.dtype, torch.float32), dtype)
            dtypes[name] = wide if buffer.is_floating_point() else buffer.dtype
        for canonical, names in self.names().items():
            own_dtype = dtypes.get(canonical, dtype)
            given = next((given_tensors[name] for name in names if name in given_tensors), None)
            if shared is None:
                given = torch.empty(self.shapes[canonical], dtype=own_dtype, device=device)
            elif given is None:
                raise WeightSyncError(f"the parameters to share lack {canonical!r}")
            self.fit(canonical, given.shape)
            if given.dtype != own_dtype or given.device.type != device.type:
                raise WeightSyncError(
                    f"{canonical!r} is {given.dtype} on {given.device}, but the rollout engine wants "
                    f"{own_dtype} on {device}: storage can be shared only as it is; set rollout.dtype to "
                    "match"
                )
            if canonical in self._adapters:
                self._base[canonical] = given.detach()
                given = torch.empty_like(given)
            self._assign(module, names, given)
        self.based = self._base_shared
        if self.shared:  # complete from the start; the owner says which version it is with `set_version`
            self.finish(0)

    def _assign(self, module: torch.nn.Module, names: list[str], tensor: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(tensor.detach(), requires_grad=False)
        assert parameter.data_ptr() == tensor.data_ptr()
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            setattr(owner, leaf, parameter.data if leaf in owner._buffers else parameter)
            self.tensors[name] = parameter.data

    def begin(self, version: int) -> None:
        if self.shared:
            raise WeightSyncError(
                "this engine uses the trainer's storage in place: nothing to receive; set_version says it"
            )
        super().begin(version)
        self._sums_of_came = {}

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Copies one tensor into the storage of its name. Raises WeightSyncError."""
        canonical = self.take(name, tensor.shape)
        if canonical in self.factors:
            self._came[canonical] = tensor.to(self._device, copy=True)
            return
        own = self.received(canonical)
        if self._base_shared and own.data_ptr() != tensor.data_ptr():
            raise WeightSyncError(
                f"{name!r} arrives from elsewhere than the trainer's storage, which is used"
            )
        own.copy_(tensor)
        if tensor.dtype != own.dtype:  # the storage's checksum is not that of what was sent
            self._sums_of_came[canonical] = whole_sum(tensor).to(self._device)  # it may come from the host

    def received(self, name: str) -> torch.Tensor:
        """Returns what came under this name. Raises WeightSyncError for one that the model does not have."""
        canonical = self.canonical(name)
        if canonical in self.factors:
            if canonical not in self._came:
                raise WeightSyncError(f"{name!r} has not come yet")
            return self._came[canonical]
        return self._base.get(canonical, self.tensors[canonical])

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        """Serves `version`. checksums: of what was sent, by name; they are compared with the storage itself
        or, where the dtype of the wire is another, with what arrived. Raises WeightSyncError.
        """
        self.check(version, checksums, self._sums_of)
        self._merge()
        self.finish(version)

    def _sums_of(self, names: Collection[str]) -> dict[str, int]:
        came = self._sums_of_came
        return read({name: came[name] if name in came else whole_sum(self.received(name)) for name in names})

    @torch.no_grad()
    def _merge(self) -> None:
        """Merges as the trainer does where weights are sent merged: in the adapters' dtype, rounded once."""
        for name, adapter in self._adapters.items():
            a, b = self._came[adapter.a], self._came[adapter.b]
            self.tensors[name].copy_(self._base[name].to(a.dtype) + adapter.delta(a, b))
