"""`rondo search`: a corpus that can be searched, here or by other machines."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rondo.core.errors import ConfigError
from rondo.system.access import SEARCH_KEY, access_of, add_access
from rondo.system.streams import clean_text

if TYPE_CHECKING:
    from rondo_search import Index

HELP = "search a corpus, or serve it to other machines"
QUERY = "print the passages that fit a query best"
SERVE = "answer queries by Search-R1's HTTP API"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser("search", help=HELP, description=HELP)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    serve = actions.add_parser("serve", help=SERVE, description=SERVE)
    query = actions.add_parser("query", help=QUERY, description=QUERY)
    for action in (serve, query):
        action.add_argument(
            "corpus", help="file of JSON lines, folder of texts, or function (path/to/file.py:name)"
        )
        action.add_argument("--index", default="sqlite", help="sqlite (default), tantivy or dense")
        action.add_argument("--encoder", default="", help="folder of the model that --index dense needs")
        action.add_argument("-k", type=int, default=3, help="passages for a query (default: 3)")
    add_access(serve, SEARCH_KEY)
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    query.add_argument("words", help="the query")


def run(args: argparse.Namespace) -> int:
    """Does what the action says."""
    from rondo_search import MOST_RESULTS, index_of

    if not 1 <= args.k <= MOST_RESULTS:
        raise ConfigError(f"-k {args.k}: it must be 1 to {MOST_RESULTS}")
    index = index_of(args.corpus, backend=args.index, encoder=args.encoder)
    return {"query": _query, "serve": _serve}[args.action](args, index)


def _query(args: argparse.Namespace, index: Index) -> int:
    """Prints ids, scores and passages."""
    for hit in index.search(args.words, args.k):
        passage = hit.passage  # text of others, and `| head` leads to the terminal, too
        print(clean_text(f"{hit.score:8.3f}  {passage.id}  {passage.title}\n          {passage.text}"))
    return 0


def _serve(args: argparse.Namespace, index: Index) -> int:
    """Prints the URL, then serves until Ctrl-C."""
    import threading

    from rondo_search.server import RetrieverServer

    access, made = access_of(args, SEARCH_KEY)
    server = RetrieverServer(index, args.host, args.port, access, default_k=args.k)
    try:
        print(f"url={server.url}/retrieve")
        if made:
            print(made)
        print(f"corpus: {args.corpus}, index: {args.index}; Ctrl-C ends it", flush=True)
        threading.Event().wait()
    finally:
        server.close()
    return 0
