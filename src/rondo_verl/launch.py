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

from rondo.config.load import LoadedConfig, TranslatedLaunch, collected, with_settings
from rondo.config.load import load as load_typed
from rondo.config.tree import BENEATH, Node, Origin, parse_scalar, read_argument
from rondo.core.errors import ConfigError
from rondo_verl.keys import translate as translate_keys
from rondo_verl.programs import TRANSLATED, is_program
from rondo_verl.recipe import recipe
from rondo_verl.resolved import every_default, interpolated, read_config
from rondo_verl.script import SECONDS, Ran, Report, run_script

VERSIONS = ("main",)
"""Of verl, those whose defaults rondo knows; the first where none is named."""
# The config file that a program reads by itself: its defaults are known.
_CONFIGS = dict(zip(TRANSLATED, ("ppo_trainer", "dapo_trainer"), strict=True))
_MODULE = re.compile(r"(?:\w+\.)+\w*(?:main|trainer)\w*|main_\w+")
_SAID = re.compile(r"(?P<file>.*?): line (?P<line>\d+): (?P<what>.*)")
_UNSET = re.compile(r"(?P<name>\w+): (?:unbound variable|parameter null or not set)")
_FEW = 6


@dataclass(frozen=True)
class Launch:
    """What is to be trained: verl's keys, and where each was written."""

    place: str
    """The file, or the file and the line of its command."""
    places: Mapping[str, str]
    """key=value, as on a command line, and file:line of each."""
    module: str = ""
    """verl's program; empty: a config file, which names none."""
    notes: tuple[str, ...] = ()
    """What the script would have done besides."""
    problems: tuple[ConfigError, ...] = ()
    """What is wrong with it, whatever its keys mean."""


def read(
    path: str,
    *,
    version: str = VERSIONS[0],
    env: Sequence[str] = (),
    number: int | None = None,
    arguments: Sequence[str] = (),
    given: Collection[str] = (),
) -> Launch:
    """Returns the launch that a script or config file of verl makes. Raises ConfigError, and SandboxError
    where no script can be run.

    Args:
        path: a shell script, or a YAML file as Hydra writes it.
        version: of verl: one of VERSIONS.
        env: NAME=value: the variables that the script sees besides HOME, USER and PATH.
        number: which launch, where a script has several; the first is 1.
        arguments: of the script.
        given: keys of verl's that the user sets: the script's are left out.
    """
    _check_version(version)
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: there is no such file; a launch script of verl's, or a config, is wanted")
    if path.endswith((".yaml", ".yml")):
        for option, value in (("--env", env), ("--launch", number), ("arguments behind --", arguments)):
            if value:
                raise ConfigError(f"{path}: {option}: for scripts only; a config holds all values of one launch")
        found = read_config(path, version)
        return Launch(path, {each: place for each, place in found if _key(each) not in given})
    text = _script_text(path)
    for each in env:
        if not re.match(r"[A-Za-z_]\w*=", each):
            raise ConfigError(f"--env {each}: it is written --env NAME=value")
    report = run_script(path, arguments, dict(each.split("=", 1) for each in env))
    launches = [_Command(ran, *found) for ran in report.ran if (found := _launched(ran))]
    _refuse_failed(path, report, found=bool(launches))
    if number is None and len(launches) > 1:
        listed = "\n".join(_listed(launches))
        raise ConfigError(f"{path}: it launches verl {len(launches)} times; choose one (--launch 1):\n{listed}")
    if not 1 <= (number or 1) <= len(launches):
        raise ConfigError(f"{path}: --launch {number}: it launches verl {len(launches)} times")
    return _checked(launches[(number or 1) - 1], path, text, report, version, given)


def load(path: str, extra: Sequence[str] = (), **options: object) -> LoadedConfig:
    """Loads a launch as `rondo train PROGRAM key=value …` would. extra: recipes, and key=value after those of
    the launch. options: of `read`. Raises ConfigError, which says all that is refused, and where it stands.
    """
    return _load(path, extra, options)[1]


def translate(path: str, extra: Sequence[str] = (), **options: object) -> TranslatedLaunch:
    """Returns a recipe in rondo's spelling that loads equal to `load` of the same. Raises ConfigError as it
    does.
    """
    launch, loaded, table = _load(path, extra, options)
    nothing = [note for note in loaded.notes if " has no meaning in rondo: " in note]
    text = recipe(loaded, f"{launch.place} {launch.module}".strip(), nothing)
    return TranslatedLaunch(text, table, tuple(note for note in loaded.notes if note not in nothing))


def _check_version(version: str) -> None:
    """Raises ConfigError for a version of verl whose defaults are not known."""
    if version not in VERSIONS:
        raise ConfigError(
            f"--verl-version {version}: the defaults of that version are not known here; there are: "
            f"{', '.join(VERSIONS)}"
        )


