"""The tool `search`: a corpus here, and a retriever behind a URL."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rondo.agents.tools import Toolbox, ToolFailedError, load_tools
from rondo.config.schema import FunctionConfig, ToolConfig
from rondo.core.errors import ConfigError, DataError, StorageError, ToolError
from rondo_search import index_of, words
from rondo_search.tool import Search
from tests.agents.scripted import call, episode, saying
from tests.serving.conftest import TOKENIZER
from tests.system.test_storage import files_no_larger_than
from tests.trainers.conftest import inline, metrics

ROWS = [
    {"id": 7, "title": "Moon", "text": "It goes around the earth, and has no air."},
    {"title": "Sun", "text": "The sun is a star. Stars shine."},
    {"id": "2", "contents": '"Cheese"\nThe cheese is made of milk.\nIt is no star.'},
    {"text": "The earth goes around the sun."},
]


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    return written(tmp_path / "passages.jsonl", ROWS)


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(query: str, **options: Any) -> tuple[Any, Toolbox]:
    box = Toolbox(load_tools([ToolConfig("search", options=options)]), TOKENIZER)

    async def main() -> Any:
        return (await asyncio.gather(box.call("search", {"query": query}), return_exceptions=True))[0]

    return asyncio.run(main()), box


def test_what_fits_best_comes_first(passages: Path) -> None:
    """With its title, as far as there is one, and cut off; words are stemmed, and all may be missing."""
    assert said("stars", corpus=str(passages), k=2)[0] == (
        "[1] Sun\nThe sun is a star. Stars shine.\n\n[2] Cheese\nThe cheese is made of milk.\nIt is no star."
    )
    assert said("milk zebra", corpus=str(passages), max_characters=10)[0] == "[1] Cheese\nThe cheese …"
    assert said("earth sun", corpus=str(passages), k=1)[0] == "[1] The earth goes around the sun."
    assert said("zebra", corpus=str(passages))[0] == "Nothing was found."


def test_the_schema_is_of_a_query(passages: Path) -> None:
    (tool,) = load_tools([ToolConfig("search", options={"corpus": str(passages)})])
    assert tool.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "the words"}},
        "required": ["query"],
    }


def bm25(docs: Sequence[Sequence[str]], query: Sequence[str]) -> dict[int, float]:
    """The formula (k1 = 1.2, b = 0.75), for those that have a word of the query."""
    length = sum(map(len, docs)) / len(docs)
    scores: dict[int, float] = {}
    for word in set(query):
        having = [i for i, doc in enumerate(docs) if word in doc]
        weight = math.log((len(docs) - len(having) + 0.5) / (len(having) + 0.5)) if having else 0.0
        for i in having if weight > 0 else ():
            count = docs[i].count(word)
            share = count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(docs[i]) / length))
            scores[i] = scores.get(i, 0.0) + weight * share
    return scores


def test_the_ranking_is_bm25s(tmp_path: Path) -> None:
    draw = random.Random(3)
    words = [f"w{i}" for i in range(60)]
    docs = [draw.choices(words, [1 / (i + 1) for i in range(60)], k=draw.randint(5, 30)) for _ in range(300)]
    index = index_of(str(written(tmp_path / "c.jsonl", [{"text": " ".join(doc)} for doc in docs])))
    for _ in range(50):
        query = draw.sample(words[5:], 3)
        scores = bm25(docs, query)
        hits = index.search(" ".join(["w0", *query]), 8)  # w0: in more than half
        found = [hit.passage.text.split() for hit in hits]
        best = sorted(scores.values(), reverse=True)[:8]
        assert [scores[docs.index(doc)] for doc in found] == pytest.approx(best)


def test_any_text_is_a_query(passages: Path) -> None:
    """FTS5's own signs are none here."""
    index = index_of(str(passages))
    for text in ('"', "NEAR(", "AND OR NOT", "title:", "^*", "-{", "'; DROP TABLE", "\x00", "\ud800", "é"):
        assert [hit.passage.title for hit in index.search(f"{text} shine", 1)] == ["Sun"]
    assert (
        len(index.search(" ".join(f"word{i}" for i in range(1_000)) + " sun", 4)) == 0
    )  # the first 64 count
    for text in ("", " ", "?!", "\ud800"):
        with pytest.raises(ToolError, match="the query has no word in it"):
            index.search(text, 4)


def test_an_index_is_made_once_for_what_a_corpus_holds(passages: Path, cache: Path) -> None:
    first = index_of(str(passages)).database
    made = first.stat().st_mtime_ns
    again = passages.rename(passages.with_name("other.jsonl"))
    assert index_of(str(again)).database == first
    assert list(cache.iterdir()) == [first.parent]
    assert first.stat().st_mtime_ns == made
    written(again, [{"text": "It has changed"}])
    assert index_of(str(again)).database == first  # a run goes on with what it began with
    hits = index_of(str(again), anew=True).search("changed", 1)
    assert [hit.passage.text for hit in hits] == ["It has changed"]
    shutil.rmtree(index_of(str(again)).database.parent)
    assert index_of(str(again)).database.exists()


