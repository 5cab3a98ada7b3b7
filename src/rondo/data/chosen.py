"""Prompts that a sampler chooses (`data.sampler`): the border to it, and which row each number stands for.
The border to what gives rows of another sampler (`algorithm.mix`), which may choose prompts, too.

    buffer ──admit──▶ ChosenPrompts ──choose──▶ sampler: a built-in (samplers.py), or the user's
       │                  │ too long for a prompt: told back, and asked again for as many
       └──trained on, filtered, dropped; with the end of the step──▶ heard

A sampler is a class with `choose`, `state` and `load`, and perhaps `heard`, `too_long`, `metrics` and
`check`; or a function in the place of `choose`, which has no state. A mix has `rows` in the place of
`choose`, and perhaps `pick` and `check_columns`; with `choose` it is the run's sampler. Each is called with
what its parameters name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rondo.config.functions import called_with, check_declared, check_options, resolve_function, signature_of
from rondo.config.schema import FunctionConfig
from rondo.core.errors import ConfigError, DataError, about, did_you_mean
from rondo.core.readonly import read_only
from rondo.core.types import request_seed
from rondo.data.mixes import MIX, MIXES
from rondo.data.samplers import BUILT_IN, Order
from rondo.system.border import users_code

SAMPLER = "data.sampler"
# What each method may ask for by the names of its parameters.
GIVEN: Mapping[str, tuple[str, ...]] = {
    "choose": ("k", "sizes", "seed", "n", "order", "step"),
    "heard": ("source", "row", "rewards", "accuracy", "version"),
    "too_long": ("source", "row"),
    "load": ("state",),
    "check": ("sources", "n", "least"),
    "state": (),
    "metrics": (),
}
# What a mix may ask for beside what a sampler may, and numbers of algorithm.coefficients.
ASKED: Mapping[str, tuple[str, ...]] = {
    "rows": (
        *("prompt", "rewards", "accuracy", "responses", "log_probs"),
        *("asked", "n", "seed", "step"),
    ),
    "pick": ("prompt", "entropy", "seed", "step"),
    "check_columns": ("columns",),
}
_TRIES = 1000  # times that other rows are asked for in the place of those that are too long
_MOST = 1 << 16  # answers of a prompt, as rollout.n


class Choice(NamedTuple):
    """What a sampler has chosen."""

    source: str
    """The name of the source."""
    row: int
    """Its index in the source."""
    n: int
    """Answers."""


class Heard(NamedTuple):
    """What came of a prompt."""

    rewards: Sequence[float]
    """Of its answers that were scored."""
    accuracy: Sequence[float] | None
    """Theirs; None where the sampler does not read it."""
    version: int
    """The policy's when the prompt was admitted."""
    trained: bool
    """Whether it was trained on: else it was filtered or dropped."""


