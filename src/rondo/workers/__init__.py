"""The only place where the controller's calls meet an engine: actor, critic, reference and rollout
workers.
"""

# ruff: noqa: F401
from rondo.workers.models import (
    ActorWorker,
    CriticWorker,
    ModelWorker,
    PrmWorker,
    ReferenceWorker,
    RewardModelWorker,
    TeacherWorker,
    update_columns,
)
from rondo.workers.replicas import Replicas
from rondo.workers.rollout import EvaluationRecord, RolloutWorker
