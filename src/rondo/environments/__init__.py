"""What an environment is, in which a policy acts step by step, and whether one keeps its promises
(docs/environments.md). They know nothing of policies.
"""

from rondo.environments.conformance import check_environment
from rondo.environments.protocol import Environment, Observation, StepResult
from rondo.environments.rows import episodes

__all__ = [
    "Environment",
    "Observation",
    "StepResult",
    "check_environment",
    "episodes",
]
