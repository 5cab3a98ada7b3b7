"""Prompts of a source to token ids, once, at a run's start: those that are too long are cut or dropped."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.chat import Messages, as_messages, encode_prompt, encode_prompts
from rondo.data.sources import Source
from rondo.data.stream import Overlong, encode_together, tools_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Makes prompts of a source into token ids, and cuts or drops those that are too long."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, overlong: Overlong) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.overlong = overlong
        self.limit = f"data.max_prompt_tokens={max_tokens}"

    def __call__(self, source: Source, rows: range) -> list[tuple[np.ndarray, Messages | None] | None]:
        """(token ids, messages if they were cut) of each row; None drops it."""
        prompts = [source.prompt(row) for row in rows]
        encode = functools.partial(encode_prompts, self.tokenizer, system=source.config.system_prompt)
        encoded = encode_together(source, rows, encode, prompts)
        return [
            (ids, None) if len(ids) <= self.max_tokens else self._too_long(source, row, prompt, ids)
            for row, prompt, ids in zip(rows, prompts, encoded, strict=True)
        ]

    def _too_long(
        self, source: Source, row: int, prompt: Any, ids: np.ndarray
    ) -> tuple[np.ndarray, Messages | None] | None:
        if self.overlong == "drop":
            return None
        if self.overlong == "error":
            raise source.error(
                row,
                f"the prompt has {len(ids)} tokens, more than "
                f"data.max_prompt_tokens={self.max_tokens}; raise it, or set data.overlong_prompts to drop "
                "or truncate_left",
            )
        if self.tokenizer.chat_template is None:
            return self._cut(ids, self.max_tokens), None
        messages = as_messages(prompt, source.config.system_prompt)
        return self._cut_last_message(source, row, messages, len(ids))

    def _cut(self, ids: np.ndarray, size: int) -> np.ndarray:
        return ids[len(ids) - size :] if self.overlong == "truncate_left" else ids[:size]

    def _cut_last_message(
        self, source: Source, row: int, messages: Messages, length: int
    ) -> tuple[np.ndarray, Messages]:
        """Shorten the text of the last message until the prompt fits, so that the template's own tokens stay
        whole.
        """
        last = messages[-1]
        if not isinstance(last["content"], str):
            raise source.error(row, "only text can be truncated, and the last message has parts")
        content = np.asarray(self.tokenizer(last["content"], add_special_tokens=False)["input_ids"], np.int32)
        size, tools = len(content) - (length - self.max_tokens), tools_of(source, row)
        while size > 0:
            text = str(self.tokenizer.decode(self._cut(content, size)))
            cut = (*messages[:-1], {**last, "content": text})
            ids = encode_prompt(self.tokenizer, cut, None, tools)
            if len(ids) <= self.max_tokens:
                return ids, cut
            size -= len(ids) - self.max_tokens
        raise source.error(
            row,
            f"the prompt has {length} tokens and does not fit in "
            f"{self.max_tokens} even without its last message; raise data.max_prompt_tokens or set "
            "data.overlong_prompts=drop",
        )
