"""Images in requests of rondo's own engines: tokens are those of transformers' `generate`, log-probs those of
the trainer, and nothing is shared by prompts that show other images.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rondo.config.schema import EngineConfig
from rondo.core.batch import Batch, ragged_rows
from rondo.core.errors import LostImageError, RefusedRequestError
from rondo.core.images import ImageRef, images_as_text, with_images
from rondo.core.types import Completion, GenerateRequest, SamplingParams
from rondo.models.pixels import ImageReader
from rondo.rollout import EngineSpec, NativeEngine, build_engine, start_engine
from rondo.rollout.in_process import InProcessEngine
from rondo.rollout.transformers.engine import TransformersEngine
from rondo.training import ModelSpec, make_engine
from tests.engines.conftest import paused_in_flight
from tests.models.families import (
    IMAGE_END,
    IMAGE_START,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    WITH_IMAGES,
    make,
    persistent,
    reader_of,
    shown_to,
    source_of,
    stand_ins,
)
from tests.models.test_images import drawing, source_with_limits
from tests.training.conftest import mesh  # noqa: F401 (a fixture)

ENGINES = ("native", "transformers")
TOLERANCE = 1e-5
CONTEXT = 128


class Pictures:
    """A model of a family, and drawings of several sizes."""

    def __init__(self, family: str, folder: Path, **changes: Any) -> None:
        self.source = source_with_limits(family, **changes)
        self.model: PreTrainedModel = make(family, **changes)
        self.model.generation_config.eos_token_id = None
        self.reader: ImageReader = reader_of(self.source)
        sizes = {"wide": (48, 16), "tall": (16, 30), "small": (16, 16), "other": (16, 16), "big": (40, 40)}
        colours = dict(zip(sizes, ("red", "green", "blue", "black", "orange"), strict=True))
        paths = {name: drawing(folder, name, size, colours[name]) for name, size in sizes.items()}
        self.images = {name: self.reader.reference(path) for name, path in paths.items()}
        self.of_several = {name: self.reader.reference(path, alone=False) for name, path in paths.items()}

    def engine(self, kind: str, **settings: Any) -> InProcessEngine[Any]:
        options = {key: settings.pop(key) for key in ("cache_bytes",) if key in settings}
        spec = {
            "dtype": "float32",
            "device": "cpu",
            "max_context": self.model.config.get_text_config().max_position_embeddings,
            "max_concurrent": 8,
            "threads": 1,
        }
        spec |= settings
        own = {"native": NativeEngine, "transformers": TransformersEngine}[kind]
        weights = {name: tensor.to(spec["device"]) for name, tensor in persistent(self.model).items()}
        return own(
            EngineSpec(kind, self.source, **spec),
            self.model.config,
            weights,
            **options,
        )

    def prompt(self, seed: int, *names: str, length: int = 6) -> tuple[np.ndarray, tuple[ImageRef, ...]]:
        """Returns text, images and text, as ids."""
        rng = np.random.default_rng(seed)
        images = tuple((self.images if len(names) == 1 else self.of_several)[name] for name in names)
        ids = rng.integers(0, 50, length).tolist()
        for _ in images:
            ids += [IMAGE_START, IMAGE_TOKEN, IMAGE_END, *rng.integers(0, 50, 2).tolist()]
        one_each = np.array(ids, np.int32)
        tokens = [self.reader.ids(one.grid) for one in images]
        return with_images([one_each], tokens, IMAGE_TOKEN)[0], images

    def request(
        self, name: str, prompt: tuple[np.ndarray, tuple[ImageRef, ...]], new: int = 20, **fields: Any
    ) -> GenerateRequest:
        own = {key: fields.pop(key) for key in ("seed", "prefix", "deadline_seconds") if key in fields}
        return GenerateRequest(name, prompt[0], SamplingParams(new, **fields), images=prompt[1], **own)

    def given(self, ids: torch.Tensor, images: Sequence[ImageRef]) -> dict[str, torch.Tensor]:
        """Returns what transformers' model and processor take of images."""
        return shown_to(self.model, ids, images, self.reader)

    def generated(self, prompt: tuple[np.ndarray, tuple[ImageRef, ...]], new: int) -> list[int]:
        """Returns transformers' own greedy tokens."""
        ids = torch.from_numpy(prompt[0].astype(np.int64))[None]
        made = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            suppress_tokens=stand_ins(self.model),
            **self.given(ids, prompt[1]),
        )
        tokens: list[int] = made[0, ids.shape[1] :].tolist()
        return tokens

    def gaps(self, made: Completion, temperature: float = 1.0) -> np.ndarray:
        """|log-prob - that of transformers' forward over prompt and response|, float [T]."""
        ids = torch.from_numpy(np.concatenate([made.prompt_ids, made.token_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False, **self.given(ids, made.images)).logits[0]
        at = len(made.prompt_ids)
        scores = (logits[at - 1 : -1] / temperature).log_softmax(-1)
        return np.abs(scores.gather(1, ids[0, at:, None])[:, 0].numpy() - made.log_probs)


def run(engine: Any, requests: Sequence[GenerateRequest]) -> list[Completion]:
    async def every() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(one) for one in requests)))

    return asyncio.run(every())


