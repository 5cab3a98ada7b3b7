"""The loops of `rollout.environments`, as agents: `concatenated`, whose one context grows, and `steps`, which
asks each step with a prompt of its own.

    concatenated   task, observation ─▶ answer · observation ─▶ answer · …               one row
    steps          task, memory, observation ─▶ answer     task, memory, observation ─▶ answer     a row each
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.agents.memory import NO_ACTION, Acted, load_memory, told
from rondo.agents.policy import Answer, Policy
from rondo.agents.state_reasoning import StateReasoning
from rondo.agents.worlds import World
from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError
from rondo.core.types import MAX_ROWS
from rondo.environments import Observation, StepResult
from rondo.serving.problems import ApiError

_OPEN, _CLOSE = "<action>", "</action>"
THINK, _THOUGHT = "<think>", "</think>"

WritePrompt = Callable[[str, Sequence[Acted], Observation], str]
ReadAction = Callable[[str, Observation], str | Sequence[str | None] | None]
Message = Mapping[str, Any]
AskNext = Callable[[Acted | None, Observation], Awaitable[Answer | None]]
"""Asks the policy what to do, given the turn before, if there is one, and what is to be seen. None: nothing
more fits a context.
"""


def write_prompt(task: str, memory: Sequence[Acted], seen: Observation) -> str:
    """Returns a message: the task, what was seen and done, what is to be seen, and the actions."""
    parts = [task] if task else []
    if memory:
        parts.append("\n\n".join(told(acted) for acted in memory))
    parts.append(seen.text)
    if seen.actions:
        parts.append(f"Actions: {', '.join(seen.actions)}")
    return "\n\n".join(parts)


def tagged_action(answer: str, seen: Observation) -> str | None:
    """Returns what stands in the last `<action>…</action>`; None: there is none, or it is no admissible one.
    Case and white space at the ends do not matter.
    """
    found = _tagged(answer)
    return _possible(found[-1], seen) if found else None


def tagged_actions(answer: str, seen: Observation) -> list[str | None]:
    """Returns what stands in every `<action>…</action>`, in their order. What is possible may change from one
    to the next: those that are not yet are returned as they were said.
    """
    return [_possible(said, seen) or said.strip() or None for said in _tagged(answer)]


def thought_action(answer: str, seen: Observation) -> str | None:
    """Returns the action behind a thought, as `tagged_action` does; None: there is no `<think>…</think>`
    before it. Tags inside of the thought do not count.
    """
    return tagged_action(_behind_thought(answer), seen)


def thought_actions(answer: str, seen: Observation) -> list[str | None]:
    """Returns the actions behind a thought, as `tagged_actions` does; none: there is no thought."""
    return tagged_actions(_behind_thought(answer), seen)


def _behind_thought(answer: str) -> str:
    thought, _, rest = answer.rpartition(_THOUGHT)
    return rest if THINK in thought else ""


def _tagged(answer: str) -> list[str]:
    """Returns what stands between the tags, from the first opening before a closing on. Takes time linear in
    the text, as a pattern that looks for each opening's end does not.
    """
    # What stands behind the last closing tag was never closed.
    ended = answer.split(_CLOSE)[:-1]
    return [part.partition(_OPEN)[2] for part in ended if _OPEN in part]


def whole_answer(answer: str, seen: Observation) -> str | None:
    """Returns the whole answer, for environments that one talks to. None: it is empty."""
    return answer.strip() or None


def _possible(said: str, seen: Observation) -> str | None:
    said = said.strip()
    if not seen.actions:
        return said or None
    return next((action for action in seen.actions if action.casefold() == said.casefold()), None)


@dataclass(kw_only=True)
class Concatenated:
    """Plays episodes in one conversation each, in which every observation is a message of the user.

    Its fields are the options of `rollout.agent`. Raises ConfigError for values that cannot be.
    """

    max_steps: int = 20
    """Actions at most, valid or not."""
    actions_per_turn: int = 1
    """Actions that are carried out of one answer, at most."""
    invalid_penalty: float = 0.0
    """Is taken from the reward of an invalid action."""
    prompt: str | None = None
    """A WritePrompt."""
    action: str | None = None
    """A ReadAction; `whole`: whole_answer; `think`: thought_action, or thought_actions."""
    reasoning: Mapping[str, Any] | None = None
    """Options of `state_reasoning.StateReasoning`."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_steps <= MAX_ROWS:
            raise ConfigError(f"rollout.agent: max_steps must be from 1 to {MAX_ROWS}, got {self.max_steps}")
        if self.actions_per_turn < 1:
            raise ConfigError(
                f"rollout.agent: actions_per_turn must be at least 1, got {self.actions_per_turn}"
            )
        if not 0 <= self.invalid_penalty < float("inf"):
            raise ConfigError(
                f"rollout.agent: invalid_penalty must be at least 0, got {self.invalid_penalty}"
            )
        self._write: WritePrompt = resolve_function(self.prompt) if self.prompt else write_prompt
        tagged: ReadAction = tagged_action if self.actions_per_turn == 1 else tagged_actions
        thought: ReadAction = thought_action if self.actions_per_turn == 1 else thought_actions
        known = {"whole": whole_answer, "think": thought}
        self.reasons = StateReasoning.of(self.reasoning)
        self._read: ReadAction = resolve_function(self.action, known) if self.action else tagged

    async def play(self, messages: Sequence[Message], policy: Policy, environment: World) -> str:
        """Plays an episode. Returns the last answer."""
        if not messages:
            raise ConfigError(
                "rollout.environments: loops talk in messages; the tokenizer has no chat template"
            )
        ask = self._asking(messages, policy, environment)
        # Of a thought that the template opens, answers have only the end.
        opened = THINK if self.action == "think" and policy.opens_thought else ""
        seen, acted, text = await environment.reset(), None, ""
        while environment.steps < self.max_steps:
            answer = await ask(acted, seen)
            if answer is None:
                environment.cut_off(full=True)
                return text
            text = answer.text
            acted, result = await self._act(environment, seen, text, self._read(f"{opened}{text}", seen))
            if result.done or result.truncated:
                return text
            seen = result.observation
        environment.cut_off()
        return text

    async def _act(
        self,
        environment: World,
        seen: Observation,
        answer: str,
        chosen: str | Sequence[str | None] | None,
    ) -> tuple[Acted, StepResult]:
        """Carries out an answer's actions up to one that is invalid or ends the episode. Returns all, and the
        result of the last.
        """
        # None is an action, too: it is invalid, counts as a step, and the policy is told.
        actions = [chosen] if chosen is None or isinstance(chosen, str) else list(chosen) or [None]
        made: list[str | None] = []
        reward, before = 0.0, environment.last_state
        for action in actions[: min(self.actions_per_turn, self.max_steps - environment.steps)]:
            result = await environment.step(action, penalty=self.invalid_penalty)
            reward += result.reward
            made.append(None if result.invalid else action)
            if result.invalid or result.done or result.truncated:
                break
        if self.reasons is not None:
            worth, scores = await self.reasons.score(answer, before, environment.last_state)
            environment.credit(worth, scores)
            reward += worth
        return Acted(seen, answer, tuple(made), reward), result

    def _asking(self, messages: Sequence[Message], policy: Policy, environment: World) -> AskNext:
        said = list(messages[:-1])
        answers: list[Answer] = []

        async def ask(acted: Acted | None, seen: Observation) -> Answer:
            if acted is None:
                text = self._write(str(messages[-1]["content"]), (), seen)
                said.append({**messages[-1], "content": text})
            else:
                text = self._write("", (), seen)
                content = f"{NO_ACTION}\n{text}" if acted.invalid else text
                said.extend([answers[-1].message, {"role": "user", "content": content}])
            answers.append(await policy.chat(said))
            return answers[-1]

        return ask


