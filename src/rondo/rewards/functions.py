"""Reward functions chosen in a recipe: loaded, their options checked, and the names of their scores fixed and
compared with the prompts' sources before anything is scored.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.config.functions import called_with, check_options, resolve_function
from rondo.config.schema import RewardConfig, RewardFunctionConfig
from rondo.core.columns import judges
from rondo.core.errors import ConfigError, DataError, about, did_you_mean
from rondo.core.readonly import read_only
from rondo.core.types import Prompt
from rondo.rewards.marks import Marks, RunIn, marks_of
from rondo.rewards.trl import SHOWN, called_as_trl, is_for_trl
from rondo.rewards.verl import called_as_verl, is_for_verl
from rondo.system.names import offered

# Functions that are written for other libraries, by their parameters: whose, what tells them, and the lines
# around one, whose call is {call}.
_FOREIGN: Sequence[tuple[str, Callable[[list[str]], bool], str]] = (
    (
        "verifiers",
        lambda names: names[0] == "completion" or {"completion", "answer"} <= set(names),
        SHOWN
        + """\
    given = {{**prompt.fields, "prompt": asked, "completion": said}}
    return {call}(**{{name: given[name] for name in {names}}})""",
    ),
    (
        "slime",
        lambda names: names[:2] == ["args", "sample"],
        """\
    row = prompt.fields
    sample = SimpleNamespace(prompt=prompt.text, response=trajectory.text, label=row["answer"], metadata=row)
    return {call}(None, sample)  # from types import SimpleNamespace""",
    ),
    (
        "rLLM",
        lambda names: names[:2] == ["task_info", "action"],
        """\
    return {call}(dict(prompt.fields), trajectory.text)""",
    ),
    (
        "OpenRLHF",
        lambda names: names[:3] == ["queries", "prompts", "labels"],
        """\
    asked, said = prompt.text, trajectory.text
    return {call}([asked + said], [asked], [prompt.fields["answer"]])[0]""",
    ),
)


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function."""

    name: str
    """Of its score, which is weighted into the reward."""
    spec: str
    """What messages call the function."""
    config: RewardFunctionConfig
    """The function as the recipe configures it."""
    function: Callable[..., Any]
    """The function itself."""
    marks: Marks
    """What its author marked it with."""
    options: Mapping[str, Any]
    """What it is called with; read-only, as all calls share them."""
    takes_seed: bool
    """Whether each call is given a seed."""
    is_async: bool
    """Whether it is a coroutine function."""
    columns: tuple[str, ...] = ()
    """What it reads of a row: keys of `Prompt.column`."""
    handed: tuple[str, ...] = ()
    """Which of them it is given, by the names of its parameters."""

    @property
    def stamp(self) -> str:
        """Is another where it looks at rows in another way."""
        code = getattr(self.marks.row, "__code__", None)
        return f"{inspect.signature(self.function)} {code and code.co_code.hex()}"

    def applies(self, source: str) -> bool:
        return self.config.sources is None or source in self.config.sources

    def check_row(self, prompt: Prompt) -> None:
        """Raises DataError for a row that the function cannot score. prompt: the row; tokens are not read."""
        for column in self.columns:
            if prompt.column(column) is None:
                keys = [name[1:-1] for name in self.marks.columns if name.startswith("{")]
                other = f", or name another column ({', '.join(keys)})" if keys else ""
                what = "null" if column in prompt.fields else "missing"
                if what == "missing" and column in self.handed:
                    other = " (what the prompt's own column asks is prompt.text)"
                raise DataError(
                    f"the reward function {self.name} reads column {column!r}, which is {what}"
                    f"{did_you_mean(column, prompt.fields)} The row has "
                    f"{', '.join(prompt.fields) or 'no other columns'}. Take the row out{other}"
                )
        if self.marks.row is not None:
            self.marks.row(prompt, **self.options)
        if (chosen := self.scoring(prompt)) is not self:
            chosen.check_row(prompt)

    def scoring(self, prompt: Prompt) -> RewardFunction:
        """Returns what scores a row: itself, or what it chooses (`Marks.chooses`), which is looked at when it
        is chosen first, as functions of a recipe are before the start.
        """
        entry = self.marks.chooses and self.marks.chooses(prompt, **self.options)
        return _chosen(self.name, json.dumps(entry)) if entry else self

    @property
    def importable(self) -> str:
        """The name under which another process imports it. Raises ConfigError for one that has none: a
        program's own lambda, or a function in a function.
        """
        name: Any = self.config.name  # from Python the function itself
        if not callable(name):
            return name
        module, file = name.__module__, inspect.getsourcefile(name)
        if not name.__qualname__.isidentifier():
            raise ConfigError(
                f"reward function {name.__qualname__} cannot be imported by a process of its own "
                "(reward.isolation=process, or its mark): write it into a file, and name path.py:function"
            )
        return f"{file}:{name.__qualname__}" if module == "__main__" else f"{module}:{name.__qualname__}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its scores: `name`, and `name/part` for each part that it declared."""
        return (self.name, *(f"{self.name}/{part}" for part in self.marks.score_names))


