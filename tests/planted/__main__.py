"""`python -m tests.planted` writes the tables of docs/trust.md."""

from __future__ import annotations

from tests.house import ROOT
from tests.planted.elsewhere import ENGINES
from tests.planted.fault import Fault
from tests.planted.faults import FAULTS, HELD

HUB = "https://github.com/"


def _threads(others: tuple[str, ...]) -> str:
    """Returns links to them."""
    named = []
    for one in others:
        _, repository, _, number = one.split("/")
        named.append(f"[{repository} {number}]({HUB}{one})")
    return ", ".join(named) or "–"


def _when(fault: Fault) -> str:
    if fault.ends == "warns":
        return f"warns, from step {fault.step}"
    return "stops before the first step" if fault.step < 0 else f"stops in step {fault.step + 1}"


def planted() -> str:
    rows = [
        "| planted | where it enters | others met it | rondo | found by | its words |",
        "|---|---|---|---|---|---|",
    ]
    for one in FAULTS.values():
        by = f"`{one.by}`" if one.ends == "warns" or "." in one.by else one.by
        where = f"{one.where}, also in a process of its own" if one.name in ENGINES else one.where
        rows.append(f"| {one.what} | {where} | {_threads(one.others)} | {_when(one)} | {by} | “{one.says}” |")
    return "\n".join(rows)


def held() -> str:
    rows = ["| fault | others met it | why it cannot be | held by |", "|---|---|---|---|"]
    for one in HELD:
        tests = ", ".join(f"`{test}`" for test in one.tests)
        rows.append(f"| {one.what} | {_threads(one.others)} | {one.why} | {tests} |")
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """Returns the page with its tables as they are made."""
    for name, made in (("planted", planted()), ("held", held())):
        begin, end = f"<!-- {name} -->\n", "\n<!-- end -->"
        before, _, rest = page.partition(begin)
        _, found, behind = rest.partition(end)
        assert found, name
        page = before + begin + made + end + behind
    return page


if __name__ == "__main__":
    path = ROOT / "docs/trust.md"
    path.write_text(with_tables(path.read_text()))
