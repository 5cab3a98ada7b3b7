"""The tools `zoom` and `draw`: what an agent does with images that it was shown."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from rondo.core.errors import ConfigError, ToolError
from rondo.core.images import ShownImage, ShownImages
from rondo.core.types import ToolResult

Coordinates = Literal["thousandths", "pixels"]
Point = Annotated[list[float], Field(min_length=2, max_length=2)]
Box = Annotated[list[float], Field(min_length=4, max_length=4)]
_ARE = {
    "thousandths": "from 0 to 1000, of its width and height",
    "pixels": "in pixels, of the image as you are shown it",
}


def _whole(image: ShownImage, coordinates: Coordinates) -> tuple[float, float]:
    """Returns what the right and the lower edge are in the policy's coordinates."""
    if coordinates == "thousandths":
        return 1000.0, 1000.0
    size = image.seen_size
    if size is None:
        raise ConfigError(
            "coordinates: pixels: models of this family are not shown an image in its own proportions; set "
            "coordinates: thousandths"
        )
    return float(size[0]), float(size[1])


def _in_file(numbers: list[float], whole: tuple[float, float], size: tuple[int, int]) -> list[float]:
    """Returns x and y, one after the other, in pixels of the image's file, within it. Raises ToolError."""
    if not all(map(math.isfinite, numbers)):
        raise ToolError(f"coordinates are numbers, got {numbers}")
    return [
        min(max(number / whole[place % 2], 0.0), 1.0) * size[place % 2]
        for place, number in enumerate(numbers)
    ]


class Zoom:
    """Shows a part of an image, enlarged."""

    tool_name = "zoom"

    def __init__(self, *, coordinates: Coordinates = "thousandths", enlarge: float = 4.0) -> None:
        """coordinates: of the policy's boxes. enlarge: so many times at most along a side, and never above
        the width and height of the whole image; 1: the part is shown as it is.
        """
        self._coordinates: Coordinates = coordinates
        if not 1 <= enlarge < math.inf:
            raise ConfigError(f"rollout.tools: zoom: enlarge must be at least 1, got {enlarge}")
        self._enlarge = enlarge

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError for wrong options."""
        cls(**options)

    @classmethod
    def described(cls, *, coordinates: Coordinates = "thousandths", enlarge: float = 4.0) -> str:
        """Returns what the policy is told."""
        done = "Shows a part of an image, enlarged." if enlarge > 1 else "Shows a part of an image."
        box = f"left, top, right and bottom, {_ARE[coordinates]}"
        return f"{done}\n\nimage: its number, from 1\nbox: {box}"

    def __call__(self, image: int, box: Box, images: ShownImages) -> ToolResult:
        shown = images.numbered(image)
        whole, pixels = _whole(shown, self._coordinates), shown.open()
        left, top, right, bottom = _in_file(box, whole, pixels.size)
        part = math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)
        width, height = part[2] - part[0], part[3] - part[1]
        if left >= right or top >= bottom:
            raise ToolError(f"the box {box} has nothing of image {image} in it: left, top, right, bottom")
        times = min(self._enlarge, max(1.0, min(pixels.width / width, pixels.height / height)))
        cut = pixels.crop(part)
        if times > 1:
            cut = cut.resize((round(width * times), round(height * times)))
        in_file = f"{part[0]}, {part[1]}, {part[2]}, {part[3]} of {pixels.width} x {pixels.height}"
        edges = zip(part, pixels.size * 2, whole * 2, strict=True)
        seen = [place / size * edge for place, size, edge in edges]
        text = f"of image {image}: {', '.join(f'{one:.0f}' for one in seen)} (pixels of its file: {in_file})"
        data = {"image": image, "box": list(part), "size": list(pixels.size), "shown_box": seen}
        return ToolResult(text, data, images=[images.keep(cut)])


class Draw:
    """Draws on an image, and shows it."""

    tool_name = "draw"

    def __init__(self, *, coordinates: Coordinates = "thousandths", colour: str = "red") -> None:
        """coordinates: of the policy's places. colour: of what is drawn, as Pillow calls it."""
        self._coordinates = coordinates
        self._colour = colour

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError for a colour that is none."""
        from PIL import ImageColor

        tool = cls(**options)
        try:
            ImageColor.getrgb(tool._colour)
        except ValueError as error:
            raise ConfigError(f"rollout.tools: draw: colour: {error}") from error

    @classmethod
    def described(cls, *, coordinates: Coordinates = "thousandths", colour: str = "red") -> str:
        """Returns what the policy is told."""
        return (
            f"Draws on an image, and shows it. Places are {_ARE[coordinates]}.\n\nimage: its number, from 1\n"
            "boxes: left, top, right and bottom of each\nlines: x and y of both ends of each\n"
            "points: x and y of each"
        )

    def __call__(
        self,
        image: int,
        images: ShownImages,
        boxes: list[Box] = [],
        lines: list[Box] = [],
        points: list[Point] = [],
    ) -> ToolResult:
        from PIL import ImageDraw

        shown = images.numbered(image)
        whole, pixels = _whole(shown, self._coordinates), shown.open()
        drawn, broad = ImageDraw.Draw(pixels), max(1, round(max(pixels.size) / 200))
        if not boxes and not lines and not points:
            raise ToolError("there is nothing to draw: give boxes, lines or points")
        done: dict[str, list[list[float]]] = {"boxes": [], "lines": [], "points": []}
        for box in boxes:
            left, top, right, bottom = _in_file(box, whole, pixels.size)
            if left > right or top > bottom:
                raise ToolError(f"the box {box} is left, top, right, bottom")
            drawn.rectangle((left, top, right, bottom), outline=self._colour, width=broad)
            done["boxes"].append([left, top, right, bottom])
        for line in lines:
            ends = _in_file(line, whole, pixels.size)
            drawn.line(ends, fill=self._colour, width=broad)
            done["lines"].append(ends)
        for point in points:
            x, y = _in_file(point, whole, pixels.size)
            drawn.ellipse((x - 2 * broad, y - 2 * broad, x + 2 * broad, y + 2 * broad), fill=self._colour)
            done["points"].append([x, y])
        number = len(boxes) + len(lines) + len(points)
        data = {"image": image, "size": list(pixels.size), **done}
        return ToolResult(f"image {image} with what was drawn ({number})", data, images=[images.keep(pixels)])
