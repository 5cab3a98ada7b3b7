"""Prometheus' text format (version 0.0.4), and what a server counts for it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rondo import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper bounds, in seconds, of the classes of a histogram.
_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

Labels = Mapping[str, str]


class Metrics:
    """What a server has done since its start; it belongs to the event loop."""

    def __init__(self) -> None:
        # By route and status.
        self.requests: Counter[tuple[str, int]] = Counter()
        self.requests_in_flight = 0
        # Of every request once, whatever its n.
        self.prompt_tokens = 0
        self.generated_tokens = 0
        # Of answers to requests with tools, by what became of them: `ok`, or why a call is malformed.
        self.tool_calls: Counter[str] = Counter()
        # Of the last tokens; -1: there were none.
        self.policy_version = -1
        self._sequences = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0

    def generated(self, tokens: int, seconds: float) -> None:
        """Counts a sequence that has ended; seconds: in the engine, its queue included."""
        self.generated_tokens += tokens
        self._sequences[bisect_left(_BOUNDS, seconds)] += 1
        self._seconds += seconds

    def text(self, about: Labels, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Writes all. about: labels of `rondo_info`. gauges: (help, value) of further ones, by name."""
        by_route = [
            ({"route": route, "status": str(status)}, count)
            for (route, status), count in sorted(self.requests.items())
        ]
        by_outcome = [({"outcome": outcome}, count) for outcome, count in sorted(self.tool_calls.items())]
        lines = [
            *family("info", "gauge", "What is served.", [({"version": __version__, **about}, 1)]),
            *family("http_requests_total", "counter", "Requests that were answered.", by_route),
            *_value("http_requests_in_flight", "gauge", "Requests in work.", self.requests_in_flight),
            *_value("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            *_value("generated_tokens_total", "counter", "Tokens of answers.", self.generated_tokens),
            *family("tool_calls_total", "counter", "Tool calls in answers.", by_outcome),
            *_value("policy_version", "gauge", "Version of the weights.", self.policy_version),
        ]
        for name, (told, value) in gauges.items():
            lines += _value(name, "gauge", told, value)
        return "\n".join([*lines, *self._histogram(), ""])

    def _histogram(self) -> Iterator[str]:
        name, count = "rondo_sequence_seconds", 0
        yield f"# HELP {name} Seconds of a sequence in the engine, its queue included."
        yield f"# TYPE {name} histogram"
        for bound, here in zip((*_BOUNDS, "+Inf"), self._sequences, strict=True):
            count += here
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._seconds!r}"
        yield f"{name}_count {count}"


def _value(name: str, kind: str, told: str, value: float) -> list[str]:
    return family(name, kind, told, [({}, value)])


def family(name: str, kind: str, told: str, values: Sequence[tuple[Labels, float]]) -> list[str]:
    """Returns the lines of one metric of rondo.

    kind: gauge, counter … told: what it is, in a line. values: with their labels.
    """
    help_text = told.replace("\\", r"\\").replace("\n", r"\n")
    samples = [f"rondo_{name}{_written(labels)} {value!r}" for labels, value in values]
    return [f"# HELP rondo_{name} {help_text}", f"# TYPE rondo_{name} {kind}", *samples]


def _written(labels: Labels) -> str:
    parts = []
    for name, text in labels.items():
        escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        parts.append(f'{name}="{escaped}"')
    return "{" + ",".join(parts) + "}" if parts else ""
