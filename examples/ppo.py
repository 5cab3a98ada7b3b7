"""PPO, spelled out: python examples/ppo.py [key=value ...]. The numbers are in the recipe ppo."""

import asyncio
import sys
from pathlib import Path

from rondo.controller import together
from rondo.trainers.sessions import open_session

HERE = Path(__file__).parent
RECIPES = ["ppo", HERE / "settings.yaml"]
SETTINGS = ["trainer.run_dir=runs/examples/ppo", "trainer.total_steps=15"]


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides]) as session:
        actor, critic = await session.actor(), await session.critic()
        reference, reward = await session.reference(), await session.reward()

        async for prompts in session.prompts():
            # Stage 1: generate responses
            batch = await actor.generate_sequences(prompts)

            # Stage 2: prepare experience
            batch = await reward.compute_reward(batch)
            batch = await actor.compute_log_prob(batch)
            batch = await together(batch, reference.compute_log_prob, critic.compute_values)
            batch = await session.compute_advantages(batch, "gae", gamma=1.0, lam=0.95)

            # Stage 3: train
            metrics = [await critic.update_critic(batch)]
            if session.step >= session.config.critic.warmup_steps:
                metrics.append(await actor.update_actor(batch))
            await session.log(batch, *metrics)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
