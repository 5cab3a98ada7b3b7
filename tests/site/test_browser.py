"""The built site in a real Chromium: no page is wider than its window, says an error or asks another host;
the search finds what people look for.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rondo_worlds.chromium import Page, find_chromium
from tests.installed import needs_programs
from tests.site.building import built

needs_programs("chromium")
pytestmark = pytest.mark.slow

WIDTHS = (1280, 390)
# Before anything else of a page: what goes wrong in it, and what could not be loaded.
WATCH = """
window.wrong = [];
console.error = (...said) => window.wrong.push("console: " + said.join(" "));
addEventListener("unhandledrejection", event => window.wrong.push("rejected: " + event.reason));
addEventListener("error", event => {
  window.wrong.push(event.message || "not loaded: " + (event.target.src || event.target.href));
}, true);
"""
# Mathematics is set when its script has come: see `_look`.
LOOK = """(async () => {
  const found = document.querySelectorAll(".arithmatex");
  for (let tries = 0; found.length && !document.documentElement.dataset.math && tries < TRIES; tries++)
    await new Promise(resolve => setTimeout(resolve, 20));
  const loaded = performance.getEntriesByType("resource").map(one => one.name);
  return {
    wrong: window.wrong,
    elsewhere: loaded.filter(name => new URL(name).host !== location.host),
    unset: [...found].filter(one => !one.querySelector(".katex")).length,
    title: document.querySelector("h1").textContent,
  };
})()"""
WIDER = """(() => {
  const wider = document.documentElement.scrollWidth - innerWidth;
  return wider <= 0 ? null : `${wider} pixels beyond ${innerWidth}`;
})()"""
SEARCH = """(async () => {
  for (let tries = 0; tries < 500; tries++) {
    const found = [...document.querySelectorAll(".md-search-result__item > .md-search-result__link")];
    if (found.length) return found.map(one => new URL(one.href).pathname);
    await new Promise(resolve => setTimeout(resolve, 20));
  }
  return [];
})()"""
# What people look for, and a page that has to be among the first five.
TERMS = {
    "gspo": "/algorithm/gspo/",
    "adaptive kl": "/algorithms/",
    "timeout_seconds": "/rewards/",
    "lora rank": "/lora/",
    "sandbox": "/sandbox/",
    "max_staleness": "/keys/",
    "frozen_lake": "/environments/",
    "reward function TRL": "/from_trl/",
    "resume checkpoint": "/checkpoints/",
    "vllm": "/engines/",
}


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    protocol_version = "HTTP/1.1"  # keeps its connections

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no line."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("site"))


class WithoutIndex(Handler):
    """Serves an empty index of the search: each page reads all of it anew, two thirds of what it took."""

    def do_GET(self) -> None:
        """Looks whether the page asks at the place where the index is, too."""
        if self.path != "/search/search_index.json":
            return super().do_GET()
        index = json.dumps(
            {"config": {"lang": ["en"], "separator": " ", "pipeline": []}, "docs": []}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(index)))
        self.end_headers()
        self.wfile.write(index)


@contextlib.contextmanager
def served(site: Path, kind: type[Handler]) -> Iterator[str]:
    """Serves the site while the block runs. Gives the address."""
    handler = functools.partial(kind, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site, Handler) as address:
        yield address


@pytest.fixture(scope="module")
def address_without_index(site: Path) -> Iterator[str]:
    with served(site, WithoutIndex) as address:
        yield address


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    made = Page(find_chromium("chromium"))
    made.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    yield made
    made.close()


def _look(page: Page, tries: int = 200) -> dict[str, Any]:
    """Returns what LOOK sees. tries: how many times 20 ms it waits for mathematics that is not set."""
    seen: dict[str, Any] = page.evaluate(LOOK.replace("TRIES", str(tries)))
    return seen


def _resize(page: Page, width: int) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )


def test_every_page_fits_a_phone_and_a_screen_and_says_no_error(
    site: Path, address_without_index: str, page: Page
) -> None:
    assert (site / "search" / "search_index.json").is_file()
    address = address_without_index
    places = [path.parent.relative_to(site).as_posix() for path in sorted(site.rglob("index.html"))]
    assert len(places) > 150
    wrong = {}
    for place in places:
        _resize(page, WIDTHS[0])
        page.open(f"{address}/{place}/" if place != "." else f"{address}/")
        seen = _look(page)
        assert seen.pop("title")
        wider = []
        for width in WIDTHS:
            _resize(page, width)
            wider += [found for found in [page.evaluate(WIDER)] if found is not None]
        if wider or any(seen.values()):
            wrong[place] = seen | {"wider": wider}
    assert wrong == {}


@pytest.mark.parametrize(("name", "column", "row"), [("cispo", 0, 0), ("gspo", 1, 1), ("dpo", 5, 3)])
def test_an_algorithm_shows_its_own_curve(address: str, page: Page, name: str, column: int, row: int) -> None:
    """Of the picture of all, the part at (column, row) is in the frame, which has a border of a pixel."""
    page.open(f"{address}/algorithm/{name}/")
    seen = page.evaluate("""(() => {
      const frame = document.querySelector(".panel div").getBoundingClientRect();
      const picture = document.querySelector(".panel img").getBoundingClientRect();
      const place = [picture.x - frame.x, picture.y - frame.y];
      return [frame.width, frame.height, picture.width, picture.height, ...place];
    })()""")
    assert seen[:4] == [166, 134, 1050, 600]
    assert seen[4:] == pytest.approx([1 - 44 - 168.4 * column, 1 - 2 - 142 * row], abs=0.1)


@pytest.mark.parametrize(("term", "place"), TERMS.items())
def test_the_search_finds(address: str, page: Page, term: str, place: str) -> None:
    _resize(page, WIDTHS[0])
    page.open(f"{address}/?q={term.replace(' ', '+')}")
    assert place in page.evaluate(SEARCH)[:5]
    assert page.evaluate("window.wrong") == []


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("<h1>x</h1><div style='width: 2000px'>wide</div>", "wider"),
        ("<h1>x</h1><script>console.error('no')</script>", "wrong"),
        ("<h1>x</h1><script>nothing()</script>", "wrong"),
        ("<h1>x</h1><img src=nothing.png>", "wrong"),
        ("<h1>x</h1><img src=http://127.0.0.2:9/a.png>", "elsewhere"),
        ("<h1>x</h1><span class=arithmatex>x</span>", "unset"),
    ],
)
def test_what_is_wrong_with_a_page_is_seen(
    site: Path, address: str, page: Page, body: str, what: str
) -> None:
    name = f"planted-{abs(hash(body))}.html"  # the browser keeps what an address had
    (site / name).write_text(body, encoding="utf-8")
    _resize(page, WIDTHS[0])
    page.open(f"{address}/{name}")
    seen = _look(page, tries=10) | {"wider": page.evaluate(WIDER)}
    assert seen[what]
