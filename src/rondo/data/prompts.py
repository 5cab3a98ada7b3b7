"""Prompts for RL and for evaluation, by their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rondo.chat import Messages, as_messages
from rondo.config.schema import SourceConfig
from rondo.data.mixture import Place
from rondo.data.prompt_tokens import PromptEncoder
from rondo.data.sources import open_sources
from rondo.data.stream import Kept, Overlong, SourceStream, encode_source
from rondo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptStream(SourceStream[tuple[np.ndarray, "Messages | None"]]):
    """The endless stream of training prompts: `prompt(seq)` is a function of `seq` and of the constructor's
    arguments.

    Sources are interleaved by weight and each is shuffled anew in every pass over it (see `Mixture`); batches
    may straddle epochs. Raises ConfigError and DataError (file, line, remedy) for anything wrong in any row.
    """

    def __init__(
        self,
        sources: tuple[SourceConfig, ...],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        overlong: Overlong = "drop",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        encoder = PromptEncoder(tokenizer, max_prompt_tokens, overlong)
        super().__init__(sources, encoder, shuffle=shuffle, seed=seed)
        self._chat = tokenizer.chat_template is not None

    def prompt(self, seq: int) -> Prompt:
        """The prompt at sequence number `seq` (from 0, without end)."""
        place = self._mixture.place(seq)
        return _prompt(self._kept[place.source], place, seq, self._chat)


def eval_prompts(
    sources: tuple[SourceConfig, ...],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    overlong: Overlong = "drop",
    limit: int | None = None,
) -> list[Prompt]:
    """Every prompt of the evaluation sources once, in file order; `limit` takes the first ones of each source
    in turn.

    Prompt ids are `eval:source/0/row`, so that none is also a training prompt's. Without sources: none.
    """
    if not sources:
        return []
    encoder = PromptEncoder(tokenizer, max_prompt_tokens, overlong)
    kept = [encode_source(source, encoder) for source in open_sources(sources)]
    in_turn = sorted((position, i) for i, part in enumerate(kept) for position in range(len(part.items)))
    chosen = sorted((i, position) for position, i in in_turn[:limit])
    chat = tokenizer.chat_template is not None
    return [
        _prompt(kept[i], Place(i, 0, position), seq, chat, "eval:")
        for seq, (i, position) in enumerate(chosen)
    ]


def _prompt(
    kept: Kept[tuple[np.ndarray, Messages | None]], place: Place, seq: int, chat: bool, prefix: str = ""
) -> Prompt:
    source, row = kept.source, int(kept.rows[place.position])
    token_ids, messages = kept.items[place.position]
    columns, key = source.rows[row], source.config.prompt_key
    if messages is None:
        messages = as_messages(columns[key], source.config.system_prompt) if chat else ()
    fields = {name: value for name, value in columns.items() if name != key}
    prompt_id = f"{prefix}{source.name}/{place.epoch}/{row}"
    return Prompt(seq, prompt_id, source.name, token_ids, fields, messages)
