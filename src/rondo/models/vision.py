"""How the families that see read images: one record each, and the little that each answers by itself: how
many tokens stand for an image, what its tower takes, where features go, what the rotary embedding turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers.image_processing_utils import select_best_resolution

from rondo.core.errors import ConfigError, DataError
from rondo.core.images import Grid, ImageSizes, grid_of_pixels, places_of_images
from rondo.models.source import ModelSource

SETTINGS = "preprocessor_config.json"


def mrope_positions(ids: np.ndarray, grids: Sequence[Grid], token: int, merge: int) -> np.ndarray:
    """Returns the positions of expanded token ids [T] as Qwen's multimodal rotary embedding wants them, int64
    [3, T]: frame, row and column of an image's tokens, the same number three times for text. Text goes on
    behind the longer side of the image before it. Raises DataError (`places_of_images`).
    """
    counts = [math.prod(grid) // merge**2 for grid in grids]
    out = np.empty((3, len(ids)), np.int64)
    done = position = 0
    places = places_of_images(ids, [[count] for count in counts], token)
    for (start, *_), count, (frames, rows, columns) in zip(places, counts, grids, strict=True):
        out[:, done:start] = position + np.arange(start - done)
        position += start - done
        inside = np.indices((frames, rows // merge, columns // merge)).reshape(3, -1)
        out[:, start : start + count] = position + inside
        position += max(rows, columns) // merge
        done = start + count
    out[:, done:] = position + np.arange(len(ids) - done)
    return out


Places = Sequence[Sequence[torch.Tensor]]
"""Where features go in: at each place the features [n_tokens, H] of every image."""
Settings = Mapping[str, Any]
"""Of an image processor."""
_OF_VISION = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}


@dataclass(frozen=True, kw_only=True)
class ImageFamily:
    """How models of a family read images; the methods say how Qwen's do. An image is resized to whole tokens,
    its grid is its frames, rows and columns of patches, and the rotary embedding turns tokens by these.
    """

    processor: str
    """The image processor's class, without the word behind it that says what computes it (`Pil`)."""
    colours: tuple[Sequence[float], Sequence[float]]
    """What is taken from red, green and blue, and by what they are divided then, where no folder says it."""
    limits: tuple[int, int] | None = None
    """The least and the most pixels, where neither the folder nor the user says it; None: there are none."""
    tower: ClassVar[tuple[str, ...]] = ("model.visual.",)
    """How the names of the tower's parameters begin, perhaps the projector's among them."""
    projector: ClassVar[tuple[str, ...]] = ("model.visual.merger.", "model.visual.deepstack_merger_list.")
    """How those begin that turn the tower's features into the language model's."""
    smallest: ClassVar[Grid] = (1, 2, 2)
    """The grid of the smallest image."""
    turns: ClassVar[bool] = True
    """Whether the rotary embedding turns tokens by other numbers than their places."""
    sees_itself: ClassVar[bool] = False
    """Whether the tokens of one image see each other, those behind them, too."""
    as_one: ClassVar[bool] = False
    """Whether the model takes the features of all images as one tensor."""

    def part_of(self, parameter: str) -> str:
        """Returns which part a parameter belongs to: tower, projector or language."""
        if parameter.startswith(self.projector):
            return "projector"
        return "tower" if parameter.startswith(self.tower) else "language"

    def written(self, config: Any, tokenizer: Any) -> tuple[str, str] | None:
        """Returns what chat templates write for an image, and what the model was trained to read in its
        place, with one token of images; None: it is what they write.
        """
        return None

    def own_settings(self, config: Any) -> dict[str, Any]:
        """Returns the image processor's settings of a model from scratch."""
        return {name: getattr(config.vision_config, own) for name, own in _OF_VISION.items()}

    def fitted(self, found: dict[str, Any], config: Any, source: ModelSource) -> dict[str, Any]:
        """Returns a folder's settings, or own ones, as they are used: with the source's limits of pixels.
        Raises ConfigError or DataError for what the model is not made for.
        """
        size, least_and_most = dict(found.get("size") or {}), self.limits or (None, None)
        edges = ("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")
        found["size"] = {
            # min_pixels and max_pixels are how older folders spell it
            edge: getattr(source, key) or found.pop(key, None) or size.get(edge) or default
            for (edge, key), default in zip(edges, least_and_most, strict=True)
        }
        for name, own in _OF_VISION.items():
            wanted = getattr(config.vision_config, own)
            _check(source, name, found.setdefault(name, wanted), own, wanted)
        return {name: one for name, one in found.items() if name not in ("min_pixels", "max_pixels")}

    def grid(self, width: int, height: int, settings: Settings, processor: Any) -> Grid:
        """Returns what is kept of an image's size. Raises DataError for one that is not taken."""
        size = settings["size"]
        limits = size["shortest_edge"], size["longest_edge"]
        return grid_of_pixels(
            width, height, ImageSizes(settings["patch_size"], settings["merge_size"], *limits)
        )

    def of_several(self, grid: Grid) -> Grid:
        """Returns the grid of an image that is not its row's only one."""
        return grid

    def made(self, processor: Any, image: Any, grid: Grid) -> np.ndarray:
        """Returns what the processor makes of a PIL image of this grid, for the tower."""
        return np.asarray(processor(images=[image], return_tensors="np")["pixel_values"], np.float32)

    def tokens(self, grid: Grid, config: Any) -> int:
        """Returns how many tokens stand for an image of this grid."""
        return math.prod(grid) // int(config.vision_config.spatial_merge_size) ** 2

    def pieces(self, grid: Grid, config: Any) -> tuple[int, ...]:
        """Returns how many of these are side by side, piece after piece: between two there are others."""
        return (self.tokens(grid, config),)

    def ids(self, grid: Grid, config: Any, tokenizer: Any) -> Sequence[int]:
        """Returns all tokens that stand in the place of an image of this grid, with what is between its
        pieces. Raises ConfigError where the tokenizer does not know that.
        """
        return [config.image_token_id] * self.tokens(grid, config)

    def shape(self, grid: Grid, config: Any) -> tuple[int, ...]:
        """Returns the shape of what the tower takes of it, float32."""
        vision = config.vision_config
        return math.prod(grid), 3 * vision.temporal_patch_size * vision.patch_size**2

    def seen_size(self, grid: Grid, config: Any) -> tuple[int, int] | None:
        """Returns width and height in pixels as the tower gets an image; None where it gets tiles, or a
        square.
        """
        patch = int(config.vision_config.patch_size)
        return grid[2] * patch, grid[1] * patch

    def positions(self, ids: np.ndarray, grids: Sequence[Grid], config: Any) -> np.ndarray:
        """Returns what the rotary embedding turns expanded ids [T] by, int64 [3, T]. Raises DataError."""
        return mrope_positions(ids, grids, config.image_token_id, config.vision_config.spatial_merge_size)

    def features(self, trunk: Any, pixels: torch.Tensor, grids: torch.Tensor) -> Places:
        """Returns what the tower makes of images. pixels: of all of them, joined; grids: int64 [I, 3]."""
        made = trunk.get_image_features(pixels, grids, return_dict=True)
        # Qwen3-VL adds features to its first layers, too.
        return [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]

    def given(self, places: Places) -> dict[str, Any]:
        """Returns features as the model's forward takes them; of each place, in the order of the tokens."""
        whole, *deep = places
        made = torch.cat(tuple(whole))[None] if self.as_one else tuple(whole)
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=made, deepstack_features=deep)}}


