"""One engine of each kind, shared by all tests of the suite, and what to compare it with.

native, transformers: in this process. native-process, vllm, sglang: each in a process of its own. Starting
vLLM or SGLang takes tens of seconds, so each is started once; where one is not installed its tests are
skipped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rondo.core.errors import RolloutError
from rondo.core.types import Completion, GenerateRequest, SamplingParams
from rondo.models.loading import load_model_config
from rondo.models.names import persistent_buffers
from rondo.models.source import ModelSource, TokenizerSource
from rondo.rollout import build_engine, start_engine
from rondo.rollout.protocol import EngineSpec, RolloutEngine
from rondo.rollout.server import EngineProcess
from rondo.weights.bucket import BucketWriter, Confirmation, SharedBucket
from rondo.weights.checksum import checksum
from tests.waiting import is_fork_server

VOCAB = 200
MAX_CONTEXT = 1000
LONG = 900  # tokens that nobody waits for
TOLERANCE = 1e-5  # nats, float32 on both sides
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "pad_token_id": None,
}
QWEN3 = CONFIG | {"model_type": "qwen3"}
IN_PROCESS = ("native", "transformers")
KINDS = (*IN_PROCESS, "native-process", "vllm", "sglang")


def build_model(seed: int, config: Mapping[str, Any] = QWEN3) -> torch.nn.Module:
    """Float32, random in every tensor, norms and biases included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            load_model_config(ModelSource(config={**config, "eos_token_id": None})), dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def weights(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    sent = {name: parameter.data.to(dtype) for name, parameter in model.named_parameters()}
    return sent | {name: buffer.data for name, buffer in persistent_buffers(model)}


def engine_spec(kind: str, **changes: Any) -> EngineSpec:
    # The config names an end-of-sequence token that the model likes to say: only a request's own stop
    # tokens may end it.
    config = QWEN3 | {"eos_token_id": int(greedy(build_model(0), prompt(6), 4)[2])}
    spec = EngineSpec(
        engine=kind.partition("-")[0],
        source=ModelSource(config=config),
        dtype="float32",
        device="cpu",
        max_context=MAX_CONTEXT,
        max_concurrent=16,
        threads=1,
        tokenizer=TokenizerSource("tests.byte_tokenizers.tokenizer_of_200"),
    )
    return dataclasses.replace(spec, **changes)


def start(kind: str, **changes: Any) -> RolloutEngine:
    """Small buckets, so that an update is several."""
    spec = engine_spec(kind, **changes)
    if kind in IN_PROCESS:
        return build_engine(spec)
    if kind in ("vllm", "sglang") and importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed in this environment (make test-engines)")
    engine = start_engine(spec, bucket_bytes=1 << 16)
    try:
        _look(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def _look(engine: EngineProcess) -> None:
    """What an engine on a card is asked before its first weights, here of a bucket in the host's memory: each
    process that will take weights opens it and says what it reads; and closes all.
    """
    seen: list[dict[str, int]] = []

    def send(bucket: SharedBucket) -> Confirmation:
        answer = engine._call("look", bucket)
        return lambda: seen.extend(engine._wait(answer))

    known = torch.arange(64, dtype=torch.uint8)
    writer = BucketWriter(known.nbytes, send)
    writer.add("known", known)
    writer.finish()
    engine.close_buckets()
    assert seen == [{"known": checksum(known)}] * max(1, len(seen))
    assert engine.version == -1


class Bench:
    """An engine, the models whose weights it can be given, and the version it serves."""

    def __init__(self, kind: str, engine: RolloutEngine, config: Mapping[str, Any] = QWEN3) -> None:
        self.kind, self.engine = kind, engine
        self.model, self.other = build_model(0, config), build_model(1, config)
        self._versions = itertools.count()
        self._held: torch.nn.Module | None = None

    def load(self, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> int:
        """Give the engine all of a model's tensors, with checksums. Returns the version."""
        return self.send(weights(model, dtype), model)

    def send(
        self,
        tensors: Mapping[str, torch.Tensor],
        model: torch.nn.Module | None = None,
        checksums: Mapping[str, int] | None = None,
    ) -> int:
        version = next(self._versions)
        self._held = None
        self.engine.begin(version)
        for name, tensor in tensors.items():
            self.engine.receive(name, tensor)
        if checksums is None:
            checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
        self.engine.commit(version, checksums)
        self._held = model
        return version

    def serve(self) -> None:
        """The first model's weights, if they are not there; and no pause that a failed test left."""
        asyncio.run(self.engine.resume())
        if self._held is not self.model:
            self.load(self.model)

    def run(self, requests: Iterable[GenerateRequest]) -> list[Completion]:
        async def all_requests() -> list[Completion]:
            return list(await asyncio.gather(*(self.engine.generate(r) for r in requests)))

        return asyncio.run(all_requests())

    def run_held(self, requests: Iterable[GenerateRequest]) -> list[Completion]:
        """As `run`, with all requests there before the first starts."""

        async def all_requests() -> list[Completion]:
            await self.engine.pause()
            tasks = [asyncio.create_task(self.engine.generate(r)) for r in requests]
            await asyncio.sleep(0.2)
            await self.engine.resume()
            return list(await asyncio.gather(*tasks))

        return asyncio.run(all_requests())

    def stats(self) -> dict[str, float]:
        async def take() -> dict[str, float]:
            return (await self.engine.stats()).values()

        return asyncio.run(take())


class Collected:
    """An on_tokens that keeps what comes, and can be waited for (also where the request ends before)."""

    def __init__(self) -> None:
        self.parts: list[Completion] = []

    def __call__(self, part: Completion) -> None:
        self.parts.append(part)

    @property
    def token_ids(self) -> list[int]:
        return [int(token) for part in self.parts for token in part.token_ids]

    async def at_least(self, count: int, task: asyncio.Task[Any]) -> None:
        """Until there are so many tokens, or the request's task has ended."""
        async with asyncio.timeout(240):
            while len(self.token_ids) < count and not task.done():
                await asyncio.sleep(0.001)


@dataclasses.dataclass
class Flight:
    """Requests on their way in an engine that is paused: none is at its end."""

    requests: list[GenerateRequest]
    seen: list[Collected]
    tasks: list[asyncio.Task[Completion]]


TRIES = 20


async def paused_in_flight(
    engine: RolloutEngine, make: Callable[[], list[GenerateRequest]], num_tokens: int
) -> Flight:
    """Start requests, and pause the engine when each has so many tokens. make: them, with new names.

    An engine in another process may come to the end of one while nothing here runs: then all of it again.
    """
    for _ in range(TRIES):
        requests = make()
        seen = [Collected() for _ in requests]
        tasks = [
            asyncio.create_task(engine.generate(one, collected))
            for one, collected in zip(requests, seen, strict=True)
        ]
        for collected, task in zip(seen, tasks, strict=True):
            await collected.at_least(num_tokens, task)
        await engine.pause()
        await engine.stats()  # its answer is behind all that was on its way
        if not any(task.done() for task in tasks):
            return Flight(requests, seen, tasks)
        await engine.resume()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Completion | asyncio.CancelledError), result
    raise AssertionError(f"{TRIES} times a request of {requests[0].sampling.max_tokens} tokens had ended")


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).astype(np.int32)


_names = itertools.count()


def request(token_ids: np.ndarray, max_tokens: int = 12, **fields: Any) -> GenerateRequest:
    """With a name of its own. fields: of the request or of its sampling parameters."""
    own = {"seed", "affinity", "deadline_seconds", "prefix"} & set(fields)
    of_request = {key: fields.pop(key) for key in own}
    sampling = SamplingParams(max_tokens, **fields)
    return GenerateRequest(f"r{next(_names)}", token_ids, sampling, **of_request)


def scores(model: torch.nn.Module, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [T, V] before every token of the response, by one float32 forward over all of it."""
    n = len(completion.prompt_ids)
    ids = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        return (model(ids[None]).logits[0, n - 1 : -1].float() / temperature).log_softmax(-1)


def gaps(model: torch.nn.Module, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """|reported − true| log-prob of every token of the response, float [T]."""
    ids = torch.from_numpy(completion.token_ids.astype(np.int64))
    true = scores(model, completion, temperature).gather(1, ids[:, None])[:, 0].numpy()
    assert len(completion.log_probs) == len(completion.policy_versions) == len(true)
    return np.abs(completion.log_probs - true)


def greedy(model: torch.nn.Module, token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
    """transformers' own greedy decoding, int64 [max_tokens]."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    out: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return out[0, len(token_ids) :].numpy()


def children_since(before: set[int]) -> list[psutil.Process]:
    """Children of this process that came after `before`; no fork servers, which are kept."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.pid not in before and not is_fork_server(child)]


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end within a minute."""
    return psutil.wait_procs(processes, timeout=60)[1]


def no_children_left(before: set[int]) -> Callable[[], list[psutil.Process]]:
    """Which children of this process came after `before` and do not end. For when nobody else starts any."""
    return lambda: alive(children_since(before))


@pytest.fixture(scope="session", params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    torch.set_num_threads(1)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = start(request.param)
    # Its own only: other tests start and keep processes while it lives.
    own = children_since(before) if request.param not in IN_PROCESS else []
    assert engine.version == -1
    try:
        with pytest.raises(RolloutError, match="no weights"):
            asyncio.run(engine.generate(globals()["request"](prompt(3))))
        yield Bench(request.param, engine)
    finally:
        started_later = [child for one in own if one.is_running() for child in one.children(recursive=True)]
        engine.close()
        engine.close()
    assert not alive({*own, *started_later}), f"{request.param} left processes behind"


@pytest.fixture
def served(bench: Bench) -> Bench:
    """With the first model's weights."""
    bench.serve()
    return bench
