"""Models: where they come from, how packed documents attend, names in checkpoints, value heads. No engine, no
ranks.
"""

from rondo.models.family import Family, family_of
from rondo.models.loading import build_model, check_model_folder, load_model_config, load_tokenizer
from rondo.models.source import ModelSource

__all__ = [
    "Family",
    "ModelSource",
    "build_model",
    "check_model_folder",
    "family_of",
    "load_model_config",
    "load_tokenizer",
]
