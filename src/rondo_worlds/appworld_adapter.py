"""AppWorld's tasks on servers of its own (`appworld serve environment`), over HTTP: its package needs another
pydantic than rondo, and its data.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import Observation, StepResult

_SECONDS = 150.0  # the server's own limit for one piece of code is 100
_taken: set[str] = set()
_choosing = threading.Lock()


class AppWorld:
    """A task of AppWorld, which the policy does by writing Python: what the code prints is to be seen next.
    `apis.supervisor.complete_task(...)` ends the episode; reward 1 where the server's tests then pass.

    urls: servers; each has one episode at a time, and there have to be as many as there are episodes at once.
    """

    instructions = (
        "Do what you are asked to by Python code that calls apis.<app>.<api>(...). You see what it prints. "
        "Answer with one piece of code, such as "
        "<action>print(apis.api_docs.show_app_descriptions())</action>. End with "
        "apis.supervisor.complete_task(), or complete_task(answer=...)."
    )

    def __init__(self, *, urls: Sequence[str]) -> None:
        self.check(urls=urls)
        self._urls = [url.rstrip("/") for url in urls]
        self._url = ""
        self._task: dict[str, Any] = {}
        self._tests: Mapping[str, Any] | None = None

    @classmethod
    def check(cls, *, urls: Sequence[str]) -> None:
        """Raises ConfigError for what are no addresses."""
        wrong = isinstance(urls, str) or not urls or len(set(urls)) < len(urls)
        if wrong or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ConfigError(f"appworld: urls are a list of different http:// addresses, not {urls!r}")

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Begins a task. task: its id, such as `82e2fac_1`."""
        if not isinstance(task, str) or not task:
            raise EnvironmentFailedError(
                f"appworld: the column `task` of a row has to be a task's id, not {task!r}"
            )
        self.close()
        self._tests = None
        self._url = self._free()
        try:
            self._task = self._post("initialize", {"task_id": task, "random_seed": seed % 2**32})
        except EnvironmentFailedError:
            self._release()
            raise
        person = self._task["supervisor"]
        name = f"{person['first_name']} {person['last_name']}"
        return Observation(
            f"{self._task['instruction']}\n\n{name}, {person['email']}, {person['phone_number']}, asks for "
            f"it. It is {self._task['datetime']}."
        )

    def step(self, action: str) -> StepResult:
        """Runs a piece of code."""
        printed = str(self._ask("execute", code=action))
        done = bool(self._ask("task_completed"))
        if done:
            self._tests = self._ask("evaluate", suppress_errors=True)
        won = bool(self._tests and self._tests["success"])
        seen = Observation(printed if printed.strip() else "It printed nothing.")
        return StepResult(seen, float(won), done, success=won)

    def state(self) -> Mapping[str, Any]:
        """Returns the task, and what the server's tests said at the end."""
        return {"task": self._task, "tests": self._tests}

    def close(self) -> None:
        """Ends the task; the server is free."""
        if self._url and self._task:
            try:
                self._ask("close")
            except EnvironmentFailedError:
                pass  # it is gone already
        self._release()

    def _free(self) -> str:
        with _choosing:
            free = [url for url in self._urls if url not in _taken]
            if not free:
                raise EnvironmentFailedError(
                    f"appworld: each of the {len(self._urls)} servers has an episode already; start more, "
                    "and name them in the option urls"
                )
            _taken.add(free[0])
            return free[0]

    def _release(self) -> None:
        with _choosing:
            _taken.discard(self._url)
        self._url, self._task = "", {}

    def _ask(self, what: str, **arguments: Any) -> Any:
        return self._post(what, {"task_id": self._task["task_id"], **arguments})

    def _post(self, what: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self._url}/{what}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return json.load(answer)["output"]
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise EnvironmentFailedError(
                f"appworld: {self._url}/{what} answered {error.code}: {said}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailedError(
                f"appworld: {self._url}/{what} failed: {error}; is `appworld serve environment` running "
                "there?"
            ) from error