def sums(engine: Any) -> dict[str, float]:
    return dict(asyncio.run(engine.stats()).sums)


def same(one: Completion, other: Completion) -> None:
    """Bit for bit."""
    assert one.token_ids.tolist() == other.token_ids.tolist()
    np.testing.assert_array_equal(one.log_probs, other.log_probs)


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Pictures:
    return Pictures(getattr(request, "param", "qwen3_vl"), tmp_path)


# Of one the tokens of an image are side by side, of the other names of tiles are between them.
BOTH_WAYS = pytest.mark.parametrize("pictures", ["qwen3_vl", "idefics3"], indirect=True)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, pictures: Pictures) -> Iterator[InProcessEngine[Any]]:
    made = pictures.engine(request.param)
    yield made
    made.close()


BOTH = [(family, kind) for family in WITH_IMAGES for kind in ENGINES]
REFUSED = {("gemma3", "native"): "tokens of an image see each other", ("qwen3_5", "native"): ""}


@pytest.mark.parametrize(("family", "kind"), [pair for pair, why in REFUSED.items() if why])
def test_images_that_an_engine_does_not_show(family: str, kind: str, tmp_path: Path) -> None:
    """Rows of text are answered as ever."""
    of = Pictures(family, tmp_path)
    engine = of.engine(kind)
    (text,) = run(engine, [of.request("text", of.prompt(0), temperature=0.0)])
    assert text.token_ids.tolist() == of.generated(of.prompt(0), 20)
    with pytest.raises(RefusedRequestError, match=f"{REFUSED[family, kind]}.*rollout.engine=transformers"):
        run(engine, [of.request("image", of.prompt(1, "wide"))])
    engine.close()


