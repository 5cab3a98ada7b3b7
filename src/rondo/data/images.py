"""The images of rows: which ones a row has, where each is, and how many tokens stand for it. No pixel is
decoded here, and a file of the data stays where it is.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from rondo.chat import Conversation, ImagePart
from rondo.config.schema import FileSourceConfig, SourceConfig
from rondo.core.errors import ConfigError, DataError
from rondo.core.images import (
    MARK,
    MOST_BYTES,
    MOST_PIXELS,
    EpisodeImages,
    Grid,
    ImageRef,
    of_base64,
    of_data_url,
    with_images,
)
from rondo.system.storage import make_folder, write_atomic
from rondo.system.urls import fetched, is_url

COLUMNS = ("images", "image")
"""Columns that hold a row's images in everybody's data."""
_USED = "files.tsv"  # beside the images that are kept: which files of the data had which hash
_SECONDS = 60.0  # that an image at a URL may take


class Reads(Protocol):
    """What a model says of images (`rondo.models.pixels.ImageReader`)."""

    token: int
    """The token that stands for them."""

    def measured(self, file: IO[bytes], name: str, *, alone: bool) -> tuple[Grid, int]:
        """Returns an image's grid and number of tokens, of its header alone. Raises DataError."""
        ...

    def ids(self, grid: Grid) -> np.ndarray:
        """Returns all tokens that stand in the place of an image of this grid, int32 [N]."""
        ...

    def check(self, content: bytes, name: str) -> None:
        """Decodes an image. Raises DataError for one that is cut off, or of more than 8 bits a channel."""
        ...

    def decoded(self, image: ImageRef) -> Any:
        """Returns an image as a Pillow image in RGB, upright. Raises DataError."""
        ...

    def seen_size(self, image: ImageRef) -> tuple[int, int] | None:
        """Returns width and height as the model gets it, where it has its own proportions then."""
        ...


