"""The routers of a mixture: the module of each layer that chooses its tokens' experts, and how it is told
which ones to choose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from rondo.core.errors import ConfigError
from rondo.core.types import RouteShape
from rondo.models.loading import model_on_meta
from rondo.models.source import ModelSource

BIAS = "e_score_correction_bias"
# Whose affinities are sigmoids of the logits, each expert's by itself; all others' are a softmax.
_SIGMOID = frozenset({"deepseek_v3", "glm4_moe", "minimax_m2"})
# Whose routers do not say which experts they chose.
_SILENT = frozenset({"llama4_text"})
_TOPK: tuple[Callable[..., Any], ...] = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True)
class ExpertRouter:
    """One layer's. Its module takes N tokens, and returns logits [N, E], weights [N, k], experts [N, k]."""

    name: str
    """The module's name in the model."""
    module: torch.nn.Module
    """The router."""
    block: torch.nn.Module
    """Has the router and the experts."""
    num_experts: int
    """How many experts it chooses from, E."""
    top_k: int
    """How many it chooses for a token, k."""

    @property
    def layer(self) -> int:
        """Returns the number of the layer that it is in, counting those without experts."""
        return next(int(part) for part in self.name.split(".") if part.isdigit())

    @property
    def bias(self) -> torch.Tensor | None:
        """Returns what is added to the affinities of experts [E] before the k largest are chosen, and to no
        weight (DeepSeek-V3, arXiv:2412.19437, eq. 16); None: the model has no such buffer.
        """
        buffers = dict(self.module.named_buffers(recurse=False)) | dict(
            self.block.named_buffers(recurse=False)
        )
        return buffers.get(BIAS)


def routers_of(lm: PreTrainedModel) -> tuple[ExpertRouter, ...]:
    """Returns the routers in the order of layers; none of a model without experts, whose routers do not say
    which ones they chose, or whose layers have different numbers of them.
    """
    if lm.config.get_text_config().model_type in _SILENT:
        return ()
    found = []
    for name, block in lm.named_modules():
        router = getattr(block, "gate", None) or getattr(block, "router", None)
        if isinstance(getattr(block, "experts", None), torch.nn.Module) and hasattr(router, "top_k"):
            assert isinstance(router, torch.nn.Module)
            found.append(ExpertRouter(name, router, block, int(router.num_experts), int(router.top_k)))
    alike = len({(one.num_experts, one.top_k) for one in found}) <= 1
    return tuple(found) if alike else ()


def routes_of(source: ModelSource) -> RouteShape:
    """Returns what the routes of a mixture are; it is not loaded for that. Raises as `load_model_config`."""
    return shape_of_routes(routers_of(model_on_meta(source)))


def shape_of_routes(routers: Sequence[ExpertRouter]) -> RouteShape:
    """Returns what the routes of a model with these routers are."""
    return RouteShape(sum(router.top_k for router in routers), routers[0].num_experts)


class RouteRecorder:
    """Keeps where the tokens of a model's latest forward pass went. Raises ConfigError for a model without
    experts.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        routers = routers_of(lm)
        if not routers:
            raise ConfigError(f"a {lm.config.model_type} model has no routes to keep", key="router.replay")
        self.shape = shape_of_routes(routers)
        self._chosen: list[torch.Tensor] = [torch.empty(0)] * len(routers)
        for layer, router in enumerate(routers):
            router.module.forward = functools.partial(self._keep, layer, router.module.forward)

    def _keep(self, layer: int, forward: Callable[..., Any], *arguments: Any) -> Any:
        out = forward(*arguments)
        self._chosen[layer] = out[2]
        return out

    def latest(self) -> torch.Tensor:
        """Returns the routes of its N tokens, [N, W] of the shape's type."""
        kind = torch.from_numpy(np.empty(0, self.shape.dtype)).dtype
        return torch.cat(self._chosen, 1).to(kind)


def affinities(logits: torch.Tensor, model_type: str) -> torch.Tensor:
    """Returns how much each token leans to each expert, [N, E], summing to 1, in at least float32.

    Sigmoids are divided by their sum (DeepSeek-V3, arXiv:2412.19437, eq. 19).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if model_type not in _SIGMOID:
        return wide.softmax(-1)
    scores = wide.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def why_not_replayed(config: PreTrainedConfig) -> str:
    """Returns why routers of this model cannot be told which experts to choose; "": they can."""
    text = config.get_text_config()
    if text.model_type == "phimoe":
        return "its routers (sparse mixer) choose the experts one after another"
    if text.model_type in _SILENT:
        return "its routers do not say which experts they chose"
    if text.model_type == "deepseek_v2" and text.topk_method == "group_limited_greedy":
        return "its routers give experts outside of the groups that they choose now no weight"
    return ""


class Told(TorchFunctionMode):
    """Has the routers that run inside choose `experts`, int64 [N, k] (a negative one: what it would choose
    itself). Weights are made of what the router computes now, and its gradient is theirs.

    What is replaced is the one top-k over all E experts of each token; others choose groups of experts.
    """

    def __init__(self, experts: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._num_experts = num_experts
        self.own: torch.Tensor | None = None  # what it would have chosen, int64 [N, k]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK or out[1].shape != self._experts.shape or args[0].shape[-1] != self._num_experts:
            return out
        self.own = out[1].detach()
        chosen = torch.where(self._experts < 0, out[1], self._experts)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
