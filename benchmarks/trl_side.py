"""TRL's half of `vs_trl.py`; runs in TRL's own environment and prints one JSON line. Not meant to be called
by hand.

Measures process CPU seconds: generation, log-probs without gradient, and the update (everything else in a
training step).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SPENT: dict[str, float] = defaultdict(float)
NESTED: list[float] = []


def timed(
    name: str, function: Callable[..., Any], only: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    """Exclusive CPU seconds of `function` under `name`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not only():
            return function(*args, **kwargs)
        NESTED.append(0.0)
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            whole = time.process_time() - started
            SPENT[name] += whole - NESTED.pop()
            if NESTED:
                NESTED[-1] += whole

    return wrapper


def main() -> None:
    """Train `--steps` GRPO steps from `--model` on the prompts of `--prompts`."""
    parser = argparse.ArgumentParser()
    for name in ("model", "prompts", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--settings", required=True, help="JSON: steps, batch_size, n, max_tokens, lr, …")
    args = parser.parse_args()
    settings = json.loads(args.settings)
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    rows = [json.loads(line) for line in open(args.prompts)]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.config.use_cache = True
    rewards: list[float] = []
    tokens = [0]

    def reward(
        completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        if settings["reward"] == "even_share":
            scores = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
        else:
            texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
            scores = [
                float(t.rpartition("####")[2].strip() == a) if "####" in t else 0.0
                for t, a in zip(texts, answer, strict=True)
            ]
        rewards.append(sum(scores) / len(scores))
        tokens[0] += sum(len(ids) for ids in completion_ids)
        return scores

    trajectories = settings["batch_size"] * settings["n"]
    config = GRPOConfig(
        output_dir=args.output,
        per_device_train_batch_size=trajectories,
        gradient_accumulation_steps=1,
        num_generations=settings["n"],
        max_completion_length=settings["max_tokens"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["warmup_steps"],
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.01,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        temperature=1.0,
        max_steps=settings["steps"],
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
        seed=settings["seed"],
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": row["messages"], "answer": row["answer"]} for row in rows]
        ),
        processing_class=tokenizer,
    )
    trainer._generate_single_turn = timed("decode", trainer._generate_single_turn)
    score = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = timed(
        "log_probs", score, only=lambda: not torch.is_grad_enabled()
    )
    trainer._prepare_inputs = timed("prepare", trainer._prepare_inputs)
    trainer.training_step = timed("update", trainer.training_step)
    started = time.process_time()
    trainer.train()
    whole = time.process_time() - started
    steps = settings["steps"]
    phases = {name: seconds / steps for name, seconds in SPENT.items()}
    print(
        json.dumps(
            {"cpu_s_per_step": whole / steps, "phases": phases, "tokens": tokens[0], "rewards": rewards}
        )
    )


if __name__ == "__main__":
    main()
