"""What the subcommands share: recipes and overrides on one command line."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rondo.core.errors import ConfigError, DataError
from rondo.system.names import offered

if TYPE_CHECKING:
    from rondo.config import LoadedConfig
    from rondo.system.hub import Hub


# What a first recipe of one's own sets, for the help.
COMMON_KEYS = """\
model.path=Qwen/Qwen3-0.6B                  a folder or a hub id
data.train=[{type: jsonl, path: a.jsonl}]   prompts: a column `prompt`, and what the reward reads
data.eval=[{type: jsonl, path: b.jsonl}]    held-out prompts
reward.functions=[{name: rewards.py:mine}]  or a built-in one: `rondo list rewards`
algorithm.advantage=grpo                    `rondo list advantages`
algorithm.policy_loss=ppo_clip              `rondo list losses`
rollout.n=8                                 responses per prompt
rollout.max_tokens=512                      of a response
rollout.engine=native                       or transformers, vllm, sglang
data.batch_size=32                          prompts per step
actor.mini_batch_size=32                    prompts per optimizer step
actor.optimizer.lr=1e-6
trainer.total_steps=100
trainer.run_dir=runs/mine                   where everything is written
trainer.evaluation.every=10                 steps
checkpoint.every=10                         steps
cluster.backend=process                     several devices of this machine; ray: of many
cluster.devices=2"""


def recipe_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], command: str, about: str
) -> argparse.ArgumentParser:
    """Makes the parser of a subcommand that takes recipes and overrides."""
    parser = subparsers.add_parser(command, help=about, description=about)
    add_recipes(parser, nargs="+")
    return parser


def add_recipes(parser: argparse.ArgumentParser, *, nargs: str) -> None:
    """Lets a parser take recipes and overrides, and lists the recipes by name below its help."""
    parser.add_argument(
        "config",
        nargs=nargs,
        metavar="RECIPE",
        help="a YAML file, or the name of a recipe; several are merged in order, then "
        "key.sub=value overrides",
    )
    keys = textwrap.indent(COMMON_KEYS, "  ")
    names = textwrap.fill(", ".join(sorted(offered("recipes"))), 80)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"The keys most used (`rondo config show RECIPE` shows all, with their values):\n{keys}\n\n"
        f"Recipes by name (`rondo recipes` says what they are):\n{textwrap.indent(names, '  ')}"
    )


def load_arguments(arguments: Sequence[str], extra: Sequence[str] = ()) -> LoadedConfig:
    """Loads recipes and overrides: arguments with `=` before any `/`. Raises ConfigError."""
    from rondo.config import load  # not for --help: pydantic takes longer than all else there

    overrides = [a for a in arguments if "=" in a and "/" not in a.split("=", 1)[0]]
    files = [a for a in arguments if a not in overrides]
    loaded = load(files, [*overrides, *extra])
    for line in loaded.notes:  # keys in another spelling that mean nothing here, and secrets
        note(line)
    return loaded


def note(what: object) -> None:
    """Says on standard error what does not end the command."""
    print(f"note: {what}", file=sys.stderr)


def find_policy(loaded: LoadedConfig) -> None:
    """Raises ConfigError for a model.path that is not there, before torch is imported. All else that is wrong
    is told together, after that.
    """
    config = loaded.config
    if config.model.path is not None and config.cluster.backend.address is None:  # else others have it
        find_model(config.model.path, config.model.hub, f"{loaded.origins['model.path'].where}: ")


def find_model(path: str, hub: Hub = "huggingface", where: str = "") -> None:
    """Raises ConfigError for a model that is not there. where: it was named."""
    from rondo.system.hub import local_folder

    try:
        local_folder(path, hub)
    except DataError as error:
        raise ConfigError(f"{where}model.path: {error}", key="model.path") from error
