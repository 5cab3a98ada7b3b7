"""A name of 100,000 characters at each door that takes one: the error has its beginning and its length."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.cli import main as cli
from rondo.core.errors import ConfigError

NAME = "x" * 100_000
CHECK = ("check", "quickstart")
DOORS = [
    (*CHECK, f"algorithm.advantage={NAME}"),
    (*CHECK, f"algorithm.policy_loss={NAME}"),
    (*CHECK, f"rollout.tools=[{{name: {NAME}}}]"),
    (*CHECK, f"rollout.environments=[{{name: {NAME}}}]"),
    (*CHECK, f"reward.functions=[{{name: {NAME}}}]"),
    (*CHECK, f"reward.functions=[{{name: a.py:{NAME}}}]"),
    (*CHECK, f"data.train=[{{type: jsonl, path: {NAME}}}]"),
    (*CHECK, f"data.train=[{{type: {NAME}}}]"),
    (*CHECK, f"rollout.engine={NAME}"),
    (*CHECK, f"model.path={NAME}"),
    (*CHECK, f"trainer.{NAME}=1"),
    (*CHECK, f"{NAME}=1"),
    ("config", "show", NAME),
    ("list", NAME),
    ("show", NAME),
    ("doctor", NAME),
    ("search", "query", NAME, "a"),
    ("sandbox", "check", "--backend", NAME),
]


@pytest.mark.parametrize("arguments", DOORS, ids=lambda arguments: " ".join(arguments)[:45])
def test_names_in_errors_are_cut(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert "xxxxxxxx" in said
    assert len(said) < 2000


def test_what_is_cut_and_what_is_not() -> None:
    assert str(ConfigError("a " + "b" * 1000 + " c")) == "a " + "b" * 1000 + " c"
    assert str(ConfigError("a " + "b" * 1001 + " c", key="k")) == "a " + "b" * 200 + "… (1001 characters) c"
