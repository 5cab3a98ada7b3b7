"""Episodes of agents with a policy that says what a script says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rondo.agents.external import ExternalAgent
from rondo.agents.tools import load_tools
from rondo.chat import decode, encode_prompt
from rondo.config.schema import FunctionConfig, ToolConfig
from rondo.core.types import Completion, GenerateRequest, Prompt, SamplingParams, Trajectory
from tests.serving.conftest import STOPS, TOKENIZER

ASK = ({"role": "user", "content": "Tom has 3 apples, buys 4. How many?"},)
END = int(TOKENIZER.convert_tokens_to_ids("<|im_end|>"))


def prompt_with(tools: Sequence[Any], tokenizer: Any = TOKENIZER) -> Prompt:
    """As data makes it of a run with rollout.tools."""
    schemas = [dict(tool.schema) for tool in tools]
    ids = encode_prompt(tokenizer, ASK, None, schemas)
    return Prompt(
        5, "train/0/5", "train", ids, {"answer": "7", **({"tools": schemas} if schemas else {})}, ASK
    )


def episode(
    generate: Any,
    agent: FunctionConfig,
    tools: Sequence[ToolConfig] = (),
    *,
    max_tokens: int = 2000,
    seconds: float | None = None,
    tokenizer: Any = TOKENIZER,
    prompt: Prompt | None = None,
    **settings: Any,
) -> tuple[Trajectory, dict[str, float]]:
    """One episode, and the metrics of it."""
    loaded = load_tools(tools)
    asked = prompt or prompt_with(loaded, tokenizer)
    sampling = SamplingParams(max_tokens, temperature=0.9, stop_token_ids=STOPS)

    async def main() -> tuple[Trajectory, dict[str, float]]:
        runs = ExternalAgent(agent, tokenizer, max_context=max_tokens + 1000, tools=loaded, **settings)
        try:
            made = await runs(
                asked, generate, sampling=sampling, sample_index=2, run_seed=11,
                deadline_seconds=seconds,
            )  # fmt: skip
            return made, runs.stats().values()
        finally:
            await asyncio.to_thread(runs.close)

    return asyncio.run(main())


def saying(*answers: str) -> Callable[..., Any]:
    """A policy that says these, one after the other, and keeps what it was asked."""
    left = list(answers)

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        ids = [*TOKENIZER(left.pop(0), add_special_tokens=False)["input_ids"], END]
        generate.asked.append(decode(TOKENIZER, request.token_ids))  # type: ignore[attr-defined]
        made = np.array(ids, np.int32)
        log_probs, versions = np.full(len(ids), -0.5, np.float32), np.full(len(ids), 3, np.int32)
        return Completion(request.request_id, request.token_ids, made, log_probs, versions, "stop")

    generate.asked = []  # type: ignore[attr-defined]
    return generate


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
