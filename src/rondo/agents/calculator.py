"""The tool `calculator`; others come with packages (`rondo list tools`)."""

from __future__ import annotations

from rondo.core.arithmetic import evaluate_expression
from rondo.core.errors import ToolError


def calculator(expression: str) -> str:
    """Computes + - * / with parentheses, exactly.

    expression: such as (12 + 3) * 4 / 5
    """
    computed = evaluate_expression(expression, decimals=True)
    if computed is None:
        raise ToolError("not an expression of numbers with + - * / and parentheses, or it divides by zero")
    value = computed[0]
    try:
        return str(value.numerator) if value.denominator == 1 else repr(float(value))
    except (OverflowError, ValueError):  # beyond a double; more digits than Python writes
        raise ToolError("the value is too large to be written down") from None
