"""What the site is made of: links, a page per algorithm, the index of keys, and the order of reading."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site import algorithm_pages, key_page, pages
from docs.site.check import problems
from rondo.algorithms.registry import names
from rondo.config import load
from tests.site.building import ROOT, build, built

SCHEMA = json.loads((ROOT / "src/rondo/recipes/schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("source", "place", "target", "link"),
    [
        ("docs/loop.md", "loop.md", "config.md#secrets", "config.md#secrets"),
        ("docs/loop.md", "loop.md", "#stages-of-a-run", "#stages-of-a-run"),
        ("docs/loop.md", "loop.md", "https://arxiv.org/abs/2402.03300", "https://arxiv.org/abs/2402.03300"),
        ("docs/loop.md", "loop.md", "../CONTRIBUTING.md#checks", "contributing.md#checks"),
        ("docs/loop.md", "loop.md", "../examples/ppo.py", "files/examples/ppo.py.md"),
        ("docs/loop.md", "loop.md", "../examples/ppo.py#L12", "files/examples/ppo.py.md#__codelineno-0-12"),
        ("docs/benchmarks.md", "benchmarks.md", "algorithms.png", "algorithms.png"),
        ("CONTRIBUTING.md", "contributing.md", "docs/loop.md", "loop.md"),
        ("docs/algorithm/gspo.md", "algorithm/gspo.md", "../columns.md#reward", "../columns.md#reward"),
        ("docs/algorithm/gspo.md", "algorithm/gspo.md", "grpo.md", "grpo.md"),
        (
            "tests/host_card/README.md",
            "files/tests/host_card/README.md.md",
            "../../docs/cards.md",
            "../../../cards.md",
        ),
    ],
)
def test_a_link_of_the_repository_is_one_of_the_site(source: str, place: str, target: str, link: str) -> None:
    site = pages.Site(ROOT, {"algorithm/grpo.md"})
    assert site.link(target, source=source, place=place) == link
    assert site.files == (["examples/ppo.py"] if "examples" in target else [])


@pytest.mark.parametrize("target", ["nothing.md", "../examples", "site/math.js/nothing"])
def test_a_link_that_leads_nowhere_is_an_error(target: str) -> None:
    with pytest.raises(ValueError, match="which a page links to"):
        pages.Site(ROOT, ()).link(target, source="docs/loop.md", place="loop.md")


def test_links_in_code_stay() -> None:
    text = "[a](x.md) `[b](y.md)` [`c`](z.md)\n```\n[d](w.md)\n```\n[e](v.md)"
    assert (
        pages.with_links(text, str.upper)
        == "[a](X.MD) `[b](y.md)` [`c`](Z.MD)\n```\n[d](w.md)\n```\n[e](V.MD)"
    )


def test_a_list_behind_a_line_of_text_gets_a_blank_line() -> None:
    text = "Two:\n- one\n- two\n  and more\n- three\n\n```\nTwo:\n- one\n```\n1. a\n2. b"
    changed = "Two:\n\n- one\n- two\n  and more\n- three\n\n```\nTwo:\n- one\n```\n\n1. a\n2. b"
    assert pages.with_blank_lines(text) == changed


def test_names_are_links_in_prose_and_tables_only() -> None:
    text = "# `a.b`\n`a.b` and `a.c`, [`a.b`](x.md)\n| `a.b` |\n```\n`a.b`\n```"
    changed = (
        "# `a.b`\n[`a.b`](keys.md#a.b) and `a.c`, [`a.b`](x.md)\n| [`a.b`](keys.md#a.b) |\n```\n`a.b`\n```"
    )
    assert pages.with_codes_linked(text, {"a.b": "keys.md#a.b"}) == changed


def test_the_navigation_and_the_index_have_the_same_order() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    # Made pages are on the site alone, so that the index, which is read elsewhere, too, cannot link to them.
    sections = [
        [page for page in section if page not in ("index.md", "algorithm/index.md", "keys.md")]
        for (section,) in (part.values() for part in navigation)
    ]
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = [
        [
            pages.PAGES.get(link.removeprefix("../"), link)
            for link in re.findall(r"^\| \[[^\]]*\]\(([^)]*)\)", part, re.MULTILINE)
        ]
        for part in index.split("\n## ")[1:]
    ]
    assert listed == sections
    assert sum(map(len, listed)) == len(list((ROOT / "docs").glob("*.md"))) - 1 + len(pages.PAGES)


def _leaves(path: str, value: Any) -> Iterator[str]:
    """Yields the keys of a section and of what stands in it."""
    for one in dataclasses.fields(value):
        key, inside = f"{path}.{one.name}".lstrip("."), getattr(value, one.name)
        if dataclasses.is_dataclass(inside) and one.name != "options":
            yield from _leaves(key, inside)
        elif one.name != "options":
            yield key


@pytest.mark.parametrize("recipe", ["quickstart", "ppo", "prime", "safe_rlhf", "distill", "visual"])
def test_every_key_of_a_recipe_is_in_the_index(recipe: str) -> None:
    keys = key_page.key_anchors()
    leaves = list(_leaves("", load([recipe]).config))
    assert len(leaves) > 200
    assert [leaf for leaf in leaves if leaf not in keys] == []
    anchors = set(re.findall(r"\{#([\w.]+)\}", key_page.key_page()))
    assert set(keys.values()) <= anchors


def test_the_index_of_keys_has_each_of_the_schema_once() -> None:
    listed = [section for section in key_page.sections() if section.same_as is None]
    found = {section.definition or "recipe": {key.name for key in section.keys} for section in listed}
    sections = {"recipe": SCHEMA, **SCHEMA["$defs"]}
    assert found == {name: set(section["properties"]) for name, section in sections.items()}
    # The same section at another place has the rows of the first.
    assert key_page.key_anchors()["critic.optimizer.schedule"] == "critic.optimizer.schedule"
    assert key_page.key_anchors()["reference.parallel.tensor"] == "actor.parallel.tensor"
    page = key_page.key_page()
    assert (
        "| `n`{#rollout.n} | integer ≥ 1 | `8` | Trajectories per prompt. |\n"
        "| `max_tokens`{#rollout.max_tokens} | integer ≥ 1 | `512` | Response tokens at most. |\n"
    ) in page
    assert "| [`train`](#data.train) |" in page
    assert "\n### `data.train[]` {#data.train}\n" in page


def test_every_algorithm_has_a_page() -> None:
    made = algorithm_pages.algorithm_pages()
    recipes = set(algorithm_pages.recipes())
    functions = {name for kind in algorithm_pages.KINDS for name in names(kind)}
    assert set(made) == {"index"} | recipes | functions
    for name in functions:
        assert made[name].count("\n**Reads** ") == len([k for k in algorithm_pages.KINDS if name in names(k)])
        assert "\n!!! equation " in made[name]
        assert re.search(r"\n\*\*Source\*\* \[`src/rondo/algorithms/[\w/]+\.py`\]\(.*#L\d+\)", made[name])
    for name in recipes:
        assert f"`src/rondo/recipes/{name}.yaml`" in made[name]
        assert re.search(r"\n\| `algorithm\.\w+` \| [^|]+ \| [^|]+ \| [^|]*`\w+`", made[name]), name
    in_index = re.findall(r"^\| \[`([\w+-]+)`\]", made["index"], re.MULTILINE)
    assert in_index == sorted(recipes | functions)


def test_the_page_of_an_algorithm() -> None:
    page = algorithm_pages.algorithm_pages()["gspo"]
    for part in (
        '!!! equation "`algorithm.policy_loss: gspo`"\n    $\\max(-As,',
        "[2507.18071](https://arxiv.org/abs/2507.18071)",
        "**Reads** [`log_probs`](../columns.md#log_probs), [`old_log_probs`](../columns.md#old_log_probs), "
        "[`advantages`](../columns.md#advantages), [`response_mask`](../columns.md#response_mask), "
        "[`cu_seqlens`](../columns.md#cu_seqlens).",
        "| `clip_low` | `0.0003` |\n| `clip_high` | `0.0004` |",
        "| `algorithm.advantage` | [`grpo`](grpo.md) | $(R-\\mu)/F$ | [`reward`](../columns.md#reward), "
        "[`group_id`](../columns.md#group_id) |",
        "| `algorithm.policy_loss` | [`gspo`](gspo.md), `clip_low` 0.015, `clip_high` 0.02 |",
        "```bash\nrondo train gspo\n```",
        "  policy_loss: {name: gspo, clip_low: 0.015, clip_high: 0.02}\n",
        '<div style="--column: 1; --row: 1">',
        "| `gspo` | 0.04 (0.00–0.12) | 0.92 (0.88–0.95) | 2, 4, 4 | 6, 4, 6 | 31 |",
        "only `gspo`'s range is narrow enough to clip a notable share.",
    ):
        assert part in page, part


def test_a_function_without_a_recipe_says_who_chooses_it() -> None:
    made = algorithm_pages.algorithm_pages()
    assert (
        "Chosen by the recipes [`ppo`](ppo.md), [`starpo_s`](starpo_s.md), [`vapo`](vapo.md), " in made["gae"]
    )
    assert "No recipe of its own" in made["passk"]


def test_panels_of_the_picture_are_the_first_table_of_curves() -> None:
    """Of 6 × 4 panels, in the order of the table."""
    first = algorithm_pages.pictured()
    assert len(first) == 24
    assert (first[0], first[7], first[23]) == ("cispo", "gspo", "dpo")
    without = [name for name in algorithm_pages.recipes() if name not in first]
    assert not [name for name in without if "<figure" in algorithm_pages.algorithm_pages()[name]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("site"))


@pytest.mark.slow
def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert problems(site) == []
    assert len(list(site.rglob("index.html"))) > 150
    # KaTeX, which is somebody else's, is whole and has its licence beside it.
    katex = site / "assets" / "katex"
    styles = (katex / "katex.min.css").read_text(encoding="utf-8")
    fonts = {one for one in re.findall(r"url\(([^)]*\.woff2)\)", styles)}
    assert fonts == {path.relative_to(katex).as_posix() for path in katex.glob("fonts/*.woff2")}
    assert "The MIT License" in (katex / "LICENSE").read_text(encoding="utf-8")


def test_the_workflow_that_publishes_says_that_it_was_not_run() -> None:
    text = (ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8")
    assert "# Not run: " in text.split("\nname:")[0]
    jobs = yaml.safe_load(text)["jobs"]
    assert set(jobs) == {"build", "site", "wheel"}
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert "make docs" in [step.get("run") for step in steps]
    assert {"path": "build/site"} in [step.get("with") for step in steps]
    # Only what deploys may do more than read.
    assert "permissions" not in jobs["build"]


@pytest.mark.slow
def test_mkdocs_refuses_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[x](nothing.md)\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"contains a link 'nothing\.md'"):
        build(tmp_path, nav="[index.md]")


@pytest.mark.parametrize(
    ("html", "wrong"),
    [
        ('<a href="b/">', None),
        ('<a href="b/#there">', None),
        ('<a href="https://elsewhere.org/">', None),
        ('<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">', None),
        ('<a href="c/">', "there is nothing at c/"),
        ('<a href="b/#here">', "there is no anchor of b/#here"),
        ('<img src="b.png">', "there is nothing at b.png"),
        ('<img src="https://elsewhere.org/a.png">', "loads https://elsewhere.org/a.png"),
        ('<script src="//elsewhere.org/a.js"></script>', "loads //elsewhere.org/a.js"),
        ('<link rel="stylesheet" href="http://elsewhere.org/a.css">', "loads http://elsewhere.org/a.css"),
        ('<link rel="preconnect" href="https://elsewhere.org">', "loads https://elsewhere.org"),
        ('<link rel="canonical" href="https://ours.org/a/">', None),
        ('<p style="background: url(https://elsewhere.org/a.png)">', "loads https://elsewhere.org/a.png"),
        ("<style>@import 'https://elsewhere.org/a.css'</style>", "loads https://elsewhere.org/a.css"),
        ("<style>@font-face{src:url(//elsewhere.org/a.woff2)}</style>", "loads //elsewhere.org/a.woff2"),
    ],
)
def test_what_is_wrong_with_a_page_is_found(tmp_path: Path, html: str, wrong: str | None) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<p id="there">', encoding="utf-8")
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    found = problems(tmp_path)
    assert (found == []) if wrong is None else [wrong in one for one in found] == [True]
