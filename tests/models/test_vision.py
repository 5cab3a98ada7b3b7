"""What stands for an image in a prompt, against the processors of the families, on a tokenizer whose new
lines join.
"""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rondo.core.errors import ConfigError, DataError
from rondo.data.images import Images
from rondo.models import ModelSource, load_model_config
from rondo.models.pixels import ImageReader, image_family, settings_of
from rondo.models.vision import IDEFICS3, SMOLVLM
from rondo.trainers.program.given import prompt_of
from tests.models.families import config_of, write

# The processor's class and what is set of it, its tokens, and what the family's chat template writes.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    "gemma3": (
        "Gemma3Processor",
        {"full_image_sequence": "\n\n<boi><image><image><image><image><eoi>\n\n"},
        {"image_token_index": "<image>", "boi_token_index": "<boi>", "eoi_token_index": "<eoi>"},
        "<boi>",
    ),
    "glm46v": (
        "Glm46VProcessor",
        {"image_token": "<image>", "image_processor": SimpleNamespace(merge_size=2)},
        {"image_token_id": "<image>"},
        "<begin><image><end>",
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        {
            "image_token": "<image>",
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        {"image_token_index": "<image>"},
        "<image>",
    ),
    "internvl": (
        "InternVLProcessor",
        {
            "image_seq_length": 4,
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "image_token": "<image>",
        },
        {"image_token_id": "<image>"},
        "<image>",
    ),
    "idefics3": (
        "Idefics3Processor",
        {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_tag": "<global-img>",
            "image_seq_len": 4,
        },
        {"image_token_id": "<image>"},
        "<image>",
    ),
    "smolvlm": (
        "SmolVLMProcessor",
        {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
            "image_seq_len": 1,
        },
        {"image_token_id": "<image>"},
        "<image>",
    ),
}
# Of these families' tokenizers; those of others write the names of tiles in letters.
NAMES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
MORE = {
    "idefics3": ["<fake_token_around_image>"],
    "smolvlm": ["<fake_token_around_image>", "<global-img>", *NAMES],
}
PARTS = "{% for part in message.content %}{{ part.text if part.type == 'text' else IMAGE }}{% endfor %}"
TEMPLATE = "{% for message in messages %}user\n" + PARTS + "model\n{% endfor %}"


def tokenizer_of(family: str) -> Any:
    """Returns one of letters and new lines, of which up to three are one token."""
    letters = [*map(chr, range(32, 127)), "\n", "\n\n", "\n\n\n"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    merges = [("\n", "\n"), ("\n\n", "\n")]
    *_, tokens, image = FAMILIES[family]
    own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=merges)))
    own.add_special_tokens({"additional_special_tokens": [*tokens.values(), *MORE.get(family, ())]})
    own.chat_template = TEMPLATE.replace("IMAGE", repr(image))
    return own


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_becomes_what_the_processor_writes(family: str, tmp_path: Path) -> None:
    name, settings, tokens, image = FAMILIES[family]
    place = "<boi>" if family == "gemma3" else "<image>"  # what the processor looks for
    tokenizer = tokenizer_of(family)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}
    source = ModelSource(config={**config_of(family), **ids})
    reader = ImageReader(source, load_model_config(source))
    reader.tell(tokenizer)
    processor = object.__new__(getattr(transformers, name))  # made whole it asks for torchvision
    vars(processor).update({"image_processor": reader._processor, **settings})
    rng = random.Random(0)
    sizes = [(16, 16), (17, 16), (1, 40), *((rng.randint(1, 90), rng.randint(1, 90)) for _ in range(9))]
    for shown in ([sizes[0]], *zip(sizes, reversed(sizes), strict=True)):
        pictures = [Image.new("RGB", size) for size in shown]
        files = [io.BytesIO() for _ in shown]
        for picture, file in zip(pictures, files, strict=True):
            picture.save(file, "PNG")
        text = "a<image>b" + "<image>" * (len(shown) - 1)
        own = prompt_of(
            text,
            tokenizer,
            0,
            {},
            source="own",
            tools=(),
            reads=Images(reader, tmp_path),
            images=[file.getvalue() for file in files],
        )
        nested, told = ([pictures], {"return_row_col_info": True}) if family in MORE else (pictures, {})
        nested = [pictures] if "llava" in family else nested
        made = reader._processor(images=nested, return_tensors="np", **told)
        whole, *between = f"user\n{text}model\n".replace("<image>", image).split(place)
        for number, part in enumerate(between):
            whole += processor.replace_image_token(made, number) + part
        assert own.token_ids.tolist() == tokenizer(whole)["input_ids"]


@pytest.mark.slow
def test_grids_of_named_tiles_are_the_processors() -> None:
    """Of other sides than whole tiles, of thin images, and where nothing is resized or cut first."""
    rng = random.Random(0)
    sizes = [(1, 150), (150, 2), (16, 16), (17, 16), (600, 600), (3, 3)]
    sizes += [(rng.randint(1, 150), rng.randint(1, 150)) for _ in range(60)]
    for side, settings in (
        (16, {"size": {"longest_edge": 64}}),
        (16, {"size": {"longest_edge": 70}}),
        (16, {"size": {"longest_edge": 15}}),
        (11, {"size": {"longest_edge": 33}}),
        (512, {"size": {"longest_edge": 5000}}),
        (16, {"do_resize": False}),
        (16, {"do_image_splitting": False}),
    ):
        tile = {"longest_edge": side}
        for name, family in (("Idefics3", IDEFICS3), ("SmolVLM", SMOLVLM)):
            kind = getattr(transformers, f"{name}ImageProcessorPil")
            processor = kind(max_image_size=tile, **settings)
            for width, height in sizes[:2] if side == 512 else sizes:
                images = [Image.new("RGB", (width, height))]
                made = processor(images=images, return_tensors="np", return_row_col_info=True)
                rows, columns = made["rows"][0][0] or 1, made["cols"][0][0] or 1
                assert family.grid(width, height, {}, processor) == (1, rows, columns), (width, height)


def test_what_named_tiles_are_not_made_for(tmp_path: Path) -> None:
    write("smolvlm", tmp_path)
    source = ModelSource(path=str(tmp_path))
    config, file = load_model_config(source), tmp_path / "preprocessor_config.json"
    for found, message in (
        ({"max_image_size": {"longest_edge": 364}}, "max_image_size is 364, and the .* has image_size=16"),
        ({"size": {"height": 64, "width": 64}}, "size must be {longest_edge: …}: {'height': 64"),
    ):
        file.write_text(json.dumps(found))
        with pytest.raises(DataError, match=message):
            settings_of(source, config)
    file.write_text('{"do_pad": true}')
    with pytest.raises(ConfigError, match="has no min_pixels and max_pixels"):
        settings_of(replace(source, max_pixels=100), config)
    tokenizer = tokenizer_of("smolvlm")
    reader = ImageReader(source, config)
    with pytest.raises(ConfigError, match="around_image> and the token 55,") as caught:
        reader.tell(tokenizer)  # whose image token is another one
    assert caught.value.key == "model.tokenizer"


def test_other_families_are_refused_by_name() -> None:
    reasons = dict.fromkeys(
        ("kimi_k25", "kimi_vl", "phi4_multimodal"), "its image processor needs torchvision"
    )
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=f"{name} model: {reason}.*take a model of another family"):
            image_family(SimpleNamespace(model_type=name))
