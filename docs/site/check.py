"""Reads the built site: every link of it leads somewhere, and no page loads anything from elsewhere.

    python -m docs.site.check          of build/site; prints what is wrong, and ends with 1 then

mkdocs knows the links that are written as Markdown; this reads what it made of them, with anchors, pictures,
styles and scripts. What scripts ask for while a page is open is seen in a browser
(tests/site/test_browser.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
LOADED = {
    "script": "src",
    "img": "src",
    "source": "src",
    "iframe": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
"""Elements whose content a browser fetches with a page, and the attribute that names it. `link` is one, too,
but for `rel` of NAMED.
"""
NAMED = {"canonical", "prev", "next", "alternate"}
_URL = re.compile(r"url\(\s*['\"]?([^'\")]+)['\"]?\s*\)|@import\s+['\"]([^'\"]+)['\"]")


@dataclass
class Found(HTMLParser):
    """What a page has."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes what an element names."""
        has = {name: value or "" for name, value in attrs}
        self.anchors |= {has[name] for name in ("id", "name") if name in has}
        self._in_style = tag == "style"
        self.loaded += [one for one in _urls(has.get("style", ""))]
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        elif tag == "link" and "href" in has:
            (self.links if has.get("rel") in NAMED else self.loaded).append(has["href"])
        elif tag in LOADED and LOADED[tag] in has:
            self.loaded.append(has[LOADED[tag]])

    def handle_data(self, data: str) -> None:
        """Takes what a style names."""
        if self._in_style:
            self.loaded += _urls(data)

    def handle_endtag(self, tag: str) -> None:
        """Ends a style."""
        self._in_style = False


def problems(site: Path) -> list[str]:
    """Returns what is wrong with a site in a folder, a sentence each."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    wrong = [f"{site} has no pages"] if not pages else []
    for path, page in pages.items():
        about = path.relative_to(site)
        for link in page.loaded:
            wrong += [f"{about} loads {link}" for _ in _elsewhere(link)]
            wrong += [f"{about}: {what}" for what in _missing(site, path, link, pages)]
        if path.name != "404.html":  # it is shown at any address, and its links are for the top
            for link in page.links:
                wrong += [f"{about}: {what}" for what in _missing(site, path, link, pages)]
    for path in sorted(site.rglob("*.css")):
        for link in _urls(path.read_text(encoding="utf-8")):
            wrong += [f"{path.relative_to(site)} loads {link}" for _ in _elsewhere(link)]
    return wrong


def _read(path: Path) -> Found:
    found = Found()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def _urls(text: str) -> list[str]:
    return [found[1] or found[2] for found in _URL.finditer(text)]


def _elsewhere(link: str) -> Iterator[str]:
    """Yields a link that is not one within the site. `data:` is in the page itself."""
    parts = urlsplit(link)
    if parts.netloc or parts.scheme not in ("", "data"):
        yield link


def _missing(site: Path, page: Path, link: str, pages: dict[Path, Found]) -> Iterator[str]:
    """Yields what is missing of a link within the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return
    there = page
    if parts.path.startswith("/"):  # 404.html, which is made for the top of a host
        there = site / unquote(parts.path).lstrip("/")
    elif parts.path:
        there = (page.parent / unquote(parts.path)).resolve()
    if there.is_dir():
        there = there / "index.html"
    if not there.is_file():
        yield f"there is nothing at {link}"
    elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
        yield f"there is no anchor of {link}"


if __name__ == "__main__":
    found = problems(SITE)
    print(
        "\n".join(found) or "all links lead somewhere, and nothing is loaded from elsewhere", file=sys.stderr
    )
    sys.exit(bool(found))
