"""The only place where the controller's calls meet an engine: actor, critic, reference and rollout
workers.
"""

# ruff: noqa: F401
from rondo.workers.evaluation import EvaluationRecord
from rondo.workers.models import ActorWorker, CriticWorker, ModelWorker, ReferenceWorker, update_columns
from rondo.workers.replicas import Replicas
from rondo.workers.rollout import RolloutWorker, runs_in_own_process
from rondo.workers.scoring import PrmWorker, RewardModelWorker, TeacherWorker
