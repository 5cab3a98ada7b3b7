"""The page in a real Chromium: clicks, filters, keys, hostile text, both themes and widths, a run that goes
on.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import viewing
from rondo.tracking.metrics import metrics_line
from rondo.tracking.trajectories import read_trajectories
from rondo_view.index import SAID
from rondo_view.server import Server
from rondo_worlds.chromium import Page, find_chromium
from tests.installed import needs_programs
from tests.rondo_view.conftest import ROWS, STEPS

needs_programs("chromium")
pytestmark = pytest.mark.slow

# Before anything else of the page: what goes wrong in it.
WATCH = """
window.wrong = [];
console.error = (...said) => window.wrong.push("console: " + said.join(" "));
addEventListener("unhandledrejection", event => window.wrong.push("rejected: " + event.reason));
addEventListener("error", event => window.wrong.push(event.message || "not loaded"), true);
addEventListener("securitypolicyviolation", event => window.wrong.push("refused: " + event.blockedURI));
"""
HOSTILE = '</span><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><b onclick=1> &lt;'


class Looked:
    """A page that a server shows."""

    def __init__(self, page: Page, server: Server) -> None:
        self.page, self.server = page, server

    def open(self, address: str = "") -> None:
        """Loads the page anew at a view's address."""
        self.page.open("about:blank")
        self.page.open(f"{self.server.address}{address}")

    def until(self, script: str, seconds: float = 30) -> Any:
        """Waits until an expression is true; returns its value, of an element true."""
        end, script = time.monotonic() + seconds, f"(found => found instanceof Node || found)({script})"
        while not (value := self.page.evaluate(script)):
            assert time.monotonic() < end, (script, self.text(), self.page.evaluate("window.wrong"))
            time.sleep(0.02)
        return value

    def text(self) -> str:
        """What the view says."""
        return str(self.page.evaluate("document.querySelector('main').innerText"))

    def click(self, selector: str) -> None:
        """Clicks in the middle of the first element that is like that."""
        found = self.until(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); if (!node) return null; "
            "node.scrollIntoView({block: 'center'}); const at = node.getClientRects()[0]; "
            "return [at.x + Math.min(at.width / 2, 20), at.y + at.height / 2]; })()"
        )
        self.page.click(*found)

    def key(self, key: str) -> None:
        """Presses a key."""
        code = {"Tab": 9, "Enter": 13}.get(key, ord(key[0]))
        text = {"Tab": "", "Enter": "\r"}.get(key, key)
        for kind in ("keyDown", "keyUp"):
            self.page.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode=code,
            )

    def resize(self, width: int, theme: str = "light") -> None:
        """Makes the window another one."""
        self.page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.page.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}]
        )

    def fine(self) -> None:
        """Nothing went wrong, and nothing was run that a text brought."""
        assert self.page.evaluate("window.wrong") == []
        assert self.page.evaluate("window.hacked ?? null") is None


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    made = Page(find_chromium("chromium"))
    made.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    yield made
    made.close()


def looked(page: Page, *folders: Path) -> Iterator[Looked]:
    server = Server([str(folder) for folder in folders])
    yield Looked(page, server)
    server.close()


@pytest.fixture
def of_made(page: Page, made: Path) -> Iterator[Looked]:
    for found in looked(page, made):
        found.resize(1280)
        yield found


@pytest.fixture
def of_trained(page: Page, trained: Path) -> Iterator[Looked]:
    for found in looked(page, trained.parent):
        found.resize(1280)
        yield found


TOTAL = "document.querySelector('[role=status] b')?.textContent"


