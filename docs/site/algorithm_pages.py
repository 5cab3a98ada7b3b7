"""A page per algorithm: its equation, the columns that it reads, its recipe, its curve and its source.

Nothing is written down here: equations and papers are rows of docs/algorithms.md, settings those of
docs/recipes.md and of the recipes themselves, figures those of docs/algorithm_curves.md, and all else is
asked of the registry. An algorithm is a function with a name (an advantage estimator, a policy loss, a loss
of pairs), a recipe of that name, or both.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rondo.algorithms.registry import IN_TABLE, Kind, bind_preparation, columns_read, lookup, names
from rondo.config import load
from rondo.config.schema import AlgorithmConfig, FunctionConfig

ROOT = Path(__file__).resolve().parents[2]
KINDS: Mapping[Kind, tuple[str, str, str]] = {
    "advantage": ("Advantage estimators", "Advantage estimator", "algorithm.advantage"),
    "policy_loss": ("Policy losses", "Policy loss", "algorithm.policy_loss"),
    "pair_loss": ("Pair losses", "Loss of pairs", "algorithm.preference_loss"),
}
"""By kind: the heading of its table in docs/algorithms.md, what one is called, and the key that names it."""
OTHER_TABLES: Mapping[Kind, str] = {
    "aggregation": "Aggregation",
    "kl": "KL",
    "filter": "Filters: which prompts are trained on",
    "select": "Selection: which of a step's answers are trained on",
    "resample": "Resampling: how often a sample is trained on",
}
"""The headings of tables whose functions have no pages, but stand on those of recipes."""
PANELS = (6, 4)
"""Columns and rows of docs/algorithms.png, whose panels are the first table of docs/algorithm_curves.md in
its order.
"""
CHOICES = (
    "advantage",
    "policy_loss",
    "aggregation",
    "kl",
    "filter",
    "select",
    "resample",
    "mix",
    "constraint",
    "branches",
)
"""Keys of `algorithm` that a recipe's page lists."""


@dataclass(frozen=True)
class Row:
    """A function in its table of docs/algorithms.md."""

    equation: str
    paper: str


@dataclass(frozen=True)
class Measured:
    """A recipe's row in a table of docs/algorithm_curves.md."""

    head: str
    row: str
    about: str
    """What stands above the table."""


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@cache
def _rows(kind: Kind) -> dict[str, Row]:
    title = KINDS[kind][0] if kind in KINDS else OTHER_TABLES[kind]
    section = _page("algorithms.md").split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = {}
    for line in section.splitlines():
        cells = _cells(line) if line.startswith("| `") else []
        for name in re.findall(r"`([\w+-]+)`", cells[0]) if cells else ():
            found[name] = Row(re.sub("; see (below|Constraint)$", "", cells[1]), cells[-1])
    return found


@cache
def recipes() -> dict[str, tuple[str, str]]:
    """Returns the recipes of algorithms: (what one sets, papers), as in docs/recipes.md."""
    section = _page("recipes.md").partition("\n| recipe | what it sets | paper |\n")[2].partition("\n\n")[0]
    rows = [_cells(line) for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): (cells[1], cells[2]) for cells in rows}


@cache
def measured() -> dict[str, list[Measured]]:
    """Returns what was measured of each recipe, in the order of docs/algorithm_curves.md."""
    found: dict[str, list[Measured]] = {}
    about = head = ""
    for block in _page("algorithm_curves.md").split("\n\n"):
        lines = block.splitlines()
        if lines and lines[0].startswith("| recipe |"):
            head = "\n".join(lines[:2])
            for line in lines[2:]:
                name = re.findall(r"`(\w+)`", line)[0]
                found.setdefault(name, []).append(Measured(head, line, about))
        elif not block.startswith(("Blue:", "![")):  # they describe the picture
            about = " ".join(lines)
    return found


@cache
def pictured() -> tuple[str, ...]:
    """Returns the recipes that docs/algorithms.png shows, row by row: those of the first table."""
    first = next(iter(measured().values()))[0].about
    return tuple(name for name, found in measured().items() if found[0].about == first)


@cache
def remarks() -> dict[str, list[str]]:
    """Returns what docs/algorithm_curves.md says of each recipe: its items that begin with the name."""
    found: dict[str, list[str]] = {}
    text = _page("algorithm_curves.md").partition("\n## What stands out\n")[2].partition("\n\nOf seeds")[0]
    for item in re.split(r"\n- ", text)[1:]:
        words = " ".join(item.split())
        for name in re.findall(r"`(\w+)`", words.partition(":")[0]):
            found.setdefault(name, []).append(words)
    return found


