"""`rondo search serve` in a process of its own, asked raw and by the tool; and the commands' errors."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rondo.cli import main as cli
from rondo.core.errors import ToolError
from rondo.system.access import Access
from rondo_search import Hit, Index, Passage, index_of
from rondo_search.server import RetrieverServer
from rondo_search.tool import RetrieverError, Search, retrieve
from tests.messages import full_text
from tests.waiting import served_by

MOON = {"id": "7", "contents": '"Moon"\nIt goes around the earth, and has no air.'}
SUN = {"id": "1", "contents": '"Sun"\nThe sun is a star. Stars shine.'}
JSON = {"Content-Type": "application/json"}
UNTITLED = {"id": "4", "contents": '""\nA star without a title'}


@pytest.fixture
def url(corpus: str) -> Iterator[str]:
    with served_by("search", "serve", corpus, "--no-key") as url:
        yield url


def post(url: str, body: Any) -> tuple[int, Any]:
    """Status and answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, JSON), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_server_of_ours_says_what_the_local_tool_says(url: str, corpus: str) -> None:
    """Ids, titles with quotes and without, texts of several lines; and Search-R1's bodies, raw."""
    for query in ("stars", "milk zebra", "earth sun", "zebra", "title", "big", "AND OR", 'air "'):
        for k in (1, 5):
            assert Search(url=url, k=k)(query) == Search(corpus=corpus, k=k)(query)
            hits = index_of(corpus).search(query, k)
            assert retrieve(url, query, k) == hits
    for tool in (Search(url=url), Search(corpus=corpus)):
        with pytest.raises(ToolError, match="the query has no word in it"):
            tool("?!")
        with pytest.raises(ToolError, match=full_text("the query has 10001 characters; it may")):
            tool("a" * 10_001)

    status, said = post(url, {"queries": ["air", "?!", "star shining"], "topk": 2, "return_scores": True})
    assert status == 200
    assert [[each["document"] for each in hits] for hits in said["result"]] == [[MOON], [], [SUN, UNTITLED]]
    scores = [each["score"] for each in said["result"][2]]
    assert scores[0] > scores[1] > 0
    assert post(url, {"queries": ["air"]}) == (200, {"result": [[MOON]]})
    assert len(post(url, {"queries": ["star"], "topk": None})[1]["result"][0]) == 3  # its own -k


def test_what_it_does_not_take(url: str) -> None:
    wrong = {
        b"[": 422,
        b"{}": 422,
        b'{"queries": "a"}': 422,
        b'{"queries": ["a"], "topk": 0}': 422,
        b'{"queries": ["a"], "topk": 101}': 422,
        b" " * ((1 << 20) + 1): 413,
    }
    for body, status in wrong.items():
        got, said = post(url, body)
        assert (got, list(said)) == (status, ["error"])
    many = {"queries": [1] * 1000}
    assert len(post(url, many)[1]["error"]) == 10  # what a client sent is not sent back whole
    server = url.removesuffix("/retrieve")
    assert len(post(f"{server}/{'a' * 9000}", {})[1]["error"]) < 200
    assert post(f"{server}/other", {})[0] == 404
    with urllib.request.urlopen(f"{server}/health", timeout=60) as answer:
        assert (answer.status, json.load(answer)) == (200, {"status": "ok"})


def test_the_client_bears_the_key_and_takes_it_nowhere_else(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends it on is down; the other one is not asked."""
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.headers.get("Authorization", ""))
            self.send_response(302)
            self.send_header("Location", f"{url}/retrieve")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setenv("RONDO_SEARCH_TOKEN", "a-key")
    server = RetrieverServer(index_of(corpus), "127.0.0.1", 0, Access(("a-key",)))
    elsewhere = HTTPServer(("127.0.0.1", 0), Elsewhere)
    url = f"http://127.0.0.1:{elsewhere.server_port}"
    thread = threading.Thread(target=elsewhere.handle_request)
    thread.start()
    try:
        assert len(retrieve(f"{server.url}/retrieve", "stars", 1)) == 1
        with pytest.raises(RetrieverError, match="HTTP Error 302"):
            retrieve(f"{url}/retrieve", "stars", 1)
        monkeypatch.delenv("RONDO_SEARCH_TOKEN")
        with pytest.raises(RetrieverError, match="HTTP Error 401"):
            retrieve(f"{server.url}/retrieve", "stars", 1)
    finally:
        thread.join(60)
        elsewhere.server_close()
        server.close()
    assert asked == ["Bearer a-key"]


@pytest.mark.slow
def test_many_at_a_time(url: str, corpus: str) -> None:
    queries = [("star", "earth", "milk", "air")[i % 4] for i in range(200)]
    with ThreadPoolExecutor(50) as threads:
        found = list(threads.map(lambda query: retrieve(url, query, 3), queries))
    assert found == [index_of(corpus).search(query, 3) for query in queries]


class Slow:
    """A backend of an index that answers when it may."""

    identity = "slow"

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()

    def build(self, *_: Any) -> None: ...

    def open(self, *_: Any) -> None: ...

    def best(self, query: str, k: int) -> list[tuple[int, float]]:
        self.asked.set()
        assert self.may.wait(60)
        return [(1, 2.5)]


def test_what_was_asked_is_answered_when_it_ends(corpus: str) -> None:
    slow = Slow()
    server = RetrieverServer(Index(index_of(corpus).database, slow), "127.0.0.1", 0, Access())
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(retrieve, f"{server.url}/retrieve", "a", 1)
        assert slow.asked.wait(60)
        ended = threads.submit(server.close)
        slow.may.set()
        assert answer.result(60) == [
            Hit(Passage("7", "Moon", "It goes around the earth, and has no air."), 2.5)
        ]
        ended.result(60)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_a_query_from_the_command_line(corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["search", "query", corpus, "milk", "-k", "1"]) == 0
    (score, *head), text = (line.split() for line in capsys.readouterr().out.splitlines()[:2])
    assert float(score) > 0
    assert head == ["a", "The", '"big"', "cheese"]
    assert text == "The cheese is made of milk.".split()


def test_what_cannot_be_served(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, told in (
            (["serve", "no.jsonl"], "there is no corpus no.jsonl"),
            (["serve", str(empty)], "empty.jsonl: the corpus is empty"),
            (["serve", corpus, "--port", port], f"cannot listen on 127.0.0.1:{port}: "),
            (["serve", corpus, "--port", "70000"], "cannot listen on 127.0.0.1:70000: "),
            (["serve", corpus, "--index", "lucene"], "there is no index 'lucene'"),
            (["serve", corpus, "--index", "dense"], "encoder is the model's folder"),
            (["query", corpus, "?"], "the query has no word in it"),
            (["query", corpus, "a", "-k", "0"], "-k 0: it must be 1 to 100"),
            (["query", "no_such_module:rows", "a"], "no_such_module"),
        ):
            assert cli.main(["search", *arguments]) == 2
            assert told in capsys.readouterr().err
