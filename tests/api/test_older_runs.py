"""A run that an older rondo left goes on: its recipe, its checkpoint, and a reward pickled by value."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas
import pytest
import torch
from safetensors.torch import load_file

import rondo
from rondo.tracking import Console
from tests.api.run_of_9bbdfff.make import train

OLDER = Path(__file__).parent / "run_of_9bbdfff" / "run"


@pytest.mark.slow
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="its reward was written down by Python 3.11")
def test_a_run_of_9bbdfff_goes_on_as_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """Where its source is a large one, too: none of its rows is too long."""
    if is_large:
        monkeypatch.setattr("rondo.data.stream.WHOLE", 2)
    warned: list[str] = []
    monkeypatch.setattr(Console, "warn", lambda self, line: warned.append(line))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLDER, "run")
    older = rondo.load("run")
    assert older.metrics.index.tolist() == [1, 2]
    with monkeypatch.context() as as_then:  # embeddings of that rondo did not learn the tokenizer's pad
        pads = property(
            lambda self: vars(self)["pad"], lambda self, index: vars(self).setdefault("pad", index)
        )
        as_then.setattr(torch.nn.Embedding, "padding_idx", pads, raising=False)
        whole = train("whole", 2)
    gone_on, whole = older.resume(4), whole.resume(4)
    assert [line for line in warned if "an older rondo" in line] == [
        "an older rondo began this run, and read conversations otherwise: no source has message parts, "
        "calls, flags or nulls; responses end at the same tokens",
        *(
            [
                "an older rondo began this run, and left rows that are too long out of the order of large "
                "sources: where train has some, rows come in another order from here"
            ]
            if is_large
            else []
        ),
    ]
    clocks = ("timing/", "perf/", "plan/", "rollout/tokens_per_second")
    counted = [name for name in whole.metrics if not name.startswith(clocks)]
    ours, theirs = (run.metrics.loc[3:, counted].astype(float) for run in (whole, gone_on))
    pandas.testing.assert_frame_equal(ours, theirs, rtol=1e-3, atol=1e-6)  # two processors' rounding
    weights = [load_file(run.path / "export" / "model.safetensors") for run in (whole, gone_on)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-4, atol=1e-6)
    warned.clear()
    gone_on.resume(5)  # from a checkpoint of our own
    assert not any("an older rondo" in line for line in warned)
