"""Parallel axes inside a model, by the plans that transformers has for each family: tensor parallel (ranks
hold heads of attention, and columns and rows of the other products) and expert parallel (ranks hold whole
experts).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from rondo.config.schema import ParallelConfig
from rondo.models.lora import base_name, parts_of_adapted
from rondo.training.torch_backend.axes import LINEAR_STYLES, dense_plan, expert_plan, num_experts, refused
from rondo.training.views import EXPERT, Views


def parallelise(lm: PreTrainedModel, views: Views) -> list[torch.nn.Module]:
    """Cuts the parameters of a model (which may be on meta) along the axes `tensor` and `expert`, each to
    this rank's part, and has its modules exchange what they need of other ranks. Returns the modules of
    experts that are spread over the view of experts.
    """
    sizes = views.sizes
    if sizes.tensor == sizes.expert == 1:
        return []
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    text = lm.config.get_text_config()
    if views.tensor is not None:
        # Experts are spread by their own plan, also where each rank holds all of them.
        dense = _for_each(dense_plan(text), lm)
        _check_whole(lm, dense, sizes)
        head, embeddings = _head_of(lm), lm.get_input_embeddings()
        tied = head is not None and head.weight is embeddings.weight
        dense |= _plan_of_vocabulary(lm, None if tied else head)
        apply_tensor_parallelism(lm, views.tensor, dense)
        _share_inputs(lm, dense, views.tensor)
        if head is not None and tied:  # what was one parameter is so again
            head.weight = embeddings.weight
    if views.expert is None or num_experts(text) is None:
        return []
    plan = _for_each(expert_plan(text), lm)
    same_rows = views.alone if views.tensor is None else views.tensor
    apply_expert_parallelism(lm, views.expert[EXPERT], same_rows, plan, "all_to_all")
    experts = [lm.get_submodule(name) for name, style in plan.items() if style == "ep_dispatch_experts"]
    for module in experts:
        # Not a view: what adds to it in place (shared experts) would take FSDP's hook off it.
        module.forward = functools.partial(_copied, module.forward)
    return experts


class _Input:
    """What several products that are cut by columns multiply with (q, k and v; gate and up). transformers
    spreads it for each of them, so that each adds up its gradient over the ranks; spread once for all, their
    gradients are added up here first, and then once over the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._given: torch.Tensor | None = None
        self._spread: torch.Tensor | None = None

    def within(self, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls the module that has the products, and lets the input go when it is done, also where it is
        computed again.
        """
        try:
            return forward(*arguments, **keywords)
        finally:
            self._given = None
            self._spread = None

    def times(self, forward: Callable[..., torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        """Calls one of the products; each that is given the same tensor gets the same in its place."""
        if not torch.is_grad_enabled():
            return forward(given)
        if self._spread is None or self._given is not given:
            self._given = given
            self._spread = DTensor.from_local(given, self._mesh, [Replicate()], run_check=False)
        return forward(self._spread)


def _share_inputs(lm: PreTrainedModel, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Has the products of a module that are cut by columns share their input, where they have the same."""
    modules = dict(lm.named_modules())
    together: dict[str, list[torch.nn.Module]] = {}
    for name, style in plan.items():
        if style.startswith("colwise") and name in modules:
            together.setdefault(base_name(name).rpartition(".")[0], []).append(modules[name])
    for parent, products in together.items():
        if len(products) == 1:
            continue
        shared = _Input(mesh)
        for product in products:
            product.forward = functools.partial(shared.times, product.forward)
        modules[parent].forward = functools.partial(shared.within, modules[parent].forward)


def _head_of(lm: PreTrainedModel) -> torch.nn.Module | None:
    """Returns the output head; None: a critic's is gone."""
    head = lm.get_output_embeddings()
    return head if head is not None and hasattr(head, "weight") else None


def _plan_of_vocabulary(lm: PreTrainedModel, head: torch.nn.Module | None) -> dict[str, str]:
    """Returns the plan of the embeddings, and of an output head of their own, which transformers leaves whole
    or gathers: ranks look up own tokens only, and multiply with them (`Vocabulary`).
    """
    names = {module: name for name, module in lm.named_modules()}
    embeddings = names[lm.get_input_embeddings()]
    plan = dict.fromkeys((embeddings, f"{embeddings}.weight"), "embedding_rowwise")
    if head is not None:
        plan |= {f"{names[head]}.{own}": "colwise" for own, _ in head.named_parameters()}
    return plan


def _copied(forward: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
    return forward(*arguments).clone()


def _check_whole(lm: PreTrainedModel, plan: Mapping[str, str], sizes: ParallelConfig) -> None:
    """Raises ConfigError where a plan cuts a module's products and leaves out another of its parameters: each
    rank would have a part of that one's gradient, and nothing would add them up (norms of heads, learned
    activations).
    """
    styles = {base_name(name): style for name, style in plan.items()}
    cut = {name.rpartition(".")[0] for name, style in styles.items() if style == "rowwise"}
    for name, _ in lm.named_parameters():
        above = [name[:at] for at, letter in enumerate(name) if letter == "."]
        if cut & set(above) and not styles.keys() & {base_name(name), *above}:
            why = f"transformers' plan for {lm.config.model_type} leaves out {name}"
            raise refused("tensor", sizes, why)


def _for_each(plan: Mapping[str, str], lm: PreTrainedModel) -> dict[str, str]:
    """Returns a plan with names of the model's modules and parameters in the place of patterns
    (layers.*.mlp), which are of the language model: where its embeddings are.
    """
    names_of = {module: name for name, module in lm.named_modules()}
    prefix = names_of[lm.get_input_embeddings()].rpartition(".")[0] + "."
    names: dict[str, Iterable[str]] = {
        name: [own for own, _ in module.named_parameters(recurse=False)]
        for name, module in lm.named_modules()
    }
    every = [*names, *(f"{name}.{own}" for name, owns in names.items() for own in owns)]
    out: dict[str, str] = {}
    for pattern, style in plan.items():
        known = re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+"))
        for name in filter(known.fullmatch, every):
            if style not in LINEAR_STYLES:
                out[name] = style
                continue
            # Of a linear module: its weight and bias are cut alike, and of its adapter the factor that has
            # the dimension which is cut. The other one is whole; what it multiplies with, or its product, is
            # the same on all ranks, and so is its gradient.
            for part in parts_of_adapted(names, name, "B" if style.startswith("colwise") else "A"):
                out[part] = style
                out |= {f"{part}.{own}": style for own in names.get(part, ())}
    return out
