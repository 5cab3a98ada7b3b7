"""`rondo recipes` and `rondo list`: everything there is, a line each, in the words of its own text."""

from __future__ import annotations

import pytest

from rondo import algorithms
from rondo.cli import main as cli
from rondo.cli.listing import ALGORITHMS, BY_NAME, KINDS
from rondo.config import Config
from rondo.system.names import offered


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_every_recipe_has_a_line_that_its_own_comment_begins_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = dict(line.split(None, 1) for line in printed(capsys, "recipes"))
    assert set(lines) == set(offered("recipes"))
    assert lines["sapo"] == (
        "SAPO (2511.20347): a smooth gate around ratio 1 instead of a clip, steeper for negative advantages"
    )


def test_a_recipe_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "grpo"]) == 0
    assert capsys.readouterr().out == offered("recipes")["grpo"].read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_every_function_of_a_kind_has_a_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = offered(kind) if kind in BY_NAME else algorithms.names(ALGORITHMS[kind][0])
    assert [line.split()[0] for line in printed(capsys, "list", kind)] == list(names)


def test_a_line_says_what_a_function_does_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "list", "filters")
    assert lines[0] == (
        "accuracy_range  Keeps groups whose share of right answers (accuracy > 0) is in [low, high] "
        "(PRIME, 2502.01456: 0.2 to 0.8) [low=0.2, high=0.8]"
    )


def test_all_lists_together(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "list")
    assert [line.rstrip(":") for line in lines if line and not line.startswith(" ")] == list(KINDS)


def test_every_list_names_a_key_that_takes_one_of_it() -> None:
    for _, key in ALGORITHMS.values():
        section, name = key.split(".")
        assert hasattr(getattr(Config(), section), name), key


def test_unknown_names_are_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "losess"]) == 2
    assert "there is no list 'losess'; did you mean 'losses'?" in capsys.readouterr().err
    assert cli.main(["recipes", "grppo"]) == 2
    assert "there is no recipe 'grppo'; did you mean 'grpo'?" in capsys.readouterr().err
