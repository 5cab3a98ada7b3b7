"""The `ray` backend: one actor per device is a host process. Only this module and `ray_pools` import Ray.

Token data stays in Ray's object store: a call has two return values, a small reply that comes to the
controller and the kept Batch, of which the controller only holds the reference. References travel as
top-level arguments, so that Ray brings the data to the worker (zero-copy on one node). Calls and replies are
pickled here, so that the bytes through the controller can be counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rondo.batch import Batch
from rondo.config.schema import ClusterConfig
from rondo.controller.calls import Answer, Failure, Reply
from rondo.controller.remote import (
    CLOSE_SECONDS,
    START_SECONDS,
    HostProgram,
    Packed,
    RemoteCluster,
    RemoteHandle,
    StoredBlock,
    unpack_reply,
    worker_environment,
)
from rondo.errors import ConfigError, DataError

try:
    import ray
    from ray.exceptions import RayError

    from rondo.controller.ray_pools import RayPools, assigned_device, check_room, pool_sizes
except ImportError as error:
    raise ConfigError('cluster.backend=ray, but Ray is not installed: pip install "rondo-rl[ray]"') from error

# Objects up to this size travel inside Ray's messages, through the controller; larger ones through the object
# store. Ray's own default is 100 KiB; a cluster started here keeps all but the smallest blocks out of
# the controller (a call takes as long, measured).
INLINE_BYTES = 1024
RAY_DEFAULT_INLINE_BYTES = 100 * 1024
Origin = Literal["started", "connected", "found"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Whereabouts:
    """Where a host process runs."""

    node: str
    address: str
    pid: int
    # Ids of its GPUs on that node, as CUDA_VISIBLE_DEVICES has them.
    accelerators: tuple[str, ...]


class HostActor(HostProgram):
    """The actor of one device.

    device: "cpu", or "cuda" for the GPU that Ray assigned to this process.
    """

    def __init__(self, device: str, threads: int, directory: str) -> None:
        super().__init__()
        if os.path.isdir(directory):
            os.chdir(directory)  # functions given as `path.py:name` are found as the controller finds them
        self._device, self._threads = device, threads

    async def whereabouts(self) -> Whereabouts:
        """Says where this process runs."""
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Whereabouts(node, address, os.getpid(), tuple(str(i) for i in ray.get_gpu_ids()))

    async def join_world(self, rank: int, world_size: int, address: str, port: int) -> None:
        """Start torch.distributed on the GPU that Ray assigned."""
        device = self._device
        if device == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            device = assigned_device(ray.get_gpu_ids(), visible, torch.cuda.device_count())
        await self.join(rank, world_size, device, self._threads, address, port)

    async def run_on(self, ticket: int | None, payload: bytes, *blocks: Batch) -> tuple[bytes, Batch | None]:
        """Run one packed call; Ray brings the blocks."""
        return await self.run(ticket, payload, blocks)


class RayHandle(RemoteHandle):
    """Sends calls to one host actor."""

    def __init__(self, device: int, actor: Any, place: Whereabouts, inline_bytes: int) -> None:
        super().__init__(device)
        self.actor = actor
        self.place = place
        self._inline_bytes = inline_bytes

    def send(self, packed: Packed, ticket: int | None) -> Coroutine[Any, Any, Answer]:
        """Sends to the actor now; a dead process becomes a Failure."""
        sizes = [handle.num_bytes for handle in packed.handles]
        self.num_bytes += len(packed.payload) + sum(size for size in sizes if size <= self._inline_bytes)
        method = self.actor.run_on.options(num_returns=2)
        reply, kept = method.remote(ticket, packed.payload, *(handle.place for handle in packed.handles))
        return self._answer(reply, kept, is_async=ticket is None)

    async def _answer(self, reply_ref: ray.ObjectRef, kept_ref: ray.ObjectRef, *, is_async: bool) -> Answer:
        try:
            raw = await reply_ref
        except RayError as error:
            first = str(error).strip().partition("\n")[0]
            kind = type(error).__name__
            where = f"pid {self.place.pid} on {self.place.address}"
            message = f"its host process ({where}) died or cannot be reached: {kind}: {first}"
            return Reply(failure=Failure(message, str(error), time.time(), died=True)), None
        except asyncio.CancelledError:
            if is_async and self.broken is None:
                ray.cancel(reply_ref)
            raise
        self.num_bytes += len(raw)
        reply = unpack_reply(raw)
        if reply.kept is None:
            return reply, None
        if reply.kept.num_bytes <= self._inline_bytes:
            self.num_bytes += reply.kept.num_bytes
        return reply, StoredBlock(kept_ref, reply.kept.num_bytes)


class RayCluster(RemoteCluster):
    """One actor per device. origin: how this process came to Ray."""

    def __init__(
        self,
        pools: Mapping[str, int],
        device: str,
        threads: int,
        origin: Origin,
        environment_before: Mapping[str, str],
    ) -> None:
        super().__init__(sum(pools.values()), device, threads)
        self._environment_before = environment_before
        self._pools = RayPools(pools, device)
        self._owns_ray = origin != "found"
        self._inline_bytes = INLINE_BYTES if origin == "started" else RAY_DEFAULT_INLINE_BYTES
        self._handles: list[RayHandle] = []
        self._actors: list[Any] = []

    async def start_hosts(self, env: Mapping[str, str]) -> None:
        """Start the actors of each pool, number them node by node, and let them join one torch.distributed
        world."""
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": dict(env)},
        }
        if self.device == "cuda":
            options["num_gpus"] = 1
        host, started = ray.remote(HostActor), []
        for strategies in await self._pools.reserve():
            made = [host.options(**options, scheduling_strategy=strategy) for strategy in strategies]
            started.append([actor.remote(self.device, self.threads, os.getcwd()) for actor in made])
        self._actors = [actor for pool in started for actor in pool]
        try:
            found = await asyncio.wait_for(_all(a.whereabouts.remote() for a in self._actors), START_SECONDS)
        except (TimeoutError, RayError) as error:
            raise ConfigError(
                f"Ray started no {self.num_devices} host processes within {START_SECONDS:.0f} s, {error!r}: "
                f"are its resources ({ray.available_resources()}) taken by another job? See `ray status`"
            ) from error
        order = _node_by_node(found, [len(pool) for pool in started])
        self._actors = [self._actors[i] for i in order]
        places = [found[i] for i in order]
        self._handles = [
            RayHandle(device, actor, place, self._inline_bytes)
            for device, (actor, place) in enumerate(zip(self._actors, places, strict=True))
        ]
        one_node = len({place.node for place in places}) == 1
        address = "127.0.0.1" if one_node else places[0].address
        port = await self._actors[0].open_store.remote(address, self.num_devices)
        await _all(
            a.join_world.remote(rank, self.num_devices, address, port) for rank, a in enumerate(self._actors)
        )

    def accelerators(self, role: str, devices: Sequence[int]) -> tuple[str, ...]:
        """The GPUs of one rank on several devices; () for a rank on one device, which sees its own only."""
        places = [self._handles[device].place for device in devices]
        if len({place.node for place in places}) > 1:
            addresses = ", ".join(dict.fromkeys(place.address for place in places))
            raise ConfigError(
                f"the {len(places)} devices of one rank of {role} are on several nodes ({addresses}): make "
                "its pool a whole number of such ranks per node, or lower rollout.engine.tensor_parallel"
            )
        return tuple(gpu for place in places for gpu in place.accelerators) if len(places) > 1 else ()

    async def resolve(self, handles: Sequence[Any]) -> list[Batch]:
        """See Cluster.resolve. Whole blocks come to the controller and are counted."""
        try:
            blocks: list[Batch] = await _all(handle.place for handle in handles)
        except RayError as error:
            raise DataError(
                f"a block of this batch is lost, its host process or node is gone: {error}"
            ) from error
        self._moved_bytes += sum({id(handle): handle.num_bytes for handle in handles}.values())
        return blocks

    def store(self, data: Batch) -> ray.ObjectRef:
        """See RemoteCluster.store."""
        return ray.put(data)

    async def cpu_seconds(self) -> dict[int, float]:
        """See Cluster.cpu_seconds; Ray's own processes count nowhere."""
        alive = [device for device, handle in enumerate(self._handles) if handle.broken is None]
        asked = [_quietly(self._handles[device].actor.cpu_seconds.remote()) for device in alive]
        found = zip(alive, await asyncio.gather(*asked), strict=True)
        return {device: seconds for device, seconds in found if seconds is not None}

    async def shutdown(self) -> None:
        """See Cluster.shutdown. Hosts that are broken or do not close within CLOSE_SECONDS are killed."""
        if self._closed:
            return
        self._closed = True
        try:
            if ray.is_initialized():
                closing = [_quietly(h.actor.close.remote()) for h in self._handles if h.broken is None]
                await asyncio.wait_for(asyncio.gather(*closing), CLOSE_SECONDS)
        except TimeoutError:
            _log.warning("workers did not close within %.0f s; their processes are killed", CLOSE_SECONDS)
        finally:
            if ray.is_initialized():
                for actor in self._actors:
                    ray.kill(actor, no_restart=True)
                here = ray.util.get_node_ip_address()
                places = [handle.place for handle in self._handles]
                try:
                    await _gone([place.pid for place in places if place.address == here])
                finally:  # also when a second Ctrl-C comes now
                    self._pools.remove()
                    if self._owns_ray:
                        stop_ray(self._environment_before)


