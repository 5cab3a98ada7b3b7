"""Whose storage the decoder's model uses: the trainer's, in place, or its own (begin, receive, commit)."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from rondo.errors import ConfigError, WeightSyncError
from rondo.models.precision import kept_in_float32
from rondo.weights.checksum import checksum


class _ParametersOnMeta(TorchFunctionMode):
    """Inside: `torch.empty`, which makes every large parameter, allocates nothing; buffers become real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_module(
    model_config: Any, attention: str, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool
) -> PreTrainedModel:
    """The causal LM of a transformers config with real buffers, and parameters that await a storage."""
    with torch.random.fork_rng(devices=[]), _ParametersOnMeta():
        module = AutoModelForCausalLM.from_config(  # a copy: it writes the attention's name into the config
            copy.deepcopy(model_config),
            attn_implementation=attention,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise ConfigError(
                    f"{type(owner).__name__}.{name} is not initialised by the model's constructor; the "
                    "native engine cannot build this model: set rollout.engine=vllm"
                )
            owner._buffers[name] = buffer.to(device)
    return module.eval()


class WeightStore:
    """The parameters of `module` under their checkpoint names, with the version that they are.

    ready: all weights of one version are there. Tied parameters may come under any one of their names.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        shared: Mapping[str, torch.Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shared = shared is not None
        self.version = 0 if self.shared else -1
        self.ready = self.shared
        self._names = _tied_names(module)
        self._pending: set[str] | None = None
        self._received: dict[str, int] = {}  # checksums of what came in another dtype
        self._tensors: dict[str, torch.Tensor] = {}
        tensors: Mapping[str, torch.Tensor] = shared or {}
        for name in tensors:
            self._canonical(name)
        kept = kept_in_float32(module, dtype)
        for canonical, names in self._groups().items():
            slot, own_dtype = module.get_parameter(canonical), torch.float32 if canonical in kept else dtype
            given = next((tensors[name] for name in names if name in tensors), None)
            if shared is None:
                given = torch.empty(slot.shape, dtype=own_dtype, device=device)
            elif given is None:
                raise WeightSyncError(f"the parameters to share lack {canonical!r}")
            self._check_shape(canonical, given, slot.shape)
            if given.dtype != own_dtype or given.device.type != device.type:
                raise WeightSyncError(
                    f"{canonical!r} is {given.dtype} on {given.device}, but the rollout engine wants "
                    f"{own_dtype} on {device}: storage can be shared only as it is; set rollout.dtype to "
                    "match"
                )
            self._assign(module, canonical, names, given)

    def _assign(
        self, module: torch.nn.Module, canonical: str, names: list[str], tensor: torch.Tensor
    ) -> None:
        parameter = torch.nn.Parameter(tensor.detach(), requires_grad=False)
        assert parameter.data_ptr() == tensor.data_ptr()
        for name in names:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)
        self._tensors[canonical] = parameter.data

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every name, tied ones included, to the storage that the decoder reads."""
        return {name: self._tensors[canonical] for name, canonical in self._names.items()}

    def parameter(self, name: str) -> torch.Tensor:
        """The storage behind a checkpoint name."""
        return self._tensors[self._canonical(name)]

    def begin(self, version: int) -> None:
        if self.shared:
            raise WeightSyncError(
                "this engine uses the trainer's storage in place: nothing to receive; set_version says it"
            )
        self.ready = False
        self._pending = set(self._tensors)
        self._received = {}

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending is None:
            raise WeightSyncError(f"{name!r} arrived outside begin … commit")
        canonical = self._canonical(name)
        own = self._tensors[canonical]
        self._check_shape(name, tensor, own.shape)
        own.copy_(tensor)
        if tensor.dtype != own.dtype:
            self._received[canonical] = checksum(tensor)
        self._pending.discard(canonical)

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        """Serve `version`. checksums: of what was sent, by name: compared with the storage itself, or, where
        the dtype of the wire is another, with what arrived.
        """
        if self._pending is None:
            raise WeightSyncError(f"commit({version}) without begin")
        if self._pending:
            missing = ", ".join(sorted(self._pending)[:4])
            raise WeightSyncError(
                f"commit({version}): {len(self._pending)} of {len(self._tensors)} tensors did not arrive: "
                f"{missing}; the engine serves nothing until a complete set is committed"
            )
        for name, expected in (checksums or {}).items():
            canonical = self._canonical(name)
            found = self._received.get(canonical)
            found = checksum(self._tensors[canonical]) if found is None else found
            if found != expected:
                raise WeightSyncError(
                    f"commit({version}): {name!r} is not what was sent (checksum {found:#018x}, the "
                    f"trainer's is {expected:#018x}); the engine serves nothing until a complete set is "
                    "committed"
                )
        self._pending, self.version, self.ready = None, version, True

    def _canonical(self, name: str) -> str:
        if name not in self._names:
            near = difflib.get_close_matches(name, self._names, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise WeightSyncError(f"the model has no parameter {name!r}{hint}")
        return self._names[name]

    def _groups(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for name, canonical in self._names.items():
            groups.setdefault(canonical, []).append(name)
        return groups

    @staticmethod
    def _check_shape(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
        if tuple(tensor.shape) != tuple(shape):
            raise WeightSyncError(f"{name!r} has shape {tuple(tensor.shape)}, the model wants {tuple(shape)}")


def _tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Every parameter name to the first name of the same parameter."""
    first: dict[int, str] = {}
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return names