def load_functions(configs: Sequence[RewardFunctionConfig]) -> tuple[RewardFunction, ...]:
    """Loads the functions of `reward.functions`, each score name unique (`format`, `format_2`).

    Raises ConfigError: unknown name, package missing, option unknown or of a wrong type.
    """
    loaded: list[RewardFunction] = []
    for i, config in enumerate(configs):
        taken = [function.name for function in loaded]
        with about(f"reward.functions.{i}"):
            loaded.append(_load(config, f"reward.functions.{i}", taken))
    return tuple(loaded)


@functools.cache
def _chosen(by: str, entry: str) -> RewardFunction:
    options = json.loads(entry)
    name = options.pop("name")
    chosen = _load(RewardFunctionConfig(name=name, options=options), f"{by}, which chooses {name}", ())
    if chosen.marks.check is not None:
        chosen.marks.check(**chosen.options)
    return dataclasses.replace(chosen, name=f"{by}: {chosen.name}")


def _load(config: RewardFunctionConfig, where: str, taken: Sequence[str]) -> RewardFunction:
    function = resolve_function(config.name, offered("rewards"))
    spec = _spec(config.name)
    marks = marks_of(function)
    if marks.requires and importlib.util.find_spec(marks.requires[0]) is None:
        package, install = marks.requires
        raise ConfigError(f"{where}: {spec} needs the package {package}: pip install '{install}'")
    call = getattr(function, "__call__", None)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    if is_for_trl(function):
        function = called_as_trl(function, config.options, f"{where}: {spec}")
    elif is_for_verl(function):
        function = called_as_verl(function, config.options, f"{where}: {spec}")
    marks = marks_of(function)
    given = 1 if marks.group else 2
    _refuse_foreign(function, f"{where}: {spec}")
    handed = () if marks.trl else _handed(function, config.options, given)
    takes_seed = _check_signature(_without(function, handed), spec, config, where, given)
    if marks.run_in not in typing.get_args(RunIn):
        choices = typing.get_args(RunIn)
        raise ConfigError(f"{where}: {spec} is marked run_in={marks.run_in!r}; it must be one of {choices}")
    options = read_only(called_with(config.options, where))
    name = _free_name(spec.replace(":", ".").rsplit(".", 1)[-1], taken)
    columns = (*_columns(function, marks, options), *handed)
    made = (name, spec, config, function, marks, options, takes_seed, is_async)
    return RewardFunction(*made, columns, handed)


def _handed(function: Callable[..., Any], options: Mapping[str, Any], given: int) -> tuple[str, ...]:
    """Returns the parameters of a function that columns of the row are given to: those behind the first
    `given` that have a place, no default and no option.
    """
    parameters = list(inspect.signature(function).parameters.values())
    return tuple(
        p.name
        for p in parameters[given:]
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty and p.name not in (*options, "seed")
    )


