"""From an image's bytes to what a model's tower takes: transformers' own image processor (the one that needs
no torchvision), with the settings of the model's folder. Read where it is consumed, and kept by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from collections import OrderedDict
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from packaging.version import Version
from transformers import PreTrainedConfig
from transformers import __version__ as installed

from rondo.core.errors import ConfigError, DataError
from rondo.core.images import MOST_PIXELS, Grid, ImageRef, is_grey
from rondo.models.family import record_of, why_blind
from rondo.models.files import json_object
from rondo.models.loading import load_model_config
from rondo.models.source import ModelSource
from rondo.models.vision import SETTINGS, ImageFamily
from rondo.system.hub import local_folder

LEAST_TRANSFORMERS = "5.19"  # older ones were not run with images
WHOLE_SETTINGS = "processor_config.json"
_KEPT_GRIDS = 256  # whose tokens are kept
_KEPT_BYTES = 1 << 30  # of processed images: those of a step are read once for all of its passes
# What Pillow may take a file for, whatever it is called: others come from strangers as well, and some start
# programs (of EPS it has Ghostscript run what is in it).
_KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # of EXIF
# 24 x 16 pixels with colours at half the size: what decoders make of it differs, if that of anything does.
_SAMPLE = (
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxO"
    "UlNSMj5aYVpQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09P"
    "T09PT09PT0//wAARCAAQABgDASIAAhEBAxEB/8QAGAAAAgMAAAAAAAAAAAAAAAAAAAUBAgT/xAAkEAAABQMEAgMAAAAAAAAAAAAB"
    "AgMEBQARIQYSMbETIpHR4f/EABYBAQEBAAAAAAAAAAAAAAAAAAECA//EACQRAAEDAwIHAQAAAAAAAAAAAAECAzEAESEiQQQyUXGB"
    "obHx/9oADAMBAAIRAxEAPwDQqjMLSKaISzbxphngA+6lNOYXkznNLNtiQY4t8UraH08VFw7OR3cw2Ac91RMdPt4s5xI7Ayw45D9G"
    "gtFOAMRyjzvHykC5C1Jm6zoEDCd6atCTJlXDo8s39cFvbqilawafQjkkNjvcqPGeqKscMHLkj0B+96yW6+wAhtJvJ0CTnrX/2Q=="
)
_INSTALL = 'images need the package Pillow: pip install "rondo-rl[images]"'


def image_family(config: PreTrainedConfig, *, key: str = "model") -> ImageFamily:
    """Returns how the models of this config read images. Raises ConfigError for those that rondo does not
    give images.
    """
    found = record_of(str(config.model_type)).images
    if found is None:
        raise ConfigError(
            f"{key}: there are images, and {why_blind(config)}; take a model of another family "
            "(docs/images.md), or leave the images out",
            key=key,
        )
    if Version(installed) < Version(LEAST_TRANSFORMERS):
        raise ConfigError(f"images need transformers >= {LEAST_TRANSFORMERS}, and {installed} is installed")
    return found


def settings_of(source: ModelSource, config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the image processor's settings: those of the model's folder (its family's, where a model is
    made from scratch), with the source's own limits of pixels. Raises ConfigError or DataError for a folder
    without them, another processor than the family's, or settings that are not the model's.
    """
    family = image_family(config, key=source.section)
    if source.path is None:
        found: dict[str, Any] = {
            "image_processor_type": family.processor,
            "image_mean": list(family.colours[0]),
            "image_std": list(family.colours[1]),
            **family.own_settings(config),
        }
    else:
        found = _of_folder(Path(local_folder(source.path, source.hub)))
    kind = str(found.get("image_processor_type", family.processor))
    if kind.removesuffix("Fast").removesuffix("Pil") != family.processor:
        raise ConfigError(
            f"{source.path}: its image processor is {kind}, and a {config.model_type} model's is "
            f"{family.processor}"
        )
    return family.fitted(found, config, source)


def _of_folder(folder: Path) -> dict[str, Any]:
    """Reads the settings that a model's folder has, in one of two files."""
    for name in (WHOLE_SETTINGS, SETTINGS):
        if (folder / name).is_file():
            found = json_object(folder / name)
            found = found.get("image_processor", {}) if name == WHOLE_SETTINGS else found
            if found:
                return dict(found)
    raise DataError(
        f"{folder} has no {SETTINGS}, which says how images are made into patches; copy it from the model's "
        "first folder"
    )


