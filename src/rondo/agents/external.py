"""An agent of the user's as an agent loop: it asks the policy, and what it was answered becomes a trajectory,
token by token.

    __call__ ──opens a session──▶ agent(messages, policy, tools)                on the agents' own thread
                                  agent(messages, policy, environment)
                                  agent(messages, base_url, api_key, model)
                                     │  ▲ `Policy`, or HTTP on 127.0.0.1
                                     ▼  │
                                  Endpoint ─▶ generate                          on the rollout worker's loop
             ◀──its recorded calls───┘

The agent's code cannot block the worker's loop (`running`): coroutines run on a loop of their own, plain
functions each in its own thread. With rollout.episode_workers those that ask over HTTP run there.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rondo.agents.environment_loops import LOOPS, Concatenated
from rondo.agents.forks import Fork, Forks
from rondo.agents.policy import MODEL, Policy
from rondo.agents.record import rows_of
from rondo.agents.tools import Tool, Toolbox, ToolStats, end_tools
from rondo.agents.worker_pool import AgentWorkers
from rondo.agents.worlds import Retold, World, Worlds
from rondo.chat import decode
from rondo.config.functions import called_with, check_options, resolve_function
from rondo.config.schema import FunctionConfig, RolloutConfig
from rondo.core.errors import ConfigError, EpisodeLostError, did_you_mean
from rondo.core.images import MARK, EpisodeImages, Pictures, name_of
from rondo.core.types import (
    MAX_ROWS,
    Completion,
    GenerateRequest,
    Outcome,
    PolicyCall,
    Prompt,
    Row,
    SamplingParams,
    StepStats,
    Trajectory,
    request_seed,
)
from rondo.serving import Endpoint, EndpointSession, SessionRules, Sessions, named, prompt_key
from rondo.system.border import in_thread, on_agents_loop, said_by

if TYPE_CHECKING:
    from rondo.serving.http import HttpServer


# ---- the agent of rollout.tools where rollout.agent names none ----


async def use_tools(
    messages: Sequence[Mapping[str, Any]], policy: Policy, tools: Toolbox, *, max_turns: int = 8
) -> str:
    """Returns the first answer without a tool call, or that of turn `max_turns`, whose calls are not made. A
    call that cannot be read is one, too: the policy is told what is wrong with it.
    """
    if max_turns < 1:
        raise ConfigError(f"rollout.agent: max_turns must be at least 1, got {max_turns}")
    said = list(messages)
    for _ in range(max_turns - 1):
        answer = await policy.chat(said, tools=tools.schemas)
        if not answer.tool_calls and not answer.malformed:
            return answer.text
        said += [answer.message, *await tools.answer(answer)]
    return (await policy.chat(said, tools=tools.schemas)).text


OVER_HTTP = ("base_url", "api_key", "model")
IN_PROCESS = ("policy", "tools", "environment")
GIVEN = ("prompt", "messages", "fields", *IN_PROCESS, *OVER_HTTP)
BUILTINS: Mapping[str, Callable[..., Any]] = {"tools": use_tools, **LOOPS}
_BODY_BYTES = 1 << 28  # of a request: an agent sends all of its screenshots with each
_LOGGED_FAILURES = 3  # of a worker; metrics count them all
_log = logging.getLogger(__name__)


def agent_of(rollout: RolloutConfig) -> FunctionConfig | None:
    """Returns what `rollout.agent` names, or the loop of `rollout.environments` or `rollout.tools`; None: one
    turn per prompt.
    """
    if rollout.agent is None and rollout.environments:
        return FunctionConfig("concatenated")
    return rollout.agent or (FunctionConfig("tools") if rollout.tools else None)


def load_agent(config: FunctionConfig) -> Callable[..., Any]:
    """Returns the function of `rollout.agent` with its options. Parameters before `*` are what it wants to be
    given (some of GIVEN), keyword-only ones are its options. Raises ConfigError.
    """
    function = resolve_function(config.name, BUILTINS)
    if isinstance(function, type) and issubclass(function, Concatenated):
        check_options(function, config.options, "rollout.agent", given=0, chosen=config)
        return function(**called_with(config.options, "rollout.agent")).play
    parameters = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in parameters}
    if names & set(OVER_HTTP):
        from rondo.serving.http import check_installed  # aiohttp: only where it is wanted

        check_installed()
    if names & set(IN_PROCESS) and not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.agent: {config.name} is given the policy, which is awaited: make it `async def`, or "
            "ask over HTTP (base_url, api_key, model)"
        )
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name not in GIVEN:
            raise ConfigError(
                f"rollout.agent: {config.name} has the parameter {parameter.name!r}"
                f"{did_you_mean(parameter.name, GIVEN)} An agent is given {', '.join(GIVEN)}, as many of "
                "them as it names; put its own options behind `*`"
            )
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"rollout.agent: {config.name} has the parameter {parameter.name!r}, which cannot be given "
                f"by name; an agent's parameters are {', '.join(GIVEN)}, then `*` and its options"
            )
    given = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    check_options(function, config.options, "rollout.agent", given=given)
    return functools.partial(function, **called_with(config.options, "rollout.agent"))


def asks_over_http(function: Callable[..., Any]) -> bool:
    """Says whether an agent is given nothing of this process, so that it may run in another."""
    names = set(inspect.signature(function).parameters)
    return bool(names & set(OVER_HTTP)) and not names & set(IN_PROCESS)


class ExternalAgent:
    """An agent loop (see `runner.AgentLoop`) that runs `rollout.agent`; one per worker process.

    max_context: prompt and response tokens of a context. tools: of `rollout.tools`; they end with it. worlds:
    of `rollout.environments`; None: there are none. on_full: what becomes of an episode that is cut off.
    episode_workers: processes for an agent that asks over HTTP; 0: it runs in this one. images: how its
    prompts show images; None: the model reads none. The endpoint starts
    with the first episode, on that episode's event loop; its server only where the agent asks over HTTP.
    Raises ConfigError.
    """

    def __init__(
        self,
        config: FunctionConfig,
        tokenizer: Any,
        *,
        max_context: int,
        tools: Sequence[Tool] = (),
        worlds: Worlds | None = None,
        on_full: Literal["score", "drop"] = "score",
        episode_workers: int = 0,
        images: EpisodeImages | None = None,
    ) -> None:
        self._function = load_agent(config)
        self._tokenizer = tokenizer
        self._max_context = max_context
        parameters = inspect.signature(self._function).parameters.values()
        self._wants = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._tools = tools
        self._worlds = worlds
        self._images = images
        self._drop_full = on_full == "drop"
        self._workers: AgentWorkers | None = None
        if episode_workers and asks_over_http(self._function):
            self._workers = AgentWorkers(episode_workers, config, self._function)
        self._sessions = Sessions()
        self._endpoint: Endpoint | None = None
        self._token = secrets.token_urlsafe(24)
        self._server: HttpServer | None = None
        self._starting: asyncio.Task[str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_failures = 0
        self._episodes = self._turns = self._full = 0
        self._sent_back = self._reencoded = 0  # tokens of answers
        self._seconds = 0.0
        self._reissued = 0
        self._tool_stats = ToolStats()

    async def __call__(
        self,
        prompt: Prompt,
        generate: Callable[[GenerateRequest], Awaitable[Completion]],
        *,
        sampling: SamplingParams,
        sample_index: int,
        run_seed: int,
        purpose: str = "train",
        deadline_seconds: float | None = None,
        told: Retold | None = None,
    ) -> Trajectory:
        """Runs one episode. deadline_seconds: of all of it. told: what its environment shows again first. An
        agent that raises, runs out of time or never calls is a failed trajectory; what the engine raises is
        raised here (RolloutError). An agent that asked for more than sampling.max_tokens (400,
        context_length_exceeded) has an episode that was cut off, and is scored (unless on_full says drop),
        whatever it did then. EpisodeLostError: call it again.
        """
        loop = asyncio.get_running_loop()
        if self._endpoint is None:
            self._loop = loop
            self._endpoint = Endpoint(
                self._tokenizer, model=MODEL, max_context=self._max_context, sessions=self._sessions
            )
        base_url = await self._served(self._endpoint) if set(OVER_HTTP) & set(self._wants) else ""
        name, trajectory_id = secrets.token_hex(12), f"{purpose}/{prompt.prompt_id}/{sample_index}"
        messages = named(prompt.messages, prompt.images)
        text = messages[-1]["content"] if messages else decode(self._tokenizer, prompt.token_ids)
        rules = SessionRules(
            generate=generate,
            sampling=sampling,
            seed=request_seed(run_seed, purpose, prompt.seq, sample_index),
            name=trajectory_id,
            affinity=f"{purpose}/{prompt.seq}",
            prompt_ids=np.asarray(prompt.token_ids, np.int32),
            key=prompt_key(replace(prompt, messages=messages) if prompt.images else prompt, text),
            images=prompt.images,
            shows=self._images,
        )
        session = self._sessions.open(name, rules)
        session.images.update({name_of(image): image for image in prompt.images})
        pictures = Pictures(session.images, self._images, len(prompt.images))
        fields = copy.deepcopy(dict(prompt.fields))
        tools = Toolbox(self._tools, self._tokenizer, pictures, fields)
        world = None
        if self._worlds:
            world = self._worlds.world(prompt, run_seed, session.calls, trajectory_id, pictures, told)
        given = {
            "prompt": text,
            "messages": [dict(message) for message in copy.deepcopy(messages)],
            "fields": fields,
            "policy": Policy(self._endpoint, session, loop),
            "tools": tools,
            "environment": world,
            "base_url": base_url,
            "api_key": f"{self._token}:{name}",
            "model": MODEL,
        }
        started = time.monotonic()
        try:
            said, failure = await self._run(trajectory_id, given, (world, tools), deadline_seconds)
        except EpisodeLostError:
            self._reissued += 1
            raise
        finally:
            self._sessions.close(name)  # what is in flight is cancelled; a straggler's calls are refused
        seconds = time.monotonic() - started
        error = tools.error or (world.error if world is not None else None)
        if error is not None:
            raise error
        if self._worlds and world and world.lost:
            self._worlds.count_reissued(world)
            raise EpisodeLostError(world.lost)
        if world is not None and session.exhausted and "truncated" not in world.flags:
            world.cut_off(full=True)
        session.exhausted = session.exhausted or (world is not None and world.is_full)
        self._count(session, tools, seconds)
        if self._worlds and world and purpose == "train":
            self._worlds.count(world, seconds)
        if session.error is not None:
            raise session.error
        trajectory = self._trajectory(prompt, sample_index, session, said, failure, tools, world)
        self._log_failure(trajectory)
        return trajectory

    def branching(self, prompt: Prompt, forks: Sequence[Fork], first: int) -> Forks:
        """Returns a loop that plays branches of episodes of a prompt, that of sample `first` the first."""
        assert self._worlds is not None, "agents without environments are refused before"
        where = f"the environment {self._worlds.name_of(prompt)}"
        token = self._images.token if self._images else -1
        return Forks(self, forks, first, where, self._tokenizer, token)

    def stats(self) -> StepStats:
        """Returns the metrics of the episodes that ended since it was asked last."""
        stats, tools = StepStats(), self._tool_stats
        stats.add_mean("agent/calls", float(self._turns), self._episodes)
        stats.add_mean("agent/full_share", float(self._full), self._episodes)
        stats.add_mean("rollout/reencoded_share", float(self._reencoded), self._sent_back)
        if self._tools:
            stats.add_mean("agent/tool_calls", float(tools.calls.total()), self._episodes)
            stats.add_mean("agent/tool_seconds_share", tools.seconds, self._seconds)
            for kind, counts in (("errors", tools.errors), ("failures", tools.failures)):
                for tool in self._tools:
                    stats.add_sum(f"agent/tool_{kind}/{tool.name}", float(counts[tool.name]))
            for tool in self._tools:
                stats.add_sum(f"agent/tool_calls/{tool.name}", float(tools.calls[tool.name]))
            stats.add_sum("agent/invalid_calls", float(tools.invalid.total()))
        if self._workers:
            stats.add_sum("agent/reissued", float(self._reissued))
        if self._worlds:
            stats.merge(self._worlds.stats())
        self._episodes = self._turns = self._full = self._sent_back = self._reencoded = 0
        self._seconds = 0.0
        self._reissued = 0
        self._tool_stats = ToolStats()
        return stats

    def _count(self, session: EndpointSession, tools: Toolbox, seconds: float) -> None:
        self._seconds += seconds
        self._episodes += 1
        self._turns += len(session.calls)
        self._full += session.exhausted
        self._tool_stats.add(tools.stats)
        sent_back, again = session.tokens_sent_back()
        self._sent_back += sent_back
        self._reencoded += again

    def _trajectory(
        self,
        prompt: Prompt,
        sample_index: int,
        session: EndpointSession,
        said: str,
        failure: str,
        tools: Toolbox,
        world: World | None,
    ) -> Trajectory:
        """Makes the trajectory of an episode's calls. said, failure: see `_run`."""
        if session.exhausted:  # the episode was cut off at rollout.max_tokens, and the agent was told so
            failure = ""
        calls = (
            world.calls() if world else [PolicyCall(call.completion, call.inserted) for call in session.calls]
        )
        rows = rows_of(calls)
        if session.exhausted and rows:
            rows[-1] = replace(rows[-1], finish_reason="length")
        outcome, failure = _ended(world, tools, failure or _failure(session, rows))
        if outcome == "scored" and session.exhausted and self._drop_full:
            outcome, failure = "context_full", "the agent asked for more where its context had no room left"
        rows = rows[-MAX_ROWS:]
        assert session.rules is not None
        return Trajectory(
            prompt=prompt,
            trajectory_id=session.rules.name,
            sample_index=sample_index,
            rows=tuple(rows) or (Row.empty(prompt.token_ids, images=prompt.images),),
            outcome=outcome,
            text=said,
            transcripts=tuple(self._transcript(row, prompt) for row in rows),
            calls=tuple(calls),
            record=json.dumps(world.record) if world is not None and world.record else "",
            tool_results=tools.results,
            tool_errors=tools.stats.num_errors,
            failure=failure,
        )

    async def _run(
        self,
        trajectory_id: str,
        given: Mapping[str, Any],
        opened: tuple[World | None, Toolbox],
        deadline_seconds: float | None,
    ) -> tuple[str, str]:
        """Returns what the agent returned, and why it failed. opened: is closed when it ends."""
        arguments = {name: given[name] for name in self._wants}

        async def close() -> None:
            world, tools = opened
            try:
                if world is not None:
                    await world.close()
            finally:
                await tools.close()

        try:
            if self._workers is not None:
                return await self._workers.run(trajectory_id, arguments, deadline_seconds)
            call = functools.partial(self._function, **arguments)
            is_coroutine = inspect.iscoroutinefunction(self._function)
            async with asyncio.timeout(deadline_seconds):
                running = on_agents_loop(call, close) if is_coroutine else in_thread(call, "agent")
                return await said_by(asyncio.wrap_future(running))
        except TimeoutError:
            return "", f"the agent took longer than rollout.deadline_seconds = {deadline_seconds}"

    def _transcript(self, row: Row, prompt: Prompt) -> str:
        """Writes what was said in a context, and done, for people; and what it began with, where that is not
        the prompt of the data.
        """
        lines = []
        if not np.array_equal(row.prompt_ids, prompt.token_ids):
            text = decode(self._tokenizer, row.prompt_ids, special=True).strip()
            if self._images is not None and row.images:  # of an image's many tokens a word
                one = decode(self._tokenizer, [self._images.token], special=True)
                text = re.sub(f"(?:{re.escape(one)})+", MARK, text)
            lines.append(f"[context] {text}")
        for turn in row.turns:
            text = decode(self._tokenizer, row.response_ids[turn.start : turn.stop])
            lines.append(f"[{turn.kind}] {text.strip()}")
            lines += [turn.note] if turn.note else []
        return "\n".join(lines)

    def _log_failure(self, trajectory: Trajectory) -> None:
        if trajectory.failure and self._num_failures < _LOGGED_FAILURES:
            self._num_failures += 1
            _log.warning("%s: %s", trajectory.trajectory_id, trajectory.failure)

    async def _served(self, endpoint: Endpoint) -> str:
        """Starts the endpoint's server, once, and returns its base URL."""
        if self._starting is None:
            from rondo.serving.http import ClientLimits, HttpServer

            # The run's own agents are not refused: one too many waits until there is room.
            limits = ClientLimits(connections=sys.maxsize, body_bytes=_BODY_BYTES)
            self._server = HttpServer(endpoint, self._token, limits=limits)
            self._starting = asyncio.create_task(self._server.start())
        return await asyncio.shield(self._starting)  # an episode that is cancelled leaves it to the others

    def close(self) -> None:
        """Ends the endpoint, the episode workers, and what the tools have shared. From any thread; on its own
        loop's thread the endpoint ends soon after.
        """
        end_tools(self._tools)
        for part in (self._worlds, self._workers):
            if part is not None:
                part.close()
        server, loop = self._server, self._loop
        self._server = None
        if self._endpoint is not None:
            self._endpoint.close()
        if server is None or loop is None or not loop.is_running():
            return
        ending = asyncio.run_coroutine_threadsafe(server.close(), loop)
        if loop is not _running_loop():
            ending.result()


def _ended(world: World | None, tools: Toolbox, failure: str) -> tuple[Outcome, str]:
    """Returns the outcome of an episode, and why it failed. What an agent makes of the failure of a tool or
    of its environment does not count. failure: of the agent's own.
    """
    if world is not None and world.failure:
        return "environment_error", world.failure
    if tools.failure:
        return "tool_error", tools.failure
    return ("rollout_error", failure) if failure else ("scored", "")


def _failure(session: EndpointSession, rows: Sequence[Row]) -> str:
    """Says why calls are no trajectory; empty: they are one."""
    if not session.calls:
        return "the agent never called the model (base_url, api_key and model are what it was given)"
    if session.broken_streams:
        return f"the agent stopped reading {session.broken_streams} streamed answers before their end"
    if len(rows) > MAX_ROWS:
        return f"the agent began {len(rows)} contexts, and a trajectory has at most {MAX_ROWS}"
    if not rows:
        return f"no token was generated ({session.calls[-1].completion.finish_reason})"
    return ""


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
