"""Stop strings on the native engine's decode paths; `tests/engines/test_stop_strings.py` has what all do."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from rondo.core.errors import RefusedRequestError
from rondo.models.source import TokenizerSource
from rondo.rollout.native.blocks import BLOCK
from rondo.rollout.native.cache import block_bytes, layer_shapes
from tests.byte_tokenizers import ends_after, late_stop, tokenizer_of_101
from tests.messages import full_text
from tests.rollout.conftest import CONFIGS, build, make_engine, prompt, request, run

TOKENIZER = tokenizer_of_101()
SOURCE = TokenizerSource("tests.byte_tokenizers.tokenizer_of_101")


@pytest.mark.slow
@pytest.mark.parametrize("room", [None, 7])
def test_the_same_bits_up_to_the_stop_string(decode: str, room: int | None) -> None:
    """room: blocks of the cache, so few that sequences lose theirs and are filled again."""
    cache_bytes = (
        None if room is None else room * block_bytes(layer_shapes(CONFIGS["qwen3"]()), torch.float32)
    )
    engine = make_engine(
        build("qwen3"), decode=decode, tokenizer=SOURCE, max_context=4 * BLOCK, cache_bytes=cache_bytes
    )
    long = 3 * BLOCK
    free = run(engine, [request(str(i), prompt(5, i), long, seed=i) for i in range(6)])
    stops = [late_stop(TOKENIZER, one.token_ids, 1 + i) for i, one in enumerate(free)]
    asyncio.run(engine.stats())
    outs = run(
        engine, [request(str(i), prompt(5, i), long, seed=i, stop=(stop,)) for i, stop in enumerate(stops)]
    )
    assert (asyncio.run(engine.stats()).sums.get("rollout/preemptions", 0) > 0) == (room is not None)
    for out, whole, stop in zip(outs, free, stops, strict=True):
        count = ends_after(TOKENIZER, whole.token_ids, [stop])
        assert count is not None
        assert out.finish_reason == "stop"
        np.testing.assert_array_equal(out.token_ids, whole.token_ids[:count])
        np.testing.assert_array_equal(out.log_probs, whole.log_probs[:count])
    engine.close()


def test_an_engine_without_a_tokenizer_refuses_stop_strings() -> None:
    engine = make_engine(build("qwen3"))
    with pytest.raises(RefusedRequestError, match=full_text("this engine no tokenizer to find them")):
        run(engine, [request("a", prompt(4), 3, stop=("a",))])
    engine.close()