def _check(source: ModelSource, name: str, found: Any, own: str, wanted: Any) -> None:
    if found != wanted:
        raise DataError(
            f"{source.path}/{SETTINGS}: {name} is {found}, and the model's vision_config has {own}={wanted}"
        )


class GlmFamily(ImageFamily):
    """GLM-4.6V's: as Qwen's, but for the limits, which count every pixel of both frames."""

    projector = ("model.visual.merger.", "model.visual.downsample.")

    def grid(self, width: int, height: int, settings: Settings, processor: Any) -> Grid:
        side, frames = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        if 0 < min(width, height) < side:  # first both sides become whole tokens
            scale = side / min(width, height)
            width, height = int(width * scale), int(height * scale)
        halved = {edge: math.ceil(size / frames) for edge, size in settings["size"].items()}
        return super().grid(width, height, {**settings, "size": halved}, processor)


class TileFamily(ImageFamily):
    """An image is cut into square tiles, each of which is as many tokens. Its grid is (1, rows, columns) of
    tiles; of more than one there is another with all of the image.
    """

    tower = ("model.vision_tower.", "model.multi_modal_projector.")
    projector: ClassVar[tuple[str, ...]] = ("model.multi_modal_projector.",)
    smallest = (1, 1, 1)
    turns = False
    as_one = True

    def per_tile(self, config: Any) -> int:
        """Returns how many tokens a tile is."""
        raise NotImplementedError

    def own_settings(self, config: Any) -> dict[str, Any]:
        return {"size": {"height": _side(config), "width": _side(config)}}

    def fitted(self, found: dict[str, Any], config: Any, source: ModelSource) -> dict[str, Any]:
        if source.min_pixels is not None or source.max_pixels is not None:
            raise ConfigError(
                f"model.images: a {config.model_type} model cuts images into tiles of one size, and has no "
                f"min_pixels and max_pixels; remove them ({SETTINGS} says how many tiles there may be)",
                key="model.images",
            )
        self.check_side(found, config, source)
        return found

    def check_side(self, found: dict[str, Any], config: Any, source: ModelSource) -> None:
        """Raises DataError for settings whose tiles are not the model's."""
        size, side = found.get("size") or {}, _side(config)
        _check(source, "size", (size.get("height"), size.get("width")), "image_size", (side, side))

    def grid(self, width: int, height: int, settings: Settings, processor: Any) -> Grid:
        return 1, 1, max(processor.get_number_of_image_patches(height, width, {}) - 1, 1)

    def tokens(self, grid: Grid, config: Any) -> int:
        return int(_tiles(math.prod(grid)) * self.per_tile(config))

    def shape(self, grid: Grid, config: Any) -> tuple[int, ...]:
        return _tiles(math.prod(grid)), 3, _side(config), _side(config)

    def seen_size(self, grid: Grid, config: Any) -> tuple[int, int] | None:
        return None

    def positions(self, ids: np.ndarray, grids: Sequence[Grid], config: Any) -> np.ndarray:
        return np.broadcast_to(np.arange(len(ids)), (3, len(ids)))

    def features(self, trunk: Any, pixels: torch.Tensor, grids: torch.Tensor) -> Places:
        made = trunk.get_image_features(pixels, return_dict=True).pooler_output
        return [[one.flatten(0, 1) for one in made.split([_tiles(cut) for cut in grids.prod(-1).tolist()])]]


