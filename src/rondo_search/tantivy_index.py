"""Passages ranked by BM25 over words: tantivy. The one module that knows it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rondo.core.errors import ConfigError
from rondo_search.corpus import Passage
from rondo_search.words import words_of

_FOLDER = "tantivy"
_WRITER_BYTES = 128_000_000


class Tantivy:
    """English words are stemmed, as by `Words`; a score is the sum over title and text, each a BM25."""

    identity = "tantivy: en_stem, title and text"

    def __init__(self) -> None:
        if importlib.util.find_spec("tantivy") is None:
            raise ConfigError("index: tantivy needs a package: pip install 'rondo-rl[tantivy]'")

    def build(self, database: Path, passages: Iterable[Passage]) -> None:
        """Writes a folder beside the database."""
        import tantivy

        fields = tantivy.SchemaBuilder().add_integer_field("row", stored=True)
        for name in ("title", "text"):
            fields = fields.add_text_field(name, tokenizer_name="en_stem")
        folder = database.parent / _FOLDER
        folder.mkdir()
        index = tantivy.Index(fields.build(), path=str(folder))
        writer = index.writer(heap_size=_WRITER_BYTES, num_threads=1)  # rows stay in order
        for row, passage in enumerate(passages, 1):
            writer.add_document(tantivy.Document(row=row, title=passage.title, text=passage.text))
        writer.commit()
        writer.wait_merging_threads()

    def open(self, database: Path) -> None:
        """Opens that folder."""
        import tantivy

        self._index: Any = tantivy.Index.open(str(database.parent / _FOLDER))

    def best(self, query: str, k: int) -> list[tuple[int, float]]:
        """Returns the best rows; see `Backend`."""
        quoted = " ".join(f'"{word}"' for word in words_of(query))  # no word is an operator then
        searcher = self._index.searcher()
        found = searcher.search(self._index.parse_query(quoted, ["title", "text"]), k).hits
        rows = [(int(searcher.doc(address)["row"][0]), float(score)) for score, address in found]
        return sorted(rows, key=lambda each: (-each[1], each[0]))
