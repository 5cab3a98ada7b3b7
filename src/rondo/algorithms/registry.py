"""Algorithms by name: one decorator per kind of function, and what a function's signature says about it.

Parameters before `*` are the columns that a function reads; keyword-only ones are its options, whose defaults
live there and nowhere else. A name is a built-in, `path/to/file.py:name` or a dotted name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms.arguments import AnyFunction, Layout, ranked
from rondo.config import functions
from rondo.config.schema import FunctionConfig
from rondo.core.columns import TABLE
from rondo.core.errors import ConfigError, TrainError, WrongDeviceError
from rondo.core.readonly import read_only
from rondo.platform import on_host
from rondo.system.border import users_code

Kind = Literal[
    "advantage",
    "policy_loss",
    "value_loss",
    "kl",
    "aggregation",
    "filter",
    "resample",
    "select",
    "pair_loss",
    "term",
    "coefficient",
]

# How the columns lie that a kind of function reads; a filter sees one group, numpy [n]. None: no columns.
_LAYOUTS: Mapping[Kind, Layout | None] = {
    "advantage": "rows",
    "policy_loss": "flat",
    "value_loss": "flat",
    "kl": "any",
    "aggregation": "rows",
    "filter": "rows",
    "resample": "rows",
    "select": "rows",
    "pair_loss": "pairs",
    "term": "flat",
    "coefficient": None,
}
IN_TABLE = frozenset(column.name for column in TABLE)
_FUNCTIONS: dict[Kind, dict[str, Callable[..., Any]]] = {kind: {} for kind in _LAYOUTS}
_ZERO_AT_ZERO_ADVANTAGE: set[Callable[..., Any]] = set()
_PREPARE: dict[Callable[..., Any], Callable[..., Any]] = {}
_BY_ROW: dict[Callable[..., Any], Callable[..., Any]] = {}


def _register(kind: Kind, name: str) -> Callable[[AnyFunction], AnyFunction]:
    def add(function: AnyFunction) -> AnyFunction:
        old = _FUNCTIONS[kind].get(name)
        if old is not None and _origin(old) != _origin(function):
            raise ConfigError(
                f"{kind} {name!r} exists already ({old.__module__}.{old.__qualname__}); choose another name"
            )
        columns_read(function)
        if function not in _FUNCTIONS[kind].values():  # under another name, and so ranked already
            layout = _LAYOUTS[kind]
            if layout == "flat":  # what is in no table, as what a `prepare` makes, stands on each token, too
                function = ranked(layout, **dict.fromkeys(set(columns_read(function)) - IN_TABLE, "token"))(
                    function
                )
            elif layout is not None:
                function = ranked(layout)(function)
            function = _bordered(function, kind, name)
        _FUNCTIONS[kind][name] = function
        return function

    return add


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    """Says where a function was written: a file that runs twice (imported, and as path.py:name) is one."""
    code = inspect.unwrap(function).__code__
    return code.co_filename, function.__qualname__


def advantage(
    name: str, *, by_row: bool | Callable[..., Any] = False
) -> Callable[[AnyFunction], AnyFunction]:
    """Registers an advantage estimator: columns -> advantages [B] or [B, T], or (advantages, returns), or a
    mapping from column names ("advantages" and others) to such tensors.

    by_row: True where what it makes of a row, [B, T], depends on no other row: then it is called where the
    rows lie, with some of them at a time. A function with the same columns where that holds but for a last
    step: the estimator whitens its advantages over the batch, unless its option `whiten` is false.
    """

    def add(function: AnyFunction) -> AnyFunction:
        function = _register("advantage", name)(function)
        if by_row:
            _BY_ROW[function] = function if by_row is True else by_row
        return function

    return add


def policy_loss(
    name: str, *, zero_at_zero_advantage: bool = False, prepare: Callable[..., Any] | None = None
) -> Callable[[AnyFunction], AnyFunction]:
    """Registers a policy loss: columns [N] -> (token loss [N], metrics).

    zero_at_zero_advantage: loss and gradient of a row are exactly 0 where its advantage is, so its backward
    pass may be skipped; claim it only when it is true. prepare: statistics over the whole mini-batch, made
    before it is cut into micro-batches: columns [B, T] (and `seed`, an int) -> {name: column [B, T]}, which
    the loss may read; where it reads log_probs it is called before each optimizer step, with the current
    ones. A recipe sets its options beside those of the loss (`bind`).
    """

    def add(function: AnyFunction) -> AnyFunction:
        function = _register("policy_loss", name)(function)
        if zero_at_zero_advantage:
            _ZERO_AT_ZERO_ADVANTAGE.add(function)
        if prepare is not None:
            _PREPARE[function] = _bordered(prepare, "policy_loss", f"{name} (prepare)")
        return function

    return add


def group_filter(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers a filter of prompt groups: per-row columns of ONE group (numpy [n]) -> why it is dropped, or
    None.
    """
    return _register("filter", name)


