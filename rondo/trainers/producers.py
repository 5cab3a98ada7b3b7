"""Which stages a run needs: the functions chosen in the config say which columns they read, this table says
who produces each column, and the stages are sorted once at set-up. No `if` on an algorithm's name
anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rondo.errors import ConfigError
from rondo.workers.models import ActorWorker, CriticWorker, ReferenceWorker


@dataclass(frozen=True)
class Producer:
    """`column` is written by `role`'s `method`."""

    column: str
    role: str
    method: Callable[..., object]


PRODUCERS: Mapping[str, Producer] = {
    producer.column: producer
    for producer in (
        Producer("old_log_probs", "actor", ActorWorker.compute_log_prob),
        Producer("ref_log_probs", "reference", ReferenceWorker.compute_ref_log_prob),
        Producer("values", "critic", CriticWorker.compute_values),
    )
}

# Columns that the episode side or the controller itself makes.
FROM_EPISODES = frozenset(
    {
        "prompt_ids",
        "response_ids",
        "response_mask",
        "rollout_log_probs",
        "policy_versions",
        "reward",
        "group_id",
    }
    | {
        "trajectory_id",
        "response_length",
        "prompt_length",
        "num_trained_tokens",
        "oldest_version",
        "sample_index",
    }
)
FROM_CONTROLLER = frozenset(
    {"token_rewards", "advantages", "returns", "loss_weight", "critic_loss_weight", "kl_coef"}
)


def stages(columns: Iterable[str], asked_by: str) -> tuple[Producer, ...]:
    """The producers for `columns`, in the table's order. Raises ConfigError for a column that nothing
    produces.
    """
    wanted = set(columns)
    for column in sorted(wanted - FROM_EPISODES - FROM_CONTROLLER - set(PRODUCERS)):
        raise ConfigError(
            f"{asked_by} reads the column {column!r}, which nothing in this run produces; there are: "
            + ", ".join(sorted(FROM_EPISODES | FROM_CONTROLLER | set(PRODUCERS)))
        )
    return tuple(producer for column, producer in PRODUCERS.items() if column in wanted)
