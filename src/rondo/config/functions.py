"""Functions chosen by name in a recipe (built-in, `path/to/file.py:name`, dotted name), and their options.

What the function means (columns, scores, rows) is the caller's business.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import io
import json
import os
import pickle
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rondo.config.user_files import module_of
from rondo.core.errors import ConfigError, about, call, did_you_mean
from rondo.core.masking import VARIABLE, is_secret, masked, variable_of, was_masked
from rondo.system.names import attribute_of, importable, importing, module_by_name

# What a recipe can write, alone or inside of each other: options of these types are checked.
_WRITTEN: Collection[Any] = (int, float, bool, str, type(None), Any, list, tuple, dict, Sequence, Mapping)
_UNIONS = (types.UnionType, typing.Union)

# What opens a person's own models, data and machines is handed to nobody, whatever a recipe says.
NEVER_HANDED_OVER = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"),
    *("GOOGLE_OAUTH_ACCESS_TOKEN", "CLOUDSDK_AUTH_ACCESS_TOKEN"),
    *("AZURE_CLIENT_SECRET", "AZURE_PASSWORD", "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"),
    *("AZURE_STORAGE_SAS_TOKEN", "ALIBABA_CLOUD_ACCESS_KEY_SECRET", "OSS_ACCESS_KEY_SECRET"),
)

# Functions that a program has handed over, by the names that its recipe has for them.
_KNOWN: dict[str, Callable[..., Any]] = {}
_WRITTEN_BY = b"a function of rondo, for Python "  # begins a file that a program has written one down in


def resolve_function(
    name: str | Callable[..., Any], builtins: Mapping[str, Callable[..., Any]] = {}
) -> Callable[..., Any]:
    """Returns the function behind `name`: a built-in, `path/to/file.py:name`, `pkg.mod:name` or
    `pkg.mod.name`; from Python also the function itself.

    Relative paths and modules are looked up from the working directory. A file is executed once per process,
    and again where it, or a module beside it, has been edited.
    Raises ConfigError that says which part was missing, with the nearest name that exists.
    """
    if callable(name):
        return name
    if name in _KNOWN:
        return _KNOWN[name]
    if name in builtins:
        return builtins[name]
    module_name, colon, attribute = name.rpartition(":")
    if colon and module_name.endswith(".pkl"):
        return _unpickled(module_name, name)
    if colon and (module_name.endswith(".py") or "/" in module_name):
        module = module_of(module_name, name)
    elif colon:
        module = module_by_name(module_name, name)
    elif name.endswith(".py"):
        raise ConfigError(f"'{name}' names a file but no function in it; write {name}:function_name")
    elif "." in name:
        module, attribute = _module_and_attribute(name)
    else:
        known = ", ".join(sorted(builtins)) or "nothing"
        raise ConfigError(
            f"unknown name '{name}'{did_you_mean(name, builtins)} Built in: {known}. "
            "Your own: path/to/file.py:name or package.module.name"
        )
    return attribute_of(module, attribute, name)


def written_down(data: bytes) -> bytes:
    """Returns what a file holds of a pickled function: also whose code it is, since Python's changes."""
    return _WRITTEN_BY + _python() + b"\n" + data


def _python() -> bytes:
    return b"%d.%d" % sys.version_info[:2]


