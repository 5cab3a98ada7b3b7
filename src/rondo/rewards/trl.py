"""Reward functions in the form of TRL's GRPOTrainer, f(completions, prompts, completion_ids, **columns):
called once for each prompt group as TRL calls them for a batch, by keyword, each argument a list with an
element for each answer.

They return a list, too: a number for each answer, or None where the function does not apply to it.
`called_as_trl` makes such a function one of rondo's that scores groups (`Marks.group`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from rondo.core.errors import ConfigError, DataError, RewardError
from rondo.core.types import Prompt, Trajectory
from rondo.rewards.marks import marks_of

_GIVEN = ("prompts", "completions", "completion_ids")
_TAKEN_OUT = ("prompt", "completion", "completion_ids")  # columns of a row that TRL gives to no function
# What else TRL gives. The last two only log, so that a function with a default for them is whole without.
_LACKING: Mapping[str, str] = {
    "trainer_state": "the progress of TRL's trainer",
    "environments": "the objects of TRL's environment_factory",
    "log_extra": "a column in TRL's table of completions",
    "log_metric": "a metric in TRL's log",
}
_LOGS = ("log_extra", "log_metric")
# What functions of TRL's and verifiers' are given of an answer, in lines that an error shows.
SHOWN = """\
    is_chat = prompt.messages and not prompt.text
    said = [{{"role": "assistant", "content": trajectory.text}}] if is_chat else trajectory.text
    asked = list(prompt.messages) if is_chat else prompt.text
"""
# Around a function that wants one of these.
_WRAPPER = """\
def score(prompt, trajectory):
SHOWN    given = {{name: [value] for name, value in prompt.fields.items()}}
    ids = trajectory.response_ids.tolist()
    given |= {{"prompts": [asked], "completions": [said], "completion_ids": [ids]}}
    return {name}({taken}, {lacking})[0]""".replace("SHOWN", SHOWN)


def is_for_trl(function: Callable[..., Any]) -> bool:
    """Says whether a function has a parameter that is TRL's: `completions` or `completion_ids`."""
    return not {"completions", "completion_ids"}.isdisjoint(inspect.signature(function).parameters)


def called_as_trl(
    function: Callable[..., Any], options: Iterable[str] = (), title: str = ""
) -> Callable[..., Any]:
    """Returns a reward function of rondo's, marked as one, that is given the trajectories of a prompt and
    calls `function` as TRL does. Its options stand in the place of columns; options: their names. title: what
    messages call it.

    Raises ConfigError where TRL gives the function what does not exist here, and where an option has the name
    of what TRL gives.
    """
    signature = inspect.signature(function)
    named = {
        p.name: p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    _check(function, signature, options, title)
    columns = [p for name, p in named.items() if name not in (*_GIVEN, *_LACKING)]

    def check_row(prompt: Prompt, **options: Any) -> None:
        for p in columns:
            if p.default is p.empty and p.name not in {**prompt.fields, **options}:
                raise DataError(
                    f"prompt {prompt.prompt_id}: the scorer needs column {p.name!r}; the row has "
                    f"{', '.join(prompt.fields) or 'no other columns'}"
                )

    @functools.wraps(function)
    def scores_of(trajectories: Sequence[Trajectory], **options: Any) -> Any:
        prompt = trajectories[0].prompt
        row = {
            name: [value] * len(trajectories)
            for name, value in prompt.fields.items()
            if name not in _TAKEN_OUT
        }
        check_row(prompt, **options)
        given = {**row, **options, **_given(prompt, trajectories)}
        if rest:
            given |= {name: _Lacking(name) for name in ("trainer_state", *_LOGS) if name not in named}
        return function(**{name: value for name, value in given.items() if rest or name in named})

    # A column may also be an option of the recipe, and need be none. `seed` is a column like others.
    settable = [
        p.replace(kind=p.KEYWORD_ONLY, default=None if p.default is p.empty else p.default)
        for p in columns
        if p.name != "seed"
    ]
    first = inspect.Parameter("trajectories", inspect.Parameter.POSITIONAL_ONLY)
    scores_of.__signature__ = inspect.Signature([first, *settable, *rest])  # type: ignore[attr-defined]
    marks = replace(marks_of(function), group=True, trl=True, row=check_row)
    scores_of.reward_marks = marks  # type: ignore[attr-defined]
    return scores_of


def _given(prompt: Prompt, trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Returns what TRL gives of prompts and answers: messages where the row's prompt is messages, or text."""
    texts = [t.text for t in trajectories]
    is_chat = bool(prompt.messages) and not prompt.text
    asked: Any = list(prompt.messages) if is_chat else prompt.text
    if not asked:
        asked = _Lacking("prompts", f"prompt {prompt.prompt_id} is token ids alone")
    return {
        "prompts": [asked] * len(texts),
        "completions": [[{"role": "assistant", "content": x}] for x in texts] if is_chat else texts,
        "completion_ids": [t.response_ids.tolist() for t in trajectories],
    }


def _check(
    function: Callable[..., Any], signature: inspect.Signature, options: Iterable[str], title: str
) -> None:
    """Raises ConfigError for a function that cannot be called as TRL calls it, or not with what there is."""
    parameters, said = signature.parameters, f"{title}{signature} is written for TRL"
    if marks_of(function).group:
        raise ConfigError(f"{said}, which gives it groups by itself: leave out the mark group=True")
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]
    if by_position:
        raise ConfigError(f"{said}, which gives arguments by name, and {by_position[0]} has none (`/`)")
    wanted = [p.name for p in parameters.values() if p.name in _TAKEN_OUT[:2] and p.default is p.empty]
    if wanted:
        raise ConfigError(
            f"{said}, which gives no {wanted[0]}: there a function has `completions` (or `completion_ids`), "
            "and `prompts` and columns where it wants them; here it is f(prompt, trajectory, **options)"
        )
    lacking = [
        p.name
        for p in parameters.values()
        if p.name in _LACKING and (p.name not in _LOGS or p.default is p.empty)
    ]
    if lacking:
        why = " and ".join(f"{one} ({_LACKING[one]})" for one in lacking)
        name = getattr(function, "__name__", "reward_func")
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        by_name = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        taken = [p.name for p in by_name if p.name not in lacking and p.default is p.empty]
        arguments = "**given" if takes_any else ", ".join(f'{one}=given["{one}"]' for one in taken)
        wrapper = _WRAPPER.format(
            name=name, taken=arguments, lacking=", ".join(f"{one}=None" for one in lacking)
        )
        raise ConfigError(
            f"{said}, and wants {why}, which there is not here. Take it out, or write a function "
            f"around it that says what it gets in place of that, and name that:\n{wrapper}"
        )
    double = [option for option in options if option in (*_GIVEN, *_LACKING)]
    if double:
        raise ConfigError(f"{said}, and its option {double[0]} has the name of what TRL gives it")


class _Lacking:
    """What a function with **kwargs would get of TRL and there is not here: an error where it is used."""

    def __init__(self, name: str, why: str = "") -> None:
        self.__error = f"{name} of TRL is not given here: {why or _LACKING[name]}"

    def _use(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RewardError(self.__error)

    __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __str__ = __add__ = _use

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks for
            raise AttributeError(name)
        self._use()