class Sampler:
    """The sampler of a recipe, behind the border to it. Raises ConfigError for a name, an option, a method or
    a parameter that is not there.
    """

    key = SAMPLER
    built_in = BUILT_IN
    main = "choose"
    """The method that a class must have, and that a function stands for."""
    asked: Mapping[str, tuple[str, ...]] = GIVEN
    """What it is asked, and with what."""

    def __init__(self, config: FunctionConfig) -> None:
        name: Any = config.name
        self.name = getattr(name, "__name__", name)
        made = resolve_function(config.name, self.built_in)
        options = read_only(called_with(config.options, self.key))
        self._methods: dict[str, Callable[..., Any]] = {}
        if isinstance(made, type):
            check_options(made, config.options, self.key, given=0, chosen=config)
            with users_code(f"{self.key}: {self.name}", ConfigError):
                sampler = made(**options)
                self._methods = {
                    part: getattr(sampler, part) for part in self.asked if hasattr(sampler, part)
                }
            others = [part for part in self.asked if part not in self._methods]
            for own, value in vars(made).items():
                near = difflib.get_close_matches(own, others, n=1, cutoff=0.75)
                if (
                    near and callable(value) and own not in self.asked
                ):  # else it would learn nothing, without a word
                    raise ConfigError(
                        f"{self.key}: {self.name}.{own} is nothing that it is asked; did you mean "
                        f"'{near[0]}'? A helper of another meaning needs another name"
                    )
            missing = [part for part in (self.main, "state", "load") if part not in self._methods]
            if missing:
                raise ConfigError(
                    f"{self.key}: {self.name} has no method {missing[0]}; a class has {self.main}, and state "
                    "and load, by which a run goes on from a checkpoint (a function needs none of them)"
                )
        else:
            parameters = signature_of(made).parameters.values()
            declared = [p for p in parameters if p.name not in self.asked[self.main]]
            check_declared(declared, config.options, self.key, self.name)
            self._methods[self.main] = functools.partial(made, **options)
        self._reads = {part: self._parameters(part) for part in self._methods}

    def _parameters(self, part: str) -> tuple[str, ...]:
        method = self._methods[part]
        filled = method.keywords if isinstance(method, functools.partial) else {}
        names = []
        for name, parameter in inspect.signature(method).parameters.items():
            if name in filled or (name not in self.asked[part] and parameter.default is not parameter.empty):
                continue  # an option
            if name not in self.asked[part]:
                near = did_you_mean(name, self.asked[part])
                raise ConfigError(
                    f"{self.key}: {self.name}: {part} has a parameter {name!r}{near} It is called with: "
                    f"{', '.join(self.asked[part]) or 'nothing'}"
                )
            names.append(name)
        return tuple(names)

    def reads(self, part: str, name: str) -> bool:
        """Says whether a method has this parameter."""
        return name in self._reads.get(part, ())

    def call(self, part: str, **given: Any) -> Any:
        """Calls a method, where there is one, with those of `given` that it reads. Raises ConfigError where
        `check` fails, else DataError.
        """
        if part not in self._methods:
            return None
        kind = ConfigError if part == "check" else DataError
        with users_code(self.who(part), kind):
            return self._methods[part](**{name: read_only(given[name]) for name in self._reads[part]})

    def who(self, part: str) -> str:
        """Names a method, for messages."""
        return f"{self.key}: {self.name}.{part}" if len(self._methods) > 1 else f"{self.key}: {self.name}"

    def choose(self, k: int, sizes: Mapping[str, int], least: int, **given: Any) -> list[Choice]:
        """Returns k choices. sizes: rows of each source. least: answers of a prompt, at least. Raises
        DataError for any other answer.
        """
        answer = self.call("choose", k=k, sizes=dict(sizes), **given)
        who = self.who("choose")
        if not isinstance(answer, list | tuple):
            raise DataError(f"{who} returned {_shown(answer)}; it returns a list of {k} (source, row, n)")
        if len(answer) != k:
            raise DataError(f"{who} returned {len(answer)} prompts, and was asked for {k}")
        return [self._checked(entry, f"{who} [{i}]", sizes, least) for i, entry in enumerate(answer)]

    def _checked(self, entry: Any, who: str, sizes: Mapping[str, int], least: int) -> Choice:
        if not isinstance(entry, list | tuple) or len(entry) != 3:
            raise DataError(f"{who} is {_shown(entry)}, and no (source, row, n)")
        source = entry[0]
        if not isinstance(source, str) or source not in sizes:
            near = did_you_mean(source, sizes) if isinstance(source, str) else "."
            raise DataError(f"{who}: {_shown(source)} is no source{near} There are: {', '.join(sizes)}")
        row, n = (_whole(number) for number in entry[1:])
        if row is None or not 0 <= row < sizes[source]:
            raise DataError(
                f"{who}: {_shown(entry[1])} is no row of {source}, which has rows 0 to {sizes[source] - 1}"
            )
        if n is None or not least <= n <= _MOST:
            why = "" if least == 1 else "; the algorithm compares the answers to a prompt"
            raise DataError(f"{who}: n is {_shown(entry[2])}, and must be {least} to {_MOST}{why}")
        return Choice(source, row, n)

    def state(self) -> str:
        """Returns its state as it is now, as JSON: a text, which the sampler cannot change while a checkpoint
        is written. Raises DataError where it would come back changed.
        """
        state = self.call("state")
        try:
            text = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.who('state')} holds a value that JSON does not have: {error}") from error
        if not _has_text_keys(state):
            raise DataError(
                f"{self.who('state')} holds a mapping with keys that are no text, which JSON would change; "
                "use a list of pairs"
            )
        return text

    def load(self, state: str) -> None:
        """Goes on with what `state` returned. Raises DataError where it does not."""
        self.call("load", state=json.loads(state))
        now = self.state()
        if _in_any_order(json.loads(now)) != _in_any_order(json.loads(state)):
            raise DataError(
                f"{self.who('load')} was given {_shown(state)}, and its state is {_shown(now)}: rows would "
                "be left out, or come again; load must bring back all that state returned"
            )

    def metrics(self) -> dict[str, float]:
        """Returns the numbers that it tells, as `sampler/<name>`. Raises DataError for what is none."""
        told = self.call("metrics") or {}
        if not isinstance(told, Mapping) or not all(map(_is_metric, told.items())):
            raise DataError(f"{self.who('metrics')} returned {_shown(told)}; it returns numbers by name")
        return {f"sampler/{name}": float(value) for name, value in told.items()}


