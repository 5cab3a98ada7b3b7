"""Images of rows: everybody's formats are one row, files stay where they are allowed to be, and what does not
fit is an error at the row.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

import rondo.data.images as images_of_rows
from rondo.config.schema import FileSourceConfig, TaskSourceConfig
from rondo.core.errors import ConfigError, DataError, StorageError
from rondo.core.images import ImageRef, images_of_text
from rondo.core.types import Prompt
from rondo.data import ConversationStream, PairStream, PromptStream
from rondo.data.images import Images
from rondo.data.prompts import eval_prompts
from rondo.models import ModelSource, load_model_config
from rondo.models.pixels import ImageReader
from rondo.recipes import visual
from rondo.system import urls

RECIPE = Path(visual.__file__).with_name("visual_sft.yaml")
MODEL = yaml.safe_load(RECIPE.read_text())["model"]["config"]
PAD, START, END, TURN, TURN_END = 5, 3, 4, 1, 2
BOARD = visual.boards("tests", 1, 0)[0].picture


def png(width: int, height: int, colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def images(tmp_path: Path) -> Images:
    source = ModelSource(config=MODEL, min_pixels=256, max_pixels=4096)
    return Images(ImageReader(source, load_model_config(source)), tmp_path / "run" / "images", 3)


def written(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> FileSourceConfig:
    folder.mkdir(exist_ok=True)
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return FileSourceConfig(type="parquet", path=str(path))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileSourceConfig(type="jsonl", path=str(path))


def prompts(config: Any, images: Images | None, **options: Any) -> list[Prompt]:
    options = {"max_prompt_tokens": 200, **options}
    return eval_prompts((config,), visual.tokenizer(), images=images, **options)


def ids_of(*parts: str | int) -> list[int]:
    """Returns the tokens of a user's message: texts, and so many tokens of images."""
    tokenizer = visual.tokenizer()
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        else:
            ids += [START, *[PAD] * part, END]
    ends = tokenizer("\n", add_special_tokens=False)["input_ids"]
    asked = tokenizer("user\n", add_special_tokens=False)["input_ids"]
    opening = [TURN, *tokenizer("assistant\n", add_special_tokens=False)["input_ids"]]
    return [TURN, *asked, *ids, TURN_END, *ends, *opening]


def parts(*images: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*images, {"type": "text", "text": "Which way?"}]}]


def openai(url: str, detail: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


ASKED = [{"role": "user", "content": "Which way?"}]
TEXT = [{"role": "user", "content": "<image>Which way?"}]
URL = "data:image/png;base64," + base64.b64encode(BOARD).decode()
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "verl": ("rows.parquet", {"prompt": TEXT, "images": [{"bytes": BOARD, "path": None}]}),
    "verl, a path": ("rows.parquet", {"prompt": TEXT, "images": [{"bytes": None, "path": "board.png"}]}),
    "easy-r1": ("rows.jsonl", {"prompt": "<image>Which way?", "images": ["board.png"]}),
    "trl": ("rows.parquet", {"prompt": ASKED, "image": {"bytes": BOARD, "path": None}}),
    "trl, places": ("rows.jsonl", {"prompt": parts({"type": "image"}), "images": ["board.png"]}),
    "a string, no place": ("rows.jsonl", {"prompt": "Which way?", "image": "board.png"}),
    "openai": ("rows.jsonl", {"prompt": parts(openai(URL, "auto"))}),
    "qwen": ("rows.jsonl", {"prompt": parts({"type": "image", "image": "board.png"})}),
    "base64": ("rows.jsonl", {"prompt": TEXT, "images": [{"bytes": base64.b64encode(BOARD).decode()}]}),
    "parquet, bytes": ("rows.parquet", {"prompt": TEXT, "images": [BOARD]}),
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS)
def test_everybodys_rows_are_one_prompt(form: str, tmp_path: Path, images: Images) -> None:
    name, row = ROWS[form]
    (tmp_path / "board.png").write_bytes(BOARD)
    (prompt,) = prompts(written(tmp_path, row | {"answer": "7"}, name=name), images)
    assert prompt.token_ids.tolist() == ids_of(9, "Which way?")
    assert [(one.sha256, one.grid, one.n_tokens, one.turn) for one in prompt.images] == [
        (hashlib.sha256(BOARD).hexdigest(), (1, 6, 6), 9, 0)
    ]
    assert prompt.messages == ({"role": "user", "content": "<image>Which way?"},)
    assert dict(prompt.fields) == {"answer": "7"}
    assert Path(prompt.images[0].ref.removeprefix("path:")).read_bytes() == BOARD


