"""ReMax, spelled out: python examples/remax.py [key=value ...]. The numbers are in the recipe remax.

PPO without a critic: the baseline of a response is the reward of the greedy response to the same prompt.
"""

import asyncio
import sys
from pathlib import Path

from rondo.trainers.sessions import open_session, per_group

HERE = Path(__file__).parent
RECIPES = ["remax", HERE / "settings.yaml"]
SETTINGS = ["trainer.run_dir=runs/examples/remax", "trainer.total_steps=20"]


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides]) as session:
        actor, reference = await session.actor(policy_loss="reinforce"), await session.reference()
        reward = await session.reward()

        async for prompts in session.prompts():
            # Stage 1: generate responses, and the greedy one
            batch = await actor.generate_sequences(prompts)
            baseline = await actor.generate_sequences(prompts, do_sample=False)

            # Stage 2: prepare experience
            batch = await reward.compute_reward(batch)
            baseline = await reward.compute_reward(baseline)
            batch = batch.with_index({"greedy_reward": per_group(batch, baseline, "reward")})
            batch = await actor.compute_log_prob(batch)
            batch = await reference.compute_log_prob(batch)
            batch = await session.compute_advantages(batch, "remax")

            # Stage 3: train
            metrics = await actor.update_actor(batch)
            await session.log(batch, metrics)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
