"""A strict reader of Prometheus' text format."""

from __future__ import annotations

import re


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples of Prometheus' text format by name and labels; its rules are asserted."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    family = ""
    families: set[str] = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
            assert family not in families
            families.add(family)
        elif line.startswith("# TYPE "):
            assert line.split()[2:] in ([family, "counter"], [family, "gauge"], [family, "histogram"])
        else:
            match = re.fullmatch(r"([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})? (\S+)", line)
            assert match is not None, line
            assert match[1].startswith(family)
            labels = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"(?:,|$)', match[2] or "")
            key = match[1], frozenset(labels)
            assert key not in found
            found[key] = float(match[3])
    return found
