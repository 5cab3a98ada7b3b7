"""The ledger: an account of every prompt of the stream, as it is kept in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Exactly once: a sequence number below `next_seq` was trained unless it is open, ready, dropped or to
    re-issue.

    aborts: how often a group that is not complete yet was aborted. What no step has counted yet: filtered,
    those of `dropped` that a filter dropped, with `Group.rewards`; failed, outcomes of trajectories that
    failed, in groups of any fate; produced, response lengths of groups that came in.
    """

    next_seq: int = 0
    num_trained: int = 0
    open: dict[int, int] = field(default_factory=dict)  # seq → version at admission
    dropped: dict[int, str] = field(default_factory=dict)  # seq → reason
    reissue: list[int] = field(default_factory=list)
    aborts: dict[int, int] = field(default_factory=dict)
    filtered: dict[int, tuple[float, int]] = field(default_factory=dict)
    failed: dict[int, list[str]] = field(default_factory=dict)
    produced: list[int] = field(default_factory=list)

    def admit(self, version: int) -> int:
        """The next sequence number to start; what was given back goes first."""
        if self.reissue:
            seq = self.reissue.pop(0)
            self.failed.pop(seq, None)  # of the earlier try, where that was complete and is too stale now
        else:
            seq = self.next_seq
            self.next_seq += 1
        self.open[seq] = version
        return seq

    def give_back(self, seq: int) -> None:
        del self.open[seq]
        self.reissue = sorted([*self.reissue, seq])

    def complete(self, seq: int) -> None:
        del self.open[seq]
        self.aborts.pop(seq, None)

    def drop(self, seq: int, reason: str) -> None:
        self.complete(seq)
        self.dropped[seq] = reason

    @property
    def num_admitted(self) -> int:
        """Groups that hold or have used a credit: everything started, less what waits to be started again."""
        return self.next_seq - len(self.reissue)

    def records(self) -> list[dict[str, Any]]:
        """The account as lines for `buffer/ledger.jsonl`. What is in flight will be issued again."""
        reissue = sorted([*self.reissue, *self.open])
        counts = {"next_seq": self.next_seq, "num_trained": self.num_trained}
        head = {"kind": "watermark", **counts, "produced": list(self.produced)}
        again = [{"kind": "reissue", "seq": seq, "aborts": self.aborts.get(seq, 0)} for seq in reissue]
        dropped = [
            {"kind": "dropped", "seq": seq, "reason": reason} for seq, reason in sorted(self.dropped.items())
        ]
        filtered = [
            {"kind": "filtered", "seq": seq, "reward_sum": total, "rows": rows}
            for seq, (total, rows) in sorted(self.filtered.items())
        ]
        failed = [
            {"kind": "failed", "seq": seq, "outcomes": outcomes}
            for seq, outcomes in sorted(self.failed.items())
        ]
        return [head, *again, *dropped, *filtered, *failed]

    @classmethod
    def from_records(cls, records: list[dict[str, Any]]) -> Ledger:
        head = records[0]
        return cls(
            next_seq=head["next_seq"],
            num_trained=head["num_trained"],
            produced=list(head.get("produced", ())),
            dropped={r["seq"]: r["reason"] for r in records if r["kind"] == "dropped"},
            reissue=sorted(r["seq"] for r in records if r["kind"] == "reissue"),
            aborts={r["seq"]: r["aborts"] for r in records if r["kind"] == "reissue" and r.get("aborts")},
            filtered={r["seq"]: (r["reward_sum"], r["rows"]) for r in records if r["kind"] == "filtered"},
            failed={r["seq"]: r["outcomes"] for r in records if r["kind"] == "failed"},
        )
