"""Episodes by verl's loops, with tools and interactions that are written for verl, by a policy that says what
a script says; a run from verl's keys; and what is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rondo.agents.tools import load_tools
from rondo.chat import decode
from rondo.config.schema import FunctionConfig, ToolConfig
from rondo.core.errors import ConfigError, DataError
from rondo.core.types import Trajectory
from rondo.rewards.verl import called_as_verl
from rondo_verl.shipped import _say_so
from tests.agents.scripted import call, episode, prompt_with, saying
from tests.rondo_verl.translated import BASE, R, load, message
from tests.serving.conftest import TOKENIZER

M = f"{R}.multi_turn"
# As a user of verl writes it, with verl's imports.
TOOLS = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

LOG = []


class Adder(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self._sums = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self._sums[instance_id] = kwargs["create_kwargs"].get("start", self.config["start"])
        LOG.append(("create", kwargs))
        return instance_id, response

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self._sums[instance_id] += parameters["number"]
        data = kwargs.get("agent_data")
        if data is not None:
            data.extra_fields["seen"] = data.assistant_turns
        return ToolResponse(text=f"{self._sums[instance_id]:0{parameters.get('width', 1)}d}"), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self._sums[instance_id])

    async def release(self, instance_id, **kwargs):
        LOG.append(("release", self._sums.pop(instance_id)))


class Searched(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
                "type": "object", "properties": {}, "required": []}}})
"""
YAML = """
tools:
  - class_name: my_verl_tools.Adder
    config: {type: native, start: 10}
    tool_schema:
      type: function
      function:
        name: add
        description: Adds a number.
        parameters:
          type: object
          properties:
            number: {type: integer, description: What to add., minimum: 0}
          required: [number]
  - class_name: my_verl_tools.Searched
    config: {type: native}
"""
FUNCTIONS = '''
from verl.tools.function_tool import function_tool


@function_tool
def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: the number
    """
    return {"twice": 2 * number}


@function_tool("slow")
async def wait(number: int):
    """Waits.

    Args:
        number: how long
    """
    return f"waited {number}", 0.25
'''
INTERACTION = """
from verl.interactions.base import BaseInteraction

LOG = []


class RiddleInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        LOG.append((self.name, self.config["patience"], ground_truth, kwargs["name"]))
        self.truth = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = self.truth in messages[-1]["content"]
        return right, "Right." if right else "Try again.", float(right), {}
"""
RIDDLES = "interaction:\n- {name: riddle, class_name: my_riddles.RiddleInteraction, config: {patience: 2}}\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that are written for verl."""
    write_own(tmp_path, monkeypatch)
    return tmp_path


