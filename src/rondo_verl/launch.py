"""The door for a launch script of verl, or its config file: `rondo train --verl run.sh`.

What the script would run (`script.py`), or the file says (`resolved.py`), goes into the loader as if it had
been typed; each error, note and origin then names the line there. All that is refused is told at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rondo.config.load import LoadedConfig, TranslatedLaunch, collected, with_settings
from rondo.config.load import load as load_typed
from rondo.config.printing import flow, plain
from rondo.config.tree import BENEATH, Node, Origin, read_argument, read_file
from rondo.core.errors import ConfigError
from rondo_verl.defaults import VERSION, VERSIONS
from rondo_verl.keys import translate as translate_keys
from rondo_verl.megatron import ENGINE
from rondo_verl.programs import argument, program
from rondo_verl.resolved import every_default, interpolated, read_config
from rondo_verl.script import Ran, Report, run_script
from rondo_verl.sft import SPELLED, WHOLE, program_of
from rondo_verl.table import TABLE

# The config file that a program reads by itself, by the program's folder: its defaults are known.
_CONFIGS = {
    "sft_trainer": "sft_trainer_engine",
    "sft_trainer_ray": "sft_trainer_engine",
    "fsdp_sft_trainer": "sft_trainer",
    "trainer": "ppo_trainer",
    "dapo": "dapo_trainer",
    "one_step_off_policy": "one_step_off_ppo_trainer",
    "fully_async_policy": "fully_async_ppo_trainer",
}
_OWN_FOLDERS = ("config", "./config", "verl/trainer/config")
_MODULE = re.compile(r"(?:\w+\.)+\w*(?:main|trainer)\w*|main_\w+")
_SAID = re.compile(r"(?P<file>.*?): line (?P<line>\d+): (?P<what>.*)")
_UNSET = re.compile(r"\$?(?P<name>\w+): (?:unbound variable|parameter null or not set)")
_NOTHING = " has no meaning in rondo: "
_FEW = 6


@dataclass(frozen=True)
class Launch:
    """What is to be trained: verl's keys, and where each was written."""

    place: str
    """The file; of a script, with the line of its command."""
    places: Mapping[str, str]
    """key=value, as on a command line, and file:line of each."""
    module: str = ""
    """verl's program; empty: a config file, which names none."""
    notes: tuple[str, ...] = ()
    """What the script would have done besides."""
    problems: tuple[ConfigError, ...] = ()
    """What is wrong with it, whatever its keys mean."""


def load(path: str, extra: Sequence[str] = (), **options: Any) -> LoadedConfig:
    """Loads a launch as `rondo train PROGRAM key=value …` would. extra: recipes, and key=value after those of
    the launch. options: of `read`. Raises ConfigError, which says all that is refused, and where it stands.
    """
    return _load(path, extra, options)[1]


def translate(path: str, extra: Sequence[str] = (), **options: Any) -> TranslatedLaunch:
    """Returns a recipe in rondo's spelling that loads equal to `load` of the same. Raises ConfigError as it
    does.
    """
    launch, loaded, table = _load(path, extra, options)
    nothing = [f"# {note}" for note in loaded.notes if _NOTHING in note]
    lines = [f"# {launch.place} {launch.module}".rstrip() + ", in rondo's spelling"]
    lines += _mapping(plain(loaded.config), "", loaded.origins)
    lines += ["", "# Without a meaning here:", *nothing] if nothing else []
    return TranslatedLaunch("\n".join(lines) + "\n", table, launch.notes)