def test_a_folder_of_texts(tmp_path: Path) -> None:
    """Paragraphs are joined up to 1,000 characters."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/a.md").write_text("# Heading\n\nfirst\n \n" + "x " * 480 + "\n\n" + "second " * 20)
    (folder / "b.txt").write_text("\n\n first\n\n\n")
    (folder / "c.html").write_text("first")
    found = [hit.passage for hit in index_of(str(folder)).search("first second", 9)]
    assert {(one.id, one.title, one.text[:10], len(one.text)) for one in found} == {
        ("b#0", "b", "first", 5),
        ("deep/a#0", "deep/a", "# Heading\n", 978),
        ("deep/a#1", "deep/a", "second sec", 139),
    }


def wrong(**options: Any) -> str:
    (tool,) = load_tools([ToolConfig("search", options=options)])
    assert tool.check is not None
    with pytest.raises((ConfigError, DataError)) as caught:
        tool.check()
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"text": "a"}\n{"text": \n', ":2: not a row of a corpus: Expecting value"),
        (b'\n{"title": "a"}\n', ":2: not a row of a corpus: it has no text: "),
        (b'{"text": " "}', ":1: not a row of a corpus: it has no text: "),
        (b'{"title": 3, "text": "a"}', ":1: not a row of a corpus: it has no text: "),
        (b"[1]", ":1: not a row of a corpus: it is no object"),
        (b'{"text": "\\ud800"}', ":1: not a row of a corpus: "),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ":2: no text in UTF-8: "),
        (b"\n", ": the corpus is empty; there is nothing to search in"),
    ],
)
def test_what_is_no_corpus_is_said_with_its_place(
    tmp_path: Path, cache: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    assert wrong(corpus=str(path)).startswith(f"{path}{told}")
    assert not list(cache.iterdir())  # no half of an index


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "needs a corpus (corpus: passages.jsonl) or a url, one of the two"),
        ({"corpus": "a", "url": "http://b"}, "one of the two"),
        ({"corpus": "no_such.jsonl"}, "search: there is no corpus no_such.jsonl"),
        ({"corpus": "a", "k": 0}, "k must be 1 to 100, got 0"),
        ({"corpus": "a", "max_characters": 0}, "max_characters must be at least 1"),
        ({"url": "localhost:8000"}, "'localhost:8000' is no http:// or https:// URL"),
        ({"url": "http://127.0.0.1:9"}, "the retriever http://127.0.0.1:9/retrieve does not answer: "),
    ],
)
def test_what_cannot_be_searched_is_said_before_the_run(options: dict[str, Any], told: str) -> None:
    message = wrong(**options)
    assert message.startswith("rollout.tools: search")
    assert told in message


def test_an_empty_folder(tmp_path: Path) -> None:
    assert (
        wrong(corpus=str(tmp_path)) == f"{tmp_path}: the corpus is empty: no file in it ends in .txt or .md"
    )


def test_a_python_that_cannot_search(passages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_TABLE", "CREATE VIRTUAL TABLE words USING fts99(title, text)")
    assert "cannot search texts (no such module: fts99): use one with FTS5" in wrong(corpus=str(passages))


def test_a_cache_without_room(tmp_path: Path, cache: Path) -> None:
    large = written(tmp_path / "c.jsonl", [{"text": f"{i} " * 1000} for i in range(100)])
    with (
        files_no_larger_than(50_000),
        pytest.raises(StorageError, match="or set XDG_CACHE_HOME"),
    ):
        index_of(str(large))
    assert not list(cache.iterdir())


# ---- a retriever


class Retriever(ThreadingHTTPServer):
    """Answers every request with one body, and keeps what it was asked."""

    def __init__(self, status: int, body: Any) -> None:
        asked: list[tuple[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                asked.append((self.path, json.loads(self.rfile.read(length))))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                """Is silent."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = asked
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def retriever() -> Iterator[Any]:
    """retriever(status, body) -> one that listens."""
    started: list[Retriever] = []

    def start(status: int, body: Any) -> Retriever:
        started.append(Retriever(status, body))
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def found(*contents: str) -> Mapping[str, Any]:
    return {"result": [[{"document": {"contents": each}, "score": 1.5} for each in contents]]}


