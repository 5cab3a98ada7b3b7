"""Models: where they come from, how packed documents attend, names in checkpoints, value heads. No engine, no
ranks.
"""

from rondo.models.family import Family, family_of
from rondo.models.files import check_model_folder
from rondo.models.loading import (
    build_model,
    count_parameters,
    is_function,
    load_model_config,
    load_tokenizer,
)
from rondo.models.positions import STRETCH, check_positions, longest_context
from rondo.models.source import ModelSource, TokenizerSource

__all__ = [
    "STRETCH",
    "Family",
    "ModelSource",
    "TokenizerSource",
    "build_model",
    "check_model_folder",
    "check_positions",
    "count_parameters",
    "family_of",
    "is_function",
    "load_model_config",
    "load_tokenizer",
    "longest_context",
]
