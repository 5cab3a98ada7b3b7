"""The console: exact plain lines, panels that hold what they should, and nothing that crashes it."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console as RichConsole

from rondo.tracking import BeforeAfter, Console, Header, Report, Sample
from rondo.tracking.pictures import Picture
from rondo.tracking.shown import RunView
from rondo.tracking.text import CleanConsole, format_duration, format_number, shorten, sparkline
from rondo.tracking.view import render_run

HEADER = Header("Qwen3, 0.85 M parameters", "cpu", "grpo", "runs/x")
FULL = {
    "reward/mean": 0.4123,
    "rollout/response_length": 34.52,
    "actor/kl_loss": 0.0012,
    "actor/ppo_kl": 3e-4,
    "actor/entropy": 1.2,
    "actor/grad_norm": 0.45,
    "rollout/log_prob_gap": 2e-7,
    "perf/generated_tokens_per_s": 32100.0,
    "timing/generate_s": 2.0,
    "timing/update_actor_s": 1.0,
    "timing/step_s": 4.0,
}
EVIL = Sample("[red]p[/red]", "[/nope] \x1b[2J\x07 [link=http://x]y", 1.0, "[bold]")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def recording(mode: str, width: int = 100, encoding: str = "utf-8") -> tuple[Console, RichConsole, Clock]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    out = CleanConsole(record=True, width=width, file=file, force_terminal=mode == "live", highlight=False)
    clock = Clock()
    return Console(mode, out=out, clock=clock), out, clock  # type: ignore[arg-type]


def test_a_plain_step_is_one_exact_line() -> None:
    console, out, clock = recording("auto")
    assert console.mode == "plain"  # a file is no terminal
    console.start(HEADER, 150)
    clock.now = 8.0
    console.step(4, FULL)
    assert out.export_text().splitlines() == [
        "rondo: grpo, Qwen3, 0.85 M parameters, cpu, 150 steps, in runs/x",
        "step   4/150  reward 0.412  len 34.5  KL(ref) 1.2e-03  KL(old) 3.0e-04  ent 1.200  grad 0.450  "
        "gap 2.0e-07  "
        "32.1k tok/s  left 4:52",
    ]


def test_a_run_without_a_reference_shows_no_kl_to_it() -> None:
    """actor/ppo_kl is to the policy before the update: 0, and not shown, with one optimizer step a batch."""
    console, out, _ = recording("plain")
    console.start(HEADER, 9)
    console.step(1, {"reward/mean": 0.5, "actor/ppo_kl": 0.0})
    console.step(2, {"reward/mean": 0.5, "actor/ppo_kl": 0.25})
    lines = out.export_text().splitlines()
    assert lines[1].startswith("step 1/9  reward 0.500  left")
    assert lines[2].startswith("step 2/9  reward 0.500  KL(old) 0.250  left")


def test_what_an_asynchronous_run_shows() -> None:
    console, out, _ = recording("plain")
    console.start(HEADER, 150)
    metrics = {"reward/mean": 0.5, "buffer/staleness_mean": 0.0, "buffer/in_flight": 24.0}
    console.step(1, metrics)
    console.step(2, metrics | {"buffer/staleness_mean": 1.25, "timing/weight_sync_s": 0.031})
    lines = out.export_text().splitlines()
    assert lines[1].startswith("step   1/150  reward 0.500  left")  # nothing stale yet
    assert lines[2].startswith("step   2/150  reward 0.500  stale 1.250  left")
    assert console._view is not None
    panel, wide, _ = recording("plain")
    wide.print(render_run(console._view, [], None, 100))
    text = wide.export_text()
    assert "groups in flight" in text
    assert "24" in text
    assert "weight sync, s" in text
    assert panel.mode == "plain"


def test_time_left_after_a_resume_counts_this_session_only() -> None:
    console, out, clock = recording("plain")
    console.start(HEADER, 100, first_step=90)
    clock.now = 10.0
    console.step(95, {})
    assert out.export_text(clear=False).splitlines()[-1] == "step  95/100  left 0:10"
    console.end_stage()
    assert out.export_text().splitlines()[-1] == "grpo: 5 steps, to step 95, in 0:10"


def test_sft_shows_its_loss() -> None:
    console, out, _ = recording("plain")
    console.start(HEADER, 10, kind="sft")
    rates = {"perf/row_tokens_per_s": 500.0, "perf/trained_tokens_per_s": 0.3}
    console.step(1, {"sft/loss": 2.5, "actor/lr": 1e-3, **rates})
    console.step(2, {"sft/loss": 1.25})
    console.close()
    console.end_stage()
    lines = out.export_text().splitlines()
    assert lines[1] == "step  1/10  loss 2.500  lr 1.0e-03  500 tok/s (prompts too)  left 0:00"
    assert lines[-1] == "grpo: 2 steps in 0:00, loss 2.500 to 1.250"


def test_alarms_are_loud_in_every_mode() -> None:
    metrics = {"actor/skipped_steps": 1.0, "reward/failed_share": 0.25, "not_finite": {"actor/kl": "nan"}}
    for mode in ("plain", "off", "live"):
        console, out, _ = recording(mode)
        console.start(HEADER, 10)
        console.step(3, metrics)
        console.step(4, metrics)
        console.close()
        text = out.export_text()
        assert "optimizer step(s) skipped" in text
        assert "25% of the trajectories were not scored" in text
        assert "not finite: actor/kl" in text
        if mode == "plain":
            assert "WARNING step 3: 25%" in text
        if mode == "live":
            assert "(2 times)" in text


@pytest.mark.parametrize("mode", ["plain", "live", "off"])
@pytest.mark.parametrize("width", [30, 100])
@pytest.mark.parametrize(
    "metrics",
    [{}, {"reward/mean": None}, {"reward/mean": "x", "timing/step_s": 0.0}, {"actor/grad_norm": 0.0}, FULL],
)
def test_missing_metrics_and_hostile_text_never_crash(mode: str, width: int, metrics: dict[str, Any]) -> None:
    console, out, _ = recording(mode, width)
    with console, console.phase("loading [x]"):
        console.step(0, metrics)  # before any stage
        console.log_samples(0, [EVIL])
        console.start(HEADER, None)
        console.step(1, metrics)
        console.log_samples(1, [EVIL])
        console.log_samples(2, [])
        console.evaluation(1, {"eval/greedy/reward": 0.5, "eval/x": None})
        console.warn("[/oops]")
        console.note("[/note] [red]")
        console.report(Report({"a": 1.0}, {"b": 2.0}, [BeforeAfter(None, EVIL), BeforeAfter(None, None)]))
        console.report(Report())
    text = out.export_text(styles=True)
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    if mode == "plain" and width == 100:
        assert "[red]p[/red]" in text
        assert "[/note] [red]" in text
        assert "\\x1b[2J" in text


def test_the_live_panel_holds_everything_in_100_columns() -> None:
    view = RunView(HEADER, 150)
    for step in range(1, 43):
        view.add(step, FULL | {"reward/mean": step / 100})
    view.sample, view.elapsed, view.left = (42, EVIL), 21.0, 54.0
    out = RichConsole(record=True, width=100, file=io.StringIO(), force_terminal=True)
    out.print(render_run(view, ["something is wrong"], None))
    text = out.export_text()
    assert all(len(line) == 100 for line in text.splitlines())
    for piece in ("grpo", "0.85 M", "cpu", "step 42/150", "28%", "0:21 gone, 0:54 left", "0.420", "34.5"):
        assert piece in text
    for piece in (
        "▁▁▁▂▂▃▃▃▄▄▄▅▅▅▆▆▇▇▇█"[:3],
        "generate 50%",
        "update actor 25%",
        "other 25%",
        "! something is wrong",
    ):
        assert piece in text
    assert "[/nope] \\x1b[2J" in text
    assert "staleness" not in text


def test_a_terminal_without_unicode_gets_ascii() -> None:
    console, out, _ = recording("auto", encoding="ascii")
    console.start(HEADER, 1)
    console.step(1, FULL)
    console.log_samples(1, [Sample("π → ∞", "é" * 500, 1.0)])
    console.report(
        Report({"a": 1.0}, {"a": 2.0}, [BeforeAfter(Sample("é" * 300, "π"), Sample("é", "∞"))], {"x": "→"})
    )
    out.export_text().encode("ascii")


def test_the_final_table_shows_before_after_and_change() -> None:
    console, out, _ = recording("plain")
    report = Report(
        {"greedy accuracy": 0.148}, {"greedy accuracy": 0.871, "mean@4": 0.5}, facts={"wall": "1:52"}
    )
    console.report(report)
    rows = [line.split() for line in out.export_text().splitlines()]
    assert ["greedy", "accuracy", "0.148", "0.871", "+0.723"] in rows
    assert ["mean@4", "-", "0.500"] in rows
    assert ["wall", "1:52"] in rows


def test_an_answer_stands_beside_its_picture() -> None:
    console, out, _ = recording("plain")
    picture = Picture("/data/[red]\x1b[2J.png", 9, 1)
    pair = BeforeAfter(
        Sample("<image> Which?", "left", 0.0), Sample("<image> Which?", "up", 1.0, "", [picture])
    )
    console.report(Report(samples=[pair]))
    shown = re.sub(r"\s+", "", out.export_text())
    assert "image1·9tokens" in shown
    assert "[red]" in shown
    assert "\\x1b[2J" in shown


def test_samples_are_limited() -> None:
    console, out, _ = recording("plain")
    console.samples = 1
    pairs = [
        BeforeAfter(Sample("p1", "b1"), Sample("p1", "a1")),
        BeforeAfter(Sample("p2", "b2"), Sample("p2", "a2")),
    ]
    console.report(Report(samples=pairs))
    text = out.export_text()
    assert "a1" in text
    assert "a2" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0.000"),
        (0.41234, "0.412"),
        (-0.5, "-0.500"),
        (0.0012, "1.2e-03"),
        (9.996, "10.0"),
        (34.52, "34.5"),
        (99.96, "100"),
        (3200, "3200"),
        (12345, "12.3k"),
        (999_600, "1.0M"),
        (123_456_789, "123M"),
        (-12345, "-12.3k"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_durations() -> None:
    assert [format_duration(s) for s in (0, 7.4, 750, 11100, 187200)] == [
        "0:00",
        "0:07",
        "12:30",
        "3:05:00",
        "2d 04:00:00",
    ]


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5]) == "▄▄▄"
    assert sparkline([1]) == ""
    assert sparkline([0, float("nan"), 1]) == "▁█"
    assert len(sparkline(list(range(1000)), 20)) == 20


def test_a_text_that_is_shortened_keeps_its_end() -> None:
    assert shorten("x" * 50 + "#### 42", 20).endswith("#### 42"[-8:])
    assert len(shorten("x" * 500, 100)) == 100
