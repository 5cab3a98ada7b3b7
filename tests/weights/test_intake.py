"""The books of an update: what belongs to a model, what has come, whether it is what was sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

from rondo.core.errors import WeightSyncError
from rondo.rollout.third_party_engine import expected_weights
from rondo.weights.intake import Intake
from tests.messages import full_text


@pytest.fixture
def intake(tiny_qwen_config: Any) -> Intake:
    """Two layers of 11 parameters, the embedding (tied to the head) and the last norm."""
    return expected_weights(tiny_qwen_config)[0]


def take_all(intake: Intake, version: int) -> None:
    intake.begin(version)
    for name in intake.missing():
        intake.take(name, intake.shapes[name])


def test_names_shapes_and_ties(intake: Intake) -> None:
    assert len(intake) == 2 * 11 + 2
    intake.begin(3)
    every = intake.missing()
    assert len(every) == len(intake)
    for name in every:
        if name != "model.embed_tokens.weight":
            intake.take(name, intake.shapes[name])
    assert intake.missing() == ["model.embed_tokens.weight"]
    with pytest.raises(WeightSyncError, match=full_text("1 of 24 tensors did not arrive")):
        intake.check(3)
    assert intake.take("lm_head.weight", (128, 64)) == "model.embed_tokens.weight"  # its other name
    intake.check(3)
    intake.finish(3)
    assert (intake.version, intake.complete, intake.arriving) == (3, True, None)
    with pytest.raises(WeightSyncError, match=full_text("'model.norm.weight' has shape (63,)")):
        intake.fit("model.norm.weight", (63,))
    with pytest.raises(WeightSyncError, match=full_text("no parameter 'model.norms.weight'")):
        intake.fit("model.norms.weight", (63,))


def test_checksums_of_either_name(intake: Intake) -> None:
    take_all(intake, 1)
    intake.note({"lm_head.weight": 7})
    computed: list[str] = []

    def compute(canonical: Collection[str]) -> dict[str, int]:
        computed.extend(canonical)
        return dict.fromkeys(canonical, 8)

    intake.check(1, {"model.embed_tokens.weight": 7, "model.norm.weight": 8}, compute)
    assert computed == ["model.norm.weight"]  # the other was noted
    with pytest.raises(WeightSyncError, match=full_text("'model.norm.weight' is not what was sent")):
        intake.check(1, {"model.norm.weight": 9}, compute)
    with pytest.raises(WeightSyncError, match=r"not what was sent \(checksum none"):
        intake.check(1, {"model.norm.weight": 8})


def test_outside_an_update_nothing_is_taken(intake: Intake) -> None:
    with pytest.raises(WeightSyncError, match="arrived outside begin"):
        intake.take("model.norm.weight", (64,))
    intake.begin(1)
    with pytest.raises(WeightSyncError, match=r"commit\(2\) without begin\(2\)"):
        intake.check(2)
    intake.take("model.norm.weight", (64,))
    intake.begin(2)  # what came for 1 does not count
    assert len(intake.missing()) == len(intake)


def test_a_failure_is_kept_until_the_next_update(intake: Intake) -> None:
    take_all(intake, 1)
    intake.finish(1)
    intake.fail("the first")
    intake.fail("what followed from it")
    assert (intake.complete, intake.version) == (False, 1)
    with pytest.raises(WeightSyncError, match=r"outside begin … commit \(the first\)"):
        intake.take("model.norm.weight", (64,))
    take_all(intake, 2)
    assert intake.failure == ""
    intake.check(2)


def test_adapters_by_themselves_want_their_base_once(tiny_qwen_config: Any) -> None:
    """A and B come with every set; the parameters with the first, whole, and whenever they come again."""
    plain = expected_weights(tiny_qwen_config)[0]
    shapes = {"a": (2, 64), "b": (64, 2)}
    intake = Intake([(name, torch.empty(shape)) for name, shape in plain.shapes.items()], shapes)

    def take(names: Iterable[str], version: int) -> None:
        intake.begin(version)
        for name in names:
            intake.take(name, shapes.get(name) or intake.shapes[name])

    take(shapes, 0)
    with pytest.raises(WeightSyncError, match=r"25 of 27 tensors did not arrive"):
        intake.check(0)
    take([*intake.shapes, *shapes], 0)
    intake.check(0)
    intake.finish(0)
    take(["a"], 1)
    with pytest.raises(WeightSyncError, match=r"1 of 2 tensors did not arrive: b;"):
        intake.check(1)
    take(["a", "b"], 1)
    intake.note({"a": 1, "b": 2})
    intake.check(1, {"a": 1, "b": 2})
    with pytest.raises(WeightSyncError, match="'b' is not what was sent"):
        intake.check(1, {"a": 1, "b": 3})
    intake.finish(1)
    take(["model.norm.weight", "a", "b"], 2)  # a part of the base again: then all of it
    with pytest.raises(WeightSyncError, match=r"24 of 27 tensors did not arrive"):
        intake.check(2)
    take(["a", "b"], 3)  # of which the base is in doubt since then
    with pytest.raises(WeightSyncError, match=r"25 of 27 tensors did not arrive"):
        intake.check(3)
    with pytest.raises(WeightSyncError, match=full_text("'a' has shape (3, 64), the model wants")):
        intake.take("a", (3, 64))