@dataclass(kw_only=True)
class Steps(Concatenated):
    """Plays episodes in which each step is asked with a fresh prompt: the task, what the memory shows of the
    steps before, and what is to be seen.
    """

    history: int = 2
    """Steps that are shown."""
    memory: str | Mapping[str, Any] = "recent"
    """See `memory.MEMORIES`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 0:
            raise ConfigError(f"rollout.agent: history must be at least 0, got {self.history}")
        self._remember = load_memory(self.memory)

    def _asking(self, messages: Sequence[Message], policy: Policy, environment: World) -> AskNext:
        before, task = messages[:-1], messages[-1]
        memory = self._remember()

        async def chat(content: str) -> Answer:
            return await policy.chat([*before, {**task, "content": content}])

        async def aside(text: str) -> str:
            answer = await chat(f"{task['content']}\n\n{text}")
            environment.aside("memory")
            return answer.text

        async def ask(acted: Acted | None, seen: Observation) -> Answer | None:
            if acted is not None:
                memory.append(acted)
            try:
                view = await memory.view(self.history, seen, aside)
                notes = f"\n\nNotes: {view.notes}" if view.notes else ""
                return await chat(self._write(f"{task['content']}{notes}", view.steps, seen))
            except ApiError as error:
                # A first prompt that is too long is a mistake in the settings, and no end of an episode.
                if error.code != "context_length_exceeded" or acted is None:
                    raise
                return None

        return ask


LOOPS: Mapping[str, type[Concatenated]] = {"concatenated": Concatenated, "steps": Steps}
