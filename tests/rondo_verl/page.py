"""The tables of docs/verl.md that are data: `python -m tests.rondo_verl.page` writes them anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.verl_launches import ACCEPTED, CAPABILITIES
from rondo.config.tree import shown
from rondo_verl.defaults import DEFAULTS, WITHOUT_DEFAULT
from rondo_verl.metrics import NAMES
from rondo_verl.table import TABLE, Ignored, Only

LAUNCHES = Path(__file__).with_name("launches.tsv")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "verl.md"


def launches() -> list[list[str]]:
    """The rows that benchmarks/verl_launches.py wrote, that of the columns' heads first."""
    return [line.split("\t") for line in LAUNCHES.read_text(encoding="utf-8").splitlines()]


def tables() -> dict[str, str]:
    """Each table by the name that its markers have on the page."""
    noted = {key: rule.reason for key, rule in TABLE.items() if isinstance(rule, Ignored)}
    only: dict[tuple[str, str], list[str]] = {}
    for key, rule in TABLE.items():
        if isinstance(rule, Only):
            only.setdefault((", ".join(shown(value) for value in rule.values), rule.remedy), []).append(key)
    first, alone = (Counter(row[column] for row in launches()[1:]) for column in (4, 6))
    lacking = [
        f"| {name} | {first[name]} | {alone[name]} |" for name in CAPABILITIES if first[name] or alone[name]
    ]
    older = DEFAULTS["0.6.1"]
    defaults = [
        f"| `{key}` | {shown(value)}{'' if older[key] == value else f' (0.6.1: {shown(older[key])})'} |"
        for key, value in DEFAULTS["main"].items()
    ]
    return {
        "launches": _table(
            "lacks | launches | nothing else", [f"| {ACCEPTED} | {first[ACCEPTED]} | |", *lacking]
        ),
        "metrics": _table(
            "rondo | verl", (f"| `{ours}` | {_keys(theirs)} |" for ours, theirs in NAMES.items())
        ),
        "noted": _table("verl | why", _by_reason(noted)),
        "one value": _table(
            "verl | value | else",
            (f"| {_keys(keys)} | {value} | {remedy} |" for (value, remedy), keys in only.items()),
        ),
        "defaults": _table("verl | default", defaults),
        "without": _table("verl | why", _by_reason(WITHOUT_DEFAULT)),
    }


def _by_reason(reasons: Mapping[str, str]) -> Iterable[str]:
    for reason in dict.fromkeys(reasons.values()):
        yield f"| {_keys(key for key, why in reasons.items() if why == reason)} | {reason} |"


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _table(heads: str, lines: Iterable[str]) -> str:
    return "\n".join([f"| {heads} |", "|---" * (heads.count("|") + 1) + "|", *lines]) + "\n"


def markers(name: str) -> tuple[str, str]:
    """What stands before and behind a table."""
    return f"<!-- {name}: python -m tests.rondo_verl.page -->\n", f"<!-- {name}: to here -->\n"


def main() -> None:
    """Writes the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        begin, end = markers(name)
        before, _, rest = text.partition(begin)
        text = before + begin + table + end + rest.partition(end)[2]
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