def read(
    path: str,
    *,
    version: str | None = None,
    env: Sequence[str] = (),
    number: int | None = None,
    arguments: Sequence[str] = (),
    given: Collection[str] = (),
) -> Launch:
    """Returns the launch that a script or config file of verl makes. Raises ConfigError, and SandboxError
    where no script can be run.

    Args:
        path: a shell script, or a YAML file as Hydra writes it.
        version: of verl: one of VERSIONS; None: that whose keys these are, else the first.
        env: NAME=value: the variables that the script sees besides HOME, USER and PATH.
        number: which launch, where a script has several; the first is 1.
        arguments: of the script.
        given: keys of verl's that the user sets: the script's are left out.
    """
    if version not in (None, *VERSIONS):
        known = ", ".join(VERSIONS)
        raise ConfigError(f"--verl-version {version}: rondo does not know its defaults; there are: {known}")
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: there is no such file; a launch script of verl, or a config, is wanted")
    if path.endswith((".yaml", ".yml")):
        for option, value in (("--env", env), ("--launch", number), ("arguments behind --", arguments)):
            if value:
                raise ConfigError(f"{path}: {option}: for scripts only; a config holds all values itself")
        kind, version = program_of(read_file(path, 0)), version or VERSIONS[0]
        names = SPELLED[kind].names if kind else TABLE
        pairs = read_config(path, version, WHOLE[kind] if kind else every_default(version), names)
        places = {each: place for each, place in pairs if _key(each) not in given}
        return Launch(path, places, f"verl.trainer.{kind}" if kind else "")
    text = _script_text(path)
    if wrong := next((each for each in env if not re.match(r"[A-Za-z_]\w*=", each)), None):
        raise ConfigError(f"--env {wrong}: it is written --env NAME=value")
    report = run_script(path, arguments, dict(each.split("=", 1) for each in env))
    launches = [_Command(ran, *found) for ran in report.ran if (found := _launched(ran))]
    _refuse_failed(path, report, found=bool(launches))
    times = f"{path}: it launches verl {len(launches)} times"
    if number is None and len(launches) > 1:
        raise ConfigError(f"{times}; choose one (--launch 1):\n" + "\n".join(_listed(launches)))
    if number is not None and not 1 <= number <= len(launches):
        raise ConfigError(f"{times}, and --launch is {number}")
    command = launches[(number or 1) - 1]
    places, problems = _keys_of(command, path, text, report, version or VERSIONS[0], given)
    problems += _strays(command)
    return Launch(command.place, places, command.module, tuple(_notes(report)), tuple(problems))


# ---- from the keys on


def _load(path: str, extra: Sequence[str], options: Mapping[str, Any]) -> tuple[Launch, LoadedConfig, str]:
    typed = [each for each in extra if "=" in each and "/" not in each.split("=", 1)[0]]
    files = [each for each in extra if each not in typed]
    launch = read(path, given={_key(each) for each in typed}, **options)
    if version := options.get("version"):
        typed.append(f"{VERSION}={version}")
    problems, programs = list(launch.problems), list[str]()
    beneath: Mapping[str, Any] = {}
    with collected(problems):
        found = program(launch.module) if launch.module else None
        programs, beneath = ([], {}) if found is None else ([launch.module], found)
    loaded = None
    with collected(problems):
        loaded = load_typed([*programs, *files], [*launch.places, *typed], places=launch.places)
    table = _table(launch, problems, beneath)
    if loaded is None or problems:
        error = ConfigError.of(problems)
        error.add_note(table)
        raise error
    return launch, replace(loaded, notes=(*launch.notes, *loaded.notes)), table


