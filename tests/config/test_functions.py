"""Functions by name, and their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from rondo.config.functions import check_options, resolve_function
from rondo.core.errors import ConfigError

SOURCE = """
from dataclasses import dataclass
from helper_beside import BONUS

@dataclass
class Scorer:
    weight: float = 1.0
    @staticmethod
    def score():
        return 7

def reward(prompt, trajectory, *, scale: float = 1.0):
    return BONUS * scale

not_a_function = 3
"""


@pytest.fixture
def module(in_tmp_path: Path) -> Iterator[Path]:
    (in_tmp_path / "helper_beside.py").write_text("BONUS = 5\n", encoding="utf-8")
    (in_tmp_path / "my_reward.py").write_text(SOURCE, encoding="utf-8")
    yield in_tmp_path
    sys.modules.pop("helper_beside", None)  # another folder's is another one


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


class TestResolve:
    def test_builtin(self) -> None:
        assert resolve_function("dumps", {"dumps": json.dumps}) is json.dumps

    def test_dotted(self) -> None:
        assert resolve_function("json.dumps") is json.dumps
        assert resolve_function("json:dumps") is json.dumps
        assert resolve_function("json.decoder.JSONDecoder.decode") is json.JSONDecoder.decode

    def test_file_with_an_import_of_its_neighbour(self, module: Path) -> None:
        path = list(sys.path)
        assert resolve_function("my_reward.py:reward")(None, None, scale=2.0) == 10.0
        assert resolve_function(str(module / "my_reward.py") + ":Scorer.score")() == 7
        assert sys.path == path

    def test_a_file_is_run_once(self, module: Path) -> None:
        assert resolve_function("my_reward.py:reward") is resolve_function("./my_reward.py:reward")

    def test_module_of_the_working_directory(self, module: Path) -> None:
        (module / "rondo_test_local.py").write_text("def f(): return 1\n", encoding="utf-8")
        assert resolve_function("rondo_test_local.f")() == 1

    def test_unknown(self) -> None:
        assert failure(lambda: resolve_function("grop", {"grpo": json.dumps, "gae": json.dumps})) == (
            "unknown name 'grop'; did you mean 'grpo'? Built in: gae, grpo. Your own: path/to/file.py:name "
            "or "
            "package.module.name"
        )

    def test_missing_parts(self, module: Path) -> None:
        assert failure(lambda: resolve_function("nope.py:f")) == (
            f"'nope.py:f': there is no file {module / 'nope.py'}; paths are relative to the working directory"
        )
        assert failure(lambda: resolve_function("my_reward.py")) == (
            "'my_reward.py' names a file but no function in it; write my_reward.py:function_name"
        )
        assert failure(lambda: resolve_function("my_reward.py:rewad")) == (
            f"'my_reward.py:rewad': {module / 'my_reward.py'} has no 'rewad'; did you mean 'reward'?"
        )
        assert failure(lambda: resolve_function("my_reward.py:not_a_function")) == (
            "'my_reward.py:not_a_function' is int, not a function"
        )
        assert failure(lambda: resolve_function("json.load_s")).endswith(
            "has no 'load_s'; did you mean 'loads'?"
        )
        assert failure(lambda: resolve_function("no_such_package.f")) == (
            "'no_such_package.f': there is no module no_such_package; install it, or run where it can be "
            "imported, "
            "or name a file: path/to/file.py:name"
        )
        assert failure(lambda: resolve_function("no_such_package:f")) == (
            "'no_such_package:f': there is no module no_such_package; install it, or run where it can be "
            "imported"
        )

    def test_broken_files_name_the_line(self, module: Path) -> None:
        (module / "bad.py").write_text("x = 1\ny = z\n", encoding="utf-8")
        assert failure(lambda: resolve_function("bad.py:f")) == (
            f"'bad.py:f': {module / 'bad.py'} could not be imported: NameError: name 'z' is not defined "
            "(bad.py, line 2)"
        )
        (module / "worse.py").write_text("def f(:\n", encoding="utf-8")
        assert "SyntaxError" in failure(lambda: resolve_function("worse.py:f"))
        assert "worse.py, line 1" in failure(lambda: resolve_function("worse.py:f"))


def estimator(
    reward: object, group: object, *, scale: float = 1.0, k: int, mode: str | None = None
) -> None: ...


def rows(size: int, hard: bool = False) -> None: ...


Method = Literal["strict", "flexible"]


def judge(
    prompt: object,
    *,
    method: Method = "strict",
    stops: Sequence[str] = (),
    sizes: tuple[int, ...] | None = None,
    weights: dict[str, float] | None = None,
    tokens: list[str | int] | int = 0,
    where: Path = Path(),
    hook: Callable[..., object] | None = None,
) -> None: ...


def half_known(prompt: object, *, known: int = 0, unknown: Unknown = None) -> None: ...  # type: ignore[name-defined] # noqa: F821


def anything(prompt: object, trajectory: object, **options: object) -> None: ...


class TestOptions:
    def test_fine(self) -> None:
        check_options(estimator, {"k": 2, "scale": 1, "mode": None}, "here")
        check_options(anything, {"whatever": 1}, "here")
        check_options(rows, {"size": 3, "hard": True}, "here", given=0)
        check_options(rows, {"hard": True}, "here")

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (
                {"k": 1, "scael": 2},
                "here: estimator has no option 'scael'; did you mean 'scale'? Its options: scale, k, mode",
            ),
            ({"k": 1, "reward": 2}, "here: estimator has no option 'reward'. Its options: scale, k, mode"),
            ({}, "here: estimator needs the option 'k', which is not set. Its options: scale, k, mode"),
            ({"k": 1, "scale": "2"}, "here: option 'scale' of estimator must be float, got str '2'"),
            ({"k": True}, "here: option 'k' of estimator must be int, got bool True"),
            ({"k": 1.5}, "here: option 'k' of estimator must be int, got float 1.5"),
            ({"k": 1, "mode": 3}, "here: option 'mode' of estimator must be str or None, got int 3"),
        ],
    )
    def test_wrong(self, options: dict[str, object], expected: str) -> None:
        assert failure(lambda: check_options(estimator, options, "here")) == expected

    @pytest.mark.parametrize(
        "options",
        [
            {"method": "flexible", "stops": ["a", "b"], "sizes": [1, 2], "weights": {"a": 1, "b": 0.5}},
            {"stops": [], "sizes": None, "weights": {}, "tokens": ["a", 1]},
            {"stops": ("a",), "sizes": (1,), "tokens": 3},  # from Python
            {"where": "here.txt", "hook": "whatever"},  # the function's own business
        ],
    )
    def test_types_that_a_recipe_can_write(self, options: dict[str, object]) -> None:
        check_options(judge, options, "here")

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (
                {"method": "stict"},
                "'method' of judge must be 'strict' or 'flexible', got str 'stict'; did you mean 'strict'?",
            ),
            ({"method": 1}, "'method' of judge must be 'strict' or 'flexible', got int 1"),
            ({"stops": "ab"}, "'stops' of judge must be list of str, got str 'ab'"),
            ({"stops": ["a", 1]}, "'stops' of judge must be list of str, got list ['a', 1]"),
            ({"sizes": [1.5]}, "'sizes' of judge must be list of int or None, got list [1.5]"),
            ({"sizes": [True]}, "'sizes' of judge must be list of int or None, got list [True]"),
            (
                {"weights": {"a": "1"}},
                "'weights' of judge must be mapping of str to float or None, got dict {'a': '1'}",
            ),
            ({"tokens": [None]}, "'tokens' of judge must be list of (str or int) or int, got list [None]"),
            ({"stops": {"a"}}, "'stops' of judge must be list of str, got set {'a'}"),  # from Python
        ],
    )
    def test_types_that_are_another(self, options: dict[str, object], expected: str) -> None:
        assert failure(lambda: check_options(judge, options, "here")) == f"here: option {expected}"

    def test_a_decorated_function_is_read_where_it_was_written(self) -> None:
        @contextmanager  # of a module that knows nothing of Method
        def decorated(prompt: object, *, method: Method = "strict") -> Iterator[None]:
            yield

        assert "did you mean 'strict'" in failure(
            lambda: check_options(decorated, {"method": "stict"}, "here")
        )

    def test_anything_takes_what_a_recipe_cannot_write(self) -> None:
        def given(prompt: object, *, one: Any, some: dict[str, Any], text: str | int = "") -> None: ...

        check_options(given, {"one": object(), "some": {"of": object()}}, "here")
        for wrong in ({"one": 1, "some": [object()]}, {"one": 1, "some": {}, "text": object()}):
            assert "must be" in failure(lambda wrong=wrong: check_options(given, wrong, "here"))  # type: ignore[misc]

    def test_an_annotation_that_cannot_be_evaluated_says_nothing(self) -> None:
        check_options(half_known, {"known": 1, "unknown": 3}, "here")
        assert "must be int" in failure(lambda: check_options(half_known, {"known": "1"}, "here"))

    def test_given_positionals(self) -> None:
        assert failure(lambda: check_options(rows, {}, "here", given=0)) == (
            "here: rows needs the option 'size', which is not set. Its options: size, hard"
        )
