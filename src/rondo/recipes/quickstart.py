"""The quickstart's task and tokenizer, made in this process: nothing is downloaded.

Two-step word problems over three numbers from 2 to 9. The worked answer shows both steps
(`3+9=12\\n12+9=21\\n#### 21`); most demonstrations answer lazily with a number from the text (`#### 3`), and
reinforcement learning finds out that showing the work pays. An eighth of the 512 number triples is held out
for evaluation: no test prompt's numbers occur in training.

Use from a recipe: `{type: function, task: rondo.recipes.quickstart.train_rows, size: 4096, seed: 0}`,
`model.tokenizer: rondo.recipes.quickstart.tokenizer`.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rondo.core.errors import ConfigError
from rondo.data.sources import import_reasoning_gym

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rondo.core.types import Prompt, Trajectory

Triple = tuple[int, int, int]

NAMES = "Tom Ana Ben Eva Max Mia Leo Zoe Sam Ivy Kim Raj Ada Hugo Nina Omar".split()
OBJECTS = (
    "apples pens books coins cards eggs cups keys nuts shells stamps toys buttons marbles "
    "pencils tickets flowers candles baskets feathers ribbons lemons"
).split()
NUMBERS = range(2, 10)
HELD_OUT_TRIPLES = 64

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__}


@dataclass(frozen=True)
class Template:
    """A wording, and the two operations of its answer: (a first b) second c."""

    text: str
    """The wording, with places for the numbers."""
    first: str
    """The operation of the first step."""
    second: str
    """The operation of the second step."""


TEMPLATES = (
    Template("{name} has {a} {things}, buys {b}, finds {c}. How many?", "+", "+"),
    Template("{a} red, {b} blue and {c} green {things}. How many?", "+", "+"),
    Template("{name} has {a} {things}, gets {b}, loses {c}. How many?", "+", "-"),
    Template("{name} had {a} {things}, gave {b}, got {c}. How many?", "-", "+"),
    Template("{name} saw {a} {things}, then {b}, then {c}. How many?", "+", "+"),
    Template("{name} took {a} {things}, won {b}, lent {c}. How many?", "+", "-"),
)


@dataclass(frozen=True)
class Problem:
    """One word problem."""

    text: str
    """The problem in words."""
    worked: str
    """Both steps and the answer."""
    answer: int
    """The number that is asked for."""
    numbers: Triple
    """As they stand in the text."""


def _solve(template: Template, numbers: Triple) -> tuple[int, int]:
    middle = _OPERATIONS[template.first](numbers[0], numbers[1])
    return middle, _OPERATIONS[template.second](middle, numbers[2])


def _problem(template: Template, numbers: Triple, name: str, things: str) -> Problem:
    a, b, c = numbers
    middle, answer = _solve(template, numbers)
    worked = f"{a}{template.first}{b}={middle}\n{middle}{template.second}{c}={answer}\n#### {answer}"
    return Problem(template.text.format(name=name, things=things, a=a, b=b, c=c), worked, answer, numbers)


def _all_triples() -> list[Triple]:
    return [(a, b, c) for a in NUMBERS for b in NUMBERS for c in NUMBERS]


@functools.cache
def held_out_triples() -> frozenset[Triple]:
    """The number triples that only evaluation prompts have: the same in every process and for every seed."""
    rng = random.Random("rondo quickstart: held-out triples")
    return frozenset(rng.sample(_all_triples(), HELD_OUT_TRIPLES))


def _problems(stream: str, seed: int, held_out: bool) -> Iterator[Problem]:
    """Yields random problems without end, from its arguments alone. No step has a negative result."""
    rng = random.Random(f"rondo quickstart: {stream}: {seed}")
    triples = [t for t in _all_triples() if (t in held_out_triples()) == held_out]
    possible = {t: [template for template in TEMPLATES if min(_solve(template, t)) >= 0] for t in triples}
    while True:
        numbers = rng.choice(triples)
        yield _problem(rng.choice(possible[numbers]), numbers, rng.choice(NAMES), rng.choice(OBJECTS))


def _distinct_rows(problems: Iterator[Problem], size: int, most: int) -> list[dict[str, Any]]:
    if not 0 < size <= most:
        raise ConfigError(f"quickstart: size must be from 1 to {most} distinct prompts, got {size}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < size:
        problem = next(problems)
        rows[problem.text] = {
            "prompt": problem.text,
            "answer": str(problem.answer),
            "solution": problem.worked,
        }
    return list(rows.values())


def train_rows(size: int = 4096, seed: int = 0) -> list[dict[str, Any]]:
    """Makes `size` distinct training prompts: rows with prompt, answer (the number) and solution (worked)."""
    return _distinct_rows(_problems("train", seed, held_out=False), size, most=100_000)


def eval_rows(size: int = 256, seed: int = 0) -> list[dict[str, Any]]:
    """Makes `size` distinct test prompts, rows as in `train_rows`; no training prompt has their triples."""
    return _distinct_rows(_problems("eval", seed, held_out=True), size, most=10_000)


def demonstrations(size: int = 4096, seed: int = 0, worked_share: float = 0.4) -> list[dict[str, Any]]:
    """Makes rows with prompt and response for the warm start: `worked_share` of them worked, the rest lazy
    (`#### 3`).
    """
    if size < 1 or not 0.0 <= worked_share <= 1.0:
        raise ConfigError(
            f"quickstart: need size >= 1 and worked_share in [0, 1], got {size} and {worked_share}"
        )
    rng = random.Random(f"rondo quickstart: lazy answers: {seed}")
    rows = []
    for problem in itertools.islice(_problems("demonstrations", seed, held_out=False), size):
        worked = rng.random() < worked_share
        response = problem.worked if worked else f"#### {rng.choice(problem.numbers)}"
        rows.append({"prompt": problem.text, "response": response})
    return rows


def pairs(
    size: int = 4096, seed: int = 0, mistake_share: float = 0.5, held_out: bool = False
) -> list[dict[str, Any]]:
    """Makes rows with prompt, chosen (the worked answer) and rejected: for `mistake_share` of them the
    working with a wrong result in one of its steps, for the others a wrong number from the text (`#### 3`).

    held_out: prompts as in `eval_rows`, whose numbers occur in no training prompt. ConfigError for impossible
    values.
    """
    if not 0.0 <= mistake_share <= 1.0:
        raise ConfigError(f"quickstart: mistake_share must be from 0 to 1, got {mistake_share}")
    rng = random.Random(f"rondo quickstart: rejected answers: {seed}")
    rows = []
    for row in (eval_rows if held_out else train_rows)(size, seed):
        mistaken = rng.random() < mistake_share
        rejected = _miscalculated(row["solution"], rng) if mistaken else _lazy(row, rng)
        rows.append({"prompt": row["prompt"], "chosen": row["solution"], "rejected": rejected})
    return rows


def _lazy(row: dict[str, Any], rng: random.Random) -> str:
    wrong = [number for number in re.findall(r"\d+", row["prompt"]) if number != row["answer"]]
    return f"#### {rng.choice(wrong) if wrong else int(row['answer']) + 1}"


def _miscalculated(worked: str, rng: random.Random) -> str:
    """Returns `3+9=12\\n12+9=21\\n#### 21` with the result of one step off by 1 or 2, and what follows from
    it.
    """
    first, second, _ = worked.split("\n")
    (task, middle), (sum_, result) = first.split("="), second.split("=")
    start, answer, rest = int(middle), int(result), sum_.removeprefix(middle)
    in_first = rng.random() < 0.5
    off = rng.choice([x for x in (-2, -1, 1, 2) if answer + x >= 0 and (start + x >= 0 or not in_first)])
    start += off if in_first else 0
    return f"{task}={start}\n{start}{rest}={answer + off}\n#### {answer + off}"


def longer_than(prompt: Prompt, trajectory: Trajectory, *, tokens: int) -> float:
    """A cost to constrain: 1 when the response has more than `tokens` tokens (worked answers: 16 to 20)."""
    return float(len(trajectory.response_ids) > tokens)


def chain_sum_demonstrations(
    size: int = 4096,
    seed: int = 0,
    worked_share: float = 0.4,
    terms: int = 4,
    held_out_seed: int | None = None,
    held_out_size: int = 256,
) -> list[dict[str, Any]]:
    """Makes demonstrations as above for reasoning_gym's `chain_sum` with `terms` one-digit numbers: worked
    term by term (`3-8=-5\\n-5+2=-3\\n#### -3`) or lazy (a number from the text).

    held_out_seed, held_out_size: the evaluation source's; its problems are left out. `seed` is the library's,
    whose entry i is a function of seed + i alone: two seeds that differ by less than `size` share entries.
    ConfigError for impossible values and without the package.
    """
    if size < 1 or terms < 2 or not 0.0 <= worked_share <= 1.0:
        raise ConfigError(
            "chain_sum_demonstrations: need size >= 1, terms >= 2 and worked_share in [0, 1], got "
            f"{size}, {terms} and {worked_share}"
        )
    held_out = set() if held_out_seed is None else set(_chain_sums(terms, held_out_size, held_out_seed))
    rng = random.Random(f"rondo quickstart: lazy chain sums: {seed}")
    rows = []
    for question, expression in _chain_sums(terms, size, seed):
        worked = rng.random() < worked_share
        lazy = rng.choice(expression[::2])
        if (question, expression) not in held_out:
            rows.append({"prompt": question, "response": _work_out(expression) if worked else f"#### {lazy}"})
    return rows


def _chain_sums(terms: int, size: int, seed: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields question and expression (`("3", "-", "8")`) of the library's entries."""
    options = {"min_terms": terms, "max_terms": terms, "min_digits": 1, "max_digits": 1}
    for entry in import_reasoning_gym().create_dataset("chain_sum", **options, size=size, seed=seed):
        yield entry["question"], tuple(entry["metadata"]["expression"].split())


