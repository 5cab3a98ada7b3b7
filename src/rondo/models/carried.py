"""What a model folder says besides weights, config and tokenizer: which tokens end an answer, and files that
are for others and go along into an export.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from rondo.core.errors import DataError
from rondo.models.files import BESIDE_TOKENIZER, TOKENIZER_FILES, json_object
from rondo.models.source import ModelSource
from rondo.system.hub import local_folder

GENERATION = "generation_config.json"
MOST_BYTES = 1 << 20
"""Of a file that is carried: what is larger is no text that somebody wrote."""
README, BASE_README = "README.md", "README.base.md"
# Those of an export are written anew; those that are about files of weights would be about none there.
_OWN = {"config.json", "manifest.json", *TOKENIZER_FILES, *BESIDE_TOKENIZER}
_OF_WEIGHTS = ("adapter_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end an answer as transformers' `generate` has it: those of
    generation_config.json, else of config.json. Raises DataError for what are no token ids.
    """
    for name in (GENERATION, "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        found = json_object(file).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(one) is int and one >= 0 for one in ids):
            raise DataError(f"{file}: eos_token_id must be a token id or a list of them, got {found!r:.80}")
        return tuple(sorted(set(ids)))
    return ()


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Returns how generation_config.json would have answers sampled, where it says so."""
    file = folder / GENERATION
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")
    found = json_object(file) if file.is_file() else {}
    return {name: found[name] for name in names if found.get(name) is not None}


def carry(source: ModelSource, target: Path) -> list[str]:
    """Copies generation_config.json and other text files that rondo does not write itself from a model's
    folder into another; returns their names there. Code is among them only if it is trusted. The base's
    README is not the new model's: it becomes README.base.md, and the README.base.md beside it
    README.base.base.md.
    """
    assert source.path is not None
    carried = []
    for file in sorted(Path(local_folder(source.path, source.hub)).iterdir()):
        if _is_carried(file, source.trust_remote_code):
            is_card = re.fullmatch(r"README(\.base)*\.md", file.name)  # of a base, or of a base of that
            name = file.name.replace("README", "README.base", 1) if is_card else file.name
            shutil.copyfile(file, target / name)
            carried.append(name)
    return carried


def _is_carried(file: Path, code: bool) -> bool:
    if not file.is_file() or file.name.startswith(".") or file.name in _OWN or file.name in _OF_WEIGHTS:
        return False
    if file.suffix == ".py" and not code:
        return False
    if file.stat().st_size > MOST_BYTES or file.name.endswith(".index.json"):
        return False
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
