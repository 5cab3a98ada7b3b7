"""Conversations to token ids and a mask of what is learned.

A conversation is cut at the borders of its assistant turns and tokenised piece by piece, so that the tokens
before a turn are exactly those that a rollout would be prompted with, whatever stands behind the border.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rondo.chat.encode import check_written, common_start, opening_of, render, tokenise
from rondo.chat.messages import Conversation, Message, Messages
from rondo.chat.stops import stop_token_ids
from rondo.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Literal["sampled", "template", "messages", "eos"]
_THOUGHT_KEYS = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # of messages, where it is no part of the content


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    tools: Sequence[Any] | None = None,
    *,
    turns: Turns = "sampled",
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns token ids (int32 [T]) and a mask (uint8 [T]) of each conversation. tools: an entry for each.

    The tokens go up to the end of the last assistant turn; the mask is 1 on assistant turns that are learnt.
    A turn is what follows its generation prompt, the end-of-turn token included, white space behind that
    excluded. turns: `template` includes it; `messages` does, and writes each message by itself; `eos` ends
    the one answer with the end-of-sequence token instead. Without a chat template a conversation is one user
    and one assistant message: raw text, answer, end-of-sequence token. Raises DataError when there is no
    assistant turn, or the template re-renders what came before a turn so that the turn's place is not
    defined.
    """
    cut = [_pieces(tokenizer, c, tools[i] if tools else None, turns) for i, c in enumerate(conversations)]
    anchor = tokenizer.eos_token or ""
    texts = [(anchor if i else "") + text for pieces in cut for i, (text, _) in enumerate(pieces)]
    encoded = iter(tokenise(tokenizer, texts, special=False))
    out = []
    for pieces in cut:
        ids, mask = [], []
        for i, (_, trained) in enumerate(pieces):
            tokens = next(encoded)
            # Behind an end-of-sequence token a piece is tokenised as inside a text: no dummy prefix space.
            tokens = tokens[1:] if i and anchor else tokens
            ids.append(tokens)
            mask.append(np.full(len(tokens), trained, np.uint8))
        out.append((np.concatenate(ids), np.concatenate(mask)))
    return out


def learns_to_end(tokenizer: PreTrainedTokenizerBase, turns: Turns = "sampled") -> bool:
    """Says whether a token that ends responses is among those that are learnt of an answer. turns: how a
    conversation becomes tokens.
    """
    said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    try:
        ((ids, mask),) = encode_conversations(tokenizer, [Conversation(said)], turns=turns)
    except DataError:  # the template takes no such conversation: rows will say what it takes
        return True
    return not set(stop_token_ids(tokenizer)).isdisjoint(ids[mask > 0].tolist())


