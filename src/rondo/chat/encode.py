"""Messages and prompts to token ids through the tokenizer's chat template, and back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe
import numpy as np

from rondo.chat import trial
from rondo.chat.messages import Message, Messages, as_messages
from rondo.chat.options import template_error, template_options
from rondo.chat.written import Kind, check_kinds
from rondo.core.errors import ConfigError, DataError, half_of_a_pair
from rondo.system.border import users_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of `tokenise_up_to`: characters that are tokenised at once, characters of a usual token at most, and tokens
# that a cut may add.
_SLICE = 16384
_USUAL = 4
_SEAM = 64
# Of what a template writes: as many times the characters of messages and tools (escaped JSON has six), and as
# many more.
_MOST_TIMES, _MOST_MORE = 16, 2**20
_TRIAL_SECONDS = 5  # of processor time
_WAIT_SECONDS = 120.0  # for these, on a machine with other work
_tried: set[tuple[str, str, bool]] = set()
_ASKED = "rondo asks"
# Of a template and its options: whether it reads texts as parts, and what it writes.
_in_parts: dict[tuple[str, str], bool] = {}
_written: dict[tuple[str, str], dict[Kind, bool]] = {}
# That differ in all that can be written of them.
_TIMES = (lambda: datetime(2001, 2, 3, 4, 5, 6), lambda: datetime(2012, 11, 10, 19, 18, 17))


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: Any = None, generation: bool
) -> str:
    """Returns the template's text for `messages`, under the tokenizer's `template_options`; `generation` adds
    the header of the assistant's next turn. Where the tokenizer's attribute `try_chat_template` says so,
    what is rendered first is rendered in a process with limits before; see `trial`. In messages with images
    its attribute `image_text` says what is written for one, and what stands there then.

    Raises ConfigError when the tokenizer has no template, or one that is over these limits; DataError when
    the template refuses the messages, or writes far more than they hold.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            "chat messages need a chat template and the tokenizer has none: set model.chat_template to a "
            "Jinja file, "
            "use an instruction-tuned model's tokenizer, or give prompts as plain strings without a system "
            "prompt"
        )
    _try(tokenizer, messages, tools, generation)
    text = _rendered(tokenizer, as_template_reads(tokenizer, messages, tools), tools, generation)
    _check_length(len(text), messages, tools)
    return with_image_text(tokenizer, text, messages)


def check_written(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Any = None,
    *,
    first: int = 0,
    generation: bool = True,
) -> None:
    """Raises DataError for messages, or calls of tools, that the tokenizer's template leaves out: the model
    would not see them. first: those before were looked at in an earlier call; generation: as of `render`.
    """
    if tokenizer.chat_template is None:
        return
    try:
        key = tokenizer.get_chat_template(None, tools), repr(template_options(tokenizer))
    except ValueError:  # none of several is for this; rendering says so
        return

    def write(marked: Sequence[Message], marked_tools: Any) -> str:
        return render(tokenizer, marked, tools=marked_tools, generation=generation)

    check_kinds(messages, tools, first, _written.setdefault(key, {}), write, learnt=not generation)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Any, generation: bool
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation,
                **template_options(tokenizer),
            )
        )
    except Exception as error:  # a template is code, and may raise anything at what it does not expect
        roles = [message["role"] for message in messages]
        raise DataError(f"the chat template refuses messages with roles {roles}: {error}") from error


def as_template_reads(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any
) -> list[Message]:
    """Returns messages as the template reads them: those of some models that see want a content to be a list
    of parts, and leave out a text without a word.
    """
    try:
        key = tokenizer.get_chat_template(None, tools), repr(template_options(tokenizer))
    except ValueError:  # none of several is for this; rendering says so
        return list(messages)
    if key not in _in_parts:
        as_text = _writes(tokenizer, _ASKED, tools)
        _in_parts[key] = not as_text and _writes(tokenizer, _part(_ASKED), tools)
    if not _in_parts[key]:
        return list(messages)
    contents = [message["content"] for message in messages]
    parts = [_part(content) if isinstance(content, str) else content for content in contents]
    return [{**message, "content": part} for message, part in zip(messages, parts, strict=True)]


