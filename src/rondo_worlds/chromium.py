"""A Chromium without a window, and pages in it, over a pipe (its DevTools protocol): one browser for all
environments of this process, with a page and storage of its own for each.

It ends with the last page. It ends, too, where its pipe does: nothing of it outlives this process.
"""

from __future__ import annotations

import base64
import fcntl
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from rondo.core.errors import ConfigError, EnvironmentFailedError

SECONDS = 60.0
"""That it may take to start, and a page to answer."""
_ENDING_SECONDS = 5.0
_GONE = "the browser is gone"
_CRASHED = "the page crashed"
_ARGUMENTS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # a container's /dev/shm is small
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    # The address bar's lists are pages with renderers of their own, in every window: half of a page's cost.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-first-run",
    "--password-store=basic",
)

# Puts the pipes where a browser looks for them. A shell cannot (its numbers end at 9), and code of this one
# between fork and exec is not safe beside threads.
_EXECUTE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium(program: str) -> str:
    """Returns the path of a browser. Raises ConfigError."""
    found = shutil.which(program)
    if found is None:
        raise ConfigError(
            f"there is no browser {program!r} here: apt install chromium, or name another one of its kind"
        )
    return found


class Page:
    """A page in a browser. Raises EnvironmentFailedError where it, or the browser, is gone."""

    def __init__(self, program: str) -> None:
        self._browser = _taken(program)
        try:
            self._context = self._call("Target.createBrowserContext")["browserContextId"]
            made = self._call("Target.createTarget", url="about:blank", browserContextId=self._context)
            attached = self._call("Target.attachToTarget", targetId=made["targetId"], flatten=True)
            self._session: str = attached["sessionId"]
            self.call("Page.enable")
        except BaseException:
            _given_back(self._browser)
            raise

    def _call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, parameters)

    def call(self, method: str, **parameters: Any) -> Any:
        """Returns the result of a method of the protocol."""
        return self._browser.call(method, parameters, self._session)

    def open(self, url: str) -> None:
        """Loads a page, whole."""
        loaded = self._browser.event(self._session, "Page.loadEventFired")
        self.call("Page.navigate", url=url)
        self._browser.wait(loaded, f"the page {url}")

    def evaluate(self, script: str) -> Any:
        """Returns the value of an expression of JavaScript, waiting for it where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            said = details.get("exception", {}).get("description") or details["text"]
            raise EnvironmentFailedError(f"the page failed: {said:.500}")
        return answer["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Clicks with the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types on the keyboard."""
        for sign in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=sign, unmodifiedText=sign, key=sign)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=sign)

    def advance(self, milliseconds: float) -> None:
        """Lets so much of the page's time pass, at once; then it stands again."""
        passed = self._browser.event(self._session, "Emulation.virtualTimeBudgetExpired")
        self.call("Emulation.setVirtualTimePolicy", policy="advance", budget=milliseconds)
        self._browser.wait(passed, "the page's time")

    def picture(self, width: int, height: int) -> np.ndarray:
        """Takes a picture of the page's upper left part, [H, W, 3] uint8."""
        from PIL import Image

        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.call("Page.captureScreenshot", format="png", clip=clip)
        with Image.open(io.BytesIO(base64.b64decode(taken["data"]))) as image:
            return np.asarray(image.convert("RGB"))

    def close(self) -> None:
        """Closes the page, and with the last page the browser."""
        try:
            self._call("Target.disposeBrowserContext", browserContextId=self._context)
        except EnvironmentFailedError:
            pass  # it is gone already
        finally:
            _given_back(self._browser)


