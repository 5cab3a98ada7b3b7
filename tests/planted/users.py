"""What functions and environments of a user's do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.planted.fault import Patch, fault
from tests.planted.files import with_template

# ---- functions of the user's


def _reward(folder: Path, body: str) -> Sequence[str]:
    (folder / "score.py").write_text(f"def score(prompt, trajectory):\n{body}")
    return (f"reward.functions=[{{name: {folder}/score.py:score}}]",)


@fault(
    "warns", "reward", "huggingface/trl/issues/3452", "modelscope/ms-swift/issues/4789",
    by="no_signal", step=1, says="nothing is learnt; all rewards are 0.000",
)  # fmt: skip
def reward_hides_its_error(patch: Patch, folder: Path) -> Sequence[str]:
    """A reward function catches its own error, and returns 0."""
    return _reward(
        folder,
        "    try:\n        return float(trajectory.anwser)\n    except AttributeError:\n        return 0.0\n",
    )


@fault(
    "warns", "reward", "unslothai/unsloth/issues/2291",
    by="no_signal", step=1, says="nothing is learnt; all rewards are 1.000",
)  # fmt: skip
def judge_says_yes(patch: Patch, folder: Path) -> Sequence[str]:
    """A judge says yes to everything."""
    return _reward(folder, "    return 1.0\n")


@fault(
    "warns", "reward", "modelscope/ms-swift/issues/4547",
    by="no_signal", step=1, says="nothing is learnt; within each group all rewards are equal",
)  # fmt: skip
def example_scored(patch: Patch, folder: Path) -> Sequence[str]:
    """A scorer reads the example in the prompt instead of the answer."""
    return _reward(folder, "    return float(prompt.token_ids.sum() % 7)\n")


@fault(
    "warns", "reward",
    by="same_score", step=1, says="the same for every answer since the run began, and teach nothing: judge",
)  # fmt: skip
def judge_says_yes_beside_another(patch: Patch, folder: Path) -> Sequence[str]:
    """A judge says yes to everything, beside a score that varies."""
    (folder / "two.py").write_text(
        "def judge(prompt, trajectory):\n    return 1.0\n"
        "def other(prompt, trajectory):\n    return float(trajectory.response_ids.sum() % 997) / 997\n"
    )
    return (
        f"reward.functions=[{{name: {folder}/two.py:judge}}, {{name: {folder}/two.py:other}}]",
        "trainer.total_steps=12",
        "trainer.evaluation.every=null",
    )


LOSS = """
import torch
def loss(log_probs, old_log_probs, advantages, response_mask):
    {line}
    return -torch.exp(log_probs - old_log_probs) * advantages, {{}}
"""


def _loss(folder: Path, line: str) -> Sequence[str]:
    (folder / "loss.py").write_text(LOSS.format(line=line))
    return (f"algorithm.policy_loss={folder}/loss.py:loss",)


@fault(
    "warns", "loss", "huggingface/trl/issues/3021", "modelscope/ms-swift/pull/10116",
    by="micro_batch", step=1, says="when its rows are in two micro-batches",
)  # fmt: skip
def loss_scales_with_micro_batches(patch: Patch, folder: Path) -> Sequence[str]:
    """A loss normalises by the other rows of its micro-batch."""
    return _loss(folder, "advantages = advantages / (advantages.std() + 1e-6)")


@fault(
    "warns", "loss", "THUDM/slime/issues/1370",
    by="micro_batch", step=1, says="when its rows are in two micro-batches",
)  # fmt: skip
def padding_votes(patch: Patch, folder: Path) -> Sequence[str]:
    """A loss takes a mean over tokens that are masked."""
    return _loss(folder, "advantages = advantages * (log_probs.detach() * response_mask).mean()")


# ---- training


@fault(
    "warns", "hook", by="still", step=2, says="still: 1 tensors are as they were before the step",
)  # fmt: skip
def frozen_by_a_hook(patch: Patch, folder: Path) -> Sequence[str]:
    """A hook keeps the gradient of a tensor at 0 that should learn."""
    step = torch.optim.AdamW.step

    def without_one(self: torch.optim.AdamW, *arguments: Any, **more: Any) -> Any:
        own = self.param_groups[0]["params"][3]
        if own.grad is not None:
            own.grad = torch.zeros_like(own.grad)
        return step(self, *arguments, **more)

    patch.setattr(torch.optim.AdamW, "step", without_one)
    return ("trainer.total_steps=4", "actor.optimizer.weight_decay=0")


# ---- environments

WORLD = """
from rondo.environments import Observation, StepResult
class World:
    instructions = "Say a."
    times = 0
    def reset(self, seed, task):
        World.times += 1
        if World.times % 4 == 0:
            raise OSError("the simulator does not answer")
        return Observation("go", actions=("a", "b"))
    def step(self, action):
        return StepResult(Observation("there", actions=("a", "b")), float(action == "a"), done=True)
    def state(self):
        return {}
    def close(self): ...
