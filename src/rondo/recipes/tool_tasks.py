"""Tasks that a tiny model cannot work out and a tool can, made in this process: nothing is downloaded.

Demonstrations for the warm start mostly give up (`#### unknown`); some call the tool and answer with what it
said. Reinforcement learning finds out that asking pays. An eighth of the numbers is held out for evaluation.

Use from a recipe: `{type: function, task: rondo.recipes.tool_tasks.train_rows, options: {tool: calculator}}`,
`model.tokenizer: rondo.recipes.tool_tasks.tokenizer`.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rondo.core.errors import ConfigError
from rondo.recipes.quickstart import CHAT_TEMPLATE, fast_tokenizer, train_bpe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Numbers = tuple[int, int, int]

# For a model this small only names are written of its tools, so that a prompt stays short.
_SCHEMAS = "(tools | tojson)"
_NAMES = "(tools | map(attribute='function.name') | join(' '))"


@dataclass(frozen=True)
class ToolTask:
    """Questions over three numbers, and the call of a tool that answers them."""

    question: str
    """With {a}, {b} and {c}."""
    arguments: Callable[[int, int, int], dict[str, Any]]
    """Of the call."""
    answer: Callable[[int, int, int], int]
    """Computes the answer from the three numbers."""
    ranges: tuple[range, range, range]
    """Where each of the three numbers is drawn from."""
    result: str = "{answer}"
    """What the tool returns."""
    system: str = ""
    """What the agent writes before the question."""


TASKS: Mapping[str, ToolTask] = {
    "calculator": ToolTask(
        "What is {a}*{b}+{c}?",
        lambda a, b, c: {"expression": f"{a}*{b}+{c}"},
        lambda a, b, c: a * b + c,
        (range(2, 10), range(2, 10), range(2, 10)),
    ),
    "python": ToolTask(
        "How many numbers from {a} to {b} can be divided by {c}?",
        lambda a, b, c: {"code": f"print(len([x for x in range({a}, {b} + 1) if x % {c} == 0]))"},
        lambda a, b, c: len([x for x in range(a, b + 1) if x % c == 0]),
        (range(2, 10), range(10, 100), range(2, 10)),
        result="{answer}\n",
    ),
    # The agent and the tool of examples/agents_sdk.py.
    "multiply": ToolTask(
        "What is {a}*{b}?",
        lambda a, b, c: {"a": a, "b": b},
        lambda a, b, c: a * b,
        (range(11, 100), range(11, 100), range(1)),
        system="Solve the problem. End with #### and the number.",
    ),
}


def _problems(tool: str, stream: str, seed: int, held_out: bool) -> Iterator[Numbers]:
    """Yields numbers without end, a function of its arguments alone."""
    rng = random.Random(f"rondo tool tasks: {tool}: {stream}: {seed}")
    while True:
        a, b, c = (rng.choice(numbers) for numbers in TASKS[tool].ranges)
        if _is_held_out(tool, (a, b, c)) == held_out:
            yield a, b, c


def _is_held_out(tool: str, numbers: Numbers) -> bool:
    """Says whether only evaluation has these numbers: the same in every process and for every seed."""
    return zlib.crc32(f"{tool} {numbers}".encode()) % 8 == 0


def _check(tool: str, size: int) -> None:
    if tool not in TASKS:
        raise ConfigError(f"tool_tasks: tool must be one of {', '.join(TASKS)}, got {tool!r}")
    if size < 1:
        raise ConfigError(f"tool_tasks: size must be at least 1, got {size}")


def _rows(tool: str, size: int, numbers: Iterator[Numbers]) -> list[dict[str, Any]]:
    _check(tool, size)
    task = TASKS[tool]
    return [
        {"prompt": task.question.format(a=a, b=b, c=c), "answer": str(task.answer(a, b, c))}
        for a, b, c in itertools.islice(numbers, size)
    ]


def train_rows(tool: str, size: int = 4096, seed: int = 0) -> list[dict[str, Any]]:
    """Makes `size` training prompts: rows with prompt and answer (the number)."""
    return _rows(tool, size, _problems(tool, "train", seed, held_out=False))


def eval_rows(tool: str, size: int = 256, seed: int = 0) -> list[dict[str, Any]]:
    """Makes `size` test prompts, rows as in `train_rows`; no training prompt has their numbers."""
    return _rows(tool, size, _problems(tool, "eval", seed, held_out=True))


def demonstrations(
    tool: str, size: int = 4800, seed: int = 0, asking_share: float = 0.4
) -> list[dict[str, Any]]:
    """Makes conversations for the warm start: in `asking_share` of them the tool is asked, and answers; the
    others give up.
    """
    _check(tool, size)
    if not 0.0 <= asking_share <= 1.0:
        raise ConfigError(f"tool_tasks: asking_share must be from 0 to 1, got {asking_share}")
    rng = random.Random(f"rondo tool tasks: {tool}: giving up: {seed}")
    problems = itertools.islice(_problems(tool, "demonstrations", seed, held_out=False), size)
    return [_demonstration(tool, numbers, asks=rng.random() < asking_share) for numbers in problems]


def _demonstration(tool: str, numbers: Numbers, asks: bool) -> dict[str, Any]:
    task, (a, b, c) = TASKS[tool], numbers
    answer = task.answer(a, b, c)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question.format(a=a, b=b, c=c)}]
    if task.system:
        messages.insert(0, {"role": "system", "content": task.system})
    if asks:
        call = {"type": "function", "function": {"name": tool, "arguments": task.arguments(a, b, c)}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": task.result.format(answer=answer)})
    messages.append({"role": "assistant", "content": f"#### {answer if asks else 'unknown'}"})
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": tool}}]}


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE that is trained here on 200 demonstrations of each task: always the same
    vocabulary. Digits, template and special tokens are those of `rondo.recipes.quickstart.tokenizer`, but of
    tools its template writes only the names.
    """
    return tool_tokenizer(_bpe())


def tool_tokenizer(bpe: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of such a BPE, whose template writes only the names of tools."""
    assert _SCHEMAS in CHAT_TEMPLATE
    return fast_tokenizer(bpe, CHAT_TEMPLATE.replace(_SCHEMAS, _NAMES))


@functools.cache
def _bpe() -> str:
    rows = [row for tool in TASKS for row in demonstrations(tool, 200, asking_share=1.0)]
    said = [message for row in rows for message in row["messages"]]
    roles = [f"{role}\n" for role in ("tools", "system", "user", "assistant")] * 2
    texts = [message["content"] for message in said] + [name for name in TASKS for _ in range(2)]
    calls = [call["function"] for message in said for call in message.get("tool_calls", [])]
    return train_bpe([*roles, *texts, *map(json.dumps, calls)])
