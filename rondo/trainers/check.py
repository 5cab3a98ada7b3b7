"""The second pass over a configuration: what needs algorithms, scorers and engines to be known. Before
anything starts.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rondo.algorithms import check_algorithm
from rondo.config import LoadedConfig
from rondo.config.schema import Config
from rondo.errors import ConfigError
from rondo.rewards import BUILTINS, load_functions
from rondo.tracking import check_trackers
from rondo.trainers.setup import plan_program

# Keys that supervised fine-tuning reads; any other key set explicitly would be ignored, so it is an error.
SFT_KEYS = ("model.", "data.", "actor.", "trainer.", "cluster.", "tracking.", "checkpoint.")
NOT_SFT_KEYS = (
    "actor.mini_batch_size",
    "actor.epochs",
    "trainer.max_staleness",
    "trainer.on_update",
    "trainer.warm_start",
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


def check_rl(loaded: LoadedConfig) -> None:
    """Raises ConfigError for what `rondo train` cannot do as configured."""
    config = loaded.config
    if not config.data.train:
        raise ConfigError(
            "data.train is empty: there is nothing to learn from; add a source (see docs/data.md)"
        )
    if not config.reward.functions:
        raise ConfigError(
            "reward.functions is empty: nothing says what is good; add a scorer, for example {name: gsm8k}"
        )
    check_algorithm(config.algorithm)
    _check_roles(loaded)
    load_functions(config.reward.functions, BUILTINS)
    check_trackers(config.tracking.trackers)
    if config.trainer.evaluation.every is not None and not config.data.eval:
        raise ConfigError(
            "trainer.evaluation.every is set, but data.eval is empty; add a source of held-out prompts"
        )
    _check_backend(loaded)
    _check_files(loaded)


def check_sft(loaded: LoadedConfig) -> None:
    """Raises ConfigError for what `rondo sft` cannot do as configured, keys that it would not read
    included.
    """
    config = loaded.config
    if not config.data.train:
        raise ConfigError(
            "data.train is empty: there is nothing to learn from; add a source (see docs/data.md)"
        )
    for key, origin in loaded.origins.items():
        ours = key.startswith(SFT_KEYS) and key not in NOT_SFT_KEYS
        if not ours and _leaf(config, key) != _leaf(Config(), key):
            raise ConfigError(f"{origin.where}: {key} has no meaning for supervised fine-tuning; remove it")
    check_trackers(config.tracking.trackers)
    _check_backend(loaded)
    _check_files(loaded)


def _check_roles(loaded: LoadedConfig) -> None:
    """Sections of roles that this run does not have are not read, so setting them is an error; others must
    fit.
    """
    config, program = loaded.config, plan_program(loaded.config)
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    roles = (
        ("critic", program.needs_critic, config.critic.token_budget, "values (algorithm.advantage: gae)"),
        ("reference", program.needs_reference, config.reference.token_budget, "ref_log_probs (algorithm.kl)"),
    )
    for role, needed, budget, column in roles:
        for key, origin in loaded.origins.items():
            if key.startswith(role + ".") and not needed and _leaf(config, key) != _leaf(Config(), key):
                raise ConfigError(
                    f"{origin.where}: {key} is set, but no chosen function reads {column}: there is no "
                    f"{role} to "
                    "configure; remove the key, or choose a function that needs one"
                )
        if needed and budget < longest:
            raise ConfigError(
                f"{role}.token_budget={budget} is less than data.max_prompt_tokens + "
                f"rollout.max_tokens={longest}; raise it"
            )


def _leaf(config: Config, key: str) -> Any:
    """The section or value below which the dotted `key` lies, as deep as there are fields."""
    value: Any = config
    for part in key.split("."):
        if not hasattr(value, part):
            break
        value = getattr(value, part)
    return value


def _check_backend(loaded: LoadedConfig) -> None:
    config = loaded.config
    if config.cluster.backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError('cluster.backend=ray, but Ray is not installed: pip install "rondo-rl[ray]"')
    if config.rollout.decode == "compiled" and shutil.which("cc") is None:
        raise ConfigError(
            "rollout.decode=compiled needs a C compiler (cc); install one or set rollout.decode=auto"
        )


def _check_files(loaded: LoadedConfig) -> None:
    for key, path in (
        ("model.chat_template", loaded.config.model.chat_template),
        ("trainer.warm_start", loaded.config.trainer.warm_start),
    ):
        if path is not None:
            beside_recipe(loaded, key, path)


def beside_recipe(loaded: LoadedConfig, key: str, path: str) -> Path:
    """The file that `key` names: relative to the working directory, else to the recipe that set the key.

    Raises ConfigError naming both places.
    """
    origin = loaded.origins.get(key)
    recipe = Path(origin.where.rpartition(":")[0]) if origin else Path()
    places = [Path(path), recipe.parent / path]
    for place in places:
        if place.is_file():
            return place
    where = f"{origin.where}: " if origin else ""
    looked = " and ".join(dict.fromkeys(str(place) for place in places))
    raise ConfigError(f"{where}{key}: no such file: looked for {looked}{_near(places[-1])}")


def _near(path: Path) -> str:
    names: Iterable[str] = (
        sorted(p.name for p in path.parent.glob("*" + path.suffix)) if path.parent.is_dir() else ()
    )
    return "; there are: " + ", ".join(names) if names else ""
