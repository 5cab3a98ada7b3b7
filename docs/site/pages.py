"""Makes the tree of pages of which mkdocs makes the site.

    python -m docs.site.pages KATEX    writes build/docs; `make docs` does, and builds build/site of it

In it are the pages of docs/, those of PAGES, a page for each file that they link to, a page per algorithm
(`algorithm_pages.py`) and an index of every key (`key_page.py`). Pages are written for a repository's host;
what differs on the site is changed here, so that mkdocs.yml needs no plugin and no hook: links out of docs/,
a blank line before lists, links from keys and algorithms to their entries.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "docs"
PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
"""Pages beside docs/, and what they are called on the site."""
NEWS = frozenset(
    f"{name}.md"
    for name in ("features", "benchmarks", "algorithm_curves", "environment_recipes", "async", "scale")
) | {"changelog.md", "compare.md"}
"""Pages that name everything and explain little: the search has them behind others."""
KEYS = "keys.md"
"""The index of keys on the site."""
FILES = "files"
"""The folder of the site that has files of the repository."""
ASSETS = ("site.css", "math.js")
PICTURE = "".join(
    f"![Reward and length of answers rise; answers before and after](pictures/learns-{kind}.svg#only-{kind})"
    for kind in ("light", "dark")
)
"""The first page's, in the theme's two colours (the README's has the browser's)."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".c": "c", ".json": "json"}

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"(?:[-*+]|\d+[.)]) ")


class Site:
    """The pages that there are, and how they name each other. made: those that no file of docs/ has."""

    def __init__(self, root: Path, made: Collection[str]) -> None:
        self._root = root
        self._made = made
        self.files: list[str] = []
        """Files of the repository that pages link to, in the order in which they were met."""

    def place(self, path: str) -> str:
        """Returns where a file of the repository is on the site. Raises ValueError where there is none.

        path: from the repository's root, with `/`.
        """
        if path in PAGES:
            return PAGES[path]
        if path.startswith("docs/"):
            inside = path.removeprefix("docs/")
            is_page = "/" not in inside or inside.startswith("pictures/")
            if inside in self._made or ((self._root / path).is_file() and is_page):
                return inside
        if not (self._root / path).is_file():
            raise ValueError(f"there is no file {path}, which a page links to")
        if path not in self.files:
            self.files.append(path)
        return f"{FILES}/{path}.md"

    def link(self, target: str, *, source: str, place: str) -> str:
        """Returns a link of a page as the site has it.

        source: the page in the repository; place: the same on the site.
        """
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return target
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = self.place(file)
        line = re.fullmatch(r"L(\d+)", anchor)
        if line is not None:
            anchor = f"__codelineno-0-{line[1]}"
        return posixpath.relpath(there, posixpath.dirname(place) or ".") + mark + anchor


