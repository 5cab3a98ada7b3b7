"""What verl's dashboards call a step's metrics: `tracking.metric_names=verl`.

Those that are the same number in verl have its name (`metrics.tsv`); all others keep rondo's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rondo_verl.values import rows

NAMES: Mapping[str, tuple[str, ...]] = {ours: tuple(theirs.split()) for ours, theirs in rows("metrics.tsv")}
_EVALUATION = re.compile(
    r"eval/(?P<kind>greedy|sampled)/(?:reward|score/\w+/(?P<acc>acc))(?:/(?P<source>.+))?"
)
_MANY = re.compile(r"eval/sampled/best@(\d+)")


def verl(metrics: Mapping[str, float], *, source: str | None = None) -> dict[str, float]:
    """Returns a step's metrics by verl's names.

    source: the `data_source` of the rows that are evaluated, where it is the only one: verl's names have it
    and rondo's do not; None: evaluations of a single source keep rondo's names.
    """
    answers = {"greedy": 1, "sampled": max((int(n) for n in _MANY.findall("\n".join(metrics))), default=1)}
    evaluations = {name: found for name in metrics if (found := _EVALUATION.fullmatch(name))}
    # verl calls an accuracy the core of an evaluation; without one it is the reward.
    accuracies = any(found["acc"] for found in evaluations.values())
    several = {(found["kind"], found["acc"]) for found in evaluations.values() if found["source"]}
    penalised = "actor/kl_reward" in metrics  # then verl's rewards are behind the penalty, and rondo's before
    named: dict[str, float] = {}
    for name, value in metrics.items():
        names = NAMES.get(name, (name,))
        if name == "actor/kl_coef" and penalised:
            names = ("actor/reward_kl_penalty_coeff",)
        elif found := evaluations.get(name):
            alone = source if (found["kind"], found["acc"]) not in several else None
            if where := found["source"] or alone:
                core = "core" if found["acc"] or not accuracies else "aux"
                what = found["acc"] or "reward"
                names = (f"val-{core}/{where}/{what}/mean@{answers[found['kind']]}",)
        named |= {one: value for one in names if not (penalised and one.startswith("critic/rewards/"))}
    return named