def _node_by_node(places: Sequence[Whereabouts], pools: Sequence[int]) -> list[int]:
    """Positions of the hosts by device number: pool after pool, in each of them node after node, the first
    host's node first."""
    order, start = [], 0
    for size in pools:
        first = places[start].node
        here = range(start, start + size)
        order += sorted(here, key=lambda i: (places[i].node != first, places[i].node, i))
        start += size
    return order


async def _all(refs: Any) -> list[Any]:
    return list(await asyncio.gather(*refs))


async def _quietly(ref: ray.ObjectRef) -> Any:
    """Returns the host's answer, or None where it is dead."""
    try:
        return await ref
    except RayError:
        return None


async def _gone(pids: Sequence[int], seconds: float = 5.0) -> None:
    """Wait until none of these processes of this machine is left."""
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


def start_ray(config: ClusterConfig, threads: int) -> Origin:
    """Start Ray on this machine, or connect to one that runs, unless this process is connected already."""
    if ray.is_initialized():
        return "found"
    address = config.backend.address
    env = {"env_vars": worker_environment(threads)}
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "runtime_env": env}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Ray's future defaults
        if address is not None:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RayError, ValueError) as error:
                raise ConfigError(f"cluster.backend.address={address}: no Ray there: {error}") from error
            return "connected"
        try:
            ray.init(
                address="local",
                num_cpus=config.devices,  # one worker process each, and none to spare
                include_dashboard=False,
                _system_config={"max_direct_call_object_size": INLINE_BYTES},
                **quiet,
            )
        except Exception as error:  # Ray raises just that, when its own processes are not up in time
            ray.shutdown()
            raise ConfigError(
                f"Ray did not start on this machine: {error} Is it overloaded, or is there an old Ray (`ray "
                "stop`)? Or set cluster.backend.address to one that runs"
            ) from error
        return "started"


def stop_ray(environment_before: Mapping[str, str]) -> None:
    """Stop Ray, or disconnect, and take back what it wrote into this process's environment."""
    ray.shutdown()
    for name in list(os.environ):
        if name.startswith("RAY_") or name == "PYTHONBREAKPOINT":
            if name in environment_before:
                os.environ[name] = environment_before[name]
            else:
                del os.environ[name]


async def start_ray_cluster(config: ClusterConfig, threads: int) -> RayCluster:
    """Start or join Ray, then one host per device. Raises ConfigError when there are fewer devices than asked
    for."""
    environment_before = dict(os.environ)
    origin = start_ray(config, threads)
    cluster: RayCluster | None = None
    try:
        resources = ray.cluster_resources()
        use_cuda = config.device == "cuda" or (config.device == "auto" and resources.get("GPU", 0) > 0)
        device = "cuda" if use_cuda else "cpu"
        check_room(config, device)
        cluster = RayCluster(pool_sizes(config), device, threads, origin, environment_before)
        await cluster.start_hosts(worker_environment(threads))
    except BaseException:
        if cluster is not None:
            await cluster.shutdown()
        elif origin != "found":
            stop_ray(environment_before)
        raise
    return cluster
