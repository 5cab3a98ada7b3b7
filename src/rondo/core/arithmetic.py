"""Written arithmetic, computed exactly and without running anything: the syntax tree is walked. And answers
that somebody else's scorer would run.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeVar

T = TypeVar("T")
_OPERATORS: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST_EXPRESSION = 200


def evaluate_expression(expression: str, *, decimals: bool = False) -> tuple[Fraction, list[int]] | None:
    """Returns the exact value and the integers of `+ - * /` over integers with parentheses; None for anything
    else.

    Nothing is executed. No powers, names, calls; decimals (0.5) only where they are asked for; at most 200
    characters.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        used: list[int] = []
        return _value(tree.body, used, decimals), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int], decimals: bool) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, used, decimals), _value(node.right, used, decimals)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used, decimals)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if decimals and isinstance(node, ast.Constant) and type(node.value) is float:
        return Fraction(str(node.value))
    raise ValueError(f"{type(node).__name__} is not allowed")


def reads_literals(dataset: T) -> T:
    """Returns a data set of reasoning_gym whose `score_answer` runs nothing that a policy wrote: some of its
    tasks (n_queens, binary_matrix, …) call `eval` on an answer, to read a list. From here on their modules
    read literals.
    """
    if "eval(" in inspect.getsource(type(dataset).score_answer):  # type: ignore[attr-defined]
        vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
    return dataset
