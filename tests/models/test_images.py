"""Images among tokens, against transformers: grids, placeholders, positions, what goes through a packed pass,
and what an export's folder holds.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoImageProcessor, PreTrainedModel, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rondo.config.schema import ConstantScheduleConfig, EngineConfig, LoraConfig, OptimizerConfig
from rondo.core.batch import Batch, ragged_rows
from rondo.core.errors import ConfigError, DataError
from rondo.core.images import (
    Grid,
    ImageRef,
    ImageSizes,
    grid_of_pixels,
    images_as_text,
    images_of_text,
    places_of_images,
    with_images,
)
from rondo.models import ModelSource, load_model_config
from rondo.models.family import record_of
from rondo.models.lora import adapted_name
from rondo.models.pixels import ImageReader, as_rgb, opened, settings_of
from rondo.models.vision import mrope_positions
from rondo.training import ModelSpec, make_engine
from rondo.training.loss import equal_rows
from rondo.training.packed import plan_passes
from tests.models.families import (
    IMAGE_END,
    IMAGE_START,
    IMAGE_TOKEN,
    WITH_IMAGES,
    make,
    reader_of,
    shown_to,
    source_of,
    write,
)
from tests.models.test_families import Weighted
from tests.ranks import run_ranks
from tests.training.conftest import mesh  # noqa: F401 (a fixture)

LIMITS = {"min_pixels": 8 * 8, "max_pixels": 24 * 24}
SIZES = ImageSizes(patch=4, merge=2, min_pixels=64, max_pixels=576)


# ---- how many tokens


def test_grids_are_those_of_transformers() -> None:
    """Of 1,500 sizes and four models' limits; the processor's own count of patches, and its own pixels."""
    rng = random.Random(0)
    shapes = [(28, 28), (1, 200), (200, 1), (56, 56), (57, 1), (1024, 1024), (1920, 1080), (13, 14)]
    shapes += [(rng.randint(1, 3000), rng.randint(1, 3000)) for _ in range(1500)]
    shapes = [(w, h) for w, h in shapes if max(w, h) / min(w, h) <= 200]
    for patch, low, high in ((14, 3136, 12845056), (16, 65536, 16777216), (4, 64, 576), (14, 3136, 1003520)):
        sizes = ImageSizes(patch, 2, low, high)
        processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": low, "longest_edge": high}, patch_size=patch
        )
        for width, height in shapes:
            grid = grid_of_pixels(width, height, sizes)
            rows, columns = smart_resize(height, width, 2 * patch, low, high)
            assert grid == (1, rows // patch, columns // patch), (width, height)
            patches = processor.get_number_of_image_patches(height, width)
            assert sizes.tokens(grid) * 4 == patches, (width, height)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 576}, patch_size=4)
    for width, height in [(8, 8), (9, 31), (64, 48), (3, 60), (200, 1)]:
        made = processor(images=[Image.new("RGB", (width, height))], return_tensors="np")
        assert tuple(made["image_grid_thw"][0]) == grid_of_pixels(width, height, SIZES)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (201, 1), (1, 201)])
def test_sides_that_no_processor_takes(width: int, height: int) -> None:
    with pytest.raises(DataError, match=f"an image of {width} x {height} pixels"):
        grid_of_pixels(width, height, SIZES)


def test_placeholders_become_as_many_as_tokens() -> None:
    ids, beside = np.array([1, 9, 2, 9, 3]), np.array([0, 1, 2, 3, 4])
    whole = with_images([ids, beside], [np.array([7, 9, 9, 8]), np.array([9])], 9)
    assert [one.tolist() for one in whole] == [[1, 7, 9, 9, 8, 2, 9, 3], [0, 1, 1, 1, 1, 2, 3, 4]]
    assert with_images([np.array([1, 2])], [], 9)[0].tolist() == [1, 2]
    for count in (1, 3, 0):
        with pytest.raises(DataError, match=f"2 places for images, and there are {count} images"):
            with_images([ids], [np.array([9])] * count, 9)


def test_the_places_of_images_whose_pieces_stand_apart() -> None:
    ids = np.array([9, 9, 7, 9, 9, 1, 9, 7, 9, 9])
    found = places_of_images(ids, [(2, 2), (1, 2)], 9)
    assert [one.tolist() for one in found] == [[0, 1, 3, 4], [6, 8, 9]]
    assert places_of_images(np.array([1, 2]), [], 9) == []
    for pieces in ([(2, 2), (2, 1)], [(4,), (1, 2)], [(2, 3), (2,)]):
        with pytest.raises(DataError, match="not side by side"):
            places_of_images(ids, pieces, 9)
    with pytest.raises(DataError, match=r"^7 tokens .* its images have 4$"):
        places_of_images(ids, [(2, 2)], 9)


# ---- positions


def row_of(*parts: int | Grid) -> tuple[np.ndarray, list[Grid]]:
    """Returns token ids of text (so many tokens) and images (of these grids), and the grids."""
    rng, ids, grids = np.random.default_rng(7), [], []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(0, 50, part).tolist()
        else:
            count = SIZES.tokens(part)
            ids += [IMAGE_START, *[IMAGE_TOKEN] * count, IMAGE_END]
            grids.append(part)
    return np.array(ids, np.int64), grids


ROWS: tuple[tuple[int | Grid, ...], ...] = (
    (9,),
    (4, (1, 4, 4), 5),
    ((1, 2, 6), 3),
    (3, (1, 6, 2)),
    (2, (1, 4, 6), 1, (1, 2, 2), (1, 6, 4), 7),
    ((1, 4, 4), (1, 4, 4)),
)


TURNING = [family for family in WITH_IMAGES if family.startswith(("qwen", "glm"))]
NAMED = ("idefics3", "smolvlm")


@pytest.mark.parametrize("family", TURNING)
def test_positions_are_those_of_get_rope_index(family: str) -> None:
    model = make(family).model
    for parts in ROWS:
        ids, grids = row_of(*parts)
        ours = mrope_positions(ids, grids, IMAGE_TOKEN, 2)
        kinds = torch.from_numpy((ids == IMAGE_TOKEN).astype(np.int32))[None]
        grid_array = torch.tensor(grids) if grids else None
        theirs, _ = model.get_rope_index(torch.from_numpy(ids)[None], kinds, image_grid_thw=grid_array)
        np.testing.assert_array_equal(ours, theirs[:, 0].numpy())


def test_positions_by_hand_and_of_images_side_by_side() -> None:
    ids = np.array([1, 9, 9, 9, 9, 9, 9, 2])
    assert mrope_positions(ids, [(1, 4, 4), (1, 2, 4)], 9, 2).tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 5],
        [0, 1, 1, 2, 2, 3, 3, 5],
        [0, 1, 2, 1, 2, 3, 4, 5],
    ]
    with pytest.raises(DataError, match=r"^6 tokens .* its images have 4$"):
        mrope_positions(ids, [(1, 4, 4)], 9, 2)
    with pytest.raises(DataError, match="side by side"):
        mrope_positions(np.array([9, 1, 9]), [(1, 2, 4)], 9, 2)


# ---- pixels


def drawing(folder: Path, name: str, size: tuple[int, int], colour: str) -> Path:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse([1, 1, size[0] - 3, size[1] // 2], fill=colour)
    file = folder / f"{name}.png"
    image.save(part := folder / f"{name}.{os.getpid()}.part", format="PNG")
    part.replace(file)  # whole: another rank may draw the same one, or read it
    return file


def source_with_limits(family: str, **changes: Any) -> ModelSource:
    given = source_of(family, **changes)
    return ModelSource(config=given.config, seed=given.seed, **limits_of(family))


def limits_of(family: str) -> dict[str, Any]:
    return LIMITS if family in TURNING else {}


def test_a_reference_is_made_of_the_header_and_read_once(tmp_path: Path) -> None:
    reader = reader_of(source_with_limits("qwen3_vl"))
    path = drawing(tmp_path, "a", (40, 24), "red")
    image = reader.reference(path, turn=2)
    assert (image.ref, image.grid, image.n_tokens, image.turn) == (f"path:{path}", (1, 4, 6), 6, 2)
    assert images_of_text(images_as_text([image])) == (image,)
    assert images_as_text([]) == ""
    assert images_of_text("") == ()
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 576},
        patch_size=4,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    expected = processor(images=[Image.open(path)], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(reader.pixels(image), expected)
    assert reader.pixels(image) is reader.pixels(image)
    drawing(tmp_path, "a", (40, 24), "blue")
    reader.pixels(image)  # kept by its hash
    with pytest.raises(DataError, match="is not the file that it was"):
        reader_of(source_with_limits("qwen3_vl")).pixels(image)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        reader_of(source_with_limits("qwen3_vl")).pixels(image)


def saved(folder: Path, image: Image.Image, kind: str, **options: Any) -> bytes:
    file = folder / f"image.{kind}"
    image.save(file, **options)
    return file.read_bytes()


def test_what_is_converted_and_how(tmp_path: Path) -> None:
    colours = Image.new("RGB", (6, 4), (200, 10, 20))
    colours.putpixel((0, 0), (0, 0, 255))
    cmyk = as_rgb(saved(tmp_path, colours.convert("CMYK"), "tif"), "x")
    assert (cmyk.mode, cmyk.getpixel((3, 3))) == ("RGB", (200, 10, 20))
    palette = as_rgb(saved(tmp_path, colours.convert("P"), "gif", transparency=0), "x")
    assert (palette.mode, palette.size) == ("RGB", (6, 4))
    alpha = as_rgb(saved(tmp_path, Image.new("RGBA", (6, 4), (1, 2, 3, 0)), "png"), "x")
    assert alpha.getpixel((0, 0)) == (1, 2, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    reader = reader_of(source_with_limits("qwen3_vl"))
    for kind in ("tif", "png", "webp", "jpg"):
        turned = saved(tmp_path, colours, kind, exif=exif)
        assert as_rgb(turned, "x").size == (4, 6), kind
        assert kind in ("webp", "jpg") or as_rgb(turned, "x").getpixel((3, 0)) == (0, 0, 255)
        image = reader.reference(tmp_path / f"image.{kind}")
        assert image.grid == grid_of_pixels(4, 6, SIZES) != grid_of_pixels(6, 4, SIZES)
        assert len(reader.pixels(image)) == 4 * image.n_tokens


def test_what_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def png(width: int, height: int) -> bytes:
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")

    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    animated = saved(tmp_path, frames[0], "gif", save_all=True, append_images=frames[1:])
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    whole = saved(tmp_path, noise, "png")
    cases = {
        r"^x is no image that can be read$": b"hello",  # no address of memory: a policy may read this
        r"^x has 10001 x 10000 pixels, more than 100000000": png(10001, 10000),
        r"^x is animated \(2 frames\)": animated,
    }
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n0 0 32 32 rectfill\n%%EOF\n"
    with pytest.raises(DataError, match=r"^x is no image that can be read$"):  # nor given to Ghostscript
        as_rgb(eps, "x")
    for message, content in cases.items():
        with pytest.raises(DataError, match=message):
            opened(io.BytesIO(content), "x")
    with pytest.raises(DataError, match="cut off or damaged"):
        as_rgb(whole[: len(whole) // 2], "x")
    deep = saved(tmp_path, Image.fromarray(np.full((4, 4), 60000, np.uint16)), "png")
    with pytest.raises(DataError, match="more than 8 bits"):
        as_rgb(deep, "x")
    with pytest.raises(DataError, match=r"no image|0 x 5"):
        opened(io.BytesIO(png(0, 5)), "x")
    assert opened(io.BytesIO(png(10_000, 10_000)), "x").size == (10_000, 10_000)  # the largest


# ---- through the model


class Row:
    """A row with images, as a batch and as transformers take it."""

    def __init__(
        self, reader: ImageReader, before: int, images: Sequence[Path], answer: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.images = [reader.reference(path, alone=len(images) == 1) for path in images]
        ids = rng.integers(0, 50, before).tolist()
        ids += [IMAGE_START, IMAGE_TOKEN, IMAGE_END] * len(self.images)
        ids += rng.integers(0, 50, 2).tolist()
        tokens = [reader.ids(image.grid) for image in self.images]
        (self.prompt,) = with_images([np.array(ids)], tokens, IMAGE_TOKEN)
        self.response = rng.integers(0, 50, answer)
        self.weights = rng.standard_normal(answer)
        self.reader = reader

    def log_probs(self, model: PreTrainedModel) -> torch.Tensor:
        """Returns those of transformers' own forward, positions and processor included."""
        ids = torch.from_numpy(np.concatenate([self.prompt, self.response]))[None]
        given = shown_to(model, ids, self.images, self.reader)
        logits = model(input_ids=ids, use_cache=False, **given).logits[0, len(self.prompt) - 1 : -1]
        answer = ids[0, len(self.prompt) :, None]
        return logits.log_softmax(-1).gather(1, answer)[:, 0]


