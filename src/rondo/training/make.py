"""An engine over a framework: `torch`, the one that there is, with what it refuses before it is built."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.device_mesh import DeviceMesh

from rondo.core.errors import ConfigError
from rondo.planning.roles import engine_for
from rondo.platform import platform_of
from rondo.training.backend import ModelSpec
from rondo.training.engine import Engine
from rondo.training.torch_backend.axes import check_axes as check_axes
from rondo.training.torch_backend.axes import exchanges_tokens as exchanges_tokens
from rondo.training.torch_backend.backend import TorchBackend
from rondo.training.torch_backend.build import check_model_spec as check_model_spec
from rondo.training.torch_backend.build import check_settings as check_settings
from rondo.training.views import Views


def make_engine(
    spec: ModelSpec,
    *,
    # The ranks; a mesh of one axis shards over it.
    mesh: DeviceMesh | Views,
    device: str | torch.device = "cpu",
) -> Engine:
    """Builds one role's model and optimizer on this rank. Collective over the mesh. Raises ConfigError or
    DataError for a source or setting that cannot work.
    """
    if spec.temperature <= 0:
        raise ConfigError(f"temperature={spec.temperature}: log-probs need a temperature above 0")
    device = torch.device(device)
    spec = dataclasses.replace(spec, config=engine_for(spec.config, platform_of(device)))
    views = mesh if isinstance(mesh, Views) else Views.of(mesh)
    return Engine(TorchBackend(spec, views, device), spec.source, spec.config)
