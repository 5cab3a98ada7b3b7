"""A LangGraph agent, as it is: LangChain's model of OpenAI's API, a tool, LangGraph's loop, and nothing of
rondo.

    pip install "rondo-rl[serve]" langchain langchain-openai
    rondo train examples/agents_sdk.yaml rollout.agent.name=examples/langgraph_agent.py:solve

The recipe is the one of agents_sdk.py, whose tool this agent has, too.
"""

from __future__ import annotations

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


async def solve(prompt: str, base_url: str, api_key: str, model: str, *, max_turns: int = 4) -> str:
    """Answers a question, with the tool where the policy asks for it."""
    policy = ChatOpenAI(base_url=base_url, api_key=api_key, model=model)
    agent = create_agent(policy, [multiply])
    done = await agent.ainvoke({"messages": [("user", prompt)]}, {"recursion_limit": 2 * max_turns + 1})
    return str(done["messages"][-1].content)
