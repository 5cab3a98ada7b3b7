"""Parallel axes inside a model, by the plans that transformers has for each family: tensor parallel (ranks
hold heads of attention, and columns and rows of the other products) and expert parallel (ranks hold whole
experts).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel

from rondo.config.schema import EngineConfig, FrozenEngineConfig
from rondo.errors import ConfigError
from rondo.models.loading import load_model_config
from rondo.models.source import ModelSource
from rondo.training.views import Views

Kernels = Literal["auto", "transformers"]
LEAST_TRANSFORMERS = "5.23"
_EXPERTS = re.compile(r"\.experts(\.|$)")
# Styles of plans that were compared with one process; of the others nothing is known.
_STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce"})
_EXPERT_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts"})


def check_parallel(
    source: ModelSource, engine: FrozenEngineConfig, views: Views, kernels: Kernels
) -> Kernels:
    """Raises ConfigError where a model cannot be spread over the views' axes. Returns the kernels to build it
    with: leaner ones multiply with whole weights, so a model whose products are cut has transformers' own.
    """
    tensor, expert = views.sizes
    if tensor == 1 and views.expert is None:
        return kernels
    axis = "tensor" if tensor > 1 else "expert"
    if Version(transformers.__version__) < Version(LEAST_TRANSFORMERS):
        raise _refused(
            axis,
            views,
            f"it needs transformers ≥ {LEAST_TRANSFORMERS}, and {transformers.__version__} is installed",
        )
    if isinstance(engine, EngineConfig) and engine.lora is not None:
        raise _refused(axis, views, "adapters (lora) are for ranks that shard only")
    text = load_model_config(source).get_text_config()
    experts = num_experts(text)
    if tensor > 1:
        styles = set(_dense_plan(text).values())
        if not styles or styles - _STYLES:
            why = f"has {', '.join(sorted(styles - _STYLES))}" if styles else "does not exist"
            raise _refused("tensor", views, f"transformers' plan for {text.model_type} {why}")
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(text, name, None) or text.num_attention_heads
            if heads % tensor:
                raise _refused("tensor", views, f"the model's {name}={heads} cannot be divided by it")
    if expert > 1 and (experts is None or experts % expert):
        why = "the model has no experts" if experts is None else f"it does not divide the {experts} experts"
        raise _refused("expert", views, why)
    styles = set(_plan_of(text, "base_model_ep_plan").values())
    if experts is not None and (not styles or styles - _EXPERT_STYLES):
        raise _refused(axis, views, f"transformers has no plan for the experts of {text.model_type}")
    return "transformers"


def num_experts(text: PreTrainedConfig) -> int | None:
    """Returns how many experts a layer of the model has; None for a model without."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(text, name, None)
        if count:
            return int(count)
    return None


def _refused(axis: str, views: Views, why: str) -> ConfigError:
    size = views.sizes[0 if axis == "tensor" else 1]
    return ConfigError(f"parallel.{axis}={size}: {why}", key=f"parallel.{axis}")


def parallelise(lm: PreTrainedModel, views: Views) -> list[torch.nn.Module]:
    """Cuts the parameters of a model (which may be on meta) along the axes `tensor` and `expert`, each to
    this rank's part, and has its modules exchange what they need of other ranks. Returns the modules of
    experts that are spread over the view of experts.
    """
    if views.tensor is None and views.expert is None:
        return []
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    text = lm.config.get_text_config()
    if views.tensor is not None:
        # Experts are spread by their own plan, also where each rank holds all of them.
        apply_tensor_parallelism(lm, views.tensor, _for_each(_dense_plan(text), lm))
    if views.expert is None:
        return []
    plan = _for_each(_plan_of(text, "base_model_ep_plan"), lm)
    tensor = views.tensor if views.tensor is not None else views.alone
    apply_expert_parallelism(lm, views.expert["expert"], tensor, plan, "all_to_all")
    return [lm.get_submodule(name) for name, style in plan.items() if style == "ep_dispatch_experts"]


def _plan_of(text: PreTrainedConfig, name: str) -> Mapping[str, str]:
    return getattr(text, name, None) or {}


def _dense_plan(text: PreTrainedConfig) -> dict[str, str]:
    """Returns the plan for the axis `tensor` of all but experts."""
    plan = _plan_of(text, "base_model_tp_plan")
    return {name: style for name, style in plan.items() if not _EXPERTS.search(name)}


def _for_each(plan: Mapping[str, str], lm: PreTrainedModel) -> dict[str, str]:
    """Returns a plan with names of the model's modules and parameters in the place of patterns
    (layers.*.mlp).
    """
    prefix = f"{lm.base_model_prefix}."
    names: dict[str, Iterable[str]] = {
        name: [own for own, _ in module.named_parameters(recurse=False)]
        for name, module in lm.named_modules()
    }
    every = [*names, *(f"{name}.{own}" for name, owns in names.items() for own in owns)]
    out: dict[str, str] = {}
    for pattern, style in plan.items():
        known = re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+"))
        for name in filter(known.fullmatch, every):
            out[name] = style
            if style in ("colwise", "rowwise"):  # of a linear module: its weight and bias are cut alike
                out |= {f"{name}.{own}": style for own in names.get(name, ())}
    return out
