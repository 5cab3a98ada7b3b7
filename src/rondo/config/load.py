"""Loading: YAML files merged in order, then `key.sub=value` arguments, translated, typed and validated.

Imports neither torch nor ray nor transformers, so that errors in a recipe are instant.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rondo.config.build import BuiltConfig, build
from rondo.config.keys import ROOT, SchemaPlace, elsewhere, has_unknown_keys
from rondo.config.printing import literal_secrets
from rondo.config.rules import violations
from rondo.config.schema import Config, ModelConfig
from rondo.config.tree import BENEATH, Node, Origin, cut, read_argument, read_file, read_value
from rondo.core.errors import ConfigError, as_called
from rondo.core.masking import is_secret, masked_settings
from rondo.system.names import offered

INCLUDE = "include"
MOST_FILES = 256
"""Files that a recipe includes at most; one that is included several times counts each time."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where it came from."""

    config: Config
    """Whole, and within all rules."""
    origins: Mapping[str, Origin]
    """Of the leaves that were set, by dotted key (`data.train.0.path`); all others have their defaults."""
    files: tuple[str, ...]
    """As given, in order."""
    notes: tuple[str, ...] = ()
    """Keys in another spelling that have no meaning here, each with the reason, and those that hold secrets;
    the start of a run shows them once.
    """
    command: str = ""
    """The command that keys in another spelling are for; empty: nothing says it."""


@dataclass(frozen=True)
class Translation:
    """What keys that the schema does not know say in ours."""

    tree: Node
    """The tree without them, and with what they say; see `with_settings`."""
    notes: tuple[str, ...] = ()
    """Those that have no meaning here, and what follows from none that was written."""
    problems: tuple[ConfigError, ...] = ()
    """Those that have no counterpart."""
    command: str = ""
    """The command that they are for, where they say so."""


@dataclass(frozen=True)
class TranslatedLaunch:
    """A launch of another program in rondo's spelling."""

    recipe: str
    """YAML that loads equal, with a comment for each line: what it was."""
    table: str
    """How many of its keys are carried, and how many are not."""
    notes: tuple[str, ...]
    """What is to be told besides."""


class Spelling(Protocol):
    """What a module has to have that makes recipes in another program's spelling mean something here. It is
    found by its entry point (system/names.py).
    """

    def translate(self, tree: Node) -> Translation:
        """Translates another program's keys into rondo's, and leaves unknown ones alone. Called only where a
        tree has keys that the schema does not know.
        """

    def program(self, name: str) -> Mapping[str, Any] | None:
        """Returns what `name`, in the place of a recipe, sets beneath the keys that follow, by dotted key.

        None: it is no program. Raises ConfigError for one whose keys mean something else.
        """

    def argument(self, text: str) -> str:
        """Returns an argument of a program of its own as `key.sub=value`."""


class Launches(Protocol):
    """What a module has to have that reads launch scripts and configs of another program. options: `version`
    of it; `env`, `arguments`, `number` of the launch, of a script; those not given are left out. Both raise
    ConfigError.
    """

    def load(self, path: str, extra: Sequence[str], **options: Any) -> LoadedConfig:
        """Loads a launch, with recipes and overrides of the user's over it."""

    def translate(self, path: str, extra: Sequence[str], **options: Any) -> TranslatedLaunch:
        """Returns it in rondo's spelling."""


