"""Run in the sandbox of a program on trial: loads it, calls one of its functions, writes what came of it.

stdin: the Python text of (program, call, form), call that of (function, arguments, named arguments). stdout:
`= result`, as JSON or as Python's text; `! kind` where the function raised. The program can write there what
it likes: it is its answer, and what would be right is not in here.
"""

from __future__ import annotations

import os
import sys
from _json import encode_basestring_ascii

TYPE_CHECKING = False  # importing typing takes longer than most programs
if TYPE_CHECKING:
    from typing import Any

FUTURE_ANNOTATIONS = 0x1000000  # types are not evaluated, so that a forgotten import of List does not matter


def plain(value: object) -> object:
    """Returns the value made of Python's own types of data. Raises TypeError for everything else."""
    if value is None or isinstance(value, bool):
        return value
    kinds: tuple[Any, ...] = (str, int, float, bytes)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)  # without what a class of the program's adds to it
    for many in (list, tuple, set, frozenset):
        if isinstance(value, many):
            return many(plain(each) for each in value)
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    raise TypeError(f"a result of type {type(value).__name__} is no data")


def json_of(value: object) -> str:
    """Returns data as JSON. Importing `json` would take longer than most programs."""
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(json_of, value))}]"
    if isinstance(value, dict):
        keys = [key if isinstance(key, str) else json_of(key) for key in value]
        pairs = zip(keys, value.values(), strict=True)
        return f"{{{', '.join(f'{json_of(key)}: {json_of(each)}' for key, each in pairs)}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(repr(value), repr(value))
    raise TypeError(f"a result of type {type(value).__name__} is not in JSON")


def main() -> None:
    """Runs one call of the program, and writes what came of it."""
    sys.set_int_max_str_digits(0)
    program, call, form = eval(sys.stdin.read())
    name, arguments, named = eval(call, {"inf": float("inf"), "nan": float("nan")})
    answers = os.dup(1)
    os.dup2(2, 1)  # what the program prints is no answer
    module = sys.modules["solution"] = type(sys)("solution")  # dataclasses look into their module
    namespace = module.__dict__
    exec(compile(program, "solution.py", "exec", FUTURE_ANNOTATIONS, True), namespace)
    function = namespace.get(name)
    if function is None and "Solution" in namespace:
        function = getattr(namespace["Solution"](), name)
    if function is None:
        raise NameError(f"the program has no function {name}")
    try:
        result = function(*arguments, **named)
    except Exception as error:
        answer = f"! {type(error).__name__}"
    else:
        value = plain(result)
        answer = f"= {json_of(value) if form == 'json' else repr(value)}"
    data = answer.encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(answers, data) :]
    os._exit(0)  # whatever threads it has left


if __name__ == "__main__":
    main()
