"""Images of requests in rondo's own engines: which are refused, what is read of them before a sequence is
decoded, and what the model's tower makes of them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from rondo.core.errors import ConfigError, DataError, LostImageError, RefusedRequestError
from rondo.core.images import Grid, ImageRef, places_of_images
from rondo.core.types import GenerateRequest
from rondo.models.context import to_device
from rondo.models.family import record_of, why_blind
from rondo.models.pixels import ImageReader, image_reader
from rondo.models.source import ModelSource

FEATURE_BYTES = 256 << 20  # of what the tower made, on the model's device


@dataclass(frozen=True)
class ReadImages:
    """The images of a prompt, read: they may go from the disk while its response is made."""

    images: tuple[ImageRef, ...]
    """In the order of their tokens."""
    pixels: tuple[np.ndarray, ...]
    """What the tower takes of each, float32; shared by all requests that show it."""
    places: tuple[np.ndarray, ...]
    """Which of the prompt's tokens are those of each, int64 [n_tokens] of each."""
    prompt: np.ndarray
    """What the rotary embedding turns the prompt's tokens by, int64 [3, P]."""

    @cached_property
    def starts(self) -> np.ndarray:
        """Returns where the tokens of each begin, int64 [I]."""
        return np.array([places[0] for places in self.places], np.int64)

    @property
    def delta(self) -> int:
        """Returns how far tokens behind the prompt are turned, less their place: all three alike."""
        return int(self.prompt.max()) + 1 - self.prompt.shape[1]

    def turns(self, start: int, stop: int) -> np.ndarray:
        """Returns what the tokens from `start` to before `stop` are turned by, int64 [3, stop - start]."""
        behind = np.arange(max(start, self.prompt.shape[1]), stop) + self.delta
        return np.concatenate([self.prompt[:, start:stop], np.broadcast_to(behind, (3, len(behind)))], 1)


def digest_of(shown: ReadImages | None, start: int = 0, stop: int | None = None) -> bytes:
    """Returns what differs where the same tokens show other images, of those that begin from token `start` to
    before `stop`; b"": there are none.
    """
    if shown is None:
        return b""
    begin, end = np.searchsorted(shown.starts, [start, shown.prompt.shape[1] if stop is None else stop])
    files = "".join(image.sha256 for image in shown.images[begin:end])
    return hashlib.blake2b(files.encode(), digest_size=16).digest() if files else b""


def sample_of(source: ModelSource) -> str:
    """Returns `EngineSpec.image_sample` of a model; "" where no image can be read here: whoever has one is
    told so.
    """
    try:
        reader = image_reader(source)
        return "" if reader is None else reader.sample
    except (ConfigError, DataError):
        return ""


def tokens_of_images(config: Any) -> list[int]:
    """Returns the tokens that a response has none of: they stand for what was not shown. config: of a model
    that reads images.
    """
    stand_in = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
    return [int(token) for token in stand_in if token is not None]


