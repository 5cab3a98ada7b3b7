"""Tools that take and give images: what the policy is shown, the tokens and images of the row, coordinates,
and tools that return what is no image.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rondo.agents.external import ExternalAgent
from rondo.agents.tools import Toolbox, ToolFailedError, load_tools, loaded_tools
from rondo.chat import checked_continuation
from rondo.config.schema import FunctionConfig, ToolConfig
from rondo.core.errors import ConfigError, StorageError
from rondo.core.images import EpisodeImages, ImageRef, Pictures, name_of, with_images
from rondo.core.types import Prompt, SamplingParams, Trajectory
from rondo.data.images import episode_images
from rondo.models import ModelSource, load_model_config
from rondo.models.pixels import ImageReader
from rondo.recipes import visual
from rondo.recipes.quickstart import CHAT_TEMPLATE, fast_tokenizer
from tests.agents.scripted import call
from tests.agents.test_mcp import SERVER
from tests.agents.test_pictures import END, PAD, Scripted
from tests.models.families import config_of

OWN = "tests/agents/own_image_tools.py"
# As Qwen3-VL's: the recipe's, where an image stands as it is said, with tools and their calls.
_TOOLS, _CALLS = (
    CHAT_TEMPLATE[CHAT_TEMPLATE.index(begin) : CHAT_TEMPLATE.index(end) + len(end)]
    for begin, end in (("{%- if tools %}", "{% endif %}\n"), ("{%- for call in", "{%- endfor %}\n"))
)
_END = "{{- '<|im_end|>\\n' }}\n"
TEMPLATE = _TOOLS + visual.CHAT_TEMPLATE.replace(_END, _CALLS + _END)
TOKENIZER = fast_tokenizer(visual._bpe(), TEMPLATE)


def quarters(width: int = 64, height: int = 32) -> np.ndarray:
    """A picture whose quarters have other colours: 10 and 20 above, 30 and 40 below."""
    picture = np.zeros((height, width, 3), np.uint8)
    halves = (
        (slice(0, height // 2), slice(height // 2, None)),
        (slice(0, width // 2), slice(width // 2, None)),
    )
    for place, colour in enumerate((10, 20, 30, 40)):
        picture[halves[0][place // 2], halves[1][place % 2]] = colour
    return picture


def plain(width: int, height: int, colour: int) -> str:
    """The sha256 of a picture of one colour, as it is kept."""
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), colour, np.uint8)).save(file, "PNG")
    return hashlib.sha256(file.getvalue()).hexdigest()


def with_counts(text: str, *counts: int) -> list[int]:
    """The tokens of a text in which each <image> has so many."""
    text = text.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    ids = np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)
    return with_images([ids], [np.full(count, PAD) for count in counts], PAD)[0].tolist()


def play(
    shows: EpisodeImages | None,
    tools: list[ToolConfig],
    *answers: str,
    tokenizer: Any = TOKENIZER,
    agent: Any = (),
) -> tuple[Trajectory, Scripted]:
    """An episode whose prompt shows a picture (8 tokens) where there are eyes."""
    policy, loaded = Scripted(*answers), load_tools(tools)
    schemas = [dict(tool.schema) for tool in loaded]
    images: tuple[ImageRef, ...] = ()
    asked = "Where?"
    if shows is not None:
        images, asked = (shows.keep(quarters()),), "Look: <image> Where?"
    opening = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": asked}], tools=schemas, tokenize=False, add_generation_prompt=True
    )
    ids = np.array(with_counts(opening, *(image.n_tokens for image in images)), np.int32)
    messages = ({"role": "user", "content": asked},)
    prompt = Prompt(5, "train/0/5", "train", ids, {"tools": schemas}, messages, images=images)

    async def main() -> Trajectory:
        runs = ExternalAgent(
            FunctionConfig(f"{OWN}:{agent[0]}", agent[1]) if agent else FunctionConfig("tools"),
            tokenizer,
            max_context=4000,
            tools=loaded,
            images=shows,
        )
        sampling = SamplingParams(3000, stop_token_ids=(END,))
        try:
            return await runs(prompt, policy, sampling=sampling, sample_index=0, run_seed=7)
        finally:
            await asyncio.to_thread(runs.close)

    return asyncio.run(main()), policy


def box(shows: EpisodeImages | None, *tools: ToolConfig, pictures: int = 1) -> Toolbox:
    """The tools of an episode that has shown pictures."""
    shown: dict[str, ImageRef] = {}
    for number in range(pictures if shows else 0):
        assert shows is not None
        kept = shows.keep(quarters() + np.uint8(number))
        shown[name_of(kept)] = kept
    return Toolbox(load_tools(tools), TOKENIZER, Pictures(shown, shows, len(shown)))


def test_what_a_tool_shows_is_in_the_row(shows: EpisodeImages) -> None:
    """Token for token, mask 0, with a reference to the part that was cut out, of which the next is a part."""
    first, second = call("zoom", image=1, box=[0, 0, 500, 500]), call("zoom", image=2, box=[0, 0, 1000, 500])
    trajectory, policy = play(shows, [ToolConfig("zoom")], first, second, "#### 3")
    assert (trajectory.outcome, trajectory.failure, trajectory.text) == ("scored", "", "#### 3")
    (row,) = trajectory.rows
    parts = plain(64, 32, 10), plain(64, 32, 10)  # the second is enlarged to no more than its image's width
    shown = [image.sha256 for image in row.images]
    assert shown[1] == parts[0]
    assert [image.n_tokens for image in row.images] == [8, 8, 4]
    assert [image.turn for image in row.images] == [0, 2, 4]
    begin, end = "<|im_end|>\n<|im_start|>tool\n", "<|im_end|>\n<|im_start|>assistant\n"
    places = (
        "Image 2: <image>\nof image 1: 0, 0, 500, 500 (pixels of its file: 0, 0, 32, 16 of 64 x 32)",
        "Image 3: <image>\nof image 2: 0, 0, 1000, 500 (pixels of its file: 0, 0, 64, 16 of 64 x 32)",
    )
    told = [f"{begin}{place}{end}" for place in places]
    expected = policy.asked[0].token_ids.tolist() + with_counts(first + told[0], 8)
    assert policy.asked[1].token_ids.tolist() == expected
    expected += with_counts(second + told[1], 4)
    assert policy.asked[2].token_ids.tolist() == expected
    whole = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    assert whole[: len(expected)] == expected
    where = row.response_ids == PAD
    assert where.sum() == 12
    assert not row.response_mask[where].any()
    assert [turn.kind for turn in row.turns] == ["policy", "tool", "policy", "tool", "policy"]
    assert [result.images[0].sha256 for result in trajectory.tool_results] == shown[1:]
    assert trajectory.tool_results[0].data == {
        "image": 1, "box": [0, 0, 32, 16], "size": [64, 32], "shown_box": [0.0, 0.0, 500.0, 500.0],
    }  # fmt: skip


def test_calls_at_the_same_time_are_numbered_in_their_order(shows: EpisodeImages) -> None:
    """Whichever comes first to its end; each sees what was shown before both."""
    answer = call("late", colour=7, seconds=0.3) + call("late", colour=9, seconds=0.0)
    _, policy = play(shows, [ToolConfig(f"{OWN}:late"), ToolConfig("zoom")], answer, "#### 1")
    begin, end = "<|im_end|>\n<|im_start|>tool\n", "<|im_end|>\n<|im_start|>assistant\n"
    text = f"{begin}Image 2: <image>\n7 of 1{begin}Image 3: <image>\n9 of 1{end}"
    said = with_counts(text, 4, 4)
    assert policy.asked[1].token_ids.tolist()[-len(said) :] == said
    assert [image.sha256 for image in policy.asked[1].images[1:]] == [plain(32, 32, 7), plain(32, 32, 9)]


def test_an_image_alone_is_a_result(shows: EpisodeImages) -> None:
    """Without a number where no tool is asked for one."""
    _, policy = play(shows, [ToolConfig(f"{OWN}:paints")], call("paints", colour=50), "#### 1")
    said = with_counts("<|im_start|>tool\n<image><|im_end|>\n<|im_start|>assistant\n", 4)
    assert policy.asked[1].token_ids.tolist()[-len(said) :] == said


def test_a_template_that_leaves_images_out_is_named(shows: EpisodeImages) -> None:
    """As GLM's and some of Gemma's do, in messages of tools."""
    without = TEMPLATE.replace("part.type == 'image'", "part.type == 'image' and message.role != 'tool'")
    tokenizer = fast_tokenizer(visual._bpe(), without.replace("else part.text", "else part.text or ''"))
    answer = call("zoom", image=1, box=[0, 0, 500, 500])
    trajectory, _ = play(shows, [ToolConfig("zoom")], answer, tokenizer=tokenizer)
    assert trajectory.outcome == "rollout_error"
    assert (
        "wrote 0 places for images where messages of tool have 1: set model.chat_template"
        in trajectory.failure
    )


def test_what_stands_around_images_is_the_same_in_every_call(shows: EpisodeImages) -> None:
    """Though most calls render the end of the conversation alone: `<img>` and `</img>` of InternVL's."""
    tokenizer = fast_tokenizer(visual._bpe(), TEMPLATE)
    tokenizer.image_text = ("<|image_pad|>", "[<|image_pad|>]")
    assert checked_continuation(tokenizer).has_tail(None)
    calls = [call("zoom", image=1, box=[0, 0, 500, 100 * edge]) for edge in range(1, 8)]
    _, policy = play(shows, [ToolConfig("zoom")], *calls, "#### 1", tokenizer=tokenizer)
    ids = policy.asked[-1].token_ids
    last = np.append(ids[1:], 0)
    begin, end = (TOKENIZER(one, add_special_tokens=False)["input_ids"] for one in "[]")
    runs = np.flatnonzero((ids == PAD) & (np.append(0, ids[:-1]) != PAD))
    ends = np.flatnonzero((ids == PAD) & (last != PAD))
    assert len(runs) == 8
    assert ids[runs[1:] - 1].tolist() == begin * 7
    assert ids[ends[1:] + 1].tolist() == end * 7


