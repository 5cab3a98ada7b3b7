"""What verl's keys say about rewards: verl's own rules by a row's `data_source`, or a function of the user's,
and the penalty of the manager dapo.

Each key has two spellings: that of 0.6.1 (`reward_model.…`, `custom_reward_function.…`) and that of main
(`reward.…`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rondo.config.tree import Node
from rondo_verl.defaults import default
from rondo_verl.values import Note, Setting, Values, like

_PATHS = ("reward.custom_reward_function.path", "custom_reward_function.path")
_BESIDE_PATH = tuple(
    f"{path.removesuffix('path')}{one}" for path in _PATHS for one in ("name", "reward_kwargs")
)
OVERLONG = tuple(f"reward_model.overlong_buffer.{one}" for one in ("enable", "len", "penalty_factor", "log"))
_KWARGS = ("reward.reward_kwargs", "reward_model.reward_kwargs")
_MANAGER = ("reward.reward_manager.name", "reward_model.reward_manager")
# What reward.models has of the reward model of 0.6.1.
_OF_MODEL = {
    "model.path": "path",
    "forward_max_token_len_per_gpu": "token_budget",
    "model.fsdp_config.param_offload": "offload_params",
}
MODEL = tuple(f"reward_model.{one}" for one in ("enable", "model.input_tokenizer", *_OF_MODEL))
_OF_FUNCTIONS = (*_BESIDE_PATH, *_MANAGER, *_KWARGS, *OVERLONG)
KEYS = (*MODEL, *_PATHS, *_OF_FUNCTIONS)
_RULES = "verl"  # the scorer that has verl's own rules
_SECONDS = 300  # the manager prime waits so long for a score, the others for ever
_MANAGERS: Mapping[str, str] = {
    "batch": "it gives a function all answers of a step; here each is scored as it ends: take a function of "
    "one answer (data_source, solution_str, ground_truth, extra_info) and the manager naive",
    "gdpo": "list each score as a function of its own in reward.functions, with algorithm.advantage=gdpo",
}


def rewards(values: Values, tree: Node) -> list[Setting]:
    """Chooses what scores answers, unless rondo's own keys do."""
    path = _first(values, *_PATHS)
    if path is not None and values.plain(path) is None:
        path = None
    if values.plain("reward_model.enable"):
        notes = _unread(values, _OF_FUNCTIONS, "a reward model is all that scores, as in verl")
        return [*notes, ("reward.models", _model(values, path))]
    own = tree.at("reward.functions") or tree.at("reward.models")
    if own is not None and (path is None or own.layer > values.nodes[path].layer):
        return _unread(values, (*_PATHS, *_OF_FUNCTIONS), "reward.functions or reward.models say what scores")
    settings = _unread(values, MODEL[1:], "reward_model.enable is not True")
    entry, name = default(_MANAGER[0], _RULES), _RULES
    if path is None:
        settings += _unread(values, _BESIDE_PATH, "custom_reward_function.path is not set")
    else:
        entry = values.made(_custom(values, path), path)
        name = entry.value["name"].plain()
        if tree.at("reward.timeout_seconds") is None:
            settings.append(("reward.timeout_seconds", default(path, _SECONDS)))
    penalty, notes = _penalty(values, tree, _manager(values))
    entries = [entry] if penalty is None else [entry, penalty]
    if tree.at("reward.accuracy") is None:
        score = name.replace(":", ".").rpartition(".")[2]
        settings.append(("reward.accuracy", default(_MANAGER[0], f"{score}/acc")))
    last = max(entries, key=lambda node: node.layer)
    return [*notes, *settings, ("reward.functions", like(last, entries))]


def _unread(values: Values, keys: Sequence[str], why: str) -> list[Setting]:
    """Notes those of these keys that somebody wrote."""
    return [Note(key, why) for key in values.written(*keys)]


def _model(values: Values, path: str | None) -> Node:
    """Returns the reward model of 0.6.1, which then is all that scores."""
    given, tokenizer = values.below("reward_model."), "model.input_tokenizer"
    if path is not None:
        remedy = "verl serves it for the function to ask; serve it yourself, and have the function ask there"
        raise given.refused("enable", remedy)
    if given.plain(tokenizer, "") is not None:
        remedy = (
            "verl writes the conversation anew with the reward model's template, which rondo does not; if "
            "it reads the policy's tokens and template, say so as in verl: "
            "reward_model.model.input_tokenizer=null"
        )
        raise given.refused("enable", remedy)
    if "model.path" not in given.nodes:
        raise given.refused("enable", "reward_model.model.path is not set; set it")
    entry = {ours: given.nodes[theirs] for theirs, ours in _OF_MODEL.items() if theirs in given.nodes}
    return given.made([entry], "enable")


def _first(values: Values, *keys: str) -> str | None:
    """Returns the spelling of a key that is written, else the one that has a default."""
    written = values.written(*keys)
    if len(written) > 1:
        raise values.refused(written[1], f"{written[0]} says the same; remove either")
    return next(iter([*written, *(key for key in keys if key in values.nodes)]), None)


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


def _penalty(values: Values, tree: Node, manager: str) -> tuple[Node | None, list[Setting]]:
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
        return None, _unread(values, written, why)
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