@dataclass(frozen=True)
class Images:
    """The images of a run's rows, for one model."""

    reads: Reads
    """How many tokens stand for an image."""
    folder: Path | None = None
    """Where images that are no files are kept, by their hashes (absolute); None: they are counted only."""
    per_prompt: int | None = None
    """So many in a row at most; None: any number."""
    unseen: str = ""
    """Which model beside this one reads the rows and does not see their images, and what to do; "": none."""
    _fetched: dict[str, bytes] = field(default_factory=dict)
    """By URL, where nothing is kept."""
    _used: dict[str, str] = field(default_factory=dict)
    """The hash that each file, or what is at a URL, had when this run, before a resume perhaps, first used
    it."""

    def __post_init__(self) -> None:
        if self.folder is not None and (self.folder / _USED).exists():
            lines = (self.folder / _USED).read_text().splitlines()
            pairs = [line.split("\t", 1) for line in lines if "\t" in line]
            self._used.update({path: digest for digest, path in pairs})

    def of_row(self, conversation: Conversation, column: Any) -> Conversation:
        """Gives each MARK its image. column: the row's images, as the data has them; None: it has none.

        Where no text has a MARK, the images of the column stand before the first text of the user. Raises
        DataError where there are more of one than of the other.
        """
        found = conversation.images
        if column is None:
            if all(image.value is None for image in found):
                return conversation._replace(images=())  # MARK is text
            column = []
        rest = list(column) if isinstance(column, list) else [column]
        if rest and not found:
            return self._checked(_in_front(conversation, rest))
        marks = sum(image.value is None for image in found)
        if marks != len(rest):
            raise DataError(
                f"its text has {marks} places for images ({MARK}, or a part that says of none which it is), "
                f"and its column {len(rest)} images; give each image its place, or none"
            )
        values = iter(rest)
        images = tuple(
            image if image.value is not None else image._replace(value=next(values)) for image in found
        )
        return self._checked(conversation._replace(images=images))

    def _checked(self, conversation: Conversation) -> Conversation:
        number = len(conversation.images)
        if number and self.unseen:
            raise DataError(f"it has images, and {self.unseen}")
        if self.per_prompt is not None and number > self.per_prompt:
            raise DataError(
                f"it has {number} images, more than model.images.per_prompt={self.per_prompt}; raise the "
                "limit, or take the row out"
            )
        return conversation

    def expanded(
        self, arrays: Sequence[np.ndarray], images: Sequence[ImagePart], folder: ImageFolder
    ) -> list[np.ndarray]:
        """Returns token ids [T], and arrays beside them, in which each image's one placeholder is all of its
        tokens (`with_images`). Raises DataError.
        """
        of_images = []
        for number, image in enumerate(images):
            name, where = self._place(image.value, number, folder)
            with _opened(where, name) as file:
                grid, _ = self.reads.measured(file, name, alone=len(images) == 1)
            of_images.append(self.reads.ids(grid))
        return with_images(arrays, of_images, self.reads.token)

    def references(
        self,
        images: Sequence[ImagePart],
        folder: ImageFolder,
        *,
        alone: bool | None = None,
        whole: bool = False,
    ) -> tuple[ImageRef, ...]:
        """Returns what rows hold of images: they are read and hashed here, and kept where they are no files.
        alone: see `Reads.measured`; None: where there is one. whole: what is kept was decoded before. Raises
        DataError, StorageError.
        """
        alone = len(images) == 1 if alone is None else alone
        found = []
        for number, image in enumerate(images):
            name, where = self._place(image.value, number, folder)
            content = where
            if isinstance(where, Path):
                with _opened(where, name) as file:
                    content = file.read()
            assert isinstance(content, bytes)
            grid, tokens = self.reads.measured(io.BytesIO(content), name, alone=alone)
            digest = hashlib.sha256(content).hexdigest()
            if isinstance(where, Path) and where.parent != self.folder:
                self._check_unchanged(where, digest)
            if whole and not (self.folder is not None and (self.folder / digest).exists()):
                self.reads.check(content, name)
            path = where if isinstance(where, Path) else self._kept(content, digest)
            found.append(ImageRef(f"path:{path}", digest, grid, tokens, image.place))
        return tuple(found)

    def of_picture(self, picture: Any) -> ImageRef:
        """Keeps what an episode shows: [H, W, 3] uint8 or a Pillow image, as a PNG, or a file's bytes. Raises
        DataError, ConfigError, StorageError.
        """
        if isinstance(picture, bytes):
            if len(picture) > MOST_BYTES:
                raise DataError(f"an image of {len(picture)} bytes, more than {MOST_BYTES}; make it smaller")
        else:
            picture = _as_pillow(picture)
            pixels = picture.width * picture.height
            if pixels > MOST_PIXELS:
                raise DataError(f"a picture of {pixels} pixels, more than {MOST_PIXELS}; draw it smaller")
        # Never as a row's only one: later prompts of the episode may show it beside others. A file is a
        # stranger's, and who sent it is to hear what is wrong with it: the engine would lose the episode.
        whole = isinstance(picture, bytes)
        (kept,) = self.references([ImagePart(0, picture)], ImageFolder.anywhere(), alone=False, whole=whole)
        return kept

    def _check_unchanged(self, path: Path | str, digest: str) -> None:
        known = self._used.get(str(path))
        if known not in (None, digest):
            raise DataError(
                f"image {path} is not the file that it was when this run first used it; put that one back, "
                "or begin another run (trainer.run_dir)"
            )
        if known is None and self.folder is not None:
            make_folder(self.folder)
            with (self.folder / _USED).open("a") as file:
                file.write(f"{digest}\t{path}\n")
        self._used[str(path)] = digest

    def _at_url(self, url: str) -> Path | bytes:
        """Returns what is at a URL, which is fetched once in a run, its resumes included. Raises
        StorageError.
        """
        known = self._used.get(url)
        if known is not None and self.folder is not None and (self.folder / known).exists():
            return self.folder / known
        if url not in self._fetched:
            content = fetched(url, MOST_BYTES, _SECONDS)
            if self.folder is not None:
                digest = hashlib.sha256(content).hexdigest()
                self._check_unchanged(url, digest)
                return self._kept(content, digest)
            self._fetched[url] = content
        return self._fetched[url]

    def _kept(self, content: bytes, digest: str) -> Path:
        if self.folder is None:
            return Path(digest)
        path = self.folder / digest
        if not path.exists():
            make_folder(path.parent)
            # By a name of its own: episodes that see the same keep it at the same time.
            own = path.with_name(f"{digest}.{secrets.token_hex(4)}")
            write_atomic(own, content)
            os.replace(own, path)
        return path

    def _place(self, value: Any, number: int, folder: ImageFolder) -> tuple[str, Path | bytes]:
        """Returns what messages call an image, and its file or content."""
        name = f"image {number}"
        if isinstance(value, Mapping):
            said = {key: one for key, one in value.items() if one is not None}
            odd = said.keys() - {"bytes", "path", "url", "image"}
            if odd or not said:
                raise DataError(
                    f"{name} must be a path, a URL or {{bytes, path}}, got {{{', '.join(map(str, value))}}}"
                )
            value = said["bytes"] if "bytes" in said else next(iter(said.values()))
            if "bytes" in said and isinstance(value, str):
                return name, of_base64(value, name)
        if isinstance(value, bytes):
            return name, value
        if type(value).__module__.startswith("PIL."):
            return name, _as_png(value)
        if not isinstance(value, str) or not value:
            raise DataError(f"{name} must be a path, a URL or bytes, got {value!r:.60}")
        if value.startswith("data:"):
            return name, of_data_url(value, name)
        if is_url(value) and not value.startswith("file://"):
            return value, self._at_url(value)
        return value, file_of(value.removeprefix("file://"), folder)


