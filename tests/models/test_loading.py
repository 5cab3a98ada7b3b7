"""Where models and tokenizers come from, and what is said when they cannot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rondo.core.errors import ConfigError, DataError
from rondo.models import (
    ModelSource,
    TokenizerSource,
    build_model,
    family_of,
    load_model_config,
    load_tokenizer,
)
from rondo.models.family import Family, LogitTransform
from rondo.models.fused import use_fused_modules
from rondo.models.stored import NoFilling
from tests.messages import full_text

TINY = {
    "model_type": "qwen3",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.1,
}


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def not_a_tokenizer() -> int:
    return 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(ModelSource(config=TINY, seed=1), torch.float32).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_random_weights_are_a_function_of_the_seed() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again = (build_model(ModelSource(config=TINY, seed=1), torch.float32) for _ in range(2))
    other = build_model(ModelSource(config=TINY, seed=2), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [
        dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"] for model in (first, again, other)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert float(weights[0].detach().std()) == pytest.approx(0.1, rel=0.1)
    assert first.config.vocab_size == 31


def test_a_folder_gives_the_weights_back_in_the_dtype_asked_for(folder: Path) -> None:
    made = build_model(ModelSource(config=TINY, seed=1), torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(ModelSource(path=str(folder)), dtype)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, dict(made.named_parameters())[name].to(dtype))


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", r"has no config\.json"), ("model.safetensors", r"has no weights \(\*\.safetensors\)")],
)
def test_folders_that_lack_a_file(folder: Path, tmp_path: Path, missing: str, message: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / missing).unlink()
    with pytest.raises(DataError, match=message):
        build_model(ModelSource(path=str(tmp_path / "copy")), torch.float32)


def test_a_folder_without_tokenizer_says_what_to_set(folder: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(folder / file, tmp_path)
    with pytest.raises(DataError, match=r"has no tokenizer .*set model\.tokenizer"):
        load_tokenizer(TokenizerSource(str(tmp_path)))
    with pytest.raises(DataError, match=r"there is no folder \./nowhere"):
        load_tokenizer(TokenizerSource("./nowhere"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 16}, "no model_type"),
        ({"model_type": "qwne3"}, "did you mean 'qwen3'"),
        ({**TINY, "hiden_size": 16}, full_text("no key 'hiden_size'; did you mean")),
        ({**TINY, "num_attention_heads": "two"}, full_text("model.config: Validation error")),
    ],
)
def test_configs_that_cannot_work(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_config(ModelSource(config=config))


def test_a_source_is_a_path_or_a_config() -> None:
    with pytest.raises(ConfigError, match="neither is set"):
        ModelSource()
    with pytest.raises(ConfigError, match="both is set"):
        ModelSource(path="x", config=TINY)


def test_tokenizers_from_folder_and_function(folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(TokenizerSource(str(folder))).encode("a b") == [1, 2]
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    made = TokenizerSource("tests.models.test_loading:make_tokenizer", chat_template=str(template))
    tokenizer = load_tokenizer(made)
    assert tokenizer.encode("b a") == [2, 1]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False) == "a b"
    assert load_tokenizer(TokenizerSource("tests.models.test_loading.make_tokenizer")).encode("a") == [1]
    with pytest.raises(ConfigError, match="returned int, which is no tokenizer"):
        load_tokenizer(TokenizerSource("tests.models.test_loading:not_a_tokenizer"))
    with pytest.raises(ConfigError, match=r"chat_template: .* cannot be read"):
        load_tokenizer(TokenizerSource(str(folder), chat_template=str(tmp_path / "nowhere.jinja")))


def test_families() -> None:
    def record(**config: Any) -> Family:
        return family_of(load_model_config(ModelSource(config=config)))

    assert record(**TINY) == Family("qwen3", llama_class="Qwen3ForCausalLM")
    assert record(model_type="gemma2").logits == LogitTransform(1.0, 30.0)
    assert record(model_type="cohere2", logit_scale=0.25).logits == LogitTransform(0.25)
    assert record(model_type="granite", logits_scaling=8.0).logits == LogitTransform(0.125)
    for packed in ("gemma2", "gpt_oss", "cohere2", "olmo3"):
        assert record(model_type=packed).not_packable == ""
    assert record(model_type="qwen3_next").not_packable == "it has layers of type linear_attention"


def test_lean_modules_replace_only_what_computes_the_same() -> None:
    model = build_model(
        ModelSource(config=TINY), torch.float32
    )  # already lean: replacing again changes nothing
    assert use_fused_modules(model) == {"rms_norm": 9, "attention": 2}
    assert use_fused_modules(build_model(ModelSource(config=TINY), torch.bfloat16)) == {
        "rms_norm": 0,
        "attention": 0,
    }
    gemma = {**TINY, "model_type": "gemma"}  # its norms multiply by 1 + weight
    assert use_fused_modules(build_model(ModelSource(config=gemma), torch.float32))["rms_norm"] == 0


def test_what_has_no_data_is_not_filled_and_all_else_is() -> None:
    with NoFilling():
        real = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(real.weight, 0.5)
        state = torch.random.get_rng_state().tolist()
        empty = torch.nn.Linear(3, 2, device="meta")
        torch.nn.init.normal_(empty.weight, std=1.0)
        torch.nn.init.zeros_(real.bias)
    assert real.weight.tolist() == [[0.5] * 3] * 2
    assert real.bias.tolist() == [0.0, 0.0]
    assert empty.weight.is_meta
    assert torch.random.get_rng_state().tolist() == state
