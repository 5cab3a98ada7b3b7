"""VinePPO (2410.01679): python examples/vineppo.py [key=value ...].

A prefix is worth the mean reward of K answers from there, a line the worth behind it less that before it.
"""

import asyncio
import sys
from itertools import islice
from pathlib import Path

import numpy as np

from rondo.trainers.sessions import open_session

RECIPES, K = ["quickstart", Path(__file__).parent / "settings.yaml"], 4
SETTINGS = ["trainer.run_dir=runs/examples/vineppo", "rollout.n=2", "data.max_prompt_tokens=96"]


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides]) as session:
        actor = await session.actor()
        lines = [i for i in range(len(session.tokenizer)) if session.tokenizer.decode([i]).endswith("\n")]
        async for prompts in session.prompts():
            batch = await actor.compute_log_prob(await actor.generate_sequences(prompts))
            rows, of = await batch.fetch(["response_ids", "seq"]), {p.seq: p for p in prompts}
            answers = [
                (of[s], r) for s, r in zip(rows.scalars("seq"), rows.rows("response_ids"), strict=True)
            ]
            cuts = [[0, *np.flatnonzero(np.isin(r[:-1], lines)) + 1, len(r)] for _, r in answers]
            pieces = [(p, r[:cut]) for (p, r), own in zip(answers, cuts, strict=True) for cut in own[:-1]]
            states = [session.prompt(np.append(p.token_ids, r), fields=p.fields) for p, r in pieces]
            vines = await actor.generate_sequences(states, n=K)
            worth = iter(vines.index.scalars("reward").reshape(-1, K).mean(1))
            whole = zip(cuts, batch.index.scalars("reward"), strict=True)
            gains = [(np.diff([*islice(worth, len(own) - 1), last]), np.diff(own)) for own, last in whole]
            batch = session.with_tokens(batch, {"advantages": [np.repeat(*gain) for gain in gains]})
            await session.log(batch, await actor.update_actor(await session.compute_correction(batch)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
