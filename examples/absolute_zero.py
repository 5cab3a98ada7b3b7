"""Self-play (Absolute Zero, 2505.03335): one policy proposes sums and solves them, both in one batch.
python examples/absolute_zero.py [key=value ...]. A proposal earns 1 - success where that is neither 0 nor 1.
"""

import asyncio
import random
import sys
from pathlib import Path

import numpy as np
import torch

from rondo.core.batch import BatchRef
from rondo.trainers.sessions import open_session

HERE = Path(__file__).parent
RECIPES = ["quickstart", HERE / "settings.yaml"]
SETTINGS = ["trainer.run_dir=runs/examples/zero/run", f"trainer.warm_start={HERE / 'absolute_zero_sft.yaml'}"]
SUMS = [f"{a}{op}{b}" for a in range(2, 10) for b in range(2, 10) for op in "+-*"]


def demonstrations() -> list[dict[str, str]]:
    rng = random.Random(0)  # half of them propose, half answer, and often wrongly
    pairs = [("How many?", rng.choice(SUMS)) for _ in range(2000)]
    pairs += [(s, f"#### {rng.choice([eval(s), 7])}") for s in rng.choices(SUMS, k=2000)]
    return [{"prompt": prompt, "response": response} for prompt, response in pairs]


def score(prompt, trajectory) -> float:
    return float(trajectory.text.strip() == f"#### {prompt.fields.get('answer')}")


def per_role(reward, source, *, eps=1e-6):
    out = torch.zeros_like(reward)
    for own in (source == role for role in source.unique()):
        out[own] = (reward[own] - reward[own].mean()) / (reward[own].std() + eps)
    return out


async def main(overrides: list[str]) -> None:
    async with open_session(RECIPES, [*SETTINGS, *overrides], reward=score) as session:
        actor = await session.actor()
        async for _ in session.steps():
            proposals = await actor.generate_sequences([session.prompt("How many?", source="propose")], n=16)
            texts = [text.strip() for text in (await proposals.fetch(["text"])).scalars("text")]
            fields = {text: {"answer": str(eval(text))} for text in texts if text in SUMS}
            tasks = [session.prompt(text, source="solve", fields=fields[text]) for text in fields]
            if not tasks:
                continue
            solved = await actor.generate_sequences(tasks, n=4)
            right = dict(zip(fields, solved.index.scalars("reward").reshape(-1, 4).mean(1), strict=True))
            earned = np.float32([1 - right[text] if 0 < right.get(text, 0) < 1 else 0 for text in texts])
            batch = BatchRef.concat([proposals.with_index({"reward": earned}, replace=True), solved])
            batch = await session.compute_advantages(await actor.compute_log_prob(batch), per_role)
            await session.log(batch, await actor.update_actor(batch, mini_batches=1))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