def test_texts_of_tools_show_no_image(shows: EpisodeImages) -> None:
    """Neither by the name of one, which a program can find out (that ended the run, with more images than a
    prompt may have), nor by the token that stands for images.
    """
    few = replace(shows, per_prompt=1)
    name = name_of(shows.keep(quarters()))
    tools = [ToolConfig(f"{OWN}:writes")]
    for code, told in (("name", f"a < {name[1:]} b"), ("pad", "a < |image_pad|> b")):
        trajectory, policy = play(few, tools, call("writes", code=code, shown=name), "#### 1")
        assert (trajectory.outcome, len(policy.asked[1].images)) == ("scored", 1)
        said = with_counts(f"<|im_start|>tool\n{told}<|im_end|>\n<|im_start|>assistant\n")
        assert policy.asked[1].token_ids.tolist()[-len(said) :] == said
        assert np.count_nonzero(policy.asked[1].token_ids == PAD) == 8
        assert code == "pad" or trajectory.tool_results[0].text == f"a {name} b"  # rewards read what was said
    trajectory, policy = play(few, tools, call(name), call("writes", **{name: 1}), "#### 1")
    assert (trajectory.outcome, [len(one.images) for one in policy.asked]) == ("scored", [1, 1, 1])


def test_what_was_said_shows_no_image(shows: EpisodeImages) -> None:
    """In a text and in a call's arguments, where the conversation is tokenised whole."""
    trajectory, policy = play(shows, [], "a", "b", agent=("anew", {}))
    assert (trajectory.outcome, len(trajectory.rows)) == ("scored", 2)
    assert [np.count_nonzero(request.token_ids == PAD) for request in policy.asked] == [8, 8]
    arguments = '<tool_call>{"name": "zoom", "arguments": {"< |image_pad|>": ["< |image_pad|>"]}}</tool_call>'
    said = with_counts(f"< |image_pad|>{arguments}<|im_end|>\n")
    assert str(said)[1:-1] in str(policy.asked[1].token_ids.tolist())


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def as_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def square(colour: int, side: int = 32) -> str:
    return as_url(png(np.full((side, side, 3), colour, np.uint8)))


