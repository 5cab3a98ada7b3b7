"""The second pass over the configuration of a program of the user's. Before anything starts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from rondo.config import Config, LoadedConfig
from rondo.core.errors import ConfigError
from rondo.trainers.commands.check import without_data
from rondo.trainers.commands.check_machine import check_backend, check_files, check_reward_models
from rondo.trainers.commands.recipe import changed_keys, second_pass

# What the built-in loop does by configuration, and a program by a line of its own.
YOURS: Mapping[str, str] = {
    "trainer.replay": "nothing writes a journal, or follows one",
    "reference.refresh_every": "await reference.follow(actor)",
    "rollout.recorded": "read the rows: cluster.put(Batch.read_parquet(file), index_columns())",
}


def check_session(loaded: LoadedConfig) -> None:
    """Raises ConfigError for all that a program of the user's cannot do as configured."""
    config = loaded.config
    with second_pass(loaded) as found:
        found.problems += without_data(config)
        found.problems += _of_the_built_in_loop(config)
        found.problems += _restarts(loaded)
        found.of(check_backend, config)
        found.of(functools.partial(check_files, context=True), loaded)
        found.of(check_reward_models, config, [model.name for model in config.reward.models])


def _restarts(loaded: LoadedConfig) -> Iterator[ConfigError]:
    key = "trainer.max_restarts"
    if loaded.config.trainer.max_restarts and any(key == changed for changed, _ in changed_keys(loaded)):
        text = f"{key} is for the built-in loop; a program of your own goes on when you start it again"
        yield ConfigError(text, key=key)


def _of_the_built_in_loop(config: Config) -> Iterator[ConfigError]:
    for key, instead in YOURS.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) is not None:
            text = f"{key} is for the built-in loop; in a program of your own, {instead}"
            yield ConfigError(text, key=key)
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction.mode"
    if correction is not None and correction.mode == "bypass":
        yield ConfigError(
            f"{key}=bypass is for the built-in loop: here compute_log_prob gives old_log_probs; use "
            "mode=decoupled, or `rondo train`",
            key=key,
        )
