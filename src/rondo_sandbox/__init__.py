"""Runs code that nobody has read, such as a policy's: held by the kernel, within limits (docs/sandbox.md).

Importing it imports nothing: `rondo --help` does, for the command.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rondo_sandbox.records import Files, Limits, Result, Status
    from rondo_sandbox.runs import Sandbox, Session, Warm, check_sandbox, open_sandbox, shared_sandbox

__all__ = (
    "Files",
    "Limits",
    "Result",
    "Sandbox",
    "Session",
    "Status",
    "Warm",
    "check_sandbox",
    "open_sandbox",
    "shared_sandbox",
)


def __getattr__(name: str) -> Any:
    """Imports what is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rondo_sandbox import records, runs

    return getattr(runs if hasattr(runs, name) else records, name)
