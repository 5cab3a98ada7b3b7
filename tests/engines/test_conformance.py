"""What every rollout engine does alike. Numbers are compared with transformers in float32."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from rondo.core.errors import RolloutError, WeightSyncError
from rondo.core.images import ImageRef
from rondo.core.types import Completion, GenerateRequest
from rondo.rollout.build import third_party
from rondo.weights.checksum import checksum
from tests.engines.conftest import (
    IN_PROCESS,
    LONG,
    MAX_CONTEXT,
    TOLERANCE,
    TRIES,
    VOCAB,
    Bench,
    Collected,
    build_model,
    engine_spec,
    gaps,
    greedy,
    paused_in_flight,
    prompt,
    request,
    scores,
    start,
    weights,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(900)  # the start of an engine included, on a machine that is slow

# ---- tokens and log-probs ----


def test_greedy_is_that_of_transformers(served: Bench) -> None:
    prompts = [prompt(length) for length in (1, 3, 6, 17, 40)]
    outs = served.run(request(ids, 24, temperature=0.0) for ids in prompts)
    for ids, out in zip(prompts, outs, strict=True):
        np.testing.assert_array_equal(out.prompt_ids, ids)
        np.testing.assert_array_equal(out.token_ids, greedy(served.model, ids, 24))
        assert out.finish_reason == "length"
        assert gaps(served.model, out).max() < TOLERANCE  # greedy: at temperature 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_after_temperature(served: Bench, temperature: float) -> None:
    outs = served.run(request(prompt(9, i), 30, temperature=temperature, seed=i) for i in range(6))
    assert max(gaps(served.model, out, temperature).max() for out in outs) < TOLERANCE
    assert len({tuple(out.token_ids) for out in outs}) == len(outs)
    for out in outs:
        assert (out.token_ids.dtype, out.log_probs.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(out.policy_versions, served.engine.version)


@pytest.mark.parametrize(
    "truncation",
    [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 20, "min_p": 0.02}],
    ids=["top_p", "top_k", "min_p", "all"],
)
def test_log_probs_are_those_before_truncation(served: Bench, truncation: dict[str, Any]) -> None:
    requests = [request(prompt(9, i), 20, temperature=0.9, seed=i, **truncation) for i in range(6)]
    for out in served.run(requests):
        assert gaps(served.model, out, 0.9).max() < TOLERANCE
        _is_in_the_support(scores(served.model, out, 0.9).exp().double(), out, **truncation)


def _is_in_the_support(
    probs: torch.Tensor, out: Completion, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> None:
    """probs [T, V]. The definitions, with room for rounding."""
    ordered, ids = probs.sort(-1, descending=True)
    rank = (ids == torch.from_numpy(out.token_ids.astype(np.int64))[:, None]).int().argmax(-1)
    if top_k:
        assert int(rank.max()) < top_k
        ordered = ordered[:, :top_k] / ordered[:, :top_k].sum(-1, keepdim=True)
    chosen = ordered.gather(1, rank[:, None])[:, 0]
    before = ordered.cumsum(-1).gather(1, rank[:, None])[:, 0] - chosen
    assert float(before.max()) < top_p + 1e-4
    assert bool((chosen >= min_p * ordered[:, 0] - 1e-6).all())


def test_stop_tokens_and_lengths(served: Bench) -> None:
    ids = prompt(6)
    whole = greedy(served.model, ids, 40)
    stop = int(whole[12])
    first = int(np.flatnonzero(whole == stop)[0])
    stops = (stop, VOCAB - 1) if VOCAB - 1 not in whole else (stop,)
    stopped, cut, one = served.run(
        [
            request(ids, 40, temperature=0.0, stop_token_ids=stops),
            request(ids, first, temperature=0.0, stop_token_ids=stops) if first else request(ids, 1),
            request(ids, 1, temperature=0.0),
        ]
    )
    assert stopped.finish_reason == "stop"
    np.testing.assert_array_equal(stopped.token_ids, whole[: first + 1])  # the stop token is part of it
    assert gaps(served.model, stopped).max() < TOLERANCE
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", max(first, 1))
    np.testing.assert_array_equal(one.token_ids, whole[:1])


def test_the_longest_request_fits(served: Bench) -> None:
    ids = prompt(MAX_CONTEXT - 4)
    (out,) = served.run([request(ids, 4, temperature=0.0)])
    np.testing.assert_array_equal(out.token_ids, greedy(served.model, ids, 4))


def test_impossible_requests(served: Bench) -> None:
    one_too_many = {"max_context": request(prompt(MAX_CONTEXT - 4), 5)}
    outside = prompt(4).copy()
    outside[2] = VOCAB
    cases = one_too_many | {
        "vocabulary": request(outside),
        "empty prompt": request(np.empty(0, np.int32)),
        "top_p": request(prompt(4), top_p=1.5),
        "max_tokens": request(prompt(4), 0),
        "1 images": dataclasses.replace(request(prompt(4)), images=(ImageRef("path:a", "0", (1, 2, 2), 1),)),
    }
    for words, wrong in cases.items():
        with pytest.raises(RolloutError, match=words):
            served.run([wrong])
    twice = request(prompt(4), 50)
    with pytest.raises(RolloutError, match="in flight already"):
        served.run_held([twice, twice])
    (out,) = served.run([request(prompt(4), 3)])
    assert len(out.token_ids) == 3


# ---- many requests ----


def test_a_group_shares_its_prompt(served: Bench) -> None:
    served.stats()
    ids = prompt(300)
    outs = served.run_held(request(ids, 12, seed=i, affinity="group") for i in range(8))
    assert max(gaps(served.model, out).max() for out in outs) < TOLERANCE
    assert len({tuple(out.token_ids) for out in outs}) == 8
    stats = served.stats()
    assert stats["perf/shared_prefill_tokens"] > 0
    assert stats["perf/prefill_tokens"] + stats["perf/shared_prefill_tokens"] >= 8 * 299


def test_sixty_four_at_once(served: Bench) -> None:
    served.stats()
    requests = [request(prompt(3 + i % 29, i), 4 + (7 * i) % 23, seed=i) for i in range(64)]
    outs = served.run(requests)
    assert [out.request_id for out in outs] == [one.request_id for one in requests]
    assert [len(out.token_ids) for out in outs] == [one.sampling.max_tokens for one in requests]
    assert max(gaps(served.model, out).max() for out in outs) < TOLERANCE
    assert served.stats()["perf/decoded_tokens"] == sum(len(out.token_ids) for out in outs)
    assert not served.stats().get("perf/decoded_tokens")  # counters start anew


def test_an_urgent_request_waits_for_nobody_that_waits(served: Bench) -> None:
    """Behind 40 for 16 places: it gets the next place that is free, where the last in line gets none before
    24 others are done.
    """
    ended: list[str] = []

    async def main() -> None:
        await served.engine.pause()
        others = [request(prompt(9, i), 40, seed=i) for i in range(40)]
        urgent = dataclasses.replace(request(prompt(5), 4), urgent=True)
        tasks = {
            one.request_id: asyncio.create_task(served.engine.generate(one)) for one in (*others, urgent)
        }
        for name, task in tasks.items():
            task.add_done_callback(lambda _, name=name: ended.append(name))
        await asyncio.sleep(0)  # all are on their way, before the resume
        await served.engine.resume()
        await asyncio.gather(*tasks.values())
        assert len(ended) == 41
        assert ended.index(urgent.request_id) <= 16

    asyncio.run(main())


def test_tokens_depend_on_the_seed_alone(served: Bench) -> None:
    def one() -> GenerateRequest:
        return request(prompt(8), 40, seed=7)

    (alone,) = served.run([one()])
    mates = [request(prompt(5 + i, i), 10 + 4 * i, seed=100 + i) for i in range(9)]
    again = served.run([*mates[:4], one(), *mates[4:]])[4]
    np.testing.assert_array_equal(again.token_ids, alone.token_ids)
    (other,) = served.run([request(prompt(8), 40, seed=8)])
    assert list(other.token_ids) != list(alone.token_ids)


def test_samples_what_the_native_engine_samples(served: Bench) -> None:
    native = Bench("native", start("native"))
    requests = [
        request(prompt(5 + i, i), 20, temperature=0.9, seed=(1 << 62) + i, top_p=0.9, top_k=40, min_p=0.01)
        for i in range(8)
    ]
    native.serve()
    for ours, theirs in zip(served.run(requests), native.run(requests), strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=TOLERANCE)
    native.engine.close()


# ---- ends that are no ends ----


def test_what_on_tokens_raises_is_the_calls_error(served: Bench) -> None:
    def refuse(part: Completion) -> None:
        raise KeyError("not these")

    async def generate() -> None:
        with pytest.raises(KeyError, match="not these"):
            await served.engine.generate(request(prompt(5), 60), refuse)

    asyncio.run(generate())


def test_cancel_returns_what_there_is(served: Bench) -> None:
    """While it runs, while paused, and before it was begun."""
    engine = served.engine

    async def running() -> tuple[Completion, Collected]:
        one, seen = request(prompt(5), LONG, seed=0), Collected()
        task = asyncio.create_task(engine.generate(one, seen))
        await seen.at_least(5, task)
        await engine.cancel(one.request_id)
        await engine.cancel("nobody")
        return await task, seen

    async def main() -> tuple[list[Completion], list[Collected]]:
        for _ in range(TRIES):
            first, seen = await running()
            if first.finish_reason == "cancelled":  # it may have come to its end before
                break
        held = await paused_in_flight(engine, lambda: [request(prompt(5, 1), LONG, seed=1)], 5)
        waiting = request(prompt(5, 2), LONG, seed=2)
        third = asyncio.create_task(engine.generate(waiting))
        await asyncio.sleep(0.02)
        await engine.cancel(held.requests[0].request_id)
        await engine.cancel(waiting.request_id)
        second, last = await held.tasks[0], await third
        await engine.resume()
        return [first, second, last], [seen, *held.seen]

    outs, seen = asyncio.run(main())
    assert [out.finish_reason for out in outs] == ["cancelled"] * 3
    assert all(5 <= len(out.token_ids) < LONG for out in outs[:2])
    assert len(outs[2].token_ids) == 0
    for out, told in zip(outs, seen, strict=False):
        assert gaps(served.model, out).max() < TOLERANCE
        assert told.token_ids == out.token_ids.tolist()[: len(told.token_ids)]


def test_a_cancelled_task_frees_its_place(served: Bench) -> None:
    async def main() -> Completion:
        seen = [Collected() for _ in range(16)]  # as many as have room
        tasks = [asyncio.create_task(served.engine.generate(request(prompt(4), LONG), one)) for one in seen]
        await seen[0].at_least(2, tasks[0])
        cancelled = [task.cancel() for task in tasks]  # False: it has ended
        out = await served.engine.generate(request(prompt(4), 3))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(end, asyncio.CancelledError) for end in ends] == cancelled
        return out

    assert len(asyncio.run(main()).token_ids) == 3


def test_tasks_are_cancelled_just_before_a_pause(served: Bench) -> None:
    """As rollout.on_update=abort has it: nobody takes the tokens that are still on their way."""

    async def main() -> Completion:
        for round_ in range(5):
            seen = [Collected() for _ in range(16)]
            tasks = [
                asyncio.create_task(served.engine.generate(request(prompt(4, i), LONG), one))
                for i, one in enumerate(seen)
            ]
            await seen[round_].at_least(2 + round_, tasks[round_])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait_for(served.engine.pause(), 240)
            await served.engine.resume()
        return await served.engine.generate(request(prompt(4), 3))

    assert len(asyncio.run(main()).token_ids) == 3


def test_a_deadline_comes_while_paused(served: Bench) -> None:
    engine = served.engine

    async def main() -> list[Completion]:
        for seconds in (0.5, 2.0, 8.0, 32.0):  # until it is neither at its end nor past it at the pause
            one, seen = request(prompt(5), LONG, deadline_seconds=seconds), Collected()
            running = asyncio.create_task(engine.generate(one, seen))
            await seen.at_least(2, running)
            await engine.pause()
            await engine.stats()  # its answer is behind all that was on its way
            if not running.done():
                break
            await engine.resume()
        waiting = asyncio.create_task(engine.generate(request(prompt(6), 9, deadline_seconds=0.1)))
        outs = [await asyncio.wait_for(task, 240) for task in (running, waiting)]
        await engine.resume()
        return outs

    first, second = asyncio.run(main())
    assert (first.finish_reason, second.finish_reason) == ("deadline", "deadline")
    assert 2 <= len(first.token_ids) < LONG
    assert len(second.token_ids) == 0


def test_deadline_returns_what_there_is(served: Bench) -> None:
    long, short = served.run(
        [
            request(prompt(7), LONG, deadline_seconds=0.01),  # LONG takes a fast machine 0.05
            request(prompt(7), 1, deadline_seconds=600.0),
        ]
    )
    assert (long.finish_reason, short.finish_reason) == ("deadline", "length")
    assert len(long.token_ids) < LONG
    assert len(long.token_ids) == 0 or gaps(served.model, long).max() < TOLERANCE


def test_a_prefix_is_gone_on_with(served: Bench) -> None:
    ids = prompt(11)
    (whole,) = served.run([request(ids, 30, temperature=0.0)])
    for cut in (1, 13, 29):
        prefix = Completion(
            "elsewhere",
            ids,
            whole.token_ids[:cut],
            np.linspace(-3, -1, cut, dtype=np.float32),
            np.arange(cut, dtype=np.int32) - 50,
            "cancelled",
        )
        one = request(ids, 30, temperature=0.0, prefix=prefix)
        (out,) = served.run([one])
        assert (out.request_id, out.finish_reason) == (one.request_id, "length")
        np.testing.assert_array_equal(out.prompt_ids, ids)
        np.testing.assert_array_equal(out.token_ids, whole.token_ids)
        np.testing.assert_array_equal(out.log_probs[:cut], prefix.log_probs)
        np.testing.assert_array_equal(out.policy_versions[:cut], prefix.policy_versions)
        np.testing.assert_array_equal(out.policy_versions[cut:], served.engine.version)
        assert gaps(served.model, out)[cut:].max() < TOLERANCE


def test_a_prefix_gets_the_noise_it_would_have_had(served: Bench) -> None:
    (whole,) = served.run([request(prompt(11), 30, seed=3)])
    half = dataclasses.replace(
        whole,
        token_ids=whole.token_ids[:12],
        log_probs=whole.log_probs[:12],
        policy_versions=whole.policy_versions[:12],
    )
    (out,) = served.run([request(prompt(11), 30, seed=3, prefix=half)])
    np.testing.assert_array_equal(out.token_ids, whole.token_ids)


def test_a_finished_prefix_comes_back_at_once(served: Bench) -> None:
    (done,) = served.run([request(prompt(4), 6)])
    stop = int(done.token_ids[-1])
    asyncio.run(served.engine.pause())  # nothing needs to be computed
    full, stopped = served.run(
        [
            request(prompt(4), 6, prefix=done),
            request(prompt(4), 9, prefix=done, stop_token_ids=(stop,)),
        ]
    )
    asyncio.run(served.engine.resume())
    assert (full.finish_reason, stopped.finish_reason) == ("length", "stop")
    np.testing.assert_array_equal(full.token_ids, done.token_ids)


def test_a_pause_stops_everything(served: Bench) -> None:
    engine = served.engine

    async def main() -> None:
        held = await paused_in_flight(engine, lambda: [request(prompt(5), LONG)], 3)
        (one,), (seen,), (running,) = held.requests, held.seen, held.tasks
        count = len(seen.token_ids)
        late = asyncio.create_task(engine.generate(request(prompt(6), 2)))
        await asyncio.sleep(0.3)
        assert len(seen.token_ids) == count
        assert not late.done()
        await engine.pause()  # twice is once
        await engine.resume()
        assert len((await late).token_ids) == 2
        await seen.at_least(count + 1, running)
        await engine.cancel(one.request_id)
        out = await running
        assert len(out.token_ids) > count
        assert out.finish_reason == ("length" if len(out.token_ids) == LONG else "cancelled")

    asyncio.run(main())


# ---- weights ----


def test_weights_change_in_mid_generation(served: Bench) -> None:
    engine, before = served.engine, served.engine.version

    async def main() -> list[Completion]:
        held = await paused_in_flight(
            engine, lambda: [request(prompt(4 + 30 * i, i), LONG, seed=i) for i in range(3)], 4
        )
        late = request(prompt(34, 1), 5)  # its prompt's keys and values are there, of the old weights
        tasks = [*held.tasks, asyncio.create_task(engine.generate(late))]
        version = await asyncio.to_thread(served.load, served.other)
        await engine.resume()
        for collected, task in zip(held.seen, held.tasks, strict=True):
            await collected.at_least(len(collected.token_ids) + 6, task)
        for one in held.requests:
            await engine.cancel(one.request_id)
        assert engine.version == version == before + 1
        outs = [await task for task in tasks]
        for out, collected in zip(outs, held.seen, strict=False):
            streamed = np.concatenate([part.policy_versions for part in collected.parts])
            np.testing.assert_array_equal(streamed, out.policy_versions[: len(streamed)])
        return outs

    *outs, late = asyncio.run(main())
    for out in outs:
        old, new = out.policy_versions == before, out.policy_versions == before + 1
        assert 4 <= old.sum() < len(out.token_ids)
        assert (np.diff(out.policy_versions) >= 0).all()
        assert (old | new).all()
        assert gaps(served.model, out)[old].max() < TOLERANCE
        assert gaps(served.other, out)[new].max() < TOLERANCE
        assert gaps(served.other, out)[old].max() > 1e-2  # the two can be told apart
        assert gaps(served.model, out)[new].max() > 1e-2
    np.testing.assert_array_equal(late.policy_versions, before + 1)
    assert gaps(served.other, late).max() < TOLERANCE


COUNTED = """
import asyncio
from rondo.core.errors import RolloutError
from rondo.rollout.build import build_engine
from rondo.weights.bucket import BucketWriter
from tests.engines.conftest import build_model, engine_spec, paused_in_flight, prompt, request, weights