def rows_with_images(reader: ImageReader, folder: Path) -> list[Row]:
    """Rows without, with one and with two images of several sizes; two that share a prompt; two whose tokens
    are the same and whose images are not.
    """
    wide = drawing(folder, "wide", (48, 16), "red")
    tall = drawing(folder, "tall", (16, 30), "green")
    small = drawing(folder, "small", (16, 16), "blue")
    other = drawing(folder, "other", (16, 16), "black")
    rows = [
        Row(reader, 4, [wide], 6, 0),
        Row(reader, 5, [], 4, 1),
        Row(reader, 3, [tall, small], 9, 2),
        Row(reader, 3, [tall, small], 5, 2),
        Row(reader, 2, [small], 3, 3),
        Row(reader, 2, [other], 3, 3),
        Row(reader, 0, [wide, wide], 1, 4),
    ]
    rows[3].prompt = rows[2].prompt
    rows[5].prompt, rows[5].response = rows[4].prompt, rows[4].response
    return rows


def batch_of(rows: Sequence[Row]) -> Batch:
    return Batch.of(
        {
            "row_id": np.arange(len(rows)),
            "prompt_ids": ragged_rows([row.prompt for row in rows], np.int32),
            "response_ids": ragged_rows([row.response for row in rows], np.int32),
            "images": [images_as_text(row.images) for row in rows],
            "token_weight": ragged_rows([row.weights for row in rows], np.float32),
        }
    )


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_packed_equals_transformers_own_forward(
    family: str,
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Log-probs and all gradients: packed with others, prompts shared or not, and a few rows in a pass."""
    model = write(family, tmp_path / "model")
    source = ModelSource(path=str(tmp_path / "model"), **limits_of(family))
    (tmp_path / "model" / "preprocessor_config.json").write_text(
        json.dumps(settings_of(source_of(family), model.config))
    )
    rows = rows_with_images(reader_of(source), tmp_path)
    expected = [row.log_probs(model) for row in rows]
    assert (expected[4] - expected[5]).abs().max() > 1e-2  # the images are seen
    loss = -sum((torch.tensor(row.weights) * one).sum() for row, one in zip(rows, expected, strict=True))
    model.zero_grad()
    loss.backward()
    wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    parts = {record_of(model.config.model_type).images.part_of(name) for name in wanted}
    assert parts == {"tower", "projector", "language"}
    batch = batch_of(rows)
    for budget in (1000, max(len(row.prompt) + len(row.response) for row in rows)):
        engine = make_engine(
            ModelSpec(source, EngineConfig(token_budget=budget), OptimizerConfig()), mesh=mesh
        )
        known = engine.backend.packing.family
        packs = budget == 1000 and not known.not_packable
        assert (len(plan_passes(batch, known, budget)) == 1) == packs
        found = engine.forward(batch, {"log_probs": "log_probs"}).rows("log_probs")
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5, rtol=0)
        engine.forward_backward(batch, Weighted())
        gradients = {name: one.grad for name, one in engine.backend.model.lm.named_parameters()}
        for name, theirs in wanted.items():
            ours = gradients[name]
            assert float((ours - theirs).norm()) <= 2e-5 * float(theirs.norm()) + 2e-6, name


def _on_two_ranks(rank: int, world: int, folder: str) -> list[list[float]]:
    ranks = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    source = source_with_limits("qwen3_vl")
    rows = rows_with_images(reader_of(source), Path(folder))
    spec = ModelSpec(source, EngineConfig(token_budget=30), OptimizerConfig(lr=1e-2))
    engine = make_engine(spec, mesh=ranks)
    # Rank 0 has the images, and more passes; rank 1 has text, then nothing.
    if world == 2:
        rows = [row for row in rows if bool(row.images) == (rank == 0)]
    engine.forward_backward(batch_of(rows), Weighted())
    engine.optimizer_step()
    sums = []
    for name, tensor in engine.parameters().gathered(1 << 20):
        if "bias" not in name or "visual" in name:
            sums.append([float(tensor.double().sum()), float(tensor.double().abs().sum())])
    return sums


def test_ranks_without_images_take_part_in_the_tower(tmp_path: Path) -> None:
    """One step of two ranks, one of which has no image, is that of one."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (alone,) = run_ranks(1, _on_two_ranks, str(tmp_path / "one"))
    first, second = run_ranks(2, _on_two_ranks, str(tmp_path / "two"))
    assert first == second
    np.testing.assert_allclose(first, alone, rtol=0, atol=2e-4)


def test_images_that_are_not_the_rows_tokens(
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    source = source_with_limits("qwen3_vl")
    rows = rows_with_images(reader_of(source), tmp_path)
    engine = make_engine(ModelSpec(source, EngineConfig(), None), mesh=mesh)
    rows[0].prompt = rows[0].prompt[:-4]  # an image that is cut off
    with pytest.raises(DataError, match=r"^4 tokens .* its images have 5$"):
        engine.forward(batch_of(rows), {"log_probs": "x"})
    text = make_engine(ModelSpec(source_of("qwen3"), EngineConfig(), None), mesh=mesh)
    with pytest.raises(DataError, match=r"^row 0 has images.* to a qwen3 model"):
        text.forward(batch_of(rows), {"log_probs": "x"})


# ---- what learns


def _part(name: str) -> str:
    if "visual" not in name:
        return "language"
    return "projector" if "merger" in name else "tower"


@pytest.mark.parametrize(
    "freeze", [("tower",), ("projector",), ("language",), ("tower", "projector"), ("tower", "language")]
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_frozen_parts_do_not_move_and_others_learn_as_before(
    family: str,
    freeze: tuple[Any, ...],
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The gradients of what learns are those without anything frozen; rows of text have passes, too."""
    source = source_with_limits(family)
    rows = rows_with_images(reader_of(source), tmp_path)
    batch, text = batch_of(rows), batch_of([row for row in rows if not row.images])
    gradients = []
    for frozen in ((), freeze):
        config = EngineConfig(token_budget=30, freeze=frozen)
        engine = make_engine(ModelSpec(source, config, OptimizerConfig(lr=1e-2)), mesh=mesh)
        engine.forward_backward(batch, Weighted())
        engine.forward_backward(text, Weighted())
        found = {name: one.grad for name, one in engine.backend.by_name.items()}
        gradients.append({name: one.clone() for name, one in found.items() if one is not None})
    whole, some = gradients
    assert some.keys() == {name for name in whole if _part(name) not in freeze}
    for name, one in some.items():
        assert float((one - whole[name]).norm()) <= 1e-5 * float(whole[name].norm()) + 1e-6, name
    before = {name: one.detach().clone() for name, one in engine.backend.by_name.items()}
    engine.optimizer_step()
    moved = {name for name, one in engine.backend.by_name.items() if not torch.equal(one, before[name])}
    assert {_part(name) for name in moved} == {"tower", "projector", "language"} - {*freeze}


def test_parts_that_cannot_be_frozen(mesh: DeviceMesh) -> None:  # noqa: F811
    cases = {
        "a qwen3 model has no parts for images": ("qwen3", {"freeze": ("tower",)}),
        "nothing would learn": ("qwen3_vl", {"freeze": ("tower", "projector", "language")}),
        "beside lora": ("qwen3_vl", {"freeze": ("tower",), "lora": LoraConfig(targets=("q_proj",))}),
    }
    for message, (family, settings) in cases.items():
        config = EngineConfig(**settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=message) as caught:
            make_engine(ModelSpec(source_of(family), config, OptimizerConfig()), mesh=mesh)
        assert caught.value.key == "freeze"


def test_parts_have_learning_rates_of_their_own(
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Two steps, along the schedule: a part with a share moves as all do with that rate."""
    source = source_with_limits("qwen3_vl")
    batch = batch_of(rows_with_images(reader_of(source), tmp_path))

    def moved(**settings: Any) -> dict[str, torch.Tensor]:
        optimizer = OptimizerConfig(
            schedule=ConstantScheduleConfig(warmup_steps=2), grad_clip=None, eps=1e-3, **settings
        )
        engine = make_engine(ModelSpec(source, EngineConfig(token_budget=100), optimizer), mesh=mesh)
        before = {name: one.detach().clone() for name, one in engine.backend.by_name.items()}
        engine.forward_backward(batch, Weighted())
        engine.optimizer_step()
        return {name: one.detach() - before[name] for name, one in engine.backend.by_name.items()}

    parts = moved(lr=1e-2, lr_of_parts={"tower": 0.125, "projector": 2.0})
    rates = {"tower": moved(lr=1.25e-3), "projector": moved(lr=2e-2), "language": moved(lr=1e-2)}
    for name, one in parts.items():
        assert torch.allclose(one, rates[_part(name)][name], rtol=1e-4, atol=1e-9), name
    for family, frozen in (("qwen3", ()), ("qwen3_vl", ("tower",))):
        settings = OptimizerConfig(lr_of_parts={"tower": 0.1})
        with pytest.raises(ConfigError, match="nothing learns that is of the tower") as caught:
            make_engine(ModelSpec(source_of(family), EngineConfig(freeze=frozen), settings), mesh=mesh)
        assert caught.value.key == "optimizer.lr_of_parts"


# ---- what a folder says


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_an_export_is_the_folder_of_a_whole_model(
    family: str,
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    """From scratch, and from that folder with other limits of pixels; the image processor that transformers
    loads from it makes the pixels that were trained on.
    """
    path = drawing(tmp_path, "a", (40, 24), "red")
    spec = ModelSpec(source_with_limits(family), EngineConfig(), None)
    make_engine(spec, mesh=mesh).export(str(tmp_path / "first"))
    assert json.loads((tmp_path / "first" / "config.json").read_text())["architectures"] == [
        type(make(family)).__name__
    ]
    (tmp_path / "first" / "video_preprocessor_config.json").write_text('{"of": "videos"}')
    first = ModelSource(path=str(tmp_path / "first"))
    folders = {"same": first}
    if family in TURNING:
        folders["smaller"] = replace(first, max_pixels=16 * 16)
    for name, source in folders.items():
        make_engine(ModelSpec(source, EngineConfig(), None), mesh=mesh).export(str(tmp_path / name))
        reader = reader_of(source)
        processor = AutoImageProcessor.from_pretrained(tmp_path / name, backend="pil")
        theirs = processor(images=[Image.open(path)], return_tensors="np")
        image = reader.reference(path)
        pixels = reader.pixels(image)
        np.testing.assert_array_equal(theirs["pixel_values"].reshape(pixels.shape), pixels)
        assert (tmp_path / name / "video_preprocessor_config.json").read_text() == '{"of": "videos"}'
    counts = [reader_of(source).reference(path).n_tokens for source in folders.values()]
    # GLM's limits are those of both frames; InternVL's 3 x 2 tiles and one of all have 4 tokens each; LLaVA's
    # 10 x 10 patches are 6 x 10 without what pads them, too many: 4 lines of 7 and an end, and 4 of it all.
    assert counts == {
        "glm46v": [2, 1],
        "glm4v_moe": [2, 1],
        "internvl": [28],
        "llava_onevision": [36],
        "gemma3": [4],
        "idefics3": [52],  # 3 x 4 tiles and one of all
        "smolvlm": [13],
    }.get(family, [6, 2])


def test_settings_of_a_folder_that_do_not_fit(tmp_path: Path) -> None:
    write("qwen2_5_vl", tmp_path)
    source = ModelSource(path=str(tmp_path))
    with pytest.raises(DataError, match=r"has no preprocessor_config\.json"):
        settings_of(source, load_model_config(source))
    file = tmp_path / "preprocessor_config.json"
    file.write_text('{"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 14}')
    with pytest.raises(DataError, match=r"patch_size is 14,.* has patch_size=4$"):
        settings_of(source, load_model_config(source))
    file.write_text('{"image_processor_type": "GotOcr2ImageProcessor"}')
    with pytest.raises(ConfigError, match="is GotOcr2ImageProcessor, and a qwen2_5"):
        settings_of(source, load_model_config(source))
    file.write_text('{"min_pixels": 100, "max_pixels": 1000}')  # as older folders write it
    assert settings_of(source, load_model_config(source))["size"] == {
        "shortest_edge": 100,
        "longest_edge": 1000,
    }


def test_other_families_are_given_no_images() -> None:
    for name in ("qwen2_vl", "qwen3"):
        source = ModelSource(config={"model_type": name})
        with pytest.raises(ConfigError, match=f"rondo gives no images to a {name} model"):
            ImageReader(source, load_model_config(source))


def test_a_key_that_a_part_of_the_config_does_not_have() -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {"patchsize": 4}}
    with pytest.raises(ConfigError, match=r"qwen3_vl_vision config .*'patchsize'") as caught:
        load_model_config(ModelSource(config=config))
    assert caught.value.key == "model.config.vision_config.patchsize"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("qwen2_5_vl", ("language",)),
        ("qwen3_vl_moe", ("tower",)),
        ("qwen3_vl", ("language", "tower", "projector")),
        ("qwen3_5", ("language", "tower", "projector")),
        ("glm46v", ("language", "tower", "projector")),
        ("llava_onevision", ("language", "tower", "projector")),
        ("internvl", ("language", "tower", "projector")),
        ("gemma3", ("language", "tower")),
        ("idefics3", ("language", "tower", "projector")),
        ("smolvlm", ("tower", "projector")),
    ],
)
def test_adapters_of_parts_learn_alone_and_peft_reads_them(
    family: str,
    parts: tuple[Any, ...],
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    """In steps on rows of text, too; the model that peft makes of base and export is the merged one, which
    is the trained one.
    """
    peft = pytest.importorskip("peft")
    model = write(family, tmp_path / "model")
    source = ModelSource(path=str(tmp_path / "model"), **limits_of(family))
    (tmp_path / "model" / "preprocessor_config.json").write_text(
        json.dumps(settings_of(source_of(family), model.config))
    )
    lora = LoraConfig(rank=2, parts=parts)
    config, optimizer = EngineConfig(token_budget=220, lora=lora), OptimizerConfig(lr=1e-2)
    engine = make_engine(ModelSpec(source, config, optimizer), mesh=mesh)
    rows = rows_with_images(reader_of(source), tmp_path)
    learned = {name: one for name, one in engine.backend.by_name.items() if one.requires_grad}
    reads = reader_of(source).family
    assert {reads.part_of(adapted_name(name)) for name in learned} == {*parts}
    for _ in range(2):
        engine.forward_backward(batch_of(rows), Weighted())
        engine.forward_backward(batch_of([row for row in rows if not row.images]), Weighted())
        engine.optimizer_step()
    assert all(float(one.detach().abs().sum()) > 0 for one in learned.values())
    engine.export(str(tmp_path / "merged"))
    read = peft.PeftModel.from_pretrained(write(family, tmp_path / "again"), tmp_path / "merged" / "adapter")
    merged = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    found = engine.forward(batch_of(rows), {"log_probs": "log_probs"}).rows("log_probs")
    for row, ours in zip(rows, found, strict=True):
        with torch.no_grad():
            for one in (read, merged):
                np.testing.assert_allclose(row.log_probs(one), ours, atol=2e-5, rtol=0)


def test_targets_that_no_part_has(mesh: DeviceMesh) -> None:  # noqa: F811
    cases = {
        "lora.targets": ("qwen3_vl", LoraConfig(targets=("qkv",)), "is in none of the parts language"),
        "lora.parts": ("qwen3", LoraConfig(parts=("tower",)), "a qwen3 model has no parts for images"),
    }
    for key, (family, lora, message) in cases.items():
        with pytest.raises(ConfigError, match=message) as caught:
            make_engine(ModelSpec(source_of(family), EngineConfig(lora=lora), OptimizerConfig()), mesh=mesh)
        assert caught.value.key == key


def test_an_image_is_where_it_was_counted(tmp_path: Path) -> None:
    """A reference whose grid is another processor's is an error, not another number of tokens."""
    reader = reader_of(source_with_limits("qwen3_vl"))
    image = reader.reference(drawing(tmp_path, "a", (40, 24), "red"))
    wrong = ImageRef(image.ref, image.sha256, (1, 2, 2), 1)
    with pytest.raises(DataError, match=r"\(1, 4, 6\) here, and \(1, 2, 2\)"):
        reader.pixels(wrong)


def test_pixels_are_made_the_same_way_where_rows_are_sampled_and_learnt(
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    source = source_with_limits("qwen3_vl")
    reader, other = reader_of(source), reader_of(replace(source, max_pixels=20 * 20))
    path = drawing(tmp_path, "a", (12, 12), "red")
    (row,) = [Row(reader, 3, [path], 4, seed=1)]
    engine = make_engine(ModelSpec(source, EngineConfig(), None), mesh=mesh)
    beside = make_engine(ModelSpec(replace(source, section="critic"), EngineConfig(), None), mesh=mesh)
    (unsaid,) = engine.forward(batch_of([row]), {"log_probs": "x"}).rows("x")
    row.images = [replace(row.images[0], read_by=reader.fingerprint)]
    (said,) = engine.forward(batch_of([row]), {"log_probs": "x"}).rows("x")
    np.testing.assert_array_equal(said, unsaid)
    versions, settings = reader.fingerprint.split("-")
    assert versions == other.fingerprint.split("-")[0]
    for read_by, refusing in (
        (other.fingerprint, [engine]),
        (f"{'0' * 12}-{settings}", [engine, beside]),
    ):
        row.images = [replace(row.images[0], read_by=read_by)]
        for one in (engine, beside):
            if one in refusing:
                with pytest.raises(DataError, match="its pixels were made otherwise than here"):
                    one.forward(batch_of([row]), {"log_probs": "x"})
            else:
                one.forward(batch_of([row]), {"log_probs": "x"})


def test_tokens_of_images_without_images_are_an_error(mesh: DeviceMesh, tmp_path: Path) -> None:  # noqa: F811
    """A row whose column was lost on the way would be learnt blind."""
    source = source_with_limits("qwen3_vl")
    rows = [Row(reader_of(source), 3, [], 4, seed=1) for _ in range(2)]
    rows[1] = Row(reader_of(source), 3, [drawing(tmp_path, "a", (12, 12), "red")], 4, seed=2)
    engine = make_engine(ModelSpec(source, EngineConfig(), None), mesh=mesh)
    whole = batch_of(rows)
    for lost in (whole.without("images"), whole.with_columns({"images": ["", ""]}, replace=True)):
        with pytest.raises(
            DataError, match=rf"^row 1 has tokens of images \({IMAGE_TOKEN}\) in its prompt_ids"
        ):
            engine.forward(lost, {"log_probs": "x"})


def test_rows_are_equal_where_their_images_are(tmp_path: Path) -> None:
    """The same tokens with another image of the same size are another row."""
    reader = reader_of(source_with_limits("qwen3_vl"))
    paths = [drawing(tmp_path, name, (12, 12), colour) for name, colour in (("a", "red"), ("b", "blue"))]
    rows = [Row(reader, 3, [path], 4, seed=1) for path in (*paths, *paths)]
    first, same = equal_rows(batch_of(rows))
    assert first.tolist() == [0, 1]
    assert same.tolist() == [0, 1, 0, 1]