def know(name: str, function: Callable[..., Any]) -> str:
    """Lets a name, under which other processes find a function's file, stand for the function object in this
    process. Returns the name. Errors say of one that was written down (`written_down`) what it is called.
    """
    _KNOWN[name] = function
    file, _, shown = name.rpartition(":")
    if file.endswith(".pkl"):
        call(name, shown)
    return name


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    where: str,
    *,
    given: int | None = None,
    chosen: Any = None,
) -> None:
    """Checks that `function` takes `options` as options, and that none it requires is missing.

    Options are the keyword-only parameters and the positional ones after the first `given`, which the caller
    fills itself (None: all positional parameters without a default). Values are checked against annotations
    of what a recipe can write (numbers, texts, Literal[…], lists and mappings of them, and unions);
    everything else is the function's own business.
    where: the key (and its origin) for the message. chosen: the entry of the recipe that has them, whose name
    and further keys the message then has. Raises ConfigError.
    """
    parameters = list(signature_of(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if given is None:
        candidates = [p for p in positional if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty]
    else:
        candidates = [p for p in positional[given:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    candidates += [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    title = getattr(function, "__name__", str(function)) if chosen is None else chosen.name
    keys = () if chosen is None else [f.name for f in dataclasses.fields(chosen)]
    beside = [key for key in keys if key not in ("name", "options")]
    check_declared(candidates, options, where, title, takes_any=takes_any, beside=beside)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Returns a function's signature; annotations that are text are evaluated where their module can."""
    signature, written = inspect.signature(function), inspect.unwrap(function)
    module = sys.modules.get(getattr(written, "__module__", ""))
    scope = getattr(written, "__globals__", vars(module) if module else {})
    return signature.replace(
        parameters=[
            p.replace(annotation=_evaluated(p.annotation, scope)) for p in signature.parameters.values()
        ]
    )


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, scope)
    except (NameError, TypeError, AttributeError, SyntaxError):  # a name for type checkers only, say
        return annotation


def check_declared(
    declared: Iterable[inspect.Parameter],
    options: Mapping[str, Any],
    where: str,
    title: str,
    *,
    takes_any: bool = False,
    beside: Sequence[str] = (),
) -> None:
    """Checks `options` against the parameters that declare them, which may be those of several functions.

    title: what the options belong to, for the message. takes_any: names that are not declared are fine too.
    beside: other keys that may stand beside them, for the message. Raises ConfigError.
    """
    known = {p.name: p for p in declared}
    listing = f"Its options: {', '.join([*known, *beside]) or 'none'}"
    for key, value in options.items():
        with about(f"{where}.{key}"):
            variable = _checked_variable(key, value, f"{where}.{key}")
            if key in known:
                given = value if variable is None else variable  # a text, as the secret will be
                _check_type(known[key], given, f"{where}: option '{key}' of {title}")
            elif not takes_any:
                _refuse_older_form(key, known, where)
                near = did_you_mean(key, [*known, *beside])
                raise ConfigError(f"{where}: {title} has no option '{key}'{near} {listing}")
    missing = [name for name, p in known.items() if p.default is p.empty and name not in options]
    if missing:
        raise ConfigError(f"{where}: {title} needs the option '{missing[0]}', which is not set. {listing}")


def called_with(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the options with which a function is called, in the process that calls it: each `{env: NAME}`
    becomes that variable's value there. Everything that shows or stores options has them as written. where:
    the key of the entry that has them.

    Raises ConfigError for a variable that is not set or is not handed over, and for what was masked where the
    configuration was written down.
    """
    return {key: _opened(key, value, f"{where}.{key}") for key, value in options.items()}


def _opened(name: str, value: Any, where: str) -> Any:
    variable = _checked_variable(name, value, where)
    if variable is not None:
        if not os.environ.get(variable):
            raise ConfigError(
                f"{where}: the environment variable {variable} is not set in the process that needs it",
                key=where,
            )
        return os.environ[variable]
    if isinstance(value, str) and was_masked(value):
        raise ConfigError(
            f"{where} is {value}, which stands for a secret in what a run keeps of its configuration: set it "
            f"anew, best as {name}: {{env: NAME_OF_A_VARIABLE}}",
            key=where,
        )
    if isinstance(value, Mapping):
        return {key: _opened(str(key), child, f"{where}.{key}") for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_opened(name, child, f"{where}.{i}") for i, child in enumerate(value))
    return value


def _checked_variable(name: str, value: Any, where: str) -> str | None:
    """Returns the variable that an option names, if it does. Raises ConfigError for one that may not be."""
    variable = variable_of(value)
    if variable is None or not (is_secret(name) or VARIABLE.fullmatch(variable)):
        return None  # {env: CartPole-v1}, say, is some mapping of the function's
    problem = None
    if not is_secret(name):
        problem = (
            "only options that hold a secret take a variable: key, token, password, secret, and what ends in "
            "_api_key, _token, _password or _secret"
        )
    elif not VARIABLE.fullmatch(variable):
        problem = "only variables that end in _KEY, _TOKEN, _PASSWORD or _SECRET are handed over"
    elif variable in NEVER_HANDED_OVER:
        problem = (
            f"{variable} opens what is yours elsewhere, and is never handed over; put what is needed here "
            "into a variable of its own"
        )
    if problem is not None:
        is_name = variable in os.environ or VARIABLE.fullmatch(variable)  # else the secret itself, perhaps
        shown = variable if is_name else "…"
        raise ConfigError(f"{where}: {{env: {shown}}}: {problem}", key=where)
    return variable


def _refuse_older_form(key: str, known: Collection[str], where: str) -> None:
    name = key.removesuffix("_env")
    if name != key and name in known and is_secret(name):
        raise ConfigError(f"{where}: {key}: NAME is written {name}: {{env: NAME}} now")


def _check_type(parameter: inspect.Parameter, value: Any, where: str) -> None:
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # which a scorer's process need not import

    if not _is_written(parameter.annotation):
        return
    try:  # as JSON, which is what YAML says: a list may stand for a tuple, and nothing else for another
        data = json.dumps(value, default=_foreign)
        TypeAdapter(parameter.annotation, config=ConfigDict(strict=True)).validate_json(data)
    except (ValidationError, TypeError):
        shown = masked(parameter.name, value)
        choices = [choice for choice in typing.get_args(parameter.annotation) if isinstance(choice, str)]
        near = did_you_mean(value, choices) if choices and isinstance(value, str) else ""
        raise ConfigError(
            f"{where} must be {in_words(parameter.annotation)}, got {type(value).__name__} {shown!r}{near}"
        ) from None


def _foreign(value: Any) -> dict[str, None]:
    """Stands for what JSON does not have, an object of a program's: `Any` takes it, and no text or number."""
    return {type(value).__name__: None}


def _is_written(kind: Any) -> bool:
    """Says whether an annotation is one of what a recipe can write."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return True
    if origin in _UNIONS or origin in _WRITTEN:
        return all(one is ... or _is_written(one) for one in inner)
    return kind in _WRITTEN


def in_words(kind: Any) -> str:
    """Writes an annotation: `int or None`, `'a' or 'b'`, `list of str`, `mapping of str to float`, `a
    function`.
    """
    origin, inner = typing.get_origin(kind) or kind, [x for x in typing.get_args(kind) if x is not ...]
    if origin is Literal:
        return " or ".join(map(repr, inner))
    words = [in_words(one) for one in inner]
    if origin in _UNIONS:
        return " or ".join(words)
    words = [f"({word})" if " or " in word else word for word in words]
    if origin in (dict, Mapping):
        return f"mapping of {' to '.join(words)}" if words else "mapping"
    if origin in (list, tuple, Sequence, Iterable):
        return f"list of {', '.join(words)}" if words else "list"
    if origin is Callable:
        return "a function"
    return "None" if kind is type(None) else str(kind.__name__)


def _unpickled(path: str, name: str) -> Callable[..., Any]:
    """Reads a function that a program has written down (`rondo.train(reward=…)`)."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"'{name}': there is no file {file}; paths are relative to the working directory")
    data = file.read_bytes()
    if data.startswith(_WRITTEN_BY):  # what an older rondo wrote does not say
        said, _, data = data.removeprefix(_WRITTEN_BY).partition(b"\n")
        if said != _python():
            raise ConfigError(
                f"'{name}': {file} holds a function's compiled code, of Python {said.decode()}, and this is "
                f"Python {_python().decode()}, which would take it for something else; go on with that "
                "Python, or put the function into a file of its own"
            )
    with importing(f"'{name}': {file}"):
        function = _FunctionUnpickler(io.BytesIO(data)).load()
    know(name, function)
    return function  # type: ignore[no-any-return]


class _FunctionUnpickler(pickle.Unpickler):
    """Finds what an older rondo's pickle names and has moved since, so that a run of that one goes on."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("cloudpickle.") and name == "subimport":  # how a pickle names a module
            return _imported
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            from rondo.core.moved import successor

            new = successor(f"{module}:{name}")
            if new is None:
                raise
            return super().find_class(*new.split(":"))


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        from rondo.core.moved import successor

        new = successor(name)
        if new is None:
            raise
        return importlib.import_module(new)


def _module_and_attribute(name: str) -> tuple[ModuleType, str]:
    """Splits `a.b.c.d` into the longest importable module and the rest (`a.b.Class.method` is legal)."""
    parts = name.split(".")
    for stop in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:stop])
        with importing(f"'{name}': module {module_name}"), importable(os.getcwd()):
            try:
                found = importlib.util.find_spec(module_name) is not None
            except (ImportError, ValueError):  # the parent is missing, or is no package
                found = False
        if found:
            return module_by_name(module_name, name), ".".join(parts[stop:])
    raise ConfigError(
        f"'{name}': there is no module {parts[0]}; install it, or run where it can be imported, "
        "or name a file: path/to/file.py:name"
    )
