"""What the policy may call (`rollout.tools`): typed Python functions, coroutines, classes with a state per
episode, and the tools of MCP servers.

    def weather(city: str, unit: Literal["C", "F"] = "C", *, stations: str) -> str:
        '''Says how the weather is.

        city: its name in English.
        '''
        ...

Parameters before `*` are the policy's, with the schema of their types; keyword-only ones are options of the
recipe. A parameter of the type `ShownImages` is no argument, but what the episode has shown. A class with a
class method `several(**options)` stands for as many tools as that yields pairs of: a schema, and what makes
the tool. One with a method `begin(episode)` is told what the episode shares (`Toolbox.episode`). A result is
text, what JSON can write, a Pillow image, or a `ToolResult`, whose images the policy is shown, and whose data
rewards can read. `ToolError` is an observation; anything else that is raised, a call beyond its time, or a
result of another type is a failure of the tool: the episode ends as tool_error, and is in no baseline.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from rondo.agents.mcp_servers import McpServer, running
from rondo.agents.policy import Answer
from rondo.chat import decode, tokenise_up_to
from rondo.config.functions import called_with, check_options, resolve_function
from rondo.config.schema import ToolConfig
from rondo.core.errors import ConfigError, DataError, RondoError, StorageError, ToolError, about
from rondo.core.images import NAME, ImageRef, Pictures, ShownImages, name_of
from rondo.core.types import ToolResult
from rondo.system.border import awaited, contained, described, in_thread, inside, users_code
from rondo.system.names import offered

T = TypeVar("T")
# What the policy reads of a call that could not be read, by the parser's reason.
_WRONG = {
    "not_closed": "a tool call was not closed",
    "no_json": "a tool call is no JSON",
    "no_name": "a tool call has no name",
    "arguments_no_object": "the arguments of a tool call are no object",
    "unknown_tool": "a tool call names a tool that there is not",
    "not_parallel": "more than one tool was called at a time",
}
MOST_IMAGES = 16
"""That one call may show."""
_BLIND = "rondo gives this model none: take one that reads images (docs/images.md)"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # as OpenAI's functions are called


@dataclass(frozen=True)
class Tool:
    """One of rollout.tools, as it is configured."""

    name: str
    """The name that calls give."""
    schema: Mapping[str, Any]
    """OpenAI's {type: function, function: {name, description, parameters}}, for the template."""
    config: ToolConfig
    """Its entry in rollout.tools."""
    read: Callable[[Any], Mapping[str, Any]]
    """Returns the arguments of a call, checked. Raises ValueError."""
    make: Callable[[], Callable[..., Any]]
    """Returns what is called in one episode."""
    check: Callable[[], object] | None = None
    """Looks whether this machine has what the tool needs. Raises RondoError."""
    prepare: Callable[[], object] | None = None
    """Has ready what all episodes of a process share; no call's time limit counts it. Raises RondoError."""
    end: Callable[[], None] | None = None
    """Ends what episodes share; see `end_tools`."""
    images: str = ""
    """The parameter that is given what the episode has shown; empty: it has none."""
    may_go_unseen: bool = False
    """A model that reads no images is told by its text that there are some."""
    one_at_a_time: bool = False
    """Calls of an episode wait for each other, in their order; their time limits begin then."""


@dataclass(frozen=True)
class _Said:
    """What a tool has returned, before the policy is told."""

    place: int
    """Among the calls of the episode."""
    result: ToolResult
    """With images that are kept."""


class _Unseen(Exception):  # noqa: N818
    """A tool has to do with images, and the model reads none."""


class ToolFailedError(Exception):
    """A tool is down: the episode fails, whatever the agent makes of the error."""


@dataclass
class ToolStats:
    """How tools were called, in one episode or in several."""

    calls: Counter[str] = field(default_factory=Counter)
    """Calls that were made, by tool."""
    errors: Counter[str] = field(default_factory=Counter)
    """Calls that ended in a ToolError, which the policy is shown, by tool."""
    failures: Counter[str] = field(default_factory=Counter)
    """Calls that raised anything else, by tool."""
    invalid: Counter[str] = field(default_factory=Counter)
    """Calls that were no call of a tool, by reason."""
    seconds: float = 0.0
    """The seconds that calls took, in sum."""

    @property
    def num_errors(self) -> int:
        """Counts the calls that came to nothing, and whose error the policy was shown."""
        return self.errors.total() + self.invalid.total()

    def add(self, other: ToolStats) -> None:
        """Adds the counts of another episode."""
        self.calls += other.calls
        self.errors += other.errors
        self.failures += other.failures
        self.invalid += other.invalid
        self.seconds += other.seconds