def write_settings(source: ModelSource, config: PreTrainedConfig, folder: Path) -> None:
    """Writes the settings into an export's folder where none were carried there from the model's, or these
    are not what it was trained with: the source has limits of pixels of its own. A model whose folder has
    none was trained on text alone.
    """
    if source.path is not None and source.min_pixels is None and source.max_pixels is None:
        if _has_settings(folder) or not _has_settings(Path(local_folder(source.path, source.hub))):
            return
    settings = settings_of(source, config)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    whole = folder / WHOLE_SETTINGS
    if whole.is_file():
        whole.write_text(json.dumps({**json_object(whole), "image_processor": settings}, indent=2) + "\n")


def _has_settings(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SETTINGS, WHOLE_SETTINGS))


def opened(file: IO[bytes], name: str) -> Any:
    """Opens an image, as a PIL image of which nothing is decoded yet. Raises DataError naming it for what is
    no image, has several frames, no pixels, or more than MOST_PIXELS of them.
    """
    pil = _pil()
    pil.init()
    try:
        image = pil.open(file, formats=[kind for kind in _KINDS if kind in pil.OPEN])
    except pil.UnidentifiedImageError as error:  # whose text has an address: a policy may read this
        raise DataError(f"{name} is no image that can be read") from error
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
        raise DataError(f"{name} is no image that can be read: {error}") from error
    width, height = image.size
    if width < 1 or height < 1:
        raise DataError(f"{name} is an image of {width} x {height} pixels")
    if width * height > MOST_PIXELS:
        raise DataError(
            f"{name} has {width} x {height} pixels, more than {MOST_PIXELS}; make it smaller (it would be "
            "resized to model.images.max_pixels at most)"
        )
    if getattr(image, "n_frames", 1) > 1:
        raise DataError(f"{name} is animated ({image.n_frames} frames); take one frame of it")
    return image


