"""The engine's life: slots, cancellation, pauses, deadlines, weights, sleep, errors."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.core.errors import RolloutError, WeightSyncError
from rondo.core.types import Completion
from rondo.rollout import NativeEngine
from rondo.rollout import decoder as decoder_module
from rondo.rollout import requests as requests_module
from rondo.rollout.in_process import as_torch
from rondo.rollout.native.compiled import CompiledPath
from tests.messages import full_text
from tests.rollout.conftest import (
    CONFIGS,
    Hold,
    build,
    make_engine,
    own_engine,
    prompt,
    request,
    run,
    true_log_probs,
    weights,
)

LONG = 900


@pytest.fixture
def model() -> torch.nn.Module:
    return build("qwen3")


def own_storage(model: torch.nn.Module, version: int, **settings: Any) -> NativeEngine:
    engine = make_engine(model, parameters=None, **settings)
    load(engine, model, version)
    return engine


def load(engine: NativeEngine, model: torch.nn.Module, version: int) -> None:
    engine.begin(version)
    for name, tensor in weights(model).items():
        engine.receive(name, tensor)
    engine.commit(version)


def test_more_requests_than_slots(model: torch.nn.Module, decode: str) -> None:
    engine = make_engine(model, decode=decode, max_concurrent=3)
    requests = [request(str(i), prompt(4 + i % 5, i % 2), 3 + i % 9, seed=i) for i in range(20)]
    outs = run(engine, requests)
    assert [o.request_id for o in outs] == [r.request_id for r in requests]
    assert [len(o.token_ids) for o in outs] == [r.sampling.max_tokens for r in requests]
    for out in outs:
        np.testing.assert_allclose(out.log_probs, true_log_probs(model, out), atol=1e-5)
    stats = asyncio.run(engine.stats()).values()
    assert stats["perf/decoded_tokens"] == sum(len(o.token_ids) for o in outs)
    assert stats["perf/batch_occupancy"] == pytest.approx(
        stats["perf/decoded_tokens"] / stats["perf/decode_steps"]
    )
    assert 2 < stats["perf/batch_occupancy"] <= 3
    assert "perf/decode_steps" not in asyncio.run(engine.stats()).sums
    engine.close()


def test_a_group_is_prefilled_once(model: torch.nn.Module) -> None:
    engine = make_engine(model)

    async def main() -> dict[str, float]:
        await engine.pause()  # so that the first is not done before the last is there
        group = [request(str(i), prompt(20), 4, seed=i, affinity="g") for i in range(8)]
        tasks = [asyncio.create_task(engine.generate(one)) for one in group]
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*tasks)
        return (await engine.stats()).sums

    stats = asyncio.run(main())
    assert stats["perf/prefill_tokens"] == 19
    assert stats["perf/shared_prefill_tokens"] == 7 * 19
    engine.close()


def test_cancelled_task_frees_its_slot(model: torch.nn.Module) -> None:
    engine = make_engine(model, max_concurrent=1, max_context=1000)

    async def main() -> Completion:
        hold = Hold(engine, 5)
        long = asyncio.create_task(engine.generate(request("long", prompt(3), LONG)))
        waiting = asyncio.create_task(engine.generate(request("waiting", prompt(3), LONG)))
        await hold.reached()
        long.cancel()
        waiting.cancel()
        await asyncio.wait([long, waiting])
        hold.release()
        short = await engine.generate(request("short", prompt(3), 2, seed=1))
        assert long.cancelled()
        assert waiting.cancelled()
        return short

    assert len(asyncio.run(main()).token_ids) == 2
    assert not engine._decoder.scheduler.sequences()
    engine.close()


def test_cancel_returns_the_partial_completion(model: torch.nn.Module) -> None:
    engine = make_engine(model, max_concurrent=1, max_context=1000)
    whole = run(engine, [request("w", prompt(3), LONG, seed=5)])[0]

    async def main() -> tuple[Completion, Completion]:
        hold = Hold(engine, 5)
        running = asyncio.create_task(engine.generate(request("a", prompt(3), LONG, seed=5)))
        waiting = asyncio.create_task(engine.generate(request("b", prompt(3), LONG)))
        await hold.reached()
        await engine.pause()
        await engine.cancel("a")  # works while paused, too
        await engine.cancel("b")
        await engine.cancel("nobody")
        results = await running, await waiting
        await engine.resume()
        return results

    partial, nothing = asyncio.run(main())
    n = len(partial.token_ids)
    assert partial.finish_reason == nothing.finish_reason == "cancelled"
    assert 5 <= n < LONG
    assert len(partial.log_probs) == len(partial.policy_versions) == n
    np.testing.assert_array_equal(partial.token_ids, whole.token_ids[:n])
    assert len(nothing.token_ids) == 0
    rest = run(engine, [request("a2", prompt(3), LONG, seed=5, prefix=partial)])[0]
    np.testing.assert_array_equal(rest.token_ids, whole.token_ids)
    engine.close()


def test_finished_prefix_comes_back_at_once(model: torch.nn.Module) -> None:
    engine = make_engine(model)
    done = run(engine, [request("a", prompt(3), 6)])[0]
    stop = int(done.token_ids[-1])
    again = run(engine, [
        request("b", prompt(3), 6, prefix=done),
        request("c", prompt(3), 9, prefix=done, stop_token_ids=(stop,)),
    ])  # fmt: skip
    assert [c.finish_reason for c in again] == ["length", "stop"]
    assert all(np.array_equal(c.token_ids, done.token_ids) for c in again)
    engine.close()


def test_deadline(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stands still until the running request has five tokens."""
    engine = make_engine(model, max_concurrent=1, max_context=1000)

    def clock() -> float:
        scheduler = engine._decoder.scheduler
        made = {one.request.request_id: scheduler.table.indices[slot] for slot, one in scheduler.running}
        return 1.0 if made.get("a", 0) >= 5 else 0.0

    for module in (requests_module, decoder_module):
        with_clock = SimpleNamespace(monotonic=clock, thread_time=time.thread_time)
        monkeypatch.setattr(module, "time", with_clock)
    out = run(engine, [
        request("a", prompt(3), LONG, deadline_seconds=0.02), request("b", prompt(3), 5),
        request("c", prompt(3), LONG, deadline_seconds=0.0),
    ])  # fmt: skip
    assert [c.finish_reason for c in out] == ["deadline", "length", "deadline"]
    assert [len(c.token_ids) for c in out] == [5, 5, 0]
    engine.close()