def _part(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def _writes(tokenizer: PreTrainedTokenizerBase, content: Any, tools: Any) -> bool:
    """Says whether a template writes `_ASKED`, which the content says."""
    messages: list[Message] = [{"role": "user", "content": content}]
    try:
        _try(tokenizer, messages, tools, False)
        return _ASKED in _rendered(tokenizer, messages, tools, False)
    except DataError:
        return False


def with_image_text(tokenizer: PreTrainedTokenizerBase, text: str, messages: Sequence[Message]) -> str:
    """Returns what a template wrote for messages, or its end, with what the model reads around images."""
    around = getattr(tokenizer, "image_text", None)
    if around is None or not any(isinstance(message["content"], list) for message in messages):
        return text
    return text.replace(*around)


def _try(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any, generation: bool
) -> None:
    """Renders in a child process with limits, where `try_chat_template` says so: once for each template and
    its options, and once more with contents that are lists. Raises ConfigError where a limit is exceeded.
    """
    if not getattr(tokenizer, "try_chat_template", False):
        return
    options, lists = template_options(tokenizer), any(isinstance(m["content"], list) for m in messages)
    try:
        template = tokenizer.get_chat_template(None, tools)
    except ValueError:  # none of several is for this; rendering says so
        return
    if (template, repr(options), lists) in _tried:
        return
    variables = _variables(tokenizer, messages, tools, generation)
    length = _length_in_a_trial({"template": template, "variables": variables})
    if length is not None:
        _check_length(length, messages, tools)
    _tried.add((template, repr(options), lists))


def _variables(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any, generation: bool
) -> dict[str, Any]:
    return {
        **tokenizer.special_tokens_map,
        **template_options(tokenizer),
        "messages": [{key: value for key, value in m.items() if value is not None} for m in messages],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": generation,
    }


def reads_clock(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any) -> bool:
    """Says whether the template's text for `messages` is another at another time. Raises as `render`."""
    if "strftime_now" not in str(tokenizer.chat_template):
        return False
    render(tokenizer, messages, tools=tools, generation=True)  # what it refuses, and its limits
    template = tokenizer.get_chat_template(None, tools)
    variables = _variables(tokenizer, as_template_reads(tokenizer, messages, tools), tools, True)
    texts = {trial.environment(now).from_string(template).render(variables) for now in _TIMES}
    return len(texts) > 1


def _length_in_a_trial(request: Mapping[str, Any]) -> int | None:
    """Returns how long the text of a trial is; None where the template raises. Raises ConfigError where it is
    over its limits.
    """
    folders = [str(Path(str(package.__file__)).parents[1]) for package in (jinja2, markupsafe)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-S", trial.__file__, str(_TRIAL_SECONDS)],
            input=json.dumps(request, default=str),
            capture_output=True,
            text=True,
            timeout=_WAIT_SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))},
        )
    except subprocess.TimeoutExpired as error:
        raise _over(f"took more than {_WAIT_SECONDS:g} s") from error
    if not done.stdout.startswith(trial.BEGUN):
        raise template_error(f"it cannot be tried in a process of its own: {done.stderr[-400:]}")
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        raise _over(f"took more than {_TRIAL_SECONDS} s of processor time")
    if done.returncode == trial.OUT_OF_MEMORY or done.returncode < 0:
        raise _over(f"took more than {trial.MEMORY_BYTES >> 20} MiB of memory, or ended its process")
    return int(done.stdout.split()[1]) if done.returncode == 0 else None


def _over(how: str) -> ConfigError:
    return template_error(
        f"rendering a first row {how}, and was ended: a loop or text without end in the template; take "
        "another one"
    )


def _check_length(length: int, messages: Sequence[Message], tools: Any) -> None:
    """Raises DataError for a text that a template has blown up."""
    if length <= _MOST_MORE:
        return
    given = len(json.dumps([list(messages), tools], default=str))
    if length > _MOST_TIMES * given + _MOST_MORE:
        raise DataError(
            f"the chat template writes {length} characters where messages and tools hold {given}; take "
            "another template (model.chat_template)"
        )


