"""A loaded recipe as the commands see it: settled, its stages, its folder, and where each key was set."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rondo.algorithms import check_algorithm
from rondo.config import Config, CriticConfig, LoadedConfig, collected, stages_of
from rondo.core.errors import ConfigError
from rondo.planning.roles import config_for
from rondo.platform import built_in, planned
from rondo.trainers.program import Program, plan_program, settled

T = TypeVar("T")


def settled_recipe(loaded: LoadedConfig) -> LoadedConfig:
    """Returns the recipe with what its configuration leaves to the device; see `settled`."""
    return dataclasses.replace(loaded, config=settled(loaded.config))


def check_stages(config: Config, program: Program) -> None:
    """Raises ConfigError where a stage of the run (trainer.stages), planned as if it were the run, cannot
    work. program: the run's.
    """
    has_critic = any(isinstance(learner.section, CriticConfig) for learner in program.learners)
    for stage in stages_of(config):
        if not stage.changes:
            continue
        try:
            check_algorithm(stage.config.algorithm)
            assert plan_program(stage.config).all_roles == program.all_roles, "models are made once"
            if "critic.optimizer.lr" in stage.changes and not has_critic:
                raise ConfigError("no critic learns in this run")
        except ConfigError as error:
            where = f"trainer.stages, {stage.describe()}"
            raise ConfigError(f"{where}: {error}", key="trainer.stages") from error


def run_dir(loaded: LoadedConfig) -> str:
    """Returns trainer.run_dir, or runs/<name of the first recipe>."""
    if loaded.config.trainer.run_dir is not None:
        return loaded.config.trainer.run_dir
    if not loaded.files:
        raise ConfigError("there is no recipe to name the run's folder after: set trainer.run_dir=runs/NAME")
    return str(Path("runs") / Path(loaded.files[0]).stem)


def in_folder(config: Config, folder: str | Path) -> Config:
    """Returns a configuration that says in which folder it runs: images that are no files are kept there."""
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, run_dir=str(folder)))


@contextmanager
def located(loaded: LoadedConfig) -> Iterator[None]:
    """A ConfigError raised inside that knows its key only (`errors.about`) begins with where that was set."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError.of([_located(loaded, one) for one in error.problems]) from error.__cause__


class Findings:
    """What is wrong with a recipe, collected over several checks."""

    def __init__(self) -> None:
        self.problems: list[ConfigError] = []

    def of(self, check: Callable[..., T], *arguments: Any) -> T | None:
        """Returns what the check returns; None where it raises a ConfigError, which is kept."""
        with collected(self.problems):
            return check(*arguments)
        return None


@contextmanager
def second_pass(loaded: LoadedConfig) -> Iterator[Findings]:
    """Collects what the checks of a command inside find; it is raised at the end, located, as one error."""
    findings = Findings()
    with located(loaded):
        with collected(findings.problems):
            yield findings
        if findings.problems:
            raise ConfigError.of(findings.problems)


def _located(loaded: LoadedConfig, error: ConfigError) -> ConfigError:
    key, text = error.key, str(error)
    if key is None:
        return error
    below = (o for known, o in loaded.origins.items() if o.written and known.startswith(key + "."))
    origin = loaded.origins.get(key) or next(below, None)
    if origin is None or text.startswith(f"{origin.where}: "):
        return error
    named = key.startswith(re.split("[ :=]", text, maxsplit=1)[0])
    return ConfigError(f"{origin.where}: {'' if named else f'{key}: '}{text}", key=key)


def changed_keys(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yields (key, where it was set) for every key that somebody gave another value than its default,
    whatever `auto` became.
    """
    platforms = (*built_in(), planned(loaded.config.cluster.device))
    defaults = (Config(), *(config_for(Config(), platform) for platform in platforms))
    for key, origin in loaded.origins.items():
        if origin.written and all(_leaf(loaded.config, key) != _leaf(default, key) for default in defaults):
            yield key, origin.where


def _leaf(config: Config, key: str) -> Any:
    """Returns the section or value below which the dotted `key` lies, as deep as there are fields."""
    value: Any = config
    for part in key.split("."):
        if not hasattr(value, part):
            break
        value = getattr(value, part)
    return value