def test_an_agent_brings_images_over_http(shows: EpisodeImages) -> None:
    """Its tools are its own: what it sends joins the row, token for token; sent again it is the same."""
    urls = [square(7), square(9, side=16), square(7)]
    trajectory, policy = play(shows, [], "a", "b", "c", "d", agent=("squares", {"urls": urls}))
    assert (trajectory.outcome, trajectory.failure) == ("scored", "")
    (row,) = trajectory.rows
    expected = policy.asked[0].token_ids.tolist()
    for number, (answer, count) in enumerate(zip("abc", (4, 1, 4), strict=True), 1):
        begin, end = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        expected += with_counts(f"{answer}{begin}And <image>{end}", count)
        assert policy.asked[number].token_ids.tolist() == expected
    files = [hashlib.sha256(base64.b64decode(url.partition(",")[2])).hexdigest() for url in urls]
    assert [image.sha256 for image in row.images[1:]] == files
    assert [image.turn for image in row.images] == [0, 2, 4, 6]
    assert not row.response_mask[row.response_ids == PAD].any()
    assert all(Path(image.path).read_bytes() for image in row.images)


def test_an_agent_brings_more_than_a_client_may(shows: EpisodeImages) -> None:
    """Above 16 MiB in a request, as some screenshots are that are sent again in every turn."""
    noise = np.random.default_rng(0).integers(0, 256, (2100, 2100, 3), np.uint8)
    trajectory, policy = play(shows, [], "a", "b", agent=("squares", {"urls": [as_url(png(noise))]}))
    assert (trajectory.outcome, trajectory.failure) == ("scored", "")
    assert [len(request.images) for request in policy.asked] == [1, 2]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://192.168.0.1/a.png", "an image at a URL, and this server fetches none"),
        ("/etc/passwd", "and no file"),
        ("data:image/png;base64,AAAA", "image 0 is no image that can be read"),
        (as_url(png(np.full((8, 8), 60000, np.uint16))), "image 0 has more than 8 bits a channel"),
        (as_url(png(quarters())[:60]), "image 0 is cut off or damaged"),
    ],
)
def test_what_an_agent_may_not_bring(shows: EpisodeImages, url: str, why: str) -> None:
    trajectory, _ = play(shows, [], "a", agent=("squares", {"urls": [url]}))
    assert trajectory.outcome == "rollout_error"
    assert why in trajectory.failure


