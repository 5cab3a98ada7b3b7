"""The second pass over the configuration of a supervised task (SFT, preference pairs, a reward model). Before
anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping

from rondo.config import LoadedConfig
from rondo.errors import ConfigError
from rondo.tracking import check_trackers
from rondo.trainers.commands.check import changed_keys, check_backend, check_files
from rondo.trainers.program import placement_of
from rondo.trainers.supervised import Task

# Keys that supervised training reads; any other key that is set would be ignored, so it is an error.
KEYS = ("model.", "data.", "actor.", "trainer.", "cluster.", "tracking.", "checkpoint.")
NOT_KEYS = (
    "data.pretrain",
    "actor.mini_batch_size",
    "actor.epochs",
    "reference.refresh_every",
    "trainer.max_staleness",
    "trainer.on_update",
    "trainer.order",
    "trainer.replay",
    "trainer.evaluation.before",
    "trainer.evaluation.after",
    "trainer.evaluation.greedy",
    "trainer.evaluation.samples",
    "trainer.evaluation.temperature",
    "trainer.evaluation.top_p",
    "trainer.evaluation.limit",
    "tracking.samples",
    "tracking.save_rollouts",
)
# What some tasks read besides, and one does not.
ALSO: Mapping[str, tuple[str, ...]] = {
    "sft": (),
    "preference": ("reference.", "algorithm.preference_loss"),
    "reward_model": ("algorithm.reward_model_loss",),
}
NOR: Mapping[str, tuple[str, ...]] = {
    "sft": ("trainer.warm_start",),
    "preference": (),
    "reward_model": (),
}


def check_supervised(loaded: LoadedConfig, task: Task) -> None:
    """Raises ConfigError for what the task's command cannot do as configured, keys that it would not read
    included.
    """
    config = loaded.config
    if not config.data.train:
        raise ConfigError(
            "data.train is empty: there is nothing to learn from; add a source (see docs/data.md)"
        )
    needs_reference = task.needs_reference(config)  # makes the loss: its name and options are checked here
    for key, where in changed_keys(loaded):
        ours = key.startswith((*KEYS, *ALSO[task.kind])) and not key.startswith((*NOT_KEYS, *NOR[task.kind]))
        if not ours:
            raise ConfigError(f"{where}: {key} has no meaning for {task.title}; remove it")
        if key.startswith("reference.") and not needs_reference:
            raise ConfigError(
                f"{where}: {key} is set, but algorithm.preference_loss="
                f"{config.algorithm.preference_loss.name} reads no ref_log_probs: there is no reference to "
                "configure; remove the key, or choose a loss that needs one"
            )
    placement_of(config, task.roles(config))
    longest = config.actor.token_budget // 2
    if needs_reference and config.reference.token_budget < longest:
        raise ConfigError(
            f"reference.token_budget={config.reference.token_budget} is less than the longest sequence of a "
            f"pair, actor.token_budget // 2 = {longest}; raise it, or lower actor.token_budget"
        )
    if config.trainer.evaluation.every is not None and not config.data.eval:
        raise ConfigError(
            "trainer.evaluation.every is set, but data.eval is empty; add a source of held-out rows"
        )
    check_trackers(config.tracking.trackers)
    check_backend(loaded)
    check_files(loaded)