def test_versions_per_token_and_new_weights_in_mid_request(decode: str) -> None:
    """Tokens after a commit are the new weights' given the old tokens: nothing stale is read."""
    old, new = build("qwen3", 1), build("qwen3", 2)
    engine = own_storage(old, 3, decode=decode, max_context=500)
    n = 30

    async def main() -> list[Completion]:
        hold = Hold(engine, 4)
        await engine.pause()  # until all are there
        tasks = [
            asyncio.create_task(engine.generate(request(str(i), prompt(9), n, seed=i, affinity="g")))
            for i in range(3)
        ]
        await asyncio.sleep(0)
        await engine.resume()
        await hold.reached()
        with pytest.raises(WeightSyncError, match="pause"):
            engine.begin(4)
        await engine.pause()
        load(engine, new, 4)
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    for out in asyncio.run(main()):
        cut = int((out.policy_versions == 3).sum())
        assert 0 < cut < n
        assert out.policy_versions.tolist() == [3] * cut + [4] * (n - cut)
        np.testing.assert_allclose(out.log_probs[:cut], true_log_probs(old, out)[:cut], atol=1e-5)
        np.testing.assert_allclose(out.log_probs[cut:], true_log_probs(new, out)[cut:], atol=1e-5)
    engine.close()


def test_shared_storage_follows_the_trainer(decode: str) -> None:
    model, other = build("qwen3", 1), build("qwen3", 2)
    engine = make_engine(model, decode=decode)
    own = engine.parameters()
    for name, tensor in weights(model).items():
        assert own[name].data_ptr() == tensor.data_ptr()
    assert own["lm_head.weight"].data_ptr() == own["model.embed_tokens.weight"].data_ptr()
    item = request("a", prompt(7), 12, affinity="g")
    before = run(engine, [item])[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(other.get_parameter(name))
    engine.set_version(1)
    after = run(engine, [item])[0]
    assert set(before.policy_versions) == {0}
    assert set(after.policy_versions) == {1}
    assert not np.array_equal(before.token_ids, after.token_ids)
    np.testing.assert_allclose(after.log_probs, true_log_probs(other, after), atol=1e-5)
    with pytest.raises(WeightSyncError, match="in place"):
        engine.begin(2)
    engine.close()


def test_sleep_gives_the_packed_weights_back(model: torch.nn.Module) -> None:
    """Until the next token, which is what it would be without."""
    engine = make_engine(model, decode="compiled")
    assert isinstance(engine._decoder.path, CompiledPath)
    packed = [product.packed for product in engine._decoder.path._products]
    item = request("a", prompt(20), 12)
    before, full = run(engine, [item])[0], [one.clone() for one in packed]

    async def sleep() -> None:
        await engine.sleep()
        assert not any(bool(one.any()) for one in packed)
        await engine.wake()

    asyncio.run(sleep())
    after = run(engine, [item])[0]
    assert all(map(torch.equal, packed, full))
    np.testing.assert_array_equal(after.token_ids, before.token_ids)
    np.testing.assert_array_equal(after.log_probs, before.log_probs)
    engine.close()


def test_weights_that_do_not_fit_are_named(model: torch.nn.Module) -> None:
    engine = make_engine(model, parameters=None)
    with pytest.raises(RolloutError, match="no weights yet"):
        run(engine, [request("a", prompt(3))])
    with pytest.raises(WeightSyncError, match="own storage"):
        engine.set_version(1)
    with pytest.raises(WeightSyncError, match="outside begin"):
        engine.receive("lm_head.weight", torch.zeros(1))
    with pytest.raises(WeightSyncError, match="without begin"):
        engine.commit(1)
    engine.begin(1)
    with pytest.raises(WeightSyncError, match=full_text("'model.layers.0.self_attn.q_pro.weight'")):
        engine.receive("model.layers.0.self_attn.q_pro.weight", torch.zeros(1))
    with pytest.raises(WeightSyncError, match=full_text("has shape (3,), the model wants (64,)")):
        engine.receive("model.norm.weight", torch.zeros(3))
    engine.receive("model.norm.weight", torch.zeros(64))
    with pytest.raises(WeightSyncError, match=full_text("commit(1): 23 of 24 tensors")):
        engine.commit(1)
    load(engine, model, 2)
    assert set(run(engine, [request("a", prompt(3))])[0].policy_versions) == {2}
    engine.close()


def test_parameters_to_share_must_fit(model: torch.nn.Module) -> None:
    good = weights(model)
    with pytest.raises(WeightSyncError, match=r"lack 'model\.norm\.weight'"):
        make_engine(model, parameters={k: v for k, v in good.items() if k != "model.norm.weight"})
    with pytest.raises(WeightSyncError, match="no parameter 'value_head'"):
        make_engine(model, parameters=good | {"value_head": torch.zeros(1)})
    with pytest.raises(WeightSyncError, match="has shape"):
        make_engine(model, parameters=good | {"model.norm.weight": torch.zeros(5)})
    with pytest.raises(WeightSyncError, match=r"wants torch\.bfloat16"):
        make_engine(model, dtype="bfloat16")


def test_sleep_and_wake(model: torch.nn.Module, decode: str) -> None:
    engine = make_engine(model, decode=decode, max_context=600)
    item = request("a", prompt(5), 40, seed=2)
    whole = run(engine, [item])[0]

    async def main() -> Completion:
        hold = Hold(engine, 3)
        task = asyncio.create_task(engine.generate(item))
        await hold.reached()
        with pytest.raises(WeightSyncError, match="sleep: 1 requests are in flight"):
            await engine.sleep()
        await engine.pause()
        assert not task.done()
        await engine.sleep()
        assert (await engine.stats()).maxima["rollout/cache_bytes"] == 0
        with pytest.raises(RolloutError, match="asleep"):
            await engine.generate(request("b", prompt(5)))
        await engine.resume()  # still asleep: nothing may run
        await engine.stats()  # the decode thread has looked
        await engine.wake()
        return await task

    out = asyncio.run(main())
    np.testing.assert_array_equal(out.token_ids, whole.token_ids)
    assert asyncio.run(engine.stats()).maxima["rollout/cache_bytes"] > 0
    engine.close()


def test_an_error_while_decoding_reaches_everybody(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, max_concurrent=2)
    path = engine._decoder.path

    def broken(*_: Any) -> None:
        raise ValueError("no such luck")

    async def main() -> list[Any]:
        return await asyncio.gather(
            *(engine.generate(request(str(i), prompt(4))) for i in range(5)), return_exceptions=True
        )

    with monkeypatch.context() as patch:
        patch.setattr(path, "decode", broken)
        errors = asyncio.run(main())
    assert all(isinstance(e, RolloutError) and "no such luck" in str(e) for e in errors)
    assert isinstance(errors[0].__cause__, ValueError)
    assert len(run(engine, [request("later", prompt(4))])[0].token_ids) == 12
    engine.close()


def test_not_finite_logits_are_an_error(decode: str) -> None:
    model = build("qwen3")
    engine = make_engine(model, decode=decode)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = float("nan")
    engine.set_version(1)
    with pytest.raises(RolloutError, match="logits of request 'a' are not finite"):
        run(engine, [request("a", prompt(4))])
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = 1.0
    engine.set_version(2)
    out = run(engine, [request("a", prompt(4))])[0]
    np.testing.assert_allclose(out.log_probs, true_log_probs(model, out), atol=1e-5)
    engine.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"token_ids": prompt(90), "max_tokens": 11},
            full_text("90 prompt tokens and max_tokens 11"),
        ),
        ({"token_ids": prompt(0)}, "empty prompt"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"top_p": 0.0}, "out of range"),
        ({"temperature": float("nan")}, "out of range"),
        ({"token_ids": np.array([3, 101], np.int32)}, "vocabulary of 101"),
        ({"token_ids": np.array([-1], np.int32)}, "vocabulary of 101"),
    ],
)
def test_impossible_requests(model: torch.nn.Module, fields: dict[str, Any], message: str) -> None:
    engine = make_engine(model)
    with pytest.raises(RolloutError, match=message):
        run(engine, [request("a", **({"token_ids": prompt(4)} | fields))])
    assert len(run(engine, [request("a", prompt(90), 10)])[0].token_ids) == 10  # exactly max_context
    engine.close()


