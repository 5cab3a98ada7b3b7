"""How fast steps are, by hand; and a real run beside its plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rondo.config import Config, load
from rondo.core.types import StepStats
from rondo.planning.devices import DeviceRow, Reached, device_like, find_device
from rondo.planning.placement import Placement
from rondo.planning.plan import plan_memory
from rondo.planning.roles import ON_CARD, config_for
from rondo.planning.runs import Lengths, runs_of, shapes_of
from rondo.planning.step_time import plan_time
from rondo.planning.time import model_flops
from rondo.trainers.loop import PlannedRun, Speed
from rondo.trainers.program import count_rows
from tests.trainers.conftest import RECIPE, inline

SETTINGS = (
    "model.path=Qwen2.5-0.5B",
    "trainer.total_steps=1",
    "data.batch_size=2",
    "rollout={n: 4, max_tokens: 64, engine: {process: own}}",
    "data.max_prompt_tokens=32",
)
CARD = DeviceRow("card", 1 << 40, 1e12, 1e11, 1e10, 1e9, 1e9, 1e9, 8, "here", reached=Reached())


def config(*settings: str) -> Config:
    return config_for(load([], [*SETTINGS, *settings]).config, ON_CARD)


def planned(one: Config, *, on_host: bool = False) -> PlannedRun:
    lengths = Lengths(32, 64, "")
    runs = runs_of(one, ("actor", "rollout"), ("actor",), shapes_of(one), lengths, on_host=on_host)
    return PlannedRun(runs, plan_memory(runs))


def speed(one: Config, device: DeviceRow | None = CARD, **more: Any) -> Speed:
    return Speed(one, shapes_of(one)("actor"), Placement({"all": (0, 1)}), device, **more)


def test_rows_are_counted_once_per_epoch() -> None:
    stats = StepStats()
    count_rows(stats, np.array([3, 5]), 2)
    assert stats.values() == {"perf/row_tokens": 16.0, "perf/row_pairs": 2 * (9 + 25) / 2}


def test_utilisation_is_operations_of_the_device_that_learns() -> None:
    one = config("cluster={backend: process, devices: 2}")
    metrics = {"timing/step_s": 4.0, "timing/update_actor_s": 2.0}
    found = speed(one).of_step(metrics, 100, 700)
    flops = model_flops(shapes_of(one)("actor"), 100, 700)
    assert found == {
        "perf/tokens_per_s_per_device": 100 / 4 / 2,
        "perf/model_flops_per_s": flops / 2 / 2,
        "perf/mfu": pytest.approx(flops / 2 / 2 / 1e12),
    }
    assert "perf/mfu" not in speed(one, None).of_step(metrics, 100, 700)
    wide = config("cluster={backend: process, devices: 2}", "actor.compute_dtype=float32")
    assert speed(wide).of_step(metrics, 100, 700)["perf/mfu"] == pytest.approx(flops / 2 / 2 / 1e11)


def test_the_first_step_stands_beside_its_plan() -> None:
    """Seconds are planned anew with the lengths that were, so that only the formulas' error is left."""
    one = config()
    plan = planned(one)
    measure = speed(one, planned=plan)
    measure.take_lengths(np.array([10, 10]), np.array([20, 20]))
    lengths = Lengths(10, 20, "", (20,))
    runs = runs_of(one, ("actor", "rollout"), ("actor",), shapes_of(one), lengths)
    time = plan_time(runs, CARD)
    seconds = {"generate": 2.0, "update_actor": time.seconds("update"), "prepare": time.seconds("score")}
    metrics = {f"timing/{name}_s": value for name, value in seconds.items()}
    metrics |= {"timing/weight_sync_s": time.seconds("sync"), "perf/peak_memory_bytes": 2.0**31}
    found, line = measure.beside_plan(metrics)
    assert found["plan/update_s"] == pytest.approx(time.seconds("update"))
    measured = time.step - time.seconds("generate") + 2.0
    assert found["plan/error_time"] == pytest.approx(time.step / measured - 1)
    assert "generate the furthest" in line
    # The engine has a process of its own: what is in the trainer's is the update without it.
    held = plan.memory.pools[0].phases["update"]
    own = sum(size.expected for owner, size in held.items() if owner.startswith("actor "))
    assert found["plan/memory_bytes"] == own
    assert found["plan/error_memory"] == pytest.approx(own / 2.0**31 - 1)
    assert measure.beside_plan(metrics) == ({}, "")


