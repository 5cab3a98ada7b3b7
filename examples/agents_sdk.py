"""An agent of the OpenAI Agents SDK, as it is: a tool, the SDK's own loop, and nothing of rondo.

    pip install "rondo-rl[serve]" openai-agents
    rondo train examples/agents_sdk.yaml

The SDK's chat-completions model is told where the policy is; the rest is what the SDK's users write.
"""

from __future__ import annotations

import functools

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


@functools.cache
def shared_client() -> AsyncOpenAI:
    """Made once: a client takes 75 ms, a copy of it for another key does not."""
    return AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="unused")


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


async def solve(prompt: str, base_url: str, api_key: str, model: str, *, max_turns: int = 4) -> str:
    """Answers a question, with the tool where the policy asks for it."""
    client = shared_client().with_options(base_url=base_url, api_key=api_key)
    agent = Agent(
        name="solver",
        instructions="Solve the problem. End with #### and the number.",
        model=OpenAIChatCompletionsModel(model, client),
        tools=[multiply],
    )
    done = await Runner.run(agent, prompt, max_turns=max_turns, run_config=RunConfig(tracing_disabled=True))
    return str(done.final_output)