def made(kind: str) -> list[dict[str, Any]]:
    picture = Image.open(io.BytesIO(BOARD))
    return [{"prompt": "Which way?", "image": picture if kind == "pil" else BOARD}]


@pytest.mark.parametrize("kind", ["pil", "bytes"])
def test_a_function_makes_images(kind: str, images: Images) -> None:
    config = TaskSourceConfig(type="function", task="tests.data.test_images:made", options={"kind": kind})
    (prompt,) = prompts(config, images)
    assert prompt.token_ids.tolist() == ids_of(9, "Which way?")
    (reference,) = prompt.images
    pixels = images.reads.pixels(reference)  # type: ignore[attr-defined]
    assert pixels.shape == (36, 3 * 2 * 8 * 8)


def test_a_data_set_of_hugging_face(tmp_path: Path, images: Images) -> None:
    datasets = pytest.importorskip("datasets")
    from rondo.config.schema import HuggingfaceSourceConfig

    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # turned: decoded and saved anew it would lie on its side
    Image.new("RGB", (64, 32)).save(file, "JPEG", exif=exif)
    content = file.getvalue()
    rows = {"prompt": ["<image>Which way?"], "images": [[{"bytes": content, "path": None}]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    (prompt,) = prompts(HuggingfaceSourceConfig(path=str(tmp_path / "set")), images)
    assert prompt.token_ids.tolist() == ids_of(8, "Which way?")
    assert prompt.images[0].sha256 == hashlib.sha256(content).hexdigest()
    assert prompt.images[0].grid == (1, 8, 4)


def test_several_images_of_other_sizes_and_in_later_turns(tmp_path: Path, images: Images) -> None:
    (tmp_path / "wide.png").write_bytes(png(64, 32))
    (tmp_path / "board.png").write_bytes(BOARD)
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "<image> or <image>?"},
        {"role": "assistant", "content": "<image> is said here, not shown"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "and "}, {"type": "image", "path": "board.png"}],
        },
    ]
    row = {"prompt": messages, "images": ["wide.png", "board.png"]}
    (prompt,) = prompts(written(tmp_path, row), images)
    assert [(one.n_tokens, one.turn) for one in prompt.images] == [(8, 1), (9, 1), (9, 3)]
    runs = "".join("#" if one == PAD else "." for one in prompt.token_ids)
    assert [len(run) for run in runs.split(".") if run] == [8, 9, 9]
    assert prompt.messages[3]["content"] == "and <image>"
    text_only = prompts(written(tmp_path, {"prompt": "Which way?"}), images)[0]
    assert text_only.token_ids.tolist() == ids_of("Which way?")
    assert text_only.images == ()