def test_from_a_run_to_a_token_by_clicks(of_made: Looked, made: Path) -> None:
    of_made.open()
    of_made.until("document.querySelectorAll('.plot .main-svg').length > 2")
    of_made.click("tbody a")
    of_made.until(f"{TOTAL} === '{STEPS * ROWS} trajectories'")
    wanted = [one for step in range(1, STEPS + 1) for one in read_trajectories(made, step=step, number=99)]
    few = [one for one in wanted if one.reward >= 0.9 and "answer: 5" in one.said[:SAID].lower()]
    of_made.click("input[name=least]")
    of_made.page.type(".9")
    of_made.click("input[type=search]")
    of_made.page.type("ANSWER: 5")
    of_made.until(f"{TOTAL} === '{len(few)} trajectories'")
    assert of_made.page.evaluate("location.hash").endswith(
        "?run=" + str(made).replace("/", "%2F") + "&text=ANSWER%3A+5&least=.9"
    )
    best = max(few, key=lambda one: one.reward)
    choose = "order.value = 'best'; order.dispatchEvent(new Event('change'))"
    of_made.page.evaluate(f"(order => {{ {choose} }})(document.querySelector('select[name=order]'))")
    of_made.until(
        f"document.querySelector('tbody tr td:nth-child(2)').textContent === '{float(f'{best.reward:.4g}')}'"
    )
    of_made.click("tbody tr td.text:last-child a")
    of_made.until(
        f"document.querySelector('h1')?.textContent.startsWith('Step {best.step} · {best.prompt_id}')"
    )
    spans = of_made.until("document.querySelectorAll('.tokens span').length")
    assert spans == best.tokens
    address = of_made.page.evaluate("location.href")
    of_made.page.open("about:blank")
    of_made.page.open(address)  # each view has an address of its own
    of_made.until("document.querySelectorAll('.tokens span').length")
    of_made.click(".bar a:nth-child(2)")
    group = read_trajectories(made, step=best.step, prompt=best.prompt_id, order="best", number=99)
    of_made.until(f"document.querySelectorAll('.card').length === {len(group)}")
    cards = of_made.page.evaluate("[...document.querySelectorAll('.card > a')].map(card => card.textContent)")
    assert cards == [f"sample {one.sample_index}" for one in group]
    of_made.page.evaluate("history.back()")
    of_made.until("document.querySelectorAll('.tokens span').length")
    of_made.fine()


def test_tokens_are_coloured_by_what_was_kept(of_trained: Looked, trained: Path) -> None:
    row = pq.read_table(trained / "rollouts" / "step-000002.parquet").to_pylist()[0]
    of_trained.open(f"#/trajectory?run={trained}&step=2&id={row['trajectory_id']}&by=log_prob")
    of_trained.until("document.querySelectorAll('.tokens span').length")
    shares = [min(1.0, -value / 5) for value in row["rollout_log_probs"]]
    styles = of_trained.page.evaluate(
        "[...document.querySelectorAll('.tokens span')].map(span => span.getAttribute('style'))"
    )
    assert styles == [
        f"background: rgba(var(--{'bad' if share else 'good'}), {0.75 * share:.3f})" for share in shares
    ]
    titles = of_trained.page.evaluate(
        "[...document.querySelectorAll('.tokens span')].map(span => span.title)"
    )
    assert titles[0].split("\n")[0] == f"token {row['response_ids'][0]}"
    assert {line.split()[0] for line in titles[0].split("\n")} == {
        "token",
        "log_prob",
        "gap",
        "advantages",
        "version",
    }
    ways = of_trained.page.evaluate("[...document.querySelector('select').options].map(one => one.value)")
    assert ways == ["log_prob", "gap", "advantages", "version", "old_log_probs"]
    assert "not kept" not in of_trained.text()
    of_trained.fine()


