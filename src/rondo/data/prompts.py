"""Prompts for RL and for evaluation, by their place. They become token ids once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.chat import (
    Conversation,
    Messages,
    as_messages,
    encode_prompt,
    encode_prompts,
    opening_of,
    template_keys,
)
from rondo.config.schema import SourceConfig
from rondo.core.images import ImageRef
from rondo.core.types import Prompt
from rondo.data.chosen import ChosenPrompts, Sampler
from rondo.data.encoding import (
    Encoder,
    Overlong,
    RowCheck,
    StreamItem,
    encode_source,
    encode_together,
)
from rondo.data.images import Images, uncut
from rondo.data.mixture import StreamRow
from rondo.data.sources import Source, open_sources
from rondo.data.stream import SourceStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Token ids, and the messages if they were cut.
Encoded = tuple[np.ndarray, Messages | None]


class PromptEncoder(Encoder[Encoded]):
    """Makes prompts into token ids."""

    def __call__(self, source: Source, rows: Sequence[int]) -> list[Encoded | None]:
        read = [self._prompt(source, row) for row in rows]
        texts = [one if isinstance(one, str) else one.for_template() for one in read]
        encode = functools.partial(encode_prompts, self.tokenizer, system=source.config.system_prompt)
        encoded = encode_together(source, rows, encode, texts)
        found: list[Encoded | None] = []
        for row, prompt, ids in zip(rows, read, encoded, strict=True):
            if not isinstance(prompt, str):
                (ids,) = source.expanded(row, [ids], prompt.images)
            if len(ids) <= self.max_prompt_tokens:
                found.append((ids, None))
            else:
                found.append(self._too_long(source, row, prompt, ids))
        return found

    def _prompt(self, source: Source, row: int) -> str | Conversation:
        prompt = source.prompt(row)
        return prompt if isinstance(prompt, str) and source.images is None else source.read(row, prompt)

    def _too_long(
        self, source: Source, row: int, prompt: str | Conversation, ids: np.ndarray
    ) -> Encoded | None:
        if self.overlong == "drop":
            self.drop(source, row, len(ids))
            return None
        if not isinstance(prompt, str) and prompt.images and self.overlong != "error":
            raise source.error(row, uncut(len(ids), self.max_prompt_tokens))
        if self.overlong == "error":
            raise source.error(
                row,
                f"the prompt has {len(ids)} tokens{self.parts(source, row)}, more than "
                f"data.max_prompt_tokens={self.max_prompt_tokens}; raise it, or set data.overlong_prompts to "
                "drop or truncate_left",
            )
        if self.tokenizer.chat_template is None:
            return self.cut(ids, self.max_prompt_tokens), None
        messages = as_messages(
            prompt if isinstance(prompt, str) else prompt.messages, source.config.system_prompt
        )
        return self._cut_last_message(source, row, messages, len(ids))

    def parts(self, source: Source, row: int) -> str:
        """Says how many of a prompt's tokens are schemas of tools, and how many are images."""
        prompt, system, tools = self._prompt(source, row), source.config.system_prompt, source.tools(row)
        said = prompt if isinstance(prompt, str) else prompt.for_template()
        written = encode_prompt(self.tokenizer, said, system, tools)
        found = []
        if tools:
            schemas = len(written) - len(encode_prompt(self.tokenizer, said, system))
            which = "rollout.tools" if source.shared_tools else "column 'tools'"
            found.append(f"{schemas} are the schemas of {which}")
        if not isinstance(prompt, str) and prompt.images:
            (expanded,) = source.expanded(row, [written], prompt.images)
            found.append(f"{len(expanded) - len(written)} are images")
        return f", of which {' and '.join(found)}" if found else ""

    def _cut_last_message(self, source: Source, row: int, messages: Messages, length: int) -> Encoded:
        """Shortens the last message until the prompt fits."""
        last, tools = messages[-1], source.tools(row)

        def with_text(text: str) -> Encoded:
            cut = (*messages[:-1], {**last, "content": text})
            return encode_prompt(self.tokenizer, cut, None, tools), cut

        return self.shortened(source, row, last["content"], length, with_text)


