"""Images of rows, for people: read again from where the row says that they are, made small, and drawn.

A run's folder may come from anybody, and its rows may name any file: one is looked at only where it has the
row's own hash, below limits of size, and as an image of a few kinds. What is shown is a new PNG of its
pixels.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rondo.core.errors import DataError
from rondo.system.streams import clean_text

if TYPE_CHECKING:
    import numpy as np

    from rondo.core.images import ImageRef

Protocol = Literal["kitty", "iterm2"]
SIDE = 320
"""Pixels along the longer side of what is shown, at most."""
_KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_CHUNK = 4096  # characters that kitty takes in one sequence


@dataclass(frozen=True)
class Picture:
    """An image of a row, as people are shown it."""

    path: str
    """Its file."""
    tokens: int
    """How many tokens stand for it."""
    turn: int
    """The message that it is in, from 0."""
    png: bytes = field(default=b"", repr=False)
    """It, SIDE pixels at most; empty: it was not looked at, or cannot be."""
    missing: str = ""
    """Why it cannot be shown."""

    def line(self, number: int) -> str:
        """Returns one line of text. number: which of its row's images it is, from 1."""
        why = f" · not shown: {self.missing}" if self.missing else ""
        text = f"image {number} · {self.tokens} tokens · message {self.turn} · {self.path}{why}"
        return clean_text(text).replace("\n", "\\n")

    def html(self, number: int) -> str:
        """Returns that line, and the image where there is one, as HTML."""
        line = html.escape(self.line(number))
        if not self.png:
            return f"<div><small>{line}</small></div>"
        data = base64.b64encode(self.png).decode()
        image = f'<img src="data:image/png;base64,{data}" alt="image {number}">'
        return f"<figure>{image}<figcaption><small>{line}</small></figcaption></figure>"


def named(images: Sequence[ImageRef]) -> tuple[Picture, ...]:
    """Returns what is said of images of which no file is looked at."""
    return tuple(Picture(image.path, image.n_tokens, image.turn) for image in images)


def looked_at(images: Sequence[ImageRef]) -> tuple[Picture, ...]:
    """Returns images with their pixels, or why there are none. Reads their files."""
    made = []
    for image, picture in zip(images, named(images), strict=True):
        try:
            made.append(Picture(picture.path, picture.tokens, picture.turn, _png(_content(image))))
        except DataError as error:
            made.append(Picture(picture.path, picture.tokens, picture.turn, missing=str(error)))
    return tuple(made)


def _content(image: ImageRef) -> bytes:
    """Returns the bytes of an image's file. Raises DataError where it is not the one of the row."""
    from rondo.core.images import MOST_BYTES  # with numpy; the console is there before it

    path = Path(image.path)
    if not image.ref.startswith("path:") or not path.is_absolute():
        raise DataError("its row names no file")
    try:
        found = path.stat()
        # A pipe would wait for its writer, and a device may have no end.
        is_file = stat.S_ISREG(found.st_mode)
        content = b""
        if is_file and found.st_size <= MOST_BYTES:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"it cannot be read ({why})") from error
    if not is_file:
        raise DataError("there is no file of that name")
    if found.st_size > MOST_BYTES:
        raise DataError(f"it has more than {MOST_BYTES} bytes")
    if hashlib.sha256(content).hexdigest() != image.sha256:
        raise DataError("the file is not the one that it was")
    return content


def _png(content: bytes) -> bytes:
    """Makes an image small, or a small one larger by a whole number. Raises DataError where it is no image
    that is shown.
    """
    from rondo.core.images import MOST_PIXELS  # likewise

    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError('needs Pillow: pip install "rondo-rl[images]"') from error
    try:
        opened = Image.open(io.BytesIO(content), formats=_KINDS)
        is_small = opened.width * opened.height <= MOST_PIXELS
        if is_small:
            opened.draft("RGB", (2 * SIDE, 2 * SIDE))  # of a JPEG, no more than that is decoded
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"it is no image of {', '.join(_KINDS)} that can be read") from error
    if not is_small:
        raise DataError(f"it has more than {MOST_PIXELS} pixels")
    if times := SIDE // max(image.size):
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    else:
        image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def pixels(picture: Picture) -> np.ndarray:
    """Returns a picture that has a PNG as trackers take it: uint8 [rows, columns, 3]."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(picture.png)).convert("RGB"))


def protocol_of(environ: Mapping[str, str]) -> Protocol | None:
    """Returns how the terminal of this environment is sent images; None: it does not say that it draws any.
    Multiplexers hand the variables of their terminal on, and no images.
    """
    term, program = environ.get("TERM", ""), environ.get("TERM_PROGRAM", "")
    if "TMUX" in environ or "STY" in environ or term.startswith(("screen", "tmux")):
        return None
    if "KITTY_WINDOW_ID" in environ or term in ("xterm-kitty", "xterm-ghostty") or program == "ghostty":
        return "kitty"
    if program in ("iTerm.app", "WezTerm") or environ.get("LC_TERMINAL") == "iTerm2":
        return "iterm2"
    return None


def drawing(png: bytes, protocol: Protocol) -> str:
    """Returns the escape sequences that draw an image where the cursor is: the image's bytes are in them, and
    no name of a file.
    """
    text = base64.b64encode(png).decode()
    if protocol == "iterm2":
        return f"\x1b]1337;File=inline=1;size={len(png)};preserveAspectRatio=1:{text}\x07"
    return "".join(_chunks(text))


def _chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), _CHUNK):
        # a=T: draw, f=100: a PNG, q=2: answer nothing, which would come as if it had been typed
        first = "a=T,f=100,q=2," if start == 0 else ""
        more = int(start + _CHUNK < len(text))
        yield f"\x1b_G{first}m={more};{text[start : start + _CHUNK]}\x1b\\"
