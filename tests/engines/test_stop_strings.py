"""Stop strings on every engine: the tokens up to the first after which the text has one, and no others."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from rondo.core.errors import RefusedRequestError
from rondo.core.types import Completion, GenerateRequest
from tests.byte_tokenizers import ends_after, late_stop, tokenizer_of_200
from tests.engines.conftest import IN_PROCESS, LONG, Bench, Collected, paused_in_flight, prompt, request

pytestmark = pytest.mark.timeout(900)
TOKENIZER = tokenizer_of_200()
LENGTH = 60


def same_start(out: Completion, free: Completion, count: int, bench: Bench) -> None:
    """The same tokens, and the same bits where an engine has the same bits in any company."""
    np.testing.assert_array_equal(out.token_ids, free.token_ids[:count])
    np.testing.assert_allclose(
        out.log_probs, free.log_probs[:count], rtol=0, atol=0 if bench.kind.startswith("native") else 1e-5
    )
    np.testing.assert_array_equal(out.policy_versions, free.policy_versions[:count])


def test_a_response_ends_at_a_stop_string(served: Bench) -> None:
    free = served.run(request(prompt(9, i), LENGTH, seed=i) for i in range(12))
    stops = [late_stop(TOKENIZER, one.token_ids, 1 + i % 6) for i, one in enumerate(free)]
    counts = [ends_after(TOKENIZER, one.token_ids, [stop]) for one, stop in zip(free, stops, strict=True)]
    requests = [
        request(prompt(9, i), LENGTH, seed=i, stop=("nobody says this", stop)) for i, stop in enumerate(stops)
    ]
    seen = [Collected() for _ in requests]

    async def all_requests() -> list[Completion]:
        calls = (served.engine.generate(one, got) for one, got in zip(requests, seen, strict=True))
        return list(await asyncio.gather(*calls))

    for out, whole, count, got in zip(asyncio.run(all_requests()), free, counts, seen, strict=True):
        assert count is not None
        same_start(out, whole, count, served)
        assert out.finish_reason == "stop"
        assert got.token_ids == out.token_ids.tolist()[: len(got.token_ids)]
    assert len({len(stop) for stop in stops}) == 6
    again = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_tokens=count))
        for one, count in zip(requests, counts, strict=True)
        if count is not None
    ]
    assert {out.finish_reason for out in served.run(again)} == {
        "stop"
    }  # also with the last token that it may have


def test_a_stop_string_may_begin_in_the_prefix(served: Bench) -> None:
    (free,) = served.run([request(prompt(7), LENGTH, seed=3)])
    stop = late_stop(TOKENIZER, free.token_ids, 5)
    count = ends_after(TOKENIZER, free.token_ids, [stop])
    assert count is not None

    def after(length: int, **fields: int) -> GenerateRequest:
        prefix = free.part(0, length)
        return request(prompt(7), LENGTH, seed=3, stop=(stop,), prefix=prefix)

    for out in served.run(after(length) for length in (1, count - 2, count - 1, count)):
        same_start(out, free, count, served)
        assert out.finish_reason == "stop"
    served.stats()
    served.run([after(count)])
    assert not served.stats().get("perf/decoded_tokens")  # it was whole


def long(bench: Bench) -> int:
    """Returns how many tokens are so many that a pause comes before their end."""
    return 150 if bench.kind == "transformers" else LONG


def test_new_weights_in_between_change_nothing_of_the_rule(served: Bench) -> None:
    most = long(served)
    free = served.run(request(prompt(6, i), most, seed=i) for i in range(3))
    stops = [late_stop(TOKENIZER, one.token_ids, 2) for one in free]

    def make() -> list[GenerateRequest]:
        return [request(prompt(6, i), most, seed=i, stop=(stop,)) for i, stop in enumerate(stops)]

    async def main() -> list[Completion]:
        flight = await paused_in_flight(served.engine, make, 4)
        await asyncio.to_thread(served.load, served.other)
        await served.engine.resume()
        return list(await asyncio.gather(*flight.tasks))

    for out, stop in zip(asyncio.run(main()), stops, strict=True):
        assert len(set(out.policy_versions)) == 2
        count = ends_after(TOKENIZER, out.token_ids, [stop])
        assert (out.finish_reason, len(out.token_ids)) == (("stop", count) if count else ("length", most))
        assert np.isfinite(out.log_probs).all()


def test_a_cancelled_request_goes_on_to_the_same_end(served: Bench) -> None:
    most = long(served)
    (free,) = served.run([request(prompt(8), most, seed=5)])
    stop = late_stop(TOKENIZER, free.token_ids, 2)
    count = ends_after(TOKENIZER, free.token_ids, [stop])
    assert count is not None
    assert count > LENGTH

    async def main() -> Completion:
        make = lambda: [request(prompt(8), most, seed=5, stop=(stop,))]  # noqa: E731
        flight = await paused_in_flight(served.engine, make, 4)
        await served.engine.cancel(flight.requests[0].request_id)
        await served.engine.resume()
        partial = await flight.tasks[0]
        assert partial.finish_reason == "cancelled"
        return await served.engine.generate(request(prompt(8), most, seed=5, stop=(stop,), prefix=partial))

    out = asyncio.run(main())
    assert out.finish_reason == "stop"
    if served.kind in (*IN_PROCESS, "native-process"):
        same_start(out, free, count, served)
    assert len(out.token_ids) == ends_after(TOKENIZER, out.token_ids, [stop])


@pytest.mark.parametrize("stop", [("",), ("a", 3)])
def test_what_is_no_stop_string_is_refused(served: Bench, stop: tuple[str, ...]) -> None:
    with pytest.raises(RefusedRequestError, match="each must be text, and not empty"):
        served.run([request(prompt(4), 3, stop=stop)])
    (out,) = served.run([request(prompt(4), 3)])
    assert len(out.token_ids) == 3
