"""An algorithm of your own, as GRPO once was one: python examples/grpo_from_scratch.py [key=value ...].

Two pure functions. Their parameters before `*` are the columns that they read; those after it are options.
"""

import asyncio
import sys
from pathlib import Path

from torch import Tensor

from rondo.trainers.sessions import open_session

HERE = Path(__file__).parent
RECIPES = ["quickstart", HERE / "settings.yaml"]
SETTINGS = ["trainer.run_dir=runs/examples/grpo_from_scratch", "trainer.total_steps=15"]
SETTINGS += ["actor.mini_batch_size=8"]


def group_advantage(reward: Tensor, group_id: Tensor, *, eps: float = 1e-6) -> Tensor:
    """How much better a response is than the others to the same prompt: one number per row, [B]."""
    advantage = reward.clone()
    for group in group_id.unique():
        rows = group_id == group
        advantage[rows] = (reward[rows] - reward[rows].mean()) / (reward[rows].std() + eps)
    return advantage


def clipped_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip: float = 0.2):
    """One loss per token, [N], and metrics as (sum, count); masks and weights are not its business."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = -(ratio * advantages).minimum(clipped * advantages)
    return loss, {"actor/clip_fraction": ((ratio != clipped).float().sum(), ratio.new_tensor(len(ratio)))}


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides]) as session:
        actor, reward = await session.actor(policy_loss=clipped_loss, clip=0.25), await session.reward()

        async for prompts in session.prompts():
            batch = await actor.generate_sequences(prompts)
            batch = await reward.compute_reward(batch)
            batch = await actor.compute_log_prob(batch)
            batch = await session.compute_advantages(batch, group_advantage)
            metrics = await actor.update_actor(batch)
            await session.log(batch, metrics)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
