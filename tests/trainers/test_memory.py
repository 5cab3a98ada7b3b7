"""Runs that cannot fit the machine are refused before anything is taken, and no run that fits is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from rondo.config import Config, load
from rondo.core.errors import ConfigError
from rondo.models import ModelSource, build_model, count_parameters
from rondo.rollout.native.cache import check_tables
from rondo.system.usage import memory_bytes
from rondo.trainers.commands import check_memory as checked
from rondo.trainers.commands.check_memory import check_memory
from rondo.trainers.program import settled
from tests.models.test_loading import TINY
from tests.trainers.conftest import RECIPE, inline

MODEL = (
    "model={path: null, tokenizer: 'tests.models.test_loading:make_tokenizer', config: {model_type: qwen3}}"
)
ROLES, LEARNERS = ("actor", "critic", "reference", "rollout"), ("actor", "critic")
COUNT = 1000


@pytest.fixture(autouse=True)
def of_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "count_parameters", lambda source, output_head: COUNT)


def config(*settings: str) -> Config:
    base = [MODEL, "trainer.total_steps=1", "cluster.device=cpu", "data.batch_size=2", "rollout.n=2"]
    return settled(load([], [*base, *settings]).config)


def taken(monkeypatch: pytest.MonkeyPatch, *settings: str) -> int:
    """The bytes that the run is found to take: the least that is enough."""
    given: list[Any] = []
    monkeypatch.setattr(checked, "check_fits", lambda needs, free, where: given.extend(needs))
    check_memory(config(*settings), ROLES, LEARNERS)
    return sum(need.nbytes for need in given)


def test_each_owner_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 4 * checked.ROW_BYTES
    learners, reference = 2 * 4 * 4 * COUNT, 4 * COUNT
    assert taken(monkeypatch) == rows + learners + reference  # one storage for trainer and sampler
    wide = taken(monkeypatch, "actor.param_dtype=float64")  # of which the sampler has a copy in float32
    assert wide == rows + learners + reference + 4 * 4 * COUNT + 4 * COUNT
    assert taken(monkeypatch, "actor.offload_optimizer=true") == rows + learners + reference  # nowhere to go
    small = taken(monkeypatch, "actor.optimizer.moments=8bit")
    assert small == rows + learners + reference - (4 + 4 - 1 - 1) * COUNT
    own = taken(monkeypatch, "trainer.max_staleness=1")
    assert own == rows + learners + reference + 4 * COUNT
    three = taken(monkeypatch, "rollout.replicas=3")
    assert three == rows + learners + reference + 3 * (4 * COUNT + checked.PROCESS_BYTES)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """By owner what is found to be held by the host, then by a GPU, of which none is here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 7))
    found: list[dict[str, int]] = []
    monkeypatch.setattr(
        checked, "check_fits", lambda needs, free, where: found.append({n.owner: n.nbytes for n in needs})
    )
    return found


ALL = ("actor.offload_params=true", "actor.offload_optimizer=true", "critic.offload_optimizer=true")


@pytest.mark.parametrize(
    ("settings", "at_rest", "there"),
    [
        ((), {}, {"actor": 16, "critic": 16, "reference": 4}),
        (ALL[1:2], {"actor": 8}, {"actor": 8, "critic": 16, "reference": 4}),
        # Of two that rest one is in its update: the other has what stays.
        (ALL[1:], {"actor": 8, "critic": 8}, {"actor": 8, "critic": 4, "reference": 4}),
        (ALL, {"actor": 12, "critic": 8}, {"actor": 8, "critic": 4, "reference": 4}),
        (("reference.offload_params=true",), {"reference": 4}, {"actor": 16, "critic": 16, "reference": 4}),
    ],
)
def test_what_is_offloaded_is_counted_where_it_rests(
    counted: list[dict[str, int]],
    settings: tuple[str, ...],
    at_rest: dict[str, int],
    there: dict[str, int],
) -> None:
    """Bytes of a parameter: 4 of it, 4 of its gradient, 8 of its moments."""
    check_memory(config("cluster.device=cuda", *settings), ROLES, LEARNERS)
    host, devices = counted
    rests = {name.removesuffix(" at rest"): size for name, size in host.items() if name.endswith(" at rest")}
    assert rests == {role: size * COUNT for role, size in at_rest.items()}
    assert {role: devices[role] for role in there} == {role: size * COUNT for role, size in there.items()}


def test_an_engine_that_gives_its_weights_up_is_not_there_in_an_update(counted: list[dict[str, int]]) -> None:
    """vLLM's do when it sleeps; the native engine's stay."""
    vllm = "rollout.engine={name: vllm, enable_sleep_mode: true}"
    cases = ((vllm, "rollout.sleep=true"), (vllm,), ("rollout.engine.process=own", "rollout.sleep=true"))
    for settings in cases:
        check_memory(config("cluster.device=cuda", *settings), ROLES, LEARNERS)
    assert ["rollout engines" in devices for devices in counted[1::2]] == [False, True, True]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("data.batch_size=1048576", "rollout.n=65536"), "data.batch_size"),
        (("rollout.replicas=65536",), "rollout.replicas"),
        (("cluster.backend=process", "cluster.devices=65536"), "cluster.devices"),
    ],
)
def test_settings_that_no_machine_has_memory_for(settings: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError, match="GiB are free") as caught:
        check_memory(config(*settings), ROLES, LEARNERS)
    assert caught.value.key == key


@pytest.mark.parametrize(("backend", "there"), [("local", 5), ("process", 7)])
def test_only_who_computes_asks_a_gpu_what_is_free(
    monkeypatch: pytest.MonkeyPatch, backend: str, there: int
) -> None:
    """To ask makes a CUDA context, which takes memory as long as the process lives. No GPU is here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 7))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=7))
    found: list[int] = []
    monkeypatch.setattr(checked, "check_fits", lambda needs, free, where: found.append(free))
    check_memory(config("cluster.device=cuda", f"cluster.backend={backend}"), ROLES, LEARNERS)
    assert found[1:] == [there]


def test_the_count_is_that_of_the_model_that_is_built() -> None:
    for more in ({}, {"tie_word_embeddings": True}):
        source = ModelSource(config={**TINY, **more})
        built = sum(p.numel() for p in build_model(source, torch.float32).parameters())
        assert count_parameters(source, output_head=True) == built
        head = 0 if more else TINY["vocab_size"] * TINY["hidden_size"]
        assert count_parameters(source, output_head=False) == built - head


def test_a_command_says_so_before_it_builds_the_model(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(checked, "count_parameters", count_parameters)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    wide = ("model.config.hidden_size=1000000", "model.config.intermediate_size=1000000")
    run = f"trainer.run_dir={tmp_path / 'run'}"
    done = inline("train", str(tmp_path / "tiny.yaml"), *wide, run, check=False)
    assert done.returncode == 2
    assert "this run will hold at least" in " ".join(done.stderr.split())


def test_tables_of_all_slots() -> None:
    check_tables(256, 4096)
    with pytest.raises(ConfigError) as caught:
        check_tables(256, memory_bytes()[0] // 3000)
    assert caught.value.key == "rollout.max_concurrent"