def test_a_plan_is_said_in_a_line() -> None:
    one = config()
    plan = planned(one)
    time, held = plan_time(plan.runs, CARD), plan.memory.pools[0]
    said = speed(one, planned=plan).expected()
    assert f"{held.total(held.highest).expected / 2**30:.1f} GiB of each device in {held.highest}" in said
    assert f"steps of at most {time.step:.1f} s (generate {time.seconds('generate'):.1f}" in said
    assert (speed(one, None, planned=plan).expected(), speed(one).expected()) == ("", "")


def test_on_a_host_it_is_what_the_process_has_more_than_before() -> None:
    """But for models so small that its libraries are most of it."""
    plan = planned(config(), on_host=True)
    measure = speed(config(), None, planned=plan)
    found, line = measure.beside_plan({"perf/peak_memory_bytes": measure._before + 4.0 * 2**30})
    held = plan.memory.of_machine(lambda pool: pool.highest)
    expected = sum(size.expected for size in held.values())
    assert found == {"plan/memory_bytes": expected, "plan/error_memory": expected / 2**32 - 1}
    assert line.startswith("planned beside measured: memory ")
    tiny = "model.override={num_hidden_layers: 1, vocab_size: 100, hidden_size: 64, intermediate_size: 64}"
    small = config(tiny, "rollout.engine.process=auto")
    assert speed(small, None, planned=planned(small, on_host=True)).beside_plan(
        {"perf/peak_memory_bytes": 2.0**40}
    ) == ({}, "")


def test_the_owner_that_was_off_is_named() -> None:
    metrics = {
        "perf/peak_memory_bytes": 1.0,
        "perf/actor_update_weights_planned_bytes": 10.0,
        "perf/actor_update_weights_bytes": 10.0,
        "perf/actor_update_moments_planned_bytes": 10.0,
        "perf/actor_update_moments_bytes": 4.0,
    }
    assert (
        "(actor update moments the furthest)"
        in speed(config(), planned=planned(config())).beside_plan(metrics)[1]
    )


def test_what_nobody_waits_for_is_not_compared() -> None:
    """Generation beside training is measured as the wait for it; the whole step is what it is."""
    one = config("trainer.max_staleness=2")
    found, _ = speed(one, planned=planned(one)).beside_plan({"timing/step_s": 8.0, "timing/generate_s": 1.0})
    assert "plan/generate_s" not in found
    assert found["plan/error_time"] == pytest.approx(found["plan/step_s"] / 8 - 1)


def test_devices_are_known_by_name_and_memory() -> None:
    def named(name: str, gib: float) -> str | None:
        row = device_like(name, int(gib * (1 << 30)))
        return None if row is None else row.name

    assert named("NVIDIA H100 80GB HBM3, 79.1 GiB, compute capability 9.0", 79.1) == "h100"
    assert named("NVIDIA A100-SXM4-40GB", 39.4) == "a100-40"
    assert named("NVIDIA A100-SXM4-80GB", 79.3) == "a100"
    assert named("NVIDIA GeForce RTX 4090", 23.5) == "rtx4090"
    assert named("NVIDIA GB200", 185.0) == "gb200"
    assert named("AMD Instinct MI300X", 191.7) == "mi300x"
    # A slice of one, and cards that only share the name.
    assert named("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8) is None
    assert named("NVIDIA H100 PCIe", 79.2) is None
    assert named("NVIDIA GH200 480GB", 95.0) is None
    assert named("NVIDIA H20", 95.0) == "h20"


ROW = "name\tmemory_gib\tflops\tflops32\tbandwidth\tlink\tnetwork\thost\ttogether\tsource\tlaunch\tkind\n"
ROW += "cpu\t16\t0.02\t0.04\t8\t2\t1\t8\t8\tmeasured\t5\thost\n"


@pytest.mark.slow
def test_a_run_says_how_far_off_its_plan_was(tmp_path: Path) -> None:
    file, run, recipe = tmp_path / "cpu.tsv", tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    file.write_text(ROW, encoding="utf-8")
    assert find_device(str(file)).flops_of(4) == 0.04e12
    settings = ("trainer.total_steps=2", f"trainer.run_dir={run}", f"cluster.card={file}")
    told = inline("train", str(recipe), *settings, "tracking.console=plain").stdout
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    first, second = (line for line in lines if "perf/mfu" in line)
    assert ("planned: " in told, "planned beside measured: " in told) == (True, True)
    assert first["plan/error_time"] > -1
    assert first["perf/mfu"] == pytest.approx(first["perf/model_flops_per_s"] / 0.04e12)
    assert not [name for name in second if name.startswith("plan/")]


def test_a_card_that_nobody_knows_is_refused_at_the_start() -> None:
    failed = inline("check", "quickstart", "cluster.card=h1000", check=False)
    assert failed.returncode == 2
    assert "cluster.card" in failed.stderr
    assert "there is no card 'h1000'" in failed.stderr