def _work_out(expression: tuple[str, ...]) -> str:
    total, lines = int(expression[0]), []
    for operation, number in zip(expression[1::2], expression[2::2], strict=True):
        result = _OPERATIONS[operation](total, int(number))
        lines.append(f"{total}{operation}{number}={result}")
        total = result
    return "\n".join([*lines, f"#### {total}"])


SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{{- '<tool_call>' + ({'name': call.name, 'arguments': call.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE that is trained here on 2,000 generated examples: always the same vocabulary,
    in well under a second.

    Every digit is its own token, every word of the task is one token; ChatML template; special tokens for
    chat turns (`<|im_end|>` ends a turn and a sequence) and tool calls (these stay visible in decoded text).
    """
    return fast_tokenizer(_word_problem_bpe())


@functools.cache
def _word_problem_bpe() -> str:
    problems = itertools.islice(_problems("tokenizer", 0, held_out=False), 2000)
    return train_bpe(f"user\n{p.text}\nassistant\n{p.worked}" for p in problems)


def chain_sum_tokenizer() -> PreTrainedTokenizerFast:
    """Returns one like `tokenizer`, trained on 500 `chain_sum_demonstrations`. Needs reasoning_gym."""
    rows = chain_sum_demonstrations(500, seed=0, worked_share=1.0)
    return fast_tokenizer(train_bpe(f"user\n{row['prompt']}\nassistant\n{row['response']}" for row in rows))


def train_bpe(texts: Iterable[str], special: Sequence[str] = SPECIAL_TOKENS) -> str:
    """Returns a byte-level BPE of these texts as JSON: every digit is a token, every frequent word is one.
    special: the tokens that are numbered first.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # not reached: merging ends when every word is one token
        min_frequency=2,
        show_progress=False,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    return str(bpe.to_str())


def fast_tokenizer(bpe: str, chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of such a BPE: `<|im_end|>` ends a turn and a sequence."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
