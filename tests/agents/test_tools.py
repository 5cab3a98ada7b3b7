"""Tools: their schemas, what is wrong with one, and what a call comes to. Episodes: test_tool_episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from rondo.agents.tools import Toolbox, ToolFailedError, load_tools
from rondo.config.schema import ToolConfig
from rondo.core.errors import ConfigError
from tests.agents import own_tools
from tests.messages import full_text
from tests.serving.conftest import TOKENIZER

OWN = "tests/agents/own_tools.py"


def box(*names: str, **settings: Any) -> Toolbox:
    configs = [ToolConfig(name if name == "calculator" else f"{OWN}:{name}", **settings) for name in names]
    return Toolbox(load_tools(configs), TOKENIZER)


def called(tools: Toolbox, name: str, arguments: str | Mapping[str, Any]) -> str:
    async def main() -> str:
        try:
            return await tools.call(name, arguments)
        finally:
            await tools.close()

    return asyncio.run(main())


def test_a_schema_is_that_of_the_types_and_the_docstring() -> None:
    (schema,) = box("weather").schemas
    assert schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says how the weather is.\n\nIt may be wrong.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name in English."},
                    "unit": {
                        "type": "string",
                        "enum": ["C", "F"],
                        "default": "C",
                        "description": "of the temperature.",
                    },
                },
                "required": ["city"],
            },
        },
    }
    assert box("Counter").schemas[0]["function"]["parameters"]["properties"] == {
        "by": {"type": "integer", "default": 1}
    }


def test_arguments_are_of_the_types_of_the_parameters() -> None:
    assert called(box("weather"), "weather", {"city": "Oslo"}) == "Oslo: 20 C (all)"
    assert called(
        box("weather", options={"stations": "two"}), "weather", '{"city": "Oslo", "unit": "F"}'
    ) == ("Oslo: 20 F (two)")
    assert called(box("slow_sum"), "slow_sum", '{"numbers": ["3", 4]}') == '{"sum": 7}'


@pytest.mark.parametrize(
    ("name", "arguments", "said", "reason"),
    [
        ("wether", "{}", "Error: there is no tool 'wether'; there are weather, slow_sum", "unknown_tool"),
        ("weather", "{", "Error: the arguments are no JSON object: ", "wrong_arguments"),
        ("weather", "[]", "Error: wrong arguments: ", "wrong_arguments"),
        ("weather", "{}", "Error: wrong arguments: city: Field required", "wrong_arguments"),
        ("weather", '{"city": "x", "unit": "K"}', "Error: wrong arguments: unit: Input", "wrong_arguments"),
        ("weather", '{"city": "x", "town": 1}', "Error: wrong arguments: town: Extra", "wrong_arguments"),
        ("slow_sum", '{"numbers": ["a"]}', "Error: wrong arguments: numbers.0: Input", "wrong_arguments"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_said_to_the_policy(name: str, arguments: str, said: str, reason: str) -> None:
    tools = box("weather", "slow_sum")
    assert called(tools, name, arguments).startswith(said)
    assert tools.stats.invalid == {reason: 1}
    assert (tools.failure, tools.stats.calls.total()) == ("", 0)


def test_an_error_of_a_tool_is_an_observation() -> None:
    tools = box("weather")
    assert called(tools, "weather", {"city": "Atlantis"}) == "Error: no such city"
    assert (tools.failure, tools.stats.errors, tools.stats.calls) == ("", {"weather": 1}, {"weather": 1})


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raises", "raised LookupError: the database is gone (own_tools.py, line "),
        ("exits", "raised EscapeError: SystemExit(0) would end or cancel the run"),
        ("hangs", "took longer than timeout_seconds = 0.2"),
        ("bytes", "raised TypeError: it returned bytes, which is neither text nor JSON"),
    ],
)
def test_a_tool_that_is_down_is_no_observation(what: str, why: str) -> None:
    tools = box("breaks", timeout_seconds=0.2 if what == "hangs" else 30.0)
    with pytest.raises(ToolFailedError) as caught:
        called(tools, "breaks", {"what": what})
    assert str(caught.value) == tools.failure
    assert tools.failure.startswith(f"the tool breaks {why}")
    assert tools.stats.failures == {"breaks": 1}


def test_a_long_answer_is_cut_off_in_tokens() -> None:
    said = called(box("breaks", max_tokens=20), "breaks", {"what": "much"})
    text, _, note = said.rpartition("\n")
    assert note == "[cut off after 20 tokens]"
    assert len(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == 20
    assert ("red " * 2_500_000).startswith(text)
    assert called(box("breaks"), "breaks", {"what": "nothing"}) == ""


def test_a_class_has_a_state_for_each_episode() -> None:
    own_tools = load_tools([ToolConfig(f"{OWN}:Counter", options={"start": 5})])

    async def episode() -> list[str]:
        tools = Toolbox(own_tools, TOKENIZER)
        said = [await tools.call("Counter", {}), await tools.call("Counter", {"by": 3})]
        await tools.close()
        return said

    assert [asyncio.run(episode()) for _ in range(2)] == [["6", "9"]] * 2


def test_calls_of_one_answer_run_at_the_same_time() -> None:
    """Two that wait for each other."""
    tools = box("slow_sum")
    running = 0
    both = asyncio.Event()

    async def meets(numbers: list[int], seconds: float) -> int:
        nonlocal running
        running += 1
        if running == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 60)
        return sum(numbers)

    tools._made["slow_sum"] = meets

    async def main() -> list[str]:
        calls = [tools.call("slow_sum", {"numbers": [i]}) for i in range(2)]
        return list(await asyncio.gather(*calls))

    assert asyncio.run(main()) == ["0", "1"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 3) * 4 / 5", "12"),
        ("1/4", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("-7 * 6", "-42"),
        ("2 ** 9", "Error: not an expression of numbers"),
        ("1 / 0", "Error: not an expression of numbers"),
        ("__import__('os')", "Error: not an expression of numbers"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert called(box("calculator"), "calculator", {"expression": expression}).startswith(value)


@pytest.mark.parametrize("expression", ["1e308*1e308/7", "*".join(["1e300"] * 33)])
def test_a_value_beyond_all_numbers_is_an_answer_of_the_calculator(expression: str) -> None:
    said = called(box("calculator"), "calculator", {"expression": expression})
    assert said.endswith("the value is too large to be written down")


@pytest.mark.slow
def test_python_has_a_session_for_each_episode() -> None:
    """In the sandbox of this machine: state over calls, none over episodes, and what a program does wrong."""
    loaded = load_tools([ToolConfig("python", options={"seconds": 2.0})])
    for tool in loaded:
        assert tool.check is not None
        tool.check()

    async def episode(*programs: str) -> list[str]:
        tools = Toolbox(loaded, TOKENIZER)
        said = [await tools.call("python", {"code": program}) for program in programs]
        await tools.close()
        assert tools.failure == ""
        return said

    async def both() -> list[list[str]]:
        first = await episode("x = 6 * 7", "print(x)\nx + 1", "1 / 0", "while True: pass", "x")
        return [first, await episode("x")]

    first, second = asyncio.run(both())
    assert first[:2] == ["", "42\n43\n"]
    assert first[2].endswith("ZeroDivisionError: division by zero")
    assert first[3].endswith("Error: it took longer than 2 s and was ended")
    assert "NameError" in second[0]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("wheather", {}, "did you mean 'weather'"),
        ("weather", {"station": "x"}, "did you mean 'stations'"),
        ("weather", {"stations": 3}, "must be str"),
        ("Counter", {"begin": 3}, full_text("has no option 'begin'. Its")),
        ("Counter", {"timeout_second": 3}, full_text("did you mean 'timeout_seconds'? Its")),
        ("no_type", {}, "the parameter 'city' has no type"),
        ("no_docstring", {}, "has no docstring"),
        ("any_number", {}, r"no \*args or \*\*kwargs"),
        ("no_json", {}, "its types have no JSON schema"),
        ("CLOSED", {}, "CLOSED"),
        ("python", {"second": 3}, "did you mean 'seconds'"),
    ],
)
def test_what_is_no_tool_is_said_at_the_start(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_tools([ToolConfig(name if name == "python" else f"{OWN}:{name}", options=options)])


def test_options_of_python_are_checked_before_the_run() -> None:
    (tool,) = load_tools([ToolConfig("python", options={"seconds": -1.0})])
    assert tool.check is not None
    with pytest.raises(ConfigError, match=full_text("seconds=-1.0: a number above 0 is wanted")):
        tool.check()


def test_two_tools_of_one_name() -> None:
    with pytest.raises(ConfigError, match=full_text("there are two tools called calculator")):
        load_tools([ToolConfig("calculator"), ToolConfig("calculator")])


def test_the_schemas_are_json() -> None:
    names = ("weather", "slow_sum", "Counter", "breaks", "calculator")
    assert json.loads(json.dumps(box(*names).schemas)) == box(*names).schemas
    assert own_tools.CLOSED is not None
