"""The tool `python`: programs of one trajectory, in one sandbox whose variables stay."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from rondo.core.errors import ConfigError
from rondo_sandbox import Limits, Result, Session, check_sandbox, shared_sandbox

_SAID = {
    "time_limit": "it took longer than {seconds:g} s and was ended",
    "memory_limit": "it used more than {memory_mb} MB and was ended",
    "output_limit": "it printed too much and was ended",
    "disk_limit": "it wrote too much and was ended",
    "lost": "it ended its own process; variables are gone",
}


class InSandbox:
    """A tool whose calls run programs in one sandbox."""

    tool_name = "python"
    one_at_a_time = True  # the calls of one answer: in their order, in one session
    _output_bytes = 1 << 20  # that a call may print

    def __init__(
        self,
        *,
        backend: str = "auto",
        seconds: float = 10.0,
        memory_mb: int = 1024,
        packages: Sequence[str] = (),
    ) -> None:
        """Checks the limits; the sandbox opens with the first call. backend: the sandbox's. seconds,
        memory_mb: limits of each call. packages: folders whose packages programs may import.
        """
        try:
            self._limits = Limits(seconds=seconds, memory_mb=memory_mb, output_bytes=self._output_bytes)
        except ValueError as error:
            raise ConfigError(f"rollout.tools: {self.tool_name}: {error}") from error
        self._backend = backend
        self._packages = tuple(packages)
        self._open = AsyncExitStack()
        self._session: Session | None = None

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError for wrong options, SandboxError where this machine can hold no program."""
        tool = cls(**options)
        check_sandbox(tool._backend, tool._limits.memory_mb, tool._packages)

    async def _ran(self, code: str) -> Result:
        if self._session is None:
            sandbox = await shared_sandbox(self._backend, self._packages)
            self._session = await self._open.enter_async_context(sandbox.session(self._limits))
        return await self._session.run(code)

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


class Python(InSandbox):
    """Runs Python and returns what it prints, and the value of a last line. Variables stay from call to call.

    code: the program
    """

    async def __call__(self, code: str) -> str:
        return self._said(await self._ran(code))
