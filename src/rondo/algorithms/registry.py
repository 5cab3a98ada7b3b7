"""Algorithms by name: one decorator per kind of function, and what a function's signature says about it.

Parameters before `*` are the columns that a function reads; keyword-only ones are its options, whose defaults
live there and nowhere else. A name is a built-in, `path/to/file.py:name` or a dotted name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

from rondo.config import functions
from rondo.config.schema import FunctionConfig
from rondo.errors import ConfigError

Kind = Literal[
    "advantage", "policy_loss", "value_loss", "kl", "aggregation", "filter", "resample", "pair_loss"
]
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_FUNCTIONS: dict[Kind, dict[str, Callable[..., Any]]] = {kind: {} for kind in get_args(Kind)}
_ZERO_AT_ZERO_ADVANTAGE: set[Callable[..., Any]] = set()
_PREPARE: dict[Callable[..., Any], Callable[..., Any]] = {}


def _register(kind: Kind, name: str) -> Callable[[AnyFunction], AnyFunction]:
    def add(function: AnyFunction) -> AnyFunction:
        old = _FUNCTIONS[kind].get(name)
        if old is not None and _origin(old) != _origin(function):
            raise ConfigError(
                f"{kind} {name!r} exists already ({old.__module__}.{old.__qualname__}); choose another name"
            )
        columns_read(function)
        _FUNCTIONS[kind][name] = function
        return function

    return add


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    """Where a function was written: a file that is run twice (imported, and named as path.py:name) is one."""
    code = inspect.unwrap(function).__code__
    return code.co_filename, function.__qualname__


def advantage(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Register an advantage estimator: columns -> advantages [B] or [B, T], or (advantages, returns), or a
    mapping from column names ("advantages" and others) to such tensors.
    """
    return _register("advantage", name)


def policy_loss(
    name: str, *, zero_at_zero_advantage: bool = False, prepare: Callable[..., Any] | None = None
) -> Callable[[AnyFunction], AnyFunction]:
    """Register a policy loss: columns [N] -> (token loss [N], metrics).

    zero_at_zero_advantage: loss and gradient of a row are exactly 0 where its advantage is, so its compute
    may be skipped; claim it only when it is true. prepare: statistics over the whole mini-batch, made before
    it is cut into micro-batches: columns [B, T] (and `seed`, an int) -> {name: column [B, T]}, which the loss
    may read. Its options and the loss's are one set; it is handed those that it names.
    """

    def add(function: AnyFunction) -> AnyFunction:
        _register("policy_loss", name)(function)
        if zero_at_zero_advantage:
            _ZERO_AT_ZERO_ADVANTAGE.add(function)
        if prepare is not None:
            _PREPARE[function] = prepare
        return function

    return add


def preparation(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that makes a policy loss's mini-batch columns, or None."""
    inner = function.func if isinstance(function, functools.partial) else function
    return _PREPARE.get(inner)


def group_filter(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Register a filter of prompt groups: per-row columns of ONE group (numpy [n]) -> why it is dropped, or
    None.
    """
    return _register("filter", name)


def resampler(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Register a resampling of a prompt's samples: columns [B] -> each row's probability in its group [B]."""
    return _register("resample", name)


def pair_loss(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Register a loss of preference pairs: columns [P] (see `pair_objective.py`) -> (loss [P], metrics)."""
    return _register("pair_loss", name)


def value_loss(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Register a value loss: (values, old_values, returns, … [N]) -> (token loss [N], metrics)."""
    return _register("value_loss", name)


def kl_estimator(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Register an estimator of KL(policy || reference) per token: columns -> [...] of the same shape."""
    return _register("kl", name)


def aggregation(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Register an aggregation mode: trained tokens per row of ONE mini-batch (numpy [B]) -> loss weight per
    row [B].
    """
    return _register("aggregation", name)


def names(kind: Kind) -> tuple[str, ...]:
    """The built-in names of a kind, sorted."""
    return tuple(sorted(_FUNCTIONS[kind]))


def registered_by_user(kind: Kind, name: str | Callable[..., Any]) -> str | None:
    """`path/to/file.py:function` of a name that code outside rondo registered; None for any other name. The
    registration is this process's.
    """
    function = _FUNCTIONS[kind].get(name) if isinstance(name, str) else None
    if function is None or function.__module__.startswith("rondo."):
        return None
    return ":".join(_origin(function))


def lookup(kind: Kind, name: str) -> Callable[..., Any]:
    """The function behind `name`. Raises ConfigError with the nearest name that exists."""
    try:
        function = functions.resolve_function(name, _FUNCTIONS[kind])
    except ConfigError as error:
        raise ConfigError(f"algorithm.{kind}: {error}") from error
    columns_read(function)
    return function


def bind(kind: Kind, config: FunctionConfig) -> Callable[..., Any]:
    """The function with its options filled in. Raises ConfigError for an unknown name or an option that does
    not fit. A policy loss and its preparation share one set of options: each gets those that it names.
    """
    function = lookup(kind, config.name)
    prepare = preparation(function)
    check_options(_of_both(function, prepare) if prepare else function, config.options, f"algorithm.{kind}")
    return functools.partial(function, **(_named_by(function, config.options) if prepare else config.options))


def bind_preparation(config: FunctionConfig) -> Callable[..., Any] | None:
    """What `bind` is for a policy loss, for its preparation; None where it has none."""
    prepare = preparation(bind("policy_loss", config))
    return functools.partial(prepare, **_named_by(prepare, config.options)) if prepare else None


def _options_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name != "seed"]


def _named_by(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {p.name: options[p.name] for p in _options_of(function) if p.name in options}


def _of_both(loss: Callable[..., Any], prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Something whose options are those of a policy loss and of its preparation, for `check_options`."""

    def both() -> None: ...

    options = {p.name: p for function in (prepare, loss) for p in _options_of(function)}
    both.__name__ = getattr(loss, "__name__", str(loss))
    both.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]
    return both


def columns_read(function: Callable[..., Any]) -> tuple[str, ...]:
    """The columns that `function` reads: its parameters before `*`.

    Raises ConfigError when the signature does not say: `*args`, or a default before the `*`.
    """
    title = getattr(function, "__qualname__", str(function))
    columns = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"{title} takes *{parameter.name}; name each column before `*` and each option after it"
            )
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.default is not parameter.empty:
            raise ConfigError(
                f"{title}: {parameter.name!r} stands before `*` and has a default; "
                "columns have none, options go after `*`"
            )
        columns.append(parameter.name)
    return tuple(columns)


def check_options(function: Callable[..., Any], options: Mapping[str, Any], where: str) -> None:
    """Check `options` against the keyword-only parameters of `function`.

    where: the configuration key, for the message. Raises ConfigError naming the nearest option, a missing or
    a mistyped one.
    """
    functions.check_options(function, options, where, given=len(columns_read(function)))


def is_zero_at_zero_advantage(function: Callable[..., Any]) -> bool:
    """Whether a row whose advantage is 0 has no part in this policy loss (False for functions that do not say
    so).
    """
    inner = function.func if isinstance(function, functools.partial) else function
    return inner in _ZERO_AT_ZERO_ADVANTAGE


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition`: the range check of an option, made by the function that
    owns it.
    """
    if not condition:
        raise ConfigError(message)


def lookup_advantage(name: str) -> Callable[..., Any]:
    """The advantage estimator behind `name`; see `lookup`."""
    return lookup("advantage", name)