def _may_be_turned(file: IO[bytes], kind: str) -> bool:
    """Says whether an image's file may say how it is to be turned. Of a PNG Pillow would decode every pixel
    to find that out: it may stand behind them.
    """
    if kind != "PNG":
        return kind != "TIFF"  # which Pillow turns itself, and says the size that it has then
    place, found = file.tell(), False
    file.seek(8)
    while len(head := file.read(8)) == 8 and not found:
        found = head[4:] in (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
        file.seek(int.from_bytes(head[:4]) + 4, io.SEEK_CUR)
    file.seek(place)
    return found


def as_rgb(content: bytes, name: str) -> Any:
    """Decodes an image as a PIL image in RGB, as transformers' `load_image` does: turned upright by its EXIF
    orientation, palettes and CMYK converted, transparency dropped. Raises DataError naming it where it is cut
    off, or of 16 bits a channel (converting would clip it).
    """
    from PIL import ImageOps

    image = opened(io.BytesIO(content), name)
    if image.mode.startswith("I") or image.mode == "F":
        raise DataError(f"{name} has more than 8 bits a channel (mode {image.mode}); save it with 8")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{name} is cut off or damaged: {error}") from error


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    return Image


class ImageReader:
    """Images of one model: their grids, and what its tower takes."""

    def __init__(self, source: ModelSource, config: PreTrainedConfig) -> None:
        """The settings are read with the first image. Raises ConfigError (`image_family`)."""
        self.family = image_family(config, key=source.section)
        self.token = int(config.image_token_id)
        self._source = source
        self.config = config
        self._kept: OrderedDict[tuple[str, Grid], np.ndarray] = OrderedDict()
        self._tokenizer: Any = None
        self._ids = lru_cache(_KEPT_GRIDS)(self._made_ids)
        self._decoding = threading.Lock()

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return settings_of(self._source, self.config)

    @cached_property
    def _processor(self) -> Any:
        import transformers

        kind = getattr(transformers, f"{self.family.processor}Pil")
        return kind.from_dict(
            {key: value for key, value in self._settings.items() if key != "image_processor_type"}
        )

    def grid(self, width: int, height: int) -> Grid:
        """Returns the grid of an image of this size. Raises ConfigError, DataError (`settings_of`)."""
        return self.family.grid(width, height, self._settings, self._processor)

    def tokens(self, grid: Grid) -> int:
        """Returns how many tokens stand for an image of this grid."""
        return self.family.tokens(grid, self.config)

    def pieces(self, grid: Grid) -> tuple[int, ...]:
        """Returns how many of these are side by side, piece after piece: between two there may be others."""
        return self.family.pieces(grid, self.config)

    def tell(self, tokenizer: Any) -> None:
        """Tells a tokenizer what is to stand for an image in its texts (`rondo.chat.render`), and asks it
        what is between the tokens of one. Raises ConfigError where it does not know that.
        """
        tokenizer.image_text = self.family.written(self.config, tokenizer)
        self._tokenizer = tokenizer
        self._ids.cache_clear()
        self.ids(self.family.smallest)

    def ids(self, grid: Grid) -> np.ndarray:
        """Returns all tokens that stand in the place of an image of this grid, int32 [N], for the tokenizer
        that was told.
        """
        return self._ids(grid)

    def _made_ids(self, grid: Grid) -> np.ndarray:
        return np.array(self.family.ids(grid, self.config, self._tokenizer), np.int32)

    def blank(self, grid: Grid) -> np.ndarray:
        """Returns the pixels of an image without anything on it: zeros, which is behind mean and std."""
        return np.zeros(self.family.shape(grid, self.config), np.float32)

    def measured(self, file: IO[bytes], name: str, *, alone: bool = True) -> tuple[Grid, int]:
        """Returns the grid of an image and how many tokens stand for it, of its header alone: no pixel is
        decoded. alone: it is its row's only one. Raises DataError.
        """
        image = opened(file, name)
        width, height = image.size
        if _may_be_turned(file, image.format) and image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
            width, height = height, width
        grid = self.grid(width, height)
        grid = grid if alone else self.family.of_several(grid)
        return grid, self.tokens(grid)

    def check(self, content: bytes, name: str) -> None:
        """Raises DataError for what `pixels` could not be made of, though its header is that of an image."""
        with self._decoding:  # one at a time: of MOST_PIXELS each takes some 300 MB
            as_rgb(content, name)

    def reference(self, path: Path, turn: int = 0, *, alone: bool = True) -> ImageRef:
        """Makes the reference of a file. Raises DataError."""
        content = _bytes(path)
        grid, tokens = self.measured(io.BytesIO(content), str(path), alone=alone)
        return ImageRef(f"path:{path}", hashlib.sha256(content).hexdigest(), grid, tokens, turn)

    def pixels(self, image: ImageRef) -> np.ndarray:
        """Returns what the tower takes of an image, float32; kept by its hash, as long as there is room.
        Raises DataError where the file is gone, another than it was, or has another grid.
        """
        if is_grey(image):
            return self.blank(image.grid)
        kept = image.sha256, image.grid
        if kept in self._kept:
            self._kept.move_to_end(kept)
            return self._kept[kept]
        name, decoded = image.path, self.decoded(image)
        grid = self.grid(*decoded.size)
        if image.grid not in (grid, self.family.of_several(grid)):
            raise DataError(f"image {name} has the grid {grid} here, and {image.grid} where it was counted")
        patches = self.family.made(self._processor, decoded, image.grid)
        assert patches.shape == self.family.shape(image.grid, self.config), (patches.shape, image.grid)
        self._kept[kept] = patches
        while sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return patches

    def decoded(self, image: ImageRef) -> Any:
        """Returns an image as `as_rgb` does. Raises DataError, also where the file is another than it was."""
        content = _bytes(Path(image.path))
        if hashlib.sha256(content).hexdigest() != image.sha256:
            raise DataError(f"image {image.path} is not the file that it was when the run first used it")
        return as_rgb(content, image.path)

    def seen_size(self, image: ImageRef) -> tuple[int, int] | None:
        """Returns width and height in pixels as the tower gets an image; None of a family that cuts it into
        tiles, or gives it other proportions.
        """
        return self.family.seen_size(image.grid, self.config)

    @cached_property
    def fingerprint(self) -> str:
        """Returns digests of what pixels depend on beside the file, joined by "-": the versions of what
        decodes and resizes (two hosts may decode a JPEG differently), and the processor with its settings.
        """
        pil = _pil()
        from PIL import features

        decoders = [features.version(name) for name in ("jpg", "libjpeg_turbo", "webp", "zlib")]
        told = ([installed, pil.__version__, decoders], [self.family.processor, self._settings])
        return "-".join(hashlib.sha256(repr(one).encode()).hexdigest()[:12] for one in told)

    @cached_property
    def sample(self) -> str:
        """Returns a digest of the pixels that are made here of a small JPEG: the same where images are read
        alike, whatever the versions.
        """
        image = as_rgb(base64.b64decode(_SAMPLE), "a sample")
        pixels = self.family.made(self._processor, image, self.grid(*image.size))
        return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()

    def reads_as(self, fingerprint: str) -> bool:
        """Says whether pixels are made here as where that is the fingerprint: of models beside the policy
        with the same versions, as their settings are their own.
        """
        parts = 2 if self._source.section == "model" else 1
        return fingerprint.split("-")[:parts] == self.fingerprint.split("-")[:parts]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"image {path} cannot be read: {error.strerror or error}") from error


def image_reader(source: ModelSource) -> ImageReader | None:
    """Returns the reader of a model's images; None of a family that rondo gives none. Raises as
    `load_model_config` and `ImageReader` do.
    """
    config = load_model_config(source)
    return None if record_of(str(config.model_type)).images is None else ImageReader(source, config)