def load(version):
    engine.begin(version)
    writer = BucketWriter(1 << 16, lambda bucket: (engine.receive_bucket(bucket), lambda: None)[1])
    for name, tensor in weights(build_model(version)).items():
        writer.add(name, tensor)
    writer.finish()
    engine.commit(version)

async def generated(update, named):
    held = await paused_in_flight(engine, lambda: [request(prompt(6), 40, seed=5)], 4)
    await asyncio.to_thread(load, update)
    name = lambda: engine._core.name_weights(named)
    (engine._call(name) if KIND == "vllm" else engine._wait(name()))
    await engine.resume()
    return await held.tasks[0]

KIND = {kind!r}
engine = build_engine(engine_spec(KIND))
load(0)
print("as counted", *asyncio.run(generated(1, 1)).policy_versions)
try:
    asyncio.run(generated(2, 9))
except RolloutError as error:
    print(error)
engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_stamps_are_compared_with_the_engines_own_count(kind: str) -> None:
    """An engine that counts with other names of the weights than they have stands for one that counts
    otherwise.
    """
    package = third_party(kind)
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed in this environment (make test-engines)")
    variables = os.environ | package.environment(engine_spec(kind))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    program = COUNTED.replace("{kind!r}", repr(kind))
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    (counted,) = [line for line in done.stdout.splitlines() if line.startswith("as counted")]
    versions = [int(one) for one in counted.split()[2:]]
    assert len(versions) == 40
    assert versions == sorted(versions)
    assert 4 <= versions.count(0) < 40
    assert 0 < versions.count(1)
    assert re.search(
        rf": {package.title} made its tokens with versions 1×(\d+) 9×(\d+), and they are stamped 1×\1 2×\2;",
        done.stdout,
    ), done.stdout + done.stderr