def test_without_a_column_the_mark_is_text(tmp_path: Path, images: Images) -> None:
    row = {"prompt": "What is <image>?"}
    both = [prompts(written(tmp_path, row), one)[0] for one in (images, None)]
    assert both[0].token_ids.tolist() == both[1].token_ids.tolist() == ids_of("What is <image>?")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "<image><image>", "images": ["board.png"]}, "its text has 2 places for images"),
        ({"prompt": "<image>", "images": []}, "and its column 0 images"),
        ({"prompt": "<image>", "images": ["board.png"] * 2}, "and its column 2 images"),
        ({"prompt": "no place", "images": ["board.png"] * 4}, "more than model.images.per_prompt=3"),
        ({"prompt": "<image> <|image_pad|>", "images": ["board.png"]}, "2 places for images"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "sound, films and files"),
        ({"prompt": [{"role": "assistant", "content": [{"type": "image"}]}]}, "must be 'text'"),
        ({"prompt": parts({"type": "image", "url": "a", "path": "b"})}, "says twice which image it is"),
        ({"prompt": parts({"type": "image", "size": 3})}, "size has no meaning in a part"),
        ({"prompt": parts(openai(URL, "low"))}, "is 'low'"),
        ({"prompt": parts(openai("data:text/plain,x", "auto"))}, "is no data:image/"),
        ({"prompt": "a", "image": {"bytes": "??"}}, "is no base64"),
        ({"prompt": "a", "image": {"raw": "??"}}, "must be a path, a URL or {bytes, path}"),
        ({"prompt": "a", "image": 3}, "must be a path, a URL or bytes, got 3"),
        ({"prompt": "a", "image": "board.png", "video": "x.mp4"}, "column 'video' holds"),
        ({"prompt": "a", "image": "none.png"}, "none.png cannot be read: No such file"),
        ({"prompt": "a", "image": "rows.jsonl"}, "is no image that can be read"),
        ({"prompt": "a", "image": "thin.png"}, "201 x 1 pixels"),
        ({"prompt": "a", "image": "half.png"}, "is no image that can be read"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_at_the_row(
    row: dict[str, Any], says: str, tmp_path: Path, images: Images
) -> None:
    (tmp_path / "board.png").write_bytes(BOARD)
    (tmp_path / "thin.png").write_bytes(png(201, 1))
    (tmp_path / "half.png").write_bytes(BOARD[:20])
    with pytest.raises(DataError) as found:
        prompts(written(tmp_path, {"prompt": "first"}, row), images)
    assert "source 'rows' (" in str(found.value)
    assert "line 2" in str(found.value)
    assert says in str(found.value)


@pytest.mark.parametrize("path", ["../secret.png", "link.png", "inner/../../secret.png", "/etc/secret.png"])
def test_no_row_leads_out_of_its_folder(path: str, tmp_path: Path, images: Images) -> None:
    data = tmp_path / "data"
    (data / "inner").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(BOARD)
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    config = written(data, {"prompt": "a", "image": path})
    with pytest.raises(DataError, match="image_dir of the source"):
        prompts(config, images)


def test_image_dir_says_where_images_are(tmp_path: Path, images: Images) -> None:
    data, pictures = tmp_path / "data", tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "board.png").write_bytes(BOARD)
    rows = [{"prompt": "a", "image": path} for path in ("board.png", str(pictures / "board.png"))]
    config = written(data, *rows)
    found = prompts(FileSourceConfig(type="jsonl", path=config.path, image_dir=str(pictures)), images)
    assert [one.images[0].ref for one in found] == [f"path:{pictures / 'board.png'}"] * 2
    config = written(data, {"prompt": "a", "image": str(pictures / "board.png")})
    with pytest.raises(DataError, match="leads out of"):
        prompts(FileSourceConfig(type="jsonl", path=config.path, image_dir=str(data)), images)


def test_image_key_names_the_column(tmp_path: Path, images: Images) -> None:
    (tmp_path / "board.png").write_bytes(BOARD)
    config = written(tmp_path, {"prompt": "a", "picture": "board.png"})
    named = FileSourceConfig(type="jsonl", path=config.path, image_key="picture")
    assert prompts(named, images)[0].token_ids.tolist() == ids_of(9, "a")
    wrong = FileSourceConfig(type="jsonl", path=config.path, image_key="pictures")
    with pytest.raises(DataError, match="did you mean 'picture'"):
        prompts(wrong, images)
    with pytest.raises(ConfigError, match="this one does not; remove them"):
        prompts(named, None)


