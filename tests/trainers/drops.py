"""What a buffer dropped, by name: the ledger keeps the number only, the names are in the journal."""

from __future__ import annotations

from typing import Any


class Drops(dict[int, str]):
    """In the place of a journal: sequence number -> reason."""

    def note(self, kind: str, **what: Any) -> None:
        if kind in ("put", "drop") and what["reason"] is not None:
            assert what["seq"] not in self
            self[what["seq"]] = what["reason"]
