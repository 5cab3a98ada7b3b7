"""Which stages a run needs: the functions chosen in the config say which columns they read, this table says
who produces each column, and the stages are sorted once at set-up. No `if` on an algorithm's name
anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rondo.core.columns import (
    ADVANTAGE_STAGE,
    CORRECTION,
    EPISODE,
    ESTIMATOR,
    GREEDY_ANSWER,
    RESAMPLING,
    SCORE,
    UPDATE_PLAN,
    made_by,
)
from rondo.core.errors import ConfigError
from rondo.workers import ActorWorker, CriticWorker, PrmWorker, ReferenceWorker, TeacherWorker


@dataclass(frozen=True)
class Producer:
    """Columns that a role computes from others."""

    columns: tuple[str, ...]
    """The columns that it writes."""
    role: str
    """The worker group that computes them."""
    method: Callable[..., Any]
    """The worker's method."""
    reads: tuple[str, ...] = ()
    """The columns that it reads beside the tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the method."""
    by_source: Mapping[str, str] = field(default_factory=dict)
    """The workers that compute them for the rows of a source, in place of `role`: teacher.by_source."""
    for_others: bool = True
    """Whether there are rows of other sources, for which `role` computes them."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Names all workers that compute them."""
        return tuple(dict.fromkeys((*([self.role] if self.for_others else []), *self.by_source.values())))


PRODUCERS: tuple[Producer, ...] = (
    Producer(("old_log_probs",), "actor", ActorWorker.compute_log_prob),
    Producer(
        ("old_log_probs", "sum_p_squared"),
        "actor",
        ActorWorker.compute_log_prob,
        options={"also": ("sum_p_squared",)},
    ),
    Producer(
        ("old_log_probs", "entropy"), "actor", ActorWorker.compute_log_prob, options={"also": ("entropy",)}
    ),
    Producer(("ref_log_probs",), "reference", ReferenceWorker.compute_ref_log_prob),
    Producer(("teacher_log_probs",), "teacher", TeacherWorker.compute_log_prob),
    Producer(
        ("teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs"),
        "teacher",
        TeacherWorker.compute_topk,
    ),
    Producer(("values",), "critic", CriticWorker.compute_values),
    Producer(("cost_values",), "cost_critic", CriticWorker.compute_values),
    Producer(("process_rewards",), "prm", PrmWorker.compute_process_reward, reads=("ref_log_probs",)),
)

# In bypass mode the policy that the ratio is taken against is the sampler's: nothing is computed again.
ADOPT = Producer(
    ("old_log_probs",), "actor", ActorWorker.adopt_rollout_log_prob, reads=("rollout_log_probs",)
)

# With actor.lora the actor without its adapters is the reference: there is no second model.
WITHOUT_ADAPTERS = Producer(("ref_log_probs",), "actor", ActorWorker.compute_ref_log_prob)

# What the episode side, the scorers or the controller make.
GIVEN = frozenset(
    made_by(EPISODE, GREEDY_ANSWER, UPDATE_PLAN, RESAMPLING, ADVANTAGE_STAGE, ESTIMATOR, CORRECTION)
)


def is_given(column: str) -> bool:
    """Says whether a column needs no producer: the episode, the scorers or the controller make it."""
    return column in GIVEN or SCORE.member(column) is not None


def stages(
    columns: Iterable[str], asked_by: str, *, bypass: bool = False, reference_in_actor: bool = False
) -> tuple[Producer, ...]:
    """Returns the producers for `columns` and for what they read themselves, each after those it reads from.

    bypass: `old_log_probs` are the sampler's. reference_in_actor: see `WITHOUT_ADAPTERS`. Raises ConfigError
    for a column that nothing produces.
    """
    other = [*([ADOPT] if bypass else []), *([WITHOUT_ADAPTERS] if reference_in_actor else [])]
    table = [*other, *(p for p in PRODUCERS if p.columns not in [one.columns for one in other])]
    known = {column for producer in table for column in producer.columns}
    chosen: list[Producer] = []

    def want(column: str) -> None:
        if is_given(column):
            return
        if column not in known:
            raise ConfigError(
                f"{asked_by} reads the column {column!r}, which nothing in this run produces; there are: "
                + ", ".join(sorted(GIVEN | known))
            )
        producer = min((p for p in table if column in p.columns), key=lambda p: len(p.columns))
        for read in producer.reads:
            want(read)
        if producer not in chosen:
            chosen.append(producer)

    for column in sorted(set(columns)):
        want(column)
    chosen = _together(chosen)
    needed = [p for p in chosen if not any(set(p.columns) < set(other.columns) for other in chosen)]
    for producer in needed:
        if bypass and producer.columns != ADOPT.columns and "old_log_probs" in producer.columns:
            raise ConfigError(
                f"{asked_by} reads {producer.columns[-1]!r}, which is of the policy before the update; with "
                "algorithm.rollout_correction.mode=bypass that policy is not evaluated: use mode=decoupled"
            )
    # Stable: first those that read only what is given, then the others, in the order of need.
    return tuple(sorted(needed, key=lambda p: not all(map(is_given, p.reads))))


def _together(chosen: Sequence[Producer]) -> list[Producer]:
    """Returns the producers; those that make further outputs of one pass (`also`) are one."""
    alike: dict[tuple[str, Callable[..., Any]], Producer] = {}
    for producer in chosen:
        key = producer.role, producer.method
        known = alike.get(key)
        if known is not None and "also" in producer.options:
            columns = tuple(dict.fromkeys((*known.columns, *producer.columns)))
            also = (*known.options.get("also", ()), *producer.options["also"])
            producer = replace(producer, columns=columns, options={"also": also})
        elif known is not None:
            continue
        alike[key] = producer
    return list(alike.values())
