"""Keys in verl's spelling, translated at the door.

`table.py` says of each key what becomes of it, `defaults.py` what verl takes where nothing is written,
`algorithm.py`, `models.py` and `run.py` what several keys mean together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from rondo.config.load import Translation, collected, with_settings
from rondo.config.schema import Config
from rondo.config.tree import Node, shown
from rondo.core.errors import ConfigError
from rondo_verl.defaults import VERSION, VERSIONS, version_of
from rondo_verl.megatron import unread
from rondo_verl.run import idle
from rondo_verl.sft import SPELLED, program_of
from rondo_verl.table import RL, Ignored, Joint, Late, Only, Spelled, To
from rondo_verl.values import Note, Setting, Values, like


def translate(tree: Node) -> Translation:
    """Says in ours what keys in verl's spelling say, and what verl takes where nothing is written; a key or
    value that has no counterpart is a problem.
    """
    problems: list[ConfigError] = []
    written: dict[str, Node] = {}
    program = program_of(tree)
    spelled = SPELLED.get(program, RL)
    tree = _take(tree, "", written, problems, spelled)
    if not written:
        return Translation(tree, problems=tuple(problems))
    if program == "fsdp_sft_trainer":  # which main does not have
        written[VERSION] = like(next(iter(written.values())), "0.6.1")
    said = {key: node for key, node in written.items() if key == VERSION}
    version, told = version_of(written if spelled is RL else said, problems)
    values = Values({**spelled.defaults(written, version), **written})
    notes: dict[str, str] = {}

    def set_in(tree: Node, settings: list[Setting]) -> Node:
        notes.update((one.key, one.reason) for one in settings if isinstance(one, Note))
        return with_settings(tree, [one for one in settings if not isinstance(one, Note)], problems)

    first: list[Setting] = []
    rules = spelled.table.values()
    for together in dict.fromkeys(rule.together for rule in rules if isinstance(rule, Joint)):
        with collected(problems):
            first += together(values)
    tree = set_in(tree, first)
    dead = {**unread(values), **idle(values, tree)} if spelled is RL else {}
    for section, reason in dead.items():
        notes.update((key, reason) for key in written if key.startswith(section))
        values = Values({key: node for key, node in values.nodes.items() if not key.startswith(section)})
    tree = set_in(tree, _alone(values, problems, spelled))
    for follow in dict.fromkeys(rule.together for rule in rules if isinstance(rule, Late)):
        with collected(problems):
            tree = set_in(tree, follow(values, tree))
    problems += [_unspaced(key, node) for key, node in written.items() if _has_unspaced(node)]
    nothing = [
        f"{written[key].origin.where}: {_own(key, spelled)} has no meaning in rondo: {notes[key]}"
        for key in written
        if key in notes
    ]
    nothing += [f"{key}: {reason}" for key, reason in notes.items() if key not in spelled.table]
    problems = problems if spelled is RL else [_told(problem, spelled) for problem in problems]
    is_whole = spelled is not RL or any(key.startswith("actor_rollout_ref.") for key in written)
    command = spelled.command if is_whole else ""
    return Translation(tree, (*_in_force(tree, version, told), *nothing), tuple(problems), command)


def _own(key: str, spelled: Spelled) -> str:
    """Returns a key's name in its own program."""
    return next((own for own, name in spelled.names.items() if name == key), key)


def _told(problem: ConfigError, spelled: Spelled) -> ConfigError:
    """Says what is wrong in the names of the program that it is of."""
    text = str(problem)
    for own, name in sorted(spelled.names.items(), key=lambda pair: -len(pair[1])):
        text = text.replace(name, own)
    return ConfigError(text, key=_own(problem.key or "", spelled) or None)


def _alone(values: Values, problems: list[ConfigError], spelled: Spelled) -> list[Setting]:
    """Translates the keys that mean something by themselves."""
    settings: list[Setting] = []
    for key, node in values.nodes.items():
        rule = spelled.table[key]
        with collected(problems):
            if isinstance(rule, Ignored):
                settings.append(Note(key, rule.reason))
            elif isinstance(rule, To):
                settings.append((rule.target, values.node(key, rule.convert)))
            elif isinstance(rule, Only) and node.plain() not in rule.values:
                raise values.refused(key, rule.remedy)
    return settings


def _in_force(tree: Node, version: str, told: str) -> list[str]:
    """Returns a note about verl's defaults that hold and differ from rondo's. told: what says the version."""
    found = [
        f"{key}={shown(node.plain())}"
        for key, node in _values(tree, "")
        if not node.origin.written and _ours(key) != node.plain()
    ]
    if not found:
        return []
    whose = f"those of {version} ({told}; {VERSION}={' or '.join(VERSIONS)} says which)"
    values = ", ".join(found)
    return [f"with keys in verl's spelling verl's defaults hold, {whose}, where nothing is written: {values}"]


def _values(node: Node, key: str) -> Iterator[tuple[str, Node]]:
    """Yields every value that is no mapping, with its dotted key."""
    if isinstance(node.value, dict):
        for name, child in node.value.items():
            yield from _values(child, f"{key}.{name}" if key else name)
    else:
        yield key, node


def _ours(key: str) -> Any:
    """Returns rondo's default of a key; None for an option of a function."""
    value: Any = Config()
    for part in key.split("."):
        value = getattr(value, part, None)
    return list(value) if isinstance(value, tuple) else value


def _take(
    node: Node, prefix: str, written: dict[str, Node], problems: list[ConfigError], spelled: Spelled
) -> Node:
    """Moves keys of the table from the tree into `written`."""
    rest: dict[str, Node] = {}
    for name, child in node.value.items():
        key = f"{prefix}.{name}" if prefix else name
        if key in spelled.names:
            written[spelled.names[key]] = child
        elif isinstance(child.value, dict) and any(known.startswith(key + ".") for known in spelled.names):
            pruned = _take(child, key, written, problems, spelled)
            if pruned.value or not child.value:
                rest[name] = pruned
        elif f"{key}.".startswith(spelled.foreign):
            problems += [_unknown(leaf_key, leaf, spelled) for leaf_key, leaf in child.leaves(key)]
        else:
            rest[name] = child
    return Node(rest, node.origin, node.layer)


def _has_unspaced(node: Node) -> bool:
    """Says whether `{a:1}` is in it: a mapping for Hydra, and for YAML one with the key `a:1`."""
    if isinstance(node.value, list):
        return any(_has_unspaced(one) for one in node.value)
    if not isinstance(node.value, dict):
        return False
    return any((":" in key and one.value is None) or _has_unspaced(one) for key, one in node.value.items())


def _unspaced(key: str, node: Node) -> ConfigError:
    text = f"{key}: write a space behind each colon of a mapping: {key}='{{a: 1}}'"
    return ConfigError(f"{node.origin.where}: {text}", key=key)


def _unknown(key: str, leaf: Node, spelled: Spelled) -> ConfigError:
    section, _, name = key.rpartition(".")
    beside = [k.rpartition(".")[2] for k in spelled.names if k.startswith(section + ".")]
    near = difflib.get_close_matches(name, beside, n=1, cutoff=0.7)
    hint = (
        f"did you mean '{section}.{near[0]}'?"
        if near
        else "see docs/verl.md for the keys that are translated"
    )
    text = f"'{key}' is verl's spelling, but rondo does not translate it; {hint}"
    return ConfigError(f"{leaf.origin.where}: {text}", key=key)
