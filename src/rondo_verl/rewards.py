"""What verl's keys say about rewards: verl's own rules by a row's `data_source`, or a function of the user's,
and the penalty of the manager dapo.

Each key has two spellings: that of 0.6.1 (`reward_model.…`, `custom_reward_function.…`) and that of main
(`reward.…`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rondo.config.tree import Node
from rondo_verl.defaults import default
from rondo_verl.values import Note, Setting, Values

CUSTOM = ("path", "name", "reward_kwargs")
OVERLONG = tuple(f"reward_model.overlong_buffer.{one}" for one in ("enable", "len", "penalty_factor", "log"))
_KWARGS = ("reward.reward_kwargs", "reward_model.reward_kwargs")
_MANAGER = ("reward.reward_manager.name", "reward_model.reward_manager")
KEYS = (
    *(f"{at}.{one}" for at in ("custom_reward_function", "reward.custom_reward_function") for one in CUSTOM),
    *(*_MANAGER, *_KWARGS, *OVERLONG),
)
_RULES = "verl"  # the scorer that has verl's own rules
_SECONDS = 300  # the manager prime waits so long for a score, the others for ever
_SCORED_AT_ONCE = (
    "it gives a function all answers of a step; here each is scored as it ends: take a function of one "
    "answer (data_source, solution_str, ground_truth, extra_info) and the manager naive"
)
_MANAGERS: Mapping[str, str] = {
    "batch": _SCORED_AT_ONCE,
    "gdpo": "list each score as a function of its own in reward.functions, with algorithm.advantage=gdpo",
}


def rewards(values: Values, tree: Node) -> list[Setting]:
    """Chooses what scores answers, unless rondo's own keys do."""
    path = _first(values, "reward.custom_reward_function.path", "custom_reward_function.path")
    is_custom = path is not None and values.plain(path) is not None
    if not is_custom and any(tree.at(key) is not None for key in ("reward.functions", "reward.models")):
        written = values.written(*_KWARGS, *OVERLONG)
        return [Note(key, "reward.functions or reward.models say what scores") for key in written]
    settings: list[Setting] = []
    entry, name = default(_MANAGER[0], _RULES), _RULES
    if path is not None and is_custom:
        entry = values.made(_custom(values, path), path)
        name = entry.value["name"].plain()
        if tree.at("reward.timeout_seconds") is None:
            settings.append(("reward.timeout_seconds", default(path, _SECONDS)))
    penalty, notes = _penalty(values, tree, _manager(values))
    entries = [entry] if penalty is None else [entry, penalty]
    score = name.replace(":", ".").rpartition(".")[2]
    if tree.at("reward.accuracy") is None:
        settings.append(("reward.accuracy", default(_MANAGER[0], f"{score}/acc")))
    said = [path] if path is not None and is_custom else []
    said += [] if penalty is None else values.written(*_KWARGS, *OVERLONG)
    functions = values.made(entries, *said) if said else default(_MANAGER[0], entries)
    return [*notes, *settings, ("reward.functions", functions)]


def _first(values: Values, *keys: str) -> str | None:
    """Returns the first of a key's spellings that is written, else the first that has a default."""
    return next(iter([*values.written(*keys), *(key for key in keys if key in values.nodes)]), None)


def _manager(values: Values) -> str:
    if values.written(*OVERLONG) and not values.written(*_MANAGER):
        return "dapo"  # the default of recipe.dapo, whose keys these are
    key = _first(values, *_MANAGER) or _MANAGER[0]
    name = values.plain(key, "naive")
    if name not in ("naive", "dapo", "prime"):
        other = "it is none of naive, dapo and prime: list scorers under reward.functions"
        raise values.refused(key, _MANAGERS.get(name, other))
    return str(name)


def _custom(values: Values, path: str) -> dict[str, Any]:
    """Returns the entry of the user's own function."""
    section = path.removesuffix("path")
    name, options = values.plain(f"{section}name"), values.plain(f"{section}reward_kwargs") or {}
    taken = sorted({"name", "weight", "sources", "options"} & options.keys())
    if taken:
        remedy = f"{taken[0]} is a key of reward.functions: give that option another name"
        raise values.refused(f"{section}reward_kwargs", remedy)
    file = str(values.plain(path)).removeprefix("pkg://")
    return {"name": f"{file}:{name or 'compute_score'}", **options}


def _penalty(values: Values, tree: Node, manager: str) -> tuple[Node | None, list[Note]]:
    """Returns the entry that takes something off overlong answers, or why there is none. verl's formula has
    no least value.
    """
    written = values.written(*_KWARGS, *OVERLONG)
    key = _first(values, *_KWARGS)
    given = {} if key is None else values.plain(key) or {}
    others = sorted(given.keys() - {"overlong_buffer_cfg", "max_resp_len"})
    if key is not None and others:
        raise values.refused(
            key, f"only overlong_buffer_cfg and max_resp_len are known here, not {others[0]}"
        )
    buffer = given.get("overlong_buffer_cfg")
    if buffer is None:
        buffer = {one.rpartition(".")[2]: values.plain(one) for one in values.written(*OVERLONG)}
    if manager != "dapo" or not buffer.get("enable"):
        why = (
            "overlong_buffer is not enabled"
            if manager == "dapo"
            else f"the manager {manager} does not read it"
        )
        return None, [Note(one, why) for one in written]
    response = tree.at("rollout.max_tokens")
    longest = given.get("max_resp_len", None if response is None else response.plain())
    tokens, factor = buffer.get("len"), buffer.get("penalty_factor", 1.0)
    if not (type(longest) is type(tokens) is int and 0 < tokens <= longest):
        raise values.refused(
            written[0],
            f"overlong_buffer.len must be a number of tokens above 0 and at most max_resp_len, got {tokens} "
            f"and max_resp_len={longest}",
        )
    entry = {"name": "overlong", "weight": factor, "max_tokens": longest, "buffer": tokens, "bounded": False}
    return values.made(entry, *written), []
