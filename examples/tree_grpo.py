"""Tree-GRPO (2509.21240) in text: python examples/tree_grpo.py [key=value ...].

Two answers of a prompt, and two more of each, which go on from the beginnings of two of its lines. An answer
is compared with those of its prompt, and with those of its tree.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from rondo.trainers.sessions import open_session

RECIPES = ["quickstart", Path(__file__).parent / "settings.yaml"]
SETTINGS = ["trainer.run_dir=runs/examples/tree_grpo", "rollout.n=2", "actor.mini_batch_size=null"]


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides]) as session:
        actor, read = await session.actor(), session.tokenizer.decode
        ends = [i for i in range(len(session.tokenizer)) if read([i]).endswith("\n")]
        async for prompts in session.prompts():
            draw = np.random.default_rng(session.step)
            batch = await actor.generate_sequences(prompts)
            rows = (await batch.fetch(["response_ids"])).rows("response_ids")
            lines = [np.flatnonzero([True, *np.isin(ids[:-1], ends)]) for ids in rows]
            branches = await actor.branch(batch, [draw.choice(own, 2) for own in lines])
            tree = await actor.compute_log_prob(session.trees(batch, branches))
            tree = await session.compute_advantages(tree, "tree_grpo")
            await session.log(tree, await actor.update_actor(tree))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