def test_a_retriever_is_asked_as_search_r1s(retriever: Any) -> None:
    server = retriever(200, found('"Moon"\nIt has no air.', "no title", "beyond k"))
    assert said("air of the moon", url=server.url, k=2)[0] == "[1] Moon\nIt has no air.\n\n[2] no title"
    said("x", url=f"{server.url}/other")
    body = {"queries": ["air of the moon"], "topk": 2, "return_scores": True}
    assert server.asked == [
        ("/retrieve", body),
        ("/other", {**body, "queries": ["x"], "topk": 3}),
    ]
    assert said("x", url=retriever(200, found()).url)[0] == "Nothing was found."
    assert (
        said("x", url=retriever(200, {"result": [[{"text": "without scores"}]]}).url)[0]
        == "[1] without scores"
    )


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, {}, "does not answer: HTTP Error 500"),
        (200, {"results": []}, "does not answer as Search-R1's does"),
        (200, {"result": []}, "does not answer as Search-R1's does"),
        (200, {"result": [[{"document": {"id": 3}}]]}, "it has no text"),
        (200, [], "does not answer as Search-R1's does"),
    ],
)
def test_a_retriever_that_fails_is_no_observation(retriever: Any, status: int, body: Any, why: str) -> None:
    url = retriever(status, body).url
    answer, box = said("x", url=url)
    assert isinstance(answer, ToolFailedError)
    assert box.stats.failures == {"search": 1}
    assert why in box.failure
    assert why in wrong(url=url)


# ---- runs


def test_an_episode_that_searches(passages: Path) -> None:
    policy = saying(call("search", query="milk"), call("search", query="?"), "#### 7")
    tools = [ToolConfig("search", options={"corpus": str(passages), "k": 1})]
    trajectory, values = episode(policy, FunctionConfig("tools"), tools)
    assert (trajectory.outcome, len(trajectory.rows)) == ("scored", 1)
    assert "[1] Cheese\nThe cheese is made of milk." in policy.asked[1]
    assert "Error: the query has no word in it" in policy.asked[2]
    (result,) = trajectory.tool_results  # the second call came to nothing
    assert (result.tool, result.data) == ("search", {"ids": ["2"]})
    assert result.text == "[1] Cheese\nThe cheese is made of milk.\nIt is no star."
    assert (values["agent/tool_calls/search"], values["agent/tool_errors/search"]) == (2, 1)


def trained_on(passages: Path) -> tuple[list[str], list[str]]:
    """Of an episode that searches twice: the stretches of a row with mask 1, and those with mask 0."""
    answers = (call("search", query="milk"), call("search", query="moon"), "#### 7")
    tools = [ToolConfig("search", options={"corpus": str(passages), "k": 1})]
    trajectory, _ = episode(saying(*answers), FunctionConfig("tools"), tools)
    (row,) = trajectory.rows
    assert [turn.kind for turn in row.turns] == ["policy", "tool", "policy", "tool", "policy"]
    stretches: tuple[list[str], list[str]] = ([], [])
    for turn in row.turns:
        here = slice(turn.start, turn.stop)
        (bit,) = set(row.response_mask[here].tolist())
        assert set(row.rollout_log_probs[here].tolist()) == {-0.5 * bit}
        stretches[1 - bit].append(TOKENIZER.decode(row.response_ids[here]))
    return stretches


def test_what_a_search_finds_carries_no_loss(passages: Path) -> None:
    """To the token: the policy's turns alone are trained on, and other passages change nothing of them. What
    the mask hides reaches neither loss nor gradient: tests/algorithms/test_objective.py.
    """
    policy, tool = trained_on(passages)
    calls = [call("search", query=query) + "<|im_end|>" for query in ("milk", "moon")]
    assert policy == [*calls, "#### 7<|im_end|>"]
    around = "\n<|im_start|>user\n<tool_response>{}</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tool == [
        around.format("[1] Cheese\nThe cheese is made of milk.\nIt is no star."),
        around.format("[1] Moon\nIt goes around the earth, and has no air."),
    ]
    others = written(passages.with_name("others.jsonl"), [{"text": "milk and moon, in other words"}])
    assert trained_on(others) == (policy, [around.format("[1] milk and moon, in other words")] * 2)


@pytest.mark.slow
def test_training_with_a_corpus(run: Any, passages: Path, cache: Path) -> None:
    folder = run("searches", f"rollout.tools=[{{name: search, corpus: {passages}}}]")
    assert (folder / "rollouts/step-000002.parquet").exists()
    assert len(list(cache.iterdir())) == 1  # made when the recipe was checked


@pytest.mark.slow
def test_a_worker_has_its_index_before_an_episode(
    run: Any, passages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no check has built it, as on another machine; this policy calls no tool."""
    monkeypatch.setattr(Search, "check", None)
    folder = run("searches", f"rollout.tools=[{{name: search, corpus: {passages}}}]")
    assert not any(line.get("agent/tool_calls/search") for line in metrics(folder))
    assert len(list(cache.iterdir())) == 1


def test_a_recipe_with_a_corpus_that_is_not_there(recipe: Path) -> None:
    for options, told in (("corpus: no.jsonl", "there is no corpus no.jsonl"), ("corpsu: a", "'corpus'?")):
        done = inline("train", str(recipe), f"rollout.tools=[{{name: search, {options}}}]", check=False)
        assert done.returncode == 2
        assert told in done.stderr
