"""The agent of `rollout.tools` where `rollout.agent` names none: the policy calls tools until it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rondo.agents.policy import Policy
from rondo.agents.tools import Toolbox
from rondo.core.errors import ConfigError


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
