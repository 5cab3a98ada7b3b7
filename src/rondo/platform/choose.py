"""Which platform: of a device, of a recipe's cluster.device, and of this machine."""

from __future__ import annotations

import functools
import os

import torch

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, about
from rondo.platform.base import Platform
from rondo.platform.cpu import Cpu
from rondo.platform.cuda import Cuda
from rondo.system.border import users_code

# In processes that rondo starts: the platform that the recipe names by a path.
VARIABLE = "RONDO_PLATFORM"
_BUILT_IN = {"cpu": Cpu(), "cuda": Cuda()}


class _Meta(Cpu):
    """Torch's device without memory, on which shapes are worked out: nothing is cut into pieces there."""

    kind = "meta"
    host = False
    numbers = Cuda.numbers


def platform_of(device: torch.device | str) -> Platform:
    """Returns the platform of a device. device: torch's, or its name or kind. Raises ConfigError for a kind
    that nobody has described.
    """
    kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    found = _platforms().get(kind)
    if found is None:
        raise ConfigError(
            f"rondo knows no platform for {kind!r} devices; write one and name it by cluster.device "
            "(docs/hardware.md)"
        )
    return found


def on_host(device: torch.device | str) -> bool:
    """Says whether a device's memory is the host's."""
    return platform_of(device).host


def built_in() -> tuple[Platform, ...]:
    """Returns rondo's own platforms."""
    return tuple(_BUILT_IN.values())


def planned(choice: str) -> Platform:
    """Returns the platform that `cluster.device` says, which from now on is that of its kind in this process;
    auto: CUDA where torch sees a device of it, else the CPU. Raises ConfigError where a path leads to none.
    """
    if choice == "auto":
        choice = next(kind for kind in ("cuda", "cpu") if _BUILT_IN[kind].available())
    found = _BUILT_IN.get(choice) or _at(choice)
    _platforms()[found.kind] = found
    return found


def named_in_environment(platform: Platform) -> dict[str, str]:
    """Returns variables of a process in which `platform_of` is to find the same as here."""
    return {VARIABLE: platform.path} if platform.path else {}


def hidden() -> dict[str, str]:
    """Returns variables of a process that sees no device but the host."""
    return {one.visible: "" for one in _platforms().values() if one.visible}


@functools.cache
def _platforms() -> dict[str, Platform]:
    """By kind."""
    found = {**_BUILT_IN, "meta": _Meta()}
    if path := os.environ.get(VARIABLE):
        own = _at(path)
        found[own.kind] = own
    return found


@functools.cache
def _at(path: str) -> Platform:
    with about("cluster.device"):
        written = resolve_function(path)
    with users_code(f"cluster.device={path}", ConfigError):
        made = written()
    if not isinstance(made, Platform):
        raise ConfigError(
            f"cluster.device={path}: it makes {type(made).__name__}, no rondo.platform.Platform"
        )
    missing = [name for name in Platform.__annotations__ if not hasattr(made, name)]
    if missing:
        raise ConfigError(f"cluster.device={path}: it does not say {', '.join(missing)}; docs/hardware.md")
    try:
        torch.device(made.kind)
    except RuntimeError as error:
        raise ConfigError(
            f"cluster.device={path}: torch knows no devices of kind {made.kind!r}; import here what brings it"
        ) from error
    with users_code(f"cluster.device={path}: count", ConfigError):
        number = made.count()
    if type(number) is not int or number < 0:
        raise ConfigError(f"cluster.device={path}: count() is {number!r}, and no number of devices")
    made.path = path
    return made
