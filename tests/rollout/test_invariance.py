"""A request gives the same bits whoever shares the batch and whenever it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rondo.core.types import Completion, GenerateRequest
from rondo.rollout import NativeEngine
from tests.models import families
from tests.rollout.conftest import build, make_engine, prompt, request, run

LENGTHS = (1, 2, 7, 16, 33, 63, 64, 66)
SETTINGS = ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1})


def requests() -> list[GenerateRequest]:
    """Groups of prompts around the widths at which something could change, and of all kinds of sampling."""
    return [
        request(
            f"{g}.{i}", prompt(n), 5 + 6 * i, seed=100 * g + i, affinity=f"group {g}", **SETTINGS[(g + i) % 6]
        )
        for g, n in enumerate(LENGTHS)
        for i in range(3)
    ]


def same(a: Completion, b: Completion) -> bool:
    return (
        np.array_equal(a.token_ids, b.token_ids)
        and a.log_probs.tobytes() == b.log_probs.tobytes()
        and a.finish_reason == b.finish_reason
    )


def run_with_delays(
    engine: NativeEngine, chosen: Sequence[GenerateRequest], ticks: Sequence[int]
) -> list[Completion]:
    """ticks[i]: how many turns of the event loop request i waits before it is sent."""

    async def one(item: GenerateRequest, delay: int) -> Completion:
        for _ in range(delay):
            await asyncio.sleep(0.001)
        return await engine.generate(item)

    async def all_requests() -> list[Completion]:
        return list(await asyncio.gather(*(one(r, t) for r, t in zip(chosen, ticks, strict=True))))

    return asyncio.run(all_requests())


@pytest.fixture(scope="module")
def engines(decode: str) -> Iterator[tuple[list[NativeEngine], dict[str, Completion]]]:
    """Engines with different numbers of slots, and every request's completion when it is alone."""
    model = build("qwen3")
    engines = [make_engine(model, decode=decode, max_concurrent=n) for n in (1, 3, 24)]
    single = make_engine(model, decode=decode, max_concurrent=5)
    alone = {r.request_id: run(single, [r])[0] for r in requests()}
    yield engines, alone
    for engine in (*engines, single):
        engine.close()


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_schedules(
    engines: tuple[list[NativeEngine], dict[str, Completion]], data: st.DataObject
) -> None:
    engine = data.draw(st.sampled_from(engines[0]))
    chosen = data.draw(
        st.lists(st.sampled_from(requests()), min_size=1, max_size=16, unique_by=lambda r: r.request_id)
    )
    ticks = data.draw(st.lists(st.sampled_from((0, 0, 1, 3)), min_size=len(chosen), max_size=len(chosen)))
    for completion in run_with_delays(engine, chosen, ticks):
        assert same(completion, engines[1][completion.request_id]), completion.request_id


def test_all_at_once(engines: tuple[list[NativeEngine], dict[str, Completion]]) -> None:
    for engine in engines[0][1:]:
        for completion in run(engine, reversed(requests())):
            assert same(completion, engines[1][completion.request_id]), completion.request_id


def test_two_threads_give_the_bits_of_one_when_compiled() -> None:
    """By construction: every row is computed by one thread, in one order."""
    model = build("qwen3")
    one, two = (make_engine(model, decode="compiled", max_concurrent=24, threads=n) for n in (1, 2))
    assert all(same(a, b) for a, b in zip(run(one, requests()), run(two, requests()), strict=True))
    one.close()
    two.close()


@pytest.mark.parametrize("path", ["generic", "lean"])
def test_batch_mates_do_not_matter_with_two_threads(path: str) -> None:
    engine = make_engine(build("qwen3"), decode=path, max_concurrent=24, threads=2)
    some = [r for r in requests() if r.sampling.max_tokens < 6]
    together = run(engine, some)
    for i in (0, 7):
        assert same(together[i], run(engine, [some[i]])[0])
    engine.close()


def test_a_prefix_goes_on_as_if_uninterrupted(decode: str) -> None:
    engine = make_engine(build("qwen3"), decode=decode)
    whole = run(engine, [request("a", prompt(9), 40, seed=4)])[0]
    for cut in (1, 17, 39):
        part = run(engine, [request("p", prompt(9), cut, seed=4)])[0]
        rest = run(engine, [request("q", prompt(9), 40, seed=4, prefix=part)])[0]
        np.testing.assert_array_equal(rest.token_ids, whole.token_ids)
        np.testing.assert_array_equal(rest.log_probs[:cut], whole.log_probs[:cut])
        if decode == "compiled":  # prefill and decode are the same arithmetic there
            assert same(rest, whole)
        np.testing.assert_allclose(rest.log_probs, whole.log_probs, atol=1e-5)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_do_not_show_who_else_they_had(family: str, threads: int) -> None:
    """How many tokens an expert gets is up to all requests in the batch."""
    model = families.make(family)
    engine = make_engine(model, threads=threads)
    chosen = [request(f"{i}", prompt(5 + 7 * i) % families.VOCAB, 12, seed=i) for i in range(8)]
    for one, together in zip(chosen, run(engine, chosen), strict=True):
        assert same(together, run(engine, [one])[0]), one.request_id
    engine.close()
