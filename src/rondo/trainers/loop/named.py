"""What a configuration names outside of its run: model folders, a chat template, files with functions. Their
names say nothing of what they hold, so that a checkpoint keeps a digest of each file (named.json), and where
it was: a run that goes on with others says so, and an export from another directory finds the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rondo.config import Config, leaves_of
from rondo.core.errors import DataError, OtherRunError
from rondo.models import is_function
from rondo.models.files import TEMPLATE, digest_of, digests_in, is_of_weights
from rondo.system.hub import local_folder

# By key: `name` as the configuration has it, `at`: that of a file or folder here, absolute, `files`: digests.
Named = Mapping[str, Mapping[str, Any]]

_MODEL = re.compile(
    r"model\.(path|tokenizer)|(actor\.lora|critic|critic\.lora|reference|teacher|models\.[^.]+|"
    r"reward\.models\.\d+)\.path"
)
_TEMPLATE_FILE = "model.chat_template"
_FUNCTION = re.compile(r"(.+\.py):[\w.]+")
# Those that a resumed run has to share. Other models, and code, may change, and it is said that they did.
_FIXED = re.compile(r"model\.(path|tokenizer|chat_template)|actor\.lora\.path|critic\..*|reference\.path")


def named_files(config: Config) -> dict[str, dict[str, Any]]:
    """Returns what the names mean now. What is not there is left out: who needs it says so."""
    found: dict[str, dict[str, Any]] = {}
    for key, name in leaves_of(config).items():
        if not isinstance(name, str):
            continue
        function = _FUNCTION.fullmatch(name)
        file = Path(function[1] if function else name).expanduser()
        at: str | None
        if (function or key == _TEMPLATE_FILE) and file.is_file():
            at = os.path.abspath(file) + (name[function.end(1) :] if function else "")
            found[key] = {"name": name, "at": at, "files": {"": digest_of(file.read_bytes())}}
        elif _MODEL.fullmatch(key) and not (key == "model.tokenizer" and is_function(name)):
            with suppress(DataError):
                folder = _folder(config, key)
                at = os.path.abspath(name) if os.path.isdir(name) else None
                found[key] = {"name": name, "at": at, "files": digests_in(folder)}
    if config.model.chat_template is not None:  # it is read in the place of theirs
        for one in found.values():
            one["files"].pop(TEMPLATE, None)
    return found


def _folder(config: Config, key: str) -> Path:
    """Returns the folder of a model on this machine, where the run has had it from before. Raises DataError
    where only other machines have it.
    """
    name = config.at(key)  # with the password of a URL, which no leaf has
    if config.cluster.backend.address is not None and not os.path.isdir(name):
        raise DataError(f"{name} is looked up by each machine for itself")
    weights = key != "model.tokenizer" or name == config.model.path
    return Path(local_folder(name, config.model.hub, weights=weights))


def changed_files(old: Named, new: Named, *, weights: bool = True) -> tuple[list[str], list[str]]:
    """Returns a line for each name that means something else than before: those that a resumed run has to
    share, and others. weights: whether they count.
    """
    fixed: list[str] = []
    free: list[str] = []
    for key, now in new.items():
        before = old.get(key)
        if before is None:
            continue
        if before["name"] != now["name"] and (now["at"] is None or before["at"] != now["at"]):
            continue  # which is another setting
        both = [one["files"] for one in (before, now)]
        # They may not be on this machine, yet.
        if not weights or not all(any(map(is_of_weights, files)) for files in both):
            both = [{name: files[name] for name in files if not is_of_weights(name)} for files in both]
        names = sorted(name for name in both[0] | both[1] if both[0].get(name) != both[1].get(name))
        if names:
            code = _FUNCTION.fullmatch(now["name"])
            within = f" ({', '.join(names)})" if any(names) else ""
            (fixed if _FIXED.fullmatch(key) and not code else free).append(
                f"{key}: {now['at'] or now['name']}{within}"
            )
    return fixed, free


def refuse_changed(lines: Sequence[str], remedy: str) -> None:
    """Raises OtherRunError where there are lines of `changed_files`."""
    if lines:
        told = "\n".join(f"  {line}" for line in lines)
        raise OtherRunError(
            f"since the checkpoint was written, this has changed under its name:\n{told}\nPut it back as it "
            f"was, {remedy}"
        )


def found_again(named: Named) -> dict[str, str]:
    """Returns settings by which models that were relative to the directory of a run are the same from here,
    as far as they are still there.
    """
    found = {}
    for key, one in named.items():
        function = _FUNCTION.fullmatch(one["at"] or "")
        file = function[1] if function else one["at"]
        if (_MODEL.fullmatch(key) or key == _TEMPLATE_FILE) and file is not None and os.path.exists(file):
            found[key] = str(one["at"])
    return found
