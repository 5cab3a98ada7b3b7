"""Weights that stay on the device on their way to another process: what arrives, what is refused, and what is
left when either side is killed.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from rondo.core.errors import ConfigError, ReplicaLostError, RolloutError, WeightSyncError
from rondo.models.source import ModelSource
from rondo.platform import Shared, platform_of
from rondo.platform.cuda import Cuda
from rondo.rollout import EngineSpec, start_engine
from rondo.rollout.fanout import WeightFanout
from rondo.rollout.server import EngineProcess, client
from rondo.weights.bucket import BucketWriter, SharedBucket, close_opened
from rondo.weights.checksum import checksum, checksums
from rondo.weights.exchange import Transfer, receive
from rondo.weights.layout import Layout, Parameter
from tests.ranks import fork_server
from tests.rollout.conftest import _BASE, build, prompt, request, run, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CARD = torch.device("cuda", 0)
MIB = 1 << 20
QWEN3 = {
    **_BASE,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
SPEC = EngineSpec(
    "native",
    ModelSource(config=QWEN3),
    "float32",
    device="cuda:0",
    max_context=100,
    max_concurrent=8,
    threads=1,
)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Whatever happened: what this process has on the card afterwards is what it had before."""
    torch.cuda.set_device(0)
    torch.ones(1, device=CARD)  # CUDA's own memory comes with the first tensor
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before


# ---- buckets between two processes ----


def reads(pipe: Connection) -> None:
    """Answers a bucket with the checksums of what is in it, "close" with how often it has opened memory."""
    torch.cuda.set_device(0)
    opened, times = Cuda.opened, 0

    def counted(self: Cuda, shared: Shared) -> torch.Tensor:
        nonlocal times
        times += 1
        return opened(self, shared)

    Cuda.opened = counted  # type: ignore[method-assign]
    while (order := pipe.recv()) is not None:
        if order == "close":
            close_opened()
            pipe.send(times)
        elif isinstance(order, SharedBucket):
            try:
                with order.tensors() as tensors:
                    pipe.send({name: checksum(tensor) for name, tensor in tensors})
            except WeightSyncError as error:
                pipe.send(error)


def started(target: Callable[..., None]) -> tuple[Any, Connection]:
    context = fork_server()
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,))
    process.start()
    theirs.close()
    return process, mine


class Reader:
    """Another process that reads buckets, and what it answered."""

    def __init__(self) -> None:
        self.process, self.pipe = started(reads)
        self.buckets: list[SharedBucket] = []
        self.received: dict[str, int] = {}
        self.opened = 0  # how often it has opened memory
        self._answers: list[dict[str, int]] = []

    def send(self, bucket: SharedBucket) -> Callable[[], None]:
        self.buckets.append(bucket)
        self.pipe.send(bucket)
        return self._confirm

    def _confirm(self) -> None:
        self.received.update(self._answers.pop(0) if self._answers else self.pipe.recv())

    def close(self) -> None:
        self.pipe.send("close")
        while isinstance(answer := self.pipe.recv(), dict):
            self._answers.append(answer)
        self.opened = answer


@pytest.fixture
def reader() -> Iterator[Reader]:
    other = Reader()
    yield other
    with suppress(OSError):
        other.pipe.send(None)
    other.process.join(30)
    assert not other.process.is_alive()


def test_another_process_reads_the_same_bytes(reader: Reader) -> None:
    """Of every dtype and size, one larger than a bucket among them; two buckets at most are on the card."""
    generator = torch.Generator().manual_seed(1)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16]
    shapes = [(), (3,), (0, 4), (700, 500), (1000, 1024), (5, 7), (2, 300_000), (11,)]
    tensors = {
        f"layer.{i}": (torch.randn(shape, generator=generator) * 3).to(dtypes[i % 5]).to(CARD)
        for i, shape in enumerate(shapes)
    }
    largest = max(one.nbytes for one in tensors.values())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    writer = BucketWriter(MIB, reader.send, CARD, reader.close)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == writer.peak_bytes <= MIB + largest
    assert reader.received == checksums(tensors)
    assert all(isinstance(bucket.memory, Shared) for bucket in reader.buckets)
    assert torch.cuda.memory_allocated() == before


