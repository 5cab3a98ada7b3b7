"""VinePPO (2410.01679): python examples/vineppo.py [key=value ...].

A prefix is worth the mean reward of K answers that go on from it, a line what it adds to that.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from rondo.trainers.sessions import open_session

RECIPES, K = ["quickstart", Path(__file__).parent / "settings.yaml"], 4
SETTINGS = ["trainer.run_dir=runs/examples/vineppo", "rollout.n=2", "data.max_prompt_tokens=96"]


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides]) as session:
        actor, read = await session.actor(), session.tokenizer.decode
        ends = [i for i in range(len(session.tokenizer)) if read([i]).endswith("\n")]
        async for prompts in session.prompts():
            batch = await actor.compute_log_prob(await actor.generate_sequences(prompts))
            rows = (await batch.fetch(["response_ids"])).rows("response_ids")
            lines = [np.flatnonzero([True, *np.isin(ids[:-1], ends)]) for ids in rows]
            batch = await actor.branch_values(batch, lines, n=K)
            worth = (await batch.fetch(["branch_values"])).rows("branch_values")
            answers = zip(worth, lines, batch.index.scalars("reward"), strict=True)
            gains = [np.repeat(np.diff([*v[at], r]), np.diff([*at, len(v)])) for v, at, r in answers]
            batch = session.with_tokens(batch, {"advantages": gains})
            await session.log(batch, await actor.update_actor(await session.compute_correction(batch)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
