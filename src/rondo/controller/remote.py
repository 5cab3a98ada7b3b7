"""Hosts in processes of their own, rondo's or Ray's: calls, replies and blocks, and the host's program."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import torch.distributed as dist

from rondo.config.schema import ClusterConfig
from rondo.controller.calls import Ended, HostHandle, Ran, RankCall
from rondo.controller.cluster import Cluster
from rondo.controller.distributed import interface_towards
from rondo.controller.host import Host, collect_as_before, failure_of
from rondo.core.batch import ROW_ID, Batch, BatchRef, Block, Shard
from rondo.core.errors import ConfigError, WorkerError, outage
from rondo.platform import Platform, named_in_environment, planned, platform_of
from rondo.system import activity
from rondo.system.access import is_loopback
from rondo.system.activity import Activity, Pulse
from rondo.system.actor import PICKLE_ERRORS, Actor, CallFailedError, Failure, ProcessLostError
from rondo.system.process import users_path
from rondo.system.streams import log_to_stderr
from rondo.system.usage import CpuSeconds, checks_cpu_seconds, children_cpu_seconds

START_SECONDS = 300.0  # for hosts to come up and join: imports and a cold disk take minutes
COUNT_SECONDS = 2.0  # for a host to say what it has used
CLOSE_SECONDS = 10.0  # for a host to close its workers; then it is killed
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packed:
    """A call as it travels."""

    payload: bytes
    """The pickled call, without the handles of its shard."""
    handles: tuple[Any, ...]
    """The handles of its shard, which the backend carries."""


@dataclass(frozen=True)
class StoredBlock:
    """The handle of a block."""

    place: Any
    """Where its backend keeps it."""
    num_bytes: int
    """The block's size."""


class Remote(Protocol):
    """The process of a host: an `ActorHandle`, or what stands for it where another has started it."""

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """See ActorHandle.call. Cancelling an `await` of it gives up the call."""

    def pulse(self, stacks: bool) -> Future[Pulse]:
        """See ActorHandle.pulse."""

    def kill(self) -> None:
        """Ends it, and what it has started."""


class RemoteHandle(HostHandle):
    """Sends calls to a host process. here: it is on the controller's machine. inline_bytes: blocks up to this
    size travel inside the messages.
    """

    def __init__(
        self, device: int, process: Remote, *, log: Path | None, here: bool = True, inline_bytes: int = 0
    ) -> None:
        super().__init__(device)
        self.process = process
        self.log = log
        self.here = here
        self._inline_bytes = inline_bytes

    def pulse(self, stacks: bool) -> Future[Pulse]:
        """See HostHandle.pulse."""
        return self.process.pulse(stacks)

    async def ask(self, operation: str, *args: Any) -> Any:
        """Has the process carry out an operation of HostProgram. Raises ProcessLostError, CallFailedError."""
        return await self.process.call(operation, *args)

    async def send(self, packed: Packed, ticket: int | None) -> Ended:
        """See HostHandle.send; a dead process becomes a Failure, which says where its log is."""
        self._count(len(packed.payload), *packed.handles)
        try:
            places = [handle.place for handle in packed.handles]
            answer = self.process.call("run_on", ticket, packed.payload, *places)
            # A call with a ticket ends in the background: others wait for its turn to be over.
            raw, place = await (answer if ticket is None else asyncio.shield(_heard(answer)))
        except ProcessLostError as error:
            log = f"; its log is {self.log}" if self.log is not None else ""
            last = f"\nIts last lines:\n{error.tail}" if error.tail else ""
            said = "" if error.__cause__ is None else str(error.__cause__)
            return Failure(f"{error}{log}{last}", said, at=time.time(), died=True, outage=True), None
        ran = unpack_reply(raw)
        if isinstance(ran, Failure):
            self._count(len(raw))
            return ran, None
        kept = None if ran.kept is None else StoredBlock(place, ran.kept.num_bytes)
        self._count(len(raw), *([] if kept is None else [kept]))
        return ran, kept

    def _count(self, num_bytes: int, *blocks: StoredBlock) -> None:
        inline = [block.num_bytes for block in blocks if block.num_bytes <= self._inline_bytes]
        self.num_bytes += num_bytes + sum(inline)

    def pack(self, call: RankCall, alike: dict[Any, bytes]) -> Packed:
        """Pickles a call (classes and functions of `__main__` by value); blocks travel apart from it."""
        shard = call.shard
        if shard is None:
            return Packed(pickle.dumps((cloudpickle.dumps(call), None)), ())
        # Apart: a shard is arrays, and nothing of the user's, for which cloudpickle takes twice as long. What
        # is left is the same on all ranks, but for whose result is kept.
        key = call.method, call.keep, call.collect, call.is_async, id(call.args), id(call.kwargs)
        if key not in alike:
            alike[key] = cloudpickle.dumps(replace(call, shard=None))
        return Packed(pickle.dumps((alike[key], (shard.index, shard.parts))), shard.handles)


