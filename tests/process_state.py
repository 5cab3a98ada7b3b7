"""What a file of tests leaves as it found it: which file stands before which is chance."""

from __future__ import annotations

import asyncio
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

_PYTESTS = "PYTEST_"  # variables that change while it runs
LIBRARIES = (
    "the variable NVTE_",
    "the variable PYGAME_HIDE_SUPPORT_PROMPT",
    "the variable RAY_",
    "the variable TORCHINDUCTOR_CACHE_DIR",
    "the variable PYTHONBREAKPOINT",
    "the variable KINETO_LOG_LEVEL",
    "the variable WANDB_SERVICE",
    "the handler of SIGTERM",
)
"""What Megatron's configuration, Ray, torch's compiler and profiler, and W&B set and leave so."""
_LOGGER = "the logger "


def state() -> dict[str, Any]:
    """Returns how this process is set, by names that a message can say. What an import sets is not here
    (sys.path, sys.excepthook): a module is imported once.
    """
    umask = os.umask(0)
    os.umask(umask)
    found: dict[str, Any] = {
        "the folder": os.getcwd(),
        "umask": umask,
        "threading.excepthook": threading.excepthook,
        "the recursion limit": sys.getrecursionlimit(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "how processes start": multiprocessing.get_start_method(allow_none=True) or "fork",
        "the time limit of sockets": socket.getdefaulttimeout(),
        "the policy of event loops": type(asyncio.get_event_loop_policy()),
        "torch's dtype": torch.get_default_dtype(),
        "torch's device": torch.get_default_device(),
        "torch's threads": torch.get_num_threads(),
        "torch's gradients": torch.is_grad_enabled(),
        "torch's determinism": torch.are_deterministic_algorithms_enabled(),
    }
    for name, value in os.environ.items():
        if not name.startswith(_PYTESTS):
            found[f"the variable {name}"] = value
    for number in signal.valid_signals():
        if isinstance(number, signal.Signals) and number is not signal.SIGALRM:  # pytest-timeout's
            found[f"the handler of {number.name}"] = signal.getsignal(number)
    for name in (name for name in dir(resource) if name.startswith("RLIMIT_")):
        found[f"the limit {name}"] = resource.getrlimit(getattr(resource, name))
    for name in ("", "rondo", "transformers", "torch", "asyncio"):
        if name and name not in sys.modules:  # its import sets it up
            continue
        one = logging.getLogger(name)
        handlers = [each for each in one.handlers if not type(each).__module__.startswith("_pytest")]
        found[f"{_LOGGER}{name or 'above all'}"] = (one.level, one.propagate, one.disabled, handlers)
    return found


def take_back(before: Mapping[str, Any]) -> None:
    """Sets what LIBRARIES have left as it was."""
    for name in [name for name in {**before, **state()} if name.startswith(LIBRARIES)]:
        kind, _, short = name.rpartition(" ")
        if kind == "the handler of":
            signal.signal(getattr(signal, short), before[name])
        elif name in before:
            os.environ[short] = before[name]
        else:
            del os.environ[short]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns what is not as it was, a line each."""
    names = [*before, *(name for name in after if name not in before and not name.startswith(_LOGGER))]
    changed = [name for name in names if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name)!r} became {after.get(name)!r}" for name in changed]
