"""Families × axes: each is refused, or trains as one process does; docs/parallel.md has the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rondo.core.errors import ConfigError
from rondo.training.gathering import gather_buckets
from rondo.training.views import local_of
from tests.models.families import FAMILIES, source_of
from tests.ranks import run_ranks
from tests.training.helpers import FLOAT64, PolicyLoss, relative_difference, tiny_engine
from tests.training.layouts import layout, rows_of

AXES = ({"tensor": 2}, {"context": 2}, {"expert": 2})
REASONS = {
    "has no experts": "–",
    "does not exist|no plan for the experts": "no plan",
    "leaves out .*self_attn.q_norm": "the plan leaves out q_norm",
    "leaves out .*act_fn.alpha_p": "the plan leaves out act_fn",
    "plan .* has mla_kv_a_proj": "mla_kv_a_proj",
    "cannot be packed": "rows not packable",
}
PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


def _trained(
    rank: int, world: int, axes: tuple[dict[str, int], ...]
) -> dict[tuple[str, str], dict[str, torch.Tensor] | str]:
    """(family, layout) -> the full gradients, or why it is refused."""
    out: dict[tuple[str, str], dict[str, torch.Tensor] | str] = {}
    for family in FAMILIES:
        for sizes in axes:
            views, index, count = layout(world, **sizes)
            try:
                engine = tiny_engine(views, source_of(family), config={**FLOAT64, "token_budget": 40})
            except ConfigError as error:
                out[family, str(sizes)] = str(error)
                continue
            engine.forward_backward(rows_of(index, count), PolicyLoss())
            rows = {
                name: torch.zeros_like(local_of(shard)) for name, shard in engine.backend.shards.items()
            }  # buffers, and what learns nothing (a router's bias)
            given = {name: one.grad for name, one in engine.backend.by_name.items() if one.grad is not None}
            rows |= {name: local_of(one) for name, one in given.items()}
            full = gather_buckets(engine.parameters().layout(), rows, dist.group.WORLD, 1 << 20)
            out[family, str(sizes)] = {name: one.clone() for name, one in full}
    return out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_family_trains_on_each_axis_as_alone_or_is_refused() -> None:
    alone = run_ranks(1, _trained, ({},), timeout=500)[0]
    spread = run_ranks(2, _trained, AXES, timeout=500)[0]
    lines = []
    for family in FAMILIES:
        cells = []
        for sizes in AXES:
            told, expected = spread[family, str(sizes)], alone[family, "{}"]
            assert not isinstance(expected, str)
            if isinstance(told, str):
                cells.append(next(short for pattern, short in REASONS.items() if re.search(pattern, told)))
                continue
            for name, tensor in expected.items():
                limit = 1e-6 * float(tensor.norm()) + 1e-12  # some families compute in float32 here and there
                assert float((told[name] - tensor).norm()) <= limit, (family, sizes, name)
            assert any(relative_difference(told[name], torch.zeros(())) for name in told)
            cells.append("yes")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    table = re.search(r"\| family \|[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", PAGE.read_text(encoding="utf-8"))
    assert table is not None
    assert table[1].strip().split("\n") == lines, "\n" + "\n".join(lines)
