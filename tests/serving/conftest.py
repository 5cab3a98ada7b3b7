"""A tiny random model with the quickstart's tokenizer behind a real endpoint on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rondo.chat import stop_token_ids
from rondo.core.types import Completion, GenerateRequest, SamplingParams
from rondo.models.source import TokenizerSource
from rondo.recipes.quickstart import tokenizer
from rondo.rollout import NativeEngine
from rondo.serving import Endpoint, Sessions
from rondo.serving.http import ClientLimits, HttpServer
from tests.rollout.conftest import own_engine

TOKEN = "correct-horse"
MODEL = "tiny"
CONTEXT = 160
TOKENIZER = tokenizer()
STOPS = stop_token_ids(TOKENIZER)


@pytest.fixture(scope="session")
def engine() -> Iterator[NativeEngine]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    engine = own_engine(
        NativeEngine,
        config,
        parameters,
        tokenizer=TokenizerSource("rondo.recipes.quickstart.tokenizer"),
        max_concurrent=64,
        max_context=CONTEXT,
        decode="lean",
    )
    engine.set_version(3)
    yield engine
    engine.close()


@asynccontextmanager
async def served(generate: Any, **settings: Any) -> AsyncIterator[tuple[Endpoint, str]]:
    """(endpoint, base URL)."""
    limits, more_keys = settings.pop("limits", ClientLimits()), settings.pop("more_keys", ())
    settings = {"sessions": Sessions(8), "max_context": CONTEXT, "generate": generate} | settings
    endpoint = Endpoint(settings.pop("tokenizer", TOKENIZER), model=MODEL, **settings)
    server = HttpServer(endpoint, TOKEN, *more_keys, limits=limits)
    base_url = await server.start()
    try:
        yield endpoint, base_url
    finally:
        await server.close()


def with_client(
    generate: Any, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]], session: str = "", **settings: Any
) -> Any:
    """What `use` returns with a client to which base_url and api_key are all that it is told."""

    async def main() -> Any:
        async with served(generate, **settings) as (_, base_url):
            key = f"{TOKEN}:{session}" if session else TOKEN
            async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
                for resource in (client.chat.completions, client.completions):
                    resource.create = partial(_with_ids, resource.create)  # type: ignore[method-assign]
                return await use(client)

    return asyncio.run(main())


async def _with_ids(create: Any, *arguments: Any, **body: Any) -> Any:
    """Asks for the exact tokens, which most tests look at, unless the test says otherwise."""
    extra = {"return_token_ids": True} | body.pop("extra_body", {})
    return await create(*arguments, extra_body=extra, **body)


async def post(base_url: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """(status, body) of one POST with the right token."""
    headers = {"Authorization": f"Bearer {TOKEN}"} | headers
    async with aiohttp.ClientSession() as http:
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with http.post(base_url + path, headers=headers, **data) as answer:
            return answer.status, await answer.json()


def direct(engine: NativeEngine, prompt_ids: np.ndarray, seed: int, **sampling: Any) -> Completion:
    """The engine's own answer."""
    params = SamplingParams(**{"stop_token_ids": STOPS, **sampling})
    return asyncio.run(engine.generate(GenerateRequest("direct", prompt_ids, params, seed=seed)))
