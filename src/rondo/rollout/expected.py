"""What a complete set of weights is, by the model's config, for engines that cannot say what they lack."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rondo.errors import ConfigError
from rondo.models.experts import why_not_separate
from rondo.weights.intake import Intake


def expected_weights(model_config: Any, *, trust_remote_code: bool = False) -> Intake:
    """The intake of a causal LM's parameters; allocates nothing. Raises ConfigError for experts that such an
    engine could not be given.
    """
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config), trust_remote_code=trust_remote_code
        )
    intake = Intake(module.named_parameters(remove_duplicate=False))
    why_not = why_not_separate(model_config, intake.shapes.items())
    if why_not:
        raise ConfigError(f"{why_not}; use rollout.engine=native")
    return intake
