"""What clients ask of other servers and there is not here: refused by name with what to use instead, as the
table in docs/endpoint.md has it. `python -m tests.serving.test_missing` writes the table anew.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from rondo.rollout import NativeEngine
from rondo.serving.problems import missing_here
from rondo.serving.requests import ChatRequest, TextRequest
from tests.serving.conftest import MODEL, TOKEN, post, served, with_client

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "endpoint.md"
MARK = "<!-- made by `python -m tests.serving.test_missing` of src/rondo/serving/missing.tsv -->\n"
ROWS = [
    line.split("\t")
    for line in (ROOT / "src/rondo/serving/missing.tsv").read_text("utf-8").splitlines()
    if not line.startswith("#")
]
PARAMETERS = [name for name, *_ in ROWS if not name.startswith("/")]
PATHS = [name for name, *_ in ROWS if name.startswith("/")]
BODY = {"model": MODEL, "max_tokens": 1, "seed": 1}
CHAT = {**BODY, "messages": [{"role": "user", "content": "2 + 2?"}]}
TEXT = {**BODY, "prompt": "2 + 2?"}


def table() -> str:
    """The rows, as the page has them."""
    lines = ["| parameter or path | taken | what to use instead | asked for by |", "|---|---|---|---|"]
    for name, neutral, instead, who in ROWS:
        values = [f"`{json.dumps(value)}`" for value in json.loads(neutral or "[]")]
        lines.append(f"| `{name}` | {', '.join(values)} | {instead} | {who} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2].startswith(table() + "\n")
    assert len({name for name, *_ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (TextRequest, text_params.CompletionCreateParamsBase),
    ],
)
def test_every_parameter_of_openais_client_is_read_or_in_the_table(kind: Any, theirs: Any) -> None:
    assert set(theirs.__annotations__) - set(kind.model_fields) - {"stream"} <= set(PARAMETERS)
    assert not set(kind.model_fields) & set(PARAMETERS)


def others(neutral: list[Any]) -> list[Any]:
    """Values that ask for something, one of the neutral ones' type among them."""
    more = [not value if isinstance(value, bool) else value + 1 for value in neutral if value in (0, 1)]
    return ["something", *more]


def test_each_parameter_is_refused_by_name_unless_it_asks_for_nothing(engine: NativeEngine) -> None:
    async def main() -> None:
        async with served(engine.generate) as (_, url):
            plain = {path: (await post(url, path, body))[1] for path, body in BODIES.items()}
            for name, written, instead, _ in ROWS[: len(PARAMETERS)]:
                neutral = json.loads(written)
                for path, body in BODIES.items():
                    for value in [None, *neutral]:
                        status, answer = await post(url, path, {**body, name: value})
                        assert status == 200, (name, value, answer)
                        assert answer["choices"] == plain[path]["choices"]
                    for value in others(neutral):
                        status, answer = await post(url, path, {**body, name: value})
                        said = f"{name}: is not supported here: {instead}"
                        assert (status, answer["error"]["message"]) == (400, said), (name, value)
                        assert answer["error"]["param"] == name
                        assert answer["error"]["code"] == "unsupported_parameter"

    asyncio.run(main())


BODIES: dict[str, Any] = {"/chat/completions": CHAT, "/completions": TEXT}


def test_each_path_is_refused_by_name(engine: NativeEngine) -> None:
    async def main() -> None:
        async with served(engine.generate) as (_, url):
            root = url.removesuffix("/v1")
            for name, _, instead, _ in ROWS[len(PARAMETERS) :]:
                for path in (name, f"{name}/one"):
                    status, answer = await post(root, path, {})
                    assert status == 404
                    assert answer["error"]["message"] == f"{path} is not supported here: {instead}"
                    assert answer["error"]["code"] == "unsupported_endpoint"
            status, answer = await post(root, "/v1/generateContent", {})
            assert (status, answer["error"]["code"]) == (404, "unknown_url")
            assert answer["error"]["message"] == (
                "/v1/generateContent is no path here; there are: /health, /metrics, /v1/chat/completions, "
                "/v1/completions, /v1/models, /v1/models/{model}, /v1/sessions/{name}"
            )

    asyncio.run(main())


def test_what_openais_client_shows_of_them(engine: NativeEngine) -> None:
    async def ask(client: openai.AsyncOpenAI) -> list[str]:
        messages: Any = CHAT["messages"]
        calls = [
            client.responses.create(model=MODEL, input="2 + 2?"),
            client.embeddings.create(model=MODEL, input="2 + 2?"),
            client.chat.completions.create(
                model=MODEL, messages=messages, response_format={"type": "json_object"}
            ),
            client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=5),
            client.completions.create(model=MODEL, prompt=["a", "b"]),
            client.completions.create(model=MODEL, prompt="a", echo=True, logprobs=0),
            client.completions.create(model=MODEL, prompt="a", logprobs=1),
        ]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [openai.NotFoundError] * 2 + [openai.BadRequestError] * 5
        return [error.body["message"] for error in errors]  # type: ignore[union-attr]

    said = with_client(engine.generate, ask)
    missing = {name: one.instead for name, one in missing_here().items()}
    assert said[0] == f"/v1/responses is not supported here: {missing['/v1/responses']}"
    assert said[1] == f"/v1/embeddings is not supported here: {missing['/v1/embeddings']}"
    assert said[2] == f"response_format: is not supported here: {missing['response_format']}"
    assert said[3].startswith(
        "top_logprobs: only the chosen token's log-prob is there, as no others are kept"
    )
    assert said[4].startswith("prompt: several prompts in one request are not supported here: send one requ")
    assert said[5] == f"echo: is not supported here: {missing['echo']}"
    assert said[6].startswith("logprobs: only the chosen token's log-prob is there, as no others are kept")


def test_no_body_is_needed_to_hear_of_a_path_and_the_key_is(engine: NativeEngine) -> None:
    async def main() -> list[int]:
        async with served(engine.generate) as (_, url):
            keys = (f"Bearer {TOKEN}", "Bearer another")
            return [(await post(url, "/responses", b"", Authorization=key))[0] for key in keys]

    assert asyncio.run(main()) == [404, 401]


if __name__ == "__main__":
    before, mark, after = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(before + mark + table() + "\n" + after.partition("\n\n")[2], encoding="utf-8")
