"""One configuration under validation: its values, where they were set, and how to say that one is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from rondo.config.schema import Config
from rondo.config.tree import Origin
from rondo.errors import ConfigError


class Check:
    """The configuration with the origins of its keys."""

    def __init__(self, config: Config, origins: Mapping[str, Origin]) -> None:
        self.config = config
        self._origins = origins

    def value(self, key: str) -> Any:
        found: Any = self.config
        for part in key.split("."):
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        return found

    def fail(self, key: str, message: str) -> NoReturn:
        """ConfigError at the place where `key` was set: `recipe.yaml:3: <message>`."""
        where = self._where(key)
        raise ConfigError(f"{where}: {message}" if where else message)

    def named(self, key: str) -> str:
        """`actor.mini_batch_size = 4 (recipe.yaml:9)`: a second key in a message."""
        return f"{key} = {shown(self.value(key))} ({self._where(key) or 'default'})"

    def require(self, key: str, holds: bool, what: str) -> None:
        """`rollout.top_p must be above 0 and at most 1, got 1.5`."""
        if not holds:
            self.fail(key, f"{key} must be {what}, got {shown(self.value(key))}")

    def at_least(self, key: str, minimum: int) -> None:
        value = self.value(key)
        self.require(key, value is None or value >= minimum, f"at least {minimum}")

    def _where(self, key: str) -> str | None:
        if key in self._origins:
            return self._origins[key].where
        below = [origin for known, origin in self._origins.items() if known.startswith(key + ".")]
        return below[0].where if below else None


def shown(value: Any) -> str:
    if value is None or isinstance(value, Mapping):
        return "null" if value is None else "{…}"
    return str(value).lower() if isinstance(value, bool) else str(value)
