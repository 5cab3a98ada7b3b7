"""Made the folder `run` beside it at commit 9bbdfff: `python - < make.py`. Read from standard input, the
reward has no file, so it is pickled by value, and names rondo.types.
"""

import rondo
from rondo.core.types import Prompt, Trajectory

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
}


def even_share(prompt: Prompt, trajectory: Trajectory) -> float:
    assert type(prompt) is Prompt
    assert type(trajectory) is Trajectory
    ids = [token for row in trajectory.rows for token in row.response_ids.tolist()]
    return sum(token % 2 == 0 for token in ids) / max(len(ids), 1)


SETTINGS = {
    "model.config": MODEL,
    "model.tokenizer": "rondo.recipes.quickstart.tokenizer",
    "data.batch_size": 4,
    "data.max_prompt_tokens": 64,
    "actor.token_budget": 512,
    "actor.mini_batch_size": 2,
    "actor.optimizer": {"lr": 1e-3},
    "rollout.n": 4,
    "rollout.max_tokens": 8,
    "rollout.max_concurrent": 16,
    "cluster.threads": 1,
    "tracking.console": "off",
    "tracking.plot": False,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
}


def train(folder: str, steps: int) -> rondo.Run:
    rows = [{"prompt": f"Tom has {i} apples", "answer": i} for i in range(8)]
    config = {"trainer.run_dir": folder, **SETTINGS}
    return rondo.train(data=rows, reward=even_share, steps=steps, config=config)


if __name__ == "__main__":
    train("run", 2)