def _side(config: Any) -> int:
    size = config.vision_config.image_size
    return int(size if isinstance(size, int) else size[0])


def _tiles(cut: int) -> int:
    return cut + (cut > 1)


class Gemma3Family(TileFamily):
    """Gemma 3's: one tile, whose tokens see each other."""

    sees_itself = True

    def per_tile(self, config: Any) -> int:
        return int(config.mm_tokens_per_image)

    def written(self, config: Any, tokenizer: Any) -> tuple[str, str] | None:
        ids = [config.boi_token_id, config.image_token_id, config.eoi_token_id]
        begin, image, end = tokenizer.convert_ids_to_tokens(ids)
        return begin, f"\n\n{begin}{image}{end}\n\n"

    def fitted(self, found: dict[str, Any], config: Any, source: ModelSource) -> dict[str, Any]:
        if found.get("do_pan_and_scan"):
            raise DataError(
                f"{source.path}/{SETTINGS}: do_pan_and_scan shows an image again in pieces, and rondo shows "
                "it once; set it to false, or take the line out"
            )
        return super().fitted(found, config, source)

    def grid(self, width: int, height: int, settings: Settings, processor: Any) -> Grid:
        return self.smallest


class InternVLFamily(TileFamily):
    """InternVL's: as many tiles as are next to an image's proportions."""

    def per_tile(self, config: Any) -> int:
        patch = config.vision_config.patch_size
        along = _side(config) // (patch if isinstance(patch, int) else patch[0])
        return int((along * config.downsample_ratio) ** 2)

    def written(self, config: Any, tokenizer: Any) -> tuple[str, str] | None:
        image = tokenizer.convert_ids_to_tokens(config.image_token_id)
        begin = getattr(tokenizer, "start_image_token", "<img>")
        return image, f"{begin}{image}{getattr(tokenizer, 'end_image_token', '</img>')}"

    def fitted(self, found: dict[str, Any], config: Any, source: ModelSource) -> dict[str, Any]:
        # Folders leave it to the processor of texts and images, which asks for it always.
        return {**super().fitted(found, config, source), "crop_to_patches": True}