def test_memory_is_opened_once_for_many_buckets(reader: Reader) -> None:
    """Two memories carry all buckets in turns; none is opened again before it is closed."""
    writer = BucketWriter(MIB, reader.send, CARD, reader.close)
    tensors = {str(i): torch.full((MIB // 4,), float(i), device=CARD) for i in range(7)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    keys = [bucket.key for bucket in reader.buckets]
    assert keys == [keys[0], keys[1]] * 3 + [keys[0]]
    assert (reader.opened, reader.received) == (2, checksums(tensors))


def test_a_receiver_that_is_killed_before_it_opens_leaves_nothing(reader: Reader) -> None:
    """torch would keep the memory of a handle that nobody has opened (`Cuda.share`)."""
    process, pipe = reader.process, reader.pipe

    def send(bucket: SharedBucket) -> Callable[[], None]:
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        pipe.send(bucket)
        return pipe.recv

    writer = BucketWriter(MIB, send, CARD)
    before = torch.cuda.memory_allocated()
    writer.add("0", torch.ones(MIB // 8, device=CARD))
    with pytest.raises((EOFError, BrokenPipeError, ConnectionResetError)):
        writer.finish()
    writer.close()
    assert torch.cuda.memory_allocated() == before


def waits(pipe: Connection) -> None:
    """Sends one bucket, and is never answered."""
    torch.cuda.set_device(0)

    def send(bucket: SharedBucket) -> Callable[[], None]:
        pipe.send(bucket)
        return pipe.recv

    writer = BucketWriter(MIB, send, CARD)
    writer.add("first", torch.ones(5, device=CARD))
    writer.finish()


def test_a_sender_that_is_killed_is_named() -> None:
    process, pipe = started(waits)
    bucket = pipe.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    free = torch.cuda.mem_get_info(CARD)[0]
    with pytest.raises(WeightSyncError, match=r"\(first\) cannot be opened on the device"):
        with bucket.tensors():
            pass
    close_opened()
    assert torch.cuda.mem_get_info(CARD)[0] == free


def test_a_full_card_is_named() -> None:
    total = torch.cuda.mem_get_info(CARD)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * MIB) / total, CARD)
    try:
        writer = BucketWriter(64 * MIB, lambda bucket: lambda: None, CARD)
        with pytest.raises(WeightSyncError, match="no room for a bucket of 67108864 bytes"):
            writer.add("a", torch.ones(3, device=CARD))
        writer.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CARD)


# ---- an engine in a process of its own ----


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("qwen3")


def here(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.to(CARD) for name, tensor in weights(model).items()}


@pytest.fixture
def own() -> Iterator[EngineProcess]:
    engine = start_engine(SPEC, name="own", bucket_bytes=20_000, hop="ipc")
    yield engine
    engine.close()


def fanout(*engines: EngineProcess, lost: list[str] | None = None) -> WeightFanout:
    """A sink for these. lost: where names of engines go that die meanwhile; None: none may."""
    names = {engine.name: engine for engine in engines}
    gone: list[str] = [] if lost is None else lost

    def note(name: str, why: str, engine: object) -> None:
        assert lost is not None, why
        gone.append(name)

    return WeightFanout(names, 20_000, note)


def send_all(sink: WeightFanout, tensors: dict[str, torch.Tensor], version: int) -> None:
    sink.begin(version)
    for name, tensor in tensors.items():
        sink.receive(name, tensor)
    sink.commit(version, checksums(tensors))


def test_an_engine_computes_with_what_stayed_on_the_card(own: EngineProcess, model: torch.nn.Module) -> None:
    """Twice, the second time other numbers; each set is confirmed by its checksums."""
    assert own.shares == CARD
    assert own.describe().endswith("in its own process, weights stay on cuda:0 on their way to it")
    tensors = here(model)
    for version, factor in enumerate((1.0, 0.5)):
        scaled = {name: tensor * factor for name, tensor in tensors.items()}
        send_all(fanout(own), scaled, version)
        for name, tensor in scaled.items():
            assert torch.equal(own.parameter(name), tensor.cpu())
        (done,) = run(own, [request("a", prompt(3))])  # type: ignore[arg-type]
        assert set(done.policy_versions.tolist()) == {version}


@pytest.mark.slow
def test_an_update_that_is_cut_short_is_closed_on_both_sides(
    own: EngineProcess, model: torch.nn.Module
) -> None:
    """The trainer's side fails between two tensors: nothing is served, and the next set is."""
    tensors = here(model)
    sink = fanout(own)
    sink.begin(0)
    for name in [*tensors][:5]:
        sink.receive(name, tensors[name])
    sink.close()
    sink.close()
    with pytest.raises(RolloutError, match="has no weights yet"):
        run(own, [request("a", prompt(3))])  # type: ignore[arg-type]
    send_all(fanout(own), tensors, 1)
    assert own.version == 1


@pytest.mark.slow
def test_a_set_that_differs_or_lacks_one_is_not_served(own: EngineProcess, model: torch.nn.Module) -> None:
    tensors = here(model)
    last = [*tensors][-1]
    sums = checksums(tensors)
    for version, (sent, said, message) in enumerate(
        (
            ({**tensors, last: tensors[last] + 1}, sums, "is not what was sent"),
            ({name: tensors[name] for name in [*tensors][:-1]}, sums, "did not arrive"),
        )
    ):
        sink = fanout(own)
        sink.begin(version)
        for name, tensor in sent.items():
            sink.receive(name, tensor)
        with pytest.raises(WeightSyncError, match=message):
            sink.commit(version, said)
        assert own.version == -1
    sink = fanout(own)
    sink.begin(7)
    with pytest.raises(WeightSyncError, match=r"commit\(8\) without begin\(8\)"):
        sink.commit(8, sums)
    send_all(fanout(own), tensors, 9)
    assert own.version == 9


class Cut:
    """A group between pools that brings ones, until it is aborted after so many batches."""

    def __init__(self, header: list[int], batches: int) -> None:
        self._header, self._left = header, batches

    def exchange(self, verb: str, messages: Sequence[tuple[int, torch.Tensor]], timeout: timedelta) -> str:
        self._left -= 1
        if self._left < 0:
            return "rank 2 of the transfer has died"
        for _, tensor in messages if verb == "recv" else ():
            if self._header:
                tensor.copy_(torch.tensor(self._header).view(torch.uint8))
                self._header = []
            else:
                tensor.fill_(1)
        return ""


@pytest.mark.slow
def test_a_communicator_that_is_aborted_leaves_the_engine_without_half_a_set(
    own: EngineProcess, model: torch.nn.Module
) -> None:
    """Between pools weights come by collectives, and go on by IPC: the engine serves none of what had come,
    both sides give the buckets up, and the same version comes once more.
    """
    tensors = here(model)
    parameters = [Parameter(name, tuple(one.shape), "float32") for name, one in tensors.items()]
    transfer = Transfer(Layout.replicated(parameters, [1]), (0,), 20_000, timeout_seconds=5, name="cut")
    before = torch.cuda.memory_allocated()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = Cut([4, transfer.digest], batches=6)
        with closing(fanout(own)) as sink, pytest.raises(WeightSyncError, match="rank 2 of the") as cut:
            receive(transfer, 4, sink, CARD, group)
        assert cut.value.is_outage
    finally:
        dist.destroy_process_group()
    del cut  # its frames have the tensor that was arriving
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert own.version == -1
    with pytest.raises(RolloutError, match="has no weights yet"):
        run(own, [request("a", prompt(3))])  # type: ignore[arg-type]
    send_all(fanout(own), tensors, 4)
    assert own.version == 4


@pytest.mark.slow
def test_an_engine_that_is_killed_meanwhile_is_left_out(model: torch.nn.Module) -> None:
    """The other one, which reads the same buckets, goes on."""
    engines = [start_engine(SPEC, name=name, bucket_bytes=20_000, hop="auto") for name in "01"]
    lost: list[str] = []
    try:
        sink = fanout(*engines, lost=lost)
        tensors = here(model)
        sink.begin(0)
        for number, (name, tensor) in enumerate(tensors.items()):
            if number == 4:
                os.kill(engines[1].pid, signal.SIGKILL)
            sink.receive(name, tensor)
        sink.commit(0, checksums(tensors))
        assert lost == ["1"]
        assert [engines[0].version, engines[0].shares] == [0, CARD]
    finally:
        for engine in engines:
            engine.close()


def hosts_an_engine(pipe: Connection) -> None:
    """Starts an engine, and stops in the middle of a set: both sides have buckets open."""
    torch.cuda.set_device(0)
    engine = start_engine(SPEC, bucket_bytes=20_000, hop="ipc")
    sink = fanout(engine)
    sink.begin(0)
    for name, tensor in [*here(build("qwen3")).items()][:5]:
        sink.receive(name, tensor)
    pipe.send(engine.pid)
    pipe.recv()


@pytest.mark.slow
def test_a_host_that_is_killed_in_mid_sync_takes_its_engine_along() -> None:
    """And nothing of either is left on the card, or among the machine's shared memory."""
    free, files = torch.cuda.mem_get_info(CARD)[0], set(os.listdir("/dev/shm"))
    process, pipe = started(hosts_an_engine)
    assert pipe.poll(300)
    engine = psutil.Process(pipe.recv())
    assert torch.cuda.mem_get_info(CARD)[0] < free
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    engine.wait(60)
    assert torch.cuda.mem_get_info(CARD)[0] == free
    # torch's own file, in which a process counts the readers of what it shares, stays behind on a real card.
    left = {name for name in os.listdir("/dev/shm") if name not in files}
    assert {name for name in left if str(process.pid) in name} <= {
        name for name in left if name.startswith(f"torch_{process.pid}_")
    }


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_an_engine_on_another_card_is_refused_or_gets_host_buckets(
    model: torch.nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    other = platform_of(CARD).visible_ids()[1:2]
    with pytest.raises(ConfigError, match="this process sees") as refused:
        start_engine(SPEC, bucket_bytes=20_000, accelerators=other, hop="ipc")
    assert refused.value.key == "rollout.weight_transport"
    client._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        engines = [
            start_engine(SPEC, name=n, bucket_bytes=20_000, accelerators=other, hop="auto") for n in "01"
        ]
    try:
        (warning,) = [one.message for one in caplog.records if "weights go through the host" in one.message]
        assert platform_of(CARD).uuid(0) in warning
        assert "rollout.weight_transport=host" in warning
        assert [one.shares for one in engines] == [None, None]
        tensors = here(model)
        send_all(fanout(*engines), tensors, 3)
        for name, tensor in tensors.items():
            assert torch.equal(engines[1].parameter(name), tensor.cpu())
    finally:
        for engine in engines:
            engine.close()


def test_an_engine_that_dies_at_the_try_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the process is gone: there is nothing that could take host buckets."""
    sent = client.EngineProcess._call

    def dies(self: EngineProcess, operation: str, *args: Any) -> Any:
        if operation == "look":
            os.kill(self.pid, signal.SIGKILL)
        return sent(self, operation, *args)

    monkeypatch.setattr(client.EngineProcess, "_call", dies)
    with pytest.raises(ReplicaLostError):
        start_engine(SPEC, bucket_bytes=20_000, hop="auto")
