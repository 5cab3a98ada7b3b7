"""The tool `visual_python`: programs read the images that the policy was shown, and show what they save.
Apart from `tool.py`, which needs no numpy.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from functools import cached_property
from typing import Any

from rondo.core.errors import ConfigError, DataError, ToolError
from rondo.core.images import ImageRef, ShownImage, ShownImages, of_base64
from rondo.core.types import ToolResult
from rondo_sandbox import Result, check_sandbox
from rondo_sandbox.tool import InSandbox

_MOST_BYTES = 4 << 20  # of the images that come out of a sandbox after one call
_MOST_IMAGES = 8
_DRAWS = "import PIL.Image"
# Run as cells of their own, in a namespace of their own: image files go in, and those that are new come out.
_PUT = "import base64\nopen(name, 'wb').write(base64.b64decode(content))"
_FIND = """\
import base64, hashlib, json, os
found, room = {}, most
for name in sorted(os.listdir(".")):
    if name.lower().endswith((".png", ".jpg", ".jpeg", ".webp", ".bmp")) and os.path.isfile(name):
        with open(name, "rb") as file:
            content = file.read(most + 1)
        digest = hashlib.sha256(content).hexdigest()
        if known.get(name) != digest:
            fits = len(content) <= room
            room -= len(content) if fits else 0
            found[name] = [digest, base64.b64encode(content).decode() if fits else None]
print(json.dumps(found))
"""


class VisualPython(InSandbox):
    """Runs Python and returns what it prints, and the value of a last line. Variables stay from call to call.
    Images that you were shown lie in the current folder: image_1.png, image_2.png, … Save an image there, and
    it is shown to you. Pillow can be imported.

    code: the program
    """

    tool_name = "visual_python"
    _output_bytes = 2 * _MOST_BYTES  # base64 is a third more

    @cached_property
    def _known(self) -> dict[str, str]:
        """By name, the hashes of the files that went in, or came out."""
        return {}

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises as `Python.check`, and ConfigError where programs find no Pillow, or have no files that stay
        from call to call.
        """
        tool = cls(**options)
        if "://" in tool._backend:
            raise ConfigError(
                f"backend: {tool._backend}: another machine's sandbox keeps no files between calls; leave "
                "backend out, or use the tool python"
            )
        check_sandbox(tool._backend, tool._limits.memory_mb, tool._packages, _DRAWS)

    async def __call__(self, code: str, images: ShownImages) -> ToolResult:
        for image in images:
            await self._put(f"image_{image.number}.png", image)
        result = await self._ran(code)
        if result.status == "lost":
            return ToolResult(self._said(result))
        shown, notes = await self._found(images)
        text = self._said(result)
        if notes:
            text = "\n".join(filter(None, [text.rstrip(), *notes]))
        return ToolResult(text, images=shown)

    async def _ran(self, code: str) -> Result:
        result = await super()._ran(code)
        if result.status == "lost":  # with its files
            self._known.clear()
        return result

    async def _put(self, name: str, image: ShownImage) -> None:
        """Has an image lie in the folder, with all of its pixels. Raises ToolError where it does not fit."""
        if name in self._known:
            return
        file = io.BytesIO()
        await asyncio.to_thread(lambda: image.open().save(file, "PNG"))
        content = base64.b64encode(file.getvalue()).decode()
        result = await self._ran(_in_cell(_PUT, name=name, content=content))
        if result.status != "finished":
            raise ToolError(f"{name} cannot be put into the folder: {self._said(result)}")
        self._known[name] = hashlib.sha256(file.getvalue()).hexdigest()

    async def _found(self, images: ShownImages) -> tuple[list[ImageRef], list[str]]:
        """Returns the images that are new in the folder, and what is to be said of those that cannot be
        shown. What comes out of there is the program's.
        """
        result = await self._ran(_in_cell(_FIND, known=self._known, most=_MOST_BYTES))
        try:
            found = {
                str(name): (str(digest), content)
                for name, (digest, content) in json.loads(result.stdout).items()
            }
        except (ValueError, TypeError, AttributeError):
            return [], ["Error: the images in the folder cannot be read"]
        shown, notes = list[ImageRef](), list[str]()
        for name, (digest, content) in found.items():
            self._known[name] = digest
            if content is None:
                notes.append(f"Error: {name} is not shown: images of more than {_MOST_BYTES} bytes")
            elif len(shown) == _MOST_IMAGES:
                notes.append(f"Error: {name} is not shown: {_MOST_IMAGES} images are, after one call")
            else:
                try:
                    shown.append(await asyncio.to_thread(images.keep, of_base64(str(content), name)))
                except (DataError, ToolError) as error:
                    notes.append(f"Error: {name} is not shown: {error}")
        return shown, notes


def _in_cell(program: str, **names: Any) -> str:
    """Returns a cell that runs a program without touching the variables of others."""
    return f"exec({program!r}, {names!r})"