def test_every_tensor_arrives_where_it_belongs(bench: Bench) -> None:
    """Fused and tied ones, too: all are new, in another order, and in the trainer's bfloat16."""
    model = build_model(5)
    tensors = {name: tensor.bfloat16() for name, tensor in reversed(weights(model).items())}
    with torch.no_grad():
        for name, tensor in weights(model).items():
            tensor.copy_(tensors[name].float())
    sums = {} if bench.kind in IN_PROCESS else None  # in this process they are of the engine's own storage
    bench.send(tensors, model, sums)
    outs = bench.run(request(prompt(20, i), 12, seed=i) for i in range(4))
    assert max(gaps(model, out).max() for out in outs) < TOLERANCE


def test_a_tied_parameter_may_come_under_its_other_name(bench: Bench) -> None:
    tensors = {
        "lm_head.weight" if name == "model.embed_tokens.weight" else name: tensor
        for name, tensor in weights(bench.other).items()
    }
    bench.send(tensors, bench.other)
    (out,) = bench.run([request(prompt(20), 12)])
    assert gaps(bench.other, out).max() < TOLERANCE


def test_keys_of_old_weights_are_not_used_again(bench: Bench) -> None:
    for model in (bench.model, bench.other, bench.model):
        bench.load(model)
        outs = bench.run(request(prompt(100), 6, seed=i) for i in range(2))
        assert max(gaps(model, out).max() for out in outs) < TOLERANCE


