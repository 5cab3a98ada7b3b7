"""The `ray` backend: one actor per device is a host process. Only this module imports Ray.

Token data stays in Ray's object store: a call has two return values, a small reply that comes to the
controller and the kept Batch, of which the controller only holds the reference. References travel as
top-level arguments, so that Ray brings the data to the worker (zero-copy on one node). Calls and replies are
pickled here, so that the bytes through the controller can be counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rondo.config.schema import ClusterConfig
from rondo.controller.ray_address import check_answers
from rondo.controller.ray_leftovers import Watcher
from rondo.controller.remote import (
    START_SECONDS,
    HostProgram,
    RemoteCluster,
    RemoteHandle,
    log_everything,
    worker_environment,
)
from rondo.core.batch import Batch
from rondo.core.errors import ConfigError, WorkerError, outage
from rondo.platform import Platform, built_in, planned, platform_of
from rondo.system.activity import Pulse
from rondo.system.actor import CallFailedError, Failure, ProcessLostError
from rondo.system.process import TAIL_LINES, header

_ENVIRONMENT = dict(os.environ)  # importing Ray writes into it
try:
    import ray
    from ray._private import services
    from ray.exceptions import RayError, RayTaskError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError('cluster.backend=ray, but Ray is not installed: pip install "rondo-rl[ray]"') from error

_log = logging.getLogger(__name__)
# Objects up to this size travel inside Ray's messages, through the controller; larger ones through the object
# store. Ray's own default is 100 KiB; a cluster started here keeps all but the smallest blocks out of
# the controller (a call takes as long, measured).
INLINE_BYTES = 1024
RAY_DEFAULT_INLINE_BYTES = 100 * 1024
Origin = Literal["started", "connected", "found"]
WATCH = "watch"  # Ray's concurrency group of what an actor answers while its event loop is blocked
TAIL_BYTES = 1 << 16  # of a log, in which the last lines are looked for
# For devices that another job is just giving back. A machine that fell silent counts as there until Ray has
# asked five times, 3 s apart and for 10 s each: so long its devices would be told as another job's.
READY_SECONDS = 90.0
RETURN_SECONDS = 300.0  # for a lost node: a machine boots, or a pod is made anew, in minutes


@dataclass(frozen=True)
class Whereabouts:
    """Where a host process runs."""

    node: str
    """Ray's id of the node."""
    address: str
    """The node's IP address."""
    pid: int
    """The host process's id on that node."""
    accelerators: tuple[str, ...]
    """Ids of its devices on that node (`Platform.visible_ids`)."""


class HostActor(HostProgram):
    """The actor of one device. directory: the controller's."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        log_everything()
        if os.path.isdir(directory):
            os.chdir(directory)  # functions given as `path.py:name` are found as the controller finds them

    async def whereabouts(self, kind: str) -> Whereabouts:
        """Says where this process runs. kind: of its device."""
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Whereabouts(node, address, os.getpid(), _assigned(platform_of(kind)))

    async def log_to(self, path: str, name: str) -> bool:
        """Has what this process prints and logs go behind what is in a file; says whether its folder is
        there.
        """
        folder = Path(path).parent
        if folder.is_dir():
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(log, header(name).encode())
            for standard in (1, 2):
                os.dup2(log, standard)
            os.close(log)
        return folder.is_dir()

    def device(self, platform: Platform) -> str:
        """Returns torch's name of the device that Ray assigned to this process."""
        return assigned_device(platform, _assigned(platform))

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    async def run_on(self, ticket: int | None, payload: bytes, *blocks: Batch) -> tuple[bytes, Batch | None]:
        """Runs one packed call; Ray brings the blocks, because each is an argument of its own."""
        return await self.run(ticket, payload, blocks)


class RayActor:
    """A process that Ray has started: called as an `ActorHandle` is, with the same errors. log: its file."""

    def __init__(self, actor: Any) -> None:
        self.place = Whereabouts("", "a node that is not known yet", 0, ())
        self.log: Path | None = None
        self._actor = actor

    async def start(self, kind: str) -> None:
        """Returns when it runs, and `place` is known. kind: of its device."""
        self.place = await self.call("whereabouts", kind)

    def pulse(self, stacks: bool) -> Future[Pulse]:
        """See ActorHandle.pulse."""
        answer: Future[Pulse] = self._actor.pulse.options(concurrency_group=WATCH).remote(stacks).future()
        return answer

    async def call(self, method: str, *args: Any) -> Any:
        """See ActorHandle.call. Of several results the first comes here, and a reference to each other."""
        made = getattr(self._actor, method).remote(*args)
        first, *others = made if isinstance(made, list) else [made]
        try:
            with self._errors_of_actors():
                value = await first
        except asyncio.CancelledError:
            ray.cancel(first)
            raise
        return (value, *others) if others else value

    def kill(self) -> None:
        """Ends it at once."""
        ray.kill(self._actor, no_restart=True)

    @contextmanager
    def _errors_of_actors(self) -> Iterator[None]:
        """Turns Ray's errors into those that a process of our own raises."""
        try:
            yield
        except RayTaskError as error:
            raise CallFailedError(Failure.of(error.cause)) from error
        except RayError as error:
            first = str(error).strip().partition("\n")[0]
            where = f"pid {self.place.pid} on {self.place.address}"
            why = f"its host process ({where}) died or cannot be reached: {type(error).__name__}: {first}"
            raise ProcessLostError(why, "" if self.log is None else _tail(self.log), closed=False) from error


class Patience:
    """How long devices are waited for: RETURN_SECONDS where Ray has lost a node that is not back."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds = 0.0
        """The limit, when it was last looked at."""
        self.lost = ""
        """What to do about the lost nodes; empty: there are none."""

    def ends(self, seconds: float) -> bool:
        """Says whether nothing more is waited for. seconds: the limit where no node is lost."""
        nodes = ray.nodes()
        there = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        gone = sorted({node["NodeManagerAddress"] for node in nodes} - there)
        self.seconds = RETURN_SECONDS if gone else seconds
        if gone and not self.lost:
            where = ", ".join(gone)
            self.lost = (
                f"Ray has lost {where}: `ray start` there, or on another machine, or lower cluster.devices"
            )
            _log.warning("too few devices: waits for %.0f s. %s", RETURN_SECONDS, self.lost)
        return time.monotonic() - self._began > self.seconds


class RayPools:
    """The placement groups of one cluster."""

    def __init__(self, pools: Mapping[str, int], device: str) -> None:
        self._sizes = dict(pools)
        self._bundle = bundle_of(device)
        self._groups: dict[str, PlacementGroup] = {}

    async def reserve(self) -> list[list[Any]]:
        """Sets the devices of every pool aside, on as few nodes as there is room. Returns, per pool, a
        scheduling strategy per device. Raises ConfigError when a pool does not get its devices in time.
        """
        for name, size in self._sizes.items():
            self._groups[name] = placement_group([dict(self._bundle)] * size, strategy="PACK")
        patience = Patience()
        for name, group in self._groups.items():
            while not group.wait(0.05):
                if patience.ends(READY_SECONDS):
                    raise ConfigError(self._no_room(name, patience))
                await asyncio.sleep(0.05)
        return [
            [PlacementGroupSchedulingStrategy(group, i) for i in range(self._sizes[name])]
            for name, group in self._groups.items()
        ]

    def _no_room(self, name: str, patience: Patience) -> str:
        what = " and ".join(f"{count:.0f} {kind}" for kind, count in self._bundle.items())
        free = ray.available_resources()
        left = ", ".join(f"{free.get(kind, 0):.0f} {kind}s" for kind in self._bundle)
        why = (
            ""
            if patience.lost
            else "another job has the rest (see `ray status`); wait for it, or ask for fewer"
        )
        return (
            f"cluster.pools.{name}: Ray did not set aside {self._sizes[name]} devices ({what} each) within "
            f"{patience.seconds:.0f} s; free beside what the other pools got are {left}: "
            f"{why or patience.lost}"
        )

    def remove(self) -> None:
        """Gives everything back. What is gone already is no error."""
        for group in self._groups.values():
            try:
                remove_placement_group(group)
            except RayError:
                continue  # its node or the whole cluster is gone, and the reservation with it
        self._groups.clear()


class RayCluster(RemoteCluster):
    """One actor per device. connection: how this process came to Ray."""

    def __init__(
        self,
        pools: Mapping[str, int],
        device: str,
        threads: int,
        timeout_seconds: float,
        connection: Connection,
        environment_before: Mapping[str, str],
        logs: Path | None,
    ) -> None:
        super().__init__(sum(pools.values()), device, threads, timeout_seconds, logs)
        self._environment_before = environment_before
        self._pools = RayPools(pools, device)
        self._connection = connection
        self._inline_bytes = INLINE_BYTES if connection.origin == "started" else RAY_DEFAULT_INLINE_BYTES
        self._actors: list[RayActor] = []  # by device, once they run

    async def start_hosts(self, env: Mapping[str, str]) -> None:
        """Starts the actors of each pool, numbers them node by node, and lets them join one torch.distributed
        world."""
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_concurrency": 10_000,
            "runtime_env": {"env_vars": dict(env)},
        }
        options |= platform_of(self.device).ray_options()
        host, started = ray.remote(concurrency_groups={WATCH: 1})(HostActor), []
        for strategies in await self._pools.reserve():
            made = [host.options(**options, scheduling_strategy=strategy) for strategy in strategies]
            started.append([RayActor(actor.remote(os.getcwd())) for actor in made])
        self._actors = [actor for pool in started for actor in pool]
        try:
            await asyncio.wait_for(_all(actor.start(self.device) for actor in self._actors), START_SECONDS)
        except (TimeoutError, CallFailedError, ProcessLostError) as error:
            raise ConfigError(
                f"Ray started no {self.num_devices} host processes within {START_SECONDS:.0f} s, {error!r}: "
                f"are its resources ({ray.available_resources()}) taken by another job? See `ray status`"
            ) from error
        order = _node_by_node([actor.place for actor in self._actors], [len(pool) for pool in started])
        self._actors = [self._actors[i] for i in order]
        this = ray.get_runtime_context().get_node_id()
        for device, actor in enumerate(self._actors):
            if self._logs is not None:
                log = self._logs / f"host-{device}.log"
                where = f"pid {actor.place.pid} on {actor.place.address}"
                if await actor.call("log_to", str(log), f"host process {device} ({where})"):
                    actor.log = log
            here = actor.place.node == this
            handle = RemoteHandle(device, actor, log=actor.log, here=here, inline_bytes=self._inline_bytes)
            self._handles.append(handle)
        one_node = len({actor.place.node for actor in self._actors}) == 1
        await self.join_world("127.0.0.1" if one_node else self._actors[0].place.address)

    def accelerators(self, role: str, devices: Sequence[int]) -> tuple[str, ...]:
        """Returns the ids of one rank's devices; () for a rank on one, which sees its own only."""
        places = [self._actors[device].place for device in devices]
        if len({place.node for place in places}) > 1:
            addresses = ", ".join(dict.fromkeys(place.address for place in places))
            raise ConfigError(
                f"the {len(places)} devices of one rank of {role} are on several nodes ({addresses}): make "
                "its pool a whole number of such ranks per node, or lower rollout.engine.tensor_parallel"
            )
        return tuple(gpu for place in places for gpu in place.accelerators) if len(places) > 1 else ()

    def store(self, data: Batch) -> ray.ObjectRef:
        """See RemoteCluster.store."""
        return ray.put(data)

    async def load(self, places: Sequence[ray.ObjectRef]) -> list[Batch]:
        """See RemoteCluster.load."""
        try:
            return await _all(places)
        except RayError as error:
            message = f"a block of this batch is lost, its host process or node is gone: {error}"
            raise outage(WorkerError("hosts", 0, "fetch", message)) from error

    async def shutdown(self) -> None:
        """See Cluster.shutdown."""
        if ray.is_initialized():  # else somebody else has ended Ray, and all hosts with it
            await super().shutdown()

    async def end_hosts(self) -> None:
        """See RemoteCluster.end_hosts; gives the devices back, and stops Ray where it was started here."""
        for actor in self._actors:
            actor.kill()
        here = ray.util.get_node_ip_address()
        try:
            await _gone([actor.place.pid for actor in self._actors if actor.place.address == here])
        finally:  # also when a second Ctrl-C comes now
            self._pools.remove()
            self._connection.end(self._environment_before)


def _node_by_node(places: Sequence[Whereabouts], pools: Sequence[int]) -> list[int]:
    """Returns the positions of the hosts by device number: pool after pool, in each of them node after node,
    the first host's node first."""
    order, start = [], 0
    for size in pools:
        first = places[start].node
        here = range(start, start + size)
        order += sorted(here, key=lambda i: (places[i].node != first, places[i].node, i))
        start += size
    return order


async def _all(refs: Any) -> list[Any]:
    return list(await asyncio.gather(*refs))


async def _gone(pids: Sequence[int], seconds: float = 5.0) -> None:
    """Waits until none of these processes of this machine is left."""
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


def bundle_of(device: str) -> dict[str, float]:
    """Returns what one host process takes of a node's resources. device: its kind."""
    resource = platform_of(device).ray_resource
    return {"CPU": 1, resource: 1} if resource else {"CPU": 1}


def devices_of_nodes(device: str) -> dict[str, int]:
    """Returns how many devices the nodes have, busy or not, by address. device: their kind. An accelerator
    counts where its node also has a CPU for the host process.
    """
    bundle, nodes = bundle_of(device), [node for node in ray.nodes() if node["Alive"]]
    slots = {node["NodeManagerAddress"]: 0 for node in nodes}
    for node in nodes:
        slots[node["NodeManagerAddress"]] += _slots(node["Resources"], bundle)
    return slots


async def wait_for_room(config: ClusterConfig, device: str) -> None:
    """Raises ConfigError when the nodes together have fewer devices than asked for: at once, unless nodes
    that Ray has lost may come back (`Patience`).
    """
    patience = Patience()
    while sum((slots := devices_of_nodes(device)).values()) < config.devices:
        if not patience.ends(0.0):
            await asyncio.sleep(0.5)
            continue
        kind = platform_of(device).title
        has = ", ".join(f"{count} on {address}" for address, count in slots.items())
        pools = f" (cluster.pools: {_sizes(config.pools)})" if config.pools else ""
        raise ConfigError(
            f"cluster.devices={config.devices}{pools}, but the Ray cluster has {sum(slots.values())} {kind}s "
            f"({has}): {patience.lost or 'lower cluster.devices, add nodes, or set cluster.device'}"
        )


def _assigned(platform: Platform) -> tuple[str, ...]:
    """Returns the ids of the devices that Ray assigned to this process."""
    ids = ray.get_runtime_context().get_accelerator_ids()
    return tuple(ids.get(platform.ray_resource, ()))


def assigned_device(platform: Platform, ids: Sequence[str]) -> str:
    """Returns torch's name of the one device that Ray assigned to this process. ids: of Ray.

    Ray narrows what a process sees to that, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (or what it is
    for others) is set: then the process sees all devices of its node. Raises ConfigError.
    """
    seen, title = platform.visible_ids(), platform.title
    if platform.host or platform.count() == 1:
        return platform.device()
    if len(ids) != 1 or ids[0] not in seen:
        raise ConfigError(
            f"cluster.device={platform.name}: Ray assigned {title} {', '.join(ids) or 'none'} to a host "
            f"process that sees {platform.count()} {title}s ({platform.visible}="
            f"{os.environ.get(platform.visible)}): start Ray on that node with the {title}s that torch sees "
            "there"
        )
    return platform.device(seen.index(ids[0]))