def common_start(one: str, other: str) -> str:
    """Returns what both texts begin with."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return one[: min(length, len(other))]


def opening_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what the tokenizer's template writes for an answer to follow; empty without a template."""
    if tokenizer.chat_template is None:
        return ""
    question = [{"role": "user", "content": "a"}]
    before, with_opening = (render(tokenizer, question, generation=more) for more in (False, True))
    return with_opening.removeprefix(before) if with_opening.startswith(before) else ""


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    system: str | None = None,
    tools: Sequence[Any] | None = None,
) -> list[np.ndarray]:
    """Returns token ids (int32 [P]) of each prompt, a string or messages that were read, ready for an answer
    to follow.

    With a chat template: rendered with the generation prompt. Without one: a string's own tokens (special
    tokens as the tokenizer adds them); messages and system prompts are a ConfigError. tools: one entry per
    prompt, for the template.
    """
    if not prompts:
        return []
    raw = [prompt for prompt in prompts if isinstance(prompt, str)]
    if tokenizer.chat_template is None and system is None and len(raw) == len(prompts):
        return tokenise(tokenizer, raw, special=True)
    texts = []
    for i, prompt in enumerate(prompts):
        messages = as_messages(prompt, system)
        if not messages or messages[-1]["role"] == "assistant":
            raise DataError(
                "a prompt must end with a message for the assistant to answer; it is empty or ends with "
                "'assistant'"
            )
        own_tools = tools[i] if tools else None
        check_written(tokenizer, messages, own_tools)
        texts.append(render(tokenizer, messages, tools=own_tools, generation=True))
    return tokenise(tokenizer, texts, special=False)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    system: str | None = None,
    tools: Any = None,
) -> np.ndarray:
    """Returns one prompt's token ids, int32 [P]; see `encode_prompts`."""
    return encode_prompts(tokenizer, [prompt], system, [tools])[0]


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[np.ndarray]:
    """Returns the tokens, int32 [N], of each text. special: with those that the tokenizer adds, but for an
    end-of-sequence token: what follows a text would stand behind the end.

    Raises DataError for what the tokenizer does not take.
    """
    try:
        with users_code("the tokenizer", DataError):
            encoded = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
    except DataError:
        for text in texts:
            _check_characters(text)
        raise
    found = [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]
    return [ids[:-1] for ids in found] if special and _adds_eos(tokenizer) else found


def _adds_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Says whether the tokenizer puts an end-of-sequence token behind every text."""
    own, added = (tokenizer("a", add_special_tokens=more)["input_ids"][-1:] for more in (False, True))
    return bool(added == [tokenizer.eos_token_id] != own)


def _check_characters(text: str) -> None:
    """Raises DataError for half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    half = half_of_a_pair(text)
    if half is not None:
        around = text[max(half - 20, 0) : half + 21]
        raise DataError(
            f"character {half + 1} of the text is {text[half]!r}, half of a surrogate pair and no character, "
            f"in {around!r}; take it out"
        )


def tokenise_up_to(tokenizer: PreTrainedTokenizerBase, text: str, limit: int, *, special: bool) -> np.ndarray:
    """Returns the tokens of `text`, int32 [N]. Of one that surely has more than `limit` it returns only some,
    more than `limit` too: a text of any length takes no more time and memory than one that fits.
    """
    slice_length = max(_SLICE, 2 * limit)
    if len(text) > _USUAL * limit + _SLICE:
        first: list[np.ndarray] = []
        for start in range(0, len(text), slice_length):
            first += tokenise(tokenizer, [text[start : start + slice_length]], special=False)
            # a cut makes other tokens beside it than the whole text has there, a few more
            if sum(map(len, first)) > limit + _SEAM * len(first):
                return np.concatenate(first)
    return tokenise(tokenizer, [text], special=special)[0]


def encode_piece(tokenizer: PreTrainedTokenizerBase, text: str, *, limit: int = sys.maxsize) -> np.ndarray:
    """Returns `text` as it is tokenised inside a longer one, int32 [N]: no special token, no prefix space.
    limit: see `tokenise_up_to`.
    """
    anchor = tokenizer.eos_token or ""
    tokens = tokenise_up_to(tokenizer, anchor + text, limit, special=False)
    return tokens[1:] if anchor else tokens


def decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray | Sequence[int], *, special: bool = False
) -> str:
    """Returns the text of `token_ids` without special tokens (end of turn, padding), as scorers see it.
    special: with them.
    """
    ids = np.asarray(token_ids).tolist()
    with users_code("the tokenizer's decode", DataError):
        return str(tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))