class _Browser:
    """A running browser. pages: how many use it."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.pages = 0
        self.gone = ""
        """Why it answers no more; empty: it does."""
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[Any]] = {}
        self._sessions: dict[int, str] = {}  # of each answer that is waited for
        self._crashed: set[str] = set()
        self._events: dict[tuple[str, str], Future[Any]] = {}
        self._folder = tempfile.mkdtemp(prefix=f"rondo-chromium-{os.getpid()}-")
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._process = self._started(theirs_in, theirs_out)
        self._out = os.fdopen(ours_out, "wb", buffering=0)
        self._in = os.fdopen(ours_in, "rb")
        threading.Thread(target=self._read, name="chromium", daemon=True).start()
        try:
            self.call("Browser.getVersion", {})
        except EnvironmentFailedError as error:
            said = (Path(self._folder) / "said").read_text(errors="replace").strip()[-600:]
            self.end()
            raise EnvironmentFailedError(f"{program} did not start: {said or error}") from error

    def _started(self, theirs_in: int, theirs_out: int) -> subprocess.Popen[bytes]:
        """Starts the browser, in a process group of its own, with the pipes as its descriptors 3 and 4."""
        own = [f"--user-data-dir={self._folder}/profile", "about:blank"]
        if os.geteuid() == 0:  # whom its sandbox refuses
            own.insert(0, "--no-sandbox")
        high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (theirs_in, theirs_out)]
        try:
            with open(Path(self._folder) / "said", "wb") as said:
                return subprocess.Popen(
                    [sys.executable, "-ISc", _EXECUTE, *map(str, high), self.program, *_ARGUMENTS, *own],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    pass_fds=high,
                    start_new_session=True,
                )
        finally:
            for one in (theirs_in, theirs_out, *high):
                os.close(one)

    def _read(self) -> None:
        """Hands out answers and events, until there are no more."""
        rest = b""
        while chunk := self._in.read1(1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in messages:
                self._handle(json.loads(message))
        self._in.close()
        with self._lock:
            self.gone = self.gone or _GONE
            waiting = [*self._answers.values(), *self._events.values()]
        for future in waiting:
            _failed(future, self.gone)

    def _handle(self, message: Mapping[str, Any]) -> None:
        session, method = message.get("sessionId", ""), message.get("method", "")
        with self._lock:
            if "id" in message:
                future = self._answers.pop(message["id"], None)
                self._sessions.pop(message["id"], None)
            else:
                future = self._events.pop((session, method), None)
            lost: list[Future[Any]] = []
            if method == "Inspector.targetCrashed":
                self._crashed.add(session)
                lost += [self._answers[number] for number, of in self._sessions.items() if of == session]
                lost += [event for (of, _), event in self._events.items() if of == session]
        for waiting in lost:
            _failed(waiting, _CRASHED)
        if future is None or future.done():
            return
        if "error" in message:
            _failed(future, f"the browser refused: {message['error'].get('message')}")
        else:
            future.set_result(message.get("result"))

    def event(self, session: str, method: str) -> Future[Any]:
        """Returns what is done with the next event of this kind."""
        with self._lock:
            return self._events.setdefault((session, method), Future())

    def call(self, method: str, parameters: Mapping[str, Any], session: str = "") -> Any:
        """Returns the result of a method of the protocol."""
        message: dict[str, Any] = {"method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        future: Future[Any] = Future()
        with self._lock:
            if self.gone or session in self._crashed:
                raise EnvironmentFailedError(self.gone or _CRASHED)
            number = message["id"] = next(self._numbers)
            self._answers[number] = future
            self._sessions[number] = session
            try:
                self._out.write(json.dumps(message).encode() + b"\0")
            except OSError as error:
                self.gone = self.gone or _GONE  # the next user takes another one
                raise EnvironmentFailedError(_GONE) from error
        return self.wait(future, method)

    def wait(self, future: Future[Any], what: str) -> Any:
        try:
            return future.result(SECONDS)
        except TimeoutError as error:
            raise EnvironmentFailedError(f"the browser: {what} took longer than {SECONDS:g} s") from error

    def end(self) -> None:
        """Ends all processes of the browser, and waits until they have ended."""
        with self._lock:
            self.gone = self.gone or "the browser was closed"
        group = self._process.pid
        until = time.monotonic() + _ENDING_SECONDS
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._out.close()
        while _has_processes(group) and time.monotonic() < until:
            time.sleep(0.005)
        shutil.rmtree(self._folder, ignore_errors=True)


def _has_processes(group: int) -> bool:
    """Says whether one of this group still runs; False where there is no /proc."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if int(of) == group and state != "Z":
            return True
    return False


def _failed(future: Future[Any], why: str) -> None:
    if not future.done():
        future.set_exception(EnvironmentFailedError(why))


_browsers: dict[str, _Browser] = {}
_changing = threading.Lock()


def _taken(program: str) -> _Browser:
    """Returns the running browser, or starts one."""
    with _changing:
        browser = _browsers.get(program)
        if browser is None or browser.gone:
            browser = _browsers[program] = _Browser(program)
        browser.pages += 1
        return browser


def _given_back(browser: _Browser) -> None:
    with _changing:
        browser.pages -= 1
        if browser.pages:
            return
        if _browsers.get(browser.program) is browser:
            del _browsers[browser.program]
        browser.end()
