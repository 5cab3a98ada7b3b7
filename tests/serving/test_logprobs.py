"""What each token of an answer is: its bytes, of which those of several tokens may be one character."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rondo.chat import decode
from tests.byte_tokenizers import LETTERS, SPECIAL, byte_tokenizer
from tests.serving.conftest import MODEL, with_client
from tests.serving.test_endpoint import ASK
from tests.serving.test_sessions import says_tokens

SAID = [
    b" n",
    b"\xc3",
    b"\xa9 ",
    "中".encode(),
    b"\xe6\x96",
    b"\x87",
    b" \xf0",
    b"\x9f",
    b"\x98\x80",
    b"\xef\xbf",
]
SAID += [b"\xbd", b" <0xE4>", b"."]
WORDS = [
    b" ",
    b"n",
    b"\xc3",
    b"\xa9",
    " 中".encode(),
    b"\xe6",
    b"\x96",
    b"\x87",
    b" ",
    b"\xf0",
    b"\x9f",
    b"\x98",
    b"\x80",
]
WORDS += ["\ufffd".encode(), b" ", b"<", b"0xE4>", b"."]
ASCII = [bytes([byte]) for byte in range(33, 127)]


def gpt2() -> tuple[Any, list[int], list[bytes]]:
    """Returns a tokenizer of bytes, and an answer's tokens with the bytes of each."""
    tokenizer = byte_tokenizer(list(dict.fromkeys([*SAID, *ASCII])))
    names = ["".join(LETTERS[byte] for byte in piece) for piece in SAID]
    return tokenizer, [*map(tokenizer.convert_tokens_to_ids, names)], SAID


def llama2() -> tuple[Any, list[int], list[bytes]]:
    """Returns one of words and bytes, which leaves out the space that a text begins with."""

    def name(piece: bytes) -> str:
        text = piece.decode(errors="replace").replace(" ", "▁")
        return f"<0x{piece[0]:02X}>" if len(piece) == 1 and piece not in (b" ", b"0") else text

    vocabulary = {name: i for i, name in enumerate(dict.fromkeys([*map(name, WORDS), *"abcdefgh"]))}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL)
    return tokenizer, [vocabulary[name(word)] for word in WORDS], [b"", *WORDS[1:]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama2])
def test_the_bytes_of_tokens_are_those_of_the_text(make: Any, stream: bool) -> None:
    tokenizer, ids, said = make()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    generate, _ = says_tokens([*ids, tokenizer.eos_token_id], "stop")

    async def use(client: openai.AsyncOpenAI) -> tuple[str, list[Any]]:
        asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "logprobs": True}
        if not stream:
            (choice,) = (await client.chat.completions.create(**asked)).choices
            return choice.message.content, choice.logprobs.content
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **asked)]
        choices = [chunk.choices[0] for chunk in chunks[1:]]
        text = "".join(one.delta.content or "" for one in choices)
        return text, [token for one in choices for token in one.logprobs.content]

    text, tokens = with_client(generate, use, tokenizer=tokenizer)
    own = [None if token.bytes is None else bytes(token.bytes) for token in tokens]
    assert own == [*said, None]
    assert text == decode(tokenizer, ids) == b"".join(said).decode()
    assert text.strip() == "né 中文 😀\ufffd <0xE4>."
    assert [token.token for token in tokens] == [*(one.decode(errors="replace") for one in said), SPECIAL]
