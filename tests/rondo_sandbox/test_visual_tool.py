"""The tool `visual_python` in this machine's sandboxes: images go in, and those that are saved come out."""

from __future__ import annotations

import asyncio
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image

from rondo.agents.tools import Tool, Toolbox, load_tools
from rondo.config.schema import ToolConfig
from rondo.core.errors import ConfigError
from rondo.core.images import EpisodeImages, ImageRef, Pictures
from rondo.recipes import visual
from tests.agents.conftest import reader as reader
from tests.agents.conftest import shows as shows
from tests.rondo_sandbox.test_runs import opened_to_all

TOKENIZER = visual.tokenizer()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pillow, as `pip install --target` puts it, where all users may go."""
    folder = Path(tempfile.mkdtemp(prefix="rondo-packages-"))
    folder.chmod(0o755)
    installed = Path(PIL.__file__).parents[1]
    for name in ("PIL", "pillow.libs"):
        if (installed / name).is_dir():
            shutil.copytree(installed / name, folder / name)
    return str(folder)


def tool(backend: str, packages: str, **options: Any) -> Tool:
    given = {"backend": backend, "packages": [packages], **options}
    (loaded,) = load_tools([ToolConfig("visual_python", max_tokens=4000, options=given)])
    return loaded


def said(shows: EpisodeImages, tool: Tool, *programs: str) -> tuple[list[str], Toolbox]:
    """What programs of an episode come to that has shown a turned picture: 32 x 16 as it is seen."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # on its side
    Image.fromarray(np.full((32, 16, 3), 9, np.uint8)).save(file, "JPEG", exif=exif)
    shown: dict[str, ImageRef] = {}
    pictures = Pictures(shown, shows)
    pictures.show(shows.keep(file.getvalue()))

    async def main() -> tuple[list[str], Toolbox]:
        box = Toolbox([tool], TOKENIZER, pictures)
        texts = [await box.call("visual_python", {"code": program}) for program in programs]
        await box.close()
        assert box.failure == ""
        return texts, box

    return asyncio.run(main())


def test_images_go_in_and_come_out(shows: EpisodeImages, backend: str, packages: str) -> None:
    """As they are seen, in a folder that stays; only what is new is shown, also in another call."""
    loaded = tool(backend, packages)
    assert loaded.check is not None
    loaded.check()
    texts, box = said(
        shows,
        loaded,
        "from PIL import Image\nseen = Image.open('image_1.png')\nprint(seen.size, seen.mode)",
        "seen.rotate(90, expand=True).save('turned.png')\n1 + 1",
        "import os\nsorted(os.listdir('.'))",
        "seen.save('turned.png'); seen.save('b.bmp')",
    )
    assert texts[0] == "(32, 16) RGB\n"
    turned, same = box.results[1].images[0], box.results[3].images
    assert shows.decoded(turned).size == (16, 32)
    assert texts[1] == f"Image 2: <image:{turned.sha256[:16]}>\n2\n"
    assert (
        texts[2] == "['image_1.png', 'image_2.png', 'turned.png']\n"
    )  # those of calls lie there by number, too
    assert [shows.decoded(one).size for one in same] == [(32, 16)] * 2
    assert texts[3].startswith("Image 3: ")
    assert texts[3].endswith(f"\nImage 4: <image:{same[1].sha256[:16]}>")


def test_what_is_no_image_is_said_to_the_policy(shows: EpisodeImages, backend: str, packages: str) -> None:
    """It wrote them: none is a failure of the tool."""
    texts, box = said(
        shows,
        tool(backend, packages),
        "open('none.png', 'w').write('x'); open('big.png', 'wb').write(bytes(5 << 20))",
        "from PIL import Image\nImage.new('RGB', (900, 2)).save('thin.png')",
        "for n in range(9): Image.new('RGB', (8, 8), (n, n, n)).save(f'{n}.png')",
        "import json; json.dumps = lambda found: '[7]'",
        "open('e.png', 'w').write('x'); import os; os._exit(0)",
        "import os; sorted(os.listdir('.'))",
    )
    first = texts[0].splitlines()
    assert first[0] == "5242880"
    assert first[1] == "Error: big.png is not shown: images of more than 4194304 bytes"
    assert first[2].startswith("Error: none.png is not shown: image 0 is no image that can be read")
    assert texts[1].startswith("Error: thin.png is not shown: an image of 900 x 2 pixels")
    assert texts[2].endswith("\nError: 8.png is not shown: 8 images are, after one call")
    assert [len(result.images) for result in box.results] == [0, 0, 8, 0, 0, 0]
    assert texts[3] == "Error: the images in the folder cannot be read"
    assert "Error: it ended its own process; variables are gone" in texts[4]
    assert "'image_1.png', 'image_2.png'" in texts[5]  # a new folder has them all again
    assert "thin.png" not in texts[5]


def test_calls_of_one_answer_share_a_session_in_their_order(
    shows: EpisodeImages, backend: str, packages: str
) -> None:
    """The first ones, too, which open it; and each is shown what it saved, not what another did."""

    async def main() -> Toolbox:
        box = Toolbox([tool(backend, packages)], TOKENIZER, Pictures({}, shows))
        draw = "from PIL import Image\nn = globals().get('n', 0) + 1\n"
        draw += "Image.new('RGB', (8 * n, 8)).save(f'{n}.png'); n"
        try:
            await asyncio.gather(*(box.call("visual_python", {"code": draw}) for _ in range(3)))
        finally:
            await box.close()
        return box

    results = asyncio.run(main()).results
    assert [result.text for result in results] == ["1\n", "2\n", "3\n"]
    shown = [[shows.decoded(image).width for image in result.images] for result in results]
    assert shown == [[8], [16], [24]]


def test_a_call_that_waits_for_another_has_all_of_its_time(backend: str) -> None:
    """Else a policy had its episode end as a failure of the tool, in no baseline: by calls without an end."""

    async def main() -> list[str]:
        options = {"backend": backend, "seconds": 1.0}
        box = Toolbox(load_tools([ToolConfig("python", timeout_seconds=2.5, options=options)]), TOKENIZER)
        try:
            calls = [box.call("python", {"code": "while True: pass"}) for _ in range(3)]
            return await asyncio.gather(*calls)
        finally:
            await box.close()

    for text in asyncio.run(main()):
        assert text.endswith("Error: it took longer than 1 s and was ended")


def test_what_it_lacks_is_said_before_the_run(backend: str, tmp_path: Path, packages: str) -> None:
    opened_to_all(tmp_path)
    loaded = tool(backend, str(tmp_path))
    assert loaded.check is not None
    with pytest.raises(ConfigError, match=r"`import PIL\.Image` fails: ModuleNotFo"):
        loaded.check()
    far = tool("http://127.0.0.1:1", packages)
    assert far.check is not None
    with pytest.raises(ConfigError, match="keeps no files between calls"):
        far.check()