def test_request_ids_are_unique_and_close_tells_who_waits(model: torch.nn.Module) -> None:
    threads = set(threading.enumerate())
    engine = make_engine(model)

    async def main() -> None:
        await engine.pause()
        first = asyncio.create_task(engine.generate(request("a", prompt(4))))
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="in flight already"):
            await engine.generate(request("a", prompt(4)))
        engine.close()
        with pytest.raises(RolloutError, match="closed"):
            await first
        with pytest.raises(RolloutError, match="closed"):
            await engine.generate(request("b", prompt(4)))

    asyncio.run(main())
    assert set(threading.enumerate()) <= threads


def test_the_callers_config_and_generator_stay_as_they_were() -> None:
    config = CONFIGS["qwen3"]()
    before, state = config.to_dict(), torch.get_rng_state()
    own_engine(NativeEngine, config, max_concurrent=2, max_context=32).close()
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    number_of = torch.cuda._utils._get_device_index  # what torch.cuda.set_device does with its argument
    with pytest.raises(ValueError, match="specified index"):
        number_of(torch.device("cuda"))
    assert number_of(as_torch("float32", "cuda")[1]) == 3
    assert number_of(as_torch("float32", "cuda:1")[1]) == 1
    assert as_torch("float32", "cpu") == (torch.float32, torch.device("cpu"))


def test_decode_seconds_are_those_of_all_threads_that_decode(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled path's two workers are counted, and nothing else that the process does meanwhile."""
    workers: list[float] = []
    call = CompiledPath._call

    def counted(*args: Any) -> Any:
        until, started = time.thread_time() + 0.002, time.thread_time()
        while time.thread_time() < until:  # so that the work outweighs the loop around it
            pass
        result = call(*args)
        workers.append(time.thread_time() - started)
        return result

    over = threading.Event()

    def burn() -> float:
        while not over.is_set():
            pass
        return time.thread_time()

    monkeypatch.setattr(CompiledPath, "_call", counted)
    engine = make_engine(model, decode="compiled", threads=2)
    with ThreadPoolExecutor(1) as pool:
        started = time.process_time()
        other = pool.submit(burn)
        run(engine, [request(f"r{i}", prompt(6), 30, seed=i) for i in range(4)])
        over.set()
        burned = other.result()
        all_but_it = time.process_time() - started - burned
    sums = asyncio.run(engine.stats()).sums
    reported = sums["perf/decode_cpu_seconds"] + sums["perf/prefill_cpu_seconds"]
    engine.close()
    assert min(sum(workers), burned) > 0.1
    assert sum(workers) <= reported <= all_but_it
