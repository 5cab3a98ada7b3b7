"""What benchmarks/visual.py makes of runs; the rows that it compares have the same number of tokens."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from rondo.chat import encode_prompts
from rondo.recipes.visual import tokenizer
from visual import QUESTION, TOKENS, picture_rows, table, text_rows


def run(first: float, last: float) -> dict[str, object]:
    curve = {0: first, 10: 0.5, 20: last}
    return {"greedy": curve, "sampled": curve, "cpu_seconds": [90.4, 39.6], "gap": 2e-5, "memory": 7.57e8}


def test_table_by_hand() -> None:
    rows = table({"figures": {0: run(0.25, 0.992), 1: run(0.3, 1.0)}})
    curves = "0.250 → 0.992, 0.300 → 1.000"
    assert rows[2:] == [f"| `figures` | {curves} | {curves} | 2.0e-05 | 90 + 40, 90 + 40 | 757 |"]


def test_text_has_as_many_tokens_as_a_picture() -> None:
    texts = encode_prompts(tokenizer(), [row["prompt"] for row in text_rows(50)])
    (question,) = encode_prompts(tokenizer(), [QUESTION])
    assert {len(ids) for ids in texts} == {len(question) + TOKENS + 2}  # and the two around a picture


@pytest.mark.parametrize("side", [64, 256])
def test_pictures_are_enlarged(side: int) -> None:
    rows = picture_rows(side, 3)
    for row in rows:
        assert Image.open(io.BytesIO(row["image"])).size == (side, side)
    assert len({row["image"] for row in rows}) == 3
