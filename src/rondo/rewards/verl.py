"""Reward functions in the form of verl's, compute_score(data_source, solution_str, ground_truth, extra_info,
**kwargs): called by name for each answer, on rows of verl's format.

They return a number, or a mapping in which `score` is the reward and `acc`, if it is there, says right or
wrong. `called_as_verl` makes such a function one of rondo's.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rondo.core.errors import ConfigError, DataError
from rondo.core.types import TURN_KINDS, Prompt, Trajectory, value_of_json
from rondo.rewards.marks import marks_of

SOURCE, TRUTH = "data_source", "reward_model.ground_truth"
"""What rows of verl's have, by `Prompt.column`."""
EPISODE = "(verl)"
"""Whose result in `Trajectory.tool_results` says of an episode of verl's loops what `extra_info` gets."""
ACCURACY = "acc"
"""verl's name for the score that says right or wrong; of a number it is the number itself."""
_GIVEN = (SOURCE, "solution_str", "ground_truth", "extra_info")
# What verl gives a function where a reward model is served beside it, and to functions of whole batches.
_LACKING: Mapping[str, str] = {
    "reward_router_address": "verl serves reward_model.model beside the training and gives its address",
    "reward_model_tokenizer": "verl serves reward_model.model beside the training and gives its tokenizer",
    "solution_strs": "the manager batch gives all answers of a step at once; here each is scored as it ends",
}
_LABEL = re.compile(rf"^\[(?:{'|'.join(TURN_KINDS)})\] ", re.MULTILINE)


def is_for_verl(function: Callable[..., Any]) -> bool:
    """Says whether a function has a parameter that is verl's: `solution_str`, or `solution_strs`."""
    return not {"solution_str", "solution_strs"}.isdisjoint(inspect.signature(function).parameters)


def called_as_verl(
    function: Callable[..., Any], options: Iterable[str] = (), title: str = ""
) -> Callable[..., Any]:
    """Returns a reward function of rondo's, marked as one, that calls `function` as verl does, and says what
    came back as rondo has it. options: the names of its options. title: what messages call it.

    Raises ConfigError where it wants what verl does not give, or what does not exist here.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    _check(parameters, set(options), title)

    def given(prompt: Prompt, trajectory: Trajectory, options: Mapping[str, Any]) -> dict[str, Any]:
        check_row(prompt)
        turns = sum(len(row.turns) for row in trajectory.rows) or 1
        extra = copy.deepcopy(value_of_json(prompt.fields.get("extra_info")))
        extra = dict(extra) if isinstance(extra, Mapping) else {}
        extra |= {"num_turns": turns + 1, "rollout_reward_scores": {}}  # the prompt is a turn, too
        extra |= _told(trajectory)
        truth = copy.deepcopy(prompt.column(TRUTH))
        values = (prompt.column(SOURCE), response_of(trajectory), truth, extra)
        all_of_them = dict(zip(_GIVEN, values, strict=True))
        return {k: v for k, v in all_of_them.items() if takes_any or k in parameters} | dict(options)

    if inspect.iscoroutinefunction(function):

        async def score_of(prompt: Prompt, trajectory: Trajectory, **options: Any) -> dict[str, Any]:
            return _read(await function(**given(prompt, trajectory, options)))

    else:

        def score_of(prompt: Prompt, trajectory: Trajectory, **options: Any) -> Any:  # type: ignore[misc]
            value = function(**given(prompt, trajectory, options))
            return _awaited(value) if inspect.isawaitable(value) else _read(value)

    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("prompt", "trajectory")]
    own = [p for p in parameters.values() if p.name not in _GIVEN and p.kind is not p.VAR_POSITIONAL]
    # verl gives no seed: one that is no option keeps its default.
    own = [p for p in own if p.name != "seed" or "seed" in options]
    settable = [p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY) for p in own]
    score_of.__name__ = getattr(function, "__name__", "compute_score")
    score_of.__module__ = function.__module__
    score_of.__signature__ = inspect.Signature([*first, *settable])  # type: ignore[attr-defined]
    marks = marks_of(function)
    names = tuple(dict.fromkeys((ACCURACY, *marks.score_names)))
    score_of.reward_marks = replace(marks, score_names=names, row=check_row, verl=True)  # type: ignore[attr-defined]
    return score_of


def check_row(prompt: Prompt, **_: Any) -> None:
    """Raises DataError for a row that is none of verl's."""
    about = value_of_json(prompt.fields.get("reward_model"))
    has = f"the row has {', '.join(prompt.fields) or 'no other columns'}"
    if not isinstance(prompt.fields.get(SOURCE), str):
        raise DataError(f"prompt {prompt.prompt_id}: a row of verl's has a text in {SOURCE!r}; {has}")
    if not isinstance(about, Mapping) or "ground_truth" not in about:
        raise DataError(
            f"prompt {prompt.prompt_id}: a row of verl's has {{style: …, ground_truth: …}} in "
            f"'reward_model'; {has}"
        )


def response_of(trajectory: Trajectory) -> str:
    """Returns what verl scores: the whole response without special tokens; of an episode all its turns."""
    if _told(trajectory) and len(trajectory.rows) == 1:  # the text is that of all tokens
        return trajectory.text
    return _LABEL.sub("", trajectory.transcript) if trajectory.transcripts else trajectory.text


def _told(trajectory: Trajectory) -> Mapping[str, Any]:
    return next((said.data for said in trajectory.tool_results if said.tool == EPISODE), {})


def _check(parameters: Mapping[str, inspect.Parameter], options: set[str], title: str) -> None:
    """Raises ConfigError for a function that cannot be called as verl calls it, or not with what there is."""
    said = f"{title}({', '.join(parameters)}) is written for verl"
    named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    by_position = [name for name, p in named.items() if p.kind is p.POSITIONAL_ONLY]
    if by_position:
        raise ConfigError(f"{said}, which gives arguments by name, and {by_position[0]} has none (`/`)")
    double = sorted(options.intersection(_GIVEN))
    if double:
        raise ConfigError(f"{said}, and its option {double[0]} has the name of what verl gives it")
    for name, p in named.items():
        if p.default is p.empty and name not in (*_GIVEN, *options):
            why = _LACKING.get(name, f"verl gives {', '.join(_GIVEN)}; an option stands beside its name")
            raise ConfigError(
                f"{said}, and wants {name}, which there is not here: {why}. Give it as an option, or write "
                "a function of (data_source, solution_str, ground_truth, extra_info) around it"
            )


def _read(value: Any) -> dict[str, Any]:
    """Says what a function of verl's returned as one of rondo's does. Texts in a mapping are no scores."""
    if not isinstance(value, Mapping):
        return {"reward": value, ACCURACY: value}
    if "score" not in value:
        raise ValueError(f"verl takes the reward from 'score', and there is {', '.join(map(str, value))}")
    found = {str(name): part for name, part in value.items() if name != "score" and _is_number(part)}
    return {ACCURACY: value["score"], **found, "reward": value["score"]}


def _is_number(value: Any) -> bool:
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return isinstance(value, bool | int | float) and math.isfinite(value)


async def _awaited(value: Any) -> dict[str, Any]:
    return _read(await value)