# ---- from the keys on


def _load(
    path: str, extra: Sequence[str], options: Mapping[str, object]
) -> tuple[Launch, LoadedConfig, str]:
    typed = [each for each in extra if "=" in each and "/" not in each.split("=", 1)[0]]
    files = [each for each in extra if each not in typed]
    launch = read(path, given={_key(each) for each in typed}, **options)  # type: ignore[arg-type]
    problems = list(launch.problems)
    with collected(problems):
        if launch.module:
            is_program(launch.module)
    loaded = None
    with collected(problems):
        loaded = load_typed(files, [*launch.places, *typed], places=launch.places)
    table = _table(launch, problems)
    if loaded is None or problems:
        error = ConfigError.of(problems)
        error.add_note(table)
        raise error
    return launch, replace(loaded, notes=(*launch.notes, *loaded.notes)), table


def _table(launch: Launch, problems: Sequence[ConfigError]) -> str:
    """Counts what becomes of the launch's keys."""
    tree = Node({}, Origin(launch.place), BENEATH)
    for layer, (each, place) in enumerate(launch.places.items()):
        with collected([]):  # told by the loader
            parts, value = read_argument(each, layer, place)
            tree = with_settings(tree, [(".".join(parts), value)], [])
    translation = translate_keys(tree)
    keys = {_key(each) for each in launch.places}
    nothing = sum(" has no meaning in rondo: " in note for note in translation.notes)
    refused = {problem.key for problem in problems} & keys
    beneath = sum(not node.origin.written for _, node in translation.tree.leaves(""))
    rows = {
        f"keys of {launch.place}": len(keys),
        "carried": len(keys) - nothing - len(refused),
        "without a meaning here": nothing,
        "refused": len(problems),
        "verl's defaults beneath": beneath,
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {count:>4}" for name, count in rows.items())


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
        if word == "-m" and at + 1 < len(ran.argv) and _MODULE.fullmatch(ran.argv[at + 1]):
            return ran.argv[at + 1], ran.argv[at + 2 :]
        if word.endswith(".py"):
            parts = word.removesuffix(".py").split("/")
            top = max((n for n, part in enumerate(parts) if part in ("verl", "recipe")), default=len(parts) - 1)
            module = ".".join(parts[top:])
            if _MODULE.fullmatch(module):
                return module, ran.argv[at + 1 :]
    return None


def _script_text(path: str) -> str:
    """Reads a script. Raises ConfigError for what is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read as a script: {error}") from error
    is_shell = re.match(r"#!.*\b(ba|da|z)?sh\b", text)
    if not (is_shell or path.endswith((".sh", ".bash", ".slurm", ".sbatch"))) or "\0" in text:
        raise ConfigError(
            f"{path}: neither a script (.sh, or #!/bin/bash in its first line) nor a config (.yaml) of verl's"
        )
    return text


def _refuse_failed(path: str, report: Report, *, found: bool) -> None:
    """Raises ConfigError for a script that does not end, is none, or launches nothing."""
    if report.code in (124, 137):
        raise ConfigError(
            f"{report.at or path}: the script did not end within {SECONDS} s here, where programs do nothing and end "
            "at once; take out of it what waits"
        )
    lines = [match for line in report.said if (match := _SAID.match(line))]
    for match in lines:
        place, what = f"{match['file']}:{match['line']}", match["what"]
        if "syntax error" in what or "unexpected EOF" in what:
            raise ConfigError(f"{place}: bash cannot read the script: {_named(what, report)}")
        unset = _UNSET.match(what)
        if unset and not found:
            name = unset["name"]
            remedy = f"--env {name}=…" if not name.isdigit() else f"argument {name} of the script, behind `--`"
            raise ConfigError(f"{place}: the script needs {name}, which is not set; give it: {remedy}")
    if found:
        return
    words = "; ".join(_named(line, report) for line in report.said[-3:])
    told = [f"it ended with code {report.code} at {report.at or 'its start'}" + (f": {words}" if words else "")]
    if downloads := report.downloads():
        told.append(f"nothing is downloaded here: {'; '.join(map(str, downloads[:_FEW]))}")
    elif report.ran:
        told.append(f"it would have run: {'; '.join(map(str, report.ran[:_FEW]))}")
    raise ConfigError(f"{path}: no launch of verl (python -m verl.trainer.main_ppo …) in it; {'. '.join(told)}")


def _named(text: str, report: Report) -> str:
    """Names the program whose output is missing in a message of bash's."""
    ran = report.behind(text)
    return f"{text} ({ran} is not run here)" if ran else text


def _listed(launches: Sequence[_Command]) -> Iterator[str]:
    """Yields a line for each launch: number, line, module, and what of its keys not all have."""
    common = set.intersection(*(set(one.words) for one in launches))
    for number, one in enumerate(launches, 1):
        own = [word for word in one.words if word not in common]
        more = f"  {' '.join(own[:3])}{' …' if len(own) > 3 else ''}" if own else ""
        yield f"  {number}  {one.place}  {one.module}{more}"


def _checked(
    command: _Command, path: str, text: str, report: Report, version: str, given: Collection[str]
) -> Launch:
    """Finds where each key stands, and what is wrong with a command before its keys are read."""
    problems: list[ConfigError] = []
    places: dict[str, str] = {}
    overrides = [word for word in command.words if "=" in word and not word.startswith("-")]
    with_values = {**every_default(version), **{_key(each): each.partition("=")[2] for each in overrides}}
    for word in (word for word in overrides if _key(word) not in given):
        key, value = _key(word), word.partition("=")[2]
        line = _line_of(key, command, path, text)
        place = f"{command.ran.file}:{line}" if line else command.place
        if ran := report.behind(value):
            problems.append(
                ConfigError(
                    f"{place}: {key} takes what {ran} prints, which is not run here; give the value behind: {key}=…",
                    key=key,
                )
            )
        elif not value.strip("\"' "):
            problems.append(ConfigError(f"{place}: {key} is empty{_why_empty(key, line, text)}", key=key))
        else:
            resolved = interpolated(value, key, with_values)
            if isinstance(resolved, str) and "${" in resolved:
                problems.append(
                    ConfigError(f"{place}: {key}={value}: rondo cannot resolve that; give the value: {key}=…", key=key)
                )
            places[word if resolved == value else f"{key}={resolved}"] = place
    problems += _strays(command)
    return Launch(command.place, places, command.module, tuple(_notes(command, report)), tuple(problems))


def _strays(command: _Command) -> Iterator[ConfigError]:
    """Yields an error for each word that is no key=value: Hydra's options, and what a script put there."""
    words = [word for word in command.words if word.startswith("-") or "=" not in word]
    while words:
        word = words.pop(0)
        option, has_value, value = word.partition("=")
        if option in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd") and not has_value and words:
            value = words.pop(0)
        usual = _CONFIGS.get(command.module, "")
        if option in ("--config-path", "-cp") and value.rstrip("/").removeprefix("./") in ("config", "verl/trainer/config"):
            continue
        if option in ("--config-name", "-cn"):
            if value.removesuffix(".yaml") == usual:
                continue
            yield ConfigError(
                f"{command.place}: --config-name={value}: its defaults are others than those of {usual or 'main_ppo'}, "
                "which rondo knows; give the whole config: `… --cfg job --resolve > config.yaml`, --verl config.yaml"
            )
        elif option.startswith("-"):
            yield ConfigError(f"{command.place}: {word}: this option of Hydra's has no meaning here; take it out")
        else:
            yield ConfigError(f"{command.place}: {word!r} is no key=value; is a quote or a backslash missing?")


def _line_of(key: str, command: _Command, path: str, text: str) -> int | None:
    """Returns the line at which a key stands in the script: in the command itself, else the last above it."""
    if command.ran.file != path:
        return None
    lines = text.splitlines()
    end = command.ran.line
    while end < len(lines) and lines[end - 1].rstrip().endswith("\\"):
        end += 1
    standing = re.compile(rf"(?<![\w.]){re.escape(key)}=")
    found = [number for number, line in enumerate(lines[:end], 1) if standing.search(line)]
    return found[-1] if found else None


def _why_empty(key: str, line: int | None, text: str) -> str:
    """Says which variable an empty value comes from."""
    written = text.splitlines()[line - 1] if line else ""
    found = re.search(rf"{re.escape(key)}=[\"']?\$\{{?(\w+)", written)
    if not found:
        return f"; give it behind: {key}=…"
    if found[1].isdigit():
        return f": argument {found[1]} of the script is missing; give it behind `--`"
    return f": the variable {found[1]} is not set; give it: --env {found[1]}=…"


def _notes(command: _Command, report: Report) -> Iterator[str]:
    """Yields what the script would have done besides, and what went wrong in it."""
    others = [ran for ran in report.ran if not _launched(ran) and ran.argv[0] != "nvidia-smi"]
    if others:
        more = f"; and {len(others) - _FEW} more" if len(others) > _FEW else ""
        yield f"not run, of the script: {'; '.join(map(str, others[:_FEW]))}{more}"
    if downloads := report.downloads():
        yield f"nothing was downloaded: what {'; '.join(map(str, downloads[:_FEW]))} brings has to be here already"
    said = [_named(line, report) for line in report.said if _SAID.match(line)]
    if said:
        yield f"bash said of the script: {'; '.join(said[:_FEW])}"
