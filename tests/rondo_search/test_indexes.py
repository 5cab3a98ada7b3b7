"""The index's back ends: one contract, and what each finds."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rondo.agents.tools import Toolbox, load_tools, prepare_tools
from rondo.config.schema import ToolConfig
from rondo.core.errors import ConfigError, DataError
from rondo_search import Passage, index_of
from rondo_search import index as index_module
from rondo_search.corpus import passage_of, passages_of
from tests.messages import full_text
from tests.serving.conftest import TOKENIZER

WORDS = "[PAD] [UNK] query passage : the a cat feline sat on mat rug moon satellite shines".split()
MEANINGS = [0, 1, 2, 2, 3, 3, 3, 4, 4, 5, 3, 6, 6, 7, 7, 8]  # by word; equal: they mean the same
TEXTS = ["the cat sat on a mat", "the moon shines", "a satellite", "a rug"]


def made_rows() -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "text": text} for i, text in enumerate(TEXTS)]


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    """A BERT without a layer: a token's state is the norm of its meaning's one-hot vector."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        tmp_path / "encoder"
    )
    config = BertConfig(vocab_size=len(WORDS), hidden_size=12, num_hidden_layers=0, num_attention_heads=2)
    model = BertModel(config)
    with torch.no_grad():
        for part in (model.embeddings.position_embeddings, model.embeddings.token_type_embeddings):
            part.weight.zero_()
        model.embeddings.word_embeddings.weight.copy_(torch.eye(12)[MEANINGS])
    model.save_pretrained(tmp_path / "encoder")
    return str(tmp_path / "encoder")


def state(text: str) -> np.ndarray:
    """The mean over words, of length 1, by hand."""
    ones = np.eye(12)[[MEANINGS[WORDS.index(word)] for word in re.findall(r"\w+|:", text)]]
    normed = (ones - ones.mean(1, keepdims=True)) / np.sqrt(ones.var(1, keepdims=True) + 1e-12)
    mean = normed.mean(0)
    return mean / np.linalg.norm(mean)


def corpus_of(rows: list[dict[str, Any]], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_dense_finds_what_means_the_same(encoder: str, tmp_path: Path) -> None:
    """`feline` finds the cat, whose passage does not have the word; scores are the hand-made ones."""
    pytest.importorskip("faiss")
    corpus = corpus_of(made_rows(), tmp_path / "c.jsonl")
    index = index_of(corpus, backend="dense", encoder=encoder)
    random_state = torch.random.get_rng_state()
    for query in ("feline", "satellite shines", "the rug"):
        scores = {
            i: float(state(f"query : {query}") @ state(f"passage : {text}")) for i, text in enumerate(TEXTS)
        }
        best = sorted(scores, key=lambda i: (-round(scores[i], 5), i))
        hits = index.search(query, 9)
        assert [hit.passage.id for hit in hits] == [f"t{i}" for i in best]
        assert [hit.score for hit in hits] == pytest.approx([scores[i] for i in best], abs=1e-5)
    assert index.search("feline", 1)[0].passage == Passage("t0", "", TEXTS[0])
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_another_encoder_has_another_index(encoder: str, tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("faiss")
    corpus = corpus_of(made_rows(), tmp_path / "c.jsonl")
    first = index_of(corpus, backend="dense", encoder=encoder).database
    assert index_of(corpus, backend="dense", encoder=encoder, anew=True).database == first
    (Path(encoder) / "note.txt").write_text("other")
    assert index_of(corpus, backend="dense", encoder=encoder, anew=True).database != first
    assert len(list(cache.iterdir())) == 2


def test_tantivy_finds_what_fts5_finds(corpus: str, tmp_path: Path) -> None:
    """The best passage, over words that are stemmed; no sign is an operator, and ties are in order."""
    pytest.importorskip("tantivy")
    words, other = index_of(corpus), index_of(corpus, backend="tantivy")
    for query in (
        "stars",
        "milk zebra",
        "air",
        "big cheese",
        'AND OR "milk',
        "title:milk -cheese",
        "a_star +(",
    ):
        first, second = words.search(query, 1), other.search(query, 1)
        assert [hit.passage for hit in second] == [hit.passage for hit in first]
        assert second[0].score > 0
    assert other.search("zebra", 3) == []
    same = corpus_of([{"text": "same words"}] * 5, tmp_path / "same.jsonl")
    assert [hit.passage.id for hit in index_of(same, backend="tantivy").search("words", 3)] == ["0", "1", "2"]


def test_a_function_is_a_corpus(cache: Path) -> None:
    """Of other rows another index is made."""
    index = index_of(f"{__name__}:made_rows")
    assert [hit.passage for hit in index.search("moon", 2)] == [Passage("t1", "", "the moon shines")]
    assert index_of(f"{__name__}:made_rows", anew=True).database == index.database
    TEXTS.append("a cat")
    try:
        assert index_of(f"{__name__}:made_rows").database == index.database
        assert index_of(f"{__name__}:made_rows", anew=True).database != index.database
    finally:
        TEXTS.pop()


def no_rows() -> list[Any]:
    return []


def wrong_rows() -> list[Any]:
    return [{"text": "a"}, {"title": "b"}]


def test_functions_that_are_none() -> None:
    with pytest.raises(DataError, match="no_rows: the corpus is empty"):
        index_of(f"{__name__}:no_rows")
    with pytest.raises(DataError, match=full_text("wrong_rows: row 1: not a row of a corpus")):
        index_of(f"{__name__}:wrong_rows")


def test_contents_are_read_back() -> None:
    for passage in (
        Passage("1", 'a "b"', "c\n\nd"),
        Passage("2", "", 'first\n"second"'),
        Passage("3", '"', "x"),
    ):
        assert passage_of({"id": passage.id, "contents": passage.contents}, "") == passage


def test_ids_are_the_rows_own_or_their_numbers(corpus: str) -> None:
    assert [passage.id for passage in passages_of(corpus)] == ["7", "1", "a", "3", "4"]


def test_an_index_without_what_it_needs(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=full_text("folder that index: dense needs")):
        index_of(corpus, encoder=str(tmp_path))
    with pytest.raises(ConfigError, match=full_text("there is no index 'tantvy'; did you mean")):
        index_of(corpus, backend="tantvy")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rondo-rl\[tantivy\]'"):
        index_of(corpus, backend="tantivy")
    with pytest.raises(ConfigError, match=r"pip install 'rondo-rl\[faiss\]'"):
        index_of(corpus, backend="dense", encoder=str(tmp_path))


def test_a_folder_that_is_no_encoder(corpus: str, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    with pytest.raises(ConfigError, match=full_text("is no folder of a model")):
        index_of(corpus, backend="dense", encoder=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"encoder: .* cannot be loaded: "):
        index_of(corpus, backend="dense", encoder=str(tmp_path))


def test_the_index_is_built_before_the_first_query(
    corpus: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a worker that no check went before: a call of the tool reads no corpus."""
    tools = load_tools([ToolConfig("search", options={"corpus": corpus, "k": 1})])
    prepare_tools(tools)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.delattr(index_module, "digest_of")

    async def asked() -> str:
        return await Toolbox(tools, TOKENIZER).call("search", {"query": "moon"})

    assert asyncio.run(asked()).startswith("[1] Moon\n")
