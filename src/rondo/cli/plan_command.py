"""`rondo plan`: what a recipe's run will hold of memory, before it starts. No torch, no card, no download."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rondo.cli.arguments import load_recipe, recipe_parser
from rondo.cli.training import add_for
from rondo.core.errors import ConfigError

if TYPE_CHECKING:
    from rondo.config import Config
    from rondo.planning.plan import MemoryPlan
    from rondo.planning.step_time import TimePlan

HELP = "plan a run's memory by owner and phase, and what would help; needs no card, no torch and no download"
# Beside "actor", by command.
_ROLES: Mapping[str, Sequence[str]] = {"sft": (), "preference": ("reference",), "reward-model": ()}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = recipe_parser(subparsers, "plan", HELP, launches=True)
    add_for(parser)
    parser.add_argument("--devices", type=int, help="plan for so many (default: cluster.devices)")
    parser.add_argument("--card", help="h100, a100, … (default: any, unless cluster.device=cpu)")
    parser.add_argument(
        "--lengths", metavar="PROMPT,RESPONSE", help="tokens of a row, or a run (default: the most)"
    )
    parser.add_argument("--auto", action="store_true", help="search the keys of the shortest step that fits")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    about = (
        "measure a device of this machine (with a recipe: of its cluster.device) and write its row for --card"
    )
    parser.add_argument("--measure", metavar="FILE.tsv", nargs="?", const="device.tsv", help=about)
    parser.add_argument("--shapes", action="store_true", help="list the models and cards that have a name")


def run(args: argparse.Namespace) -> int:
    """Prints the plan."""
    if args.shapes:
        _list()
        return 0
    if args.measure is not None:
        _measure(Path(args.measure), args)
        return 0
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices {args.devices}: give a number of devices from 1")
    extra = [] if args.devices is None else [f"cluster.devices={args.devices}"]
    if args.devices is not None and args.devices > 1:
        extra.append("cluster.backend=ray")
    args.config = [*args.config, *extra]
    loaded = load_recipe(args)
    from rondo.config import starting_model
    from rondo.planning.devices import find_device
    from rondo.planning.plan import plan_memory, remedies
    from rondo.planning.roles import ON_CARD, ON_HOST, config_for, reference_in_actor, roles_of
    from rondo.planning.runs import lengths_like, lengths_of, runs_of, shapes_of
    from rondo.planning.search import search
    from rondo.planning.step_time import plan_time
    from rondo.planning.telling import advice, advice_data, as_data, table

    command = args.command_for or loaded.command or "train"
    card = None if args.card is None else find_device(args.card)
    on_host = loaded.config.cluster.device == "cpu" if card is None else card.is_host
    config = dataclasses.replace(loaded.config, model=starting_model(loaded))
    config = config_for(config, ON_HOST if on_host else ON_CARD)
    roles: Sequence[str] = roles_of(config)
    if command != "train":
        roles = ("actor", *(() if reference_in_actor(config) else _ROLES[command]))
    trained = [role for role in roles if role in ("actor", "critic", "cost_critic", "prm")]
    if args.lengths is not None and Path(args.lengths).is_dir():
        from rondo.tracking import trajectories

        lengths = lengths_like(*trajectories.lengths_of(args.lengths), args.lengths)
    else:
        lengths = lengths_of(config, args.lengths, rows_of_pairs=command != "train")
    shape = shapes_of(config)
    for role in roles:
        shape(role)  # its error is about this recipe, not about one that is tried

    if args.auto:
        if card is None:
            raise ConfigError("--auto: say for which card (--card h100; `rondo plan --shapes` lists them)")
        found = search(config, roles, trained, shape, lengths, card)
        if args.json:
            print(json.dumps(advice_data(found), indent=2))
        else:
            print(f"Lengths: {lengths.said}.", *advice(found, config, card), sep="\n")
        return 0

    def plan(one: Config) -> tuple[MemoryPlan, TimePlan | None]:
        runs = runs_of(one, roles, trained, shape, lengths, on_host=on_host)
        held = plan_memory(runs, card=None if card is None else card.memory)
        return held, None if card is None else plan_time(runs, card)

    def cost(one: Config) -> tuple[int, float]:
        held, time = plan(one)
        return held.peak, 0.0 if time is None else time.step

    (held, time), helps = plan(config), remedies(config, cost)
    if args.json:
        print(json.dumps(as_data(held, time, helps), indent=2))
    else:
        print(*table(held, time, config, card, helps), sep="\n")
    return 0


def _measure(path: Path, args: argparse.Namespace) -> None:
    from rondo.platform import planned
    from rondo.platform.measure import check_target, measure, write_row
    from rondo.rollout.native.kernels import compiler, random_product

    check_target(path)  # before the minute that it takes
    choice = load_recipe(args).config.cluster.device if args.config else "auto"
    platform = planned(choice)
    print(f"Measuring {platform.device()}; best on a machine that does nothing else.", flush=True)
    own = random_product if platform.host and compiler() is not None else None
    row = write_row(measure(platform, lambda line: print(line, flush=True), own_product=own), path)
    print(f"{path}: the row of {row.name}. `rondo plan RECIPE --card {path}` plans on it.")


def _list() -> None:
    from rondo.planning.devices import known_devices
    from rondo.planning.shapes import known_shapes

    print("Models:")
    for name, (shape, parameters, source) in known_shapes().items():
        print(f"  {name:20} {parameters / 1e9:9.2f}B, {shape.active / 1e9:7.2f}B of a token   {source}")
    print("\nCards:")
    for row in known_devices().values():
        sizes = f"{row.memory / (1 << 30):4.0f} GiB, {row.flops / 1e12:5.0f} TFLOP/s"
        print(f"  {row.name:20} {sizes}   {row.source}")
