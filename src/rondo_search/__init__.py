"""Collections of texts that can be searched: read once into an index in the cache folder, here or behind
Search-R1's HTTP API. It knows nothing of agents (docs/search.md).
"""

from rondo_search.corpus import Passage
from rondo_search.index import MOST_RESULTS, Hit, Index, check_query, index_of

__all__ = ["MOST_RESULTS", "Hit", "Index", "Passage", "check_query", "index_of"]