def test_no_pixel_is_decoded_where_prompts_are_made(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "board.png").write_bytes(BOARD)
    config = written(tmp_path, {"prompt": "a", "image": "board.png"}, {"prompt": "b", "image": URL})

    def decoded(self: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(Image.Image, "load", decoded)
    assert [len(one.images) for one in prompts(config, images)] == [1, 1]


def test_inline_images_are_kept_once_and_files_stay(tmp_path: Path, images: Images) -> None:
    (tmp_path / "board.png").write_bytes(BOARD)
    rows = [
        {"prompt": "a", "image": URL},
        {"prompt": "b", "image": URL},
        {"prompt": "c", "image": "board.png"},
    ]
    found = prompts(written(tmp_path, *rows), images)
    kept = tmp_path / "run" / "images"
    digest = hashlib.sha256(BOARD).hexdigest()
    assert {file.name for file in kept.iterdir()} == {digest, "files.tsv"}
    assert [one.images[0].ref for one in found] == [
        f"path:{kept / digest}", f"path:{kept / digest}", f"path:{tmp_path / 'board.png'}",
    ]  # fmt: skip


def test_long_rows_are_dropped_or_an_error_but_not_cut(tmp_path: Path, images: Images) -> None:
    (tmp_path / "board.png").write_bytes(BOARD)
    config = written(tmp_path, {"prompt": "a", "image": "board.png"}, {"prompt": "b"})
    length = len(ids_of(9, "a"))
    assert len(prompts(config, images, max_prompt_tokens=length)) == 2
    assert [one.fields.get("image") for one in prompts(config, images, max_prompt_tokens=length - 1)] == [
        None
    ]
    for overlong, says in (("error", f"has {length} tokens"), ("truncate_left", "with images is not cut")):
        with pytest.raises(DataError, match=says):
            prompts(config, images, max_prompt_tokens=length - 1, overlong=overlong)


def test_conversations_learn_beside_images(tmp_path: Path, images: Images) -> None:
    (tmp_path / "board.png").write_bytes(BOARD)
    (tmp_path / "wide.png").write_bytes(png(64, 32))
    messages = [
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "right"},
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "left"},
    ]
    rows = [
        {"messages": messages, "images": ["board.png", "wide.png"]},
        {"prompt": "Which way?", "response": "up"},
    ]
    stream = ConversationStream(
        (written(tmp_path, *rows),), visual.tokenizer(), max_prompt_tokens=100, shuffle=False, images=images
    )
    batch = stream.batch([0, 1])
    prompts, responses, masks = (batch.rows(name) for name in ("prompt_ids", "response_ids", "response_mask"))
    assert [int((ids == PAD).sum()) for ids in prompts] == [9, 0]
    assert [int((ids == PAD).sum()) for ids in responses] == [8, 0]
    assert not masks[0][responses[0] == PAD].any()
    words = visual.tokenizer()
    learnt = [words.decode(ids[mask == 1]) for ids, mask in zip(responses, masks, strict=True)]
    assert learnt == ["right<|im_end|>left<|im_end|>", "up<|im_end|>"]
    shown = [images_of_text(text) for text in batch.scalars("images")]
    assert [[(one.n_tokens, one.turn) for one in row] for row in shown] == [[(9, 0), (8, 2)], []]


def test_both_sides_of_a_pair_show_its_images(tmp_path: Path, images: Images) -> None:
    (tmp_path / "board.png").write_bytes(BOARD)
    row = {"prompt": "<image>Which way?", "images": ["board.png"], "chosen": "left", "rejected": "up"}
    stream = PairStream(
        (written(tmp_path, row),), visual.tokenizer(), max_prompt_tokens=100, shuffle=False, images=images
    )
    batch = stream.batch([0])
    assert [ids.tolist() for ids in batch.rows("prompt_ids")] == [ids_of(9, "Which way?")] * 2
    assert [one.n_tokens for text in batch.scalars("images") for one in images_of_text(text)] == [9, 9]


