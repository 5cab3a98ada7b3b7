"""Collections of texts that can be searched: read once into an index in the cache folder, here or behind
Search-R1's HTTP API. It knows nothing of agents (docs/search.md).

Importing it imports nothing: `rondo --help` does, for the command.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rondo_search.corpus import Passage
    from rondo_search.index import MOST_RESULTS, Hit, Index, check_query, index_of

__all__ = ("MOST_RESULTS", "Hit", "Index", "Passage", "check_query", "index_of")


def __getattr__(name: str) -> Any:
    """Imports what is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rondo_search import index

    return getattr(index, name)
