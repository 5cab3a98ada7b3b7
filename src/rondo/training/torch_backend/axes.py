"""Whether a model can be spread along parallel axes, by its config alone: what transformers' plans for its
family say, and what divides what.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from packaging.version import Version
from transformers import AutoConfig, PreTrainedConfig
from transformers import __version__ as installed

from rondo.config.schema import ParallelConfig
from rondo.core.errors import ConfigError
from rondo.models.family import family_of, layer_configs, rope_changes_at

LEAST_TRANSFORMERS = "5.23"  # 5.17 has no expert parallel, 5.19 another signature
# Styles of plans that were compared with one process; of the others nothing is known.
LINEAR_STYLES = frozenset({"colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"})
_STYLES = LINEAR_STYLES | {"replicated_with_grad_allreduce"}
_EXPERT_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts"})
# Language models of larger ones that are, module by module, those of a family with a plan: transformers has
# none for them, or one without the norms of heads.
_SAME_MODULES = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
_EXPERTS = re.compile(r"\.experts(\.|$)")


def check_axes(config: PreTrainedConfig, sizes: ParallelConfig) -> None:
    """Raises ConfigError where a model cannot be spread over so many ranks; its key is that of the axis."""
    text = config.get_text_config()
    if sizes.pipeline > 1:
        raise refused("pipeline", sizes, "torch has no pipelines (actor.backend.name=megatron has)")
    if sizes.context > 1:
        _check_context(text, sizes)
    if sizes.tensor > 1 or sizes.expert > 1:
        axis = "tensor" if sizes.tensor > 1 else "expert"
        if Version(installed) < Version(LEAST_TRANSFORMERS):
            why = f"it needs transformers ≥ {LEAST_TRANSFORMERS}, and {installed} is installed"
            raise refused(axis, sizes, why)
        _check_experts(text, sizes, axis)
    if sizes.tensor > 1:
        _check_tensor(text, sizes)


def refused(axis: str, sizes: ParallelConfig, why: str) -> ConfigError:
    """Returns the error for an axis that a model cannot be spread along."""
    message = f"parallel.{axis}={getattr(sizes, axis)}: {why}; lower it, or leave it out"
    return ConfigError(message, key=f"parallel.{axis}")


def _check_tensor(text: PreTrainedConfig, sizes: ParallelConfig) -> None:
    styles = set(dense_plan(text).values())
    if not styles or styles - _STYLES:
        why = f"has {', '.join(sorted(styles - _STYLES))}" if styles else "does not exist"
        raise refused("tensor", sizes, f"transformers' plan for {text.model_type} {why}")
    for pair in _heads_of(text):
        for name, heads in zip(("num_attention_heads", "num_key_value_heads"), pair, strict=True):
            if heads % _cuts_of_heads(text, sizes):
                raise refused("tensor", sizes, f"the model's {name}={heads} cannot be divided by it")


def _check_experts(text: PreTrainedConfig, sizes: ParallelConfig, axis: str) -> None:
    count = num_experts(text)
    if sizes.expert > 1 and (count is None or count % sizes.expert):
        why = "the model has no experts" if count is None else f"it does not divide the {count} experts"
        raise refused("expert", sizes, why)
    styles = set(expert_plan(text).values())
    if count is not None and (not styles or styles - _EXPERT_STYLES):
        raise refused(axis, sizes, f"transformers has no plan for the experts of {text.model_type}")


def _check_context(text: PreTrainedConfig, sizes: ParallelConfig) -> None:
    why_not = family_of(text).not_packable
    if why_not:
        raise refused("context", sizes, f"rows of a {text.model_type} model cannot be packed: {why_not}")
    if rope_changes_at(text) is not None or _is_dynamic(getattr(text, "rope_parameters", None)):
        why = "its rotary embeddings change with the length of a row, of which each rank would see a part"
        raise refused("context", sizes, f"{text.model_type} with these rope_parameters: {why}")
    for pair in _heads_of(text):
        heads, kv_heads = (number // _cuts_of_heads(text, sizes) for number in pair)
        check_heads(heads, kv_heads, sizes)


def check_heads(heads: int, kv_heads: int, sizes: ParallelConfig) -> None:
    """Raises ConfigError where ranks along context cannot share out the heads that each would have."""
    if heads % sizes.context or (kv_heads % sizes.context and sizes.context % kv_heads):
        why = f"does not divide the {heads} heads and {kv_heads} key/value heads that a rank would have"
        raise refused("context", sizes, f"it {why}")


def _is_dynamic(rope: object) -> bool:
    """Says whether rope_parameters, of all layers or by their kind, are of the type whose base grows with
    rows.
    """
    if not isinstance(rope, Mapping):
        return False
    return rope.get("rope_type") == "dynamic" or any(map(_is_dynamic, rope.values()))


def _heads_of(text: PreTrainedConfig) -> list[tuple[int, int]]:
    """Returns the numbers of query heads and of key/value heads that a config names, each pair once. (What it
    does not tell of a layer is seen by `Context.all_tokens`.)
    """
    pairs = set()
    for layer in layer_configs(text):
        heads = int(layer.num_attention_heads)
        pairs.add((heads, int(getattr(layer, "num_key_value_heads", None) or heads)))
    return sorted(pairs)


def _cuts_of_heads(text: PreTrainedConfig, sizes: ParallelConfig) -> int:
    """Returns into how many parts the axis `tensor` cuts the heads: some plans leave attention alone."""
    cut = any(name.endswith(".q_proj") and style == "colwise" for name, style in dense_plan(text).items())
    return sizes.tensor if cut else 1


def exchanges_tokens(config: PreTrainedConfig, sizes: ParallelConfig) -> bool:
    """Says whether ranks send tokens to experts of others."""
    return num_experts(config.get_text_config()) is not None and (sizes.tensor > 1 or sizes.expert > 1)


def num_experts(text: PreTrainedConfig) -> int | None:
    """Returns how many experts a layer of the model has; None for a model without."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(text, name, None)
        if count:
            return int(count)
    return None


def dense_plan(text: PreTrainedConfig) -> dict[str, str]:
    """Returns the plan for the axis `tensor` of all but experts: pattern of a name -> style."""
    plan = _plan_of(text, "base_model_tp_plan")
    return {name: style for name, style in plan.items() if not _EXPERTS.search(name)}


def expert_plan(text: PreTrainedConfig) -> Mapping[str, str]:
    """Returns the plan for the axis `expert`."""
    return _plan_of(text, "base_model_ep_plan")


def _plan_of(text: PreTrainedConfig, name: str) -> Mapping[str, str]:
    same = _SAME_MODULES.get(text.model_type)
    return getattr(text if same is None else AutoConfig.for_model(same), name, None) or {}
