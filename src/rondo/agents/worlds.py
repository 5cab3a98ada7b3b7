"""Environments as loops play them (`rollout.environments`): one instance for each episode, wherever it lives
(`places`), with what its steps gave credited to the policy's calls.

    reset ─▶ observation ─▶ policy.chat ─▶ step(action) ─▶ reward of that call, anchor of what it saw
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, TypeVar

from rondo.agents.places import Place, Threads, Workers
from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import (
    ConfigError,
    DataError,
    EnvironmentFailedError,
    EpisodeLostError,
    RolloutError,
    RondoError,
)
from rondo.core.images import MARK, ImageRef, Pictures, images_as_text, images_of_text, name_of
from rondo.core.types import PolicyCall, Prompt, StepStats, TurnFlag, request_seed
from rondo.environments import Observation, StepResult
from rondo.environments.played import Shown
from rondo.environments.registry import EnvironmentChoice, load_environments
from rondo.environments.rows import start_of
from rondo.serving.sessions import ModelCall

T = TypeVar("T")
_STARTS = 10_000  # first observations that are kept for comparison


@dataclass
class _Credit:
    """What a call of the policy is worth."""

    anchor: str = ""
    """The anchor of what it saw."""
    reward: float | None = None
    flags: tuple[TurnFlag, ...] = ()
    notes: tuple[str, ...] = ()
    states: tuple[Mapping[str, Any], ...] = ()
    """See `types.Turn`."""


@dataclass
class Retold:
    """What an environment showed in another episode, which is told again in its place until `is_over`."""

    record: Sequence[Mapping[str, Any]]
    """See `World.record`."""
    is_over: bool = False
    """The branch has begun: from here on the environment itself answers."""


class World:
    """The environment of one episode. Use it on the agents' loop only.

    episode: its name. starts: digests of first observations by what they follow from, of all episodes of this
    process. seats: of which an episode takes one from its reset to its end; None: there are enough for all.
    """

    def __init__(
        self,
        choice: EnvironmentChoice,
        seed: int,
        task: Any,
        calls: Sequence[ModelCall],
        place: Place,
        episode: str,
        pictures: Pictures,
        starts: dict[Any, bytes],
        seats: asyncio.Semaphore | None,
        told: Retold | None = None,
    ) -> None:
        self.name = choice.name
        self.record: list[Mapping[str, Any]] | None = [] if choice.restores else None
        """What it was told and showed, as JSON has it: for branches of its episode. None: they act again."""
        self._told = told
        self.failure = ""
        """Why the environment failed; empty: it did not."""
        self.lost = ""
        """Why the episode has to be begun again; empty: it has not."""
        self.error: RondoError | None = None
        """What ends the run."""
        self.is_full = False
        """The loop ended because nothing more fits a context."""
        self.steps = self.invalid = 0
        self.given = 0.0
        self.flags: tuple[TurnFlag, ...] = ()
        """Of the last step."""
        self.is_over = False
        """By the rules, as the last step said."""
        self.reasoned: list[Mapping[str, float]] = []
        """The scores that turns were credited with (`credit`)."""
        self._seed = seed
        self._task = task
        self._calls = calls
        self._pictures = pictures
        self._starts = starts
        self._seats = seats
        self._is_seated = False
        self._placed = place.open(choice, episode)
        self._seen: Observation | None = None
        self._states: tuple[Mapping[str, Any], ...] = ()  # the last one, where it is kept
        self._credits: list[_Credit] = []

    @property
    def last_state(self) -> Mapping[str, Any]:
        """The environment's own state now; empty without keep_state."""
        return self._states[0] if self._states else {}

    @property
    def seconds(self) -> float:
        """The seconds that the environment took."""
        return self._placed.seconds

    async def reset(self) -> Observation:
        """Begins the episode, when there is a seat for it. Raises EnvironmentFailedError."""
        if self._seats is not None and not self._is_seated:
            await self._seats.acquire()
            self._is_seated = True
        shown = await self._done(self._acted(None))
        seen = shown.result.observation
        start = hashlib.blake2b(repr((seen.text, seen.actions)).encode(), digest_size=8).digest()
        if len(self._starts) >= _STARTS:
            self._starts.clear()
        if self._starts.setdefault((self.name, self._seed, repr(self._task)), start) != start:
            self._fail(f"reset({self._seed}) gave another first observation than in another episode")
        return self._look(shown)

    async def step(self, action: str | None, *, penalty: float = 0.0) -> StepResult:
        """Acts, and credits the policy's last call with the reward. None, and what is not among the actions
        that are possible, is an invalid action: nothing happens, and the same is to be seen again.

        penalty: is taken from the reward of an invalid one. Raises EnvironmentFailedError.
        """
        seen = self._seen
        if seen is None or not self._calls:
            raise RuntimeError(
                "an agent steps in its environment after reset(), and after it asked the policy"
            )
        while len(self._credits) < len(self._calls):  # they all saw this
            self._credits.append(_Credit(seen.identity, states=self._states))
        if action is None or (seen.actions and action not in seen.actions):
            shown = Shown(StepResult(seen, invalid=True), *self._states)
        else:
            shown = await self._done(self._acted(action))
        result = shown.result
        if result.invalid:
            self.invalid += 1
            result = replace(result, reward=result.reward - penalty)
        self.steps += 1
        self.is_over = result.done
        self.given += result.reward
        states: Mapping[TurnFlag, bool] = {
            "invalid": result.invalid,
            "success": result.success,
            "truncated": result.truncated,
        }
        self.flags = tuple(flag for flag, holds in states.items() if holds)
        credit = self._credits[-1]
        credit.reward = (credit.reward or 0.0) + result.reward
        credit.flags = tuple(dict.fromkeys((*credit.flags, *self.flags)))
        told = ["invalid action" if result.invalid else str(action), f"reward {result.reward:g}"]
        said = " · ".join([*told, *(flag for flag in self.flags if flag != "invalid")])
        credit.notes = (*credit.notes, f"[action] {said}")
        self._look(shown)
        credit.states = (*credit.states, *self._states)
        return result

    def credit(self, reward: float, scores: Mapping[str, float]) -> None:
        """Adds to the reward of the policy's last call, behind its steps, what its words are worth. scores:
        what that comes from, for metrics and the record.
        """
        credit = self._credits[-1]
        credit.reward = (credit.reward or 0.0) + reward
        told = " · ".join(f"{name} {score:.2f}" for name, score in scores.items())
        credit.notes = (*credit.notes, f"[reasoning] {told} · reward {reward:g}")
        self.given += reward
        self.reasoned.append(scores)

    def aside(self, what: str) -> None:
        """Says that the policy's calls since the last step asked for something else than an action. They are
        no steps; their anchor has `what` before what was to be seen, and is no step's.
        """
        assert self._seen is not None, "reset comes first"
        while len(self._credits) < len(self._calls):
            anchor = f"{what}: {self._seen.identity}"
            self._credits.append(_Credit(anchor, flags=("aside",), states=self._states))

    def cut_off(self, *, full: bool = False) -> None:
        """Says that the loop ends before the episode does: at its limit of steps, or where nothing more fits
        a context (full).
        """
        self.is_full = full
        self.flags = (*self.flags, "truncated")
        if self._credits:
            self._credits[-1].flags = (*self._credits[-1].flags, "truncated")

    async def close(self) -> None:
        """Ends the environment."""
        try:
            await self._done(self._placed.close())
        except (EnvironmentFailedError, EpisodeLostError):
            pass  # `failure` and `lost` say it
        finally:
            if self._seats is not None and self._is_seated:
                self._is_seated = False
                self._seats.release()

    def calls(self) -> list[PolicyCall]:
        """Returns the policy's calls with what they were credited with. What was put between the answers is
        the environment's. What is to be seen after the last step is in no call's prompt, and noted.
        """
        credits = [*self._credits, *(_Credit() for _ in self._calls)]
        if self._seen is not None and len(self._credits) == len(self._calls) > 0:
            last = self._credits[-1]
            credits[len(self._calls) - 1] = replace(
                last, notes=(*last.notes, f"[environment] {self._seen.text}")
            )
        return [
            PolicyCall(
                call.completion,
                "environment" if call.inserted == "user" else call.inserted,
                credit.reward,
                credit.anchor,
                credit.flags,
                "\n".join(credit.notes),
                credit.states,
            )
            for call, credit in zip(self._calls, credits, strict=False)
        ]

    async def _acted(self, action: str | None) -> Shown:
        """Resets (None) or acts. What is told again costs nothing: the environment is restored behind it."""
        told, place, picture = self._told, len(self.record or ()), None
        if told is not None and not told.is_over and place < len(told.record):
            if told.record[place]["action"] != action:
                raise RolloutError(
                    f"the environment {self.name}: a branch did {action!r} where the episode that it goes on "
                    f"from had done {told.record[place]['action']!r} (action {place})"
                )
            shown, picture = _read(told.record[place])
            if picture is not None:
                self._pictures.show(picture)
        else:
            if told is not None and self.record:
                self._told = None
                await self._restore(self.record[-1]["state"], place)
            reset = action is None
            shown = await (
                self._placed.reset(self._seed, self._task) if reset else self._placed.step(str(action))
            )
            shown, picture = await self._pictured(shown)
        if self.record is not None:
            self.record.append(_written(action, shown, picture))
        return shown

    async def _pictured(self, shown: Shown) -> tuple[Shown, ImageRef | None]:
        """Keeps the picture of an observation, whose name then stands in its text: where the text has MARK,
        or before it. So the text alone says what is seen, in prompts, memories and anchors.
        """
        seen = shown.result.observation
        if seen.image is None:
            return shown, None
        how = self._pictures.how
        if how is None:
            raise ConfigError(
                f"the environment {self.name} shows pictures, and rondo gives this model none: take one that "
                "reads images (docs/images.md), or let the environment show text alone (observe: text)"
            )
        try:
            picture = await asyncio.to_thread(how.keep, seen.image)
        except DataError as error:
            raise EnvironmentFailedError(f"its picture: {error}") from error
        name = name_of(picture)
        self._pictures.show(picture)
        text = seen.text if MARK in seen.text else f"{MARK}\n{seen.text}".strip()
        told = replace(seen, text=text.replace(MARK, name, 1), image=None)
        return replace(shown, result=replace(shown.result, observation=told)), picture

    async def _restore(self, state: Mapping[str, Any], place: int) -> None:
        await self._placed.reset(self._seed, self._task)
        restored = await self._placed.restore(state)
        if restored != state:
            raise RolloutError(
                f"the environment {self.name}: restore(state) of the state after action {place - 1} of an "
                f"episode left it in another: {restored!r:.200} in place of {state!r:.200}"
            )

    def _look(self, shown: Shown) -> Observation:
        self._seen = seen = shown.result.observation
        self._states = () if shown.state is None else (shown.state,)
        return seen

    async def _done(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except EnvironmentFailedError as error:
            self._fail(str(error), error)
        except EpisodeLostError as error:
            self.lost = self.lost or str(error)
            raise
        except RondoError as error:
            self.error = error
            raise

    def _fail(self, why: str, error: Exception | None = None) -> NoReturn:
        self.failure = self.failure or f"the environment {self.name}: {why}"
        raise EnvironmentFailedError(self.failure) from error


class Worlds:
    """The environments of a rollout worker, and the metrics of their episodes. episode_workers: how many
    processes they live in; 0: in threads of this one.
    """

    def __init__(self, configured: Sequence[EnvironmentConfig], *, episode_workers: int = 0) -> None:
        environments = load_environments(configured)
        self._environments = {choice.name: choice for choice in environments}
        self._place: Place = Workers(episode_workers, environments) if episode_workers else Threads()
        self._starts: dict[Any, bytes] = {}
        self._seats = {
            choice.name: asyncio.Semaphore(choice.config.max_open)
            for choice in environments
            if choice.config.max_open is not None
        }
        self._stats = StepStats()

    @property
    def restores(self) -> bool:
        """Says whether episodes of some environment have a record."""
        return any(choice.restores for choice in self._environments.values())

    def world(
        self,
        prompt: Prompt,
        run_seed: int,
        calls: Sequence[ModelCall],
        episode: str,
        pictures: Pictures,
        told: Retold | None = None,
    ) -> World:
        """Returns the environment of an episode, which is the same for all samples of a prompt. calls: the
        session's, which grow. episode: its name. told: what it is told again first. Raises DataError.
        """
        name, seed = start_of(prompt.fields, tuple(self._environments))
        if seed is None:
            seed = request_seed(run_seed, "environment", prompt.prompt_id)
        task = prompt.lent().fields.get("task")
        seats = self._seats.get(name)
        choice = self._environments[name]
        return World(choice, seed, task, calls, self._place, episode, pictures, self._starts, seats, told)

    def name_of(self, prompt: Prompt) -> str:
        """Returns which environment a prompt's episodes are in. Raises DataError."""
        return start_of(prompt.fields, tuple(self._environments))[0]

    def count(self, world: World, seconds: float) -> None:
        """Counts an episode. seconds: that it took."""
        stats, name = self._stats, world.name
        stats.add_mean("environment/seconds_share", world.seconds, seconds)
        stats.add_mean(f"environment/seconds/{name}", world.seconds)
        stats.add_sum(f"environment/failures/{name}", float(bool(world.failure)))
        stats.add_sum(f"environment/reissued/{name}", 0.0)
        if world.failure:
            return
        stats.add_mean(f"environment/steps/{name}", float(world.steps))
        stats.add_mean(f"environment/invalid_share/{name}", float(world.invalid), world.steps)
        stats.add_mean(f"environment/return/{name}", world.given)
        stats.add_mean(f"environment/success/{name}", float("success" in world.flags))
        stats.add_mean(f"environment/truncated_share/{name}", float("truncated" in world.flags))
        if world.is_over and not {"success", "truncated"}.intersection(world.flags):
            stats.add_mean(f"environment/failed_steps/{name}", float(world.steps))
            stats.add_max(f"environment/failed_steps_max/{name}", float(world.steps))
        for scores in world.reasoned:
            for part, score in scores.items():
                stats.add_mean(f"environment/{part}_score/{name}", score)

    def count_reissued(self, world: World) -> None:
        """Counts an episode that is begun again."""
        self._stats.add_sum(f"environment/reissued/{world.name}", 1.0)

    def stats(self) -> StepStats:
        """Returns the metrics of the episodes that were counted since it was asked last."""
        stats, self._stats = self._stats, StepStats()
        return stats

    def close(self) -> None:
        """Ends what the environments live in. From any thread."""
        self._place.close()


def _written(action: str | None, shown: Shown, picture: ImageRef | None) -> Mapping[str, Any]:
    """Returns a step as JSON can write it. Raises EnvironmentFailedError."""
    result = asdict(shown.result)
    del result["observation"]["image"]  # its name stands in the text
    result["reward"] = float(result["reward"])
    written = {"action": action, "result": result, "state": shown.state}
    if picture is not None:
        written["picture"] = images_as_text([picture])
    try:
        json.dumps(written)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailedError(f"info of a step cannot be written as JSON: {error}") from error
    return written


def _read(step: Mapping[str, Any]) -> tuple[Shown, ImageRef | None]:
    seen = step["result"]["observation"]
    observation = Observation(seen["text"], tuple(seen["actions"]), seen["anchor"])
    shown = Shown(StepResult(**{**step["result"], "observation": observation}), step["state"])
    return shown, next(iter(images_of_text(step.get("picture", ""))), None)


def check_reads(
    name: str,
    function: Callable[..., Any],
    *,
    environments: Sequence[EnvironmentChoice],
    tools: Sequence[object],
) -> None:
    """Raises ConfigError where the agent called `name` and what a run has for it do not fit."""
    wants = inspect.signature(function).parameters
    # The loops that ship are methods of what was set.
    reasons = getattr(getattr(function, "__self__", None), "reasons", None)
    for place, environment in enumerate(environments):
        if reasons is not None and not environment.config.keep_state:
            raise ConfigError(
                f"rollout.environments.{place}: rollout.agent.reasoning compares with the states of "
                f"{environment.name}: set keep_state: true beside its name"
            )
    if environments and "environment" not in wants:
        raise ConfigError(
            f"rollout.agent: {name} does not take `environment`, and nothing would act in "
            "rollout.environments; remove these, or use concatenated, steps, or a loop of yours that takes it"
        )
    if "environment" in wants and not environments:
        raise ConfigError(f"rollout.agent: {name} acts in rollout.environments, which is empty")
    if environments and tools and "tools" not in wants:
        raise ConfigError(
            f"rollout.agent: {name} takes no `tools`: beside rollout.environments, they "
            "are for a loop of yours that takes both; remove rollout.tools"
        )