class RemoteCluster(Cluster):
    """Devices with a host process each. A backend says where blocks are kept (`store` and `load`), and how
    the processes begin and end.
    """

    def __init__(
        self, num_devices: int, device: str, threads: int, timeout_seconds: float, logs: Path | None
    ) -> None:
        """timeout_seconds: of a collective operation. logs: a folder for the log files of the hosts."""
        super().__init__(num_devices, device, threads)
        self._timeout_seconds = timeout_seconds
        self._handles: list[RemoteHandle] = []
        self._logs = logs
        self._moved_bytes = 0  # what was put and fetched; the handles count their calls and replies
        self._closed = False

    def store(self, data: Batch) -> Any:
        """Returns the place of a block that the controller puts."""
        raise NotImplementedError

    async def load(self, places: Sequence[Any]) -> list[Batch]:
        """Returns the blocks at these places."""
        raise NotImplementedError

    async def end_hosts(self) -> None:
        """Ends all processes: their workers are closed, or never will be."""
        raise NotImplementedError

    async def join_world(self, address: str) -> None:
        """Has all hosts join one torch.distributed world, which meets at this address of the first one."""
        place = address
        try:
            asked = self._handles[0].ask("open_store", address, self.num_devices)
            place = await asyncio.wait_for(asked, START_SECONDS)
            world = self.num_devices, self.device, self.threads, self._timeout_seconds, place
            joining = (handle.ask("join", handle.device, *world) for handle in self._handles)
            await asyncio.wait_for(asyncio.gather(*joining), START_SECONDS)
        except ProcessLostError as error:
            message = f"{error}\nIts last lines:\n{error.tail}"
            raise outage(WorkerError("hosts", 0, "start", message)) from error
        except (TimeoutError, CallFailedError) as error:
            why = str(error) or f"not within {START_SECONDS:.0f} s"
            raise WorkerError(
                "hosts",
                0,
                "start",
                f"the {self.num_devices} host processes did not join one torch.distributed world at {place}: "
                f"{why}. Of several machines: is there a firewall between them; do GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME, where they are set, name the network that joins them (docs/cluster.md)?",
            ) from error

    async def resolve(self, handles: Sequence[Any]) -> list[Batch]:
        """See Cluster.resolve. Whole blocks come to the controller, and are counted."""
        blocks = await self.load([handle.place for handle in handles])
        self._moved_bytes += sum({id(handle): handle.num_bytes for handle in handles}.values())
        return blocks

    def put(self, batch: Batch, index_columns: Sequence[str] = ()) -> BatchRef:
        """See Cluster.put."""
        index, data = batch.parted(index_columns)
        self._moved_bytes += index.num_bytes + data.num_bytes
        if not data.columns:
            return BatchRef(index, (), self.resolve)
        stored = StoredBlock(self.store(data), data.num_bytes)
        block = Block(stored, tuple(data.columns), index.scalars(ROW_ID))
        return BatchRef(index, (block,), self.resolve)

    def driver_bytes(self) -> int:
        """See Cluster.driver_bytes: pickled calls and replies, what is put and fetched, and blocks inside
        messages.
        """
        return self._moved_bytes + sum(handle.num_bytes for handle in self._handles)

    async def cpu_seconds(self) -> dict[int, CpuSeconds]:
        """See Cluster.cpu_seconds; what starts the processes counts nowhere."""
        used: dict[int, CpuSeconds] = {}

        async def ask(handle: RemoteHandle) -> None:
            # Dead since: it adds nothing more. Or busy, or hung: it is counted the next time.
            with contextlib.suppress(ProcessLostError, TimeoutError):
                used[handle.device] = await asyncio.wait_for(handle.ask("cpu_seconds"), COUNT_SECONDS)

        await asyncio.gather(*(ask(handle) for handle in self._handles if handle.broken is None))
        return dict(sorted(used.items()))

    async def shutdown(self) -> None:
        """See Cluster.shutdown. Hosts that are broken or do not close within CLOSE_SECONDS are killed."""
        if self._closed:
            return
        self._closed = True
        self.end_watch()
        collect_as_before()

        async def close(handle: RemoteHandle) -> None:
            with contextlib.suppress(ProcessLostError):
                await asyncio.wait_for(handle.ask("close"), CLOSE_SECONDS)

        try:
            closing = [close(handle) for handle in self._handles if handle.broken is None]
            for outcome in await asyncio.gather(*closing, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    _log.warning("a host process did not close its workers, and is killed: %r", outcome)
        finally:
            await self.end_hosts()


def _heard(answer: Awaitable[Any]) -> asyncio.Future[Any]:
    """Returns the same as a task, whose error asyncio does not report once nobody waits for it any more: a
    host that was given up dies later.
    """
    task = asyncio.ensure_future(answer)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def unpack_call(raw: bytes) -> RankCall:
    """Returns what `RemoteHandle.pack` packed, less the handles."""
    body, rows = pickle.loads(raw)
    call: RankCall = pickle.loads(body)
    if rows is None:
        return call
    index, parts = rows
    return replace(call, shard=Shard(index, parts, ()))


def unpack_reply(raw: bytes) -> Ran | Failure:
    """Returns what `HostProgram.run` sent."""
    try:
        ran: Ran | Failure = pickle.loads(raw)
    except PICKLE_ERRORS as error:
        return replace(failure_of(error), message=f"the result cannot be read here: {error}")
    return ran


def _pack_reply(ran: Ran | Failure) -> bytes:
    """Pickles the exception on its own: where it cannot be read, the failure still arrives."""
    if isinstance(ran, Failure):
        ran = replace(ran, pickled=_pickled(ran.error))
    try:
        return cloudpickle.dumps(ran)
    except PICKLE_ERRORS as error:
        return pickle.dumps(replace(failure_of(error), message=f"the result cannot be pickled: {error}"))


def _pickled(cause: BaseException | None) -> bytes | None:
    try:
        return None if cause is None else cloudpickle.dumps(cause)
    except PICKLE_ERRORS:
        return None


def log_everything() -> None:
    """Has this process write what it logs, and what its engines and scorers print, to its standard error, and
    its stacks on SIGUSR1, even while somebody holds the interpreter.
    """
    log_to_stderr("%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("rondo.system.process").setLevel(logging.DEBUG)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


class HostProgram(Actor):
    """The process of one device; all its methods but `pulse` run on one event loop. See Host for what runs
    where.
    """

    def __init__(self) -> None:
        self._host: Host | None = None
        self._store: dist.Store | None = None

    async def open_store(self, address: str, world_size: int) -> str:
        """Opens the meeting point of the world, on rank 0; returns where the others find it: of one machine
        (a loopback address) a file that only this user's processes can open, and that is gone with this one;
        else a port on all of this machine's addresses, open to everybody there.
        """
        if is_loopback(address) and sys.platform == "linux":
            memory = os.memfd_create("rondo-world")  # open until this process ends
            return f"/proc/{os.getpid()}/fd/{memory}"
        self._store = dist.TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False)
        return f"{address}:{self._store.port}"

    async def join(
        self,
        rank: int,
        world_size: int,
        device: str,
        threads: int,
        timeout_seconds: float,
        place: str,
    ) -> None:
        """Starts torch.distributed; returns when all ranks have joined. device: their kind. place: what
        `open_store` has returned.
        """
        with Activity("joining the world", in_turn=True, bound=True):
            if place.startswith("/"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of its sockets, which take anybody, too
                store: dist.Store = dist.FileStore(place)
            else:
                address, _, port = place.rpartition(":")
                # Gloo would listen on the address of this machine's name, which in many a file of hosts is
                # a loopback one: nobody on another machine could connect.
                if towards := interface_towards(address):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", towards)
                store = self._store or dist.TCPStore(address, int(port), world_size, is_master=False)
            self._host = Host(rank, world_size, self.device(platform_of(device)), threads, timeout_seconds)
            await self._host.start(store)

    def device(self, platform: Platform) -> str:
        """Returns torch's name of this process's device: the only one that it sees."""
        return platform.device()

    async def run(
        self, ticket: int | None, payload: bytes, blocks: Sequence[Batch]
    ) -> tuple[bytes, Batch | None]:
        """Runs one packed call; returns the reply for `unpack_reply`, and the kept Batch."""
        assert self._host is not None
        try:
            call = unpack_call(payload)
        except PICKLE_ERRORS as error:  # e.g. the worker class's module cannot be imported here
            if ticket is not None:
                await self._host.skip(ticket)
            return _pack_reply(failure_of(error)), None
        ran, kept = await self._host.run(call, blocks, ticket)
        return _pack_reply(ran), kept

    def pulse(self, stacks: bool = False) -> Pulse:
        """Returns what this process is doing; from any thread, whatever the others do. See Host.pulse."""
        return activity.pulse(stacks) if self._host is None else self._host.pulse(stacks)

    async def cpu_seconds(self) -> CpuSeconds:
        """Returns what Cluster.cpu_seconds says of this host."""
        return CpuSeconds(time.process_time() + children_cpu_seconds(), checks_cpu_seconds())

    async def close(self) -> None:
        """Closes the workers."""
        if self._host is not None:
            await self._host.close()


def worker_environment(config: ClusterConfig, threads: int) -> dict[str, str]:
    """Makes the environment of the host processes: import what the controller can import, no more threads
    than planned, and what `cluster.env` says. Raises ConfigError for a variable that rondo sets.
    """
    platform = planned(config.device)
    if platform.visible in config.env:
        raise ConfigError(
            f"cluster.env.{platform.visible}: rondo sets this, by cluster.devices; leave it out"
        )
    own = {"PYTHONPATH": os.pathsep.join(users_path()), "OMP_NUM_THREADS": str(threads)}
    own |= named_in_environment(platform)
    return {name: str(value) for name, value in config.env.items()} | own
