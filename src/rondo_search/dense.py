"""Passages ranked by what they mean: vectors of an encoder, in faiss, which no other module knows."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rondo.core.errors import ConfigError
from rondo_search.corpus import Passage, add_files

_FILE = "vectors.faiss"
_BATCH = 32  # passages that are encoded at a time
_MOST_TOKENS = 512


class Dense:
    """Vectors are means of the encoder's last states over a text's tokens, of length 1; a score is their
    product. Texts begin with `query: ` and `passage: `, as E5's (2212.03533).
    """

    def __init__(self, encoder: str) -> None:
        """Checks and hashes the encoder, which is loaded when it is first needed. encoder: a model's folder,
        with its tokenizer.
        """
        if importlib.util.find_spec("faiss") is None:
            raise ConfigError("index: dense needs a package: pip install 'rondo-rl[faiss]'")
        self._folder = Path(encoder)
        if not (self._folder / "config.json").is_file():
            raise ConfigError(f"encoder: {encoder} is no folder of a model: there is no config.json in it")
        digest = hashlib.blake2b(digest_size=12)
        add_files(digest, self._folder, sorted(path for path in self._folder.iterdir() if path.is_file()))
        self.identity = f"dense {_MOST_TOKENS} {digest.hexdigest()}"
        self._lock = threading.Lock()
        self._encoder: tuple[Any, Any] | None = None

    def build(self, database: Path, passages: Iterable[Passage]) -> None:
        """Writes the vectors beside the database."""
        import faiss

        index: Any = None
        rest = iter(passages)
        while some := list(islice(rest, _BATCH)):
            vectors = self._vectors([f"passage: {one.title} {one.text}" for one in some])
            index = index or faiss.IndexFlatIP(vectors.shape[1])
            index.add(vectors)
        faiss.write_index(index, str(database.parent / _FILE))

    def open(self, database: Path) -> None:
        """Reads the vectors, and the encoder."""
        import faiss

        self._index = faiss.read_index(str(database.parent / _FILE))
        self._vectors(["query: a"])

    def best(self, query: str, k: int) -> list[tuple[int, float]]:
        """Returns the best rows; see `Backend`."""
        vectors = self._vectors([f"query: {query}"])
        scores, rows = self._index.search(vectors, min(k, self._index.ntotal))
        found = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        return sorted(((row + 1, score) for row, score in found), key=lambda each: (-each[1], each[0]))

    def _vectors(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float32 [len(texts), H]."""
        import torch

        with self._lock, torch.inference_mode():
            tokenizer, model = self._loaded()
            batch = tokenizer(
                list(texts), padding=True, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt"
            )
            states = model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1)
            means = (states * mask).sum(1) / mask.sum(1)
            return np.asarray(torch.nn.functional.normalize(means, dim=-1).numpy(), np.float32)

    def _loaded(self) -> tuple[Any, Any]:
        if self._encoder is None:
            import torch
            from transformers import AutoModel, AutoTokenizer

            try:
                with torch.random.fork_rng(devices=[]):
                    tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
                    model = AutoModel.from_pretrained(self._folder, local_files_only=True).eval()
            except (OSError, ValueError) as error:
                raise ConfigError(f"encoder: {self._folder} cannot be loaded: {error}") from error
            self._encoder = (tokenizer, model)
        return self._encoder
