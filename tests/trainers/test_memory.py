"""Runs that cannot fit the machine are refused before anything is taken, and no run that fits is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from rondo.config import Config, load
from rondo.core.errors import ConfigError
from rondo.models import ModelSource, build_model, count_parameters
from rondo.planning.memory import PROCESS_BYTES, ROW_BYTES
from rondo.planning.plan import plan_memory
from rondo.planning.runs import Lengths, runs_of
from rondo.planning.shapes import only_counted
from rondo.rollout.native.cache import check_tables
from rondo.system.usage import memory_bytes
from rondo.trainers.commands import plan_run as checked
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


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """By owner what is certainly held by the host, then by each GPU of a pool, of which none is here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    found: list[dict[str, int]] = []
    monkeypatch.setattr(
        checked, "check_fits", lambda needs, free, where: found.append({n.owner: n.nbytes for n in needs})
    )
    return found


def held(counted: list[dict[str, int]], *settings: str) -> int:
    """The bytes that a run on the CPU certainly takes."""
    counted.clear()
    assert check_memory(config(*settings), ROLES, LEARNERS) == ""
    (machine,) = counted
    return sum(machine.values())


def check_memory(config: Config, roles: Sequence[str], trained: Collection[str]) -> str:
    """Returns what a plan warns of."""
    planned = checked.plan_run(config, roles, trained)
    return "" if planned is None else planned.warning


def test_each_owner_is_counted_once(counted: list[dict[str, int]]) -> None:
    """Of two learners one is in its update, and the other has no gradients then."""
    rows = 4 * ROW_BYTES
    learners, reference = (16 + 12) * COUNT, 4 * COUNT
    assert held(counted) == rows + learners + reference  # one storage for trainer and sampler
    wide = held(counted, "actor.param_dtype=float64")  # of which the sampler has a copy in float32
    assert wide == rows + 32 * COUNT + 12 * COUNT + reference + 4 * COUNT
    assert held(counted, "actor.offload_optimizer=true") == rows + learners + reference  # nowhere to go
    small = held(counted, "actor.optimizer.moments=8bit")
    scales = 2 * COUNT * 4 // 128
    assert small == rows + (4 + 2) * COUNT + scales + 16 * COUNT + reference  # whichever updates
    own = held(counted, "trainer.max_staleness=1")
    assert own == rows + learners + reference + 4 * COUNT
    three = held(counted, "rollout.replicas=3")
    assert three == rows + learners + reference + 3 * (4 * COUNT + PROCESS_BYTES)


ALL = ("actor.offload_params=true", "actor.offload_optimizer=true", "critic.offload_optimizer=true")


@pytest.mark.parametrize(
    ("settings", "at_rest", "there"),
    [
        ((), {}, {"actor": 16, "critic": 12, "reference": 4}),
        # How much of moments that rest passes at one time depends on tensors: none of it is certain.
        (ALL[1:2], {"actor": 8}, {"actor": 8, "critic": 12, "reference": 4}),
        (ALL[1:], {"actor": 8, "critic": 8}, {"actor": 8, "critic": 4, "reference": 4}),
        (ALL, {"actor": 12, "critic": 8}, {"actor": 8, "critic": 4, "reference": 4}),
        # Its scores need as much as an update does.
        (("reference.offload_params=true",), {"reference": 4}, {"actor": 12, "critic": 12, "reference": 4}),
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
    host, device = counted
    rests = {name.removesuffix(" at rest"): size for name, size in host.items() if name.endswith(" at rest")}
    assert rests == {role: size * COUNT for role, size in at_rest.items()}
    found = {role: sum(size for name, size in device.items() if name.split()[0] == role) for role in there}
    assert found == {role: size * COUNT for role, size in there.items()}


def test_an_engine_that_gives_its_weights_up_is_not_there_in_an_update() -> None:
    """vLLM's do when it sleeps; the native engine's stay."""
    vllm = "rollout.engine={name: vllm, enable_sleep_mode: true}"
    cases = ((vllm, "rollout.sleep=true"), (vllm,), ("rollout.engine.process=own", "rollout.sleep=true"))
    shape, lengths = only_counted(COUNT, "few"), Lengths(8, 8, "")
    plans = [
        plan_memory(runs_of(config("cluster.device=cuda", *one), ROLES, LEARNERS, lambda _: shape, lengths))
        for one in cases
    ]
    there = ["rollout weights" in plan.pools[0].phases["update"] for plan in plans]
    assert there == [False, True, True]


def test_a_run_that_may_not_fit_warns_and_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ever more memory: refused, then a warning, then nothing; cluster.plan says what comes of each."""
    monkeypatch.setattr(checked, "count_parameters", count_parameters)
    tiny = [f"model.config.{key}={value}" for key, value in TINY.items()]

    def said(free: int, mode: str) -> str:
        monkeypatch.setattr(checked, "reachable_bytes", lambda: free)
        try:
            return check_memory(config(*tiny, f"cluster.plan={mode}"), ROLES, LEARNERS).split(" hold")[0][:30]
        except ConfigError as error:
            return f"refused: {error.key}"

    seen = list(dict.fromkeys(said(1 << bits, "refuse") for bits in range(16, 36)))
    assert seen[0].startswith("refused: ")
    assert [one.startswith("this run will probably") for one in seen[-2:]] == [True, False]
    assert seen[-1] == ""
    assert said(1 << 16, "warn").startswith("this run will")
    assert said(1 << 16, "off") == ""


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
