"""JSON Schema for editors: it is the shipped one, it takes every recipe, and refuses what loading refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rondo import recipes
from rondo.cli import main as cli
from rondo.config import load, schema, to_yaml
from rondo.config.json_schema import json_schema
from rondo.config.keys import fields_of, meaning
from rondo.config.tree import read_argument, read_file
from rondo.system.names import offered

jsonschema = pytest.importorskip("jsonschema")
SHIPPED = Path(recipes.__path__[0]) / "schema.json"


@pytest.fixture(scope="module")
def check() -> Any:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


def test_the_command_writes_what_is_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    """`rondo config schema > src/rondo/recipes/schema.json` after a change of the schema."""
    assert cli.main(["config", "schema"]) == 0
    assert capsys.readouterr().out == SHIPPED.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(offered("recipes").values()), ids=lambda path: path.stem)
def test_every_recipe_names_it_and_fits(path: Path, check: Any) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == SHIPPED.resolve()
    check.validate(read_file(str(path), 0).plain())


def test_a_whole_configuration_fits(tmp_path: Path, check: Any) -> None:
    everything = tmp_path / "all.yaml"
    everything.write_text(to_yaml(load(["dapo"], ["rollout.engine={name: vllm, a: 1}"]).config))
    check.validate(read_file(str(everything), 0).plain())


@pytest.mark.parametrize(
    ("argument", "fits"),
    [
        ("rollout=3", False),
        ("rollout={n: 4, top_p: 1}", True),
        ("rollout={n: 0}", False),
        ("rollout={m: 4}", False),
        ("rollout={engine: native}", True),
        ("rollout={engine: other}", False),
        ("rollout={engine: {decode: lean}}", True),
        ("rollout={engine: {decode: fast}}", False),
        ("rollout={engine: {tensor_parallel: 2}}", False),
        ("rollout={engine: {name: vllm, tensor_parallel: 2, swap_space: 4}}", True),
        ("rollout={engine: {name: vllm, tensor_parallel: 0}}", False),
        ("trainer={on_update: {name: abort, max_aborts: 1}}", True),
        ("trainer={on_update: {name: resume, max_aborts: 1}}", False),
        ("algorithm={advantage: gae, filter: null, kl: null}", True),
        ("algorithm={advantage: {lam: 0.9}}", True),
        ("algorithm={advantage: null}", False),
        ("algorithm={filter: {max_refills: 3}}", False),
        ("algorithm={kl: {name: k3, where: loss}}", False),
        ("data={train: [{type: jsonl, path: x}]}", True),
        ("data={train: [{type: jsonl, path: x, seed: 1}]}", False),
        ("reward={functions: [gsm8k, {name: a.py:b, weight: 2, level: 3}]}", True),
        ("reward={functions: [{weight: 2}]}", False),
        ("actor={gradient_checkpointing: true, optimizer: {betas: [0.9, 0.95]}}", True),
        ("include=[a, b]", True),
        ("include=3", False),
    ],
)
def test_it_refuses_what_loading_refuses(argument: str, fits: bool, check: Any) -> None:
    (key,), value = read_argument(argument, 0)
    assert check.is_valid({key: value.plain()}) == fits


def test_every_key_is_documented() -> None:
    sections = [value for name, value in vars(schema).items() if name.endswith("Config") and name != "Config"]
    classes = [section for section in sections if isinstance(section, type)]  # the others are unions
    missing = [f"{c.__name__}.{name}" for c in classes for name in fields_of(c) if not meaning(c, name)]
    assert len(classes) > 40
    assert not missing


def test_no_description_is_repeated_as_a_title() -> None:
    assert '"title"' not in json.dumps(json_schema()["$defs"])
