"""The process behind `run_in="process"`: `python -m rondo.rewards.worker SPEC` loads a function and serves
calls.

It reads (args, options, timeout) from standard input and answers ("value" | "error" | "limit" | …, what). It
ends when its input closes; a call over its time limit ends it through SIGALRM, whatever the call is doing and
whether anybody watches.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import traceback
from typing import Any

from rondo.config.functions import resolve_function
from rondo.errors import ConfigError, DataError
from rondo.rewards.builtin import BUILTINS
from rondo.rewards.execution import receive, send


def main(spec: str) -> None:
    """Serve calls of the function `spec` until standard input closes."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints goes to standard error, not between the answers
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's own end: works in a loop of C code too
    try:
        function = resolve_function(spec, BUILTINS)
    except ConfigError as error:
        send(answers, ("config", str(error)))
        return
    memory = getattr(function, "memory_bytes", None)
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    send(answers, ("value", None))
    while True:
        try:
            args, options, timeout = receive(requests)
        except EOFError:
            return
        _answer(answers, _called(function, args, options, timeout))


def _called(function: Any, args: tuple[Any, ...], options: dict[str, Any], timeout: float) -> tuple[str, Any]:
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        return "value", function(*args, **options)
    except ConfigError as error:
        return "config", str(error)
    except DataError as error:
        return "data", str(error)
    except MemoryError:
        return "limit", "the reward function was over its memory limit"
    except Exception:
        return "error", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(answers: Any, answer: tuple[str, Any]) -> None:
    try:
        send(answers, answer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        send(
            answers,
            (
                "error",
                f"the reward function returned {type(answer[1]).__name__}, which cannot be sent: {error}",
            ),
        )


if __name__ == "__main__":
    main(sys.argv[1])
