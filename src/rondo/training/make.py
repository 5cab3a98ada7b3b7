"""An engine over a framework, `torch` or `megatron`, with what torch refuses before it is built."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from rondo.config.schema import (
    ActorConfig,
    BackendConfig,
    CriticConfig,
    EngineConfig,
    FrozenEngineConfig,
    ParallelConfig,
    TorchBackendConfig,
)
from rondo.core.errors import ConfigError
from rondo.models.loading import load_model_config, model_on_meta
from rondo.planning.roles import engine_for
from rondo.platform import platform_of
from rondo.training.adapters import check_adapters
from rondo.training.backend import Backend, Head, ModelSpec
from rondo.training.engine import Engine
from rondo.training.megatron.families import check_family, check_layout
from rondo.training.megatron.families import check_settings as check_megatron
from rondo.training.torch_backend import axes, build
from rondo.training.torch_backend.backend import TorchBackend
from rondo.training.torch_backend.routing import check_router
from rondo.training.views import Views


def check_axes(config: PreTrainedConfig, sizes: ParallelConfig, backend: BackendConfig) -> None:
    """Raises ConfigError where a model cannot be spread over so many ranks; its key is that of the axis."""
    if isinstance(backend, TorchBackendConfig):
        axes.check_axes(config, sizes)
    else:
        check_layout(config, sizes, backend)


def waits_per_tile(config: PreTrainedConfig, sizes: ParallelConfig, backend: BackendConfig) -> bool:
    """Says whether ranks would wait for each other in each tile of an MLP (`mlp_chunk`)."""
    tiles = isinstance(backend, TorchBackendConfig) and backend.mlp_chunk is not None
    return tiles and axes.exchanges_tokens(config, sizes)


def check_settings(
    engine: FrozenEngineConfig,
    backend: BackendConfig,
    head: Head,
    ranks: int,
    device: str | torch.device,
) -> None:
    """Raises ConfigError for settings, without `auto`, with which no model can be built on so many ranks."""
    if isinstance(backend, TorchBackendConfig):
        build.check_settings(engine, head, ranks, device)
    else:
        optimizer = engine.optimizer if isinstance(engine, ActorConfig | CriticConfig) else None
        check_megatron(engine, optimizer, device)


def check_model_spec(spec: ModelSpec) -> None:
    """Raises ConfigError or DataError for a model that cannot be built as its settings say, or not be
    exported. Nothing of its weights is made or read.
    """
    if isinstance(spec.backend, TorchBackendConfig):
        build.check_model_spec(spec)
        return
    check_family(load_model_config(spec.source))
    engine = spec.config
    if not isinstance(engine, EngineConfig):
        return
    if engine.router != type(engine.router)():
        lora = engine.lora is not None
        check_router(model_on_meta(spec.source), engine.router, lora=lora, tiles=False)
    if engine.lora is not None:
        check_adapters(engine.lora, spec.source)


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
    return Engine(_backend(spec, views, device), spec.source, spec.config)


def _backend(spec: ModelSpec, views: Views, device: torch.device) -> Backend:
    """Raises ConfigError for a framework that is not installed."""
    if spec.backend.name == "torch":
        return TorchBackend(spec, views, device)
    try:
        with warnings.catch_warnings():  # of what it would be faster with, at each import
            warnings.simplefilter("ignore", UserWarning)
            from rondo.training.megatron.backend import MegatronBackend
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise ConfigError(
            'actor.backend=megatron, but megatron-core is not installed: pip install "rondo-rl[megatron]"',
            key="actor.backend",
        ) from error
    return MegatronBackend(spec, views, device)
