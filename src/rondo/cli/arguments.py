"""What the subcommands share: recipes and overrides on one command line."""

from __future__ import annotations

import argparse
import functools
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rondo.core.errors import ConfigError, DataError
from rondo.system.names import offered

if TYPE_CHECKING:
    from rondo.config import LoadedConfig
    from rondo.system.hub import Hub


# What a first recipe of one's own sets, by command, for the help: a key with an example, and what it is.
_MODEL = "model.path=Qwen/Qwen3-0.6B                  a folder or a hub id\n"
_DEVICES = """\
cluster.backend=process                     several devices of this machine; ray: of many
cluster.devices=2
"""
_RUN = f"""\
trainer.total_steps=100
trainer.run_dir=runs/mine                   where everything is written
trainer.evaluation.every=10                 steps
checkpoint.every=10                         steps
{_DEVICES}"""
_REWARD = "reward.functions=[{name: rewards.py:mine}]  or a built-in one: `rondo list rewards`\n"
_ANSWERS = """\
rollout.max_tokens=512                      of a response
rollout.engine=native                       or transformers, vllm, sglang
"""
_LEARNING = """\
actor.optimizer.lr=1e-6
actor.token_budget=16384                    tokens of a pass; as much as fits in memory
actor.lora={rank: 16}                       adapters in place of the whole model
"""
_PAIRS = """\
data.train=[{type: jsonl, path: a.jsonl}]   pairs: columns `prompt`, `chosen`, `rejected`
data.eval=[{type: jsonl, path: b.jsonl}]    held-out pairs
data.batch_size=32                          pairs per optimizer step
"""
KEYS = {
    "train": f"""\
{_MODEL}data.train=[{{type: jsonl, path: a.jsonl}}]   prompts: a column `prompt`, and what the reward reads
data.eval=[{{type: jsonl, path: b.jsonl}}]    held-out prompts
{_REWARD}algorithm.advantage=grpo                    `rondo list advantages`
algorithm.policy_loss=ppo_clip              `rondo list losses`
rollout.n=8                                 responses per prompt
{_ANSWERS}data.batch_size=32                          prompts per step
actor.mini_batch_size=32                    prompts per optimizer step
{_LEARNING}{_RUN}""",
    "sft": f"""\
{_MODEL}data.train=[{{type: jsonl, path: a.jsonl}}]   conversations: a column `messages`
data.eval=[{{type: jsonl, path: b.jsonl}}]    held-out conversations
data.batch_size=32                          conversations per optimizer step
{_LEARNING}{_RUN}""",
    "preference": f"""\
{_MODEL}{_PAIRS}algorithm.preference_loss=dpo               `rondo list preference-losses`
{_LEARNING}{_RUN}""",
    "reward-model": f"""\
{_MODEL}{_PAIRS}algorithm.reward_model_loss=bradley_terry
{_LEARNING}{_RUN}""",
    "eval": f"""\
{_MODEL}data.eval=[{{type: jsonl, path: b.jsonl}}]    prompts: a column `prompt`, and what the reward reads
{_REWARD}{_ANSWERS}trainer.evaluation.greedy=true              one answer without chance to each prompt
trainer.evaluation.samples=8                and so many sampled ones: mean, best and majority of them
trainer.evaluation.limit=100                the first so many prompts
{_DEVICES}""",
    "serve": f"""\
{_MODEL}data.max_prompt_tokens=1024                 with rollout.max_tokens: what a request may have
{_ANSWERS}rollout.temperature=0.7                     where a request does not say
rollout.max_concurrent=64                   requests at a time, of one engine
actor.compute_dtype=bfloat16                of the weights
cluster.device=cpu
cluster.threads=4                           of one engine, on a CPU
""",
}
_HEAD = "The keys most used (`rondo config show RECIPE` shows all, with their values):\n"
_ANY = "The keys are those of the command that the recipe is for: `rondo train -h`, `rondo sft -h`, …\n"


def recipe_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    command: str,
    about: str,
    *,
    launches: bool = False,
) -> argparse.ArgumentParser:
    """Makes the parser of a subcommand that takes recipes and overrides; launches: or a launch of another
    program.
    """
    parser = subparsers.add_parser(command, help=about, description=about)
    add_recipes(parser, nargs="*" if launches else "+", command=command)
    if launches:
        add_launches(parser)
    return parser


