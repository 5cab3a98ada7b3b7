"""benchmarks/pictures.py: which answers the README's pictures show."""

from __future__ import annotations

import json
from pathlib import Path

from pictures import THEMES, learns, learnt

BEFORE = ("#### 1", "#### 3", "#### 2", "#### 4")
AFTER = ("#### 2", "#### 3", "#### 3", "#### 5")


def test_answers_that_were_wrong_and_are_right_one_of_each_kind(tmp_path: Path) -> None:
    prompts = ("A saw 1 egg. How many?", "B saw 3. How many?", "C saw 3. How many?", "D has 5. How many?")
    (tmp_path / "evaluations").mkdir()
    for step, texts in ((0, BEFORE), (2, AFTER)):
        lines = [
            {"prompt": prompt, "text": text, "reward": float(text == right), "sample_index": sample}
            for prompt, text, right in zip(prompts, texts, AFTER, strict=True)
            for sample in (0, 1)
        ]
        file = tmp_path / "evaluations" / f"step-{step:06d}.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
    chosen = learnt(tmp_path, 3, lambda one: one["prompt"].split()[1])
    assert [(a["prompt"], a["text"], b["text"]) for a, b in chosen] == [
        (prompts[0], "#### 1", "#### 2"),
        (prompts[3], "#### 4", "#### 5"),
    ]
    metrics = [{"step": n, "reward/mean": n / 2, "rollout/response_length": 4.0} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    twice = [tmp_path / "a" / "learns.svg", tmp_path / "b" / "learns.svg"]
    for path in twice:
        path.parent.mkdir()
        learns(tmp_path, THEMES["dark"], path)
    assert twice[0].read_bytes() == twice[1].read_bytes()
