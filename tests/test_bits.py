"""Who compares floats to the last bit across runs, processes or ways of computing, and why that holds on any
processor: `bits.tsv` has a line for each of these tests, and what the reasons rest on is tried here.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

TESTS = Path(__file__).parent
TABLE = Path(__file__).with_name("bits.tsv")

# ---- what one sees of a comparison in its text. Two plain variables that are compared by `==`, where nothing
# says what they are, it does not see: such a test gets its line if somebody who reads it adds the name.

ARRAYS = {"torch.equal", "np.array_equal", "np.testing.assert_array_equal", "np.testing.assert_equal"}
CLOSE = {"torch.testing.assert_close", "np.testing.assert_allclose"}  # with tolerances of 0
# What comes from a run, a model or an engine, by the names of functions and fields, compared by `==`.
MADE = set(
    "checksum checksums fetch forward full_gradients gradient gradients_of hex learned metrics model numbers "
    "optimizer_step ragged read_metrics read_parquet rollouts rows_of snapshot stepped tobytes tokens "
    "trained_on weights weights_of with_routes _weights".split()
)
FIELDS = {"grad_norm", "log_probs", "rollout_log_probs", "token_log_probs"}
CALLS = {*(name.rpartition(".")[2] for name in ARRAYS | CLOSE), *MADE}
MAY = re.compile(
    rf"\b({'|'.join(CALLS)})\(|\.({'|'.join(FIELDS)})\b"
)  # without one of these, nothing is seen
WRITTEN = set("approx arange full ones tensor zeros zeros_like T D".split())  # by the test itself
NO_FLOATS = re.compile(
    r"_ids\b|_mask\b|\.mask\b|versions|lengths|routes|ROUTED|rng_state|data_ptr|\.keys\(|\.shape"
)


def dotted(node: ast.AST) -> str:
    """Returns a.b.c of such an expression; of another one its last names."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST) -> str:
    """Returns the name of what a call calls; "" for any other node."""
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def is_made(node: ast.AST, names: set[str]) -> bool:
    """Says whether a run, a model or an engine made a part of it. names: of variables with such a part."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found = part.id in names
        elif isinstance(part, ast.Attribute):
            found = part.attr in FIELDS
        else:
            found = called(part).rpartition(".")[2] in MADE
        if found:
            return True
    return False


def is_written(node: ast.AST) -> bool:
    """Says whether it is a constant, or made of constants by WRITTEN."""
    if isinstance(node, ast.Call):
        if called(node).rpartition(".")[2] in WRITTEN:
            return True
        return isinstance(node.func, ast.Attribute) and is_written(node.func.value)
    if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.BinOp | ast.UnaryOp | ast.Subscript):
        return all(map(is_written, ast.iter_child_nodes(node)))
    return isinstance(node, ast.Constant | ast.expr_context | ast.operator | ast.unaryop | ast.Slice)


def is_zero(node: ast.AST | None) -> bool:
    """Says whether a tolerance is 0, or may be."""
    return node is not None and any(isinstance(x, ast.Constant) and x.value == 0 for x in ast.walk(node))


def variables(function: ast.AST) -> set[str]:
    """Returns the names of what a run, a model or an engine made, as it is assigned or looped over."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_made(node.value, set()):
            targets = node.targets
        elif isinstance(node, ast.For | ast.comprehension) and is_made(node.iter, set()):
            targets = [node.target]
        else:
            continue
        found |= {part.id for one in targets for part in ast.walk(one) if isinstance(part, ast.Name)}
    return found


