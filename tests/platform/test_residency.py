"""Who holds what in which phase, and in which order it moves and goes back."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rondo.platform import Residency, residency
from rondo.platform.cpu import Cpu
from rondo.platform.cuda import Cuda

RESTS = "rest, changed"


class Noted:
    """What rests, written down."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def bring(self) -> None:
        self._happened.append("bring")

    def rest(self, *, changed: bool) -> None:
        self._happened.append("rest, changed" if changed else "rest")


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order; on platforms that do nothing."""
    done = list[str]()
    for platform in (Cpu, Cuda):
        monkeypatch.setattr(platform, "release", lambda self, device: done.append("release"))
    monkeypatch.setattr(residency, "give_back_large_blocks", lambda: done.append("large blocks"))
    monkeypatch.setattr(dist, "barrier", lambda group: done.append("all have"))
    return done


@pytest.mark.parametrize(
    ("device", "rests", "yields", "built", "phase", "before_others"),
    [
        ("cuda:0", False, False, ["release"], [], ["release", "all have"]),
        ("cuda:0", False, True, ["release"], ["release"], ["release", "all have"]),
        ("cuda:0", True, True, [RESTS, "release"], [RESTS, "release"], ["release", "all have"]),
        ("cuda:0", True, False, [RESTS, "release"], [RESTS], ["release", "all have"]),
        ("cpu", False, False, [], [], []),
        ("cpu", False, True, ["large blocks"], ["release"], ["release"]),
    ],
)
def test_what_rests_goes_first_and_all_ranks_have_given_back_before_others_take(
    happened: list[str],
    device: str,
    rests: bool,
    yields: bool,
    built: list[str],
    phase: list[str],
    before_others: list[str],
) -> None:
    held = Residency(device, yields=yields, resting=Noted(happened) if rests else None)
    held.built()
    assert happened == built
    happened.clear()
    with held.during("update"), held.during("forward"), held.during("gather"):
        happened.append("update")
    assert happened == [*["bring"] * rests, "update", *phase]
    happened.clear()
    held.make_room(None)  # type: ignore[arg-type]
    assert happened == before_others


def test_a_phase_that_fails_ends_as_others_do(happened: list[str]) -> None:
    held = Residency("cuda:0", yields=True, resting=Noted(happened))
    with pytest.raises(ZeroDivisionError), held.during("forward"):
        raise ZeroDivisionError
    assert happened == ["bring", "rest", "release"]
    with held.during("forward"), held.during("update"):  # the next one is one of its own
        pass
    with held.during("gather"):
        pass
    assert happened[3:] == ["bring", RESTS, "release", "bring", "rest", "release"]
