"""Images in vLLM: it answers as transformers' own model does to the same pixels, for every family that it is
given images of; and it keeps nothing of an image for another one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rondo.core.errors import ConfigError, LostImageError, RefusedRequestError
from rondo.core.types import Completion
from rondo.models.names import weights_of
from rondo.rollout import start_engine
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.vllm.options import ENGINE
from rondo.weights.checksum import checksum
from tests.engines.conftest import TOLERANCE, no_children_left, paused_in_flight
from tests.models.families import IMAGE_TOKEN, VIDEO_TOKEN, WITH_IMAGES, make, of_images, persistent
from tests.models.test_images import drawing
from tests.rollout.test_images import Pictures, run

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-engines"),
    pytest.mark.timeout(900),
]

# One head of 32: vLLM has no smaller ones on a CPU. What its models read of a checkpoint's config is there.
_WIDE = {"num_attention_heads": 1, "num_key_value_heads": 1}
_SECTIONS = [8, 4, 4]
_OWN: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"rope_parameters": of_images(_SECTIONS)},
    "qwen3_vl": {"head_dim": 32, "rope_parameters": of_images([6, 5, 5], mrope_interleaved=True)},
    "qwen3_vl_moe": {
        "head_dim": 32,
        "rope_parameters": of_images([6, 5, 5], mrope_interleaved=True),
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
    },
    "glm4v_moe": {
        "head_dim": 32,
        "use_qk_norm": False,
        "rope_parameters": of_images(_SECTIONS, partial_rotary_factor=1.0),
    },
    "gemma3": {"head_dim": 32},
}
SEEING = tuple(family for family in WITH_IMAGES if family in ENGINE.seeing_models)


def pictures_of(family: str, folder: Path, **changes: Any) -> Pictures:
    return Pictures(family, folder, **{**_WIDE, **_OWN.get(family, {}), **changes})


def started(of: Pictures, tensor_parallel: int = 1, image_sample: str = "", **options: Any) -> Any:
    spec = EngineSpec(
        "vllm",
        of.source,
        "float32",
        "cpu",
        of.model.config.get_text_config().max_position_embeddings,
        8,
        1,
        tensor_parallel=tensor_parallel,
        image_sample=image_sample,
        options=options,
    )
    return start_engine(spec, bucket_bytes=1 << 16)


def send(engine: Any, model: Any, version: int) -> None:
    tensors = {name: tensor.detach() for name, tensor in weights_of(model)}
    engine.begin(version)
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.commit(version, {name: checksum(tensor) for name, tensor in tensors.items()})


@pytest.fixture
def serves(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Pictures]]]:
    """Starts an engine of a family with its weights; it is closed at the end, and leaves no process."""
    left = no_children_left({child.pid for child in psutil.Process().children(recursive=True)})
    engines = []

    def start(family: str, tensor_parallel: int = 1, **options: Any) -> tuple[Any, Pictures]:
        heads = {} if tensor_parallel == 1 else {"num_attention_heads": 2, "num_key_value_heads": 2}
        of = pictures_of(family, tmp_path, **heads)
        engines.append(started(of, tensor_parallel, **options))
        send(engines[-1], of.model, 1)
        return engines[-1], of

    yield start
    for engine in engines:
        engine.close()
    assert not left()


def prompts_of(of: Pictures) -> list[Any]:
    """Without images, with one and with two, of several sizes; where they begin and end a prompt."""
    return [
        of.prompt(0),
        of.prompt(1, "wide"),
        of.prompt(2, "tall", "small"),
        of.prompt(3, "big", "wide", length=1),
        of.prompt(4, "small", "small", length=0),
    ]


MIXTURES = 3e-5  # nats: experts' sums; processors differ (below 1e-5 with AVX-512, 1.4e-5 on an EPYC without)


def check(engine: Any, of: Pictures, name: str = "", most: float = TOLERANCE) -> None:
    prompts = prompts_of(of)
    greedy = [of.request(f"{name}g{i}", one, temperature=0.0) for i, one in enumerate(prompts)]
    sampled = [of.request(f"{name}s{i}", one, 30, seed=i, temperature=0.8) for i, one in enumerate(prompts)]
    made = run(engine, [*greedy, *sampled])
    for prompt, one in zip(prompts, made[: len(greedy)], strict=True):
        assert one.token_ids.tolist() == of.generated(prompt, 20)
        assert (one.prompt_ids.tolist(), one.images) == (prompt[0].tolist(), prompt[1])
        assert of.gaps(one).max() < most
    for one in made[len(greedy) :]:
        assert of.gaps(one, 0.8).max() < most


@pytest.mark.parametrize("family", SEEING)
def test_answers_are_those_of_transformers(family: str, serves: Callable[..., Any]) -> None:
    """Twice, with other weights: what it kept of images goes with the weights that made it."""
    engine, of = serves(family)
    most = MIXTURES if "moe" in family else TOLERANCE
    check(engine, of, "1", most)
    of.model = make(family, seed=1, **{**_WIDE, **_OWN.get(family, {})})
    send(engine, of.model, 2)
    check(engine, of, "2", most)


def test_an_image_may_be_read_in_pieces_and_by_two_workers(serves: Callable[..., Any]) -> None:
    engine, of = serves("qwen3_vl", tensor_parallel=2, max_num_batched_tokens=16)
    check(engine, of)


def test_equal_tokens_and_other_images_share_nothing(serves: Callable[..., Any]) -> None:
    """Not the keys and values of whole blocks either, also where a prefix is behind them."""
    engine, of = serves("qwen3_vl", block_size=32)
    blue, black = (of.prompt(1, name, length=70) for name in ("small", "other"))
    assert blue[0].tolist() == black[0].tolist()
    requests = [
        of.request(f"{i}", prompt, temperature=0.0) for i, prompt in enumerate((blue, black, blue, black))
    ]
    first, second, again, also = (made for one in requests for made in run(engine, [one]))
    assert np.abs(first.log_probs - second.log_probs).max() > 1e-3
    assert max(of.gaps(one).max() for one in (first, second, again, also)) < TOLERANCE
    part = dataclasses.replace(
        second,
        token_ids=second.token_ids[:7],
        log_probs=second.log_probs[:7],
        policy_versions=second.policy_versions[:7],
    )
    (rest,) = run(engine, [of.request("rest", black, temperature=0.0, prefix=part)])
    assert rest.token_ids.tolist() == second.token_ids.tolist()
    assert of.gaps(rest).max() < TOLERANCE


def test_what_stands_for_images_is_never_sampled(serves: Callable[..., Any]) -> None:
    engine, of = serves("qwen3_vl")
    with torch.no_grad():
        head = of.model.get_output_embeddings().weight
        for token in (IMAGE_TOKEN, VIDEO_TOKEN):
            head[token] = 3 * head[7]
        head[IMAGE_TOKEN] *= 2
    send(engine, of.model, 2)
    prompt = of.prompt(12, "tall")
    greedy, *others = run(
        engine,
        [
            of.request("g", prompt, temperature=0.0),
            *(of.request(f"{i}", prompt, 40, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(6)),
        ],
    )
    assert greedy.token_ids.tolist() == of.generated(prompt, 20)
    for one in (greedy, *others):
        assert not set(one.token_ids.tolist()) & {IMAGE_TOKEN, VIDEO_TOKEN}
        assert of.gaps(one).max() < 3 * TOLERANCE  # of larger logits


def test_faults_are_of_their_request(serves: Callable[..., Any], tmp_path: Path) -> None:
    """A file that is gone or another; tokens that are not the images'; cancelled while they are read; what
    waits while weights change.
    """
    engine, of = serves("qwen2_5_vl")
    ids, images = of.prompt(1, "wide", "tall")

    async def at_once() -> list[Any]:
        drawing(tmp_path, "big", (40, 40), "yellow")
        (tmp_path / "other.png").unlink()
        requests = [
            of.request("changed", of.prompt(1, "big")),
            of.request("gone", of.prompt(1, "other")),
            of.request("fewer", (ids, images[:1])),
            of.request("well", (ids, images)),
        ]
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    async def cancelled() -> Completion:
        await engine.pause()  # it makes no token, read or not
        task = asyncio.create_task(engine.generate(of.request("x", (ids, images))))
        await asyncio.sleep(0)
        await engine.cancel("x")
        await engine.resume()
        return await task

    async def waits() -> list[Completion]:
        held = await paused_in_flight(engine, lambda: [of.request("w", (ids, images), 60, seed=5)], 1)
        await asyncio.to_thread(send, engine, of.model, 2)
        await engine.resume()
        return list(await asyncio.gather(*held.tasks))

    changed, gone, fewer, well = asyncio.run(at_once())
    for error, kind, words in (
        (changed, LostImageError, "request 'changed': image .*big.png is not the file that it was"),
        (gone, LostImageError, "request 'gone': image .*other.png cannot be read"),
        (fewer, RefusedRequestError, "tokens stand for images, and its images have"),
    ):
        with pytest.raises(kind, match=words):
            raise error
    assert of.gaps(well).max() < TOLERANCE
    assert asyncio.run(cancelled()).finish_reason == "cancelled"
    (over,) = asyncio.run(waits())
    assert (len(over.token_ids), of.gaps(over).max() < TOLERANCE) == (60, True)


def test_an_environment_that_makes_other_pixels(serves: Callable[..., Any], tmp_path: Path) -> None:
    """Of the engine: it is said, and text is answered."""
    of = pictures_of("qwen2_5_vl", tmp_path)
    engine, _ = serves("qwen2_5_vl", image_sample=of.reader.sample)
    run(engine, [of.request("well", of.prompt(1, "wide"))])
    other, _ = serves("qwen2_5_vl", image_sample="0" * 64)
    run(other, [of.request("text", of.prompt(0))])
    with pytest.raises(RefusedRequestError, match="makes other pixels of them"):
        run(other, [of.request("x", of.prompt(1, "wide"))])


def test_images_of_a_family_that_it_does_not_show_right(serves: Callable[..., Any]) -> None:
    """Gemma's tokens of an image see those behind them, and vLLM's on a CPU do not. Text is right."""
    engine, of = serves("gemma3")
    (text,) = run(engine, [of.request("t", of.prompt(0), temperature=0.0)])
    assert text.token_ids.tolist() == of.generated(of.prompt(0), 20)
    with pytest.raises(RefusedRequestError, match="gives none to vllm for a gemma3 model"):
        run(engine, [of.request("x", of.prompt(1, "wide"))])


@pytest.mark.parametrize("family", ["qwen3_5", "glm46v"])
def test_families_that_it_does_not_serve(family: str, tmp_path: Path) -> None:
    of = pictures_of(family, tmp_path)
    with pytest.raises(ConfigError, match=f"a {family} model has not been seen to be the same model in vLLM"):
        ENGINE.check_model(of.model.config, "cpu")


def test_every_weight_arrives(tmp_path: Path) -> None:
    """What is sent is what transformers holds, buffers included."""
    for family in SEEING:
        model = pictures_of(family, tmp_path).model
        assert set(dict(weights_of(model))) == set(persistent(model))
