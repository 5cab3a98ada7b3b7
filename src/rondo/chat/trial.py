"""Renders a chat template once within limits of time and memory: python trial.py SECONDS < a request

A template is a program: it cannot reach out of Jinja's sandbox, but it can compute for hours and fill the
memory. Here the kernel ends it. It runs as a file, with jinja2 and without rondo, torch and transformers:
that takes a tenth of a second. The environment is that of transformers. What the template raises is of no
interest here: rendering it in earnest says it.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 2**29  # Python and jinja2 take a tenth of it
BEGUN = "begun"
"""Is written when all is ready; then the length of the text, in characters."""
OUT_OF_MEMORY = 3
"""The exit code where the memory did not suffice; where the time did not, the process ends by SIGXCPU."""


class Generation(jinja2.ext.Extension):
    """Parses transformers' `{% generation %} … {% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns what stands inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def environment(now: Callable[[], datetime.datetime]) -> jinja2.Environment:
    """Returns an environment like that of transformers, with this clock."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": lambda layout: now().strftime(layout)}
    return made


def main(cpu_seconds: int) -> int:
    """Renders the request's template. Returns the exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    request = json.load(sys.stdin)
    templates = environment(datetime.datetime.now)
    sys.stdout.write(f"{BEGUN}\n")
    sys.stdout.flush()
    try:
        text = templates.from_string(request["template"]).render(request["variables"])
    except MemoryError:
        return OUT_OF_MEMORY
    sys.stdout.write(f"{len(text)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
