"""What the solver of MiniWoB does next, by what `state` says of a page: it needs no browser."""

from __future__ import annotations

from typing import Any

import pytest

from rondo_worlds.miniwob_adapter import next_action

SUBMIT = {"ref": 9, "tag": "button", "text": "Submit"}
TABS = [{"ref": 4, "tag": "a", "text": "Tab #1"}, {"ref": 5, "tag": "a", "text": "Tab #2"}]
ENTER = 'Enter "Livia" into the text field and press Submit.'
LIST = "Select Rorie from the list and click Submit."
BOXES = "Select Ada, Bea and click Submit."


def _field(value: str) -> dict[str, Any]:
    return {"ref": 5, "tag": "input_text", "text": "", "value": value}


def _boxes(*ticked: bool) -> list[dict[str, Any]]:
    """Boxes with the labels Ada, Bob and Bea, each behind its box."""
    found: list[dict[str, Any]] = []
    for i, (label, value) in enumerate(zip(("Ada", "Bob", "Bea"), ticked, strict=True)):
        found += [{"ref": 2 * i, "tag": "input_checkbox", "text": "", "value": value}]
        found += [{"ref": 2 * i + 1, "tag": "label", "text": label}]
    return found


@pytest.mark.parametrize(
    ("task", "elements", "action"),
    [
        (ENTER, [_field(""), SUBMIT], "type[5] Livia"),
        (ENTER, [_field("Liv"), SUBMIT], "type[5] Livia"),
        (ENTER, [_field("Livia"), SUBMIT], "click[9]"),
        (LIST, [_field("Ada"), SUBMIT], "select[5] Rorie"),
        (LIST, [_field("Rorie"), SUBMIT], "click[9]"),
        (BOXES, [*_boxes(False, False, False), SUBMIT], "click[0]"),
        (BOXES, [*_boxes(True, False, False), SUBMIT], "click[4]"),
        (BOXES, [*_boxes(True, False, True), SUBMIT], "click[9]"),
        ("Focus into the textbox.", [SUBMIT, _field("")], "click[5]"),
        ('Close the dialog box by clicking the "x".', [{"ref": 7, "text": "Close"}], "click[7]"),
        ('Click on the "Submit" button.', [*TABS, SUBMIT], "click[9]"),
        ("Click on Tab #2.", TABS, "click[5]"),
        ("Click button ONE.", [{"ref": 3, "text": "ONE"}, {"ref": 4, "text": "TWO"}], "click[3]"),
        ("Click the button.", [{"ref": 6, "text": "Click Me!"}], "click[6]"),
    ],
)
def test_the_next_action(task: str, elements: list[dict[str, Any]], action: str) -> None:
    assert next_action({"task": task, "elements": elements}) == action