def _without(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Returns what stands for a function that lacks these parameters, where its signature is asked."""
    if not names:
        return function

    @functools.wraps(function)
    def stand_in() -> None: ...

    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.name not in names]
    stand_in.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return stand_in


def _columns(function: Callable[..., Any], marks: Marks, options: Mapping[str, Any]) -> Iterator[str]:
    """Yields the columns that a function is marked with, by name."""
    for mark in marks.columns:
        option = mark[1:-1] if mark[:1] == "{" else None
        if option is None:
            yield mark
        else:
            yield str(options.get(option, inspect.signature(function).parameters[option].default))


def _spec(name: Any) -> str:
    """Returns what messages call a function: what the recipe names it, but its own name where a program has
    handed it over, and a file was written for other processes that nobody is to edit.
    """
    if callable(name):
        return str(name.__name__)
    file, _, function = name.rpartition(":")
    return function if file.endswith(".pkl") else name


def _check_signature(
    function: Callable[..., Any], spec: str, config: RewardFunctionConfig, where: str, given: int
) -> bool:
    """Checks the options, and that `given` positional arguments fit. Returns whether the function wants a
    `seed` of its own.
    """
    signature = inspect.signature(function)
    takes_seed = "seed" in signature.parameters and "seed" not in config.options
    options = {**config.options, "seed": 0} if takes_seed else dict(config.options)
    check_options(function, options, where, given=given)
    try:
        signature.bind(*[None] * given, **options)
    except TypeError as error:
        wanted = "trajectories" if given == 1 else "prompt, trajectory"
        raise ConfigError(
            f"{where}: {spec}{signature} cannot be called as a reward function, ({wanted}, "
            f"**options): {error}"
        ) from error
    return takes_seed


def _refuse_foreign(function: Callable[..., Any], said: str) -> None:
    """Raises ConfigError for a function that is known to be written for another library."""
    signature = inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for library, is_for, lines in _FOREIGN:
        if names and is_for(names):
            waits = inspect.iscoroutinefunction(function)
            call = ("await " if waits else "") + getattr(function, "__name__", "function")
            taken = [name for name in names if signature.parameters[name].default is inspect.Parameter.empty]
            head = f"{'async ' if waits else ''}def score(prompt, trajectory):\n"
            raise ConfigError(
                f"{said}{signature} is written for {library}; here a reward function is called as "
                "f(prompt, trajectory, **options). Write one around it, and name that:\n"
                f"{head}{lines.format(call=call, names=taken)}"
            )


# What stands first among the parameters of a reward function, by place.
_FIRST = (("prompt", "trajectory"), ("trajectories",))


def check_names(
    functions: Sequence[RewardFunction], columns: Mapping[str, Sequence[str]], prompt_keys: Mapping[str, str]
) -> None:
    """Raises ConfigError for a parameter of a function of the user's that has the name of a column of the
    rows, and is given something else. columns, prompt_keys: by source.
    """
    for place, function in enumerate(functions):
        marks = function.marks
        if marks.trl or marks.verl or function.config.name in offered("rewards"):
            continue
        for source in filter(function.applies, columns):
            with about(f"reward.functions.{place}"):
                _check_names(function, source, columns[source], prompt_keys[source])


def _check_names(function: RewardFunction, source: str, columns: Sequence[str], prompt_key: str) -> None:
    first, named = _FIRST[function.marks.group], function.function
    signature = inspect.signature(named)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    said, is_column = f"{function.spec}{signature}", f"is a column of source {source!r}, and"
    for p, name in zip(parameters, first, strict=False):
        if p.name in (*columns, *_FIRST[False], *_FIRST[True]) and p.name != name:
            what = is_column if p.name in columns else "stands in another's place, and"
            own = (*first, prompt_key)
            wanted = [q.name for q in parameters if q.name in columns and q.name not in own]
            title = getattr(named, "__name__", "score").replace("<lambda>", "score")
            raise ConfigError(
                f"{said}: {p.name} {what} would be given the {name}. A reward function has "
                f"{' and '.join(first)} first (prompt.text asks, trajectory.text answers), and is given "
                "columns by the names of further parameters without a default, before a *. Write\n"
                f"def {title}({', '.join([*first, *wanted])}):"
            )
    for p in parameters[len(first) :]:
        is_option = p.default is not p.empty and p.name not in (*function.config.options, "seed")
        if is_option and p.name in columns:
            raise ConfigError(
                f"{said}: {p.name} {is_column} would have its default. Without a default, before a *, it is "
                "given the column; where it is an option, say so in this entry of reward.functions: "
                f"{p.name}: {p.default!r:.40}"
            )


def _free_name(name: str, taken: Sequence[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def score_names(
    reward: RewardConfig, sources: Sequence[str], *, reads_accuracy: bool = False
) -> tuple[str, ...]:
    """Returns the names of all scores of the reward functions.

    reads_accuracy: whether an answer is right is read, so every source must have the score that says so.
    Raises ConfigError when a function is for a source that does not exist, or a source has no function.
    """
    functions = load_functions(reward.functions)
    names = tuple(name for function in functions for name in function.names)
    accuracy = accuracy_among(names, reward)
    for place, function in enumerate(functions):
        for source in function.config.sources or ():
            if source not in sources:
                near = did_you_mean(source, sources)
                raise ConfigError(
                    f"reward function {function.name}: there is no source {source!r}{near} "
                    f"Sources: {', '.join(sources)}",
                    key=f"reward.functions.{place}",
                )
        if reads_accuracy and accuracy in function.names:
            for source in sources:
                if not function.applies(source):
                    raise ConfigError(
                        f"the configured algorithm reads whether an answer is right, and the score that "
                        f"says so, reward.accuracy={accuracy}, is no score of source {source!r}: add "
                        f"it to the `sources` of {function.name}, or name another score"
                    )
    for source in sources:
        if not reward.models and not any(function.applies(source) for function in functions):
            raise ConfigError(
                f"source {source!r} has no reward function: add one, or add it to a function's sources"
            )
    return names


def accuracy_score(reward: RewardConfig) -> str | None:
    """Returns `accuracy_among` the scores of the reward functions."""
    return accuracy_among([name for f in load_functions(reward.functions) for name in f.names], reward)


def accuracy_among(names: Sequence[str], reward: RewardConfig) -> str | None:
    """Returns the score that says whether an answer is right (> 0): the name in `reward.accuracy`, else the
    only score there is that judges; None when there are several, or none.

    Raises ConfigError for a name that is no score of a reward function.
    """
    wanted = reward.accuracy
    if wanted is None:
        judging = list(filter(judges, names))
        return judging[0] if len(judging) == 1 else None
    if wanted not in names:
        why = ""
        if any(model.name == wanted for model in reward.models):
            why = " It is a reward model's, and an answer is right or wrong before the models see it."
        raise ConfigError(
            f"reward.accuracy={wanted} is no score of a reward function{did_you_mean(wanted, names)}{why} "
            f"Scores: {', '.join(names) or 'none'}"
        )
    return wanted