def episode_images(reads: Reads, folder: Path | None, per_prompt: int | None) -> EpisodeImages:
    """Returns how episodes show images that are kept in `folder`."""
    keep = Images(reads, folder).of_picture
    return EpisodeImages(reads.token, reads.ids, keep, reads.decoded, reads.seen_size, per_prompt)


def uncut(tokens: int, most: int) -> str:
    """Says that a row with images cannot be cut."""
    return (
        f"it has images and {tokens} tokens, more than {most}, and a row with images is not cut: raise "
        "data.max_prompt_tokens, lower model.images.max_pixels, or set data.overlong_prompts=drop"
    )


class ImageFolder(NamedTuple):
    """Where images that are named by a path may be."""

    base: Path | None
    """Where relative paths begin; None: nothing says it."""
    takes_absolute: bool
    """Whether absolute paths are taken."""
    is_closed: bool = True
    """Whether a path, or a link, that leads out of `base` is an error."""

    @classmethod
    def of(cls, config: SourceConfig) -> ImageFolder:
        """Returns that of a source: image_dir, or the folder of its file."""
        if config.image_dir is not None:
            return cls(Path(config.image_dir).expanduser(), takes_absolute=True)
        base = None
        if isinstance(config, FileSourceConfig):
            first = config.path if isinstance(config.path, str) else config.path[0]
            path = Path(first).expanduser()
            base = None if is_url(first) else path if path.is_dir() else path.parent
        return cls(base, takes_absolute=False)

    @classmethod
    def anywhere(cls) -> ImageFolder:
        """Returns that of a program's own images: it names its files itself."""
        return cls(Path.cwd(), takes_absolute=True, is_closed=False)


def file_of(path: str, folder: ImageFolder) -> Path:
    """Returns the file that a row names. Raises DataError for one outside of the folder, by its path or by a
    link.
    """
    base = folder.base
    if base is None or (Path(path).is_absolute() and not folder.takes_absolute):
        raise DataError(
            f"image {path}: say which folder a source's images may come from: image_dir of the source"
        )
    found = base / path
    if folder.is_closed and not found.resolve().is_relative_to(base.resolve()):
        raise DataError(
            f"image {path} leads out of {base}; set image_dir of the source to a folder that holds all its "
            "images"
        )
    return found.absolute()


def _in_front(conversation: Conversation, images: Sequence[Any]) -> Conversation:
    """Puts images before the first text of the user."""
    messages = list(conversation.messages)
    place = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if place is None:
        raise DataError(f"it has {len(images)} images, and no message of the user that they could stand in")
    messages[place] = {**messages[place], "content": MARK * len(images) + messages[place]["content"]}
    shown = tuple(ImagePart(place, value) for value in images)
    return conversation._replace(messages=tuple(messages), images=shown)


def _opened(where: Path | bytes, name: str) -> IO[bytes]:
    if isinstance(where, bytes):
        return io.BytesIO(where)
    try:
        size = where.stat().st_size
        if size > MOST_BYTES:
            raise DataError(f"image {name} has {size} bytes, more than {MOST_BYTES}; make it smaller")
        return where.open("rb")
    except OSError as error:
        raise DataError(f"image {where} cannot be read: {error.strerror or error}") from error


def _as_pillow(picture: Any) -> Any:
    if type(picture).__module__.startswith("PIL."):
        return picture
    if not isinstance(picture, np.ndarray):
        raise DataError(
            f"a picture is a Pillow image, an array [H, W, 3] of uint8 or a file's bytes, got {picture!r:.60}"
        )
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
        raise DataError(
            f"an array that is a picture is [H, W, 3] of uint8, got {list(picture.shape)} of {picture.dtype}"
        )
    from PIL import Image

    return Image.fromarray(picture)


def _as_png(image: Any) -> bytes:
    """Returns the file of an image that a function made; nothing of it is lost."""
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        raise ConfigError(f"a function made an image of mode {image.mode}; make it RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
