"""Pictures of environments before a policy: the tokens and images of its prompts, and of the rows."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rondo.agents.external import ExternalAgent
from rondo.agents.worlds import Worlds
from rondo.chat import MessageReader, encode_prompt
from rondo.config.schema import EnvironmentConfig, FunctionConfig
from rondo.core.errors import ConfigError, RolloutError
from rondo.core.images import EpisodeImages, ImageRef, with_images
from rondo.core.types import Completion, GenerateRequest, Prompt, SamplingParams, Trajectory
from rondo.data.images import ImageFolder, Images
from rondo.data.rows import rows_from_trajectories
from rondo.environments import Observation, check_environment
from rondo.environments.conformance import check_observation
from rondo.models.pixels import ImageReader
from rondo.recipes import visual
from tests.agents.own_worlds import SIZES, Drawn

WORLDS = "tests/agents/own_worlds.py"
TOKENIZER = visual.tokenizer()
PAD = 5  # <|image_pad|>
TOKENS = [4, 6, 8, 4]  # of SIZES: a token is 16 x 16 pixels
END = int(TOKENIZER.convert_tokens_to_ids("<|im_end|>"))
ASK = ({"role": "user", "content": "Go!"},)


class Scripted:
    """A policy that says these, one after the other, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.left = list(answers)
        self.asked: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        self.asked.append(request)
        made = np.array([*TOKENIZER(self.left.pop(0), add_special_tokens=False)["input_ids"], END], np.int32)
        floats = np.full(len(made), -0.5, np.float32)
        versions = np.full(len(made), 3, np.int32)
        return Completion(
            request.request_id, request.token_ids, made, floats, versions, "stop", images=request.images
        )


def prompt(**fields: Any) -> Prompt:
    return Prompt(5, "train/0/5", "train", encode_prompt(TOKENIZER, ASK), {"seed": 0, **fields}, ASK)


def play(
    loop: str,
    shows: EpisodeImages | None,
    *answers: str,
    environment: EnvironmentConfig | None = None,
    asked: Prompt | None = None,
    max_tokens: int = 600,
    **options: Any,
) -> tuple[Trajectory, Scripted]:
    policy = Scripted(*answers)
    worlds = Worlds([environment or EnvironmentConfig(f"{WORLDS}:Drawn")])

    async def main() -> Trajectory:
        agent = ExternalAgent(
            FunctionConfig(loop, {"max_steps": len(answers), **options}),
            TOKENIZER,
            max_context=1000,
            worlds=worlds,
            images=shows,
        )
        sampling = SamplingParams(max_tokens, stop_token_ids=(END,))
        try:
            return await agent(asked or prompt(), policy, sampling=sampling, sample_index=0, run_seed=7)
        finally:
            await asyncio.to_thread(agent.close)

    return asyncio.run(main()), policy


def digest(room: int) -> str:
    """The sha256 of a room's picture, as it is kept."""
    file = io.BytesIO()
    Image.fromarray(np.full((*SIZES[room], 3), 40 * room + 30, np.uint8)).save(file, "PNG")
    return hashlib.sha256(file.getvalue()).hexdigest()


def shown(request: GenerateRequest) -> list[str]:
    return [image.sha256 for image in request.images]


def tokens(*parts: str | int, answers: Sequence[str] = ()) -> list[int]:
    """The tokens of a conversation: a text each, and a picture of so many tokens; `|` ends a message."""
    text, counts = "<|im_start|>user\n", []
    left = list(answers)
    for part in parts:
        if isinstance(part, int):
            counts.append(part)
            text += "<|vision_start|><|image_pad|><|vision_end|>"
        elif part == "|":
            text += f"<|im_end|>\n<|im_start|>assistant\n{left.pop(0)}<|im_end|>\n<|im_start|>user\n"
        else:
            text += part
    text += "<|im_end|>\n<|im_start|>assistant\n"
    ids = np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)
    return with_images([ids], [np.full(count, PAD) for count in counts], PAD)[0].tolist()


GO = "<action>go</action>"