class Given(NamedTuple):
    """A response that joins a group."""

    response: np.ndarray | str
    """Token ids, or text."""
    log_probs: np.ndarray | None = None
    """Of its sampler, a number for each token; None: nobody knows them."""


class Mixer(Sampler):
    """The mix of a recipe, behind the border to it. numbers: those of algorithm.coefficients, which `rows`
    may ask for, too. Raises ConfigError for a name, an option, a method or a parameter that is not there.
    """

    key = MIX
    built_in = MIXES
    main = "rows"
    asked: Mapping[str, tuple[str, ...]] = {**GIVEN, **ASKED}

    def __init__(self, config: FunctionConfig, numbers: Iterable[str] = ()) -> None:
        self.asked = {**Mixer.asked, "rows": (*ASKED["rows"], *numbers)}
        super().__init__(config)
        self.chooses: bool = "choose" in self._methods
        """Whether it is the run's sampler, too."""
        told = [part for part in ("heard", "too_long") if part in self._methods]
        if told and not self.chooses:
            raise ConfigError(
                f"{MIX}: {self.name}.{told[0]} is told of prompts that it has chosen, and it has no method "
                "choose; what came of a group is what `rows` is given (rewards, accuracy, responses)"
            )

    @property
    def picks(self) -> bool:
        """Says whether only some of what `rows` returns join."""
        return "pick" in self._methods

    def rows(self, **given: Any) -> list[Given]:
        """Returns what joins a group. Raises DataError for what is no list of responses."""
        made, who = self.call("rows", **given), self.who("rows")
        if not isinstance(made, list | tuple):
            raise DataError(f"{who} returned {made!r:.80}; it returns a list of responses, [] for none")
        return [self._given(entry, f"{who} [{place}]") for place, entry in enumerate(made)]

    def _given(self, entry: Any, who: str) -> Given:
        if isinstance(entry, str | np.ndarray):
            return Given(entry)
        if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], np.ndarray):
            return Given(entry[0], np.asarray(entry[1], np.float32))
        raise DataError(
            f"{who} is {type(entry).__name__} {entry!r:.80}; a response is a text, an array of token ids, or "
            "both arrays of a pair, (token ids, log-probs)"
        )

    def pick(self, number: int, **given: Any) -> list[int]:
        """Returns which of `number` responses join, by their places. Raises DataError for other places."""
        made = self.call("pick", **given)
        places = made if isinstance(made, list | tuple) else [made]
        whole = [int(one) for one in places if isinstance(one, int | np.integer) and 0 <= one < number]
        if len(whole) != len(places) or len(set(whole)) != len(whole):
            raise DataError(f"{self.who('pick')} returned {made!r:.80}, and may pick of 0 to {number - 1}")
        return whole

    # ---- in a checkpoint: the trainer keeps its state, which may have arrays, and not what chooses prompts

    def state(self) -> str:
        return "null"

    def load(self, state: str) -> None:
        assert state == "null"