class LlavaFamily(TileFamily):
    """LLaVA-OneVision's: a row's only image is cut into tiles, of the layout that fits it best, and what pads
    it is left out; several are a tile each. A grid is (1, or 0 of several; height, width), in pixels.
    """

    projector = ("model.multi_modal_projector.", "model.image_newline")
    smallest = (0, 1, 1)
    as_one = False

    def per_tile(self, config: Any) -> int:
        return int((_side(config) // config.vision_config.patch_size) ** 2)

    def own_settings(self, config: Any) -> dict[str, Any]:
        return {**super().own_settings(config), "image_grid_pinpoints": config.image_grid_pinpoints}

    def fitted(self, found: dict[str, Any], config: Any, source: ModelSource) -> dict[str, Any]:
        found, wanted = super().fitted(found, config, source), config.image_grid_pinpoints
        if found.setdefault("image_grid_pinpoints", wanted) != wanted:
            raise DataError(f"{source.path}/{SETTINGS}: its image_grid_pinpoints are not the model's")
        return found

    def grid(self, width: int, height: int, settings: Settings, processor: Any) -> Grid:
        return 1, height, width

    def of_several(self, grid: Grid) -> Grid:
        return 0, *grid[1:]

    def made(self, processor: Any, image: Any, grid: Grid) -> np.ndarray:
        shown = [image] if grid[0] else [[image, image]]
        made = processor(images=shown, return_tensors="np")["pixel_values"]
        return np.asarray(made[0], np.float32)

    def tokens(self, grid: Grid, config: Any) -> int:
        alone, height, width = grid
        if not alone:
            return self.per_tile(config) + 1
        along = _side(config) // config.vision_config.patch_size
        rows, columns = (count * along for count in _layout(grid, config))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        shrink = math.sqrt(rows * columns / (most * along**2))
        if shrink > 1.1:
            rows, columns = int(rows // shrink), int(columns // shrink)
        return self.per_tile(config) + rows * (columns + 1)  # each row ends with a new line

    def shape(self, grid: Grid, config: Any) -> tuple[int, ...]:
        tiles = 1 + grid[0] * math.prod(_layout(grid, config))
        return tiles, 3, _side(config), _side(config)

    def features(self, trunk: Any, pixels: torch.Tensor, grids: torch.Tensor) -> Places:
        of_each = [(alone, height, width) for alone, height, width in grids.tolist()]
        parts = pixels.split([self.shape(grid, trunk.config)[0] for grid in of_each])
        found: dict[int, torch.Tensor] = {}
        for alone in (1, 0):
            which = [number for number, grid in enumerate(of_each) if grid[0] == alone]
            if which:
                # The count says that they are several: one more, so that one of several is none alone.
                several = {} if alone else {"batch_num_images": [len(which) + 1]}
                made = trunk.get_image_features(
                    torch.cat([parts[number] for number in which]),
                    grids[which, 1:],
                    return_dict=True,
                    **several,
                )
                found |= dict(zip(which, made.pooler_output, strict=True))
        return [[found[number] for number in range(len(of_each))]]


class NamedTileFamily(TileFamily):
    """Idefics3's and SmolVLM's: an image is resized to a longest side, and further to whole tiles. Before the
    tokens of a tile stand the names of its row and column; the tile with all of the image is the last one.
    """

    tower = ("model.vision_model.", "model.connector.")
    projector = ("model.connector.",)

    def per_tile(self, config: Any) -> int:
        return int((_side(config) // config.vision_config.patch_size // config.scale_factor) ** 2)

    def own_settings(self, config: Any) -> dict[str, Any]:
        return {"size": {"longest_edge": 4 * _side(config)}}

    def check_side(self, found: dict[str, Any], config: Any, source: ModelSource) -> None:
        tile = found.setdefault("max_image_size", {"longest_edge": _side(config)})
        _check(source, "max_image_size", tile.get("longest_edge"), "image_size", _side(config))
        if not found.get("size", {"longest_edge": 1}).get("longest_edge"):
            raise DataError(f"{source.path}/{SETTINGS}: size must be {{longest_edge: …}}: {found['size']}")

    def grid(self, width: int, height: int, settings: Settings, processor: Any) -> Grid:
        if not processor.do_image_splitting:
            return self.smallest
        tile, is_wide = processor.max_image_size["longest_edge"], width >= height
        if processor.do_resize:
            width, height = _to_longest(width, height, processor.size["longest_edge"])
            width, height = (width, height + height % 2) if is_wide else (width + width % 2, height)
            if max(width, height) > _LONGEST:
                width, height = _to_longest(width, height, _LONGEST)
        width, height = _to_longest(width, height, math.ceil(max(width, height) / tile) * tile)
        return 1, math.ceil(height / tile), math.ceil(width / tile)

    def pieces(self, grid: Grid, config: Any) -> tuple[int, ...]:
        return (self.per_tile(config),) * _tiles(math.prod(grid))

    def ids(self, grid: Grid, config: Any, tokenizer: Any) -> Sequence[int]:
        around, (_, rows, columns) = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>"), grid
        special = tokenizer.get_added_vocab()
        if around not in special or config.image_token_id not in special.values():
            raise ConfigError(
                f"model.tokenizer: {around} and the token {config.image_token_id}, of which a "
                f"{config.model_type} model reads an image, are no special tokens of it; take that of the "
                "model's folder, or add them",
                key="model.tokenizer",
            )
        tile = tokenizer.convert_ids_to_tokens(config.image_token_id) * self.per_tile(config)
        text = f"{around}{getattr(tokenizer, 'global_image_token', '<global-img>')}{tile}{around}"
        if rows * columns > 1:
            named = [
                "".join(f"{around}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1))
                for row in range(1, rows + 1)
            ]
            text = "\n".join(named) + "\n\n" + text  # new lines, which tokenizers may join
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def made(self, processor: Any, image: Any, grid: Grid) -> np.ndarray:
        return super().made(processor, image, grid)[0]

    def features(self, trunk: Any, pixels: torch.Tensor, grids: torch.Tensor) -> Places:
        # Not by `get_image_features`, which leaves out tiles of zeros: a blank image is nothing else.
        patches = trunk.vision_model(pixel_values=pixels.to(trunk.dtype)).last_hidden_state
        counts = [_tiles(cut) for cut in grids.prod(-1).tolist()]
        return [[one.flatten(0, 1) for one in trunk.connector(patches).split(counts)]]


_LONGEST = 4096  # of a side, whatever a folder says


def _to_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Returns an image's sides, of which the longer one becomes `longest`, as processors round them."""
    ratio = width / height
    if width >= height:
        return longest, max(int(longest / ratio), 1)
    return max(int(longest * ratio), 1), longest


def _layout(grid: Grid, config: Any) -> tuple[int, int]:
    """Returns the rows and columns of tiles that fit an image of this height and width best."""
    best = select_best_resolution(grid[1:], config.image_grid_pinpoints)
    return best[0] // _side(config), best[1] // _side(config)


_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5,) * 3, (0.5,) * 3
_QWENS = "Qwen2VLImageProcessor"
QWEN2_5_VL = ImageFamily(processor=_QWENS, colours=_CLIP, limits=(56 * 56, 28 * 28 * 16384))
QWEN3_VL = ImageFamily(processor=_QWENS, colours=_HALF, limits=(1 << 16, 1 << 24))
GLM46V = GlmFamily(processor="Glm46VImageProcessor", colours=_CLIP, limits=(112 * 112, 28 * 28 * 15000))
LLAVA_ONEVISION = LlavaFamily(processor="LlavaOnevisionImageProcessor", colours=_CLIP)
INTERNVL = InternVLFamily(processor="GotOcr2ImageProcessor", colours=_CLIP)
GEMMA3 = Gemma3Family(processor="Gemma3ImageProcessor", colours=_HALF)
IDEFICS3 = NamedTileFamily(processor="Idefics3ImageProcessor", colours=_HALF)
SMOLVLM = NamedTileFamily(processor="SmolVLMImageProcessor", colours=_HALF)
