"""Too small a cache: who gives its blocks back goes on with the bits that it would have had."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rondo.core.errors import ConfigError, RolloutError
from rondo.core.types import Completion, GenerateRequest
from rondo.rollout import NativeEngine
from rondo.rollout.native import cache
from rondo.rollout.native.blocks import BLOCK
from rondo.rollout.native.cache import block_bytes, count_blocks, layer_shapes
from tests.rollout.conftest import CONFIGS, Hold, build, make_engine, prompt, request, run
from tests.rollout.test_engine import load
from tests.rollout.test_invariance import same

CONTEXT = 192
BYTES = block_bytes(layer_shapes(CONFIGS["qwen3"]()), torch.float32)  # of a block


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("qwen3")


def with_blocks(model: torch.nn.Module, decode: str, num_blocks: int, **settings: object) -> NativeEngine:
    spare = 0 if decode == "compiled" else 1
    settings = {"max_concurrent": 6, "max_context": CONTEXT} | settings
    return make_engine(model, decode=decode, cache_bytes=(num_blocks + spare) * BYTES, **settings)


def long_requests() -> list[GenerateRequest]:
    """Around the edges of blocks, two of one prompt, most of them until max_context."""
    lengths = ((70, 40), (70, 120), (128, 60), (63, 125))
    return [request(f"{i}", prompt(n), new, seed=i) for i, (n, new) in enumerate(lengths)]


def preemptions(engine: NativeEngine) -> float:
    return asyncio.run(engine.stats()).sums.get("rollout/preemptions", 0.0)


def run_in_order(engine: NativeEngine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """All are there before the first begins."""

    async def all_requests() -> list[Completion]:
        await engine.pause()
        tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
        await asyncio.sleep(0)
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    return asyncio.run(all_requests())


@pytest.mark.slow
def test_a_tiny_cache_gives_the_bits_of_a_large_one(model: torch.nn.Module, decode: str) -> None:
    large, tiny = with_blocks(model, decode, 30), with_blocks(model, decode, 4)
    whole = run_in_order(large, long_requests())
    cut = run_in_order(tiny, long_requests())
    assert all(same(a, b) for a, b in zip(whole, cut, strict=True))
    assert preemptions(large) == 0
    assert preemptions(tiny) > 0
    assert tiny._decoder.scheduler.pool.num_free == 4
    large.close()
    tiny.close()


def test_two_threads_share_beginnings_that_one_of_them_fills(model: torch.nn.Module) -> None:
    """The second prompt reads, in its prefill, blocks that the first one's prefill writes."""
    prompts = [np.concatenate([prompt(140), prompt(30 + i, i)]) for i in range(4)]
    requests = [request(f"{i}", ids, 10, seed=i) for i, ids in enumerate(prompts)]
    one, two = (with_blocks(model, "compiled", 30, threads=n) for n in (1, 2))
    outs = run_in_order(two, requests)
    assert asyncio.run(two.stats()).sums["perf/shared_prefill_tokens"] == 3 * 128
    assert all(same(a, run(one, [b])[0]) for a, b in zip(outs, requests, strict=True))
    one.close()
    two.close()


def test_a_branch_computes_no_whole_block_of_its_parents(model: torch.nn.Module) -> None:
    """Of 159 tokens before a fork's newest, 31 are in no whole block; once they are computed, for one branch,
    the others copy them. The bits are those without a parent."""
    engine, fresh = (with_blocks(model, "compiled", 30) for _ in range(2))
    (parent,) = run(engine, [request("parent", prompt(70), 110)])
    asyncio.run(engine.stats())
    branches = [
        dataclasses.replace(request(f"{i}", prompt(70), 110, seed=1 + i), prefix=parent.part(0, 90))
        for i in range(4)
    ]
    outs = run_in_order(engine, branches)
    counted = asyncio.run(engine.stats()).sums
    assert counted["perf/prefill_tokens"] == 159 - 128
    assert counted["perf/shared_prefill_tokens"] == 128 + 3 * 159
    for out, one in zip(outs, branches, strict=True):
        assert same(out, run(fresh, [one])[0])
        np.testing.assert_array_equal(out.token_ids[:90], parent.token_ids[:90])
        assert out.token_ids[90:].tolist() != parent.token_ids[90:].tolist()
    engine.close()
    fresh.close()