class Toolbox:
    """The tools of one episode, with their state. Use it on the agents' loop only."""

    def __init__(
        self,
        tools: Sequence[Tool],
        tokenizer: Any,
        pictures: Pictures | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.schemas: list[dict[str, Any]] = [dict(tool.schema) for tool in tools]
        """For `policy.chat(…, tools=…)`."""
        self.failure = ""
        """Why a tool of this episode failed; empty: none did."""
        self.error: RondoError | None = None
        """What ends the run."""
        self.episode: dict[str, Any] = {"fields": {} if fields is None else fields}
        """What the agent and tools with a `begin` share; at first the other columns of the prompt's row."""
        self._pictures = pictures or Pictures({}, None)
        self._numbers = any(tool.images for tool in tools)  # then the policy has to know images by theirs
        self._results: list[ToolResult | None] = []  # by call; None: it came to nothing, or not yet to an end
        self._tools = {tool.name: tool for tool in tools}
        self._made: dict[str, Callable[..., Any]] = {}
        self._one = {tool.name: asyncio.Lock() for tool in tools if tool.one_at_a_time}
        self.stats = ToolStats()
        self._tokenizer = tokenizer

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """What was said, in the order of the calls."""
        return tuple(result for result in self._results if result is not None)

    def keep(self, result: ToolResult) -> None:
        """Keeps what an agent has to tell reward functions, behind what the tools said."""
        self._results.append(result)

    async def answer(self, answer: Answer) -> list[dict[str, Any]]:
        """Makes all calls of an answer, at the same time, and returns the messages with their results; and
        one that says what was wrong with calls that could not be read.
        """
        calls = [(call["id"], call["function"]) for call in answer.tool_calls]
        said = await asyncio.gather(*(self._said(each["name"], each["arguments"]) for _, each in calls))
        messages = [  # images are numbered in the order of the calls, whichever came first to its end
            {"role": "tool", "tool_call_id": name, "name": each["name"], "content": self._told(one)}
            for (name, each), one in zip(calls, said, strict=True)
        ]
        if answer.malformed:
            self.stats.invalid.update(call["reason"] for call in answer.malformed)
            wrong = "; ".join(dict.fromkeys(_WRONG[call["reason"]] for call in answer.malformed))
            known = ", ".join(self._tools) or "none"
            messages.append({"role": "user", "content": f"Error: {wrong}. There are these tools: {known}"})
        return messages

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        """Returns what a tool says, with the names of what it shows. arguments: an object, or its JSON. What
        is wrong about the call is said to the policy, too. Raises ToolFailedError.
        """
        return self._told(await self._said(name, arguments))

    def _told(self, said: _Said | str) -> str:
        """Returns what the policy reads of a call, and lets its prompts show the images."""
        if isinstance(said, str):
            return _without_names(said)
        result, how = said.result, self._pictures.how
        most, there = None if how is None else how.per_prompt, self._pictures.in_prompt
        if result.images and most is not None and there + len(result.images) > most:
            self.stats.errors[result.tool] += 1
            return f"Error: its images are not shown: {there} were, and there may be {most}"
        self._results[said.place] = result
        numbers = [self._pictures.show(image) for image in result.images]
        names = [name_of(image) for image in result.images]
        if self._numbers:
            names = [f"Image {number}: {name}" for number, name in zip(numbers, names, strict=True)]
        return "\n".join([*names, *([_without_names(result.text)] if result.text or not numbers else [])])

    async def _said(self, name: str, arguments: str | Mapping[str, Any]) -> _Said | str:
        """Makes a call. A text is all that the policy reads."""
        tool = self._tools.get(name)
        if tool is None:
            self.stats.invalid["unknown_tool"] += 1
            return f"Error: there is no tool {name!r}; there are {', '.join(self._tools) or 'none'}"
        try:
            given = tool.read(json.loads(arguments) if isinstance(arguments, str) else dict(arguments))
        except ValueError as error:  # pydantic's is one, and so is json's
            self.stats.invalid["wrong_arguments"] += 1
            return f"Error: {_wrong(error)}"
        self.stats.calls[name] += 1
        place = len(self._results)
        self._results.append(None)
        started = time.monotonic()
        try:
            said = _result(await self._called(tool, given))
            images = await self._kept(said.images, tool)
            return _Said(
                place, replace(said, text=self._cut(said.text, tool), tool=name, images=images).lent()
            )
        except ToolError as error:
            self.stats.errors[name] += 1
            return self._cut(f"Error: {error}", tool)
        except (_Unseen, StorageError) as error:
            self.error = ConfigError(str(error)) if isinstance(error, _Unseen) else error
            raise ToolFailedError(str(error)) from error
        except Exception as error:  # the boundary: a tool is the user's code
            self.stats.failures[name] += 1
            limit = tool.config.timeout_seconds
            over = isinstance(error, TimeoutError) and time.monotonic() - started >= limit
            why = f"took longer than timeout_seconds = {limit}" if over else f"raised {described(error)}"
            self.failure = self.failure or f"the tool {name} {why}"
            raise ToolFailedError(self.failure) from error
        finally:
            self.stats.seconds += time.monotonic() - started

    async def _called(self, tool: Tool, given: Mapping[str, Any]) -> Any:
        if tool.name not in self._made:
            with contained():
                made = tool.make()
                if begin := getattr(made, "begin", None):
                    begin(self.episode)
                self._made[tool.name] = made
        function = self._made[tool.name]
        if tool.images:
            given = {**given, tool.images: self._shown(tool)}
        async with self._one.get(tool.name, nullcontext()), asyncio.timeout(tool.config.timeout_seconds):
            if _is_coroutine(function):
                return await awaited(function(**given))
            return await asyncio.wrap_future(in_thread(functools.partial(function, **given), tool.name))

    def _shown(self, tool: Tool) -> ShownImages:
        if self._pictures.how is None:
            raise _Unseen(f"the tool {tool.name} works on images, and {_BLIND}")
        return ShownImages.of(tuple(self._pictures.shown.values()), self._pictures.how)  # may grow meanwhile

    async def _kept(self, images: Sequence[Any], tool: Tool) -> tuple[ImageRef, ...]:
        """Keeps what a tool shows. Raises TypeError for what is no image, StorageError."""
        how = self._pictures.how
        if not images or (how is None and tool.may_go_unseen):
            return ()
        if how is None:
            raise _Unseen(f"the tool {tool.name} shows images, and {_BLIND}")
        if len(images) > MOST_IMAGES:
            raise TypeError(f"it returned {len(images)} images, and a call may show {MOST_IMAGES}")
        try:
            return tuple(
                [
                    one if isinstance(one, ImageRef) else await asyncio.to_thread(how.keep, one)
                    for one in images
                ]
            )
        except (ConfigError, DataError) as error:
            raise TypeError(f"it returned what is no image that can be shown: {error}") from error

    def _cut(self, text: str, tool: Tool) -> str:
        most = tool.config.max_tokens
        ids = tokenise_up_to(self._tokenizer, text, most, special=False)
        if len(ids) <= most:
            return text
        return f"{decode(self._tokenizer, ids[:most])}\n[cut off after {most} tokens]"

    async def close(self) -> None:
        """Ends what tools have opened: `close()` of those that have one."""
        for name, made in self._made.items():
            ends = getattr(made, "close", None)
            if ends is None:
                continue
            try:
                closed = ends()
                if inspect.isawaitable(closed):
                    await awaited(closed)
            except Exception as error:  # the boundary: a tool is the user's code
                self.stats.failures[name] += 1
                self.failure = self.failure or f"the tool {name} raised {described(error)} when it was closed"


# ---- what is configured


def load_tools(configs: Sequence[ToolConfig]) -> tuple[Tool, ...]:
    """Returns the tools of `rollout.tools`; MCP servers run until `end_tools`. Raises ConfigError."""
    tools: list[Tool] = []
    try:
        for place, config in enumerate(configs):
            where = f"rollout.tools.{place}"
            with about(where):
                function = resolve_function(config.name, offered("tools"))
                if function is McpServer:
                    tools += _load_server(config, where)
                elif hasattr(function, "several"):
                    tools += _load_several(function, config, where)
                else:
                    tools.append(_load(function, config, where))
                _check_different(tools, where)
    except BaseException:
        end_tools(tools)
        raise
    return tuple(tools)


def _check_different(tools: Sequence[Tool], where: str) -> None:
    names = Counter(tool.name for tool in tools)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(
            f"{where}: there are two tools called {twice[0]}; rename one, or choose from those of an MCP "
            "server (tools: […])"
        )


def end_tools(tools: Iterable[Tool]) -> None:
    """Ends the MCP servers that episodes have shared. A second call does nothing."""
    for end in dict.fromkeys(tool.end for tool in tools if tool.end):
        end()


def prepare_tools(tools: Sequence[Tool]) -> None:
    """Has ready what episodes of this process will share: indexes that are searched. Raises RondoError."""
    try:
        for tool in tools:
            if tool.prepare is not None:
                with users_code(f"prepare of tool {tool.name}", ToolError):
                    tool.prepare()
    except BaseException:
        end_tools(tools)
        raise


@contextmanager
def loaded_tools(configs: Sequence[ToolConfig]) -> Iterator[tuple[Tool, ...]]:
    """The tools of `rollout.tools`, for as long as it takes to look at them. Raises ConfigError."""
    tools = load_tools(configs)
    try:
        yield tools
    finally:
        end_tools(tools)


def _load_server(config: ToolConfig, where: str) -> list[Tool]:
    """Returns the tools of an MCP server, which is started if it does not run yet. What their arguments must
    be is the server's business.
    """
    check_options(McpServer, config.options, where, given=1, chosen=config)
    with ExitStack() as starting:
        server, served = running(starting, where, **called_with(config.options, where))
        for each in served:
            _check_name(each.name, f"{where}: {server}", "choose others of it (tools: […])")
        use = starting.pop_all()
    return [
        Tool(
            each.name,
            _as_function(each.name, each.description, _lean(each.parameters)),
            config,
            TypeAdapter(dict[str, Any]).validate_python,
            make=functools.partial(_served, server, each.name),
            end=use.close,
            may_go_unseen=True,
        )
        for each in served
    ]


def _load_several(kind: Any, config: ToolConfig, where: str) -> list[Tool]:
    """Returns the tools that one class stands for. What their arguments must be is their own business."""
    check_options(kind.several, config.options, where, given=0, chosen=config)
    with users_code(f"{where}: {config.name}", ConfigError):
        found = list(kind.several(**called_with(config.options, where)))
    for schema, _ in found:
        _check_name(schema["function"]["name"], f"{where}: {config.name}", "rename it")
    any_object = TypeAdapter(dict[str, Any]).validate_python
    return [Tool(schema["function"]["name"], schema, config, any_object, make) for schema, make in found]


def _served(server: McpServer, name: str) -> Callable[..., Any]:
    async def call(**arguments: Any) -> ToolResult:
        return await server.call(name, arguments)

    return call


def _load(function: Callable[..., Any], config: ToolConfig, where: str) -> Tool:
    is_class = inspect.isclass(function)
    called: Any = getattr(function, "__call__", None) if is_class else function  # noqa: B004
    if is_class and "__call__" not in vars(function):
        raise ConfigError(f"{where}: the class {config.name} has no __call__, which would be the tool")
    parameters = list(inspect.signature(called).parameters.values())[1 if is_class else 0 :]
    wanted = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ConfigError(
            f"{where}: {config.name}: the parameters of a tool have names: no *args or **kwargs"
        )
    given = 0 if is_class else len(wanted)
    check_options(function, config.options, where, given=given, chosen=config)
    name = str(getattr(function, "tool_name", function.__name__))
    _check_name(name, where, "rename it")
    hints = typing.get_type_hints(called, include_extras=True)
    shown = next((p.name for p in wanted if hints.get(p.name) is ShownImages), "")
    arguments = _arguments(hints, name, [p for p in wanted if p.name != shown], where)
    described_by = inspect.getdoc(function) or (inspect.getdoc(called) if is_class else None)
    options = called_with(config.options, where)
    if described := getattr(function, "described", None):
        with users_code(f"{config.name}.described", ConfigError):
            described_by = described(**options)
    schema = _schema(name, described_by, arguments, where)
    with_options = functools.partial(function, **options)
    return Tool(
        name,
        schema,
        config,
        functools.partial(_read, arguments),
        make=with_options if is_class else lambda: with_options,
        check=_at_start(function, "check", config, options),
        prepare=_at_start(function, "prepare", config, options),
        images=shown,
        one_at_a_time=getattr(function, "one_at_a_time", False),
    )


def _at_start(
    function: Any, method: str, config: ToolConfig, options: Mapping[str, Any]
) -> Callable[[], object] | None:
    """Returns a class method of a tool's that takes its options; None: it has none."""
    found = getattr(function, method, None)
    if found is None:
        return None
    return inside(functools.partial(found, **options), f"{config.name}.{method}", ConfigError)


def _check_name(name: str, where: str, remedy: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: {name!r} cannot be the name of a tool, which has letters, digits, _ and -; {remedy}"
        )


def _read(arguments: type[BaseModel], given: Any) -> dict[str, Any]:
    read = arguments.model_validate(given)
    return {name: getattr(read, name) for name in arguments.model_fields}


def _arguments(
    hints: Mapping[str, Any], name: str, wanted: Iterable[inspect.Parameter], where: str
) -> type[BaseModel]:
    """Returns the model of a tool's arguments, which checks them."""
    fields: dict[str, Any] = {}
    for parameter in wanted:
        if parameter.name not in hints:
            raise ConfigError(
                f"{where}: {name}: the parameter {parameter.name!r} has no type; the policy is told what to "
                "write by it: city: str"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except Exception as error:  # pydantic raises several kinds for types that JSON has not
        raise ConfigError(f"{where}: {name}: its types have no JSON schema: {error}") from error


def _schema(name: str, text: str | None, arguments: type[BaseModel], where: str) -> dict[str, Any]:
    """Returns OpenAI's schema. text: the docstring; lines `name: …` in it are about the parameters."""
    if not text:
        raise ConfigError(f"{where}: {name} has no docstring; the policy is told by it what the tool is for")
    try:
        parameters = arguments.model_json_schema()
    except Exception as error:  # as in `_arguments`
        raise ConfigError(f"{where}: {name}: its types have no JSON schema: {error}") from error
    parameters = _lean(parameters)
    told, rest = {}, []
    for line in text.splitlines():
        found = re.match(r"\s*(\w+)(?: \([^)]*\))?: (.+)", line)
        if found and found[1] in parameters["properties"]:
            told[found[1]] = found[2].strip()
        elif line.strip() not in ("Args:", "Parameters:"):
            rest.append(line)
    for key, description in told.items():
        parameters["properties"][key]["description"] = description
    return _as_function(name, "\n".join(rest).strip(), parameters)


def _lean(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Drops what says nothing from a schema of arguments: it would cost tokens in every prompt."""
    silent = ("title", "additionalProperties", "$schema")
    lean = {key: value for key, value in parameters.items() if key not in silent}
    lean["properties"] = {
        name: {} if kind is True else {key: value for key, value in kind.items() if key != "title"}
        for name, kind in parameters.get("properties", {}).items()
    }
    return lean


def _as_function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _without_names(text: str) -> str:
    """Returns a text that shows no image by its name: programs can find names out, and a policy that has one
    printed would be shown more images than are counted.
    """
    return NAME.sub(r"< image:\1>", text)


def _is_coroutine(function: Any) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    call = getattr(inner, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(call)


def _result(result: Any) -> ToolResult:
    """Returns what a tool has returned, as text. Raises TypeError for what is neither text nor JSON."""
    if isinstance(result, ToolResult):
        return result
    if isinstance(result, str) or result is None:
        return ToolResult(result or "")
    if type(result).__module__.startswith("PIL."):
        return ToolResult("", images=[result])
    try:
        return ToolResult(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"it returned {type(result).__name__}, which is neither text nor JSON: {error}"
        ) from error


def _wrong(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return f"the arguments are no JSON object: {error}"
    told = (f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors())
    return "wrong arguments: " + "; ".join(told)
