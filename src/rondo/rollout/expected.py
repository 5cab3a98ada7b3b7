"""What a complete set of weights is, by the model's config: names, shapes, ties. Allocates nothing."""

from __future__ import annotations

import copy
import difflib
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rondo.errors import ConfigError, WeightSyncError
from rondo.models.experts import why_not_separate


class ExpectedWeights:
    """The parameters of a causal LM under their names, for engines that cannot say what they lack.

    One update at a time: `begin`, `arrived` for every tensor, `missing`. Tied parameters may come under any
    one of their names. Raises ConfigError for experts that such an engine could not be given.
    """

    def __init__(self, model_config: Any, *, trust_remote_code: bool = False) -> None:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                copy.deepcopy(model_config), trust_remote_code=trust_remote_code
            )
        first: dict[int, str] = {}
        self._canonical: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._canonical[name] = first.setdefault(id(parameter), name)
            self._shapes[name] = tuple(parameter.shape)
        why_not = why_not_separate(model_config, self._shapes.items())
        if why_not:
            raise ConfigError(f"{why_not}; use rollout.engine=native")
        self._open = set(self._canonical.values())

    def begin(self) -> None:
        self._open = set(self._canonical.values())

    def arrived(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises WeightSyncError for a name that the model does not have, or another shape."""
        if name not in self._shapes:
            near = difflib.get_close_matches(name, self._shapes, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise WeightSyncError(f"the model has no parameter {name!r}{hint}")
        if tuple(shape) != self._shapes[name]:
            raise WeightSyncError(f"{name!r} has shape {tuple(shape)}, the model wants {self._shapes[name]}")
        self._open.discard(self._canonical[name])

    def canonical(self, name: str) -> str:
        """The first of a tied parameter's names; of any other its only one."""
        return self._canonical[name]

    def missing(self) -> list[str]:
        """Names of what has not come since `begin`, sorted."""
        return sorted(self._open)

    def __len__(self) -> int:
        return len(set(self._canonical.values()))
