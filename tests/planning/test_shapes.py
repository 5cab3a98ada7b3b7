"""Sizes of models and cards, by table and by config.json: each number is counted again by another way."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import ConfigError
from rondo.planning.devices import find_device, known_devices
from rondo.planning.shapes import TABLE, find_shape, known_shapes, shape_of

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 3,
}


def rows() -> dict[str, dict[str, Any]]:
    with TABLE.open(encoding="utf-8", newline="") as lines:
        table = (line for line in lines if not line.startswith("#"))
        reader = csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {row["name"]: json.loads(row["config"]) for row in reader}


def test_parameters_by_hand() -> None:
    shape = shape_of(CONFIG, "tiny")
    attention = 4 * 6 + 2 * (4 * 3) + 6 * 4  # q; k and v; o
    block = attention + 3 * 4 * 6 + 2 * 4 + 2 * 3  # the MLP; two norms; norms of queries and keys
    assert shape.parameters() == 2 * 10 * 4 + 2 * block + 4
    assert shape.parameters(output_head=False) == 10 * 4 + 2 * block + 4
    assert shape.active == shape.parameters()
    assert shape.block == block
    assert shape.adapted == 2 * ((4 + 6) + 2 * (4 + 3) + (6 + 4) + 3 * (4 + 6))


def test_a_mixture_has_few_of_its_parameters_in_use() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    dense = shape_of(CONFIG, "tiny").parameters() - 2 * 3 * 4 * 6
    shape = shape_of({**CONFIG, **sizes, "model_type": "qwen3_moe"}, "mixture")
    assert shape.parameters() == dense + 2 * 8 * 4 + 2 * 8 * 3 * 4 * 5  # routers, experts
    assert shape.active == shape.parameters() - 2 * 6 * 3 * 4 * 5


def test_the_table_says_what_its_configs_make() -> None:
    for name, (shape, parameters, source) in known_shapes().items():
        assert shape.parameters() == parameters, name
        assert source
    assert min(one for _, one, _ in known_shapes().values()) < 5e8
    assert max(one for _, one, _ in known_shapes().values()) > 1e12


@pytest.mark.slow
@pytest.mark.parametrize("name", [*rows()])
def test_the_table_on_meta(name: str) -> None:
    """Parameters as transformers makes them; routers' biases are buffers there in some families."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = rows()[name]
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape, parameters, _ = known_shapes()[name]
    biases = sum(one.numel() for key, one in model.named_buffers() if key.endswith("correction_bias"))
    head = model.get_output_embeddings().weight
    assert (head is model.get_input_embeddings().weight) == shape.tied
    assert sum(one.numel() for one in model.parameters()) + biases == parameters


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_a_model_with_images_on_meta(model_type: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    fields = config.to_dict()
    # What a config.json says, and the defaults of transformers do not.
    head = model.get_output_embeddings().weight
    fields["tie_word_embeddings"] = head is model.get_input_embeddings().weight
    text_fields = fields["text_config"]
    text_fields["tie_word_embeddings"] = fields["tie_word_embeddings"]
    text_fields["num_experts"] = text_fields.get("num_local_experts")
    shape = shape_of(fields, "of images")
    assert shape.tower is not None
    assert shape.tower.parameters == sum(one.numel() for one in model.model.visual.parameters())
    assert shape.parameters() == sum(one.numel() for one in model.parameters())
    text = shape_of(text_fields, "of text")
    assert shape.active == text.active
    assert shape.whole - text.whole == shape.tower.parameters


def test_names_with_an_owner_or_a_suffix() -> None:
    seven = find_shape("Qwen2.5-7B")
    assert find_shape("Qwen/Qwen2.5-7B") is find_shape("Qwen/Qwen2.5-7B-Instruct") is seven
    assert find_shape("Qwen/Qwen3-30B-A3B").experts == 128


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": CONFIG}))
    assert find_shape(str(tmp_path)) == find_shape(str(tmp_path / "config.json")) != find_shape(None, CONFIG)
    assert find_shape(str(tmp_path), override={"text_config": {"hidden_size": 8}}).hidden == 8
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be read as a config\.json"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "config", "says"),
    [
        ("Qwen/Qwen3-9B", None, "did you mean 'Qwen3-8B'"),
        (None, {**CONFIG, "model_type": "qwem3"}, "did you mean 'qwen3'"),
        (None, {**CONFIG, "hidden_size": None}, "hidden_size is not there"),
        (None, {**CONFIG, "vocab_size": "many"}, "vocab_size is 'many', no size"),
    ],
)
def test_sizes_that_are_not_known(path: str | None, config: dict[str, Any] | None, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_shape(path, config)
    assert says in str(caught.value)
    assert "there are: " in str(caught.value).lower()


def test_cards() -> None:
    assert find_device("H100").memory == 80 << 30
    assert find_device("RTX 4090").name == "rtx4090"
    assert {"h100", "h200", "b200", "gb200", "a100", "l40s", "rtx4090", "h20", "mi300x"} <= {*known_devices()}
    assert all(row.source and row.flops > 1e14 and row.bandwidth > 5e11 for row in known_devices().values())
    with pytest.raises(ConfigError) as caught:
        find_device("h1000")
    assert "There are: h100, h200" in str(caught.value)


def test_a_name_of_the_table_takes_what_overrides_it() -> None:
    whole, changed = find_shape("Qwen/Qwen3-8B"), find_shape("Qwen/Qwen3-8B", None, {"num_hidden_layers": 2})
    assert (changed.layers, changed.hidden) == (2, whole.hidden)
    assert find_shape("Qwen/Qwen3-8B", None, {}) == whole