@pytest.mark.parametrize(("family", "kind"), [pair for pair in BOTH if pair not in REFUSED])
def test_greedy_is_generate_and_log_probs_are_the_trainers(
    family: str,
    kind: str,
    mesh: DeviceMesh,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Rows without, with one and with two images of several sizes, in one batch; greedy and sampled."""
    of = Pictures(family, tmp_path)
    # A state that is carried along is rounded otherwise than one that is computed for all tokens at once.
    tolerance = 3 * TOLERANCE if family == "qwen3_5" else TOLERANCE
    prompts = [
        of.prompt(0),
        of.prompt(1, "wide"),
        of.prompt(2, "tall", "small"),
        of.prompt(3, "big", "wide", length=1),
        of.prompt(4, "small", "small", length=0),
    ]
    engine = of.engine(kind)
    greedy = [of.request(f"g{i}", one, temperature=0.0) for i, one in enumerate(prompts)]
    sampled = [
        of.request(f"s{i}.{j}", one, 30, seed=10 * i + j, temperature=0.8)
        for i, one in enumerate(prompts)
        for j in range(2)
    ]
    made = run(engine, [*greedy, *sampled])
    engine.close()
    for prompt, one in zip(prompts, made[: len(greedy)], strict=True):
        assert one.token_ids.tolist() == of.generated(prompt, 20)
        assert one.images == prompt[1]
        assert of.gaps(one).max() < tolerance
    for one in made[len(greedy) :]:
        assert of.gaps(one, 0.8).max() < tolerance
    blind = [of.generated((ids, images[::-1]), 20) for ids, images in prompts[4:]]
    assert blind == [of.generated(prompts[4], 20)]

    # The trainer's own numbers, at the temperature of each row's sampling.
    for temperature, rows in ((1.0, made[: len(greedy)]), (0.8, made[len(greedy) :])):
        config = EngineConfig(token_budget=256)
        spec = ModelSpec(of.source, config, None, temperature=temperature)
        trainer = make_engine(spec, mesh=mesh)
        trainer_weights = trainer.backend.model.lm.state_dict()  # a router's bias is a buffer
        with torch.no_grad():
            for name, tensor in persistent(of.model).items():
                trainer_weights[name].copy_(tensor)
        batch = Batch.of(
            {
                "row_id": np.arange(len(rows)),
                "prompt_ids": ragged_rows([one.prompt_ids for one in rows], np.int32),
                "response_ids": ragged_rows([one.token_ids for one in rows], np.int32),
                "images": [images_as_text(one.images) for one in rows],
            }
        )
        found = trainer.forward(batch, {"log_probs": "log_probs"}).rows("log_probs")
        assert (
            max(np.abs(ours - one.log_probs).max() for ours, one in zip(found, rows, strict=True)) < tolerance
        )


@BOTH_WAYS
def test_equal_tokens_and_other_images_share_nothing(pictures: Pictures, engine: Any) -> None:
    blue, black = (pictures.prompt(1, name, length=70) for name in ("small", "other"))
    assert blue[0].tolist() == black[0].tolist()
    sums(engine)
    (first,) = run(engine, [pictures.request("a", blue, temperature=0.0)])
    second, again = run(engine, [pictures.request(n, black, temperature=0.0) for n in ("b", "c")])
    together = run(engine, [pictures.request(n, p, temperature=0.0) for n, p in (("d", blue), ("e", black))])
    assert np.abs(first.log_probs - second.log_probs).max() > 1e-3
    for one, other in ((again, second), (together[0], first), (together[1], second)):
        same(one, other)
    for one in (first, second):
        assert pictures.gaps(one).max() < TOLERANCE


def test_a_group_prefills_once_and_each_image_goes_through_the_tower_once(
    pictures: Pictures, engine: Any
) -> None:
    passes = watch_tower(engine)
    prompt = pictures.prompt(5, "wide", "tall", "wide", length=60)
    sums(engine)
    made = run(engine, [pictures.request(f"{i}", prompt, seed=i) for i in range(8)])
    counted = sums(engine)
    length = len(prompt[0]) - isinstance(engine, NativeEngine)  # its newest token is decoded
    assert counted["perf/prefill_tokens"] == length
    assert counted["perf/shared_prefill_tokens"] == 7 * length
    assert passes == [tuple(pictures.images[name].grid) for name in ("wide", "tall")]
    assert len({tuple(one.token_ids) for one in made}) == 8


def watch_tower(engine: Any) -> list[tuple[int, ...]]:
    """Returns a list that gets the grid of every image that the engine's tower computes."""
    path = engine._decoder.path if isinstance(engine, NativeEngine) else engine._decoder._forward
    module = path.module if isinstance(engine, NativeEngine) else path._module
    seen: list[tuple[int, ...]] = []

    def note(_: Any, args: Any, given: dict[str, Any]) -> None:
        seen.extend(tuple(grid) for grid in given["grid_thw"].tolist())

    module.model.visual.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def test_a_second_turn_with_a_new_image_is_a_prefill_of_all(pictures: Pictures, engine: Any) -> None:
    """On a warm engine and on a new one, bit for bit; the first turn's image is not computed again."""
    prompt = pictures.prompt(6, "big", length=40)
    (first,) = run(engine, [pictures.request("1", prompt, 10)])
    more = pictures.prompt(7, "tall", length=3)
    longer = np.concatenate([prompt[0], first.token_ids, more[0]]), (*prompt[1], *more[1])
    passes = watch_tower(engine)
    sums(engine)
    (second,) = run(engine, [pictures.request("2", longer, seed=3)])
    assert passes == [pictures.images["tall"].grid]
    counted = sums(engine)
    assert counted["perf/prefill_tokens"] == len(longer[0]) - isinstance(engine, NativeEngine)
    assert "perf/shared_prefill_tokens" not in counted
    fresh = pictures.engine("native" if isinstance(engine, NativeEngine) else "transformers")
    (expected,) = run(fresh, [pictures.request("2", longer, seed=3)])
    fresh.close()
    same(second, expected)
    assert pictures.gaps(second).max() < TOLERANCE


def test_a_later_turn_goes_on_from_whole_chunks_with_the_same_images(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind the first difference is computed again; a token alike whose image is another is one."""
    monkeypatch.setattr("rondo.rollout.native.generic.PREFILL_CHUNK", 64)
    engine, fresh = (pictures.engine("native", max_context=512) for _ in range(2))
    ends = [pictures.prompt(seed, "big", length=70) for seed in (7, 8)]
    same_tokens = [pictures.prompt(3, *names, length=60) for names in (2 * ("small",), ("small", "other"))]
    same_tokens.append(pictures.prompt(3, "other", "small", length=60))
    first, in_second, in_first = (
        (np.concatenate([ids, ends[0][0]]), (*images, *ends[0][1])) for ids, images in same_tokens
    )
    at = np.flatnonzero(first[0] == IMAGE_TOKEN)
    assert at[:5].tolist() == [61, 62, 63, 64, 69]  # the first image is cut by a chunk's end
    (answer,) = run(engine, [pictures.request("1", first, 10)])
    later = np.concatenate([first[0], answer.token_ids, ends[1][0]]), (*first[1], *ends[1][1])
    whole = len(first[0]) // 64 * 64
    for name, prompt, shared in (("2", later, whole), ("3", in_second, 64), ("4", in_first, 0)):
        sums(engine)
        (made,) = run(engine, [pictures.request(name, prompt, seed=4)])
        counted = sums(engine)
        assert counted.get("perf/shared_prefill_tokens", 0) == shared
        assert counted["perf/prefill_tokens"] == len(prompt[0]) - 1 - shared
        same(made, run(fresh, [pictures.request(name, prompt, seed=4)])[0])
        fresh._decoder.weights_changed()  # it forgets all prompts
    engine.close()
    fresh.close()


@pytest.mark.parametrize("pictures", ["idefics3"], indirect=True)
def test_a_later_turn_goes_on_from_chunks_that_end_between_tiles(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 tokens, whatever they are: with the same images, and up to the first that differs."""
    monkeypatch.setattr("rondo.rollout.native.generic.PREFILL_CHUNK", 64)
    engine, fresh = (pictures.engine("native", max_context=512) for _ in range(2))
    ids, images = pictures.prompt(3, "small", "other", length=70)
    (answer,) = run(engine, [pictures.request("1", (ids, images), 10)])
    more = pictures.prompt(7, length=3)[0]
    later = np.concatenate([ids, answer.token_ids, more])
    second = int(np.flatnonzero(ids == IMAGE_TOKEN)[68])  # the first one's are 17 x 4
    other = (images[0], images[0])
    for name, shown, shared in (("2", images, len(ids)), ("3", other, second), ("4", images[::-1], 70)):
        sums(engine)
        (made,) = run(engine, [pictures.request(name, (later, shown), seed=4)])
        assert sums(engine).get("perf/shared_prefill_tokens", 0) == shared // 64 * 64
        same(made, run(fresh, [pictures.request(name, (later, shown), seed=4)])[0])
        fresh._decoder.weights_changed()  # it forgets all prompts
        assert pictures.gaps(made).max() < TOLERANCE
    engine.close()
    fresh.close()


def interrupted(
    engine: Any, make: Callable[[], GenerateRequest], between: Callable[[], Any]
) -> tuple[Completion, int]:
    """Has `between` run while a request is under way. Returns its completion, and how many tokens it had."""

    async def main() -> tuple[Completion, int]:
        held = await paused_in_flight(engine, lambda: [make()], 4)
        (sequence,) = engine._decoder.sequences()
        engine._decoder.progress()
        count = sequence.num_response
        await asyncio.to_thread(between)
        await engine.resume()
        return await held.tasks[0], count

    return asyncio.run(main())


def test_new_weights_amid_an_answer_are_a_prefix_under_new_weights(pictures: Pictures, engine: Any) -> None:
    """The tower's features are the new weights', too; files may have gone meanwhile."""
    prompt = pictures.prompt(8, "big", "tall")

    def make() -> GenerateRequest:
        return pictures.request("r", prompt, 60, seed=5)

    def change() -> None:
        with torch.no_grad():
            for parameter in pictures.model.parameters():
                parameter.mul_(1.02)
        engine.set_version(1)

    changed, count = interrupted(engine, make, change)
    assert changed.policy_versions.tolist() == [0] * count + [1] * (60 - count)
    assert pictures.gaps(changed)[count:].max() < 3 * TOLERANCE
    begun = dataclasses.replace(changed.part(0, count))
    (again,) = run(engine, [dataclasses.replace(make(), prefix=begun)])
    same(again, changed)


def test_what_sleep_gave_up_is_computed_again_from_what_was_read(pictures: Pictures, engine: Any) -> None:
    prompt = pictures.prompt(9, "big", "tall")

    def make() -> GenerateRequest:
        return pictures.request("r", prompt, 60, seed=5)

    (undisturbed,) = run(engine, [make()])

    def sleep() -> None:
        for image in prompt[1]:
            Path(image.ref.removeprefix("path:")).unlink()
        asyncio.run(engine.sleep())
        asyncio.run(engine.wake())

    woken, count = interrupted(engine, make, sleep)
    assert 4 <= count < 60
    same(woken, undisturbed)


def test_a_tiny_cache_gives_the_bits_of_a_large_one(pictures: Pictures) -> None:
    """Sequences lose their blocks and get them back, images included."""
    requests = [
        pictures.request(f"{i}", pictures.prompt(i, name, length=40 + i), 100, seed=i)
        for i, name in enumerate(("big", "wide", "tall", "small"))
    ]
    large = pictures.engine("native", max_context=192)
    block = large._decoder.path.block_nbytes
    small = pictures.engine("native", max_context=192, cache_bytes=6 * block)
    for ours, theirs in zip(run(small, requests), run(large, requests), strict=True):
        same(ours, theirs)
    assert sums(small)["rollout/preemptions"] > 0
    small.close()
    large.close()


@BOTH_WAYS
def test_a_prompt_of_several_chunks_whose_image_is_cut(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image's tokens may lie in two chunks of a prefill: each gets its part of the features."""
    monkeypatch.setattr("rondo.rollout.native.generic.PREFILL_CHUNK", 16)
    prompt = pictures.prompt(11, "big", "wide", "big", length=11)
    engine = pictures.engine("native")
    (made,) = run(engine, [pictures.request("a", prompt, temperature=0.0)])
    engine.close()
    assert made.token_ids.tolist() == pictures.generated(prompt, 20)
    assert pictures.gaps(made).max() < TOLERANCE


def test_what_stands_for_images_is_never_sampled(pictures: Pictures, engine: Any) -> None:
    """Not where it is likeliest, greedy or not; log-probs are those of the whole distribution."""
    with torch.no_grad():
        head = pictures.model.get_output_embeddings().weight
        for token in (IMAGE_TOKEN, VIDEO_TOKEN):
            head[token] = 3 * head[7]
        head[IMAGE_TOKEN] *= 2
    engine.set_version(1)
    prompt = pictures.prompt(12, "tall")
    greedy, *others = run(
        engine,
        [
            pictures.request("g", prompt, temperature=0.0),
            *(pictures.request(f"{i}", prompt, 40, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(6)),
        ],
    )
    ids = torch.from_numpy(np.concatenate([greedy.prompt_ids, greedy.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = pictures.model(input_ids=ids, use_cache=False, **pictures.given(ids, prompt[1])).logits[0]
    assert (logits[len(prompt[0]) - 1 : -1].argmax(-1) == IMAGE_TOKEN).any()  # it would have been
    assert greedy.token_ids.tolist() == pictures.generated(prompt, 20)
    for one in (greedy, *others):
        assert not set(one.token_ids.tolist()) & {IMAGE_TOKEN, VIDEO_TOKEN}
        assert pictures.gaps(one).max() < 6 * TOLERANCE  # logits are up to six times as large


def test_requests_that_are_refused(pictures: Pictures, engine: Any, tmp_path: Path) -> None:
    ids, images = pictures.prompt(13, "wide", "tall")
    wrong = {
        "its images have 0": (ids, ()),
        "its images have 5": (ids, images[:1]),
        r"^request 'x': \d+ tokens stand for images, and its images have": (ids[:-6], images),
        r"has 5 tokens, not 6": (ids, (dataclasses.replace(images[0], n_tokens=6), images[1])),
    }
    for message, prompt in wrong.items():
        with pytest.raises(RefusedRequestError, match=message):
            run(engine, [pictures.request("x", prompt)])
    begun = Completion(
        "x",
        ids,
        np.array([3, IMAGE_TOKEN], np.int32),
        np.zeros(2, np.float32),
        np.zeros(2, np.int32),
        "length",
    )
    with pytest.raises(RefusedRequestError, match="1 tokens stand for images"):
        run(engine, [pictures.request("x", (ids, images), prefix=begun)])


@pytest.mark.parametrize("kind", ENGINES)
def test_a_model_without_images_refuses_them(kind: str, pictures: Pictures) -> None:
    model, source = make("qwen3"), source_of("qwen3")
    spec = EngineSpec(kind, source, "float32", "cpu", CONTEXT, 4, 1)
    engine = build_engine(spec, persistent(model))
    with pytest.raises(RefusedRequestError, match="has 1 images: rondo gives no images to"):
        run(engine, [pictures.request("x", pictures.prompt(1, "wide"))])
    engine.close()


def test_an_image_that_is_gone_or_another_is_an_error_of_its_request(
    pictures: Pictures, engine: Any, tmp_path: Path
) -> None:
    drawing(tmp_path, "wide", (48, 16), "yellow")
    (tmp_path / "tall.png").unlink()
    square = dataclasses.replace(pictures.images["small"], grid=(1, 2, 8))
    requests = [
        pictures.request("changed", pictures.prompt(1, "wide")),
        pictures.request("gone", pictures.prompt(2, "tall")),
        pictures.request("well", pictures.prompt(3, "small")),
        pictures.request("grid", (pictures.prompt(3, "small")[0], (square,))),
    ]

    async def every() -> list[Any]:
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    changed, gone, well, grid = asyncio.run(every())
    for error, words in (
        (changed, "request 'changed': image .*wide.png is not the file that it was"),
        (gone, "request 'gone': image .*tall.png cannot be read: No such file"),
        (grid, "request 'grid': image .*small.png has the grid"),
    ):
        with pytest.raises(LostImageError, match=words):
            raise error
    assert pictures.gaps(well).max() < TOLERANCE


def test_cancelled_while_its_images_are_read(pictures: Pictures, engine: Any) -> None:
    async def main() -> Completion:
        task = asyncio.create_task(engine.generate(pictures.request("x", pictures.prompt(1, "wide"))))
        await asyncio.sleep(0)
        await engine.cancel("x")
        return await task

    made = asyncio.run(main())
    assert (made.finish_reason, len(made.token_ids)) == ("cancelled", 0)
    assert not engine._in_flight


@pytest.mark.parametrize("kind", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_an_engine_in_its_own_process_does_as_one_in_this(kind: str, pictures: Pictures) -> None:
    spec = EngineSpec(kind, pictures.source, "float32", "cpu", CONTEXT, 4, 1)
    here, there = pictures.engine(kind), start_engine(spec)
    try:
        there.begin(0)
        for name, tensor in persistent(pictures.model).items():
            there.receive(name, tensor)
        there.commit(0)
        prompts = [pictures.prompt(0), pictures.prompt(1, "big"), pictures.prompt(2, "tall", "wide")]
        requests = [pictures.request(f"{i}", one, seed=i) for i, one in enumerate(prompts)]
        for ours, theirs in zip(run(there, requests), run(here, requests), strict=True):
            same(ours, theirs)
            assert ours.images == theirs.images
        Path(prompts[2][1][0].ref.removeprefix("path:")).write_bytes(b"no image")
        lost = dataclasses.replace(pictures.images["other"], sha256="0" * 64)
        with pytest.raises(LostImageError, match="is not the file that it was"):
            run(there, [pictures.request("x", (pictures.prompt(3, "other")[0], (lost,)))])
        with pytest.raises(RefusedRequestError, match="its images have 0"):
            run(there, [pictures.request("x", (prompts[1][0], ()))])
    finally:
        there.close()
        here.close()
