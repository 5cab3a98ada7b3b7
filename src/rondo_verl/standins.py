"""What tools and interactions that are written for verl import of it: its base classes and schemas, by verl's
own names (`shipped.py` says when).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, model_validator


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter of a tool."""

    model_config = ConfigDict(extra="allow")
    type: str | list[str]
    """Of JSON."""
    description: str | None = None
    """In words for the policy."""
    enum: list[Any] | None = None
    """The values that it may have."""


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a tool."""

    model_config = ConfigDict(extra="allow")
    type: str
    """Is `object`."""
    properties: dict[str, OpenAIFunctionPropertySchema]
    """Each by its name."""
    required: list[str] = []
    """Those that a call must have."""


class OpenAIFunctionSchema(BaseModel):
    """What a tool is called, and what it is for."""

    name: str
    """As calls say it."""
    description: str
    """In words for the policy."""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema(type="object", properties={})
    """What calls give."""
    strict: bool = False
    """OpenAI's word for calls that keep to the schema."""


class OpenAIFunctionToolSchema(BaseModel):
    """A tool, as the chat template is given it."""

    type: str
    """Is `function`."""
    function: OpenAIFunctionSchema
    """What is called."""


class ToolResponse(BaseModel):
    """What a tool says."""

    text: str | None = None
    """What the policy reads."""
    image: list[Any] | None = None
    """What it sees."""
    video: list[Any] | None = None
    """Which no loop shows."""

    @model_validator(mode="before")
    @classmethod
    def _check_lists(cls, values: Any) -> Any:
        for kind in ("image", "video"):
            if kind in values and not isinstance(values[kind], list):
                raise ValueError(f"{kind} must be a list, got {type(values[kind]).__name__}")
        return values

    def is_empty(self) -> bool:
        """Says whether there is nothing to read or see."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """Says whether there is something to read, and nothing to see."""
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """What a tool of the user's inherits from."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        """The section `config` of its entry."""
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        """What the policy is told."""
        assert self.tool_schema is not None, "Tool schema is not set!"
        self.name = self.tool_schema.function.name
        """As calls name it."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Returns what the policy is told."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, ToolResponse]:
        """Begins an instance. Returns its id, and what is said at once."""
        return str(uuid4()) if instance_id is None else instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Carries out a call. Returns what is said, the reward of this step, and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        """Returns the reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        """Ends an instance."""


class BaseInteraction:
    """What an interaction of the user's inherits from."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        """The section `config` of its entry, with its name."""
        self.name: str = config.get("name", "interaction_agent")
        """As rows name it."""

    async def start_interaction(self, instance_id: str | None = None, **_: Any) -> str:
        """Begins an instance. Returns its id."""
        return str(uuid4()) if instance_id is None else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **_: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Returns whether the episode ends, what the user says, the score of this turn, and anything else."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """Returns the score of a turn."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """Ends an instance."""


@dataclass
class FunctionTool:
    """A function as a tool."""

    name: str
    """As calls name it."""
    fn: Callable[..., Any]
    """The function."""
    tool_schema: Any
    """What the policy is told."""
    is_async: bool = False
    """It is awaited."""


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Makes the function below it a tool: by type hints and a docstring of Google's style, or by `schema`."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        called = function.__name__ if callable(name) or name is None else name
        told = schema
        if told is None:
            from transformers.utils import get_json_schema

            told = get_json_schema(function)
            told["function"]["name"] = called
        if not isinstance(told, OpenAIFunctionToolSchema):
            told = OpenAIFunctionToolSchema.model_validate(told)
        FUNCTION_TOOL_REGISTRY[called] = FunctionTool(
            called, function, told, inspect.iscoroutinefunction(function)
        )
        return function

    return decorated(name) if callable(name) else decorated


def rollout_trace_op(function: Any) -> Any:
    """Returns the function: what episodes do is in the run's rollouts."""
    return function
