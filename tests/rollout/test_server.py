"""An engine in its own process: the same numbers, typed errors, and what remains when a process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rondo.core.errors import ConfigError, ReplicaLostError, RolloutError, WeightSyncError
from rondo.core.types import Completion, GenerateRequest, StepStats
from rondo.models.source import ModelSource
from rondo.rollout import WASTED_TOKENS, EngineSpec, NativeEngine, RolloutEngine, check_engine, start_engine
from rondo.rollout.router import Router
from rondo.rollout.server import EngineProcess, child, client
from rondo.rollout.server.client import visible_devices
from rondo.rollout.server.wire import Tokens
from rondo.system import forkserver
from rondo.system.activity import pulse
from tests.messages import full_text
from tests.rollout.conftest import _BASE, VOCAB, build, make_engine, prompt, request, run, weights

QWEN3 = {
    **_BASE,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
ROOT = Path(__file__).resolve().parents[2]


def spec(**changes: object) -> EngineSpec:
    settings = {"device": "cpu", "max_context": 100, "max_concurrent": 8} | changes
    return EngineSpec("native", ModelSource(config=QWEN3), "float32", threads=1, **settings)  # type: ignore[arg-type]


def send(engine: RolloutEngine, model: torch.nn.Module, version: int) -> None:
    engine.begin(version)
    for name, tensor in weights(model).items():
        engine.receive(name, tensor)
    engine.commit(version)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("qwen3")


@pytest.fixture(scope="module")
def here(model: torch.nn.Module) -> Iterator[NativeEngine]:
    engine = make_engine(model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def own(model: torch.nn.Module) -> Iterator[EngineProcess]:
    engine = start_engine(spec(), name="own", bucket_bytes=20_000)  # several buckets, and a tensor beyond one
    assert engine.version == -1
    with pytest.raises(RolloutError, match="has no weights yet"):
        run_all(engine, [request("early", prompt(3))])
    send(engine, model, 0)
    yield engine
    engine.close()


def run_all(engine: RolloutEngine, requests: list[GenerateRequest]) -> list[Completion]:
    return run(engine, requests)  # type: ignore[arg-type]


def same(one: Completion, other: Completion) -> bool:
    return all(
        np.array_equal(getattr(one, field), getattr(other, field))
        for field in (
            "prompt_ids",
            "token_ids",
            "log_probs",
            "policy_versions",
            "finish_reason",
            "request_id",
        )
    )


def mixed(count: int) -> list[GenerateRequest]:
    """Sampled and greedy, grouped and alone, some with a prefix."""
    plain = [
        request(str(i), prompt(5 + i % 9, i // 4), 6 + i % 20, seed=i, affinity=f"g{i // 4}")
        for i in range(count)
    ]
    greedy = [request(f"greedy{i}", prompt(7, i), 20, temperature=0.0) for i in range(4)]
    return [*plain, *greedy]


class TestOneProcess:
    def test_the_same_as_in_this_process(self, here: NativeEngine, own: EngineProcess) -> None:
        assert all(same(a, b) for a, b in zip(run_all(here, mixed(24)), run_all(own, mixed(24)), strict=True))
        assert own.describe() == f"{here.describe()}, in its own process"
        assert own.capabilities() == here.capabilities()
        assert own.pid != os.getpid()

    def test_prefix_and_tokens_as_they_come(self, here: NativeEngine, own: EngineProcess) -> None:
        (half,) = run_all(here, [request("r", prompt(9), 30, seed=5)])
        whole = request("r", prompt(9), 60, seed=5, prefix=half)
        for engine in (here, own):
            parts: list[Completion] = []
            done = asyncio.run(engine.generate(whole, parts.append))
            assert done.token_ids[:30].tolist() == half.token_ids.tolist()
            for field in ("token_ids", "log_probs", "policy_versions"):
                new = np.concatenate([getattr(part, field) for part in parts])
                np.testing.assert_array_equal(new, getattr(done, field)[30:])
            again = asyncio.run(
                engine.generate(request("r", prompt(9), 30, seed=5, prefix=half), parts.append)
            )
            assert same(again, half)  # nothing was left to do

    def test_tokens_that_nobody_hears_come_with_the_answer(
        self, own: EngineProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of a listener come while they are made; the others' in one piece, of the same tokens."""
        pieces: dict[int, int] = {}
        taken = own._take

        def take(records: list[Tokens]) -> None:
            for record in records:
                for key in record.keys:
                    pieces[key] = pieces.get(key, 0) + 1
            taken(records)

        monkeypatch.setattr(own._child, "_take_others", take)
        asked = [request("asked", prompt(5), 90, seed=3), request("not", prompt(5), 90, seed=3)]
        heard: list[Completion] = []
        with_listener = asyncio.run(own.generate(asked[0], heard.append))
        assert sum(len(part.token_ids) for part in heard) == 90
        (without,) = run_all(own, asked[1:])
        np.testing.assert_array_equal(without.token_ids, with_listener.token_ids)
        np.testing.assert_array_equal(without.log_probs, with_listener.log_probs)
        assert [pieces[key] for key in sorted(pieces)][1:] == [1]

    def test_tokens_that_nobody_hears_come_once_in_a_while(
        self, own: EngineProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that a process that dies loses few of them. The server is served here, with a short while."""
        monkeypatch.setattr(child, "KEPT_SECONDS", 0.01)
        asked = request("long", prompt(5), 30)
        server = object.__new__(child.EngineServer)
        server._tokens, server._kept, server._timer, server._kept_timer = {}, {}, None, None
        server._wasted_tokens = 0
        frames: list[list[int]] = []
        server.flush = lambda: frames.append([*map(int, server.said()[0].lengths)])

        class Slow:
            """Gives two tokens, waits, and gives one more than it told."""

            async def generate(self, request: GenerateRequest, on_tokens: Any) -> Completion:
                ids = np.arange(4, dtype=np.int32)
                whole = Completion(request.request_id, request.token_ids, ids, ids / 8, ids, "length")
                on_tokens(whole.part(0, 1))
                on_tokens(whole.part(1, 2))
                while not frames:
                    await asyncio.sleep(0.005)
                on_tokens(whole.part(2, 3))
                if request.seed:
                    await asyncio.Event().wait()
                return whole

            async def stats(self) -> StepStats:
                return StepStats()

        server._engine = Slow()  # type: ignore[assignment]

        async def main() -> None:
            done = await server.generate(7, asked, False)
            (rest,) = server.said()
            assert frames == [[2]]
            assert (done.num_tokens, rest.keys, rest.token_ids.tolist()) == (4, (7,), [2, 3])
            frames.clear()
            dropped = asyncio.create_task(server.generate(8, replace(asked, seed=1), False))
            while not (frames and server._kept):
                await asyncio.sleep(0.005)
            dropped.cancel()
            await asyncio.wait([dropped])
            assert (await server.stats()).sums[WASTED_TOKENS] == 3
            assert (await server.stats()).sums[WASTED_TOKENS] == 0

        asyncio.run(main())

    def test_tokens_are_movement_and_its_process_says_where_it_is(
        self, here: NativeEngine, own: EngineProcess
    ) -> None:
        for engine in (here, own):
            before = pulse().moves
            run_all(engine, [request("r", prompt(5), 40)])
            assert pulse().moves[0] > before[0]
        there = own.pulse().result(240)
        assert there.pid == own.pid
        assert "rondo/system/actor.py" in there.stacks

    def test_what_on_tokens_raises(self, here: NativeEngine, own: EngineProcess) -> None:
        def refuse(part: Completion) -> None:
            raise ValueError("no, thanks")

        for engine in (here, own):
            with pytest.raises(ValueError, match="no, thanks"):
                asyncio.run(engine.generate(request("r", prompt(5), 40), refuse))

    def test_errors_are_typed(self, here: NativeEngine, own: EngineProcess) -> None:
        bad = [
            request("long", prompt(90), 20),
            request("empty", prompt(0), 5),
            request("foreign", np.array([VOCAB], np.int32), 5),
            request("hot", prompt(4), 5, temperature=-1.0),
        ]
        for one in bad:
            with pytest.raises(RolloutError) as expected:
                run_all(here, [one])
            with pytest.raises(RolloutError) as raised:
                run_all(own, [one])
            assert str(raised.value) == str(expected.value)

    def test_wrong_weights(self, own: EngineProcess, here: NativeEngine, model: torch.nn.Module) -> None:
        def wrong(name: str, tensor: torch.Tensor) -> None:
            own.begin(1)
            own.receive(name, tensor)
            own.commit(1)

        with pytest.raises(WeightSyncError, match=full_text("has shape (3,), the model wants (64,)")):
            wrong("model.norm.weight", torch.zeros(3))
        with pytest.raises(WeightSyncError, match=full_text("no parameter 'model.nrm.weight'")):
            wrong("model.nrm.weight", torch.zeros(64))
        with pytest.raises(WeightSyncError, match=r"commit\(1\): .* tensors did not arrive"):
            wrong("model.norm.weight", torch.zeros(64))
        assert own.version == -1
        with pytest.raises(WeightSyncError, match="outside begin"):
            own.receive("model.norm.weight", torch.zeros(64))
        send(own, model, 2)
        assert own.version == 2
        for name, tensor in weights(model).items():
            assert torch.equal(own.parameter(name), tensor)
        (a,), (b,) = run_all(here, [request("r", prompt(5), 9)]), run_all(own, [request("r", prompt(5), 9)])
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert set(b.policy_versions) == {2}
        send(own, model, 0)

    def test_hold_cancel_sleep(self, own: EngineProcess) -> None:
        async def main() -> None:
            await own.pause()  # first: the engine may be faster than this task
            long = request("long", prompt(5), 90, seed=1)
            task, dropped = (
                asyncio.create_task(own.generate(long)),
                asyncio.create_task(own.generate(request("dropped", prompt(6), 90))),
            )
            await asyncio.sleep(0)
            dropped.cancel()
            await own.sleep()
            with pytest.raises(RolloutError, match="asleep"):
                await own.generate(request("r", prompt(4)))
            await own.wake()
            await own.cancel("long")
            await own.resume()
            done = await task
            assert done.finish_reason == "cancelled"
            assert len(done.token_ids) < 90
            assert (await own.generate(request("dropped", prompt(6), 3))).finish_reason == "length"
            assert (await own.stats()).sums["perf/decoded_tokens"] > 0
            assert "perf/decoded_tokens" not in (await own.stats()).sums

        asyncio.run(main())

    def test_a_request_that_the_engine_does_not_end(
        self, own: EngineProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its first tokens arrive, and nothing after them: the host ends it when its time is up."""
        taken, begun = own._take, False

        def take(records: list[object]) -> None:
            nonlocal begun
            for record in records:
                if isinstance(record, Tokens) and not begun:
                    begun = True
                    own._child._calls.clear()  # no reply finds whom it is for; before the test goes on
                    taken([Tokens.of({call: [part.part(0, 3)] for call, part in record.parts()})])

        async def main() -> Completion:
            loop, timers = asyncio.get_running_loop(), []

            def call_later(delay: float, callback: Callable[..., None], *args: object) -> asyncio.Handle:
                timers.append((delay, callback, args))
                return asyncio.TimerHandle(0.0, callback, args, loop)

            def on_tokens(part: Completion) -> None:
                ((delay, end, args),) = timers  # now it is that late
                assert delay == 1000.0 + client.GRACE_SECONDS
                loop.call_soon(end, *args)

            monkeypatch.setattr(loop, "call_later", call_later)
            return await own.generate(request("endless", prompt(5), 94, deadline_seconds=1000.0), on_tokens)

        with monkeypatch.context() as patch:
            patch.setattr(own._child, "_take_others", take)
            done = asyncio.run(main())
        assert (done.finish_reason, len(done.token_ids)) == ("deadline", 3)
        (after,) = run_all(own, [request("after", prompt(5), 5)])
        assert len(after.token_ids) == 5

    @pytest.mark.slow
    def test_a_thousand_requests_at_once(self, here: NativeEngine, own: EngineProcess) -> None:
        router = Router({"own": own}, limit=64)
        requests = mixed(996)
        came = run(router, requests)  # type: ignore[arg-type]
        assert all(same(a, b) for a, b in zip(run_all(here, requests), came, strict=True))
        stats = asyncio.run(router.statistics()).values()
        assert (stats["rollout/in_flight"], stats["rollout/queue_length"]) == (64, 1000 - 64)


def test_a_killed_engines_requests_end_as_if_nothing_had_happened(
    here: NativeEngine, own: EngineProcess, model: torch.nn.Module
) -> None:
    """Killed with its first tokens. Of these a few arrive, and nothing after them, however many it has made
    meanwhile.
    """
    victim = start_engine(spec(), name="victim")
    send(victim, model, 7)  # the same weights: the version says who made a token
    lost: list[str] = []
    router = Router(
        {"victim": victim, "own": own}, limit=64, on_lost=lambda name, why: bool(lost.append(name))
    )
    requests = [request(f"r{i}", prompt(6, i), 90, temperature=float(i % 2), seed=i) for i in range(24)]

    taken = victim._take

    def take(records: list[object]) -> None:
        for record in records:
            if isinstance(record, Tokens):
                taken([Tokens.of({call: [part.part(0, 3)] for call, part in record.parts()})])
                os.kill(victim.pid, signal.SIGKILL)
                raise EOFError
        taken(records)

    victim._child._take_others = take  # type: ignore[assignment]

    async def main() -> list[Completion]:
        answers = (router.generate(one, lambda part: None) for one in requests)
        return list(await asyncio.gather(*answers))

    begun = 0
    for undisturbed, done in zip(run_all(here, requests), asyncio.run(main()), strict=True):
        np.testing.assert_array_equal(done.token_ids, undisturbed.token_ids)
        np.testing.assert_allclose(done.log_probs, undisturbed.log_probs, atol=1e-5)
        assert done.finish_reason == "length"
        assert sorted(done.policy_versions, reverse=True) == done.policy_versions.tolist()
        begun += len(set(done.policy_versions)) == 2
    assert begun
    assert victim.lost is not None
    assert "signal SIGKILL" in victim.lost
    assert lost == ["victim"]
    assert 0 < asyncio.run(router.statistics()).sums["rollout/reissued"] <= 12
    for call in (victim.pause, lambda: victim.generate(requests[0])):
        with pytest.raises(ReplicaLostError, match=r"victim .native. died .signal SIGKILL") as error:
            asyncio.run(call())  # type: ignore[arg-type]
        assert "native rollout engine" in error.value.last_lines
    with pytest.raises(ReplicaLostError, match="SIGKILL"):
        victim.begin(3)
    victim.close()


def test_what_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=full_text("rollout.engine.decode=fast: choose auto")):
        start_engine(spec(options={"decode": "fast"}))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'a library is missing' >&2\nexit 3\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setattr(forkserver, "_servers", [])  # none that began with another one
    with pytest.raises(RolloutError, match=full_text("0 (native) cannot be started: the fork")):
        start_engine(spec())
    monkeypatch.setattr(forkserver, "_keepers", 0)
    with pytest.raises(RolloutError, match=full_text("died (exit code 3) before it was ready")):
        start_engine(spec())