def add_recipes(parser: argparse.ArgumentParser, *, nargs: str, command: str | None = None) -> None:
    """Lets a parser take recipes and overrides, and lists below its help the keys that a command reads, and
    the recipes by name that are for it. None: for any command.
    """
    parser.add_argument(
        "config",
        nargs=nargs,
        metavar="RECIPE",
        help="a YAML file, or the name of a recipe; several are merged in order, then "
        "key.sub=value overrides",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HEAD + textwrap.indent(KEYS[command], "  ") if command in KEYS else _ANY
    names = [name for name in sorted(offered("recipes")) if _is_for(command, name)]
    if names:
        listed = textwrap.indent(textwrap.fill(", ".join(names), 80), "  ")
        parser.epilog += f"\nRecipes by name (`rondo recipes` says what they are):\n{listed}"


def _is_for(command: str | None, name: str) -> bool:
    """Says whether a command takes the recipe of that name. The model of a recipe that rondo has exists after
    training only, so that a server takes none.
    """
    try:
        return command not in KEYS or command_of(name) == {"eval": "train"}.get(command, command)
    except (ConfigError, OSError):  # of another package: told where it is used
        return True


@functools.cache
def command_of(name: str) -> str:
    """Returns the command that trains from a package's recipe."""
    text = offered("recipes")[name].read_text(encoding="utf-8")
    for key, command in (("preference_loss", "preference"), ("reward_model_loss", "reward-model")):
        if re.search(rf"^\s+{key}:", text, re.MULTILINE):
            return command
    return "sft" if name.endswith("_sft") else "train"


def load_arguments(arguments: Sequence[str], extra: Sequence[str] = ()) -> LoadedConfig:
    """Loads recipes and overrides: arguments with `=` before any `/`. Raises ConfigError."""
    from rondo.config import load  # not for --help: pydantic takes longer than all else there

    overrides = [a for a in arguments if "=" in a and "/" not in a.split("=", 1)[0]]
    files = [a for a in arguments if a not in overrides]
    loaded = load(files, [*overrides, *extra])
    for line in loaded.notes:  # keys in another spelling that mean nothing here, and secrets
        note(line)
    return loaded


def add_launches(parser: argparse.ArgumentParser, *, option: bool = True) -> None:
    """Lets a parser take a launch of another program: as an option in the place of a recipe, or by itself."""
    for name in offered("launches"):
        about = f"a launch script of {name}'s (its programs do not run), or a config as {name} writes it"
        parser.add_argument(f"--{name}" if option else name, metavar="FILE", help=about)
        parser.add_argument(f"--{name}-version", metavar="VERSION", help=f"of {name}: whose defaults hold")
    about = "a variable of the script; its arguments follow --"
    parser.add_argument("--env", action="append", metavar="NAME=VALUE", help=about)
    parser.add_argument("--launch", type=int, metavar="N", help="which one, where a script has several")
    parser.set_defaults(behind=[])


def of_launch(args: argparse.Namespace, what: str) -> Any:
    """Returns what a function of `config.load.Launches` makes of the launch that is named; None where none
    is. Raises ConfigError.
    """
    for name in offered("launches"):
        given = {"version": getattr(args, f"{name}_version"), "env": args.env, "number": args.launch}
        options = {key: value for key, value in given.items() if value is not None}
        if file := getattr(args, name):
            module = offered("launches")[name]
            found = getattr(module, what)(file, args.config, **options, arguments=args.behind)
            for line in found.notes:
                note(line)
            return found
        if options:
            raise ConfigError(f"--env, --launch and --{name}-version: of a launch, and none is named")
    return None


def load_recipe(args: argparse.Namespace) -> LoadedConfig:
    """Loads what a command names: recipes, or a launch of another program. Raises ConfigError."""
    loaded: LoadedConfig | None = of_launch(args, "load")
    recipes = [*args.config, *args.behind]
    if loaded is None and not recipes and args.command != "config":
        raise ConfigError("name a recipe: a YAML file, or one of `rondo recipes`")
    return loaded or load_arguments(recipes)


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