def test_one_conversation_has_a_picture_in_every_turn(shows: EpisodeImages) -> None:
    """Of three sizes: the row is what the engine had, token for token, with the images in their order."""
    trajectory, policy = play("concatenated", shows, GO, GO, "right", GO)
    assert trajectory.outcome == "scored", trajectory.failure
    first, second, third, fourth = policy.asked
    listed = "\n\nActions: go"
    assert first.token_ids.tolist() == tokens("Go!\n\n", TOKENS[0], listed)
    assert second.token_ids.tolist() == tokens(
        "Go!\n\n", TOKENS[0], listed, "|", TOKENS[1], listed, answers=[GO]
    )
    last = tokens(
        "Go!\n\n", TOKENS[0], listed, "|", TOKENS[1], listed, "|", TOKENS[2], listed,
        "|", "That was no action.\n", TOKENS[2], listed, answers=[GO, GO, "right"],
    )  # fmt: skip
    assert fourth.token_ids.tolist() == last
    assert shown(third) == [digest(0), digest(1), digest(2)]
    assert shown(fourth) == [digest(0), digest(1), digest(2), digest(2)]
    assert [(one.n_tokens, one.turn) for one in fourth.images] == [(4, 0), (6, 2), (8, 4), (8, 6)]
    (row,) = trajectory.rows
    assert row.images == fourth.images
    both = np.concatenate([row.prompt_ids, row.response_ids])
    assert both.tolist() == [*last, *TOKENIZER(GO, add_special_tokens=False)["input_ids"], END]
    assert not row.response_mask[row.response_ids == PAD].any()
    policy_turns = [turn for turn in row.turns if turn.kind == "policy"]
    assert policy_turns[0].anchor == f"<image:{digest(0)[:16]}>"
    assert len({turn.anchor for turn in policy_turns}) == 3  # that of the invalid action stays
    batch = rows_from_trajectories([replace(trajectory, reward=1.0)], of_agents=True, images=lambda: "here")
    assert batch.images()[0] == tuple(replace(one, read_by="here") for one in row.images)


def test_steps_are_rows_of_what_they_saw(shows: EpisodeImages) -> None:
    """The prompts of steps of one size have the same tokens and show other pictures."""
    alike = EnvironmentConfig(f"{WORLDS}:Drawn", options={"sizes": [[32, 32]] * 4})
    trajectory, policy = play("steps", shows, GO, GO, GO, environment=alike, history=0)
    asked = [one.token_ids.tolist() for one in policy.asked]
    assert asked == [tokens("Go!\n\n", 4, "\n\nActions: go")] * 3
    assert len({tuple(shown(one)) for one in policy.asked}) == 3
    assert len({one.seed for one in policy.asked}) == 3
    assert [row.images for row in trajectory.rows] == [one.images for one in policy.asked]
    context = "[context] <|im_start|>user\nGo!\n\n<|vision_start|><image><|vision_end|>\n\nActions: go"
    assert all(text.startswith(context) for text in trajectory.transcripts)
    batch = rows_from_trajectories([replace(trajectory, reward=1.0)], of_agents=True)
    assert len(set(batch.scalars("anchor_id").tolist())) == 3


def test_a_history_shows_the_pictures_of_its_steps(shows: EpisodeImages) -> None:
    _, policy = play("steps", shows, GO, GO, GO, history=1)
    assert [shown(one) for one in policy.asked] == [
        [digest(0)], [digest(0), digest(1)], [digest(1), digest(2)]
    ]  # fmt: skip
    expected = tokens("Go!\n\n", 6, "\n> go\n\n", 8, "\n\nActions: go")
    assert policy.asked[2].token_ids.tolist() == expected


def test_notes_are_written_before_the_pictures(shows: EpisodeImages) -> None:
    """The policy sums up what it sees: the steps that it is asked about are shown."""
    trajectory, policy = play(
        "steps", shows, GO, GO, "a wall", GO,
        history=0, memory={"name": "summary", "every": 2}, max_steps=3,
    )  # fmt: skip
    assert [len(one.images) for one in policy.asked] == [1, 2, 2, 1]
    assert shown(policy.asked[2]) == [digest(0), digest(1)]
    assert shown(policy.asked[3]) == [digest(2)]
    assert policy.asked[3].token_ids.tolist() == tokens("Go!\n\nNotes: a wall\n\n", 8, "\n\nActions: go")
    assert [row.images for row in trajectory.rows] == [one.images for one in policy.asked]


def test_what_is_alike_is_remembered_by_its_picture(shows: EpisodeImages) -> None:
    """The fifth is the first room again, and shares nothing with others but what every text has."""
    _, policy = play("steps", shows, *[GO] * 5, history=1, memory="retrieval")
    assert shown(policy.asked[4]) == [digest(0), digest(0)]


@pytest.mark.parametrize(
    ("says", "parts"),
    [("here", (4, "\nhere")), ("Room <image> is here", ("Room ", 4, " is here")), ("", (4,))],
)
def test_where_a_picture_stands(shows: EpisodeImages, says: str, parts: Any) -> None:
    world = EnvironmentConfig(f"{WORLDS}:Drawn", options={"says": says})
    _, policy = play("concatenated", shows, GO, environment=world)
    assert policy.asked[0].token_ids.tolist() == tokens("Go!\n\n", *parts, "\n\nActions: go")


def test_names_that_nobody_gave_are_text(shows: EpisodeImages) -> None:
    """What the policy says shows nothing, and a name of no picture is what it is."""
    name = f"<image:{digest(0)[:16]}>"
    world = EnvironmentConfig(f"{WORLDS}:Drawn", options={"says": "<image:0123456789abcdef>"})
    _, policy = play("concatenated", shows, f"{name} {GO}", GO, environment=world)
    assert shown(policy.asked[1]) == [digest(0), digest(1)]
    text = "\n<image:0123456789abcdef>\n\nActions: go"
    expected = tokens("Go!\n\n", 4, text, "|", 6, text, answers=[f"{name} {GO}"])
    assert policy.asked[1].token_ids.tolist() == expected


