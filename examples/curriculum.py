"""Samples where they teach (Knapsack RL, 2509.25849): python examples/curriculum.py [key=value ...].

A prompt gets samples by p (1 - p); p is its success so far, which the checkpoint has.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from rondo.core.batch import BatchRef
from rondo.trainers.sessions import open_session

RECIPES = ["quickstart", Path(__file__).parent / "settings.yaml"]
SETTINGS = ["trainer.run_dir=runs/examples/curriculum"]
PROMPTS, SAMPLES, ROWS = 16, 128, 512


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides]) as session:
        actor = await session.actor()
        session.state["success"] = np.full(ROWS, 0.5)
        async for step in session.steps():
            success, rng = session.state["success"], np.random.default_rng(step)
            rows = rng.choice(ROWS, PROMPTS, replace=False)
            worth = success[rows] * (1 - success[rows]) + 0.01
            number = 2 + rng.multinomial(SAMPLES - 2 * PROMPTS, worth / worth.sum())
            asked = [session.prompt(session.data.train.prompt(row)) for row in rows.tolist()]
            calls = zip(asked, number.tolist(), strict=True)
            groups = await asyncio.gather(*(actor.generate_sequences([prompt], n=n) for prompt, n in calls))
            success[rows] = [group.index.scalars("reward").mean() for group in groups]
            batch = await actor.compute_log_prob(BatchRef.concat(groups))
            batch = await session.compute_advantages(batch, "rloo")
            await session.log(batch, await actor.update_actor(batch))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
