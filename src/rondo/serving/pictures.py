"""The images of requests: which a client may send, and where they lie while a request is answered.

A client is a stranger. It may send an image itself (`data:image/…;base64,…`) and, where the server fetches,
name one on the internet: never a file, nor anything in this network. Engines read files, so the images of a
request lie in a folder of its own until its answer is there.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from rondo.chat import ImagePart
from rondo.core.errors import DataError, StorageError
from rondo.core.images import Grid, ImageRef, of_data_url
from rondo.serving.problems import refuse
from rondo.system.urls import fetched

MOST_IMAGES = 16  # of a request, where model.images.per_prompt does not say
URL_BYTES = 16 << 20  # of an image that is fetched: as many as a request's body may have
URL_SECONDS = 20.0  # that the images of a request may take
_THREADS = 8
_FORM = "{type: image_url, image_url: {url: data:image/…;base64,…}}"


class ReadsImages(Protocol):
    """What a model says of images (`rondo.models.pixels.ImageReader`)."""

    token: int
    """What stands for an image in a tokenised conversation."""

    def ids(self, grid: Grid) -> np.ndarray:
        """Returns all tokens that stand in the place of an image of this grid, int32 [N]."""
        ...

    def check(self, content: bytes, name: str) -> None:
        """Decodes an image. Raises DataError."""
        ...

    def reference(self, path: Path, turn: int = 0, *, alone: bool = True) -> ImageRef:
        """Counts the tokens of a file. Raises DataError."""
        ...


@dataclass(frozen=True)
class SentImages:
    """The images of one request."""

    images: tuple[ImageRef, ...] = ()
    """In the order of the conversation; `turn` is the message that each is in."""
    token: int = -1
    """What stands for one in a tokenised conversation."""
    ids: Callable[[Grid], np.ndarray] | None = None
    """Returns all tokens of an image of this grid; None: there are no images."""
    folder: Path | None = None
    """Where their files are; None: there are none."""

    def close(self) -> None:
        """Removes the files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


NONE_SENT = SentImages()


@dataclass(frozen=True)
class ClientImages:
    """How the images of requests are read, for one model."""

    reads: ReadsImages
    """The model's reader."""
    folder: Path
    """In which each request with images has a folder of its own."""
    most: int = MOST_IMAGES
    """So many in a request."""
    fetches: bool = False
    """Whether what is at http(s) URLs is fetched."""
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "rondo-images"))
    """Read and fetch."""

    async def sent(self, parts: Sequence[ImagePart]) -> SentImages:
        """Reads the images of a request. Raises ApiError for what is none, or cannot be fetched."""
        if not parts:
            return NONE_SENT
        work = asyncio.get_running_loop().run_in_executor(self.threads, self._read, parts)
        try:
            async with asyncio.timeout(URL_SECONDS):
                return await asyncio.shield(work)
        except (StorageError, DataError) as error:
            raise refuse("messages", str(error), "invalid_image") from error
        except TimeoutError as error:
            raise refuse("messages", f"no images after {URL_SECONDS:g} s", "invalid_image") from error
        finally:
            if not work.done():  # nobody waits for it any more
                work.add_done_callback(_close)

    def _read(self, parts: Sequence[ImagePart]) -> SentImages:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            images = []
            for number, (place, value) in enumerate(parts):
                is_url, name = _is_url(value), f"image {number}"
                content = fetched(value, URL_BYTES, URL_SECONDS) if is_url else of_data_url(value, name)
                (folder / name).write_bytes(content)
                images.append(self.reads.reference(folder / name, place, alone=len(parts) == 1))
                self.reads.check(content, name)  # an engine's error would be the server's fault, with a path
            return SentImages(tuple(images), self.reads.token, self.reads.ids, folder)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, DataError):  # which names the file, and its place is nobody's business
                raise DataError(str(error).replace(f"{folder}/", "")) from error
            raise


def check_sent(parts: Sequence[ImagePart], most: int, *, fetches: bool) -> None:
    """Raises ApiError for images that a client may not send: more than `most`, files, URLs unless they are
    fetched.
    """
    for number, (place, value) in enumerate(parts):
        where, is_url = f"messages.{place}.content", _is_url(value)
        if number >= most:
            raise refuse(where, f"has image {number + 1}, and a request may have {most}")
        if is_url and not fetches:
            text = f"has an image at a URL, and this server fetches none: send it as {_FORM}"
            raise refuse(where, text, "unsupported_value")
        if not is_url and not (isinstance(value, str) and value.startswith("data:")):
            raise refuse(where, f"must have each image as {_FORM}, and no file")


def _is_url(value: object) -> bool:
    return isinstance(value, str) and value.lower().startswith(("http://", "https://"))


def _close(work: asyncio.Future[SentImages]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().close()
