"""A folder that says what a model is, for engines that want one although their weights arrive otherwise."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rondo.errors import ConfigError
from rondo.models.loading import load_model_config
from rondo.rollout.protocol import EngineSpec


def model_folder(spec: EngineSpec) -> Path:
    """A new temporary folder with config.json (and the model's own Python files where they are trusted): for
    engines that start from dummy weights and without a tokenizer. In spec.folder, which goes with the
    engine's process; the caller removes it where it can.

    config.json names the architecture (`Qwen3ForCausalLM`) also where the source's config leaves it out.
    Raises ConfigError or DataError.
    """
    config = copy.deepcopy(load_model_config(spec.source))
    if not config.architectures:
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if architecture is None:
            raise ConfigError(
                f"model type {config.model_type!r} has no causal language model in transformers, and its "
                f"config names no `architectures`: {spec.engine} cannot know what to build"
            )
        config.architectures = [architecture] if isinstance(architecture, str) else list(architecture)
    config.dtype = spec.dtype
    folder = Path(tempfile.mkdtemp(prefix=f"rondo-{spec.engine}-", dir=spec.folder))
    config.save_pretrained(folder)
    if spec.source.trust_remote_code and spec.source.path and Path(spec.source.path).is_dir():
        for file in Path(spec.source.path).glob("*.py"):
            shutil.copy(file, folder)
    return folder