def resampler(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers a resampling of a prompt's samples: columns [B] -> its probability in the group [B]."""
    return _register("resample", name)


def selection(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers a choice among the answers of a step: columns [B], a row for each answer -> bool [B], which
    of them are trained on.
    """
    return _register("select", name)


def pair_loss(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers a loss of preference pairs: columns [P] (see `pair_objective.py`) -> (loss [P], metrics)."""
    return _register("pair_loss", name)


def term(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers a term of the actor's loss: columns [N] -> (token loss [N], metrics), as a policy loss."""
    return _register("term", name)


def coefficient(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers how a number adapts: (value, metrics) -> value, or (kept, read); see coefficients.py."""
    return _register("coefficient", name)


def value_loss(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers a value loss: (values, old_values, returns, … [N]) -> (token loss [N], metrics)."""
    return _register("value_loss", name)


def kl_estimator(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers an estimator of KL(policy || reference) per token: columns -> [...] of the same shape."""
    return _register("kl", name)


def aggregation(name: str) -> Callable[[AnyFunction], AnyFunction]:
    """Registers an aggregation mode: trained tokens per row of ONE mini-batch (numpy [B]), and where its
    second parameter is trajectory_id, that of each row -> loss weight per row [B].
    """
    return _register("aggregation", name)


def names(kind: Kind) -> tuple[str, ...]:
    """Returns the names of a kind's built-in functions, sorted."""
    return tuple(sorted(name for name in _FUNCTIONS[kind] if registered_by_user(kind, name) is None))


def registered_by_user(kind: Kind, name: str | Callable[..., Any]) -> str | None:
    """Returns `path/to/file.py:function` of a name that code outside rondo registered in this process; None
    for any other name.
    """
    function = _FUNCTIONS[kind].get(name) if isinstance(name, str) else None
    if function is None or function.__module__.startswith("rondo."):
        return None
    return ":".join(_origin(function))


def lookup(kind: Kind, name: str, *, key: str | None = None) -> Callable[..., Any]:
    """Returns the function behind `name`. key: what chose it, where that is not `algorithm.<kind>`.

    Raises ConfigError with the nearest name that exists.
    """
    try:
        function = functions.resolve_function(name, _FUNCTIONS[kind])
    except ConfigError as error:
        raise ConfigError(f"{key or f'algorithm.{kind}'}: {error}") from error
    columns_read(function)
    return function if function in _FUNCTIONS[kind].values() else _bordered(function, kind, name, key=key)


def bind(kind: Kind, config: FunctionConfig, *, key: str | None = None) -> functools.partial[Any]:
    """Returns the function with its options filled in. key: as in `lookup`.

    A policy loss and its `prepare` declare their options separately, and a recipe sets them side by side:
    each is handed those that it declares. Raises ConfigError for an unknown name or an option that does not
    fit.
    """
    function = lookup(kind, config.name, key=key)
    declared = _options(function)
    if function in _PREPARE:
        declared = _options(_PREPARE[function]) | declared
    title = getattr(function, "__name__", str(function))
    functions.check_declared(declared.values(), config.options, key or f"algorithm.{kind}", title)
    return _with_own(function, config.options)


def bind_preparation(config: FunctionConfig) -> functools.partial[Any] | None:
    """Returns the `prepare` of a policy loss with the options that it declares; None where it has none."""
    prepare = _PREPARE.get(lookup("policy_loss", config.name))
    return None if prepare is None else _with_own(prepare, config.options)


def bind_by_row(config: FunctionConfig) -> tuple[functools.partial[Any], bool] | None:
    """Returns the advantage estimator for some of a batch's rows, and whether its results are to be whitened
    over the whole batch; None for an estimator that needs the other rows, too.
    """
    function = lookup("advantage", config.name)
    rows = _BY_ROW.get(function)
    if rows is None:
        return None
    whiten = _options(function).get("whiten")
    default = rows is not function if whiten is None else bool(whiten.default)
    return _with_own(rows, config.options), bool(config.options.get("whiten", default))


def _bordered(function: AnyFunction, kind: Kind, name: str, *, key: str | None = None) -> AnyFunction:
    """Returns the function; one of the user's with the border around it: what it raises is a TrainError, and
    so is a column that it wrote into, which others read, too. A tensor that it makes on another device than
    its columns' is a WrongDeviceError. key: what chose it, where that is not `algorithm.<kind>`.
    """
    if function.__module__.startswith("rondo."):
        return function
    columns = columns_read(function)
    who = f"the {kind} function {getattr(name, '__qualname__', name)}"
    if key is None and kind != "pair_loss":  # which several keys choose
        key = f"algorithm.{kind}"

    @functools.wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        given = [*zip(columns, args, strict=False), *named.items()]
        lent = [
            (column, value, value._version)
            for column, value in given
            if isinstance(value, Tensor) and not value.is_inference()
        ]
        arrays = any(isinstance(value, np.ndarray) for _, value in given)
        on_cpu = torch.device("cpu") if arrays else None
        device = next((value.device for _, value in given if isinstance(value, Tensor)), on_cpu)
        try:
            with users_code(who, TrainError):
                made = function(*args, **named)
        except TrainError as error:
            if not is_of_devices(error.__cause__):
                raise
            raise on_wrong_device(key, str(error), device) from error
        strays = [] if device is None else _strays(made, device)
        if strays:
            made_there = f"{who} returned a tensor of shape {list(strays[0].shape)} on {strays[0].device}"
            raise on_wrong_device(key, made_there, device)
        written = [column for column, value, version in lent if value._version != version]
        if written:
            raise TrainError(
                f"{who} wrote into {', '.join(written)}, which it is lent: write into a copy (.clone())"
            )
        return made

    return cast(AnyFunction, called)


def is_of_devices(error: BaseException | None) -> bool:
    """Says whether torch refused tensors of two devices; its texts differ from operation to operation."""
    signs = ("same device", "not on the expected device", "device type tensor to numpy")
    return isinstance(error, (RuntimeError, TypeError)) and any(sign in str(error).lower() for sign in signs)


def on_wrong_device(key: str | None, what: str, device: torch.device | None) -> WrongDeviceError:
    return WrongDeviceError(
        f"{'' if key is None else f'{key}: '}{what}; its columns are on {device}, and so must be what it "
        "makes: x.new_zeros(…), torch.zeros(…, device=x.device)",
        key=key,
    )


def _strays(made: Any, device: torch.device) -> list[Tensor]:
    """Returns the tensors in what a function returned that are elsewhere. A number on the CPU does no harm:
    sending it waits for nothing.
    """
    if isinstance(made, Tensor):
        harmless = made.device == device or (made.ndim == 0 and on_host(made.device))
        return [] if harmless else [made]
    parts = made.values() if isinstance(made, Mapping) else made if isinstance(made, (tuple, list)) else ()
    return [stray for part in parts for stray in _strays(part, device)]


def _with_own(function: Callable[..., Any], options: Mapping[str, Any]) -> functools.partial[Any]:
    """Binds the options that the function itself declares."""
    own, opened = _options(function), functions.called_with(options, "algorithm")
    return functools.partial(
        function, **{name: read_only(value) for name, value in opened.items() if name in own}
    )


def _options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns what a recipe may set of a function; a `prepare` gets its `seed` from the run."""
    parameters = functions.signature_of(function).parameters.values()
    options = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    if function in _PREPARE.values():
        options.pop("seed", None)
    return options


def columns_read(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the columns that `function` reads: its parameters before `*`.

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


def is_zero_at_zero_advantage(function: Callable[..., Any]) -> bool:
    """Says whether a row whose advantage is 0 has no part in this policy loss (False for functions that do
    not say so).
    """
    inner = function.func if isinstance(function, functools.partial) else function
    return inner in _ZERO_AT_ZERO_ADVANTAGE