def _table(launch: Launch, problems: Sequence[ConfigError], beneath: Mapping[str, Any]) -> str:
    """Counts what becomes of the launch's keys. beneath: what the program sets."""
    tree = Node({}, Origin(launch.place), BENEATH)
    program_says = {f"{key}={value}": launch.place for key, value in beneath.items()}
    for layer, (each, place) in enumerate({**program_says, **launch.places}.items()):
        with collected([]):  # told by the loader
            parts, value = read_argument(argument(each), layer, place)
            tree = with_settings(tree, [(".".join(parts), value)], [])
    translation = translate_keys(tree)
    keys = {_key(each) for each in launch.places} | {one.key for one in launch.problems if one.key}
    nothing = sum(_NOTHING in note for note in translation.notes)
    rows = {
        f"keys of {launch.place}": len(keys),
        "carried": len(keys) - nothing - len({problem.key for problem in problems} & keys),
        "without a meaning here": nothing,
        "refused": len(problems),
        "verl's defaults beneath": sum(not one.origin.written for _, one in translation.tree.leaves("")),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {count:>4}" for name, count in rows.items())


def _mapping(value: Mapping[str, Any], key: str, origins: Mapping[str, Origin]) -> Iterator[str]:
    """Yields what somebody or verl has set below a key, as YAML; all else has rondo's default, as it had."""
    for name, child in value.items():
        whole = f"{key}.{name}" if key else name
        if whole in origins:
            yield f"{flow(name)}: {flow(child)}  # {_comment(origins[whole])}"
        elif any(known.startswith(whole + ".") for known in origins):
            yield f"{flow(name)}:"
            lines = _list if isinstance(child, list) else _mapping
            yield from ("  " + line for line in lines(child, whole, origins))


def _list(value: Sequence[Any], key: str, origins: Mapping[str, Origin]) -> Iterator[str]:
    for number, child in enumerate(value):
        if isinstance(child, dict):
            first, *rest = _mapping(child, f"{key}.{number}", origins)
            yield from (f"- {first}", *("  " + line for line in rest))
        else:
            yield f"- {flow(child)}  # {_comment(origins[f'{key}.{number}'])}"


def _comment(origin: Origin) -> str:
    return origin.where.replace("\n", " ")


def _key(override: str) -> str:
    return override.partition("=")[0].strip().lstrip("+")


# ---- of a script


@dataclass(frozen=True)
class _Command:
    """A command that launches verl."""

    ran: Ran
    module: str
    words: tuple[str, ...]
    """What stands behind the module."""

    @property
    def place(self) -> str:
        return f"{self.ran.file}:{self.ran.line}"


def _launched(ran: Ran) -> tuple[str, tuple[str, ...]] | None:
    """Returns verl's program, and the words behind it, where a command runs one: by `-m`, or as a file."""
    for at, word in enumerate(ran.argv):
        module, behind = word, at + 1
        if word == "-m" and behind < len(ran.argv):
            module, behind = ran.argv[behind], behind + 1
        elif word.endswith(".py"):
            parts = word.removesuffix(".py").split("/")
            tops = [number for number, part in enumerate(parts) if part in ("verl", "recipe")]
            module = ".".join(parts[tops[-1] if tops else -1 :])
        else:
            continue
        if _MODULE.fullmatch(module):
            return module, ran.argv[behind:]
    return None


def _script_text(path: str) -> str:
    """Reads a script. Raises ConfigError for what is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read as a script: {error}") from error
    is_shell = path.endswith((".sh", ".bash", ".slurm", ".sbatch")) or re.match(r"#!.*\b(ba|da|z)?sh\b", text)
    if not is_shell or "\0" in text:
        raise ConfigError(
            f"{path}: neither a script (.sh, or #!/bin/bash in its first line) nor a config (.yaml) of verl's"
        )
    return text


def _refuse_failed(path: str, report: Report, *, found: bool) -> None:
    """Raises ConfigError for a script that bash cannot read, or that launches nothing."""
    for match in filter(None, map(_SAID.match, report.said)):
        place, what = f"{match['file']}:{match['line']}", match["what"]
        if "syntax error" in what or "unexpected EOF" in what:
            raise ConfigError(f"{place}: bash cannot read the script: {_named(what, report)}")
        if not found and (unset := _UNSET.match(what)):
            raise ConfigError(f"{place}: the script needs {_to_give(unset['name'])}")
    if found:
        return
    words = "".join(f"; {_named(line, report)}" for line in report.said[-3:])
    told = f"it ended with code {report.code} at {report.at or 'its start'}{words}"
    if downloads := report.downloads():
        told += f". Nothing is downloaded here: {_some(downloads)}"
    elif report.ran:
        told += f". It would have run: {_some(report.ran)}"
    raise ConfigError(f"{path}: no launch of verl (python -m verl.trainer.main_ppo …) in it; {told}")


def _to_give(name: str) -> str:
    """Says how a variable, or an argument by its number, is given."""
    if name.isdigit():
        return f"its argument {name}, which is missing; give it behind `--`"
    return f"the variable {name}, which is not set; give it: --env {name}=…"


def _named(text: str, report: Report) -> str:
    """Names the program whose output is missing in a message of bash's."""
    ran = report.behind(text)
    return f"{text} ({ran} is not run here)" if ran else text


def _some(ran: Sequence[Ran]) -> str:
    more = f"; and {len(ran) - _FEW} more" if len(ran) > _FEW else ""
    return "; ".join(map(str, ran[:_FEW])) + more


def _listed(launches: Sequence[_Command]) -> Iterator[str]:
    """Yields a line for each launch: number, line, module, and words that not all of that module have."""
    for number, one in enumerate(launches, 1):
        alike = [set(other.words) for other in launches if other.module == one.module]
        own = [word for word in one.words if word not in set.intersection(*alike)]
        more = f"  {' '.join(own[:3])}{' …' if len(own) > 3 else ''}" if own else ""
        yield f"  {number}  {one.place}  {one.module}{more}"


def _keys_of(
    command: _Command, path: str, text: str, report: Report, version: str, given: Collection[str]
) -> tuple[dict[str, str], list[ConfigError]]:
    """Finds where each key of a command stands, and what is wrong with a value before the key is read."""
    places: dict[str, str] = {}
    problems: list[ConfigError] = []
    words = [word.partition("=") for word in command.words if "=" in word and not word.startswith("-")]
    options = [word for word in command.words if word.startswith("-") or "=" not in word]
    if any("megatron_trainer" in word for word in options):  # the config, which has this default
        places[f"{ENGINE}=megatron"] = command.place
    usual = WHOLE.get(command.module.rpartition(".")[2]) or every_default(version)
    values = {**usual, **{_key(key): value for key, _, value in words}}
    for written, _, value in words:
        key = _key(written)
        if key in given:
            continue
        line = _line_of(key, command, path, text)
        place = f"{command.ran.file}:{line}" if line else command.place
        resolved, instead = interpolated(value, key, values), f"write it behind the script: {key}=…"
        if ran := report.behind(value):
            wrong = f"{key} takes what {ran} prints, which is not run here; {instead}"
        elif not value.strip("\"' "):
            standing = re.escape(key) + r"=[\"']?\$\{?(\w+)"
            variable = re.search(standing, text.splitlines()[line - 1]) if line else None
            wrong = f"{key} is empty: " + (f"it needs {_to_give(variable[1])}" if variable else instead)
        elif isinstance(resolved, str) and "${" in resolved:
            wrong = f"{key}={value} is resolved by Hydra, and not here; {instead}"
        else:
            places[f"{written}={resolved if isinstance(resolved, str) else flow(resolved)}"] = place
            continue
        problems.append(ConfigError(f"{place}: {wrong}", key=key))
    if command.module.rpartition(".")[2] in WHOLE:  # torchrun counts devices, and verl's keys do not
        for option, key in (("nproc", "trainer.n_gpus_per_node"), ("nnodes", "trainer.nnodes")):
            there = " ".join(command.ran.argv)
            if (said := re.search(rf" --{option}[a-z_-]*[= ](\d+)", there)) and key not in given:
                places.setdefault(f"{key}={said[1]}", command.place)
    return places, problems


def _strays(command: _Command) -> Iterator[ConfigError]:
    """Yields an error for each word that is no key=value: Hydra's options, and what a script put there."""
    words = [word for word in command.words if word.startswith("-") or "=" not in word]
    parts = reversed(command.module.split("."))
    usual = next((_CONFIGS[one] for one in parts if one in _CONFIGS), "")
    while words:
        option, has_value, value = words.pop(0).partition("=")
        if option.startswith("--config-") or option in ("-cn", "-cp", "-cd"):
            value = value if has_value or not words else words.pop(0)
            known = (usual, usual.replace("_trainer", "_megatron_trainer"))
            own = value.removesuffix(".yaml") in known or value.rstrip("/") in _OWN_FOLDERS
            if not own:
                yield ConfigError(
                    f"{command.place}: {option}={value}: of the configs rondo knows {usual or 'ppo_trainer'} "
                    "only; write this one whole (`… --cfg job --resolve > config.yaml`): --verl config.yaml"
                )
        elif option.startswith("-"):
            yield ConfigError(f"{command.place}: {option}: an option of Hydra's without a meaning here")
        else:
            yield ConfigError(f"{command.place}: {option!r} is no key=value; is a quote missing, or a \\?")


def _line_of(key: str, command: _Command, path: str, text: str) -> int | None:
    """Returns the line at which a key stands in the script: in the command itself, else the last above it."""
    if command.ran.file != path:
        return None
    lines, end = text.splitlines(), command.ran.line
    while end < len(lines) and lines[end - 1].rstrip().endswith("\\"):
        end += 1
    standing = re.compile(rf"(?<![\w.]){re.escape(key)}=")
    return next((number for number in range(end, 0, -1) if standing.search(lines[number - 1])), None)


def _notes(report: Report) -> Iterator[str]:
    """Yields what the script would have done besides, and what went wrong in it."""
    others = [ran for ran in report.ran if not _launched(ran) and ran.argv[0] != "nvidia-smi"]
    if others:
        yield f"not run, of the script: {_some(others)}"
    if downloads := report.downloads():
        yield f"nothing was downloaded, what these bring has to be here already: {_some(downloads)}"
    if said := [_named(line, report) for line in report.said if _SAID.match(line)]:
        yield f"bash said of the script: {'; '.join(said[:_FEW])}"