_FAULTS = {
    "missing": "model.layers.1.mlp.up_proj.weight",
    "unknown": "model.layers.7.mlp.up_proj.weight",
    "shape": "model.layers.0.self_attn.k_proj.weight",
    "checksum": "model.layers.0.mlp.down_proj.weight",
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_an_update_that_is_not_whole(served: Bench, fault: str) -> None:
    name, tensors = _FAULTS[fault], weights(served.other)
    sums = {key: checksum(tensor) for key, tensor in tensors.items()}
    if fault == "missing":
        del tensors[name], sums[name]
    elif fault == "unknown":
        tensors[name] = torch.zeros(3)
    elif fault == "shape":
        tensors[name] = tensors[name].T.contiguous()
    else:
        sums[name] += 1
    with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
        served.send(tensors, None, sums)

    async def main() -> Completion:
        seen = Collected()
        task = asyncio.create_task(served.engine.generate(request(prompt(6), 4), seen))
        await asyncio.wait([task], timeout=0.3)  # it waits, or says why not
        assert not seen.parts, "it serves weights that are not whole"
        await served.engine.pause()
        version = await asyncio.to_thread(served.load, served.other)
        await served.engine.resume()
        try:
            out = await task
        except WeightSyncError:
            out = await served.engine.generate(request(prompt(6), 4))
        np.testing.assert_array_equal(out.policy_versions, version)
        return out

    assert gaps(served.other, asyncio.run(main())).max() < TOLERANCE


def test_weights_come_between_begin_and_commit(served: Bench) -> None:
    with pytest.raises(WeightSyncError, match="begin"):
        served.engine.commit(99)
    engine = served.engine

    async def begin_in_flight() -> str:
        """Why it was refused; "": the request was at its end."""
        seen, one = Collected(), request(prompt(5), LONG)
        running = asyncio.create_task(engine.generate(one, seen))
        await seen.at_least(1, running)
        why = ""
        try:
            await asyncio.to_thread(engine.begin, 99)
        except WeightSyncError as error:
            why = str(error)
        await engine.cancel(one.request_id)
        await running
        return why

    for _ in range(TRIES):
        why = asyncio.run(begin_in_flight())
        if why:
            break
        served.load(served.model)
    assert "in flight" in why
    (out,) = served.run([request(prompt(5), 3)])
    assert gaps(served.model, out).max() < TOLERANCE


# ---- what it says of itself ----


def test_no_engine_leaves_a_file_in_shared_memory(served: Bench) -> None:
    """Not even while it runs: it may be killed. One that is being started beside it has one for a moment."""

    def none_is_there() -> bool:
        return not [name for name in os.listdir("/dev/shm") if name.startswith("sglang")]

    wait_for("no file of SGLang in /dev/shm", none_is_there, seconds=60)


def test_capabilities_are_the_truth(served: Bench) -> None:
    engine, capabilities = served.engine, served.engine.capabilities()
    assert capabilities.engine == served.kind.partition("-")[0]
    assert capabilities.engine_version
    assert capabilities.engine in engine.describe().lower()

    async def sleep_and_wake() -> Completion:
        await engine.sleep()
        with pytest.raises(RolloutError, match="asleep"):
            await engine.generate(request(prompt(4), 3))
        await engine.wake()
        return await engine.generate(request(prompt(4), 3))

    if capabilities.sleep:
        assert gaps(served.model, asyncio.run(sleep_and_wake())).max() < TOLERANCE
    else:
        with pytest.raises(RolloutError, match="sleep"):
            asyncio.run(engine.sleep())