def asserted(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the function's nodes but those of `assert not …`."""
    waiting = [function]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.UnaryOp):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def sides_of(node: ast.AST) -> list[ast.expr]:
    """Returns what a node compares, by `==` or to the bit; nothing where it does neither."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
        return [node.left, *node.comparators]
    name = called(node)
    if not isinstance(node, ast.Call) or name not in ARRAYS | CLOSE:
        return []
    limits = {one.arg: one.value for one in node.keywords}
    if name in CLOSE and not (is_zero(limits.get("rtol")) and is_zero(limits.get("atol"))):
        return []
    return [one.value if isinstance(one, ast.Starred) else one for one in node.args[:2]]


def compares(function: ast.AST) -> bool:
    """Says whether a function compares floats to the bit, as far as its text shows."""
    names: set[str] | None = None
    for node in asserted(function):
        sides = sides_of(node)
        if not sides or any(map(is_written, sides)):
            continue
        if isinstance(node, ast.Compare):
            names = variables(function) if names is None else names
            if not all(is_made(side, names) for side in sides):
                continue
        if not NO_FLOATS.search(ast.unparse(node)):
            return True
    return False


class Place(NamedTuple):
    file: str
    function: str

    @property
    def is_test(self) -> bool:
        return self.function.rpartition("::")[2].startswith("test_")


class Function(NamedTuple):
    node: ast.AST
    text: str
    imported: dict[str, Place]
    """What its file imports, by the names it has there."""

    def names_one_of(self, places: set[Place], file: str) -> bool:
        """Says whether it names one of these functions. (Its text is looked at first: that is fast.)"""
        words = {name for name, place in self.imported.items() if place in places}
        words |= {place.function for place in places if place.file == file}
        words = {word for word in words if word in self.text}
        return bool(words) and any(
            isinstance(part, ast.Name) and part.id in words for part in ast.walk(self.node)
        )


def functions_in(path: Path) -> Iterator[tuple[Place, Function]]:
    """Yields the functions of a file and of its classes."""
    file, text = path.relative_to(TESTS.parent).as_posix(), path.read_text(encoding="utf-8")
    tree, rows = ast.parse(text), text.splitlines()
    imported = {
        one.asname or one.name: Place(f"{(node.module or '').replace('.', '/')}.py", one.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    }
    for node in tree.body:
        inside, prefix = [node], ""
        if isinstance(node, ast.ClassDef):
            inside, prefix = node.body, f"{node.name}::"
        for one in inside:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                own = "\n".join(rows[one.lineno - 1 : one.end_lineno])
                yield Place(file, prefix + one.name), Function(one, own, imported)


@functools.cache
def found() -> frozenset[str]:
    """Returns the tests that compare floats to the bit, or call what does, as `file::test`."""
    gc.disable()  # half a million nodes of syntax, which are looked through again and again otherwise
    functions = {place: one for path in sorted(TESTS.rglob("*.py")) for place, one in functions_in(path)}
    gc.enable()
    comparing = {place for place, one in functions.items() if MAY.search(one.text) and compares(one.node)}
    more = comparing
    while more:
        more = {place for place, one in functions.items() if one.names_one_of(more, place.file)} - comparing
        comparing |= more
    return frozenset("::".join(place) for place in comparing if place.is_test)


# ---- the table


def lines() -> list[list[str]]:
    return [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()]


def test_who_compares_floats_to_the_bit_says_why_that_holds() -> None:
    table = {name: why for name, *why in lines() if not name.startswith("#")}
    assert all(len(why) == 2 for why in table.values())
    known = {line[1] for line in lines() if line[0] == "# reason"}
    assert {reason for reasons, _ in table.values() for reason in reasons.split(", ")} == known
    assert [name for name, *_ in lines() if not name.startswith("#")] == sorted(table), (
        "twice, or in disorder"
    )
    by_file = {test: f"{test.partition('::')[0]}::*" for test in found()}
    missing = sorted(test for test, rest in by_file.items() if test not in table and rest not in table)
    assert not missing, "tests/bits.tsv: a line for each, with its reason, or a comparison with a tolerance"
    used = {test if test in table else rest for test, rest in by_file.items()}
    assert not sorted(table.keys() - used), "tests/bits.tsv: lines of tests that compare nothing to the bit"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("assert torch.equal(a, b)", True),
        ("assert all(torch.equal(*pair) for pair in pairs)", True),
        ("assert [n for n in a if not torch.equal(a[n], b[n])] == []", True),
        ("np.testing.assert_allclose(a, b, rtol=2e-7 if white else 0, atol=0)", True),
        ("assert weights(one) == weights(other)", True),
        ("for a, b in zip(metrics(one), metrics(other)):\n    assert {**a} == {**b}", True),
        ("made = engine.forward(batch)\nassert engine.forward(again) == made", True),
        ("assert a.log_probs.tolist() == b.log_probs.tolist()", True),
        ("assert not torch.equal(a, b)", False),
        ("assert torch.equal(a, torch.zeros(3))", False),
        ("assert metrics(one)[0] == {'a': 0.5}", False),
        ("assert metrics(one)['a'] == pytest.approx(metrics(other)['a'])", False),
        ("np.testing.assert_array_equal(a.token_ids, b.token_ids)", False),
        ("np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)", False),
        ("assert first == second", False),
    ],
)
def test_what_is_seen_as_a_comparison_to_the_bit(text: str, seen: bool) -> None:
    assert compares(ast.parse(text)) == seen


# ---- what the reasons rest on


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [torch.exp, torch.expm1, torch.log, torch.tanh, torch.sqrt])
def test_each_number_is_the_same_at_every_place(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """Kernels take some numbers at a time, and could take what is left at the end in another way."""
    numbers = torch.rand(97, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 3 + 0.1
    whole = function(numbers)
    for start in range(33):
        for stop in range(start + 1, start + 65):
            assert torch.equal(function(numbers[start:stop]), whole[start:stop]), (start, stop)
            assert torch.equal(function(numbers[start:stop].clone()), whole[start:stop]), (start, stop)


@pytest.mark.parametrize("rows", [1, 3, 16, 29])
def test_a_product_is_the_same_wherever_torch_puts_its_numbers(rows: int) -> None:
    """Which is at a multiple of 64 bytes. (Elsewhere it may not be: of one to three rows MKL sums those at a
    multiple of 16 in another order than others.)
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(rows, 48, generator=generator), torch.randn(61, 48, generator=generator)
    expected = factors[0] @ factors[1].mT
    assert {torch.empty(size).data_ptr() % 64 for size in range(1, 2000, 7)} == {0}
    for shift in range(16, 160, 16):
        left, right = (torch.empty(one.numel() + shift)[shift:].view_as(one).copy_(one) for one in factors)
        assert torch.equal(left @ right.mT, expected), shift
