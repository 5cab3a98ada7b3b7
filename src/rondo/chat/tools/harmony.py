"""gpt-oss's channels: an answer is several messages, some of which are calls."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rondo.chat.tools.calls import Region, held_back

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


def harmony_pieces(text: str) -> list[str | Region]:
    """Returns the texts for the user (channel `final`, and `commentary` to nobody) and the calls of an
    answer, in order. What the model thinks (`analysis`) and headers are neither.
    """
    if _MESSAGE not in text and "<|channel|>" not in text:
        return [text]
    return [said for said, _ in _messages(text)]


def settled_harmony(text: str) -> str:
    """Returns the part of an unfinished answer's text that is for the user however it goes on."""
    shown = []
    for said, ended in _messages(text):
        if isinstance(said, Region):
            break
        shown.append(said if ended else said[: len(said) - held_back(said, (_START, *_ENDS))])
    return join_harmony(shown)


def join_harmony(texts: list[str]) -> str:
    """Returns several texts of one answer as one."""
    return "\n".join(filter(None, texts))


def _messages(text: str) -> Iterator[tuple[str | Region, bool]]:
    """Yields the messages for the user and the calls, in order; the flag says whether one has ended."""
    parts = re.split(f"(?={re.escape(_START)})", text)
    for i, raw in enumerate(parts):
        header, message, rest = raw.partition(_MESSAGE)
        if " to=" in f" {header}":
            end = _END.search(rest)
            body = raw[: len(raw) - len(rest) + end.start()] if end else raw
            yield Region(raw, body, closed=bool(message)), True
        elif message:
            end = _END.search(rest)
            channel = _CHANNEL.search(header)
            if channel is None or channel[1] in ("final", "commentary"):
                yield rest[: end.start()] if end else rest, bool(end) or i < len(parts) - 1