@cache
def algorithms() -> tuple[str, ...]:
    """Returns the names of all that has a page, sorted."""
    functions = {name for kind in KINDS for name in names(kind)}
    return tuple(sorted(functions | set(recipes())))


def algorithm_pages() -> dict[str, str]:
    """Returns the pages by their names, with `index` among them."""
    return {"index": _index(), **{name: _algorithm(name) for name in algorithms()}}


def _kinds(name: str) -> list[Kind]:
    return [kind for kind in KINDS if name in names(kind)]


def _index() -> str:
    lines = [
        "# All algorithms\n",
        "Each name is a function that recipes choose, a recipe that sets several of them, or both. Its",
        "page has the equation, the columns that it reads, the recipe, what that reached on the",
        "quickstart's task, and the source. What the letters mean: [algorithms](../algorithms.md).\n",
        "| name | what | recipe | paper |",
        "|---|---|---|---|",
    ]
    for name in algorithms():
        kinds = _kinds(name)
        what = "; ".join(_rows(kind)[name].equation for kind in kinds) if kinds else recipes()[name][0]
        papers = [_rows(kind)[name].paper for kind in kinds] + (
            [recipes()[name][1]] if name in recipes() else []
        )
        recipe = "yes" if name in recipes() else ""
        lines.append(f"| [`{name}`]({name}.md) | {what} | {recipe} | {_papers(' '.join(papers))} |")
    return "\n".join(lines) + "\n"


def _algorithm(name: str) -> str:
    parts = [f"# {name}\n", "[All algorithms](index.md)\n"]
    if name in recipes():
        parts.append(_head_comment(name) + "\n")
    for kind in _kinds(name):
        parts += _function(kind, name)
    if name in recipes():
        parts += _recipe(name)
        parts += _curve(name)
    else:
        parts.append("## Recipe\n\n" + _others(name))
    return "\n".join(parts)


def _function(kind: Kind, name: str) -> Iterator[str]:
    title, called, key = KINDS[kind]
    row, function = _rows(kind)[name], lookup(kind, name)
    anchor = re.sub(r"[^\w]+", "-", title.lower())
    plain = inspect.unwrap(function)
    yield f"## {called}\n"
    yield f'!!! equation "`{key}: {name}`"\n    {row.equation}\n'
    paper = f"Paper: {_papers(row.paper)}. " if row.paper else ""
    yield f"{paper}What the letters mean, and more on it: [algorithms](../algorithms.md#{anchor}).\n"
    yield _written(inspect.getdoc(plain) or "") + "\n"
    reads = list(columns_read(function))
    prepare = bind_preparation(FunctionConfig(name)) if kind == "policy_loss" else None
    options = _options(plain)
    if prepare is not None:
        before = [column for column in columns_read(prepare.func) if column != "seed"]
        made = [column for column in reads if column not in IN_TABLE]
        reads = [column for column in reads if column not in made]
        yield f"**Reads** {_columns(reads)}; before a mini-batch is cut, {_columns(before)}.\n"
        options = {**options, **_options(inspect.unwrap(prepare.func))}
        options.pop("seed", None)
    else:
        yield f"**Reads** {_columns(reads)}.\n"
    if options:
        yield "| option | default |\n|---|---|"
        yield "\n".join(f"| `{option}` | {_default(value)} |" for option, value in options.items()) + "\n"
    yield (
        f"**Source** {_source(plain)}"
        + (f", and what is prepared: {_source(inspect.unwrap(prepare.func))}" if prepare is not None else "")
        + "\n"
    )


def _recipe(name: str) -> Iterator[str]:
    yield "## Recipe\n"
    yield f"```bash\n{_command(name)}\n```\n"
    sets, papers = recipes()[name]
    yield f"It sets: {sets}. Papers: {_papers(papers)}. What all recipes include: [recipes](../recipes.md).\n"
    yield "| choice | | what it is | reads |\n|---|---|---|---|"
    yield "\n".join(_choices(name)) + "\n"
    path = f"src/rondo/recipes/{name}.yaml"
    text = (ROOT / path).read_text(encoding="utf-8").partition("\n")[2]
    yield f"[`{path}`](../../{path}):\n\n```yaml\n{text.rstrip()}\n```\n"


