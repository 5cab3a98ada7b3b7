"""Images of rows as people see them: what is read, what is refused, and what a terminal and a page get."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.cli.main import main
from rondo.core.errors import DataError
from rondo.core.images import MOST_BYTES, ImageRef
from rondo.tracking.pictures import SIDE, drawing, looked_at, named, pixels, protocol_of
from rondo.tracking.trajectories import Trajectories, read_trajectories, written
from rondo.trainers.loop.evaluation import read_evaluation, write_evaluation
from rondo.workers.rollout import EvaluationRecord
from tests.messages import full_text
from tests.trainers.conftest import inline

Image = pytest.importorskip("PIL.Image")
# What Python says of such a path.
NULL = "stat: embedded null" if sys.version_info >= (3, 13) else "embedded null"


def reference(path: Path, **changes: Any) -> ImageRef:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return dataclasses.replace(ImageRef(f"path:{path}", digest, (1, 2, 2), 4), **changes)


def saved(path: Path, width: int = 6, height: int = 4, **options: Any) -> Path:
    colours = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(colours).save(path, **options)
    return path


def png(path: Path) -> bytes:
    (picture,) = looked_at([reference(path)])
    assert picture.missing == ""
    return picture.png


def shape(path: Path) -> tuple[int, ...]:
    return pixels(looked_at([reference(path)])[0]).shape


def test_a_small_image_is_enlarged_by_a_whole_number_and_a_large_one_made_smaller(tmp_path: Path) -> None:
    small = saved(tmp_path / "a.png", 6, 4)
    shown, times = pixels(looked_at([reference(small)])[0]), SIDE // 6
    assert shown.shape == (4 * times, 6 * times, 3)
    own = np.asarray(Image.open(small))
    np.testing.assert_array_equal(shown, own.repeat(times, 0).repeat(times, 1))
    assert shape(saved(tmp_path / "b.png", 2 * SIDE, SIDE)) == (SIDE // 2, SIDE, 3)
    assert shape(saved(tmp_path / "c.jpg", 8 * SIDE, 4 * SIDE)) == (SIDE // 2, SIDE, 3)
    assert shape(saved(tmp_path / "d.png", 400, 2)) == (2, SIDE, 3)
    turned = Image.Exif()
    turned[0x0112] = 6
    assert shape(saved(tmp_path / "e.jpg", 2 * SIDE, SIDE, exif=turned)) == (SIDE, SIDE // 2, 3)


def changed(path: Path) -> ImageRef:
    before = reference(saved(path))
    saved(path, 7)
    return before


def gone(path: Path) -> ImageRef:
    before = reference(saved(path))
    path.unlink()
    return before


def secret(path: Path) -> ImageRef:
    """A row that knows the hash of a file that is no image."""
    path.write_text("root:x:0:0")
    return reference(path)


def pipe(path: Path) -> ImageRef:
    os.mkfifo(path)
    return ImageRef(f"path:{path}", "0" * 64, (1, 2, 2), 4)


def large(path: Path) -> ImageRef:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    return ImageRef(f"path:{path}", "0" * 64, (1, 2, 2), 4)


def bomb(path: Path) -> ImageRef:
    Image.new("1", (12_000, 9_000)).save(path, "PNG")
    return reference(path)


def tiff(path: Path) -> ImageRef:
    return reference(saved(path, format="TIFF"))


def cut(path: Path) -> ImageRef:
    whole = saved(path, 60, 60).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return reference(path)


@pytest.mark.filterwarnings("ignore:Image size")  # Pillow's own limit is lower
@pytest.mark.parametrize(
    ("made", "why"),
    [
        (changed, "the file is not the one that it was"),
        (gone, "it cannot be read (No such file or directory)"),
        (secret, "it is no image of PNG, JPEG, WEBP, GIF, BMP that can be read"),
        (tiff, "it is no image of PNG, JPEG, WEBP, GIF, BMP that can be read"),
        (cut, "it is no image of PNG, JPEG, WEBP, GIF, BMP that can be read"),
        (pipe, "there is no file of that name"),
        (large, f"it has more than {MOST_BYTES} bytes"),
        (bomb, "it has more than 100000000 pixels"),
        (lambda path: ImageRef("path:/dev/zero", "0" * 64, (1, 2, 2), 4), "there is no file of that name"),
        (lambda path: ImageRef("path:a.png", "0" * 64, (1, 2, 2), 4), "its row names no file"),
        (lambda path: ImageRef("http://x/a.png", "0" * 64, (1, 2, 2), 4), "its row names no file"),
        (lambda path: ImageRef("path:/a\0b", "0" * 64, (1, 2, 2), 4), f"it cannot be read ({NULL}"),
    ],
)
def test_what_is_not_the_rows_image_is_said_and_not_shown(
    tmp_path: Path, made: Callable[[Path], ImageRef], why: str
) -> None:
    (picture,) = looked_at([made(tmp_path / "a.png")])
    assert picture.png == b""
    assert picture.missing.startswith(why)
    assert f"not shown: {why}" in picture.line(1)
    assert "<img" not in picture.html(1)


def test_a_path_controls_neither_terminal_nor_page(tmp_path: Path) -> None:
    path = saved(tmp_path / "<b>\x1b]0;x\x07\n\x9b.png", format="PNG")
    (picture,) = looked_at([reference(path)])
    line = picture.line(2)
    assert line == f"image 2 · 4 tokens · message 0 · {tmp_path}/<b>\\x1b]0;x\\x07\\n\\x9b.png"
    assert named([reference(path)])[0].line(2) == line
    assert "&lt;b&gt;\\x1b]0;x\\x07\\n" in picture.html(2)
    assert "<b>" not in picture.html(2)


def test_what_terminals_are_sent_is_the_picture_and_no_name(tmp_path: Path) -> None:
    content = png(saved(tmp_path / "a.png", 200, 160))
    assert len(base64.b64encode(content)) > 3 * 4096
    kitty = drawing(content, "kitty")
    chunks = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", kitty)
    assert "".join(f"\x1b_G{head};{text}\x1b\\" for head, text in chunks) == kitty
    assert all(len(text) <= 4096 for _, text in chunks)
    heads = [head for head, _ in chunks]
    assert heads == ["a=T,f=100,q=2,m=1", *["m=1"] * (len(chunks) - 2), "m=0"]
    assert base64.b64decode("".join(text for _, text in chunks)) == content
    head, _, text = drawing(content, "iterm2").partition(":")
    assert head == f"\x1b]1337;File=inline=1;size={len(content)};preserveAspectRatio=1"
    assert base64.b64decode(text.removesuffix("\x07")) == content


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({}, None),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM_PROGRAM": "Apple_Terminal"}, None),
        ({"KITTY_WINDOW_ID": "1", "TMUX": "/tmp/tmux"}, None),
        ({"KITTY_WINDOW_ID": "1", "TERM": "screen-256color"}, None),
    ],
)
def test_which_terminals_draw(environ: dict[str, str], protocol: str | None) -> None:
    assert protocol_of(environ) == protocol


# ---- `rondo show` and notebooks ----


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def drawn(*arguments: str) -> str:
    with contextlib.redirect_stdout(Terminal()) as out:
        assert main(["show", *arguments]) == 0
    return out.getvalue()


def record(
    images: tuple[ImageRef, ...], prompt: str = "<image> What \x1b[2J?", **more: Any
) -> EvaluationRecord:
    fields: dict[str, Any] = {"finish_reason": "stop", "outcome": "scored", "prompt": prompt, "text": "A <i>"}
    return EvaluationRecord("held/0/7", "held", 0, 1.0, 4, images=images, **{**fields, **more})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an evaluation: two prompts with one picture each, of which the second is gone."""
    images = [reference(saved(tmp_path / "a.png")), gone(tmp_path / "b.png")]
    records = [record((image,), scores={"right": 1.0}) for image in images]
    write_evaluation(tmp_path, 3, [*records, record((), "none")])
    return tmp_path