"""


def _world(folder: Path, text: str, agent: str) -> Sequence[str]:
    (folder / "worlds.py").write_text(text)
    (folder / "acts.py").write_text("def act(answer, seen):\n    return 'a'\n")
    world = f"{folder}/worlds.py:World"
    rows = (
        f"{{type: function, task: rondo.environments.episodes, options: {{environment: '{world}', size: 8}}}}"
    )
    return (
        f"data.train=[{rows}]",
        "data.eval=[]",
        "trainer.evaluation.every=null",
        f"rollout.environments=[{{name: '{world}'}}]",
        f"rollout.agent={agent}",
        "reward.functions=[environment]",
    )


@fault(
    "warns", "environment", "NVIDIA-NeMo/RL/issues/4160", "verl-project/verl/issues/6452",
    by="failed", step=1, says="have no score and are dropped",
)  # fmt: skip
def simulator_gone(patch: Patch, folder: Path) -> Sequence[str]:
    """Every fourth episode fails in its simulator, which others score as 0."""
    return _world(folder, WORLD, "{name: steps, max_steps: 1}")


CLOCKED = """
from rondo.environments import Observation, StepResult
class World:
    instructions = "Say a."
    def reset(self, seed, task):
        self.steps, self.seed = 0, seed
        return Observation("go", actions=("a", "b"))
    def step(self, action):
        self.steps += 1
        won = self.seed % 4 == 0 and self.steps == 2
        # Its own clock: gymnasium's `terminated`, where `truncated` would be right.
        over = won or self.steps == 6
        return StepResult(Observation("there", actions=("a", "b")), float(won), done=over, success=won)
    def state(self):
        return {}
    def close(self): ...
"""


@fault(
    "warns", "environment", "openai/gym/issues/1230", "anthonytorlucci/rlevo/issues/761",
    by="same_end", step=1, says="end by the rules, and after 6 steps each; others are shorter",
)  # fmt: skip
def clock_says_ended(patch: Patch, folder: Path) -> Sequence[str]:
    """An environment ends episodes by a clock of its own, and says that they are over by the rules."""
    agent = f"{{name: steps, max_steps: 9, action: '{folder}/acts.py:act'}}"
    return (*_world(folder, CLOCKED, agent), "rollout.max_tokens=128", "data.max_prompt_tokens=128")


@fault(
    "warns", "template", "verl-project/verl/issues/6854",
    by="template_thoughts", step=0, says="what serves the model through the template will not",
)  # fmt: skip
def thoughts_of_earlier_turns(patch: Patch, folder: Path) -> Sequence[str]:
    """The template drops earlier thoughts: a model that had them in its episodes is served without."""
    agent = f"{{name: concatenated, max_steps: 2, action: '{folder}/acts.py:act'}}"
    return (*_world(folder, CLOCKED, agent), with_template(folder), "rollout.max_tokens=96")
