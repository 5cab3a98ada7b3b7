"""Which engine, and whether it can be built."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from rondo.core.errors import ConfigError
from rondo.models import STRETCH, check_positions, load_model_config
from rondo.rollout.native.engine import NativeEngine
from rondo.rollout.protocol import EngineSpec, RolloutEngine
from rondo.rollout.third_party import ThirdParty
from rondo.rollout.transformers.engine import TransformersEngine

OWN = {"native": NativeEngine, "transformers": TransformersEngine}
# The class of each third-party engine, in the module `engine` of its folder; `options` has its ThirdParty.
CLASSES = {"vllm": "VllmEngine", "sglang": "SglangEngine"}


def build_engine(spec: EngineSpec, parameters: Mapping[str, torch.Tensor] | None = None) -> RolloutEngine:
    """Builds the engine of `spec` in this process. Raises ConfigError or, for parameters that do not fit,
    WeightSyncError.

    parameters: checkpoint name → tensor, used in place (the trainer's storage, not by third-party engines;
    say `set_version` after every change), without `spec.adapters`, which are merged into a copy. None: the
    engine's own storage, filled by begin, receive, commit before the first request.
    """
    check_engine(spec.engine, spec.options, device=spec.device)
    model_config = check_engine_spec(spec)
    if spec.engine in CLASSES:
        if parameters is not None:
            raise ConfigError(f"rollout.engine={spec.engine} cannot use the trainer's storage in place")
        module = importlib.import_module(f"rondo.rollout.{spec.engine}.engine")
        engine: RolloutEngine = getattr(module, CLASSES[spec.engine])(spec)
        return engine
    return OWN[spec.engine](spec, model_config, parameters, **spec.options)


def check_engine_spec(spec: EngineSpec) -> PreTrainedConfig:
    """Returns the config of an engine's model. Raises ConfigError for what no engine can do with that model,
    or this kind of engine cannot.
    """
    model_config = load_model_config(spec.source)
    asked = f"a prompt and its response may have {spec.max_context} tokens"
    remedy = f"lower data.max_prompt_tokens or rollout.max_tokens, {STRETCH}"
    check_positions(model_config, spec.max_context, asked, remedy)
    if spec.engine in CLASSES:
        third_party(spec.engine).check_model(model_config, spec.device)
        if spec.adapters is not None:
            third_party(spec.engine).check_adapters(spec.adapters, model_config)
    return model_config


def check_engine(
    engine: str, options: Mapping[str, Any], *, device: str, sleep: bool = False, python: str | None = None
) -> None:
    """Raises ConfigError: not installed, a version that is not supported, an unknown option, or what the
    engine cannot do on this device. Nothing is started but the interpreter `python`, where the engine is in
    its environment, to say what that has. sleep: whether the engine will be asked for that.
    """
    if engine in CLASSES:
        third_party(engine, python).check(options, device, sleep=sleep)
        return
    if engine not in OWN:
        known = ", ".join([*OWN, *CLASSES])
        raise ConfigError(f"there is no rollout engine {engine!r}; there are {known}")


def third_party(engine: str, python: str | None = None) -> ThirdParty:
    """Returns what is known of an engine before it is built. python: of the environment that it is in."""
    known: ThirdParty = importlib.import_module(f"rondo.rollout.{engine}.options").ENGINE
    return known if python is None else type(known)(python)