@pytest.mark.slow
def test_new_weights_cancels_and_sleep_while_some_wait_for_blocks(decode: str) -> None:
    """Before the update a request has the old weights' tokens, and goes on from them as a prefix would."""
    old, new = build("qwen3", 1), build("qwen3", 2)
    requests = [request(f"{i}", prompt(60, i), 110, seed=i) for i in range(4)]

    async def main(engine: NativeEngine) -> list[Completion]:
        hold = Hold(engine, 80)
        await engine.pause()
        tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
        await asyncio.sleep(0)
        await engine.resume()
        await hold.reached()
        await engine.pause()
        await engine.sleep()
        await engine.wake()
        load(engine, new, 2)
        await engine.cancel("3")
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    engines = [with_blocks(old, decode, n, parameters=None) for n in (30, 5)]
    reference = make_engine(old, decode=decode, max_context=CONTEXT)
    after = make_engine(new, decode=decode, max_context=CONTEXT)
    wholly_old = run(reference, requests)
    for engine in engines:
        load(engine, old, 1)
        outs = asyncio.run(main(engine))
        cuts = [int((out.policy_versions == 1).sum()) for out in outs]
        assert max(cuts) >= 80
        parts = [out.part(0, cut) for out, cut in zip(outs, cuts, strict=True)]
        for part, cut, whole in zip(parts, cuts, wholly_old, strict=True):
            assert part.token_ids.tolist() == whole.token_ids[:cut].tolist()
            assert part.log_probs.tobytes() == whole.log_probs[:cut].tobytes()
        assert [out.finish_reason for out in outs] == ["length"] * 3 + ["cancelled"]
        assert len(outs[3].token_ids) == cuts[3]
        again = [
            request(one.request_id, one.token_ids, 110, seed=one.seed, prefix=part)
            for one, part in zip(requests, parts, strict=True)
        ]
        assert all(same(a, b) for a, b in zip(outs[:3], run(after, again[:3]), strict=True))
    assert preemptions(engines[1]) > 0
    for engine in (*engines, reference, after):
        engine.close()


def test_sleep_alone_changes_no_bit(model: torch.nn.Module, decode: str) -> None:
    engine = with_blocks(model, decode, 30)
    requests = long_requests()[:3]
    whole = run_in_order(engine, requests)

    async def main() -> list[Completion]:
        hold = Hold(engine, 30)
        tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
        await hold.reached()
        await engine.pause()
        await engine.sleep()
        await engine.wake()
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    assert all(same(a, b) for a, b in zip(whole, asyncio.run(main()), strict=True))
    engine.close()


def test_tokens_are_told_once_whoever_was_preempted(model: torch.nn.Module) -> None:
    engine = with_blocks(model, "compiled", 4)
    told: dict[str, list[int]] = {one.request_id: [] for one in long_requests()}

    async def main() -> list[Completion]:
        return list(
            await asyncio.gather(
                *(
                    engine.generate(one, lambda part: told[part.request_id].extend(part.token_ids.tolist()))
                    for one in long_requests()
                )
            )
        )

    for out in asyncio.run(main()):
        assert told[out.request_id] == out.token_ids.tolist()
    assert preemptions(engine) > 0
    engine.close()


def test_a_cache_below_one_request_of_full_length_is_refused(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = 3 * BYTES
    with pytest.raises(ConfigError, match=rf"rollout.engine.cache_bytes={least - 1} .* at least {least}"):
        make_engine(model, max_context=CONTEXT, cache_bytes=least - 1)
    engine = make_engine(model, max_context=CONTEXT, cache_bytes=least)
    assert asyncio.run(engine.stats()).maxima["rollout/cache_bytes"] == least
    assert len(run(engine, [request("longest", prompt(CONTEXT - 9), 9)])[0].token_ids) == 9
    with pytest.raises(RolloutError, match=f"exceed max_context {CONTEXT}"):
        run(engine, [request("longer", prompt(CONTEXT - 9), 10)])
    engine.close()
    monkeypatch.setattr(cache, "cache_share", lambda _: (int(0.4 * least), least))
    with pytest.raises(ConfigError, match=rf"take {least} bytes, .* 40% of the {least} bytes"):
        make_engine(model, max_context=CONTEXT)


@pytest.mark.parametrize(
    ("free", "limit", "spare", "blocks"),
    [
        (10**9, None, 0, 15),  # all that three slots could need
        (10**9, None, 1, 15),
        (25_000, None, 0, 10),  # 40 % of what is free
        (25_000, None, 1, 9),
        (0, 7_999, 1, 6),  # what was asked for, whatever is free
        (0, 90_000, 0, 90),
    ],
)
def test_how_many_blocks(
    monkeypatch: pytest.MonkeyPatch, free: int, limit: int | None, spare: int, blocks: int
) -> None:
    monkeypatch.setattr(cache, "cache_share", lambda _: (int(0.4 * free), free))
    sizes = {"spare": spare, "max_concurrent": 3, "max_context": 4 * BLOCK + 1}
    assert count_blocks(1000, **sizes, limit=limit, device=torch.device("cpu")) == blocks