def test_a_file_that_changes_is_an_error_also_after_a_resume(tmp_path: Path, images: Images) -> None:
    (tmp_path / "board.png").write_bytes(png(48, 48))
    config = written(tmp_path, {"prompt": "a", "image": "board.png"})

    def first_image(images: Images) -> ImageRef:
        stream = PromptStream((config,), visual.tokenizer(), max_prompt_tokens=100, images=images)
        return stream.prompt(0).images[0]

    first = first_image(images)
    digest = hashlib.sha256(png(48, 48)).hexdigest()
    assert first == ImageRef(f"path:{tmp_path / 'board.png'}", digest, (1, 6, 6), 9)
    resumed = Images(images.reads, images.folder)
    assert first_image(resumed) == first
    (tmp_path / "board.png").write_bytes(BOARD)
    for one in (images, resumed, Images(images.reads, images.folder)):
        with pytest.raises(DataError, match="is not the file that it was"):
            first_image(one)


def test_a_png_that_says_how_it_is_turned_is_read_for_it(images: Images) -> None:
    """Its EXIF may stand behind the pixels: the count is that of the picture as the tower gets it."""
    picture, exif, file = Image.new("RGB", (64, 32)), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    picture.save(file, "PNG", exif=exif)
    assert images.reads.measured(file, "x")[0] == (1, 8, 4)
    assert images.reads.measured(io.BytesIO(png(64, 32)), "x")[0] == (1, 4, 8)


# ---- at URLs


class Handler(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.2:{self.server.server_address[1]}/secret")
            self.end_headers()
            return
        body = b"x" * 2000 if self.path == "/large" else BOARD
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Handler.asked = []
    served = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    thread.join()
    served.server_close()


def test_addresses_of_this_network_are_not_asked(
    server: str, tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path, {"prompt": "a", "image": f"{server}/board.png"})
    with pytest.raises(StorageError, match=r"127\.0\.0\.1, an address of this"):
        prompts(config, images)
    assert Handler.asked == []
    monkeypatch.setattr(urls, "is_of_everybody", lambda address: address == "127.0.0.1")
    with pytest.raises(StorageError, match=r"127\.0\.0\.2, an address of this machine"):
        prompts(written(tmp_path, {"prompt": "a", "image": f"{server}/away"}), images)
    assert Handler.asked == ["/away"]


def test_an_image_at_a_url_is_fetched_once_and_kept(
    server: str, tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "is_of_everybody", lambda address: True)
    rows = [{"prompt": text, "image": f"{server}/board.png"} for text in "ab"]
    found = prompts(written(tmp_path, *rows), images)
    assert Handler.asked == ["/board.png"]
    assert [one.images[0].sha256 for one in found] == [hashlib.sha256(BOARD).hexdigest()] * 2
    assert Path(found[0].images[0].ref.removeprefix("path:")).parent == tmp_path / "run" / "images"
    again = prompts(written(tmp_path, *rows), Images(images.reads, images.folder))  # a resume
    assert (again[0].images, Handler.asked) == (found[0].images, ["/board.png"])
    monkeypatch.setattr(images_of_rows, "MOST_BYTES", 1000)
    with pytest.raises(StorageError, match="has more than 1000 bytes"):
        prompts(written(tmp_path, {"prompt": "a", "image": f"{server}/large"}), images)


def test_counts_are_those_of_the_tower(images: Images) -> None:
    """Token counts on the controller are those of the pixels that a tower gets."""
    for size in ((48, 48), (16, 16), (200, 33), (17, 90), (5, 5), (640, 480)):
        grid, tokens = images.reads.measured(io.BytesIO(png(*size)), "x")
        assert 256 <= grid[1] * grid[2] * 64 <= 4096
        assert tokens == np.prod(grid) // 4
