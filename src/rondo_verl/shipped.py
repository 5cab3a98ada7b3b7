"""Three of verl's own classes, which its examples name: the tools and the interaction that say whether an
answer is right. And the modules of verl that are stood in for, where it is not installed, while a file of the
user's is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rondo_verl.scoring import gsm8k
from rondo_verl.standins import (
    BaseInteraction,
    BaseTool,
    FunctionTool,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_tool,
    rollout_trace_op,
)

_log = logging.getLogger(__name__)


class Gsm8kTool(BaseTool):
    """Says what an answer is worth: 1 where its last number is the ground truth. A call that is no better
    than the last one of its instance costs 0.05.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._held: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **more: Any
    ) -> tuple[str, ToolResponse]:
        """Keeps the ground truth of an instance."""
        instance_id, said = await super().create(instance_id)
        truth = more.get("create_kwargs", {}).get("ground_truth") if ground_truth is None else ground_truth
        self._held[instance_id] = {"truth": truth, "answer": "", "reward": 0.0}
        return instance_id, said

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Says the reward of an answer."""
        answer, held = str(parameters.get("answer", "")), self._held[instance_id]
        held["answer"] = self._written(answer)
        reward = await self.calc_reward(instance_id)
        better, held["reward"] = reward > held["reward"], reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), 0.0 if better else -0.05, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        """Returns the reward of the last answer."""
        held = self._held[instance_id]
        return self._worth(held["answer"], held["truth"])

    async def release(self, instance_id: str, **_: Any) -> None:
        """Forgets an instance."""
        del self._held[instance_id]

    def _written(self, answer: str) -> str:
        return answer if answer.startswith("#### ") else f"#### {answer}"

    def _worth(self, answer: str, truth: Any) -> float:
        numbers = re.findall(r"-?[0-9.,]+", answer[-300:])
        found = next(
            (number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None
        )
        return 0 if found is None else float(found == truth)


class Geo3kTool(Gsm8kTool):
    """The same of geometry3k: an answer is compared by mathruler."""

    def _written(self, answer: str) -> str:
        return answer

    def _worth(self, answer: str, truth: Any) -> float:
        from mathruler.grader import grade_answer

        return float(grade_answer(answer, truth))


class Gsm8kInteraction(BaseInteraction):
    """Says whether an answer is right, by `#### number`, until it is."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, Any] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **_: Any
    ) -> str:
        """Keeps the ground truth of an instance."""
        instance_id = await super().start_interaction(instance_id)
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **_: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Says whether the last answer is right."""
        said = (message["content"] for message in reversed(messages) if message["role"] == "assistant")
        worth = gsm8k(next(said, ""), self._truths[instance_id])
        if worth == 1:
            return True, "Your response is correct!", worth, {}
        told = "Your response is incorrect! You need to reflect on your answer and try again."
        return False, told, worth, {}


# ---- modules


_SCHEMAS = (
    *(OpenAIFunctionPropertySchema, OpenAIFunctionParametersSchema, OpenAIFunctionSchema),
    *(OpenAIFunctionToolSchema, ToolResponse),
)
STOOD_IN: Mapping[str, tuple[Any, ...]] = {
    "verl": (),
    "verl.interactions": (),
    "verl.interactions.base": (BaseInteraction,),
    "verl.interactions.gsm8k_interaction": (Gsm8kInteraction,),
    "verl.tools": (),
    "verl.tools.base_tool": (BaseTool, *_SCHEMAS),
    "verl.tools.geo3k_tool": (Geo3kTool,),
    "verl.tools.gsm8k_tool": (Gsm8kTool,),
    "verl.tools.function_tool": (function_tool, FunctionTool, ToolResponse),
    "verl.tools.schemas": _SCHEMAS,
    "verl.utils": (),
    "verl.utils.rollout_trace": (rollout_trace_op,),
}
"""By the modules that are stood in for, what is in them."""


@functools.cache
def is_installed() -> bool:
    """Says whether verl itself is there."""
    return importlib.util.find_spec("verl") is not None


@functools.cache
def _say_so() -> None:
    known = ", ".join(name for name, parts in STOOD_IN.items() if parts)
    _log.warning("verl is not installed: for files that import it rondo stands in for %s", known)


@contextmanager
def standing_in() -> Iterator[None]:
    """Lets code be imported that imports what is in STOOD_IN, where verl is not installed."""
    if is_installed():
        yield
        return
    _say_so()
    for name, parts in STOOD_IN.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        for part in parts:
            setattr(module, part.__name__, part)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in [*sys.modules]:
            if name == "verl" or name.startswith("verl."):
                del sys.modules[name]