def test_what_an_agent_brings_counts_with_what_was_there(shows: EpisodeImages) -> None:
    """The second one would be the prompt's third: refused, as the first request with too many of its own."""
    few = replace(shows, per_prompt=2)
    urls = [square(7), square(9)]
    trajectory, policy = play(few, [], "a", "b", "c", agent=("squares", {"urls": urls}))
    assert [len(request.images) for request in policy.asked] == [1, 2]
    assert trajectory.outcome == "rollout_error"
    assert "shows 3 images, and model.images.per_prompt is 2" in trajectory.failure


def test_tools_count_what_an_agent_brought(shows: EpisodeImages) -> None:
    """Two of three are there; the policy, which does not know that, ends no run with two more."""
    few = replace(shows, per_prompt=3)
    calls = [call("zoom", image=2, box=[0, 0, 1000, 100 * edge]) for edge in (3, 6)]
    agent = "brings", {"url": square(7), "max_turns": 3}
    trajectory, policy = play(few, [ToolConfig("zoom")], *calls, "#### 1", agent=agent)
    assert (trajectory.outcome, trajectory.text) == ("scored", "#### 1")
    assert [len(request.images) for request in policy.asked] == [2, 3, 3]
    said = with_counts(
        "<|im_start|>tool\nError: its images are not shown: 3 were, and there may be 3<|im_end|>\n"
    )
    assert str(said)[1:-1] in str(policy.asked[2].token_ids.tolist())


def test_a_model_without_eyes_is_brought_no_images() -> None:
    trajectory, _ = play(None, [], "a", agent=("squares", {"urls": [square(7)]}))
    assert "must be 'text', got 'image_url'" in trajectory.failure


