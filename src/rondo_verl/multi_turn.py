"""verl's loops over turns, as an agent of `rollout.agent` and tools of `rollout.tools`. Tools and
interactions that are written for verl run unchanged; verl's own YAML files name them.

    tool_agent    answer ─▶ calls? ─▶ create · execute · release of each ─▶ messages ─▶ answer …
                           else interaction? ─▶ generate_response ─▶ a message of the user's ─▶ answer …

The tokens of turns are joined as in all episodes of rondo's (docs/agents.md).
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from uuid import uuid4

import yaml

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, DataError
from rondo.core.types import ToolResult, value_of_json
from rondo.rewards.verl import EPISODE
from rondo_verl import shipped, standins
from rondo_verl.run import LOOPS

_NO_CALL = ("unknown_tool", "arguments_no_object")  # of malformed calls those that verl makes, to an error


# ---- what the YAML files name


def tools_of(path: str | None, functions: str | None, version: str) -> Mapping[str, Any]:
    """Returns verl's tools by name: of a YAML file (`tool_config_path`), and of a file with `@function_tool`
    (`function_tool_path`). All episodes of a process share them. Raises ConfigError.
    """
    return _tools(os.getcwd(), path, functions, version)


@functools.cache
def _tools(folder: str, path: str | None, functions: str | None, version: str) -> Mapping[str, Any]:
    made = list(_of_yaml(path, "tools", functools.partial(_tool, version=version))) if path else []
    made += [(functions or "", tool) for tool in (_functions(functions) if functions else ())]
    found: dict[str, Any] = {}
    for where, tool in made:
        if tool.name in found:
            raise ConfigError(f"{where}: there are two tools called {tool.name}; rename one")
        found[tool.name] = tool
    return found


def interactions_of(path: str) -> Mapping[str, Any]:
    """Returns the interactions of a YAML file (`interaction_config_path`) by name. Raises ConfigError."""
    return _interactions(os.getcwd(), path)


@functools.cache
def _interactions(folder: str, path: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for where, (name, one) in _of_yaml(path, "interaction", _interaction):
        if name in found:
            raise ConfigError(f"{where}.name: there are two interactions called {name}")
        found[name] = one
    return found


def _of_yaml(path: str, key: str, make: Callable[[Mapping[str, Any], str], Any]) -> Iterator[tuple[str, Any]]:
    """Yields what is made of each entry of a list in a YAML file, and where it stands."""
    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: it cannot be read as YAML: {error}") from error
    entries = read.get(key) if isinstance(read, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: {key}: a list of {{class_name, config, …}} is wanted")
    for place, entry in enumerate(entries):
        where = f"{path}: {key}.{place}"
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ConfigError(f"{where}.class_name: it is not set: package.module.Class")
        if not isinstance(entry.get("config"), dict):
            raise ConfigError(f"{where}.config: a mapping is wanted, for the class")
        if "${" in json.dumps(entry, default=str):
            raise ConfigError(
                f"{where}: a value with ${{…}} is resolved by Hydra, and not here; write it out"
            )
        yield where, make(entry, where)


def _class(entry: Mapping[str, Any], where: str) -> Any:
    name = entry["class_name"]
    with shipped.standing_in():
        try:
            return resolve_function(name)
        except ConfigError as error:
            text = f"{where}.class_name: {error}"
            if "verl" in str(error) and not shipped.is_installed():
                known = ", ".join(name for name, parts in shipped.STOOD_IN.items() if parts)
                text += f". verl is not installed; of it there is here {known}"
            raise ConfigError(text) from error


def _tool(entry: Mapping[str, Any], where: str, version: str) -> Any:
    kind = entry["config"].get("type")
    if kind == "mcp":
        remedy = "name the server itself: rollout.tools=[{name: mcp, command: … or url: …}]"
        raise ConfigError(f"{where}.config.type: tools of MCP servers are not read from here; {remedy}")
    if kind != "native":
        raise ConfigError(f"{where}.config.type: verl wants native here, got {kind!r}")
    made, schema = _class(entry, where), entry.get("tool_schema")
    told = None
    if schema is not None:
        with shipped.standing_in():
            schema_class = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema
        try:
            told = schema_class.model_validate(_of_0_6_1(schema) if version == "0.6.1" else schema)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{where}.tool_schema: it is no schema of a tool: {error}") from error
    return _made(made, f"{where}.class_name: {entry['class_name']}", config=entry["config"], tool_schema=told)


def _of_0_6_1(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what 0.6.1 leaves out of a schema: all of a parameter but type, description and enum."""
    function = dict(schema["function"])
    if "parameters" in function:
        given = function["parameters"]
        properties = {
            name: {key: about[key] for key in ("type", "description", "enum") if key in about}
            for name, about in given["properties"].items()
        }
        function["parameters"] = {
            "type": given["type"],
            "properties": properties,
            "required": given["required"],
        }
    return {"type": schema["type"], "function": function}


