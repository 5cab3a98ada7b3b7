"""The console command `rondo`: finds the subcommand, runs it, turns errors into one clear block.

The module of a subcommand (`rondo.system.names` finds it) has `add_parser(subparsers)` and
`run(args) -> exit code`, and imports what is heavy in `run` only, so that `rondo --help` and errors in a
recipe are instant.
Exit codes: 0 done, 2 a problem that the message explains, 1 a bug (with its traceback); 130 ended by Ctrl-C,
143 by SIGTERM, 129 by SIGHUP.
"""

from __future__ import annotations

import argparse
import errno
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType

from rondo import __version__
from rondo.cli.arguments import command_of, note
from rondo.core.errors import (
    ConfigError,
    RondoError,
    StorageError,
    TrainError,
    WorkerError,
    did_you_mean,
    shows_tracebacks,
)
from rondo.system.border import EscapeError, contained, described, users_code
from rondo.system.names import offered
from rondo.system.signals import exit_code, interrupting
from rondo.system.storage import DISK_FULL, FAULTS, refused
from rondo.system.streams import command_streams, silence

RUNS = ("train", "sft", "preference", "reward-model", "serve")
"""Whose work is not what they print: they go on where nobody can read that any more."""
# What a write to standard output raises; it has no name of a file, as sockets and pipes have none.
_OF_WRITES = (*DISK_FULL, errno.EFBIG, errno.EIO)
DESCRIPTION = "Reinforcement-learning post-training for large language models."
EPILOG = """\
A recipe is one or more YAML files, merged in order, then key.sub=value overrides:

  rondo train quickstart trainer.seed=1 actor.optimizer.lr=1e-4
  rondo config show quickstart        every key, its value, and who set it; runs nothing
  rondo check quickstart              what train would refuse, and the stages of a step
  rondo doctor                                     what is usable on this machine

--traceback (or RONDO_TRACEBACK=1) shows the Python traceback of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `rondo` with `argv` (default: the process's arguments); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments or shows_tracebacks()
    arguments = [argument for argument in arguments if argument != "--traceback"]
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser, subparsers = _parser()
    try:
        modules = _registered(command, subparsers)
    except ConfigError as error:  # a command of another package's
        return _told(str(command), error)
    if command is not None and command not in modules:
        _refuse_recipe(parser, command)
    args = _parse(parser, arguments)
    if args.command is None:
        parser.print_help()
        return 0
    args.owns_process = argv is None
    owns = args.owns_process
    with command_streams(output=args.command in RUNS, to_the_end=owns), interrupting(owns_process=owns):
        return _run(modules[args.command], args, show_traceback)


def _registered(
    command: str | None, subparsers: argparse._SubParsersAction[_Parser]
) -> Mapping[str, ModuleType]:
    """Registers a command, and returns its module by its name; for an unknown name it registers all commands
    that can be, for the help. Raises ConfigError.
    """
    commands = offered("commands")
    modules: dict[str, ModuleType] = {}
    for name in [command] if command is not None and command in commands else commands:
        try:
            module = commands[name]
            if module not in modules.values():  # it may have several commands
                with users_code(f"command {name!r}: add_parser", ConfigError):
                    module.add_parser(subparsers)
            if name not in subparsers.choices:
                raise ConfigError(
                    f"command {name!r}: add_parser of {module.__name__} makes none of that name"
                )
            modules[name] = module
        except ConfigError as error:
            if name == command:
                raise
            note(error)
    return modules


def _refuse_recipe(parser: argparse.ArgumentParser, name: str) -> None:
    """Ends the program where a recipe stands in the place of a command."""
    shipped = name in offered("recipes")
    if shipped or name.endswith((".yaml", ".yml")):
        command = command_of(name) if shipped else "train"
        parser.error(f"{name} is a recipe; a command comes first: rondo {command} {name}")


def _run(module: ModuleType, args: argparse.Namespace, show_traceback: bool) -> int:
    try:
        with contained():
            code: int = module.run(args)
            sys.stdout.flush()
        return code
    except RondoError as error:
        if show_traceback:
            raise
        return _told(args.command, error)
    except EscapeError as error:  # of code of the user's that no other border saw
        return _told(args.command, TrainError(f"code of yours raised {described(error)}"))
    except KeyboardInterrupt as stopped:
        print(f"rondo {args.command}: {str(stopped) or 'interrupted'}", file=sys.stderr)
        return exit_code()
    except BrokenPipeError:  # `rondo … | head`
        silence(sys.stdout)
        return 1
    except OSError as error:
        if show_traceback or error.errno is None or error.errno not in FAULTS:
            raise
        if error.filename is not None:
            return _told(args.command, refused(error.filename, "used", error.errno))
        if error.errno not in _OF_WRITES:
            raise
        silence(sys.stdout)
        return _told(args.command, StorageError(f"standard output: cannot be written: {error.strerror}"))


def _told(command: str, error: RondoError) -> int:
    print(error_block(command, error), file=sys.stderr)
    return 2


def error_block(command: str, error: RondoError) -> str:
    """Returns what the user sees of an error: its kind, the message, and how to see more."""
    notes = getattr(error, "__notes__", ())
    cause = getattr(error, "cause_error", None)
    if isinstance(error, WorkerError) and isinstance(cause, RondoError):  # said by rondo itself, in a worker
        text = "\n".join([str(cause), *notes])
        kind = f"{type(cause).__name__} in {error.role}[{error.rank}]"
    else:
        text, kind = "\n".join([str(error), *notes]), type(error).__name__
    lines = [f"rondo {command}: {kind}", textwrap.indent(text, "  ")]
    if error.__cause__ is not None:
        lines.append("  (--traceback shows where in the code)")
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Names the nearest of what there is: of commands, of their actions, of choices and options."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            there = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), there)
            raise argparse.ArgumentError(action, f"there is no {value!r}{near} There are: {', '.join(there)}")

    def options(self) -> set[str]:
        """Returns the options that it takes, those of its actions included."""
        found = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found.update(*(parser.options() for parser in action.choices.values()))
        return found


def _parser() -> tuple[_Parser, argparse._SubParsersAction[_Parser]]:
    parser = _Parser(
        prog="rondo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rondo {__version__}")
    return parser, parser.add_subparsers(dest="command", metavar="COMMAND")


def _elsewhere(option: str) -> str:
    """Says of an option that TRL or OpenRLHF have (`--learning_rate`) which key it is here; else nothing."""
    from rondo.config.keys import elsewhere  # imports pydantic

    theirs = elsewhere(option.lstrip("-").rpartition(".")[2])
    return theirs and f"; a setting is written key.sub=value{theirs}"


def _parse(parser: _Parser, arguments: list[str]) -> argparse.Namespace:
    """Parses; overrides may also stand after options: `rondo eval a.yaml --model m rollout.n=4`. What stands
    behind `--` is for a launch script, where the command takes one.
    """
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    args, extra = parser.parse_known_args(arguments[:cut])
    if hasattr(args, "behind"):
        args.behind = arguments[cut + 1 :]
    elif cut < len(arguments):
        args, extra = parser.parse_known_args(arguments)
    if extra:
        options = [argument.partition("=")[0] for argument in extra if argument.startswith("-")]
        if not hasattr(args, "config") or options:
            settings = "; a setting is written key.sub=value" if hasattr(args, "config") else ""
            near = did_you_mean(options[0], parser.options()).rstrip(".") if options else ""
            theirs = _elsewhere(options[0]) if options and settings else ""
            parser.error(f"unrecognized arguments: {' '.join(extra)}{theirs or near or settings}")
        args.config.extend(extra)
    return args


if __name__ == "__main__":
    sys.exit(main())
