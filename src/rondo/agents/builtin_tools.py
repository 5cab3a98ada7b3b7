"""The tools that rondo ships, by their names in `rollout.tools`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from rondo.core.arithmetic import evaluate_expression
from rondo.core.errors import ConfigError, ToolError
from rondo.sandbox import Limits, Result, Session, check_sandbox, shared_sandbox

_SAID = {
    "time_limit": "it took longer than {seconds:g} s and was ended",
    "memory_limit": "it used more than {memory_mb} MB and was ended",
    "output_limit": "it printed too much and was ended",
    "disk_limit": "it wrote too much and was ended",
    "lost": "it ended its own process; variables are gone",
}


def calculator(expression: str) -> str:
    """Computes + - * / with parentheses, exactly.

    expression: such as (12 + 3) * 4 / 5
    """
    computed = evaluate_expression(expression, decimals=True)
    if computed is None:
        raise ToolError("not an expression of numbers with + - * / and parentheses, or it divides by zero")
    value = computed[0]
    try:
        return str(value.numerator) if value.denominator == 1 else repr(float(value))
    except (OverflowError, ValueError):  # beyond a double; more digits than Python writes
        raise ToolError("the value is too large to be written down") from None


class Python:
    """Runs Python and returns what it prints, and the value of a last line. Variables stay from call to call.

    code: the program
    """

    tool_name = "python"

    def __init__(self, *, backend: str = "auto", seconds: float = 10.0, memory_mb: int = 1024) -> None:
        """backend: of the sandbox. seconds, memory_mb: of each call."""
        try:
            self._limits = Limits(seconds=seconds, memory_mb=memory_mb)
        except ValueError as error:
            raise ConfigError(f"rollout.tools: python: {error}") from error
        self._backend = backend
        self._open = AsyncExitStack()
        self._session: Session | None = None

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError for wrong options, SandboxError where this machine can hold no program."""
        check_sandbox(cls(**options)._backend)

    async def __call__(self, code: str) -> str:
        if self._session is None:
            sandbox = await shared_sandbox(self._backend)
            self._session = await self._open.enter_async_context(sandbox.session(self._limits))
        return self._said(await self._session.run(code))

    def _said(self, result: Result) -> str:
        if result.status == "finished":
            return result.stdout
        why = _SAID.get(result.status, "").format(**vars(self._limits))
        return "\n".join(
            filter(None, [result.stdout.rstrip(), result.stderr.rstrip(), why and f"Error: {why}"])
        )

    async def close(self) -> None:
        """Ends the session."""
        await self._open.aclose()