def write_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name, text in {
        "my_verl_tools.py": TOOLS,
        "tools.yaml": YAML,
        "functions.py": FUNCTIONS,
        "my_riddles.py": INTERACTION,
        "riddles.yaml": RIDDLES,
    }.items():
        Path(name).write_text(text)
    for module in ("my_verl_tools", "my_riddles"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def played(
    policy: Any, agent: Mapping[str, Any], tools: Mapping[str, Any], **fields: Any
) -> tuple[Trajectory, dict[str, float]]:
    configs = [
        ToolConfig(
            "rondo_verl.multi_turn:VerlTools", max_tokens=2000, options={"path": "tools.yaml", **tools}
        )
    ]
    loaded = load_tools(configs)
    row = {"data_source": "own", "reward_model": {"ground_truth": "7"}, "agent_name": "tool_agent", **fields}
    prompt = prompt_with(loaded)
    prompt = replace(prompt, fields={**prompt.fields, **row})
    chosen = FunctionConfig("rondo_verl.multi_turn:tool_agent", agent)
    trajectory, values = episode(policy, chosen, configs, prompt=prompt)
    return trajectory.replaced(text=decode(TOKENIZER, trajectory.response_ids)), values  # as the runner does


def turns(trajectory: Trajectory) -> list[tuple[str, str]]:
    (row,) = trajectory.rows
    said = [decode(TOKENIZER, row.response_ids[turn.start : turn.stop]).strip() for turn in row.turns]
    return [(turn.kind, text) for turn, text in zip(row.turns, said, strict=True)]


def given(trajectory: Trajectory) -> dict[str, Any]:
    """What a compute_score of verl's is given."""
    found: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        found.update(extra_info, solution_str=solution_str)
        return 1.0

    called_as_verl(compute_score)(trajectory.prompt, trajectory)
    return found


def test_a_tool_of_verls(own: Path) -> None:
    policy = saying(call("add", number=5) + call("add", number=1), call("add", number=3), "#### 7")
    kwargs = {"tools_kwargs": {"add": {"create_kwargs": {"start": 100}}}, "index": 3}
    trajectory, values = played(policy, {}, {}, extra_info=kwargs)
    assert (trajectory.outcome, trajectory.failure) == ("scored", "")
    said = turns(trajectory)
    assert [kind for kind, _ in said] == ["policy", "tool", "policy", "tool", "policy"]
    assert ["<tool_response>105</tool_response>" in said[1][1], "103" in said[3][1]] == [True, True]
    assert "101" not in said[1][1]  # max_parallel_calls is 1
    log = sys.modules["my_verl_tools"].LOG
    assert log == [
        ("create", {"create_kwargs": {"start": 100}}),
        ("release", 105),
        ("create", {"create_kwargs": {"start": 100}}),
        ("release", 103),
    ]
    told = given(trajectory)
    assert told["solution_str"] == decode(TOKENIZER, trajectory.response_ids)
    assert (told["tool_rewards"], told["turn_scores"], told["num_turns"]) == ([0.5, 0.5], [], 6)
    assert (told["index"], told["seen"], told["rollout_reward_scores"]) == (3, 2, {})
    assert (values["agent/calls"], values["agent/tool_calls/add"]) == (3, 2)
    assert '"minimum": 0' in policy.asked[0]
    assert '"look"' in policy.asked[0]
    assert "verl" not in sys.modules


def test_that_verl_is_stood_in_for_is_said(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    _say_so.cache_clear()
    played(saying("#### 7"), {}, {})
    (said,) = [record.getMessage() for record in caplog.records if record.name == "rondo_verl.shipped"]
    assert said.startswith("verl is not installed: for files that import it rondo stands in for verl.inter")


def test_calls_at_the_same_time_and_calls_of_nothing(own: Path) -> None:
    policy = saying(
        call("add", number=5)
        + call("nothing", number=1)
        + call("add", text="x")
        + "<tool_call>{</tool_call>",
        "#### 7",
    )
    trajectory, _ = played(policy, {"max_parallel_calls": 4}, {"version": "0.6.1"})
    kind, said = turns(trajectory)[1]
    assert kind == "tool"
    assert [f"<tool_response>{text}</tool_response>" in said for text in (
        "15", "Error when executing tool: 'number'", "Error when executing tool: 'nothing'"
    )] == [True, True, True]  # fmt: skip
    assert given(trajectory)["tool_rewards"] == [0.5, 0.0, 0.0]
    assert "minimum" not in policy.asked[0]  # which 0.6.1 leaves out


@pytest.mark.parametrize(
    ("bounds", "answers", "counted"),
    [
        ({"max_assistant_turns": 2}, 2, 4),
        ({"max_user_turns": 1}, 2, 4),
        ({"max_assistant_turns": 1}, 1, 2),
        ({}, 3, 6),
    ],
)
def test_limits(own: Path, bounds: dict[str, int], answers: int, counted: int) -> None:
    policy = saying(call("add", number=1), call("add", number=2), "#### 7")
    trajectory, _ = played(policy, bounds, {})
    assert (len(policy.asked), trajectory.outcome) == (answers, "scored")
    assert given(trajectory)["num_turns"] == counted


@pytest.mark.parametrize(
    ("cut", "shown"),
    [("left", "0000...(truncated)"), ("right", "(truncated)...0011"), ("middle", "00...(truncated)...11")],
)
def test_long_results(own: Path, cut: str, shown: str) -> None:
    policy = saying(call("add", number=1, width=9), "#### 7")
    trajectory, _ = played(policy, {}, {"cut": cut, "most_characters": 4})
    assert f"<tool_response>{shown}</tool_response>" in turns(trajectory)[1][1]


def test_functions_as_tools(own: Path) -> None:
    policy = saying(call("double", number=4) + call("slow", number=2), "#### 7")
    trajectory, _ = played(policy, {"max_parallel_calls": 2}, {"functions": "functions.py"})
    assert '{"twice": 8}' in turns(trajectory)[1][1]
    assert "waited 2" in turns(trajectory)[1][1]
    assert given(trajectory)["tool_rewards"] == [0.0, 0.25]


@pytest.mark.parametrize(("version", "shown"), [("main", True), ("0.6.1", False)])
def test_rows_that_take_one_turn(own: Path, version: str, shown: bool) -> None:
    policy = saying(call("add", number=1), "#### 7")
    trajectory, _ = played(policy, {"version": version}, {"version": version}, agent_name=None)
    assert [kind for kind, _ in turns(trajectory)] == ["policy"]
    assert ('"add"' in policy.asked[0]) is shown
    assert given(trajectory)["num_turns"] == 2


def test_rows_choose_tools(own: Path) -> None:
    policy = saying("#### 7")
    played(policy, {}, {}, extra_info={"tool_selection": ["look", "none"]})
    assert ['"add"' in policy.asked[0], '"look"' in policy.asked[0]] == [False, True]


def test_an_interaction_of_verls(own: Path) -> None:
    policy = saying("five?", "seven 7", "never asked")
    options = {"interactions": "riddles.yaml", "version": "0.6.1"}
    kwargs = {"interaction_kwargs": {"name": "riddle", "ground_truth": "7"}}
    trajectory, _ = played(policy, options, options, extra_info=kwargs)
    assert [kind for kind, _ in turns(trajectory)] == ["policy", "user", "policy"]
    assert turns(trajectory)[1][1].endswith("Try again.\nassistant")
    told = given(trajectory)
    assert (told["turn_scores"], told["num_turns"]) == ([0.0, 1.0], 5)
    assert sys.modules["my_riddles"].LOG == [("riddle", 2, "7", "riddle")]


def test_the_loop_of_synchronous_sglang(own: Path) -> None:
    """One instance for an episode, all calls of an answer, rewards at the end."""
    policy = saying(call("add", number=5) + call("add", number=1), "six", "sixteen", "never asked")
    agent = {"synchronous": "tools.yaml", "interactions": "riddles.yaml", "max_user_turns": 1}
    about = {
        # Parquet gives a row the fields of the others, too, as null.
        "tools_kwargs": {
            "add": {"create_kwargs": {"create_kwargs": {"start": 100}}, "release_kwargs": None},
            "look": None,
        },
        "interaction_kwargs": {"name": "riddle", "ground_truth": "7"},
    }
    options = {"version": "0.6.1"}
    trajectory, _ = played(policy, {**agent, **options}, options, extra_info=about, agent_name=None)
    said = turns(trajectory)
    assert [kind for kind, _ in said] == ["policy", "tool", "policy", "user", "policy"]
    assert ["105</tool_response>" in said[1][1], "106</tool_response>" in said[1][1]] == [True, True]
    assert '"look"' not in policy.asked[0]  # the row's tools are those of its tools_kwargs
    assert given(trajectory)["rollout_reward_scores"] == {"add": 106.0, "user_turn_rewards": [0.0]}
    assert sys.modules["my_verl_tools"].LOG[1:] == [("release", 106)]


SHIPPED = """
tools:
- class_name: verl.tools.gsm8k_tool.Gsm8kTool
  config: {type: native}
  tool_schema:
    type: function
    function:
      name: calc_gsm8k_reward
      description: Says what an answer is worth.
      parameters: {type: object, properties: {answer: {type: string}}, required: [answer]}
"""


def test_a_tool_and_an_interaction_that_verl_ships(own: Path) -> None:
    Path("tools.yaml").write_text(SHIPPED)
    gsm8k = "interaction: [{name: gsm8k, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    Path("riddles.yaml").write_text(f"{gsm8k}, config: {{}}}}]")
    tries = [call("calc_gsm8k_reward", answer=answer) for answer in ("it is 7.", "7", "none")]
    policy = saying(tries[0] + tries[1] + tries[2], "#### 8", "#### 7")
    agent = {"synchronous": "tools.yaml", "interactions": "riddles.yaml", "version": "0.6.1"}
    truth = {"ground_truth": "7"}
    about = {
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": truth}},
        "interaction_kwargs": truth,
    }
    trajectory, _ = played(policy, agent, {"version": "0.6.1"}, extra_info=about)
    said = turns(trajectory)
    for text in ("answer='it is 7.' reward=0.0", "answer='7' reward=1.0", "answer='none' reward=0<"):
        assert f"Current parsed {text}" in said[1][1]
    assert "Your response is incorrect!" in said[3][1]
    told = given(trajectory)
    assert told["tool_rewards"] == [-0.05, 0.0, -0.05]
    assert told["rollout_reward_scores"] == {"calc_gsm8k_reward": 0, "user_turn_rewards": [0.0, 1.0]}
    assert told["solution_str"].endswith("#### 7")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"agent_name": "my_agent"}, "column 'agent_name' is 'my_agent'"),
        ({"extra_info": {"interaction_kwargs": {"name": "chess"}}}, "interaction_kwargs.name is 'chess'"),
    ],
)
def test_rows_that_name_what_there_is_not(own: Path, fields: dict[str, Any], words: str) -> None:
    options = {"interactions": "riddles.yaml", "version": "0.6.1"}
    with pytest.raises(DataError, match=words):
        played(saying("five?"), options, options, **fields)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "tools.yaml: it cannot be read as YAML"),
        ("tools: {", "tools.yaml: it cannot be read as YAML"),
        ("tool: []", "tools.yaml: tools: a list of"),
        ("tools: [{config: {type: native}}]", "tools.yaml: tools.0.class_name: it is not set"),
        ("tools: [{class_name: my_verl_tools.Adder}]", "tools.yaml: tools.0.config: a mapping is wanted"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "tools.0.config.type: tools of MCP servers"),
        (
            "tools: [{class_name: a.B, config: {x: '${y}'}}]",
            "tools.0: a value with ${…} is resolved by Hydra",
        ),
        (YAML.replace("Adder", "Addr"), "tools.yaml: tools.0.class_name: 'my_verl_tools.Addr'"),
        (
            YAML.replace("my_verl_tools.Adder", "verl.tools.my.T"),
            "verl is not installed; of it there is here",
        ),
        (YAML.replace("name: add", "nam: add"), "tools.yaml: tools.0.tool_schema: it is no schema of a tool"),
        (YAML.replace("name: add", "name: look"), "tools.yaml: tools.1: there are two tools called look"),
    ],
)
def test_files_of_tools_that_are_wrong(own: Path, text: str | None, words: str) -> None:
    Path("tools.yaml").unlink()
    if text is not None:
        Path("tools.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tools([ToolConfig("rondo_verl.multi_turn:VerlTools", options={"path": "tools.yaml"})])
    assert words in str(caught.value)
    assert caught.value.key == "rollout.tools.0"


# ---- keys


def test_keys_become_an_agent_and_tools() -> None:
    c = load([], [
        *BASE, f"{M}.enable=True", f"{M}.tool_config_path=t.yaml", f"{M}.max_assistant_turns=5",
        f"{M}.max_tool_response_length=99", f"{R}.agent.default_agent_loop=tool_agent", 
        "data.max_response_length=64",
    ]).config  # fmt: skip
    assert c.rollout.agent == FunctionConfig(
        "rondo_verl.multi_turn:tool_agent",
        {
            "default_agent_loop": "tool_agent",
            "max_assistant_turns": 5,
            "max_user_turns": None,
            "max_parallel_calls": 1,
            "version": "main",
        },
    )
    options = {"path": "t.yaml", "most_characters": 99, "cut": "middle", "version": "main"}
    assert c.rollout.tools == (ToolConfig("rondo_verl.multi_turn:VerlTools", 3600.0, 64, options),)
    assert c.model.tool_format == "hermes"


def test_an_interaction_alone() -> None:
    c = load([], [*BASE, f"{M}.interaction_config_path=i.yaml", f"{R}.mode=async", f"{R}.name=vllm"]).config
    assert c.rollout.agent is not None
    assert (c.rollout.agent.options["interactions"], c.rollout.agent.options["version"]) == (
        "i.yaml",
        "0.6.1",
    )
    assert c.rollout.tools[0].options["interactions"] == "i.yaml"
    assert c.model.tool_format == "auto"


def test_synchronous_sglang() -> None:
    loaded = load([], [
        *BASE, f"{M}.tool_config_path=t.yaml", f"{M}.enable=True", f"{R}.name=sglang",
        f"{M}.max_parallel_calls=3", "verl.version=0.6.1",
    ])  # fmt: skip
    agent, (tools,) = loaded.config.rollout.agent, loaded.config.rollout.tools
    assert agent is not None
    assert (agent.options["synchronous"], tools.options["most_characters"]) == ("t.yaml", None)
    assert (loaded.config.model.tool_format, tools.options["version"]) == ("auto", "0.6.1")
    why = "max_parallel_calls has no meaning in rondo: 0.6.1's synchronous SGLang does not read it"
    assert why in "\n".join(loaded.notes)


def test_one_turn_where_there_is_nothing_to_call() -> None:
    loaded = load([], [*BASE, f"{M}.max_assistant_turns=5", f"{M}.enable=False"])
    assert (loaded.config.rollout.agent, loaded.config.rollout.tools) == (None, ())
    assert f"{M}.max_assistant_turns has no meaning in rondo: an episode has one turn" in "\n".join(
        loaded.notes
    )


def test_rondos_own_keys_say_what_turns_are_taken() -> None:
    loaded = load([], [*BASE, f"{M}.tool_config_path=t.yaml", "rollout.tools=[calculator]"])
    assert loaded.config.rollout.tools == (ToolConfig("calculator"),)
    assert "rollout.tools says what turns are taken" in "\n".join(loaded.notes)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{R}.agent.default_agent_loop=mine"], "default_agent_loop (verl's spelling) cannot be mine here"),
        (
            [f"{M}.tool_config_path=t.yaml", f"{M}.format=nonsense"],
            "format (verl's spelling) cannot be nonsense",
        ),
        (
            [f"{M}.tool_config_path=t", f"{M}.tool_response_truncate_side=up"],
            "use one of left, middle, right",
        ),
        ([f"{M}.tool_config_path=t.yaml", f"{M}.max_parallel_calls=0"], "give a whole number, 1 or more"),
        ([f"{M}.tool_config_path=t.yaml", "data.tool_config_path=u.yaml"], "prompts show the tools of"),
        ([f"{M}.tool_config_path=t.yaml", "verl.version=0.6.1"], "set rollout.mode=async"),
        ([f"{M}.tool_config_path=t.yaml", f"{R}.name=sglang"], "say which (rollout.mode=async)"),
        (
            [f"{M}.tool_config_path=t.yaml", f"{R}.name=sglang", f"{R}.mode=sync"],
            "set rollout.mode=async, or multi_turn.enable=True",
        ),
        ([f"{R}.agent.agent_loop_config_path=a.yaml"], "calls its servers itself"),
    ],
)
def test_refused(overrides: list[str], words: str) -> None:
    assert words in message(*overrides)
