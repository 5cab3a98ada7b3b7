"""Run in a sandbox without the program on trial: tests of its functions, which are called elsewhere.

stdin: the Python text of (tests, {call: answer}). stdout, one of

    passed
    call (function, arguments, named arguments)     whose answer is not known: ask for it, and run this again
    failed                                          an assertion did not hold
    raised                                          a function raised, and no test had foreseen it
    broken …                                        the tests cannot be run, whatever the program is

An answer is what `caller.py` wrote, or the program in its place: data is read from it, and nothing is run.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than most programs
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

ONLY_AST = 0x400  # as ast.PyCF_ONLY_AST
MANY = {"Tuple": tuple, "List": list, "Set": set}


class BrokenTestsError(Exception):
    """The tests ask for what only the program's own process could do."""


def value_of(node: Any) -> Any:
    """Returns the data that a syntax tree says. Raises ValueError for what is more than data."""
    kind = type(node).__name__
    if kind == "Constant" and data(node.value):
        return node.value
    if kind in MANY:
        return MANY[kind](value_of(each) for each in node.elts)
    if kind == "Dict":
        return {value_of(key): value_of(each) for key, each in zip(node.keys, node.values, strict=True)}
    if kind == "UnaryOp" and type(node.op).__name__ == "USub":
        number = value_of(node.operand)
        if type(number) in (int, float):
            return -number
    if kind == "Name" and node.id in ("inf", "nan"):
        return float(node.id)
    if kind == "Call" and type(node.func).__name__ == "Name" and node.func.id in ("set", "frozenset"):
        made = {"set": set, "frozenset": frozenset}[node.func.id]
        return made(*map(value_of, node.args))
    raise ValueError(kind)


def data(value: object) -> bool:
    """Says whether a value can be written as a literal and read back."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(data, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(data(key) and data(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str, bytes)


def exception_of(answer: str) -> Exception:
    """Returns what a call is answered with that is no data: the exception that the function raised."""
    kind = getattr(builtins, answer[2:], None)
    # One that ends an iteration would end the tests' own.
    ends = (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends):
        try:
            made: Exception = kind(answer)
        except TypeError:  # it is made of more than a text
            return Exception(answer)
        return made
    return Exception(answer)


def names_in(code: CodeType) -> set[str]:
    """Returns every name that code, and what is defined in it, may look up."""
    inner = [each for each in code.co_consts if isinstance(each, type(code))]
    return set(code.co_names).union(*map(names_in, inner))


class Trial:
    """The tests' side of the program. raised: what its functions raised here."""

    def __init__(self, answers: dict[str, str], out: int) -> None:
        self.answers = answers
        self.out = out
        self.raised: list[BaseException] = []

    def end(self, said: str) -> None:
        """Writes the verdict, and ends the process."""
        left = said.encode("utf-8", "surrogatepass")
        while left:
            left = left[os.write(self.out, left) :]
        os._exit(0)

    def function(self, name: str) -> Any:
        """Returns what stands for a function of the program."""

        def called(*arguments: object, **named: object) -> Any:
            if not data((arguments, named)):
                raise BrokenTestsError(f"{name} is called with what is no data, and it runs elsewhere")
            call = repr((name, arguments, named))
            if call not in self.answers:
                self.end(f"call {call}")
            answer = self.answers[call]
            if answer.startswith("= "):
                try:
                    return value_of(compile(answer[2:], "answer", "eval", ONLY_AST).body)  # type: ignore[attr-defined]
                except (ValueError, SyntaxError, TypeError):
                    pass
            self.raised.append(exception_of(answer))
            raise self.raised[-1]

        return called


def main() -> None:
    """Runs the tests from their start, with the answers that are known."""
    sys.set_int_max_str_digits(0)
    tests, answers = eval(sys.stdin.read())
    trial = Trial(answers, os.dup(1))
    os.dup2(2, 1)
    try:
        code = compile(tests, "tests.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        return trial.end(f"broken {error}")
    namespace: dict[str, Any] = {"__name__": "tests"}
    names = names_in(code)
    if "random" in names:  # the same tests each time they are run
        import random

        random.seed(0)
    missing = {name for name in names if not hasattr(builtins, name) and name not in namespace}
    namespace.update((name, trial.function(name)) for name in missing)
    try:
        exec(code, namespace)
    except BrokenTestsError as error:
        trial.end(f"broken {error}")
    except BaseException as error:
        trial.end("raised" if error in trial.raised else "failed")
    trial.end("passed")


if __name__ == "__main__":
    main()
