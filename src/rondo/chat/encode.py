"""Prompts and conversations to token ids through the tokenizer's chat template, and back.

A conversation is cut at the borders of its assistant turns and tokenised piece by piece, so that the tokens
before a turn are exactly those that a rollout would be prompted with, whatever stands behind the border.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from rondo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Messages = tuple[Message, ...]


def as_messages(prompt: Any, system: str | None = None) -> Messages:
    """A string becomes one user message; a list of {role, content, …} is checked. `system` goes in front of
    messages that have no system message of their own.

    Keys whose value is None are left out (Arrow fills them in). Raises DataError saying what is wrong with
    the messages.
    """
    if isinstance(prompt, str):
        messages: list[Message] = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        messages = [_checked(message, i) for i, message in enumerate(prompt)]
    else:
        raise DataError(
            f"a prompt must be a string or a list of messages, got {type(prompt).__name__}: {prompt!r:.80}"
        )
    if system is not None and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": system})
    return tuple(messages)


def _checked(message: Any, index: int) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(
            f"message {index} must be a mapping with role and content, got {type(message).__name__}"
        )
    if not isinstance(message.get("role"), str):
        raise DataError(
            f"message {index} has no 'role' (system, user, assistant, tool); it has {', '.join(message)}"
        )
    kept = {key: value for key, value in message.items() if value is not None}
    if "content" not in kept and "tool_calls" not in kept:
        raise DataError(f"message {index} ({message['role']}) has neither 'content' nor 'tool_calls'")
    if not isinstance(kept.get("content", ""), str | list):
        raise DataError(
            f"message {index} ({message['role']}): content is {type(kept['content']).__name__}, not a string"
        )
    kept.setdefault("content", "")
    return kept


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: Any = None, generation: bool
) -> str:
    """The template's text for `messages`; `generation` adds the header of the assistant's next turn.

    Raises ConfigError when the tokenizer has no template, DataError when the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            "chat messages need a chat template and the tokenizer has none: set model.chat_template to a "
            "Jinja file, "
            "use an instruction-tuned model's tokenizer, or give prompts as plain strings without a system "
            "prompt"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=generation
        )
    except (jinja2.TemplateError, TypeError) as error:
        roles = [message["role"] for message in messages]
        raise DataError(f"the chat template refuses messages with roles {roles}: {error}") from error
    return str(text)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    system: str | None = None,
    tools: Sequence[Any] | None = None,
) -> list[np.ndarray]:
    """Token ids (int32 [P]) of each prompt, a string or a list of messages, ready for an answer to follow.

    With a chat template: rendered with the generation prompt. Without one: a string's own tokens (special
    tokens as the tokenizer adds them); messages and system prompts are a ConfigError. tools: one entry per
    prompt, for the template.
    """
    if not prompts:
        return []
    if (
        tokenizer.chat_template is None
        and system is None
        and all(isinstance(prompt, str) for prompt in prompts)
    ):
        return _tokenise(tokenizer, list(prompts), special=True)
    texts = []
    for i, prompt in enumerate(prompts):
        messages = as_messages(prompt, system)
        if not messages or messages[-1]["role"] == "assistant":
            raise DataError(
                "a prompt must end with a message for the assistant to answer; it is empty or ends with "
                "'assistant'"
            )
        texts.append(render(tokenizer, messages, tools=tools[i] if tools else None, generation=True))
    return _tokenise(tokenizer, texts, special=False)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, system: str | None = None, tools: Any = None
) -> np.ndarray:
    """One prompt's token ids, int32 [P]. See `encode_prompts`."""
    return encode_prompts(tokenizer, [prompt], system, [tools])[0]


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    tools: Sequence[Any] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token_ids int32 [T], mask uint8 [T]) of each conversation; see `encode_conversation`."""
    cut = [
        _pieces(tokenizer, as_messages(c), tools[i] if tools else None) for i, c in enumerate(conversations)
    ]
    anchor = tokenizer.eos_token or ""
    texts = [(anchor if i else "") + text for pieces in cut for i, (text, _) in enumerate(pieces)]
    encoded = iter(_tokenise(tokenizer, texts, special=False))
    out = []
    for pieces in cut:
        ids, mask = [], []
        for i, (_, trained) in enumerate(pieces):
            tokens = next(encoded)
            # Behind an end-of-sequence token a piece is tokenised as it is inside a text (no dummy prefix
            # space).
            tokens = tokens[1:] if i and anchor else tokens
            ids.append(tokens)
            mask.append(np.full(len(tokens), trained, np.uint8))
        out.append((np.concatenate(ids), np.concatenate(mask)))
    return out


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int32 [T]) up to the end of the last assistant turn, and a mask (uint8 [T]) that is 1 on
    assistant turns.

    A turn is what follows its generation prompt, the end-of-turn token included, white space behind that
    excluded. Without a chat template a conversation is one user and one assistant message: raw text, answer,
    end-of-sequence token. Raises DataError when there is no assistant turn, or the template re-renders what
    came before a turn so that the turn's place is not defined.
    """
    return encode_conversations(tokenizer, [messages], [tools])[0]


