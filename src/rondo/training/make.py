"""An engine over a framework: `torch`, the one that there is."""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from rondo.config.auto import engine_for
from rondo.config.schema import FrozenEngineConfig, OptimizerConfig, TorchBackendConfig
from rondo.core.errors import ConfigError
from rondo.models.source import ModelSource
from rondo.training.engine import Engine
from rondo.training.torch_backend.backend import TorchBackend
from rondo.training.views import Views


def make_engine(
    source: ModelSource,
    config: FrozenEngineConfig,
    # None: a frozen model (reference).
    optimizer: OptimizerConfig | None,
    *,
    # The ranks; a mesh of one axis shards over it.
    mesh: DeviceMesh | Views,
    backend: TorchBackendConfig | None = None,
    head: Literal["lm", "value"] = "lm",
    # Divides the logits.
    temperature: float = 1.0,
    # For schedules that fall.
    total_optimizer_steps: int | None = None,
    device: str | torch.device = "cpu",
) -> Engine:
    """Builds one role's model and optimizer on this rank. Collective over the mesh. Raises ConfigError or
    DataError for a source or setting that cannot work.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature={temperature}: log-probs need a temperature above 0")
    device = torch.device(device)
    config = engine_for(config, device.type)
    framework = TorchBackend(
        source,
        config,
        backend or TorchBackendConfig(),
        optimizer,
        views=mesh if isinstance(mesh, Views) else Views.of(mesh),
        head=head,
        temperature=temperature,
        total_optimizer_steps=total_optimizer_steps,
        device=device,
    )
    return Engine(framework, source, config)