def load(
    files: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] = {},
    places: Mapping[str, str] = {},
) -> LoadedConfig:
    """Merges `files` in order, then `overrides`, into one validated configuration.

    A file is a path, or the name of a package's recipe (`quickstart`: rondo's own). Its top-level
    `include: other.yaml` (or a list; relative to the file, or shipped) is merged before the file itself.
    Mappings merge deeply, lists and scalars replace; `key.0.sub=value` reaches into a list. The options of a
    function belong to its name: another name replaces them all. Values of overrides are YAML (`lr=1e-4`,
    `stop=[a, b]`). settings: what a program sets after them, by dotted key, in its own values. places:
    file:line of those overrides that stand in a file, for messages. Keys that
    the schema does not know may be those of another program (`Spelling`), whose name may stand in the place
    of a file.

    Raises ConfigError, which says all that is wrong: each problem names key, file and line or argument, and
    the nearest valid key or the remedy.
    """
    problems: list[ConfigError] = []
    programs = _programs(files)
    recipes = [recipe_path(file) for file in files if file not in programs]
    translation = _translated(_merged(files, overrides, settings, problems, places))
    tree, notes = translation.tree, translation.notes
    problems += translation.problems
    built = build(tree)
    problems += [*built.problems, *violations(built)]
    if problems:
        raise ConfigError.of(problems)
    notes = (*notes, *_notes_on_secrets(built))
    return LoadedConfig(_with_warm_start(built), built.origins, tuple(recipes), notes, translation.command)


def written(key: str, files: Sequence[str], settings: Mapping[str, Any]) -> Any:
    """Returns what `load` of these files and settings will find at a dotted key, in whichever spelling it is
    written; None where it is not. Settings may still hold what no recipe can: that `load` refuses, if it is
    still there, as any other value. Raises ConfigError for files that cannot be read.
    """
    node = _translated(_merged(files, (), settings, [])).tree.at(key)
    return None if node is None else node.plain()


def _merged(
    files: Sequence[str],
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    problems: list[ConfigError],
    places: Mapping[str, str] = {},
) -> Node:
    """Merges what `load` is given, as it is spelled; what is wrong with an override or a setting joins
    `problems`.
    """
    # A layer is a number: what was written later has the higher one, whatever file or spelling it is in.
    tree = Node({}, Origin("defaults"), BENEATH)
    programs = _programs(files)
    layers = [
        path for file in files for path in ([file] if file in programs else _with_includes(recipe_path(file)))
    ]
    for layer, path in enumerate(layers):
        if path not in programs:
            tree = _merge(ROOT, tree, _without_include(read_file(path, layer)))
        for key, given in programs.get(path, {}).items():
            parts, value = read_value(key, given, layer, Origin(f"program {path}"))
            tree = _override(ROOT, tree, parts, value, "")
    for layer, argument in enumerate(overrides, start=len(layers)):
        place = places.get(argument, "argument")
        for spelling in _spellings([]) if programs else ():
            argument = spelling.argument(argument)
        with collected(problems):
            parts, value = read_argument(argument, layer, place)
            tree = _override(ROOT, tree, parts, value, "")
    for layer, (key, given) in enumerate(settings.items(), start=len(layers) + len(overrides)):
        with collected(problems):
            shown = cut(as_called(masked_settings(f"{key}={given!r}")))
            try:
                parts, value = read_value(key, given, layer, Origin(f"setting {shown}"))
            except ConfigError as error:  # an object of another library's (peft_config=…), perhaps
                raise ConfigError(f"{error}{elsewhere(key)}", key=error.key) from error
            tree = _override(ROOT, tree, parts, value, "")
    return tree


