"""Safe-RLHF (PPO-Lagrangian), spelled out: python examples/safe_rlhf.py [key=value ...].

PPO plus a cost with a critic of its own, a multiplier that rises while the cost is above its limit, and a
pretraining loss. The numbers are in the recipe safe_rlhf; a response of more than 18 tokens costs 1 there.
"""

import asyncio
import sys
from pathlib import Path

from rondo.controller import together
from rondo.trainers.sessions import open_session

HERE = Path(__file__).parent
RECIPES = ["safe_rlhf", HERE / "settings.yaml"]
SETTINGS = ["trainer.run_dir=runs/examples/safe_rlhf", "trainer.total_steps=16"]
SETTINGS += ["critic.warmup_steps=3", "algorithm.constraint.lr=0.5", "algorithm.pretrain_coef=0.05"]
SETTINGS += ["data.pretrain=[{type: function, task: rondo.recipes.quickstart.demonstrations}]"]


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides]) as session:
        actor, reference = await session.actor(), await session.reference()
        critic, cost_critic = await session.critic(), await session.critic("cost_critic")
        reward, cost = await session.reward(), await session.cost()
        pretraining = session.pretraining()

        async for prompts in session.prompts():
            # Stage 1: generate responses
            batch = await actor.generate_sequences(prompts)

            # Stage 2: prepare experience
            batch = await reward.compute_reward(batch)
            batch = await cost.compute_cost(batch)
            batch = await actor.compute_log_prob(batch)
            forward = (reference.compute_log_prob, critic.compute_values, cost_critic.compute_values)
            batch = await together(batch, *forward)
            batch = await session.compute_advantages(batch, "safe_rlhf", lam=0.95, whiten=True)

            # Stage 3: train
            metrics = [await critic.update_critic(batch), await cost_critic.update_critic(batch)]
            if session.step >= session.config.critic.warmup_steps:
                metrics.append(await actor.update_actor(batch, pretrain=pretraining))
            await session.log(batch, *metrics)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
