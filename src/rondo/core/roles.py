"""Every role of a run, declared once: its worker, what configures it, what it makes and what it learns from.

A new role is a row here, a worker, and a producer of the column that it makes. Reward models are roles, too,
named by the user: all of them are `REWARD_MODEL`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROLLOUT = "rollout"


@dataclass(frozen=True)
class Role:
    """One kind of worker group."""

    name: str
    """A key of `cluster.placement`; calls and errors name the group by it."""
    worker: str
    """module:Class."""
    section: str
    """The section of the configuration that is about it. Several roles may share one."""
    makes: str
    """The column that it is there for (columns.py)."""
    learns_from: str | None = None
    """The column that it is trained on; None: it is frozen."""
    engine: str | None = None
    """The section with its training engine's settings; None: it has no such engine."""
    weights: str | None = None
    """The section whose `path` it starts from; None, or no path there: the policy's initial model."""
    needs_path: bool = False
    """Whether there must be such a path."""
    value_head: bool = False
    """Whether its model has a value head."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further arguments of its worker, and the keys that say them."""
    read_by: str = ""
    """What a configuration must read, for an error where its section is set and nothing does."""


_MODELS = "rondo.workers.models"
_VALUES = "values (algorithm.advantage: gae)"
_ALL = (
    Role(
        "actor",
        f"{_MODELS}:ActorWorker",
        section="actor",
        makes="old_log_probs",
        learns_from="advantages",
        engine="actor",
    ),
    Role(
        "critic",
        f"{_MODELS}:CriticWorker",
        section="critic",
        makes="values",
        learns_from="returns",
        engine="critic",
        weights="critic",
        value_head=True,
        read_by=_VALUES,
    ),
    Role(
        "cost_critic",
        f"{_MODELS}:CriticWorker",
        section="critic",
        makes="cost_values",
        learns_from="cost_returns",
        engine="critic",
        weights="critic",
        value_head=True,
        read_by=_VALUES,
    ),
    Role(
        "reference",
        f"{_MODELS}:ReferenceWorker",
        section="reference",
        makes="ref_log_probs",
        engine="reference",
        weights="reference",
        read_by="ref_log_probs (algorithm.kl)",
    ),
    Role(
        "prm",
        f"{_MODELS}:PrmWorker",
        section="prm",
        makes="process_rewards",
        learns_from="accuracy",
        engine="actor",
        weights="reference",
        options={"beta": "prm.beta"},
        read_by="process_rewards (algorithm.advantage: prime)",
    ),
    Role(
        "teacher",
        f"{_MODELS}:TeacherWorker",
        section="teacher",
        makes="teacher_log_probs",
        engine="teacher",
        weights="teacher",
        needs_path=True,
        options={"top_k": "teacher.top_k"},
        read_by="the teacher's log-probs (algorithm.advantage: teacher_gap)",
    ),
    Role(ROLLOUT, "rondo.workers.rollout:RolloutWorker", section="rollout", makes="response_ids"),
)
ROLES: Mapping[str, Role] = {role.name: role for role in _ALL}
REWARD_MODEL = Role(
    "<reward.models.name>",
    f"{_MODELS}:RewardModelWorker",
    section="reward.models",
    makes="score/<name>",
    engine="reward.models",
    value_head=True,
)

# The modules of all workers: a host that has imported them needs no more.
WORKER_MODULES = tuple(dict.fromkeys(role.worker.partition(":")[0] for role in _ALL))

# The sections with settings of a training engine, and those of engines that are trained.
ENGINE_SECTIONS = tuple(dict.fromkeys(role.engine for role in _ALL if role.engine))
TRAINED_SECTIONS = tuple(dict.fromkeys(role.engine for role in _ALL if role.engine and role.learns_from))


def of_section(section: str) -> tuple[Role, ...]:
    """Returns the roles that a section of the configuration is about."""
    return tuple(role for role in _ALL if role.section == section)