def _pieces(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Any) -> list[tuple[str, bool]]:
    """The conversation's text cut at the borders of assistant turns: (text, is an assistant turn)."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(f"no assistant turn to learn from; roles are {[m['role'] for m in messages]}")
    if tokenizer.chat_template is None:
        return _raw_pieces(tokenizer, messages)
    messages = messages[: turns[-1] + 1]
    whole = render(tokenizer, messages, tools=tools, generation=False)
    borders = [0]
    for turn in turns:
        header = render(tokenizer, messages[:turn], tools=tools, generation=True)
        if not whole.startswith(header) or len(header) < borders[-1]:
            raise DataError(
                f"the chat template is not prefix-stable: what it renders before assistant message {turn} "
                "differs from what "
                f"it renders there in the whole conversation ({_difference(header, whole)}). Use a template "
                "that renders a "
                "message the same whatever follows (model.chat_template), or keep only the last assistant "
                "turn per row"
            )
        borders += [len(header), _turn_end(tokenizer, messages, turn, tools, whole, len(header))]
    return [(whole[start:stop], i % 2 == 1) for i, (start, stop) in enumerate(pairwise(borders))]


def _turn_end(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, turn: int, tools: Any, whole: str, start: int
) -> int:
    """Where in `whole` the assistant turn that starts at `start` ends, its end-of-turn token included."""
    last = turn == len(messages) - 1
    through = whole if last else render(tokenizer, messages[: turn + 1], tools=tools, generation=False)
    if whole.startswith(through):
        return max(start, len(through.rstrip()))
    # The template renders a last turn differently from an earlier one (Qwen3 drops its thinking): look for
    # the token.
    ends = [tokenizer.convert_ids_to_tokens(token) for token in stop_token_ids(tokenizer, ())]
    found = [(whole.find(end, start), end) for end in ends if end in whole[start:]]
    if not found:
        raise DataError(
            "the chat template is not prefix-stable and marks no end of turn: where assistant message "
            f"{turn} ends cannot be "
            "told. Use a template that renders a message the same whatever follows (model.chat_template)"
        )
    at, end = min(found)
    return at + len(end)


def _raw_pieces(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[tuple[str, bool]]:
    if [message["role"] for message in messages] != ["user", "assistant"]:
        raise ConfigError(
            f"a conversation with roles {[m['role'] for m in messages]} needs a chat template and the "
            "tokenizer has none: "
            "set model.chat_template to a Jinja file, or give rows one prompt and one response"
        )
    prefix = tokenizer.bos_token or "" if _adds_bos(tokenizer) else ""
    answer = str(messages[1]["content"]) + (tokenizer.eos_token or "")
    return [(prefix + str(messages[0]["content"]), False), (answer, True)]


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def _difference(header: str, whole: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(header, whole, strict=False)) if a != b),
        min(len(header), len(whole)),
    )
    return f"…{header[max(0, at - 20) : at + 20]!r}… against …{whole[max(0, at - 20) : at + 20]!r}…"


def _tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[np.ndarray]:
    encoded = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return [np.asarray(ids, np.int32) for ids in encoded]


def encode_piece(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """int32 [N]: `text` as it is tokenised inside a longer one (no special tokens, no dummy prefix space)."""
    anchor = tokenizer.eos_token or ""
    (tokens,) = _tokenise(tokenizer, [anchor + text], special=False)
    return tokens[1:] if anchor else tokens


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> tuple[int, ...]:
    """The tokens that end a response, sorted: end of sequence, the template's end of turn, and the strings in
    `stop`.

    Raises ConfigError when a string of `stop` is not one token.
    """
    ids = set()
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if tokenizer.chat_template is not None:
        ids |= end_of_turn_ids(tokenizer)
    for text in stop:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            pieces = tokenizer.convert_ids_to_tokens(tokens)
            raise ConfigError(
                f"rollout.stop: {text!r} is {len(tokens)} tokens for this tokenizer ({pieces}); it must be "
                "one"
            )
        ids.add(int(tokens[0]))
    return tuple(sorted(ids))


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special token that the template writes right behind an assistant's content, if it writes one."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "rondo"}
    text = render(tokenizer, [question, answer], generation=False)
    tail = text[text.rfind("rondo") + len("rondo") :].strip() if "rondo" in text else ""
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return {int(ids[0])} & special if ids else set()


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray | Sequence[int]) -> str:
    """The text of `token_ids` without special tokens (end of turn, padding), as scorers see it."""
    return str(
        tokenizer.decode(
            [int(t) for t in token_ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )
