"""The engines of one rollout worker: started, behind one router, started again when their process dies."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import torch

from rondo.core.errors import RondoError
from rondo.core.types import Hop
from rondo.platform import ProfileTurn
from rondo.rollout import EngineSpec, RolloutEngine, build_engine, start_engine
from rondo.rollout.build import OWN
from rondo.rollout.fanout import WeightFanout
from rondo.rollout.router import Router
from rondo.rollout.server import EngineProcess
from rondo.system.activity import Activity
from rondo.weights import Sent

POLL_SECONDS = 0.1  # between looks for what threads, not the event loop, have changed
STACKS_SECONDS = 1.0  # for engines to say where they are
_log = logging.getLogger(__name__)


class Replicas:
    """count engines of `spec`, each in a process of its own, or (own_process False) one in this process.

    parameters: the trainer's storage, for an engine in this process to use in place. bucket_bytes: of weights
    in transit. accelerators, hop: see `start_engine`. Raises ConfigError or RolloutError with an engine's own
    message.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        count: int,
        own_process: bool,
        bucket_bytes: int,
        parameters: Mapping[str, torch.Tensor] | None = None,
        accelerators: Sequence[str] = (),
        hop: Hop = "host",
    ) -> None:
        self._spec = spec
        self._bucket_bytes = bucket_bytes
        self._accelerators = accelerators
        self._hop: Hop = hop
        self._lock = threading.Lock()  # guards the next three
        self._closed = False
        self._news: str | None = None
        self._threads: list[threading.Thread] = []
        engines: dict[str, RolloutEngine]
        if own_process:
            engines = dict(self._start_all(count))
        else:
            engines = {"0": build_engine(spec, parameters)}
        # a replica may have a quarter more than it decodes at once, so that a slot never waits for the next
        limit = spec.max_concurrent + -(-spec.max_concurrent // 4)
        self.router = Router(engines, limit=limit, on_lost=self._restart)
        for name, engine in engines.items():
            self._watch(name, engine)

    def describe(self) -> str:
        """Writes, in one line, what kind of engines, and how many."""
        engines = list(self.router.engines().values())
        first = engines[0].describe() if engines else f"{self._spec.engine}: no replica"
        return first if len(engines) == 1 else f"{len(engines)} × {first}"

    def sink(self, what: Sent = "merged") -> WeightFanout:
        """Returns where the next version's weights go: all engines that live, after those that are being
        started. Adapters alone do not go to one that was started only just now, without a base: it wants
        weights still.
        """
        with self._lock:
            threads = list(self._threads)
        with Activity("waiting for engines that are started again", bound=False):
            for thread in threads:
                thread.join()
        engines = self.router.engines()
        if what == "adapters":
            engines = {name: engine for name, engine in engines.items() if engine.version >= 0}
        return WeightFanout(engines, self._bucket_bytes, self.router.members.mark_dead)

    def loaded(self, version: int) -> None:
        """Notes that weights were loaded. Engines that died meanwhile still want them. Raises RolloutError
        when none lives or can be started.
        """
        self.router.members.check_hope()
        with self._lock:
            if all(engine.version == version for engine in self.router.engines().values()):
                self._news = None

    @property
    def num_processes(self) -> int:
        """Counts how many of the engines that live have a process of their own."""
        return sum(isinstance(engine, EngineProcess) for engine in self.router.engines().values())

    @property
    def wanting(self) -> int:
        """Counts how many engines want weights: those without, and those that are being started."""
        engines = self.router.engines().values()
        return self.router.members.num_coming + sum(engine.version < 0 for engine in engines)

    async def restarted(self) -> str:
        """Returns when an engine was started again and wants weights; a sentence that says so. Raises
        RolloutError when none is left and none can come.
        """
        while (news := self._news) is None:
            if not self._closed:
                self.router.members.check_hope()
            await asyncio.sleep(POLL_SECONDS)
        return news

    def stacks(self) -> str:
        """Returns the stacks of the engines' own processes, those of them that answer at once; not of the
        processes that these have started.
        """
        engines = self.router.engines().values()
        asked = []
        for engine in engines:
            if isinstance(engine, EngineProcess):
                with suppress(RondoError):  # it has just died, which the router finds out
                    asked.append((engine, engine.pulse()))
        wait([answer for _, answer in asked], STACKS_SECONDS)
        parts = []
        for engine, answer in asked:
            answers = answer.done() and answer.exception() is None
            text = answer.result().stacks if answers else "it does not answer"
            parts.append(f"--- stacks of engine {engine.name} (pid {engine.pid}) ---\n{text}")
        return "\n".join(parts)

    def turn_profile(self, change: ProfileTurn, name: str) -> None:
        """Ends and begins the profiles of rondo's own engines that have a process each. name: of the rank."""
        for engine in self.router.engines().values():
            if isinstance(engine, EngineProcess) and self._spec.engine in OWN:
                engine.turn_profile(change, f"{name}-engine-{engine.name}")

    def close(self) -> None:
        """Ends the engines and their processes. May be called twice."""
        with self._lock:
            self._closed = True
        engines = list(self.router.engines().values())
        with ThreadPoolExecutor(max(1, len(engines)), "rondo-close") as pool:
            for done in [pool.submit(engine.close) for engine in engines]:
                done.result()

    # ---- starting ----

    def _start(self, name: str) -> EngineProcess:
        return start_engine(
            self._spec,
            name=name,
            bucket_bytes=self._bucket_bytes,
            accelerators=self._accelerators,
            hop=self._hop,
        )

    def _start_all(self, count: int) -> list[tuple[str, EngineProcess]]:
        """Starts all at once. If one cannot be started the others are ended."""
        names = [str(number) for number in range(count)]
        with ThreadPoolExecutor(count, "rondo-start") as pool:
            starting = [pool.submit(self._start, name) for name in names]
        failures = [start.exception() for start in starting if start.exception() is not None]
        if failures:
            for start in starting:
                if start.exception() is None:
                    start.result().close()
            assert failures[0] is not None
            raise failures[0]
        return [(name, start.result()) for name, start in zip(names, starting, strict=True)]

    def _watch(self, name: str, engine: RolloutEngine) -> None:
        """Watches an engine, so that a death is noticed while nobody asks anything of the engine."""
        if isinstance(engine, EngineProcess):
            engine.when_lost(lambda why: self.router.members.mark_dead(name, why, engine))

    def _restart(self, name: str, why: str) -> bool:
        """The router's on_lost, from any thread: whether the replica is being started again."""
        with self._lock:
            if self._closed:
                return False
            thread = threading.Thread(
                target=self._start_again, args=(name, why), name=f"rondo-restart-{name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no thread left
                _log.error("replica %s cannot be started again: %s", name, error)
                return False
            self._threads.append(thread)
        return True

    def _start_again(self, name: str, why: str) -> None:
        try:
            engine = self._start(name)
        except (RondoError, OSError, RuntimeError) as error:  # the last two: no memory, process, thread left
            self.router.members.give_up(name, f"{why}; and could not be started again: {error}")
            return
        self.router.members.add(name, engine)
        self._watch(name, engine)
        with self._lock:
            closed = self._closed
            self._news = f"{why}; it was started again and wants weights"
        if closed:  # too late for `close` to have seen it
            engine.close()