def reads_accuracy(config: FunctionConfig, kind: type[Sampler] = Sampler) -> bool:
    """Says whether a sampler (of this kind) reads which answers are right. Raises ConfigError for an unknown
    name.
    """
    return "accuracy" in parameters_of(config, kind)


def parameters_of(config: FunctionConfig, kind: type[Sampler]) -> set[str]:
    """Returns what the methods of a sampler of this kind are called with, options of functions too. Raises
    ConfigError for an unknown name.
    """
    with about(kind.key):
        made = resolve_function(config.name, kind.built_in)
    parts = [getattr(made, part, None) for part in kind.asked] if isinstance(made, type) else [made]
    return {name for part in parts if part is not None for name in inspect.signature(part).parameters}


def _whole(number: Any) -> int | None:
    """Returns an integer, of numpy's too; None for anything else, True and 1.0 included."""
    if isinstance(number, bool | np.bool_):
        return None
    try:
        return operator.index(number)
    except TypeError:
        return None


def _is_metric(entry: tuple[Any, Any]) -> bool:
    name, number = entry
    return isinstance(name, str) and isinstance(number, int | float | np.number) and math.isfinite(number)


def _has_text_keys(value: Any) -> bool:
    """Says whether all keys in a value of JSON's types are text, however deep."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and _has_text_keys(list(value.values()))
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"


class ChosenPrompts:
    """Which row each sequence number stands for, and what the sampler has still to hear.

    sizes: rows of each source. order: what the order would be without it. fits: says whether a row is short
    enough for a prompt. n: rollout.n. batch_size: prompts of a step. least: answers of a prompt at least.

    All that is chosen, and when, is a function of the order in which numbers are admitted and steps end: with
    the state in a checkpoint, and with the journal of a run, it comes out the same again.
    """

    def __init__(
        self,
        sampler: Sampler,
        sizes: Mapping[str, int],
        order: Order,
        fits: Callable[[str, int], bool],
        *,
        n: int,
        batch_size: int,
        seed: int,
        least: int = 1,
    ) -> None:
        self.sampler = sampler
        self.n = n
        self._sizes = dict(sizes)
        self._order = order
        self._fits = fits
        self._batch_size = batch_size
        self._seed = seed
        self._least = least
        self._chosen: dict[int, Choice] = {}  # by sequence number, until the sampler has heard
        self._queue: list[Choice] = []  # of a step, not admitted yet
        self._heard: dict[int, Heard] = {}  # until the end of the step
        self._steps = 0  # for which prompts were asked
        self._calls = 0
        self._too_long = 0

    def __getitem__(self, seq: int) -> Choice:
        if seq not in self._chosen:
            raise DataError(f"{SAMPLER}: nothing was chosen for prompt {seq}, or its step has ended")
        return self._chosen[seq]

    def admit(self, seq: int, steps: int, left: int) -> Choice:
        """Returns what this number stands for from here on; one that starts again has what it had.

        steps: those whose prompts may start now. left: prompts that the run may consume, this one included.
        The sampler is asked for all prompts of a step at once, and for a single one in the place of one that
        was dropped: how often, and for how many, does not depend on what finished first. Raises DataError.
        """
        if seq not in self._chosen:
            if not self._queue:
                is_new = self._steps < steps
                self._steps += is_new
                self._queue = self._ask(min(self._batch_size, left) if is_new else 1)
            self._chosen[seq] = self._queue.pop(0)
        return self._chosen[seq]

    def _ask(self, k: int) -> list[Choice]:
        found: list[Choice] = []
        for _ in range(_TRIES):
            self._calls += 1
            seed = request_seed(self._seed, "sampler", self._calls)
            given = {"seed": seed, "n": self.n, "order": self._order, "step": self._steps}
            for choice in self.sampler.choose(k - len(found), self._sizes, self._least, **given):
                if self._fits(choice.source, choice.row):
                    found.append(choice)
                else:
                    self._too_long += 1
                    self.sampler.call("too_long", source=choice.source, row=choice.row)
            if len(found) == k:
                return found
        raise DataError(
            f"{self.sampler.who('choose')} chose rows that are longer than data.max_prompt_tokens {_TRIES} "
            f"times, the last of them row {choice.row} of {choice.source}: it is told which "
            "(too_long(source, row)), and is to choose others"
        )

    def hear(self, seq: int, heard: Heard) -> None:
        """Keeps what came of a prompt. The sampler hears it with the end of the step, in the order of the
        numbers: when answers come in, and when a step takes them, depends on time.
        """
        self._heard[seq] = heard

    def end_step(self) -> dict[str, float]:
        """Tells the sampler; returns the step's metrics."""
        trained = []
        for seq, heard in sorted(self._heard.items()):
            choice = self._chosen.pop(seq)
            trained += [choice] if heard.trained else []
            rewards, accuracy = (_array(numbers) for numbers in (heard.rewards, heard.accuracy or ()))
            given = {"rewards": rewards, "accuracy": accuracy, "version": heard.version}
            self.sampler.call("heard", source=choice.source, row=choice.row, **given)
        self._heard.clear()
        counts = Counter(choice.source for choice in trained)
        told = {f"sampler/chosen/{name}": float(counts[name]) for name in self._sizes}
        if trained:
            told["sampler/n_mean"] = sum(choice.n for choice in trained) / len(trained)
            told["sampler/n_max"] = float(max(choice.n for choice in trained))
        told["sampler/too_long"] = float(self._too_long)
        own = self.sampler.metrics()
        if both := sorted(told.keys() & own.keys()):
            name = both[0].removeprefix("sampler/")
            raise DataError(
                f"{self.sampler.who('metrics')} tells {name!r}, which is told of every sampler; "
                "name it otherwise"
            )
        return told | own

    def state(self) -> dict[str, Any]:
        """Returns, for a checkpoint, what to `load`: JSON."""
        return {
            "chosen": [[seq, *choice] for seq, choice in sorted(self._chosen.items())],
            "queue": [list(choice) for choice in self._queue],
            "heard": [[seq, *heard] for seq, heard in sorted(self._heard.items())],
            "counts": [self._steps, self._calls, self._too_long],
            "own": self.sampler.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint. Raises DataError where the sampler cannot."""
        self._chosen = {seq: Choice(*choice) for seq, *choice in state["chosen"]}
        self._queue = [Choice(*choice) for choice in state["queue"]]
        self._heard = {seq: Heard(*heard) for seq, *heard in state["heard"]}
        self._steps, self._calls, self._too_long = state["counts"]
        self.sampler.load(state["own"])


def _in_any_order(state: Any) -> str:
    """Returns JSON as a text that does not depend on the order of keys and entries (sets have none), nor on
    whether a number is written 1 or 1.0.
    """
    if isinstance(state, float) and state.is_integer():
        state = int(state)
    if isinstance(state, Mapping):
        return str(sorted((key, _in_any_order(value)) for key, value in state.items()))
    return str(sorted(map(_in_any_order, state))) if isinstance(state, list) else repr(state)


def _array(numbers: Iterable[float]) -> np.ndarray:
    return np.array(numbers, np.float32)