def _choices(recipe: str) -> Iterator[str]:
    """Yields a row for each choice that a recipe makes."""
    config = _chosen(recipe)
    pairs = {"dpo": "preference_loss", "reward_model": "reward_model_loss"}
    for key in (pairs[recipe],) if recipe in pairs else CHOICES:
        value = getattr(config, key)
        if value is None:
            continue
        kind: Any = "pair_loss" if recipe in pairs else key
        equation = reads = ""
        name = getattr(value, "name", None)
        if name is not None and kind in (*KINDS, *OTHER_TABLES):
            equation = _rows(kind)[name].equation
            reads = _columns(columns_read(lookup(kind, name)))
        yield f"| `algorithm.{key}` | {_value(value)} | {equation} | {reads} |"


def _curve(name: str) -> Iterator[str]:
    yield "## Curve\n"
    rows = measured().get(name, [])
    if not rows:
        yield "Not measured on the quickstart's task. [What was](../algorithm_curves.md).\n"
        return
    if name in pictured():
        row, column = divmod(pictured().index(name), PANELS[0])
        style = f"--column: {column}; --row: {row}"
        yield (
            f'<figure class="panel"><div style="{style}">'
            f'<img src="../../algorithms.png" alt="{name}: held-out accuracy, by step"></div>'
            "<figcaption>Greedy accuracy on held-out prompts, from 0 to 1 over 30 steps (blue: mean and "
            "range of three seeds), of the step’s samples (orange), and GRPO’s (grey)</figcaption></figure>\n"
        )
    for found in rows:
        yield f"{found.about}\n\n{found.head}\n{found.row}\n"
    yield "What the columns are, and all others: [curves](../algorithm_curves.md).\n"
    for remark in remarks().get(name, []):
        yield f"- {remark}"
    yield ""


def _others(name: str) -> str:
    """Says which recipes choose a function that has none of its name."""
    users = [one for one in recipes() if _uses(one, name)]
    if not users:
        return "No recipe of its own: set the key above on top of another recipe.\n"
    return "Chosen by the recipes " + ", ".join(f"[`{one}`]({one}.md)" for one in users) + ".\n"


def _uses(recipe: str, name: str) -> bool:
    config = _chosen(recipe)
    return any(
        getattr(getattr(config, key), "name", None) == name
        for key in ("advantage", "policy_loss", "preference_loss", "reward_model_loss")
    )


@cache
def _chosen(recipe: str) -> AlgorithmConfig:
    return load([recipe]).config.algorithm


def _head_comment(name: str) -> str:
    lines = (ROOT / f"src/rondo/recipes/{name}.yaml").read_text(encoding="utf-8").splitlines()
    taken = []
    for line in lines[1:]:
        if not line.startswith("#"):
            break
        taken.append(line.removeprefix("#").strip())
    return " ".join(taken)


def _command(name: str) -> str:
    commands = {"dpo": "rondo preference dpo", "reward_model": "rondo reward-model reward_model"}
    return commands.get(name, f"rondo train {name}")


def _value(value: Any) -> str:
    """Returns a section of a recipe, without what is as by default."""
    if isinstance(value, FunctionConfig):
        options = dict(value.options)
    else:
        fields = dataclasses.fields(value)
        options = {
            one.name: getattr(value, one.name) for one in fields if getattr(value, one.name) != one.default
        }
        options = {key: option for key, option in options.items() if not dataclasses.is_dataclass(option)}
    name = options.pop("name", None) or getattr(value, "name", None)
    said = [] if name is None else [f"[`{name}`]({name}.md)" if name in algorithms() else f"`{name}`"]
    said += [f"`{key}` {_default(option).strip('`')}" for key, option in options.items()]
    return ", ".join(said)


def _options(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    said = {None: "null", True: "true", False: "false"}
    return f"`{said[value] if value is None or isinstance(value, bool) else value}`"


def _columns(columns: Any) -> str:
    return ", ".join(f"[`{one}`](../columns.md#{one})" if one in IN_TABLE else f"`{one}`" for one in columns)


def _source(function: Any) -> str:
    path = Path(inspect.getsourcefile(function) or "").resolve().relative_to(ROOT).as_posix()
    line = inspect.getsourcelines(function)[1]
    return f"[`{path}`](../../{path}#L{line})"


def _papers(text: str) -> str:
    """Returns papers with a link for each number of arXiv, each once."""
    numbers = dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", text))
    said = re.sub(r"[\s,]+", " ", re.sub(r"\b\d{4}\.\d{5}\b", "", text)).strip()
    links = ", ".join(f"[{one}](https://arxiv.org/abs/{one})" for one in numbers)
    return " ".join(filter(None, [said if not numbers or said not in ("", ",") else "", links])).strip()


def _written(text: str) -> str:
    """Returns a docstring as Markdown, without tags and links that it does not mean."""
    return re.sub(r"\[([^\]]*)\](?=\()", r"\\[\1\\]", text.replace("<", "&lt;"))