class TestCheck:
    def test_native(self) -> None:
        check_engine("native", {}, device="cpu")
        with pytest.raises(ConfigError, match="there is no rollout engine 'vlm'"):
            check_engine("vlm", {}, device="cpu")

    def test_devices_of_a_process(self) -> None:
        assert visible_devices(spec(), ["0"]) == (spec(), {})
        on_gpus = spec(device="cuda:2", tensor_parallel=2)
        own = spec(device="cuda:0", tensor_parallel=2)
        assert visible_devices(on_gpus, ["4", "5", "6", "7"]) == (own, {"CUDA_VISIBLE_DEVICES": "6,7"})
        with pytest.raises(ConfigError, match=full_text("tensor_parallel=2 from cuda:2")):
            visible_devices(on_gpus, ["4", "5", "6"])

    def test_given_gpus_count_from_their_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The host's own device is cuda:2 of all that it sees, and the engine gets GPUs 6 and 7."""
        started: list[tuple[EngineSpec, Mapping[str, str]]] = []
        monkeypatch.setattr(
            client, "EngineProcess", lambda spec, variables, **_: started.append((spec, variables))
        )
        start_engine(spec(device="cuda:2", tensor_parallel=2), accelerators=("6", "7"))
        [(own, variables)] = started
        assert own.device == "cuda:0"
        assert variables["CUDA_VISIBLE_DEVICES"] == "6,7"