def _interaction(entry: Mapping[str, Any], where: str) -> tuple[str, Any]:
    simple = entry["class_name"].rpartition(".")[2]
    name = entry.get("name") or simple.removesuffix("Interaction").lower()
    made = _class(entry, where)
    config = {**entry["config"], "name": name}
    return name, _made(made, f"{where}.class_name: {entry['class_name']}", config=config)


def _made(made: Any, where: str, **given: Any) -> Any:
    try:
        return made(**given)
    except Exception as error:  # the boundary: a class of the user's
        raise ConfigError(f"{where} raised {type(error).__name__}: {error}") from error


def _functions(path: str) -> list[Any]:
    """Returns the tools that a file makes by `@function_tool`."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: there is no such file; one with functions under @function_tool is wanted")
    with shipped.standing_in():
        module = importlib.import_module("verl.tools.function_tool")
        registry = getattr(module, "FUNCTION_TOOL_REGISTRY", standins.FUNCTION_TOOL_REGISTRY)
        before = set(registry)
        spec = importlib.util.spec_from_file_location(f"_verl_functions_{abs(hash(path))}", path)
        assert spec is not None
        assert spec.loader is not None
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except Exception as error:  # the boundary: a file of the user's
            raise ConfigError(f"{path}: it raised {type(error).__name__}: {error}") from error
    found = [registry[name] for name in sorted(set(registry) - before)]
    if not found:
        raise ConfigError(f"{path}: no function in it is under @function_tool")
    return found


# ---- in episodes


class VerlTools:
    """verl's tools as those of `rollout.tools`.

    path, functions, interactions: verl's tool_config_path, function_tool_path and interaction_config_path.
    most_characters, cut: of a result (max_tool_response_length, tool_response_truncate_side).
    """

    @classmethod
    def several(
        cls,
        *,
        path: str | None = None,
        functions: str | None = None,
        interactions: str | None = None,
        most_characters: int | None = None,
        cut: Literal["left", "middle", "right"] = "middle",
        version: Literal["main", "0.6.1"] = "main",
    ) -> Iterator[tuple[Mapping[str, Any], Callable[[], Any]]]:
        """Yields the schema of each tool, and what makes it in an episode. Raises ConfigError."""
        if interactions is not None:
            interactions_of(interactions)
        for tool in tools_of(path, functions, version).values():
            schema = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
            yield schema, functools.partial(_VerlTool, tool, most_characters, cut, version)


class _VerlTool:
    """A tool of verl's in one episode."""

    def __init__(self, tool: Any, most_characters: int | None, cut: str, version: str) -> None:
        self._tool, self._most, self._cut = tool, most_characters, cut
        self._main = version == "main"
        self._episode: Mapping[str, Any] = {}

    def begin(self, episode: Mapping[str, Any]) -> None:
        """Takes what the episode shares."""
        self._episode = episode

    async def __call__(self, **parameters: Any) -> ToolResult:
        """Carries out a call as verl does; what it raises is told to the policy."""
        instance = None
        try:
            if hasattr(self._tool, "fn"):
                response, reward = _coerced(await _called(self._tool, parameters))
            elif held := self._episode.get("instance"):  # 0.6.1's synchronous loop: of the whole episode
                more = self._kwargs().get("execute_kwargs") or {}
                response, reward, _ = await self._tool.execute(held, parameters, **more)
            else:
                given = self._kwargs()
                instance, _ = await self._tool.create(create_kwargs=given.get("create_kwargs") or {})
                state = {"agent_data": self._episode.get("agent_data")} if self._main else {}
                response, reward, _ = await self._tool.execute(instance, parameters, **state)
        except Exception as error:  # the boundary: a class of the user's, and verl goes on
            return ToolResult(f"Error when executing tool: {error}", {"reward": 0.0})
        finally:
            if instance:
                await self._tool.release(instance)
        return ToolResult(self._shortened(response.text or ""), {"reward": reward}, images=_images(response))

    def _kwargs(self) -> Mapping[str, Any]:
        return kwargs_of(self._episode.get("fields", {}), "tools_kwargs").get(self._tool.name) or {}

    def _shortened(self, text: str) -> str:
        """Cuts a result at the side that is named, as verl's words say it: left keeps the beginning."""
        most = self._most
        if most is None or len(text) <= most:
            return text
        if self._cut == "left":
            return text[:most] + "...(truncated)"
        if self._cut == "right":
            return "(truncated)..." + text[-most:]
        half = most // 2
        return text[:half] + "...(truncated)..." + text[-half:]


