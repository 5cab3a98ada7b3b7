"""Images in requests to `rondo serve`: the tokens of `rondo generate`, sessions that go on, and what a client
may not send.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

import rondo
from rondo.core.errors import ConfigError
from rondo.core.images import images_of_text
from rondo.core.types import Prompt, Trajectory
from rondo.models import ModelSource, load_model_config
from rondo.models.family import auto_class
from rondo.models.pixels import image_reader, write_settings
from rondo.recipes import visual
from rondo.rewards import reward_function
from rondo.serving import pictures
from rondo.system import urls
from tests.data.test_images import BOARD, Handler, server  # noqa: F401 (a fixture)
from tests.trainers.conftest import MODEL as TEXT
from tests.trainers.conftest import inline
from tests.trainers.test_geo3k import gemma3_tokenizer, model_of, smolvlm_tokenizer
from tests.trainers.test_images import MODEL, RL

QUESTION = "Which way?"
WHOLE = "<|vision_start|><|image_pad|><|vision_end|>"
BOARDS = [board.picture for board in visual.boards("tests", 4, 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    save(path, MODEL["config"], visual.tokenizer(), min_pixels=256, max_pixels=4096)
    return path


def save(path: Path, config: dict[str, Any], tokenizer: Any, **limits: int) -> None:
    text = {**config["text_config"], "vocab_size": len(tokenizer), "initializer_range": 0.3}
    source = ModelSource(config={**config, "text_config": text}, **limits)
    made = load_model_config(source)
    torch.manual_seed(0)
    auto_class(made).from_config(made).save_pretrained(path)
    tokenizer.save_pretrained(path)
    write_settings(source, made, path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's images lie."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def served(folder: Path, files: Path) -> Iterator[rondo.Server]:
    before, tempfile.tempdir = tempfile.tempdir, str(files)
    try:
        with rondo.serve(folder, max_context=160, fetch_images=True) as running:
            yield running
    finally:
        tempfile.tempdir = before
    assert not list(files.iterdir())


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def shown(picture: bytes | str) -> dict[str, Any]:
    url = picture if isinstance(picture, str) else data_url(picture)
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*pictures: bytes | str, text: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": [*map(shown, pictures), {"type": "text", "text": text}]}


def ask(served: rondo.Server, *messages: Any, session: str = "", **more: Any) -> Any:
    """Returns the answer, or of a stream its chunks."""
    key = f"{served.api_key}:{session}" if session else served.api_key
    with openai.OpenAI(base_url=served.base_url, api_key=key, max_retries=0) as client:
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": True, **more}
        answer = client.chat.completions.create(
            model=served.model, messages=messages, extra_body={"return_token_ids": True}, **settings
        )
        return list(answer) if more.get("stream") else answer


def test_answers_are_those_of_generate(folder: Path, served: rondo.Server, tmp_path: Path) -> None:
    """With one image and with two, in the order of the message; streamed, too."""
    flags: list[str] = []
    for count, picture in enumerate(BOARDS[:2], 1):
        (tmp_path / f"{count}.png").write_bytes(picture)
        flags += ["--image", str(tmp_path / f"{count}.png")]
        greedy = ("--temperature", "0", "--max-tokens", "8", "--json")
        wanted = json.loads(inline("generate", str(folder), QUESTION, *flags, *greedy).stdout)
        (choice,) = ask(served, asked(*BOARDS[:count])).choices
        assert choice.token_ids == wanted["token_ids"]
        assert choice.token_log_probs == pytest.approx(wanted["log_probs"], abs=1e-5)
        chunks = ask(served, asked(*BOARDS[:count]), stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == choice.message.content


@pytest.mark.parametrize(
    ("family", "tokenizer", "written"),
    [
        (
            "gemma3",
            gemma3_tokenizer,
            ("<|vision_start|>", f"\n\n{WHOLE}\n\n"),
        ),
        ("internvl", visual.tokenizer, ("<|image_pad|>", "<img><|image_pad|></img>")),
        ("smolvlm", smolvlm_tokenizer, ("<|image_pad|>", "<|image_pad|>")),
    ],
)
def test_other_families_are_shown_what_they_were_trained_to_read(
    family: str, tokenizer: Callable[[], Any], written: tuple[str, str], tmp_path: Path
) -> None:
    """Whatever the template writes for an image, here and in `rondo generate`."""
    made, model, board = tokenizer(), tmp_path / "model", tmp_path / "board.png"
    save(model, model_of(family)["config"], made)
    board.write_bytes(BOARDS[0])
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "engine": "transformers"}
    (wanted,) = rondo.generate(model, QUESTION, images=[str(board)], **greedy)
    with rondo.serve(model, max_context=160, **{"rollout.engine.name": "transformers"}) as running:
        answer = ask(running, asked(BOARDS[0]))
    (choice,) = answer.choices
    assert choice.token_ids == wanted["token_ids"]
    assert choice.token_log_probs == pytest.approx(wanted["log_probs"], abs=1e-5)
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    text = made.apply_chat_template(said, tokenize=False, add_generation_prompt=True).replace(*written)
    reader = image_reader(ModelSource(path=str(model)))
    assert reader is not None
    ids = made(text, add_special_tokens=False).input_ids
    reader.tell(made)
    shown = reader.ids(reader.reference(board).grid)
    assert answer.usage.prompt_tokens == len(ids) - 1 + len(shown)
    # 4 x 4 tiles and one of all, each a token behind two; five new lines; an end
    assert family != "smolvlm" or len(shown) == 17 * 3 + 5 + 1


def test_a_session_goes_on_from_its_tokens_with_another_image(served: rondo.Server, files: Path) -> None:
    """The second turn's prompt is the first's tokens, its answer, and the new image; the same conversation
    with another first image is another one, and goes on from nothing.
    """
    (first,) = ask(served, asked(BOARDS[0]), session="one").choices
    said = {"role": "assistant", "content": first.message.content}
    turns = (asked(BOARDS[0]), said, asked(BOARDS[1], text="And now?"))
    second = ask(served, *turns, session="one")
    ask(served, asked(BOARDS[2]), said, turns[2], session="one")
    url = f"{served.base_url}/sessions/one"
    call = urllib.request.Request(url, headers={"Authorization": f"Bearer {served.api_key}"})
    calls = json.loads(urllib.request.urlopen(call).read())["calls"]
    assert [one["parent"] for one in calls] == [None, 0, None]
    assert calls[1]["prompt_token_ids"][: len(calls[0]["prompt_token_ids"])] == calls[0]["prompt_token_ids"]
    assert calls[1]["prompt_token_ids"].count(5) == 18
    ids = calls[1]["prompt_token_ids"]
    assert ids[len(calls[0]["prompt_token_ids"]) :][:8] == first.token_ids
    assert calls[1]["token_ids"] == second.choices[0].token_ids
    assert calls[2]["prompt_token_ids"].count(5) == 18
    assert calls[2]["token_log_probs"] != calls[1]["token_log_probs"]
    (kept,) = files.iterdir()  # the server's folder
    assert not list(kept.iterdir())


def refused(served: rondo.Server, *messages: Any, **more: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, *messages, **more)
    return str(caught.value)


def test_what_a_client_may_not_send(served: rondo.Server, files: Path, tmp_path: Path) -> None:
    """Files of the server, what is no image, too many, too large ones; marks beside images."""
    (tmp_path / "secret.png").write_bytes(BOARDS[0])
    secret = str(tmp_path / "secret.png")
    for part in (
        shown(secret),
        shown(f"file://{secret}"),
        shown("s3://bucket/board.png"),
        {"type": "image", "path": secret},
        {"type": "image", "bytes": base64.b64encode(BOARDS[0]).decode()},
    ):
        assert "must have each image as {type: image_url" in refused(
            served, {"role": "user", "content": [part]}
        )
    mark = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    assert "says of an image not which it is" in refused(served, mark)
    assert "says of an image not which" in refused(served, asked(BOARDS[0], text="an <image>"))
    assert ask(served, {"role": "user", "content": "an <image>"}).choices[0].token_ids
    assert "no image that can be read" in refused(served, asked(b"hello"))
    deep = io.BytesIO()
    Image.new("I;16", (32, 32)).save(deep, "PNG")
    for broken, why in ((deep.getvalue(), "more than 8 bits"), (BOARDS[0][:60], "cut off or damaged")):
        told = refused(served, asked(broken))  # by its pixels, as others are by their headers
        assert f"image 0 {'has' if 'bits' in why else 'is'} {why}" in told
        assert str(files) not in told
    assert "is no base64" in refused(served, asked("data:image/png;base64,?"))
    assert "has image 17" in refused(served, asked(*[BOARDS[0]] * 17))
    large = io.BytesIO()
    Image.new("RGB", (64, 64)).save(large, "PNG")
    assert "tokens, and 160 fit with the answer" in refused(served, asked(*[large.getvalue()] * 10))
    sound = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
    assert "sound, films and files are not read" in refused(served, sound)
    placeholder = {"role": "user", "content": "<|image_pad|>"}
    assert "image" in refused(served, placeholder)
    (kept,) = files.iterdir()
    assert not list(kept.iterdir())


def test_urls_are_fetched_where_that_is_allowed_and_never_in_this_network(
    server: str,  # noqa: F811
    served: rondo.Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "an address of this machine" in refused(served, asked(f"{server}/board.png"))
    assert Handler.asked == []
    monkeypatch.setattr(urls, "is_of_everybody", lambda address: address == "127.0.0.1")
    picture = ask(served, asked(f"{server}/board.png")).choices[0].token_ids
    assert picture == ask(served, asked(BOARD)).choices[0].token_ids
    assert "127.0.0.2, an address of this" in refused(served, asked(f"{server}/away"))
    monkeypatch.setattr(pictures, "URL_BYTES", 1000)
    assert "has more than 1000 bytes" in refused(served, asked(f"{server}/large"))
    assert Handler.asked == ["/board.png", "/away", "/large"]
    monkeypatch.setattr(pictures, "URL_SECONDS", 0.01)
    monkeypatch.setattr(pictures, "fetched", lambda *_: time.sleep(0.2))
    assert "no images after 0.01 s" in refused(served, asked(f"{server}/board.png"))


def test_a_server_fetches_nothing_unless_told(folder: Path) -> None:
    with rondo.serve(folder, max_context=160) as running:
        assert "this server fetches none" in refused(running, asked("https://example.com/board.png"))


# ---- a judge


def models_of(url: str, key: str) -> Any:
    call = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    (model,) = json.loads(urllib.request.urlopen(call).read())["data"]
    return model


def sees(url: str, key: str) -> None:
    """Raises ConfigError for a judge without eyes."""
    model = models_of(url, key)
    if "image" not in model["input_modalities"]:
        raise ConfigError(f"the judge {model['id']} reads no images")


@reward_function(check=sees)
def judged(prompt: Prompt, trajectory: Trajectory, url: str, key: str) -> float:
    """How likely the judge's own first word is, with the row's picture and the answer before it."""
    pictures = [data_url(Path(image.path).read_bytes()) for image in prompt.images]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=models_of(url, key)["id"],
            messages=[asked(*pictures, text=f"{trajectory.text}?")],
            temperature=0,
            max_tokens=1,
            logprobs=True,
        )
    return answer.choices[0].logprobs.content[0].logprob


@pytest.mark.slow
def test_a_judge_sees_the_rows_images_and_one_without_eyes_is_refused_before_the_run(
    served: rondo.Server, tmp_path: Path
) -> None:
    recipe = tmp_path / "visual.yaml"

    def run(judge: rondo.Server, name: str) -> Path:
        of = {"url": judge.base_url, "key": judge.api_key}
        function = {"name": "tests/serving/test_images.py:judged", **of}
        settings = {**RL, "reward": {"functions": [function]}, "trainer": {"total_steps": 1}}
        recipe.write_text(yaml.safe_dump(settings))
        rondo.train(recipe, **{"trainer.run_dir": str(tmp_path / name)})
        return tmp_path / name

    done = run(served, "seeing")
    rows = pq.read_table(done / "rollouts" / "step-000001.parquet").to_pylist()
    for row in rows[::4]:
        (image,) = images_of_text(row["images"])
        scores = [
            ask(served, asked(picture, text=f"{row['text']}?"), max_tokens=1).choices[0].token_log_probs[0]
            for picture in (Path(image.path).read_bytes(), BOARDS[3])
        ]
        assert row["reward"] == pytest.approx(scores[0], abs=1e-5)
        assert abs(row["reward"] - scores[1]) > 1e-4
    tokenizer = visual.tokenizer()
    config = load_model_config(ModelSource(config={**TEXT, "vocab_size": len(tokenizer)}))
    auto_class(config).from_config(config).save_pretrained(tmp_path / "text")
    tokenizer.save_pretrained(tmp_path / "text")
    with rondo.serve(tmp_path / "text", max_context=160) as blind:
        with pytest.raises(ConfigError, match="the judge text reads no images"):
            run(blind, "blind")
        assert "pictures, sound and files are not read" in refused(blind, asked(BOARDS[0]))
    assert not (tmp_path / "blind").exists()
