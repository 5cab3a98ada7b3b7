"""Questions of reasoning_gym with several tries: the question, an answer, the scorer's verdict, and again.
Needs rondo-rl[reasoning-gym].
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rondo.core.arithmetic import reads_literals
from rondo.core.errors import ConfigError, did_you_mean
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.levels import level_of
from rondo_worlds.packages import borrowed_globals, require_package


class ReasoningGym:
    """A question of `dataset`, made with the further options, and `tries` answers.

    What is to be seen is the question, with the answers so far and their scores. The reward of an answer is
    what its score is above the best before, times `discount` for each answer before it: without a discount,
    the return is the best score. A score of 1 ends the episode, and is a success.
    """

    instructions = (
        "Answer the question: put the answer, and nothing else, between <action> and </action>. If it is "
        "wrong, you will see its score, and may try again."
    )

    def __init__(self, *, dataset: str, tries: int = 3, discount: float = 1.0, **options: Any) -> None:
        self.check(dataset=dataset, tries=tries, discount=discount, **options)
        self._dataset = dataset
        self._tries = tries
        self._discount = discount
        self._options = options
        self._answers: list[tuple[str, float]] = []

    @classmethod
    def check(cls, *, dataset: str, tries: int = 3, discount: float = 1.0, **options: Any) -> None:
        """Raises ConfigError where the package is missing, or has no such dataset or options."""
        require_package("reasoning_gym")
        if tries < 1 or not 0 < discount <= 1:
            raise ConfigError(
                f"reasoning_gym: needs tries from 1 and a discount above 0 and at most 1, got {tries} and "
                f"{discount}"
            )
        from reasoning_gym.factory import DATASETS

        if dataset not in DATASETS:
            raise ConfigError(
                f"reasoning_gym has no dataset {dataset!r}{did_you_mean(dataset, DATASETS)} See its gallery"
            )
        try:
            _made(dataset, 0, options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning_gym: {dataset} cannot be made with {options}: {error}") from error

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Asks the question. task: options of the dataset, where it is to have others: `{max_terms: 6}`."""
        options = {**self._options, **(task or {})}

        def draw(rng: random.Random) -> tuple[Any, dict[str, Any]]:
            drawn = rng.randrange(2**31)
            with borrowed_globals(drawn):  # whatever was drawn before it
                made = _made(self._dataset, drawn, options)
                return made, made[0]

        name = f"reasoning_gym {self._dataset} {sorted(options.items())}"
        self._scorer, self._entry = level_of(name, seed, draw, lambda level: level[1]["question"])
        self._answers = []
        return self._observe()

    def step(self, action: str) -> StepResult:
        """Scores an answer."""
        with borrowed_globals():
            score = float(self._scorer.score_answer(action, self._entry))
        best = max((before for _, before in self._answers), default=0.0)
        reward = self._discount ** len(self._answers) * max(0.0, score - best)
        self._answers.append((action, score))
        solved = score >= 1
        done = solved or len(self._answers) == self._tries
        return StepResult(self._observe(), reward, done, success=solved)

    def _observe(self) -> Observation:
        lines = [str(self._entry["question"])]
        if self._answers:
            lines += ["", *(f"Answer: {answer}\nScore: {score:g}" for answer, score in self._answers)]
            lines.append(f"Tries left: {self._tries - len(self._answers)}")
        return Observation("\n".join(lines))

    def state(self) -> Mapping[str, Any]:
        """Returns the question, its answer (null where many are right), and the answers so far."""
        answers = [list(answer) for answer in self._answers]
        return {"question": self._entry["question"], "answer": self._entry["answer"], "answers": answers}

    def close(self) -> None:
        """Has nothing to end."""


def _made(dataset: str, seed: int, options: Mapping[str, Any]) -> Any:
    import reasoning_gym

    with borrowed_globals():
        return reads_literals(reasoning_gym.create_dataset(dataset, seed=seed, size=1, **options))