class PromptStream(SourceStream[Encoded]):
    """The endless stream of training prompts: `prompt(seq)` is a function of `seq` and of the constructor's
    arguments, unless a sampler chooses rows.
    """

    encoder = PromptEncoder
    chosen: ChosenPrompts | None = None
    """What `data.sampler` has chosen; None: the order is that of the numbers."""

    @functools.cached_property
    def _opening(self) -> str | None:
        return _opening(self.tokenizer)

    def prompt(self, seq: int) -> Prompt:
        """Returns the prompt at sequence number `seq` (from 0, without end). Raises DataError, also for one
        that no sampler has chosen yet.
        """
        if self.chosen is None:
            return self.in_order(seq)
        choice = self.chosen[seq]
        # A row may be chosen any number of times: the number is what makes the id its own.
        found = self.item_of(choice.source, choice.row, epoch=seq)
        assert found is not None  # it was short enough when it was chosen
        return _prompt(found, seq, self._opening, prefix="")

    def in_order(self, seq: int) -> Prompt:
        """Returns the prompt that is at `seq` without a sampler."""
        return _prompt(self.item(seq), seq, self._opening, prefix="")

    def choose_by(self, sampler: Sampler, *, n: int, batch_size: int, seed: int, least: int) -> None:
        """Has a sampler choose the rows. n, batch_size, seed, least: see `ChosenPrompts`."""

        def fits(source: str, row: int) -> bool:
            return self.item_of(source, row) is not None

        self.chosen = ChosenPrompts(
            sampler, self.sizes, self.row_at, fits, n=n, batch_size=batch_size, seed=seed, least=least
        )


def eval_prompts(
    sources: tuple[SourceConfig, ...],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    overlong: Overlong = "drop",
    limit: int | None = None,
    tools: Sequence[Any] = (),
    also: RowCheck | None = None,
    images: Images | None = None,
) -> list[Prompt]:
    """Returns every prompt of the evaluation sources once, in file order; `limit` takes the first ones of
    each source in turn, and what is behind them is not read. also: what else is checked of each row.

    Prompt ids are `eval:source/0/row`, so that none is also a training prompt's. Without sources: none.
    """
    if not sources:
        return []
    encoder = PromptEncoder(tokenizer, max_prompt_tokens, overlong=overlong, also=also)
    opened = open_sources(sources, tools, template_keys(tokenizer), images)
    kept = [encode_source(source, encoder, limit) for source in opened]
    in_turn = sorted((position, i) for i, part in enumerate(kept) for position in range(len(part)))
    chosen = sorted((i, position) for position, i in in_turn[:limit])
    opening = _opening(tokenizer)
    return [
        _prompt(kept[i].at([StreamRow(i, 0, position)])[0], seq, opening, prefix="eval:")
        for seq, (i, position) in enumerate(chosen)
    ]


def _opening(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns `opening_of` a tokenizer with a chat template; None without one, where prompts are raw text."""
    return None if tokenizer.chat_template is None else opening_of(tokenizer)


def _prompt(found: StreamItem[Encoded], seq: int, opening: str | None, prefix: str) -> Prompt:
    source, row = found.source, found.row
    token_ids, messages = found.item
    columns, key = source.rows[row], source.config.prompt_key
    images: tuple[ImageRef, ...] = ()
    if messages is None:
        read = Conversation(()) if opening is None else source.read(row, columns[key])
        messages, images = read.messages, source.references(row, read.images)
    fields = source.fields(row)
    tools = source.tools(row)
    if tools:
        fields["tools"] = tools
    prompt_id = f"{prefix}{found.name}"
    text = columns[key] if isinstance(columns[key], str) else ""
    made = Prompt(seq, prompt_id, source.name, token_ids, fields, messages, opening or "", images, text)
    return made.lent()