def test_an_evaluation_keeps_its_answers_beside_their_pictures(run: Path) -> None:
    lines = [
        json.loads(line) for line in (run / "evaluations" / "step-000003.jsonl").read_text().splitlines()
    ]
    assert [line.get("images", [{}])[0].get("ref") for line in lines] == [
        f"path:{run}/a.png", f"path:{run}/b.png", None,
    ]  # fmt: skip
    assert "images" not in lines[2]
    assert read_evaluation(run, 3)["held/0/7"].images == ()
    shown = read_trajectories(run, evaluation=True)
    assert shown[0].images == (reference(run / "a.png"),)
    assert written(shown[0], 60).split("\n") == [
        "── step 3 · held/0/7 · sample 0 · reward 1 · stop · 4 tokens ",
        "  <image> What \\x1b[2J?",
        f"  image 1 · 4 tokens · message 0 · {run}/a.png",
        "",
        "  A <i>",
        "",
    ]


def test_the_command_draws_where_the_terminal_says_that_it_can(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "TERM_PROGRAM", "TMUX", "STY", "KITTY_WINDOW_ID", "LC_TERMINAL"):
        monkeypatch.delenv(name, raising=False)
    command = (str(run), "--evaluation")
    plain = inline("show", *command).stdout
    assert drawn(*command) == plain
    assert (
        "--images inline: standard output"
        in inline("show", *command, "--images", "inline", check=False).stderr
    )
    monkeypatch.setenv("KITTY_WINDOW_ID", "1")
    assert drawn(*command, "--images", "path") == plain
    assert inline("show", *command).stdout == plain  # no terminal
    assert "no terminal" in inline("show", *command, "--images", "inline", check=False).stderr
    picture = f"  {drawing(png(run / 'a.png'), 'kitty')}\n"
    line_a, line_b = (f"  image 1 · 4 tokens · message 0 · {run}/{name}.png" for name in "ab")
    why = " · not shown: it cannot be read (No such file or directory)"
    expected = plain.replace(f"{line_a}\n", f"{line_a}\n{picture}").replace(line_b, line_b + why)
    assert drawn(*command) == drawn(*command, "--images", "inline") == expected
    assert "\x1b[2J" not in expected


