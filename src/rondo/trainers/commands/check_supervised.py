"""The second pass over the configuration of a supervised task (SFT, preference pairs, a reward model). Before
anything starts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from rondo.config import Config, LoadedConfig
from rondo.core.errors import ConfigError
from rondo.planning import placement_of, reference_in_actor
from rondo.tracking import check_trackers
from rondo.trainers.commands.check import unread_of_reference, without_data
from rondo.trainers.commands.check_machine import check_backend, check_files, check_run_dir
from rondo.trainers.commands.recipe import changed_keys, second_pass
from rondo.trainers.program import check_parallel, tool_schemas
from rondo.trainers.supervised import Task

# Keys that supervised training reads; any other key that is set would be ignored, so it is an error.
READ = ("model.", "data.", "actor.", "trainer.", "cluster.", "tracking.", "checkpoint.")
UNREAD = (
    "data.pretrain",
    "data.sampler",
    "actor.mini_batch_size",
    "actor.epochs",
    "actor.lora.send",
    "actor.router.replay",
    "reference.refresh_every",
    "trainer.max_staleness",
    "trainer.on_update",
    "trainer.order",
    "trainer.replay",
    "trainer.stages",
    "trainer.evaluation.before",
    "trainer.evaluation.after",
    "trainer.evaluation.greedy",
    "trainer.evaluation.samples",
    "trainer.evaluation.temperature",
    "trainer.evaluation.top_p",
    "trainer.evaluation.limit",
    "tracking.samples",
    "tracking.save_rollouts",
    "tracking.keep_rollouts",
    "tracking.token_columns",
    "tracking.keep_token_columns",
)
# What some tasks read besides, and what one of them does not.
READ_BESIDES: Mapping[str, tuple[str, ...]] = {
    "sft": ("rollout.tools", "algorithm.aggregation"),
    "preference": ("reference.", "algorithm.preference_loss"),
    "reward_model": ("algorithm.reward_model_loss",),
}
UNREAD_BESIDES: Mapping[str, tuple[str, ...]] = {
    "sft": ("trainer.warm_start",),
    "preference": ("data.max_tokens", "data.turns"),
    "reward_model": ("data.max_tokens", "data.turns"),
}


def check_supervised(loaded: LoadedConfig, task: Task) -> None:
    """Raises ConfigError for all that the task's command cannot do as configured, keys that it would not read
    included.
    """
    config = loaded.config
    with second_pass(loaded) as found:
        found.problems += without_data(config)
        # Makes the loss: its name and options are checked here. None: they are wrong.
        needs_reference = found.of(task.needs_reference, config)
        found.problems += _unread(loaded, task, needs_reference)
        if needs_reference is not None:
            if found.of(placement_of, config, task.roles(config)) is not None:
                for role in task.roles(config):
                    found.of(check_parallel, role, config)
        if needs_reference and not reference_in_actor(config):
            found.of(_check_reference, config)
        found.of(tool_schemas, config)
        found.of(check_trackers, config.tracking)
        found.of(check_backend, config)
        found.of(functools.partial(check_files, context=False), loaded)
        found.of(check_run_dir, loaded)


def _unread(loaded: LoadedConfig, task: Task, needs_reference: bool | None) -> Iterator[ConfigError]:
    """Yields keys that are set and that nothing reads. needs_reference: None where it is not known."""
    read = (*READ, *READ_BESIDES.get(task.kind, ()))
    unread = (*UNREAD, *UNREAD_BESIDES.get(task.kind, ()))
    loss = loaded.config.algorithm.preference_loss.name
    for key, _ in changed_keys(loaded):
        if key.startswith(unread) or not key.startswith(read):
            yield ConfigError(f"{key} has no meaning for {task.title}; remove it", key=key)
        elif key.startswith("reference.") and needs_reference is False:
            yield ConfigError(
                f"{key} is set, but algorithm.preference_loss={loss} reads no ref_log_probs: there is no "
                "reference to configure; remove the key, or choose a loss that needs one",
                key=key,
            )
    if needs_reference:
        yield from unread_of_reference(loaded)


def _check_reference(config: Config) -> None:
    longest = config.actor.token_budget // 2
    if config.reference.token_budget < longest:
        raise ConfigError(
            f"reference.token_budget={config.reference.token_budget} is less than the longest sequence of a "
            f"pair, actor.token_budget // 2 = {longest}; raise it, or lower actor.token_budget",
            key="reference.token_budget",
        )