def prose(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the lines of a page, and whether each is prose (and not code between fences)."""
    fence = ""
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if fence:
            yield line, False
            if found is not None and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif found is not None:
            fence = found[1]
            yield line, False
        else:
            yield line, True


def with_links(text: str, change: Callable[[str], str]) -> str:
    """Returns a page whose links are changed."""

    def of_line(line: str) -> str:
        parts = re.split(r"(`+[^`]*`+)", line)
        # Inside of a link's text there is code as well: what is between two codes may begin with `](`.
        parts[::2] = [
            _LINK.sub(lambda found: found[1] + change(found[2]) + found[3], part) for part in parts[::2]
        ]
        return "".join(parts)

    return "\n".join(of_line(line) if plain else line for line, plain in prose(text))


def with_blank_lines(text: str) -> str:
    """Returns a page with a blank line before each list: Markdown of hosts begins one without."""
    lines: list[str] = []
    for line, plain in prose(text):
        before = lines[-1] if lines else ""
        in_list = _ITEM.match(before) or before.startswith(" ")
        if plain and _ITEM.match(line) and before.strip() and not in_list:
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def with_codes_linked(text: str, links: Mapping[str, str]) -> str:
    """Returns a page in which code that is a name of `links` is a link: in prose and tables, not in headings
    nor inside of another link.
    """

    def of_line(line: str) -> str:
        inside = [found.span() for found in re.finditer(r"\[[^\]]*\]\([^)]*\)", line)]

        def linked(found: re.Match[str]) -> str:
            within = any(begin <= found.start() < end for begin, end in inside)
            there = None if within else links.get(found[1])
            return found[0] if there is None else f"[{found[0]}]({there})"

        return re.sub(r"(?<!`)`([^`]+)`(?!`)", linked, line)

    return "\n".join(
        of_line(line) if plain and not line.startswith("#") else line for line, plain in prose(text)
    )


def with_anchors(text: str) -> str:
    """Returns a table whose rows begin with a name in code, each with that name for its anchor."""
    return re.sub(r"^\| `([\w./<>-]+)` \|", r"| `\1`{#\1} |", text, flags=re.MULTILINE)


def file_page(path: str) -> str:
    """Returns the page of a file of the repository, with numbered lines."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    fence = "`" * (max([2, *(len(run) for run in re.findall("`{3,}", text))]) + 1)
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    name = posixpath.basename(path)
    return (
        f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n`{path}`\n\n"
        f'{fence} {{ .{language} linenums="1" }}\n{text.rstrip()}\n{fence}\n'
    )


def make(out: Path, katex: Path) -> None:
    """Writes the tree of pages into a folder, which is made anew. katex: KaTeX's package of npm."""
    from docs.site.algorithm_pages import algorithm_pages, algorithms
    from docs.site.key_page import key_anchors, key_page

    keys = key_anchors()
    # Links of made pages are written as of a page in docs/, which the repository does not have.
    made = {f"algorithm/{name}.md": text for name, text in algorithm_pages().items()}
    site = Site(ROOT, {*made, KEYS})
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)

    def write(place: str, text: str, *, source: str, codes: bool = True) -> None:
        folder = posixpath.dirname(place) or "."
        text = with_links(text, lambda target: site.link(target, source=source, place=place))
        if codes:
            up = posixpath.relpath(KEYS, folder)
            text = with_codes_linked(
                text, {key: f"{up}#{anchor}" for key, anchor in keys.items() if "." in key}
            )
        if place in NEWS:
            text = f"---\nsearch: {{boost: 0.3}}\n---\n{text}"
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).write_text(with_blank_lines(text), encoding="utf-8")

    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path.name == "columns.md":
            text = with_anchors(text)
        if path.name == "index.md":
            text = text.replace("\n## ", f"\n{PICTURE}\n\n## ", 1)
        if path.name in ("algorithms.md", "recipes.md"):
            text = _with_algorithms(text, algorithms())
        write(path.name, text, source=f"docs/{path.name}")
    for path in (ROOT / "docs").glob("*.png"):
        shutil.copy(path, out)
    shutil.copytree(ROOT / "docs" / "pictures", out / "pictures")
    for source, place in PAGES.items():
        write(place, (ROOT / source).read_text(encoding="utf-8"), source=source)
    for place, text in made.items():
        write(place, text, source=f"docs/{place}")
    write(KEYS, key_page(), source=f"docs/{KEYS}", codes=False)
    for path in site.files:  # grows, where these link to others
        write(f"{FILES}/{path}.md", file_page(path), source=path, codes=False)
    for name in ASSETS:
        shutil.copy(ROOT / "docs" / "site" / name, _made(out / "assets"))
    parts = [katex / "LICENSE", katex / "dist" / "katex.min.css", katex / "dist" / "katex.min.js"]
    for path in (*parts, *(katex / "dist").glob("fonts/*.woff2")):
        inside = "fonts" if path.parent.name == "fonts" else ""
        shutil.copy(path, _made(out / "assets" / "katex" / inside))


def _made(folder: Path) -> Path:
    os.makedirs(folder, exist_ok=True)
    return folder


def _with_algorithms(text: str, algorithms: Collection[str]) -> str:
    """Returns a page whose tables name algorithms in their first cells, which are linked."""

    def of_row(found: re.Match[str]) -> str:
        return re.sub(
            r"`([\w+-]+)`",
            lambda name: f"[{name[0]}](algorithm/{name[1]}.md)" if name[1] in algorithms else name[0],
            found[0],
        )

    return re.sub(r"^\|[^|]*\|", of_row, text, flags=re.MULTILINE)


if __name__ == "__main__":
    make(OUT, Path(sys.argv[1]))
    print(f"{sum(1 for _ in OUT.rglob('*.md'))} pages in {OUT.relative_to(ROOT)}", file=sys.stderr)
