"""Terms of the actor's loss beside the policy loss (`algorithm.terms`): token losses that are multiplied with
a coefficient, and added.
"""

from __future__ import annotations

from torch import Tensor

from rondo.algorithms.registry import term
from rondo.algorithms.statistics import Metrics


@term("entropy")
def entropy_bonus(entropy: Tensor) -> tuple[Tensor, Metrics]:
    """-H of the current policy, [N]: with a coefficient above 0 a bonus. With a fixed one it is what
    algorithm.entropy_coef is.
    """
    return -entropy, {}