class RequestImages:
    """Looks at the images of an engine's requests, and reads them in a thread of its own. For a model that
    reads images (`why_blind`).
    """

    def __init__(self, source: ModelSource, model_config: Any, sample: str = "") -> None:
        """sample: `EngineSpec.image_sample`."""
        self._source, self._config, self._sample = source, model_config, sample
        self._token = int(model_config.image_token_id)
        # What a sequence holds is held once, also where the reader has let it go.
        self._held: WeakValueDictionary[tuple[str, Grid], np.ndarray] = WeakValueDictionary()
        self._executor = ThreadPoolExecutor(1, "rondo-images")

    @cached_property
    def _reader(self) -> ImageReader:
        """Returns what reads them, made when there is a first one: what it needs is not needed for text."""
        return ImageReader(self._source, self._config)

    def check(self, request: GenerateRequest) -> None:
        """Raises RefusedRequestError where the request's image tokens are not those of its images."""
        who = f"request {request.request_id!r}"
        if request.images and self._sample not in ("", self._reader.sample):
            raise RefusedRequestError(
                f"{who} has images, and this environment of the engine's makes other pixels of them than the "
                "trainer's: install the same versions of transformers and Pillow in both"
            )
        for image in request.images:
            if image.n_tokens != (own := self._reader.tokens(image.grid)):
                raise RefusedRequestError(
                    f"{who}: image {image.ref} of grid {image.grid} has {own} tokens, not {image.n_tokens}"
                )
        try:
            self._places(request.token_ids, request.images)
            if request.prefix is not None:
                self._places(request.prefix.token_ids, ())
        except DataError as error:
            raise RefusedRequestError(f"{who}: {error}") from error

    async def read(self, request: GenerateRequest) -> ReadImages:
        """Reads the request's images. Raises LostImageError where one is gone, or is not what it was."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._read, request)

    def _read(self, request: GenerateRequest) -> ReadImages:
        reader, pixels = self._reader, []
        for image in request.images:
            patches = self._held.get((image.sha256, image.grid))
            if patches is None:
                try:
                    patches = reader.pixels(image)
                except DataError as error:
                    raise LostImageError(f"request {request.request_id!r}: {error}") from error
                self._held[image.sha256, image.grid] = patches
            pixels.append(patches)
        places = self._places(request.token_ids, request.images)
        ids, grids = request.token_ids, [image.grid for image in request.images]
        turns = reader.family.positions(np.asarray(ids), grids, reader.config)
        return ReadImages(request.images, tuple(pixels), tuple(places), turns)

    def _places(self, ids: np.ndarray, images: Sequence[ImageRef]) -> list[np.ndarray]:
        pieces = [self._reader.pieces(image.grid) for image in images]
        return places_of_images(np.asarray(ids), pieces, self._token)

    def close(self) -> None:
        """Ends the thread."""
        self._executor.shutdown()


class Tower:
    """Makes the language model's features of images. Each goes through by itself, so that its features do not
    depend on others, and once as long as they are kept. Called from the decode thread only.
    """

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self._module, self._device = module, device
        config: Any = module.config
        family = record_of(str(config.model_type)).images
        assert family is not None
        self._family = family
        self.turns = family.turns
        """Whether the rotary embedding turns tokens by other numbers than their places."""
        self.sees_itself = family.sees_itself
        """Whether the tokens of one image see each other."""
        self.token = int(config.image_token_id)
        """The token that stands for images."""
        self.never = torch.tensor(tokens_of_images(config), device=device)
        """See `tokens_of_images`."""
        self._kept: OrderedDict[tuple[str, Grid], list[torch.Tensor]] = OrderedDict()

    @classmethod
    def of(cls, module: PreTrainedModel, device: torch.device) -> Tower | None:
        """Returns the tower of a model; None: it has none that is given images."""
        return None if why_blind(module.config) else cls(module, device)

    def features(self, shown: ReadImages, start: int, stop: int) -> dict[str, Any]:
        """Returns what the model's forward takes in addition, for the prompt's tokens from `start` to before
        `stop`: the features of the images, or their parts, that these stand for.
        """
        parts = []
        for image, pixels, places in zip(shown.images, shown.pixels, shown.places, strict=True):
            begin, end = np.searchsorted(places, [start, stop])
            if begin < end:
                parts.append([one[begin:end] for one in self._of_image(image, pixels)])
        if not parts:
            return {}
        return self._family.given(list(zip(*parts, strict=True)))

    def _of_image(self, image: ImageRef, pixels: np.ndarray) -> list[torch.Tensor]:
        """Returns the features [n_tokens, H] of an image, one tensor for each place where they go in."""
        kept = image.sha256, image.grid
        if kept in self._kept:
            self._kept.move_to_end(kept)
            return self._kept[kept]
        grid = to_device(np.array([image.grid], np.int64), self._device)
        made = self._family.features(self._module.model, to_device(pixels, self._device), grid)
        found = self._kept[kept] = [torch.cat(list(one)) for one in made]
        while self._nbytes > FEATURE_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return found

    @property
    def _nbytes(self) -> int:
        return sum(tensor.nbytes for own in self._kept.values() for tensor in own)

    def forget(self) -> None:
        """Drops what is kept: it belongs to other weights, or its memory is needed."""
        self._kept.clear()
