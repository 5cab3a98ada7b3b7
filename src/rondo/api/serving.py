"""`rondo.serve`: a model behind the OpenAI-compatible endpoint, in the background of a script or a notebook.

caller ── serve() ──▶ a thread with an event loop of its own: HTTP, engines
   ▲                     │ ready, or what went wrong
   └────── Server ◀──────┘
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rondo.api.inputs import Recipes, checked, files_of, merged
from rondo.config import load
from rondo.core.errors import short_errors

if TYPE_CHECKING:
    from rondo.trainers.commands.serve import Serving

_log = logging.getLogger(__name__)


@short_errors
@checked
def serve(
    model: str | Path | None = None,
    *,
    recipe: Recipes = (),
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    name: str | None = None,
    replicas: int | None = None,
    max_context: int | None = None,
    check: bool = False,
    fetch_images: bool = False,
    config: Mapping[str, Any] = {},
    **settings: Any,
) -> Server:
    """Serves a model over OpenAI's API, in the background; returns when it answers.

    model: a folder or a hub id; default the recipe's. port: 0 takes a free one. api_key: what every request
    must bear; default a random one. name: of the model, for clients; default that of its folder. replicas:
    engines, each in a process of its own. max_context: prompt and answer tokens of a request. check: first
    compares a few tokens of an engine with what training computes (loads the model twice). fetch_images:
    whether images that requests name by http(s) URLs are fetched. config, settings: as of `train`; `model.*`
    and `rollout.*` are read.

    Raises RondoError, as `rondo serve` does.
    """
    from rondo.trainers.commands.serve import Asked
    from rondo.trainers.commands.serve import serve as command

    ours: dict[str, Any] = {}
    if model is not None:
        ours |= {"model.path": str(model), "model.config": None, "model.tokenizer": None}
        ours |= {"trainer.warm_start": None}
    if replicas is not None:
        ours["rollout.replicas"] = replicas
    loaded = load(files_of(recipe), settings=merged({"trainer.total_steps": 1}, config, ours, settings))
    keys = () if api_key is None else (api_key,)
    asked = Asked(host, port, keys, "api_key", name, max_context, check, fetch_images, spelled=_as_argument)
    return Server(functools.partial(command, loaded, asked))


def _as_argument(option: str, value: object) -> str:
    return f"{option}={value!r}"


class Server:
    """A model that is served in the background. It is closed at the end of `with`, and when Python ends."""

    base_url: str
    api_key: str
    model: str
    """Its name for clients."""
    engine: str
    """A line about what answers."""

    def __init__(self, run: Callable[..., None]) -> None:
        """Runs the command in a thread, and returns when it is ready; raises what the command raises before
        that. run: the command without its `ready`, `note` and `stopping`, which are filled in here.
        """
        self._lock = threading.Lock()  # guards the next two
        self._ending = False
        self._stop: Callable[[], object] | None = None
        ready: Future[Serving] = Future()
        self._thread = ThreadPoolExecutor(1, "rondo-serve")
        self._over = self._thread.submit(self._run, run, ready)
        _end_at_exit()
        _running.add(self)
        either: tuple[Future[Any], ...] = (ready, self._over)
        try:
            # Whichever comes first: it serves, or it has ended without.
            wait(either, return_when=FIRST_COMPLETED)
        except KeyboardInterrupt:
            self.close()
            raise
        if not ready.done():
            self.close()
        serving = ready.result()
        self.base_url = serving.base_url
        self.api_key = serving.api_key
        self.model = serving.model
        self.engine = serving.engine

    def __repr__(self) -> str:
        return f"Server({self.base_url!r}, model={self.model!r}{', ended' if self._over.done() else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Blocks until Ctrl-C, which closes the server, or until the server has ended by itself. Raises as
        `close`.
        """
        try:
            self._over.result()
        except KeyboardInterrupt:
            self.close()

    def close(self) -> None:
        """Ends the server, and returns when all processes that it started have ended. May be called twice.
        Raises what had ended it before: RolloutError where its last engine had died for good.
        """
        self._end()
        _running.discard(self)
        self._over.result()

    def _end(self) -> None:
        with self._lock:
            self._ending = True
            if self._stop is not None:
                self._stop()
        self._thread.shutdown()

    def _run(self, run: Callable[..., None], ready: Future[Serving]) -> None:
        try:
            run(ready=ready.set_result, note=_log.warning, stopping=self._stopping)
        except Exception as error:
            if ready.done():
                _log.error("the server at %s has ended: %s", ready.result().base_url, error)
            raise

    @contextmanager
    def _stopping(self, act: Callable[[], object]) -> Iterator[None]:
        """Lets `close` call `act` on the event loop, while inside."""
        loop = asyncio.get_running_loop()
        with self._lock:
            # `close` came before there was a loop to tell.
            if self._ending:
                act()
            self._stop = functools.partial(loop.call_soon_threadsafe, act)
        try:
            yield
        finally:
            with self._lock:
                self._stop = None


_running: set[Server] = set()


@functools.cache
def _end_at_exit() -> None:
    """Has the servers that still run ended when Python ends, once for all of them. `atexit` is too late: by
    then Python has waited for the threads of engines, which answer until they are told to stop.
    """
    os.register_at_fork(after_in_child=_running.clear)  # they are the parent's
    threading._register_atexit(_end_all)  # type: ignore[attr-defined]


def _end_all() -> None:
    for server in tuple(_running):
        server._end()