def test_what_was_not_kept_is_said(of_made: Looked, made: Path) -> None:
    of_made.open(f"#/trajectory?run={made}&step=2&id=train/made/2/0&by=gap")
    of_made.until("document.querySelectorAll('.tokens span').length")
    assert "gap and advantages: not kept (tracking.token_columns keeps them)" in of_made.text()
    assert (
        "The tokens' numbers: no tokenizer.json lies in its export or its model's folder." in of_made.text()
    )
    of_made.open(f"#/trajectory?run={made}&step=99&id=x")
    of_made.until("document.querySelector('[role=alert]')")
    assert of_made.text() == f"{made}: has no rollouts of step 99; they are gone, or were never kept"
    of_made.open("#/nonsense")
    of_made.until("document.querySelector('[role=alert]')")
    assert of_made.text() == "nonsense: there is no view of that name"
    of_made.fine()


def test_evaluations_and_the_timeline(of_trained: Looked, trained: Path) -> None:
    of_trained.open(f"#/evaluations?run={trained}")
    of_trained.until("document.querySelector('tbody')")
    before = read_trajectories(trained, step=0, evaluation=True, number=1)[0]
    said = "cell => (cell.querySelector('.said') ?? cell).textContent"
    cells = of_trained.page.evaluate(f"[...document.querySelectorAll('tbody tr:first-child td')].map({said})")
    assert cells[0] == before.prompt
    assert cells[1] == before.said
    of_trained.click("nav a:nth-child(4)")
    of_trained.until("document.querySelectorAll('.barlayer .bars').length")
    of_trained.click("[data-key=k]")
    of_trained.until("document.querySelector('h1').textContent.startsWith('Step 2')")
    of_trained.fine()


def test_with_the_keyboard_alone(of_made: Looked, made: Path) -> None:
    of_made.open()
    of_made.until("document.querySelectorAll('.plot .main-svg').length > 2")
    focused = "document.activeElement.textContent"
    for _ in range(20):
        of_made.key("Tab")
        if of_made.page.evaluate(focused) == "Rollouts":
            break
    of_made.key("Enter")
    of_made.until(f"{TOTAL} === '{STEPS * ROWS} trajectories'")
    of_made.key("/")
    assert of_made.page.evaluate("document.activeElement.name") == "text"
    of_made.page.type("answer: 50")
    of_made.until(f"({TOTAL}) !== '{STEPS * ROWS} trajectories'")
    for _ in range(40):
        of_made.key("Tab")
        if of_made.page.evaluate("document.activeElement.matches('td.text:last-child a')"):
            break
    of_made.key("Enter")
    heading = "document.querySelector('h1').textContent"
    first = of_made.until(f"document.querySelectorAll('.tokens span').length && {heading}")
    keys = "jk" if of_made.until("document.querySelector('[data-key]')?.dataset.key") == "j" else "kj"
    of_made.key(keys[0])  # the next answer of the group, and back
    of_made.until(f"{heading} !== {json.dumps(first)}")
    of_made.key(keys[1])
    of_made.until(f"{heading} === {json.dumps(first)}")
    of_made.fine()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_each_view_fits_a_phone_and_a_screen_by_day_and_night(
    of_trained: Looked, trained: Path, width: int, theme: str
) -> None:
    of_trained.resize(width, theme)
    name = read_trajectories(trained, step=1, number=1)[0]
    one = f"run={trained}&step=1"
    views = {
        "": "document.querySelectorAll('.plot .main-svg').length > 2",
        f"#/rollouts?run={trained}": "document.querySelector('tbody tr')",
        f"#/trajectory?{one}&id={name.trajectory_id}": "document.querySelector('.tokens span')",
        f"#/group?{one}&prompt={name.prompt_id}": "document.querySelector('.card')",
        f"#/evaluations?run={trained}": "document.querySelector('tbody tr')",
        f"#/timeline?run={trained}&step=1": "document.querySelector('.barlayer .bars')",
    }
    for view, there in views.items():
        of_trained.open(view)
        of_trained.until(there)
        wider = of_trained.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, (view, wider)
        of_trained.fine()
    back, text = of_trained.page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (back, text) == {
        "light": ("rgb(255, 255, 255)", "rgb(27, 31, 36)"),
        "dark": ("rgb(20, 23, 28)", "rgb(228, 231, 235)"),
    }[theme]


