"""Parallel axes inside a model, by the plans that transformers has for each family: tensor parallel (ranks
hold heads of attention, and columns and rows of the other products) and expert parallel (ranks hold whole
experts).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel

from rondo.config.schema import EngineConfig, FrozenEngineConfig
from rondo.errors import ConfigError
from rondo.models.context import Context
from rondo.models.documents import Heads
from rondo.models.family import family_of
from rondo.models.loading import Kernels, load_model_config
from rondo.models.source import ModelSource
from rondo.training.packed import heads_of
from rondo.training.views import EXPERT, Views

LEAST_TRANSFORMERS = "5.23"
_EXPERTS = re.compile(r"\.experts(\.|$)")
# Styles of plans that were compared with one process; of the others nothing is known.
_LINEAR_STYLES = frozenset({"colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"})
_STYLES = _LINEAR_STYLES | {"replicated_with_grad_allreduce"}
_EXPERT_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts"})


def check_parallel(
    source: ModelSource, engine: FrozenEngineConfig, views: Views, kernels: Kernels
) -> Kernels:
    """Raises ConfigError where a model cannot be spread over the views' axes. Returns the kernels to build it
    with: leaner attention multiplies with whole weights, and knows all tokens, which are divided here.
    """
    tensor, expert = views.sizes
    if tensor == expert == 1 and views.context is None:
        return kernels
    text = load_model_config(source).get_text_config()
    if views.context is not None:
        _check_context(text, views, views.context)
    if tensor > 1 or expert > 1:
        axis = "tensor" if tensor > 1 else "expert"
        if Version(transformers.__version__) < Version(LEAST_TRANSFORMERS):
            why = f"it needs transformers ≥ {LEAST_TRANSFORMERS}, {transformers.__version__} is installed"
            raise _refused(axis, views, why)
        _check_experts(text, views, axis)
    if tensor > 1:
        if isinstance(engine, EngineConfig) and engine.lora is not None:
            raise _refused(
                "tensor", views, "adapters (lora) of linear modules that are cut are not there yet"
            )
        _check_tensor(text, views)
    return "norms" if kernels == "auto" else kernels


def _check_tensor(text: PreTrainedConfig, views: Views) -> None:
    styles = set(_dense_plan(text).values())
    if not styles or styles - _STYLES:
        why = f"has {', '.join(sorted(styles - _STYLES))}" if styles else "does not exist"
        raise _refused("tensor", views, f"transformers' plan for {text.model_type} {why}")
    for name, heads in zip(("num_attention_heads", "num_key_value_heads"), heads_of(text), strict=True):
        if heads % _cuts_of_heads(text, views):
            raise _refused("tensor", views, f"the model's {name}={heads} cannot be divided by it")


def _check_experts(text: PreTrainedConfig, views: Views, axis: str) -> None:
    count, (_, expert) = num_experts(text), views.sizes
    if expert > 1 and (count is None or count % expert):
        why = "the model has no experts" if count is None else f"it does not divide the {count} experts"
        raise _refused("expert", views, why)
    styles = set(_plan_of(text, "base_model_ep_plan").values())
    if count is not None and (not styles or styles - _EXPERT_STYLES):
        raise _refused(axis, views, f"transformers has no plan for the experts of {text.model_type}")


def _check_context(text: PreTrainedConfig, views: Views, context: Context) -> None:
    why_not = family_of(text).not_packable
    if why_not:
        raise _refused("context", views, f"rows of a {text.model_type} model cannot be packed: {why_not}")
    heads, kv_heads = (number // _cuts_of_heads(text, views) for number in heads_of(text))
    if heads % context.size or (kv_heads % context.size and context.size % kv_heads):
        why = f"it does not divide the {heads} heads and {kv_heads} key/value heads that a rank would have"
        raise _refused("context", views, why)


def heads_here(text: PreTrainedConfig, views: Views) -> Heads:
    """Returns how many query heads and key/value heads of a model a rank has in attention."""
    heads, kv_heads = (number // _cuts_of_heads(text, views) for number in heads_of(text))
    size = 1 if views.context is None else views.context.size
    return heads // size, max(1, kv_heads // size)


def _cuts_of_heads(text: PreTrainedConfig, views: Views) -> int:
    """Returns into how many parts the axis `tensor` cuts the heads: some plans leave attention alone."""
    cut = any(name.endswith(".q_proj") and style == "colwise" for name, style in _dense_plan(text).items())
    return views.sizes[0] if cut else 1


def num_experts(text: PreTrainedConfig) -> int | None:
    """Returns how many experts a layer of the model has; None for a model without."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(text, name, None)
        if count:
            return int(count)
    return None


def _refused(axis: str, views: Views, why: str) -> ConfigError:
    context = 1 if views.context is None else views.context.size
    size = dict(zip(("tensor", "expert", "context"), (*views.sizes, context), strict=True))[axis]
    return ConfigError(f"parallel.{axis}={size}: {why}", key=f"parallel.{axis}")


def parallelise(lm: PreTrainedModel, views: Views) -> list[torch.nn.Module]:
    """Cuts the parameters of a model (which may be on meta) along the axes `tensor` and `expert`, each to
    this rank's part, and has its modules exchange what they need of other ranks. Returns the modules of
    experts that are spread over the view of experts.
    """
    if views.sizes == (1, 1):
        return []
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    text = lm.config.get_text_config()
    if views.tensor is not None:
        # Experts are spread by their own plan, also where each rank holds all of them.
        dense = _for_each(_dense_plan(text), lm)
        _check_whole(lm, dense, views)
        apply_tensor_parallelism(lm, views.tensor, dense)
    if views.expert is None or num_experts(text) is None:
        return []
    plan = _for_each(_plan_of(text, "base_model_ep_plan"), lm)
    same_rows = views.alone if views.tensor is None else views.tensor
    apply_expert_parallelism(lm, views.expert[EXPERT], same_rows, plan, "all_to_all")
    experts = [lm.get_submodule(name) for name, style in plan.items() if style == "ep_dispatch_experts"]
    for module in experts:
        # Not a view: what adds to it in place (shared experts) would take FSDP's hook off it.
        module.forward = functools.partial(_copied, module.forward)
    return experts


def _copied(forward: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
    return forward(*arguments).clone()


def _check_whole(lm: PreTrainedModel, plan: Mapping[str, str], views: Views) -> None:
    """Raises ConfigError where a plan cuts a module's products and leaves out another of its parameters: each
    rank would have a part of that one's gradient, and nothing would add them up (norms of heads, learned
    activations).
    """
    cut = {name.rpartition(".")[0] for name, style in plan.items() if style == "rowwise"}
    for name, _ in lm.named_parameters():
        above = [name[:at] for at, letter in enumerate(name) if letter == "."]
        if cut & set(above) and not plan.keys() & {name, *above}:
            raise _refused(
                "tensor", views, f"transformers' plan for {lm.config.model_type} leaves out {name}"
            )


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
            if style in _LINEAR_STYLES:  # of a linear module: its weight and bias are cut alike
                out |= {f"{name}.{own}": style for own in names.get(name, ())}
    return out
