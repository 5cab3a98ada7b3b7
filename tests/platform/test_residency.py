"""Who holds what in which phase, and in which order it moves and goes back."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rondo.planning.memory import Owner, ResidencyPlan
from rondo.platform import Residency, residency
from rondo.platform.cpu import Cpu
from rondo.platform.cuda import Cuda
from tests.platform.streams import Noted

RESTS = "rest, changed"


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


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_leaves_holes_gives_large_blocks_back_and_nothing_in_between(
    happened: list[str], device: str
) -> None:
    held = Residency(device, leaves_holes=True)
    held.built()
    assert happened == ["large blocks" if device == "cpu" else "release"]
    happened.clear()
    with held.during("update"):
        happened.append("update")
    assert happened == ["update"]


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


GIB = 1 << 30


def test_a_plan_says_what_is_there_in_each_phase() -> None:
    """By hand, of a model of 2 GiB that learns, whose moments pass a GiB at a time."""
    stays = ResidencyPlan(2 * GIB, 2 * GIB, 4 * GIB)
    assert stays.of("rest") == stays.of("forward") == {"weights": 2 * GIB, "moments": 4 * GIB}
    assert stays.of("update") == {"weights": 2 * GIB, "gradients": 2 * GIB, "moments": 4 * GIB}
    rests = ResidencyPlan(2 * GIB, 2 * GIB, 4 * GIB, weights_rest=True, moments_pass=GIB)
    assert rests.describe() == (
        "rest: nothing; forward: weights 2.00 GiB; update: weights 2.00, moments 1.00, gradients 2.00 GiB; "
        "gather: weights 2.00 GiB"
    )
    assert ResidencyPlan(GIB).describe() == "; ".join(
        f"{name}: weights 1.00 GiB" for name in ("rest", "forward", "update", "gather")
    )


def test_what_is_measured_is_the_most_of_a_phase_beside_what_was_planned(
    happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: dict[Owner, int] = {"weights": 0, "gradients": 0}
    peak = 50  # of what was before
    monkeypatch.setattr(Cuda, "peak", lambda self, device: peak)
    monkeypatch.setattr(Cuda, "reset_peak", lambda self, device: happened.append("from here on"))
    held = Residency("cuda:3", yields=True, plan=ResidencyPlan(10, 10), held=lambda: there)
    with held.during("update"):
        there |= {"weights": 10}
        peak = 7
        with held.during("update"):
            there |= {"gradients": 8}
            with held.during("update"):  # the optimizer's step
                there |= {"gradients": 0}
        there |= {"weights": 3}
    assert happened == ["from here on", "release"]
    assert held.measured() == {
        "update_weights_bytes": 10,
        "update_weights_planned_bytes": 10,
        "update_gradients_bytes": 8,
        "update_gradients_planned_bytes": 10,
        "update_peak_bytes": 7,
        "rest_weights_bytes": 3,
        "rest_weights_planned_bytes": 10,
    }
    assert held.measured() == {}
    assert held.peak() == 50