def loses_thoughts(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> bool:
    """Says whether an answer that is learnt has a thought, and the template leaves that out because another
    answer follows.
    """
    messages, unlearnt, _ = conversation
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    thoughts = {i: thought for i in turns[:-1] if i not in unlearnt and (thought := _thought(messages[i]))}
    if not thoughts or tokenizer.chat_template is None:
        return False
    whole = render(tokenizer, messages[: turns[-1] + 1], generation=False)
    return any(
        # One that is written nowhere, not even in a last answer, is no loss of this kind.
        thought not in whole and thought in render(tokenizer, messages[: i + 1], generation=False)
        for i, thought in thoughts.items()
    )


def _thought(message: Message) -> str:
    """Returns what an answer says that its author thought; empty: nothing."""
    apart = next((message[key] for key in _THOUGHT_KEYS if isinstance(message.get(key), str)), "")
    before, closed, _ = str(message["content"]).partition("</think>")
    return (apart or (before.rpartition("<think>")[2] if closed else "")).strip()


def _pieces(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, tools: Any, how: Turns
) -> list[tuple[str, bool]]:
    """Cuts the conversation's text at the borders of assistant turns: (text, is a turn to be learnt)."""
    messages, unlearnt, _ = conversation
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(f"no assistant turn to learn from; roles are {[m['role'] for m in messages]}")
    if tokenizer.chat_template is None:
        return _raw_pieces(tokenizer, messages, is_learnt=not unlearnt)
    messages = messages[: turns[-1] + 1]
    check_written(tokenizer, messages, tools, generation=False)
    if how == "eos":
        return _ended_by_eos(tokenizer, conversation, tools)
    if how == "messages":
        return _each_by_itself(tokenizer, messages, tools, unlearnt)
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
        end = _turn_end(tokenizer, messages, turn, tools, whole, len(header))
        if how == "template":
            end = len(whole) - len(whole[end:].lstrip())
        borders += [len(header), end]
    pieces = [whole[start:stop] for start, stop in pairwise(borders)]
    # Before each turn stands what is not the assistant's.
    learnt = [place for turn in turns for place in (False, turn not in unlearnt)]
    return list(zip(pieces, learnt, strict=True))


def _ended_by_eos(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, tools: Any
) -> list[tuple[str, bool]]:
    """Returns the prompt with the opening of an answer, and the answer with the end-of-sequence token."""
    *asked, answer = conversation.messages
    if any(message["role"] == "assistant" for message in asked) or answer["role"] != "assistant":
        raise DataError(
            "data.turns=eos is for a prompt and one answer; for whole conversations set data.turns=template"
        )
    text = str(answer["content"]) + (tokenizer.eos_token or "")
    opened = render(tokenizer, asked, tools=tools, generation=True)
    return [(opened, False), (text, not conversation.unlearnt)]


def _each_by_itself(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Any, unlearnt: Collection[int]
) -> list[tuple[str, bool]]:
    """Returns what the template writes of each message alone, without the system prompt of its own that it
    writes in front of each but the first.
    """
    asked: Message = {"role": "user", "content": ""}
    one, two = (render(tokenizer, [asked] * number, generation=False) for number in (1, 2))
    own, opening = one[: 2 * len(one) - len(two)], opening_of(tokenizer)
    pieces = []
    for place, message in enumerate(messages):
        text = render(tokenizer, [message], tools=None if place else tools, generation=False)
        if place and message["role"] != "system":
            text = text.removeprefix(own)
        if message["role"] == "assistant":
            pieces += [(text[: len(opening)], False), (text[len(opening) :], place not in unlearnt)]
        else:
            pieces.append((text, False))
    return pieces


def _turn_end(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, turn: int, tools: Any, whole: str, start: int
) -> int:
    """Returns where in `whole` the assistant turn that starts at `start` ends, its end-of-turn token
    included.
    """
    last = turn == len(messages) - 1
    through = whole if last else render(tokenizer, messages[: turn + 1], tools=tools, generation=False)
    if whole.startswith(through):
        return max(start, len(through.rstrip()))
    # The template renders a last turn differently from an earlier one (Qwen3 drops its thinking): look for
    # the token.
    ends = [tokenizer.convert_ids_to_tokens(token) for token in stop_token_ids(tokenizer)]
    found = [(whole.find(end, start), end) for end in ends if end in whole[start:]]
    if not found:
        raise DataError(
            "the chat template is not prefix-stable and marks no end of turn: where assistant message "
            f"{turn} ends cannot be "
            "told. Use a template that renders a message the same whatever follows (model.chat_template)"
        )
    at, end = min(found)
    return at + len(end)


def _raw_pieces(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, is_learnt: bool
) -> list[tuple[str, bool]]:
    if [message["role"] for message in messages] != ["user", "assistant"]:
        raise ConfigError(
            f"a conversation with roles {[m['role'] for m in messages]} needs a chat template and the "
            "tokenizer has none: "
            "set model.chat_template to a Jinja file, or give rows one prompt and one response"
        )
    prefix = tokenizer.bos_token or "" if _adds_bos(tokenizer) else ""
    answer = str(messages[1]["content"]) + (tokenizer.eos_token or "")
    return [(prefix + str(messages[0]["content"]), False), (answer, is_learnt)]


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    (ids,) = tokenise(tokenizer, ["a"], special=True)
    return tokenizer.bos_token_id is not None and ids[:1].tolist() == [tokenizer.bos_token_id]


def _difference(header: str, whole: str) -> str:
    at = len(common_start(header, whole))
    return f"…{header[max(0, at - 20) : at + 20]!r}… against …{whole[max(0, at - 20) : at + 20]!r}…"
