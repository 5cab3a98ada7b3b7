"""The command line of `rondo sandbox`, without a sandbox."""

from __future__ import annotations

import argparse

import pytest

from rondo.core.errors import ConfigError
from rondo.system.access import SANDBOX_KEY
from rondo_sandbox.command import add_parser, run


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SANDBOX_KEY, raising=False)


def parsed(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["sandbox", *line])


def test_what_holds_where_nothing_is_given() -> None:
    check, serve = parsed("check"), parsed("serve")
    assert (check.action, check.backend) == ("check", "auto")
    assert (serve.action, serve.backend, serve.host, serve.port) == ("serve", "auto", "127.0.0.1", 8080)
    assert serve.at_once is None


@pytest.mark.parametrize(("at_once", "refused"), [("0", True), ("-1", True), ("1", False)])
def test_how_many_at_once(at_once: str, refused: bool) -> None:
    """One that may be passes on to the next check: whether others may ask without a key."""
    wrong = f"--at-once {at_once}: it must be at least 1" if refused else "can be reached from other"
    with pytest.raises(ConfigError, match=wrong):
        run(parsed("serve", "--at-once", at_once, "--host", "0.0.0.0"))


def test_none_at_once_is_as_many_as_processors() -> None:
    with pytest.raises(ConfigError, match="can be reached from other"):
        run(parsed("serve", "--host", "0.0.0.0"))