def test_a_notebook_shows_pictures_and_no_markup_of_others(run: Path) -> None:
    shown = read_trajectories(run, evaluation=True, number=2)
    assert isinstance(shown, Trajectories)
    page = shown._repr_html_()
    (data,) = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="image 1">', page)
    assert base64.b64decode(data) == png(run / "a.png")
    assert page.count("&lt;image&gt; What \\x1b[2J?") == page.count("A &lt;i&gt;") == 2
    assert page.count("not shown: it cannot be read") == 1
    assert not re.findall(r"<(?!/?(?:div|b|pre|small|figure|figcaption|img|hr)\b)", page)


@pytest.mark.parametrize(
    "images",
    ["{", '[{"ref": 3}]', '[{"ref": "path:/a", "sha256": "", "grid": [1], "n_tokens": "\\u001b"}]', "3"],
)
def test_a_damaged_file_of_answers_is_named(run: Path, images: str) -> None:
    file = run / "evaluations" / "step-000003.jsonl"
    line = json.loads(file.read_text().splitlines()[0]) | {"images": []}
    file.write_text(json.dumps(line).replace('"images": []', f'"images": {images}'))
    with pytest.raises(DataError, match=full_text("evaluations/step-000003.jsonl: damaged")):
        read_trajectories(run, evaluation=True)


def test_which_evaluations_there_are(run: Path) -> None:
    with pytest.raises(DataError, match=full_text("has no evaluations of step 4")):
        read_trajectories(run, step=4, evaluation=True)
    with pytest.raises(DataError, match=full_text("has no evaluations (trainer.evaluation")):
        read_trajectories(run / "nowhere", evaluation=True)