def kwargs_of(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns a mapping of a row's `extra_info`, {} where there is none."""
    extra = value_of_json(fields.get("extra_info"))
    found = value_of_json(extra.get(key)) if isinstance(extra, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _images(response: Any) -> Sequence[Any]:
    if response.video:
        raise TypeError("a video is not supported, as in verl; a tool may show images")
    return [image for image in response.image or () if image is not None]


async def _called(tool: Any, parameters: Mapping[str, Any]) -> Any:
    if tool.is_async:
        return await tool.fn(**parameters)
    return await asyncio.to_thread(tool.fn, **parameters)


def _coerced(said: Any) -> tuple[Any, float]:
    """Returns what a function said as verl reads it: a text, a mapping, a response, or one of these with a
    reward and metrics behind it.
    """
    reward = 0.0
    if isinstance(said, tuple):
        if not 1 <= len(said) <= 3:
            raise TypeError(f"a tuple (response, reward, metrics) was wanted, got {len(said)} values")
        reward = float(said[1]) if len(said) > 1 and said[1] is not None else 0.0
        said = said[0]
    if isinstance(said, Mapping):
        said = json.dumps(said, ensure_ascii=False)
    if not hasattr(said, "is_text_only"):
        said = SimpleNamespace(text=str(said), image=None, video=None)
    return said, reward


async def tool_agent(
    messages: Sequence[Mapping[str, Any]],
    policy: Any,
    tools: Any,
    fields: Mapping[str, Any],
    *,
    default_agent_loop: Literal["single_turn_agent", "tool_agent"] = "single_turn_agent",
    max_assistant_turns: int | None = None,
    max_user_turns: int | None = None,
    max_parallel_calls: int = 1,
    interactions: str | None = None,
    synchronous: str | None = None,
    version: Literal["main", "0.6.1"] = "main",
) -> None:
    """Plays an episode by the loop that the row's `agent_name` says, else by the default one. What tools and
    interactions gave for it is told to reward functions, in `extra_info`.

    synchronous: by the loop of 0.6.1's synchronous SGLang, which knows no names; its tools' file, or "".
    """
    loop = fields.get("agent_name") or default_agent_loop if synchronous is None else LOOPS[1]
    if loop not in LOOPS:
        tools.error = DataError(
            f"column 'agent_name' is {loop!r}, and there are {', '.join(LOOPS)}; an agent of your own is "
            "rollout.agent=path/to/file.py:function (docs/verl.md)"
        )
        return
    episode = _Turns(messages, policy, tools, fields, version)
    try:
        if loop == "single_turn_agent":
            await episode.answer([] if version == "0.6.1" else tools.schemas)  # 0.6.1 shows none then
        else:
            most = (max_assistant_turns, max_user_turns, max_parallel_calls)
            known = interactions_of(interactions) if interactions else None
            if synchronous is None:
                await episode.play(*most, known)
            else:
                found = tools_of(synchronous, None, version) if synchronous else {}
                await episode.play_synchronous(*most[:2], found, known or {})
    except DataError as error:
        tools.error = error
    finally:
        episode.tell()


class _Turns:
    """One episode: what was said, and what verl counts of it."""

    def __init__(
        self, messages: Sequence[Any], policy: Any, tools: Any, fields: Mapping[str, Any], version: str
    ) -> None:
        self._said: list[Mapping[str, Any]] = [*messages]
        self._policy, self._tools, self._fields, self._version = policy, tools, fields, version
        # As verl calls it; in main tools are given it.
        self._data = SimpleNamespace(
            messages=[*messages],
            image_data=None,
            video_data=None,
            metrics={},
            request_id=uuid4().hex,
            tools_kwargs=kwargs_of(fields, "tools_kwargs"),
            turn_scores=[],
            tool_rewards=[],
            user_turns=0,
            assistant_turns=0,
            extra_fields={},
        )
        tools.episode["agent_data"] = self._data

    async def answer(self, schemas: Sequence[Mapping[str, Any]]) -> Any:
        """Returns what the policy says next."""
        answer = await self._policy.chat(self._said, tools=schemas)
        self._data.assistant_turns += 1
        self._said.append(answer.message)
        return answer

    async def play(
        self,
        max_assistant_turns: int | None,
        max_user_turns: int | None,
        max_parallel_calls: int,
        interactions: Mapping[str, Any] | None,
    ) -> None:
        """Takes turns until there is no call and nothing is replied, or a limit is reached."""
        data, schemas = self._data, self._schemas()
        user = None if interactions is None else await self._begun(interactions)
        while True:
            answer = await self.answer(schemas)
            if (
                answer.finish_reason == "length"
                or (max_assistant_turns and data.assistant_turns >= max_assistant_turns)
                or (max_user_turns and data.user_turns >= max_user_turns)
            ):
                return
            if interactions is not None:
                data.messages.append({"role": "assistant", "content": answer.text})
            calls = [(call["id"], call["function"]) for call in answer.tool_calls]
            calls += [("", call) for call in answer.malformed if call["reason"] in _NO_CALL]
            if calls:
                await self._call(calls[:max_parallel_calls])
            elif user is None or await self._reply(user):
                return

    async def play_synchronous(
        self,
        max_assistant_turns: int | None,
        max_user_turns: int | None,
        known: Mapping[str, Any],
        interactions: Mapping[str, Any],
    ) -> None:
        """Takes turns with the tools of the row's tools_kwargs, each with one instance for the whole episode,
        whose reward is asked at its end.
        """
        data = self._data
        given = {name: kwargs for name, kwargs in data.tools_kwargs.items() if known and kwargs is not None}
        if unknown := next((name for name in given if name not in known), None):
            raise DataError(
                f"column 'extra_info': tools_kwargs names the tool {unknown!r}; there are {', '.join(known)}"
            )
        self._tools.episode["instance"] = data.request_id
        shown = {schema["function"]["name"]: schema for schema in self._tools.schemas}
        user = await self._begun(interactions) if interactions and self._asked() else None
        for name, kwargs in given.items():
            _, said = await known[name].create(data.request_id, **(kwargs.get("create_kwargs") or {}))
            if said.text:
                self._said.append({"role": "tool", "name": name, "content": said.text})
        try:
            while not max_assistant_turns or data.assistant_turns < max_assistant_turns:
                answer = await self.answer([shown[name] for name in given])
                data.messages.append({"role": "assistant", "content": answer.text})
                if answer.finish_reason == "length":
                    return
                calls = [(call["id"], call["function"]) for call in answer.tool_calls]
                calls += [("", call) for call in answer.malformed if call["reason"] == "unknown_tool"]
                if calls:
                    await self._call(calls)
                    continue
                full = max_user_turns is not None and len(data.turn_scores) >= max_user_turns
                last = max_assistant_turns and data.assistant_turns >= max_assistant_turns
                if user is None or full or last or await self._reply(user):
                    return
        finally:
            scores: dict[str, Any] = {"user_turn_rewards": data.turn_scores}
            for name, kwargs in given.items():
                reward = kwargs.get("calc_reward_kwargs") or {}
                scores[name] = await known[name].calc_reward(data.request_id, **reward)
                await known[name].release(data.request_id, **(kwargs.get("release_kwargs") or {}))
            data.extra_fields["rollout_reward_scores"] = scores

    def _asked(self) -> Mapping[str, Any]:
        return kwargs_of(self._fields, "interaction_kwargs")

    def tell(self) -> None:
        """Keeps what verl gives reward functions in `extra_info`."""
        data = self._data
        told = {name: value for name, value in data.extra_fields.items() if _is_plain(value)}
        told |= {"turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards}
        told["num_turns"] = data.user_turns + data.assistant_turns + 1
        self._tools.keep(ToolResult("", told, EPISODE))

    def _schemas(self) -> Sequence[Mapping[str, Any]]:
        """Returns the tools of this row: in main `extra_info.tool_selection` may choose some."""
        extra = value_of_json(self._fields.get("extra_info"))
        chosen = extra.get("tool_selection") if isinstance(extra, Mapping) else None
        if self._version != "main" or not chosen:
            return self._tools.schemas  # type: ignore[no-any-return]
        known = {schema["function"]["name"]: schema for schema in self._tools.schemas}
        return [known[name] for name in chosen if name in known]

    async def _begun(self, interactions: Mapping[str, Any]) -> Any:
        given = self._asked()
        # The synchronous loop has a name for rows that say none.
        name = str(given.get("name", "gsm8k" if "instance" in self._tools.episode else None))
        if name not in interactions:
            known = ", ".join(interactions)
            raise DataError(
                f"column 'extra_info': interaction_kwargs.name is {name!r}, and there are the interactions "
                f"{known} (interaction_config_path)"
            )
        await interactions[name].start_interaction(self._data.request_id, **given)
        return interactions[name]

    async def _call(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Makes calls at the same time, and shows the policy what they said."""
        before, data = len(self._tools.results), self._data
        texts = await asyncio.gather(*(self._one(call) for _, call in calls))
        rewards = [said.data.get("reward") for said in self._tools.results[before:]]
        data.tool_rewards += [reward for reward in rewards if reward is not None]
        data.tool_rewards += [0.0 for _, call in calls if "reason" in call]
        replies = [{"role": "tool", "content": text} for text in texts]
        data.messages += replies
        data.user_turns += 1
        for (name, call), reply in zip(calls, replies, strict=True):
            self._said.append({**reply, "tool_call_id": name, "name": call["name"]} if name else reply)

    async def _one(self, call: Mapping[str, Any]) -> str:
        if "reason" not in call:
            return await self._tools.call(call["name"], call["arguments"])  # type: ignore[no-any-return]
        name = re.search(r'"name"\s*:\s*("[^"]*")', call["text"])  # verl says a KeyError of it
        why = call["reason"].replace("_", " ") if name is None else f"'{name[1][1:-1]}'"
        return f"Error when executing tool: {why}"

    async def _reply(self, user: Any) -> bool:
        """Has the interaction say something. Returns whether the episode ends with it."""
        data, given = self._data, self._asked()
        ends, text, score, _ = await user.generate_response(data.request_id, data.messages, **given)
        data.user_turns += 1
        reply = {"role": "user", "content": text}
        data.messages.append(reply)
        self._said.append(reply)
        if score is not None:
            data.turn_scores.append(score)
        return bool(ends)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
