"""What stands for an image in a prompt, against the processors of the families, on a tokenizer whose new
lines join.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rondo.core.errors import ConfigError
from rondo.data.images import Images
from rondo.models import ModelSource, load_model_config
from rondo.models.pixels import ImageReader, image_family
from rondo.trainers.program.given import prompt_of
from tests.models.families import config_of

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
    own.add_special_tokens({"additional_special_tokens": list(tokens.values())})
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
    tokenizer.image_text = reader.family.written(reader.config, tokenizer)
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
        made = reader._processor(images=[pictures] if "llava" in family else pictures, return_tensors="np")
        whole, *between = f"user\n{text}model\n".replace("<image>", image).split(place)
        for number, part in enumerate(between):
            whole += processor.replace_image_token(made, number) + part
        assert own.token_ids.tolist() == tokenizer(whole)["input_ids"]


def test_other_families_are_refused_by_name() -> None:
    reasons = dict.fromkeys(
        ("kimi_k25", "kimi_vl", "phi4_multimodal"), "its image processor needs torchvision"
    )
    reasons |= dict.fromkeys(("idefics3", "smolvlm"), "the tokens of its tiles stand apart")
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=f"{name} model: {reason}.*take a model of another family"):
            image_family(SimpleNamespace(model_type=name))
