"""What a run was given that an older rondo read otherwise: said once, where such a run goes on.

Since then a message's parts are joined, arguments of calls are objects, flags say what is learnt, nulls in
schemas and arguments are kept, and the tokens that a model's folder names end responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rondo.chat import FLAGS, stop_token_ids
from rondo.config import Config
from rondo.data.plain import plain
from rondo.data.sources import Source, open_sources
from rondo.trainers.program import open_tokenizer


def read_otherwise(config: Config) -> str:
    """Returns, in one line, what is in the sources that is read otherwise now, and whether responses end at
    other tokens. Reads all rows. Raises ConfigError and DataError as a run's start does.
    """
    there = [
        f"{source.name!r} ({source.origin}) has {', '.join(found)}"
        for sources in (config.data.train, config.data.eval)
        for source in (open_sources(sources) if sources else ())
        if (found := _found(source))
    ]
    tokenizer = open_tokenizer(config)
    ends = stop_token_ids(tokenizer)
    tokenizer.end_token_ids = ()
    added = [tokenizer.convert_ids_to_tokens(i) for i in ends if i not in stop_token_ids(tokenizer)]
    stops = f"end at {', '.join(map(repr, added))}, too" if added else "end at the same tokens"
    return (
        "an older rondo began this run, and read conversations otherwise: "
        f"{'; '.join(there) or 'no source has message parts, calls, flags or nulls'}; responses {stops}"
    )


def _found(source: Source) -> list[str]:
    found: set[str] = set()
    for row in source.rows:
        for name, value in row.items():
            if name == "tools" and _has_null(plain(value)):
                found.add("nulls")
            if isinstance(value, list | tuple):
                found.update(word for message in value for word in _said(message))
    return [word for word in ("message parts", "calls", "flags", "nulls") if word in found]


def _said(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping) or "role" not in message:
        return
    if not isinstance(message.get("content"), str | None):
        yield "message parts"
    if message.get("tool_calls"):
        yield "calls"
    if any(message.get(flag) is not None for flag in FLAGS):
        yield "flags"
    if any(_has_null(value) for value in plain(message.get("tool_calls") or ())):
        yield "nulls"


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(child is None or _has_null(child) for child in value.values())
    return isinstance(value, list) and any(map(_has_null, value))