def test_an_image_of_the_prompts_row_is_shown_to_an_agent(shows: EpisodeImages) -> None:
    """Beside those of the environment, in the place that the row gives it."""
    image = shows.keep(np.full((32, 32, 3), 255, np.uint8))
    messages = ({"role": "user", "content": "Like <image>, go!"},)
    ids = np.array(tokens("Like ", 4, ", go!"), np.int32)
    row = Prompt(5, "train/0/5", "train", ids, {"seed": 0}, messages, images=(image,))
    for loop in ("concatenated", "steps"):
        _, policy = play(loop, shows, GO, GO, asked=row, **({"history": 0} if loop == "steps" else {}))
        assert policy.asked[0].token_ids.tolist() == tokens("Like ", 4, ", go!\n\n", 4, "\n\nActions: go")
        assert shown(policy.asked[0]) == [image.sha256, digest(0)]
        assert shown(policy.asked[1])[-1] == digest(1)


def test_too_many_pictures_end_the_run(shows: EpisodeImages) -> None:
    """And are no failed episodes: the long ones would be missing."""
    few = replace(shows, per_prompt=2)
    play("steps", few, GO, GO, GO, history=1)
    with pytest.raises(RolloutError, match=r"shows 3 images, more than model\.images"):
        play("concatenated", few, GO, GO, GO)


def test_a_full_context_ends_the_episode(shows: EpisodeImages) -> None:
    """The tokens of pictures count."""
    trajectory, policy = play("concatenated", shows, *[GO] * 9, max_tokens=70)
    assert (trajectory.outcome, trajectory.finish_reason) == ("scored", "length")
    assert 1 < len(policy.asked) < 9


def test_a_model_that_reads_no_images_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="the environment Drawn shows pictures"):
        play("steps", None, GO)


@pytest.mark.parametrize(("sizes", "why"), [([[2, 900]] * 4, "at most 200 : 1"), ([[0, 9]] * 4, "[0, 9, 3]")])
def test_a_picture_that_is_none(shows: EpisodeImages, sizes: Any, why: str) -> None:
    world = EnvironmentConfig(f"{WORLDS}:Drawn", options={"sizes": sizes})
    trajectory, _ = play("steps", shows, GO, environment=world)
    assert trajectory.outcome == "environment_error"
    assert why in trajectory.failure


def test_an_observation_needs_text_or_a_picture() -> None:
    assert check_observation(Observation("", image=np.zeros((1, 1, 3), np.uint8)))
    check_environment(Drawn)


def test_the_same_picture_is_kept_once(reader: ImageReader, tmp_path: Path) -> None:
    """By many at a time."""
    images, folder = Images(reader, tmp_path / "images"), tmp_path / "images"

    async def main() -> list[ImageRef]:
        keep: Callable[[], Any] = lambda: asyncio.to_thread(  # noqa: E731
            images.of_picture, np.full((32, 32, 3), 9, np.uint8)
        )
        return list(await asyncio.gather(*(keep() for _ in range(16))))

    kept = asyncio.run(main())
    assert set(kept) == {kept[0]}
    assert [file.name for file in folder.iterdir()] == [kept[0].sha256]


@pytest.mark.parametrize(
    ("name", "options", "answer"), [("frozen_lake", {}, "down"), ("sokoban", {"pulls": 6}, "d")]
)
def test_demonstrations_have_the_prompts_of_episodes(
    shows: EpisodeImages, reader: ImageReader, name: str, options: dict[str, Any], answer: str
) -> None:
    """Token for token, with the same pixels: both begin with the level of seed 0."""
    recipe = importlib.import_module(f"rondo_worlds.recipes.{name}")
    world = EnvironmentConfig(name, options={"observe": "image", **options})
    asked = ({"role": "user", "content": recipe.TASK},)
    own = Prompt(5, "train/0/5", "train", encode_prompt(TOKENIZER, asked), {"seed": 0}, asked)
    path = f"rondo_worlds.recipes.{name}"
    _, policy = play(
        "steps", shows, answer, environment=world, asked=own, history=0,
        prompt=f"{path}.prompt", action=f"{path}.move",
    )  # fmt: skip
    (request,) = policy.asked
    row = recipe.demonstrations(size=1, observe="image")[0]
    images = Images(reader)
    read = MessageReader(takes_images=True).read([{"role": "user", "content": row["prompt"]}])
    said = images.of_row(read, row["image"])
    ids = encode_prompt(TOKENIZER, said.for_template())
    (ids,) = images.expanded([ids], said.images, ImageFolder.anywhere())
    assert request.token_ids.tolist() == ids.tolist()
    with Image.open(io.BytesIO(row["image"])) as one, Image.open(request.images[0].path) as other:
        assert np.array_equal(np.asarray(one), np.asarray(other))