def _slots(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    return min(math.floor(resources.get(kind, 0) / need) for kind, need in bundle.items())


def _sizes(pools: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in pools.items())


def _tail(log: Path) -> str:
    """Returns the last lines of a log; none where only the other machine has it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])


@dataclass(frozen=True)
class Connection:
    """How this process came to Ray."""

    origin: Origin
    """Whether it started Ray, connected to one that runs, or was connected already."""
    watcher: Watcher | None = None
    """Of a Ray that was started here."""

    def end(self, environment_before: Mapping[str, str]) -> None:
        """Stops Ray, or disconnects, and takes back what it wrote into this process's environment."""
        if self.origin == "found":
            return
        ray.shutdown()
        for name in list(os.environ):
            if name.startswith("RAY_") or name == "PYTHONBREAKPOINT":
                if name in environment_before:
                    os.environ[name] = environment_before[name]
                else:
                    del os.environ[name]
        if self.watcher is not None:
            self.watcher.end()


async def check_address(address: str) -> None:
    """Raises ConfigError where no Ray can be at the address, before Ray asks there for minutes."""
    try:
        found = services.canonicalize_bootstrap_address(address)  # "auto" is what RAY_ADDRESS or a file says
        await check_answers(str(found), encrypted=os.environ.get("RAY_USE_TLS", "0") not in ("", "0"))
    except (ConnectionError, ValueError, OSError) as error:
        raise _no_ray(address, error) from error


def _no_ray(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"cluster.backend.address={address}: no Ray there: {error}; see `ray status` on its head node, or "
        "leave the address out to start Ray here",
        key="cluster.backend.address",
    )


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restores what SIGTERM did before: Ray's start has it raise SystemExit."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def start_ray(config: ClusterConfig, threads: int) -> Connection:
    """Starts Ray on this machine, or connects to one that runs, unless this process is connected already."""
    if ray.is_initialized():
        return Connection("found")
    address = config.backend.address
    env = {"env_vars": worker_environment(config, threads)}
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "runtime_env": env}
    with warnings.catch_warnings(), _own_sigterm():
        warnings.simplefilter("ignore")  # about Ray's future defaults
        if address is not None:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RayError, ValueError) as error:
                raise _no_ray(address, error) from error
            return Connection("connected")
        watcher = Watcher()
        try:
            ray.init(
                address="local",
                num_cpus=config.devices,  # one worker process each, and none to spare
                include_dashboard=False,
                # Workers that Ray starts ahead are up a second later than those that hosts ask for.
                _system_config={
                    "max_direct_call_object_size": INLINE_BYTES,
                    "prestart_worker_first_driver": False,
                },
                **quiet,
            )
        except Exception as error:  # Ray raises just that, when its own processes are not up in time
            ray.shutdown()
            watcher.end()
            raise ConfigError(
                f"Ray did not start on this machine: {error} Is it overloaded, or is there an old Ray (`ray "
                "stop`)? Or set cluster.backend.address to one that runs"
            ) from error
        return Connection("started", watcher)


def _kind(choice: str, resources: Mapping[str, float]) -> str:
    """Returns the kind of the devices. choice: `cluster.device`; auto: what the nodes have."""
    if choice != "auto":
        return planned(choice).kind
    there = [one for one in built_in() if one.ray_resource and resources.get(one.ray_resource, 0) > 0]
    return (there or [planned("cpu")])[0].kind


async def start_ray_cluster(config: ClusterConfig, threads: int, logs: Path | None) -> RayCluster:
    """Starts or joins Ray, then starts one host per device. logs: a folder for their log files, on machines
    that see it. Raises ConfigError when there are fewer devices than asked for.
    """
    ours = _ENVIRONMENT.keys()
    environment_before = {k: v for k, v in os.environ.items() if k in ours or not k.startswith("RAY_")}
    if config.backend.address is not None and not ray.is_initialized():
        await check_address(config.backend.address)
    connection = start_ray(config, threads)
    cluster: RayCluster | None = None
    try:
        device = _kind(config.device, ray.cluster_resources())
        await wait_for_room(config, device)
        pools = dict(config.pools) or {"all": config.devices}
        timeout = config.timeout_seconds
        cluster = RayCluster(pools, device, threads, timeout, connection, environment_before, logs)
        await cluster.start_hosts(worker_environment(config, threads))
    except BaseException:
        if cluster is not None:
            await cluster.shutdown()
        else:
            connection.end(environment_before)
        raise
    return cluster