@pytest.mark.parametrize(
    ("coordinates", "corner"), [("thousandths", [500, 500, 1000, 1000]), ("pixels", [40, 16, 80, 32])]
)
def test_coordinates(shows: EpisodeImages, coordinates: str, corner: list[int]) -> None:
    """Of the image as the model gets it: 640 x 320 pixels are 80 x 32 there (whole tokens, below 4,096)."""
    tools = box(shows, ToolConfig("zoom", options={"coordinates": coordinates, "enlarge": 1.0}), pictures=0)
    kept = shows.keep(quarters(640, 320))
    assert shows.seen_size(kept) == (80, 32)
    tools._pictures.show(kept)
    first, told = asyncio.run(tools.call("zoom", {"image": 1, "box": corner})).split("\n")
    corner_text = ", ".join(map(str, corner))
    assert told == f"of image 1: {corner_text} (pixels of its file: 320, 160, 640, 320 of 640 x 320)"
    assert first == f"Image 2: <image:{plain(320, 160, 40)[:16]}>"
    assert tools.results[0].data["shown_box"] == corner


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"image": 2, "box": [0, 0, 9, 9]}, "Error: there is no image 2; 1 were shown, counted from 1"),
        ({"image": 0, "box": [0, 0, 9, 9]}, "Error: there is no image 0; 1 were shown, counted from 1"),
        (
            {"image": 1, "box": [9, 0, 9, 9]},
            "Error: the box [9.0, 0.0, 9.0, 9.0] has nothing of image 1 in it",
        ),
        ({"image": 1, "box": [2000, 0, 3000, 9]}, "has nothing of image 1 in it"),
        ({"image": 1, "box": [0, 0, 9]}, "Error: wrong arguments: box"),
        ('{"image": 1, "box": [0, 0, NaN, 9]}', "Error: coordinates are numbers"),
        ({"image": 1, "box": [0, 0, 9, 9], "images": []}, "Error: wrong arguments: images: Extra inputs"),
    ],
)
def test_a_wrong_zoom_is_an_observation(shows: EpisodeImages, arguments: Any, why: str) -> None:
    tools = box(shows, ToolConfig("zoom"))
    assert why in asyncio.run(tools.call("zoom", arguments))
    assert (tools.failure, tools.stats.num_errors, tools.results) == ("", 1, ())


def test_a_part_that_is_too_thin_is_an_observation(shows: EpisodeImages) -> None:
    """No processor takes sides of more than 200 : 1, and the policy chose it."""
    tools = box(shows, ToolConfig("zoom"), pictures=0)
    tools._pictures.show(shows.keep(quarters(600, 400)))
    said = asyncio.run(tools.call("zoom", {"image": 1, "box": [0, 0, 1000, 2]}))
    assert said.startswith("Error: an image of 600 x 1 pixels")
    assert tools.failure == ""


def test_what_is_drawn(shows: EpisodeImages) -> None:
    tools = box(shows, ToolConfig("draw", options={"colour": "blue"}))
    places = {"boxes": [[0, 0, 500, 500]], "lines": [[0, 1000, 1000, 1000]], "points": [[750, 250]]}
    said = asyncio.run(tools.call("draw", {"image": 1, **places}))
    assert said.endswith("\nimage 1 with what was drawn (3)")
    (result,) = tools.results
    drawn = np.asarray(shows.decoded(result.images[0]))
    blue = (drawn == (0, 0, 255)).all(-1)
    assert blue[0, :33].all() and blue[:17, 0].all() and blue[16, :33].all()  # noqa: PT018
    assert blue[8, 48] and not blue[8, 40] and blue[31].sum() == 0  # noqa: PT018  (y = 32 is below the last row)
    untouched = ~blue
    assert np.array_equal(drawn[untouched], quarters()[untouched])
    assert result.data["points"] == [[48.0, 8.0]]
    assert "nothing to draw" in asyncio.run(tools.call("draw", {"image": 1}))


def test_images_of_a_server_are_shown_where_there_are_eyes(shows: EpisodeImages) -> None:
    """Its texts say where they are; what it calls an image and is none is a failure of the tool."""
    with loaded_tools([ToolConfig("mcp", options={"command": SERVER, "tools": ["see", "paint"]})]) as loaded:
        tools, blind = (Toolbox(loaded, TOKENIZER, Pictures({}, how)) for how in (shows, None))
        file = io.BytesIO()
        Image.new("RGB", (32, 32), "red").save(file, "PNG")
        name = f"<image:{hashlib.sha256(file.getvalue()).hexdigest()[:16]}>"
        assert asyncio.run(tools.call("paint", {"colour": "red"})) == f"{name}\na square\n[image, image/png]"
        assert asyncio.run(blind.call("paint", {"colour": "red"})) == "a square\n[image, image/png]"
        with pytest.raises(ToolFailedError, match="that can be shown: image 0 is no image"):
            asyncio.run(tools.call("see", {"name": "NONE"}))
        assert tools.error is None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("none", "it returned what is no image that can be shown: image 0 is no image that can be read"),
        ("hundred", "it returned 100 images, and a call may show 16"),
        ("thin", "it returned what is no image that can be shown: an image of 900 x 2 pixels"),
        ("animated", "is animated (2 frames)"),
        ("grey", "[H, W, 3] of uint8, got [4, 4] of uint8"),
        (
            "path",
            "a picture is a Pillow image, an array [H, W, 3] of uint8 or a file's bytes, got '/etc/passwd'",
        ),
        ("large", "a picture of 100010000 pixels, more than 100000000"),
    ],
)
def test_a_tool_that_shows_what_is_none_has_failed(shows: EpisodeImages, kind: str, why: str) -> None:
    trajectory, _ = play(shows, [ToolConfig(f"{OWN}:odd")], call("odd", kind=kind))
    assert trajectory.outcome == "tool_error"
    assert trajectory.failure.startswith("the tool odd ")
    assert why in trajectory.failure