def _programs(files: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Returns those of `files` that are programs, with what each sets. Raises ConfigError."""
    found: dict[str, Mapping[str, Any]] = {}
    for file in files:
        if file.endswith((".yaml", ".yml")) or file in offered("recipes"):
            continue
        said = next((keys for one in _spellings([]) if (keys := one.program(file)) is not None), None)
        if said is not None:
            found[file] = said
    return found


def _spellings(faults: list[ConfigError]) -> Iterator[Spelling]:
    """Yields every translator; what is wrong with one that cannot be used joins `faults`."""
    for name in offered("keys"):
        with collected(faults):  # that package's fault, and no reason not to ask the others
            yield offered("keys")[name]


def _translated(tree: Node) -> Translation:
    notes: list[str] = []
    problems: list[ConfigError] = []
    command = ""
    faults: list[ConfigError] = []
    # Most recipes have none, and are spared the import of other programs' keys.
    if has_unknown_keys(tree):
        for spelling in _spellings(faults):
            one = spelling.translate(tree)
            tree = one.tree
            notes += one.notes
            problems += one.problems
            command = one.command
            if not has_unknown_keys(tree):
                break
        else:
            problems += faults
    return Translation(tree, tuple(notes), tuple(problems), command)


def _notes_on_secrets(built: BuiltConfig) -> Iterator[str]:
    for key in literal_secrets(built.config):
        origin, name = built.origins.get(key), key.rpartition(".")[2]
        if key.startswith("cluster.env."):
            what, instead = "a secret", "set the variable where the hosts are started"
        elif is_secret(name):
            what, instead = "a secret", f"write {name}: {{env: NAME_OF_A_VARIABLE}}"
        else:
            what, instead = "what may be a secret", "name a variable there, or a URL without user and query"
        yield (
            f"{origin.where if origin else 'the recipe'}: {key} holds {what}: a run keeps a digest of it, "
            f"and cannot be repeated from its config.yaml alone; {instead}"
        )


def _with_warm_start(built: BuiltConfig) -> Config:
    """Makes the path of the warm start's recipe one that is found from anywhere: in a recipe it may be
    relative to the file that says it, which a run's config.yaml is not. One that is not found stays as it is
    written.
    """
    config, path = built.config, built.config.trainer.warm_start
    if path is None:
        return config
    recipe = Path(built.origins["trainer.warm_start"].where.rpartition(":")[0])
    places = (Path(path), recipe.parent / path, Path(shipped_recipe(str(path))))
    found = next((place.resolve() for place in places if os.path.isfile(place)), None)
    if found is None:
        return config
    here, name = Path.cwd(), str(found)
    # A recipe of a package goes by its name, which another machine has, too.
    if Path(recipe_path(found.stem)).resolve() == found:
        name = found.stem
    elif here in found.parents:
        name = str(found.relative_to(here))
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, warm_start=name))


@contextmanager
def collected(problems: list[ConfigError]) -> Iterator[None]:
    """Adds a ConfigError raised inside to `problems` and goes on, so that further mistakes are found, too."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def shipped_recipe(name: str) -> str:
    """Returns the file of the recipe of a package, for what a recipe says of another (`grpo`, or `grpo.yaml`
    where it lay beside it); `name` itself where there is none.
    """
    shipped, stem = offered("recipes"), name.removesuffix(".yaml")
    return str(shipped[stem]) if stem in shipped else name


def recipe_path(name: str) -> str:
    """Returns the file of a package's recipe (`rondo recipes`); `name` itself where there is none, or a file
    here.
    """
    # os.path, and not pathlib, says of a name that no file can have that there is none.
    is_shipped = name in offered("recipes") and not os.path.exists(name)
    return str(offered("recipes")[name]) if is_shipped else name


def _with_includes(path: str, including: tuple[str, ...] = (), before: int = 0) -> list[str]:
    """Returns the files that `path` includes, in the order in which they are read, and `path` last.
    including: those that led here, the recipe first. before: how many are read before. Raises ConfigError for
    a circle, and for more than MOST_FILES.
    """
    if path in including:
        raise ConfigError(
            f"{path}: includes itself by way of {' -> '.join([*including, path])}; break the circle"
        )
    if max(before, len(including)) >= MOST_FILES:
        raise ConfigError(
            f"{including[0]}: includes more than {MOST_FILES} files, of which {path} would be the next (one "
            "that several others include is read for each of them); put what they say into fewer files"
        )
    node = read_file(path, 0)
    listed = node.value.get(INCLUDE) if isinstance(node.value, dict) else None
    if listed is None:
        return [path]
    names = listed.value if isinstance(listed.value, list) else [listed]
    found: list[str] = []
    for name in names:
        if not isinstance(name.value, str):
            raise ConfigError(
                f"{name.origin.where}: {INCLUDE} is a file name or a list of them, got {name.value!r}"
            )
        beside = Path(path).parent / name.value
        other = str(beside) if os.path.isfile(beside) else shipped_recipe(name.value)
        if not os.path.isfile(other):
            raise ConfigError(f"{name.origin.where}: {INCLUDE}: no such file: {beside} (relative to {path})")
        found += _with_includes(other, (*including, path), before + len(found))
    return [*found, path]


def _without_include(node: Node) -> Node:
    if not isinstance(node.value, dict):
        return node
    return Node({key: child for key, child in node.value.items() if key != INCLUDE}, node.origin, node.layer)


def _merge(place: SchemaPlace, old: Node | None, new: Node) -> Node:
    """Lays `new` over `old`. Where one of several is chosen, another choice in `new` replaces all of
    `old`.
    """
    new, old = place.named(new), place.named(old) if old is not None else None
    if not isinstance(new.value, dict):
        return new
    if place.tag in new.value and place.differ(old, new):
        return new
    merged = dict(old.value) if old is not None and isinstance(old.value, dict) else {}
    for key, child in new.value.items():
        merged[key] = _merge(place.child(key, new if place.tag in new.value else old), merged.get(key), child)
    return Node(merged, new.origin, new.layer)


def _override(place: SchemaPlace, old: Node | None, parts: Sequence[str], value: Node, done: str) -> Node:
    """Puts `value` at `parts` below `old`; done: the dotted key of `old`, for messages."""
    if not parts:
        return _merge(place, old, value)
    head, rest = parts[0], parts[1:]
    if place.tag is not None and head == place.tag and not rest:
        return _merge(place, old, Node({head: value}, value.origin, value.layer))
    key = f"{done}.{head}" if done else head
    old = place.named(old) if old is not None else None
    if (old is not None and isinstance(old.value, list)) or place.is_list:
        return _override_element(place, old, head, rest, value, done)
    if old is not None and not isinstance(old.value, dict | None) and place.kind is None:
        raise ConfigError(f"{value.origin.where}: {done} is no mapping, so there is no {key}", key=key)
    merged = dict(old.value) if old is not None and isinstance(old.value, dict) else {}
    merged[head] = _override(place.child(head, old), merged.get(head), rest, value, key)
    origin = old.origin if old is not None and isinstance(old.value, dict) else value.origin
    return Node(merged, origin, value.layer)


def _override_element(
    place: SchemaPlace, old: Node | None, head: str, rest: Sequence[str], value: Node, done: str
) -> Node:
    elements = list(old.value) if old is not None and isinstance(old.value, list) else []
    if not head.isdigit():
        raise ConfigError(
            f"{value.origin.where}: {done} is a list; write {done}.0.{'.'.join([head, *rest])}=… for its "
            f"first element, or {done}=[…] for all",
            key=done,
        )
    index = int(head)
    if index >= len(elements):
        there = f"ends with element {len(elements) - 1}" if elements else "is empty"
        message = f"{value.origin.where}: {done} {there}; set the whole list with {done}=[…]"
        raise ConfigError(message, key=f"{done}.{head}")
    elements[index] = _override(place.element(index), elements[index], rest, value, f"{done}.{head}")
    assert old is not None
    return Node(elements, old.origin, value.layer)


def with_settings(tree: Node, settings: Sequence[tuple[str, Node]], problems: list[ConfigError]) -> Node:
    """Sets keys of ours to what another spelling says. Of both spellings of a key the later one stands; two
    in one file join `problems`.
    """
    theirs = Node({}, tree.origin, BENEATH)
    for key, value in settings:
        theirs = _put(theirs, key.split("."), value, key, problems)
    return _blend(ROOT, tree, theirs, "", problems)


def _put(tree: Node, parts: Sequence[str], value: Node, key: str, problems: list[ConfigError]) -> Node:
    """Puts `value` at `parts`, unless what is there was written later."""
    head, rest = parts[0], parts[1:]
    there = tree.value.get(head)
    if rest and (there is None or (there.value is None and value.layer > there.layer)):
        there = Node({}, value.origin, value.layer)
    if rest and isinstance(there.value, dict):
        value = _put(there, rest, value, key, problems)
    elif there is not None:
        value = _later(there, value, key, problems)
    return Node({**tree.value, head: value}, tree.origin, max(tree.layer, value.layer))


def _blend(place: SchemaPlace, ours: Node, theirs: Node, key: str, problems: list[ConfigError]) -> Node:
    """Merges two trees; of each value the one that was written later wins. Of two choices the later one wins,
    together with what is set after it.
    """
    ours, theirs = place.named(ours), place.named(theirs)
    if not (isinstance(ours.value, dict) and isinstance(theirs.value, dict)):
        return _later(ours, theirs, key, problems)
    if place.tag is not None and place.differ(ours, theirs):
        return _last_choice(place.tag, ours, theirs, key, problems)
    merged = dict(ours.value)
    for name, child in theirs.value.items():
        below = place.child(name, theirs if place.tag in theirs.value else ours)
        path = f"{key}.{name}" if key else name
        merged[name] = _blend(below, merged[name], child, path, problems) if name in merged else child
    return Node(merged, ours.origin, max(ours.layer, theirs.layer))


def _last_choice(tag: str, ours: Node, theirs: Node, key: str, problems: list[ConfigError]) -> Node:
    """Returns the one whose choice was made later; the schema's, where none is written, was made first."""
    if tag in ours.value and tag in theirs.value:
        _later(ours.value[tag], theirs.value[tag], f"{key}.{tag}", problems)
    made = [node.value[tag].layer if tag in node.value else BENEATH - 1 for node in (ours, theirs)]
    first, last = (theirs, ours) if made[0] > made[1] else (ours, theirs)
    kept = {name: child for name, child in first.value.items() if name != tag and child.layer > max(made)}
    return Node({**last.value, **kept}, last.origin, max(ours.layer, theirs.layer))


def _later(one: Node, other: Node, key: str, problems: list[ConfigError]) -> Node:
    if one.layer == other.layer != BENEATH and one.origin != other.origin:
        text = f"{other.origin.where}: sets {key} in another spelling, and {one.origin.where} sets it too"
        problems.append(ConfigError(f"{text}; keep one of them", key=key))
    return other if other.layer > one.layer else one


def beside_recipe(loaded: LoadedConfig, key: str, path: str) -> Path:
    """Returns the file that `key` names: relative to the working directory, else to the recipe that set the
    key, else a recipe that rondo ships.

    Raises ConfigError naming both places.
    """
    origin = loaded.origins.get(key)
    recipe = Path(origin.where.rpartition(":")[0]) if origin else Path()
    places = [Path(path), recipe.parent / path, Path(shipped_recipe(str(path)))]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(dict.fromkeys(str(place) for place in places[:2]))
    near = sorted(found.name for found in places[1].parent.glob("*" + places[1].suffix))
    there = f"; there are: {', '.join(near)}" if near else ""
    raise ConfigError(f"{key}: no such file: looked for {looked}{there}", key=key)


def starting_model(loaded: LoadedConfig) -> ModelConfig:
    """Returns the model that a run starts from before any warm start, with its tokenizer. Raises ConfigError
    where the warm start's recipe cannot be loaded.
    """
    model, recipe = loaded.config.model, loaded.config.trainer.warm_start
    if recipe is None:
        return model
    first = load([str(beside_recipe(loaded, "trainer.warm_start", recipe))]).config.model
    return dataclasses.replace(
        first,
        # What it exports has the positions of the model that it starts from, unless they are overridden.
        override={**first.override, **model.override},
        chat_template=model.chat_template or first.chat_template,
        chat_template_options=model.chat_template_options,
        tool_format=model.tool_format,
        images=model.images,
    )
