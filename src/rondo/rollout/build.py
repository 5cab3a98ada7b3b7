"""Which engine: in this process (`build_engine`) or in one of its own (`start_engine`)."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rondo.core.errors import ConfigError
from rondo.models import STRETCH, check_positions, load_model_config
from rondo.models.lora import AdapterSet
from rondo.rollout.interpreter import environment_of, interpreter
from rondo.rollout.native.engine import NativeEngine
from rondo.rollout.protocol import EngineSpec, RolloutEngine
from rondo.rollout.third_party import ThirdParty
from rondo.rollout.transformers.engine import TransformersEngine
from rondo.system.forkserver import are_kept
from rondo.system.process import import_path

if TYPE_CHECKING:
    from rondo.rollout.server.client import EngineProcess

OWN = {"native": NativeEngine, "transformers": TransformersEngine}
# The class of each third-party engine, in the module `engine` of its folder; `options` has its ThirdParty.
CLASSES = {"vllm": "VllmEngine", "sglang": "SglangEngine"}
# Modules of theirs that take long to import.
IMPORTS = {"vllm": ("rondo.rollout.vllm.core",), "sglang": ("rondo.rollout.sglang.engine",)}


def build_engine(spec: EngineSpec, parameters: Mapping[str, torch.Tensor] | None = None) -> RolloutEngine:
    """Builds the engine of `spec` in this process. parameters: the trainer's storage, to use in place (not
    by third-party engines). Raises ConfigError.
    """
    check_engine(spec.engine, spec.options, device=spec.device)
    model_config = load_model_config(spec.source)
    asked = f"a prompt and its response may have {spec.max_context} tokens"
    remedy = f"lower data.max_prompt_tokens or rollout.max_tokens, {STRETCH}"
    check_positions(model_config, spec.max_context, asked, remedy)
    if spec.engine in CLASSES:
        if parameters is not None:
            raise ConfigError(f"rollout.engine={spec.engine} cannot use the trainer's storage in place")
        check_engine_model(spec.engine, model_config, spec.device)
        if spec.adapters is not None:
            check_engine_adapters(spec.engine, spec.adapters, model_config)
        module = importlib.import_module(f"rondo.rollout.{spec.engine}.engine")
        engine: RolloutEngine = getattr(module, CLASSES[spec.engine])(spec)
        return engine
    return OWN[spec.engine](
        model_config,
        parameters=parameters,
        tokenizer=spec.tokenizer,
        dtype=spec.dtype,
        device=spec.device,
        max_concurrent=spec.max_concurrent,
        max_context=spec.max_context,
        trust_remote_code=spec.source.trust_remote_code,
        threads=spec.threads,
        adapters=spec.adapters,
        routes=spec.routes,
        **spec.options,
    )


def start_engine(
    spec: EngineSpec,
    *,
    name: str = "0",
    bucket_bytes: int = 256 << 20,
    accelerators: Sequence[str] = (),
) -> EngineProcess:
    """Starts the engine of `spec` in a process of its own; returns when it is ready. Raises ConfigError or
    RolloutError with the engine's own message.

    accelerators: the GPUs that it may use, as CUDA_VISIBLE_DEVICES has them; (): those of this process from
    spec.device on.
    """
    from rondo.rollout.server.client import EngineProcess  # it starts processes: nothing for who has none

    if accelerators:  # the first of them is its first, whatever number that one has in this process
        spec = dataclasses.replace(spec, device=spec.device.partition(":")[0])
    spec, devices = visible_devices(spec, ",".join(accelerators) or os.environ.get("CUDA_VISIBLE_DEVICES"))
    own = {"OMP_NUM_THREADS": str(spec.threads)}
    if spec.engine in CLASSES:
        own = _third_party(spec.engine).environment(spec)
    python, environment = None, {**os.environ, "PYTHONPATH": import_path()}
    if spec.python is not None:  # there, the engine is one of this environment
        python, environment = interpreter(spec.python).executable, environment_of(spec.python)
        spec = dataclasses.replace(spec, python=None)
    environment |= {**own, **devices}
    return EngineProcess(
        spec,
        environment,
        name=name,
        bucket_bytes=bucket_bytes,
        python=python,
        preload=IMPORTS.get(spec.engine, ()) if _is_forked(spec, python) else None,
    )


def _is_forked(spec: EngineSpec, python: str | None) -> bool:
    """Says whether an engine is forked: where fork servers are kept. Nobody has tried what imports of
    third-party engines do with a GPU before a fork, so of these only those on CPUs are.
    """
    return are_kept() and python is None and (spec.engine in OWN or spec.device == "cpu")


def check_engine(
    engine: str, options: Mapping[str, Any], *, device: str, sleep: bool = False, python: str | None = None
) -> None:
    """Raises ConfigError: not installed, a version that is not supported, an unknown option, or what the
    engine cannot do on this device. Nothing is started but the interpreter `python`, where the engine is in
    its environment, to say what that has. sleep: whether the engine will be asked for that.
    """
    if engine in CLASSES:
        _third_party(engine, python).check(options, device, sleep=sleep)
        return
    if engine not in OWN:
        known = ", ".join([*OWN, *CLASSES])
        raise ConfigError(f"there is no rollout engine {engine!r}; there are {known}")


def check_engine_model(engine: str, model_config: Any, device: str) -> None:
    """Raises ConfigError for a model that a third-party engine is not known to serve as it is."""
    if engine in CLASSES:
        _third_party(engine).check_model(model_config, device)


def check_engine_adapters(engine: str, adapters: AdapterSet, model_config: Any) -> None:
    """Raises ConfigError for adapters that a third-party engine cannot serve by themselves; rondo's own merge
    them, and take all.
    """
    if engine in CLASSES:
        modules = [one.module for one in adapters.by_weight.values()]
        _third_party(engine).check_adapters(adapters.rank, modules, model_config)


def visible_devices(spec: EngineSpec, visible: str | None) -> tuple[EngineSpec, dict[str, str]]:
    """Says what an engine's process sees of this process's GPUs: its `tensor_parallel` ones from spec.device
    on, numbered from 0. visible: CUDA_VISIBLE_DEVICES here. Returns the process's spec and variables.

    Raises ConfigError when this process does not see them all.
    """
    kind, _, index = spec.device.partition(":")
    if kind != "cuda":
        return spec, {}
    first, count = int(index or 0), spec.tensor_parallel
    here = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if first + count > len(here):
        raise ConfigError(
            f"rollout.engine.tensor_parallel={count} from {spec.device} on, but this process sees "
            f"{len(here)} GPUs ({', '.join(here)})"
        )
    own = {"CUDA_VISIBLE_DEVICES": ",".join(here[first : first + count])}
    return dataclasses.replace(spec, device="cuda:0"), own


def _third_party(engine: str, python: str | None = None) -> ThirdParty:
    known: ThirdParty = importlib.import_module(f"rondo.rollout.{engine}.options").ENGINE
    return known if python is None else type(known)(python)