def test_more_than_a_prompt_may_have_is_an_observation(shows: EpisodeImages) -> None:
    """The policy asked for it, and may ask for the same again: that would end the run at the next prompt."""
    few = replace(shows, per_prompt=2)
    tools = box(few, ToolConfig("zoom"))
    first = {"image": 1, "box": [0, 0, 500, 500]}
    said = asyncio.run(tools.call("zoom", first))
    assert said.startswith("Image 2: ")
    again = asyncio.run(tools.call("zoom", {"image": 1, "box": [500, 500, 1000, 1000]}))
    assert again == "Error: its images are not shown: 2 were, and there may be 2"
    assert asyncio.run(tools.call("zoom", first)) == again
    assert (tools.stats.errors["zoom"], len(tools.results)) == (2, 1)
    trajectory, policy = play(few, [ToolConfig("zoom")], *[call("zoom", **first)] * 3, "#### 1")
    assert trajectory.outcome == "scored"
    assert [len(request.images) for request in policy.asked] == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("name", "arguments"), [("zoom", {"image": 1, "box": [0, 0, 9, 9]}), (f"{OWN}:paints", {"colour": 1})]
)
def test_a_model_without_eyes_ends_the_run(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the tool (zoom works on|paints shows)"):
        play(None, [ToolConfig(name)], call(name.rpartition(":")[2], **arguments))


def test_a_disk_that_is_full_ends_the_run(shows: EpisodeImages) -> None:
    """It is no fault of the tool's."""
    keep = iter([shows.keep])

    def once(picture: Any) -> ImageRef:
        for first in keep:
            return first(picture)
        raise StorageError("no space left")

    full = replace(shows, keep=once)
    with pytest.raises(StorageError, match="no space left"):
        play(full, [ToolConfig(f"{OWN}:paints")], call("paints", colour=1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"coordinates": "percent"}, "thousandths"),
        ({"enlarge": 0.5}, "enlarge must be at least 1, got 0.5"),
        ({"enlarg": 2.0}, "did you mean 'enlarge'"),
    ],
)
def test_wrong_options_are_said_at_the_start(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_tools([ToolConfig("zoom", options=options)])[0].make()


def test_the_policy_is_told_which_coordinates_it_writes() -> None:
    schemas = [
        load_tools([ToolConfig("zoom", options={"coordinates": one})])[0].schema["function"]
        for one in ("thousandths", "pixels")
    ]
    told = [schema["parameters"]["properties"] for schema in schemas]
    assert [one["box"]["description"] for one in told] == [
        "left, top, right and bottom, from 0 to 1000, of its width and height",
        "left, top, right and bottom, in pixels, of the image as you are shown it",
    ]
    assert [sorted(one) for one in told] == [["box", "image"]] * 2  # and nothing of `images`


def test_a_family_without_proportions_takes_thousandths(tmp_path: Path) -> None:
    """InternVL's tiles: their pixels are no coordinates."""
    source = ModelSource(config=config_of("internvl"), seed=0)
    tiles = episode_images(ImageReader(source, load_model_config(source)), tmp_path / "images", None)
    tools = box(tiles, ToolConfig("zoom", options={"coordinates": "pixels"}))
    with pytest.raises(Exception, match="an image in its own proportions"):
        asyncio.run(tools.call("zoom", {"image": 1, "box": [0, 0, 9, 9]}))
    tools = box(tiles, ToolConfig("zoom"))
    assert asyncio.run(tools.call("zoom", {"image": 1, "box": [0, 0, 500, 500]})).startswith("Image 2: ")