def test_what_others_wrote_is_text(page: Page, tmp_path: Path) -> None:
    run = tmp_path / "<b>run<img src=x onerror=alert(1)>"
    (run / "rollouts").mkdir(parents=True)
    (run / "evaluations").mkdir()
    (run / "config.yaml").write_text(json.dumps({"data": {"train": [{"path": HOSTILE}]}}))
    (run / "metrics.jsonl").write_text(metrics_line(1, {"reward/mean": 1.0, f"reward/{HOSTILE}": 2.0}) + "\n")
    table = viewing.table(1, 8)
    for column in ("prompt_text", "text", "transcript", "source", "failure"):
        place = table.schema.get_field_index(column)
        table = table.set_column(place, column, pa.array([f"{HOSTILE}{row}" for row in range(8)]))
    names = pa.array([f"{HOSTILE}{row}" for row in range(8)])
    table = table.set_column(table.schema.get_field_index("trajectory_id"), "trajectory_id", names)
    table = table.set_column(table.schema.get_field_index("prompt_id"), "prompt_id", pa.array([HOSTILE] * 8))
    pq.write_table(table, run / "rollouts" / "step-000001.parquet")
    answer = {
        "prompt_id": HOSTILE, "sample_index": 0, "prompt": HOSTILE, "text": HOSTILE, "reward": 1.0,
        "scores": {HOSTILE: 1.0}, "outcome": "scored", "finish_reason": HOSTILE, "response_length": 1,
    }  # fmt: skip
    (run / "evaluations" / "step-000001.jsonl").write_text(json.dumps(answer) + "\n")
    for found in looked(page, tmp_path):
        found.resize(1280)
        found.open()
        found.until("document.querySelectorAll('.plot .main-svg').length")
        assert str(run) in found.text()
        found.click("summary")
        assert HOSTILE in found.text()  # a setting
        found.click("tbody a")
        found.until("document.querySelector('tbody td.text a')")
        assert HOSTILE in found.text()
        found.click("tbody td.text:last-child a")
        found.until("document.querySelector('.tokens span')")
        assert HOSTILE in found.text()
        found.click(".bar a:nth-child(2)")
        found.until("document.querySelectorAll('.card').length === 8")
        assert HOSTILE in found.text()
        found.click("nav a:nth-child(3)")
        found.until("document.querySelector('tbody tr')")
        assert HOSTILE in found.text()
        found.fine()
        assert (
            found.page.evaluate("document.querySelectorAll('main img, main script, main b[onclick]').length")
            == 0
        )


def test_a_run_that_goes_on_is_shown_as_it_goes(page: Page, made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    for found in looked(page, run):
        found.resize(1280)
        found.open()
        points = "document.querySelector('.plot')?.data?.[0]?.x?.length"
        found.until(f"{points} === {STEPS}")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(metrics_line(STEPS + 1, {"reward/mean": 0.5}) + "\n")
        pq.write_table(viewing.table(STEPS + 1, 8), run / "rollouts" / f"step-{STEPS + 1:06d}.parquet")
        found.until(f"{points} === {STEPS + 1}")
        found.until(f"document.querySelector('tbody tr').innerText.includes('{STEPS + 1}/{STEPS}')")
        found.open(f"#/rollouts?run={run}")
        found.until(f"{TOTAL} === '{STEPS * ROWS + 8} trajectories'")
        pq.write_table(viewing.table(STEPS + 2, 8), run / "rollouts" / f"step-{STEPS + 2:06d}.parquet")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(metrics_line(STEPS + 2, {"reward/mean": 0.6}) + "\n")
        found.until(f"{TOTAL} === '{STEPS * ROWS + 16} trajectories'")
        found.fine()
        found.server.close()
        found.until("document.querySelector('#live').textContent === 'the server has ended'")
