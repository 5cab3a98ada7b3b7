"""What is wrong with a configuration: which keys the error is about, and what it says.

The texts are in messages.txt. After changing one on purpose, `python -m tests.config.test_messages` writes it
anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.config import load
from rondo.core.errors import ConfigError

MESSAGES = Path(__file__).with_name("messages.txt")
BASE = {"model.path": "model", "trainer.total_steps": "10"}  # what every configuration needs

# Arguments (besides BASE, unless they set it), and the keys that the errors are about.
TYPES = [
    ("rollout.n=four", "rollout.n"),
    ("rollout.n=2.5", "rollout.n"),
    ("rollout.n=true", "rollout.n"),
    ("rollout.n=null", "rollout.n"),
    ("rollout.n=[1]", "rollout.n"),
    ("actor.optimizer.lr='1e-4'", "actor.optimizer.lr"),
    ("actor.optimizer.lr=true", "actor.optimizer.lr"),
    ("actor.optimizer.betas=[0.9]", "actor.optimizer.betas.1"),
    ("actor.optimizer.betas=[0.9, 1]", "actor.optimizer.betas.1"),
    ("actor.optimizer.betas=[0.9, 0.9, 0.9]", "actor.optimizer.betas"),
    ("actor.gradient_checkpointing=1", "actor.gradient_checkpointing"),
    ("actor.gradient_checkpointing=yes", "actor.gradient_checkpointing"),
    ("data.shuffle=yes", "data.shuffle"),
    ("data.shuffle=1", "data.shuffle"),
    ("tracking.project=7", "tracking.project"),
    ("rollout.stop=x", "rollout.stop"),
    ("rollout.stop=[1]", "rollout.stop.0"),
    ("rollout=3", "rollout"),
    ("model.config=3", "model.config"),
    ("model.hub=hf", "model.hub"),
    ("model.override=3", "model.override"),
    ("model.tool_format=xml", "model.tool_format"),
    ("model.chat_template_options=[enable_thinking]", "model.chat_template_options"),
    ("algorithm.advantage=3", "algorithm.advantage"),
    ("rollout.engine=vlm", "rollout.engine"),
    ("rollout.engine=3", "rollout.engine"),
    ("rollout.engine={name: vllm, tensor_parallel: two}", "rollout.engine.tensor_parallel"),
    ("cluster.backend=rai", "cluster.backend"),
    ("actor.backend=jax", "actor.backend"),
    ("actor.parallel.pipeline=2", "actor.parallel.pipeline"),
    ("actor.backend={reshart: false}", "actor.backend.reshart"),
    ("actor.backend={name: torch, kernels: triton}", "actor.backend.kernels"),
    ("rollout.dtype=fp8", "rollout.dtype"),
    ("algorithm.kl={name: k3, coef: 1}", "algorithm.kl.where"),
    ("data.train=[{path: x}]", "data.train.0"),
    ("tracking.trackers=[{mode: x}]", "tracking.trackers.0.name"),
    ("trainer.run_dir=s3://bucket/run", "trainer.run_dir"),
    ("trainer.run_dir=file:///tmp/run", "trainer.run_dir"),
    ("trainer.run_dir=$HOME/run", "trainer.run_dir"),
    ("model.path=~nobody-of-this-name/model", "model.path"),
    ("data.train=[{type: jsonl, path: [a.jsonl, '${HOME}/b.jsonl']}]", "data.train.0.path"),
    ("trainer.replay=s3://bucket/run", "trainer.replay"),
    ("rollout.recorded=gs://bucket/run", "rollout.recorded"),
    ("model.chat_template=https://host/x.jinja", "model.chat_template"),
]
BOUNDS = [
    ("data.batch_size=0", "data.batch_size"),
    ("data.max_prompt_tokens=0", "data.max_prompt_tokens"),
    ("actor.optimizer.lr=0", "actor.optimizer.lr"),
    ("critic.optimizer.lr=-1e-3", "critic.optimizer.lr"),
    ("actor.optimizer.eps=0", "actor.optimizer.eps"),
    ("actor.optimizer.grad_clip=0", "actor.optimizer.grad_clip"),
    ("actor.optimizer.weight_decay=-1", "actor.optimizer.weight_decay"),
    ("actor.optimizer.schedule.warmup_steps=-1", "actor.optimizer.schedule.warmup_steps"),
    ("actor.epochs=0", "actor.epochs"),
    ("actor.token_budget=0", "actor.token_budget"),
    ("teacher.logits_bytes=0", "teacher.logits_bytes"),
    ("reward.models=[{path: x, token_budget: 0}]", "reward.models.0.token_budget"),
    ("reward.functions=[{name: gsm8k, sources: []}]", "reward.functions.0.sources"),
    ("reward.max_dropped_share=2", "reward.max_dropped_share"),
    ("rollout.n=0", "rollout.n"),
    ("rollout.top_p=0", "rollout.top_p"),
    ("rollout.top_p=1.5", "rollout.top_p"),
    ("rollout.min_p=1", "rollout.min_p"),
    ("rollout.top_k=-1", "rollout.top_k"),
    ("rollout.temperature=0", "rollout.temperature"),
    ("rollout.replicas=0", "rollout.replicas"),
    ("rollout.bucket_bytes=4095", "rollout.bucket_bytes"),
    ("trainer.total_steps=0", "trainer.total_steps"),
    ("trainer.max_restarts=-1", "trainer.max_restarts"),
    ("trainer.profile={memory: true}", "trainer.profile.steps"),
    ("trainer.profile.steps=[]", "trainer.profile.steps"),
    ("trainer.max_staleness=-1", "trainer.max_staleness"),
    ("trainer.evaluation.every=0", "trainer.evaluation.every"),
    ("checkpoint.every=0", "checkpoint.every"),
    ("checkpoint.keep=0", "checkpoint.keep"),
    ("tracking.keep_rollouts=0", "tracking.keep_rollouts"),
    ("cluster.pools={a: 0}", "cluster.pools.a"),
    ("algorithm.kl={name: k3, where: loss, coef: 0}", "algorithm.kl.coef"),
    ("data.train=[{type: jsonl, path: x, weight: 0}]", "data.train.0.weight"),
    ("algorithm.rollout_correction.importance={upper: 0}", "algorithm.rollout_correction.importance.upper"),
    ("data.train=[{type: jsonl, path: x, size: 0}]", "data.train.0.size"),
    ("rollout.n=65537", "rollout.n"),
    ("actor.optimizer.lr=.inf", "actor.optimizer.lr"),
    ("actor.optimizer.lr=.nan", "actor.optimizer.lr"),
    ("rollout.stop=&s [*s]", "rollout.stop.0"),
]
UNKNOWN = [
    ("lr=1", "lr"),
    ("actor.lr=1", "actor.lr"),
    ("critic.lr=1", "critic.lr"),
    ("actor.token_bugdet=1", "actor.token_bugdet"),
    ("rolout=1", "rolout"),
    ("trainer.n=1", "trainer.n"),
    ("data.total_step=1", "data.total_step"),
    ("reward.zzz=1", "reward.zzz"),
    ("reference.gradient_checkpointing=true", "reference.gradient_checkpointing"),
    ("teacher.offload_optimizer=true", "teacher.offload_optimizer"),
]
# Keys of a choice that was not made.
CHOICES = [
    ("actor.optimizer.schedule.min_ratio=0.1", "actor.optimizer.schedule.min_ratio"),
    ("actor.optimizer.schedule={name: linear, decay_steps: 5}", "actor.optimizer.schedule.decay_steps"),
    ("data.train=[{type: jsonl}]", "data.train.0.path"),
    ("data.eval=[{type: jsonl, path: x, task: y}]", "data.eval.0.task"),
    ("data.train=[{type: parquet, path: x, seed: 3}]", "data.train.0.seed"),
    ("cluster.backend=ray cluster.inline=true", "cluster.inline"),
    ("cluster.backend.address=auto", "cluster.backend.address"),
    ("actor.optimizer.schedule=wavy", "actor.optimizer.schedule"),
    ("rollout.engine={swap_space: 4}", "rollout.engine.swap_space"),
    ("rollout.engine.tensor_parallel=2", "rollout.engine.tensor_parallel"),
    ("rollout.engine=transformers rollout.engine.decode=lean", "rollout.engine.decode"),
    ("rollout.engine={name: transformers, cache_byte: 4}", "rollout.engine.cache_byte"),
    (
        "trainer.max_staleness=1 trainer.on_update={name: resume, max_aborts: 3}",
        "trainer.on_update.max_aborts",
    ),
    (
        "algorithm.kl={name: k3, where: loss, coef: 1, controller: {target: 6}}",
        "algorithm.kl.controller.target",
    ),
    (
        "algorithm.rollout_correction={mode: bypass, importance: {level: token}}",
        "algorithm.rollout_correction.importance",
    ),
    (
        "algorithm.rollout_correction.reject=[{statistic: k2, upper: 1, lower: 0.5}]",
        "algorithm.rollout_correction.reject.0.lower",
    ),
    (
        "algorithm.rollout_correction.reject=[{statistic: k1, upper: 2, level: max}]",
        "algorithm.rollout_correction.reject.0.level",
    ),
    ("algorithm.rollout_correction.reject=[{upper: 2}]", "algorithm.rollout_correction.reject.0"),
]
ARGUMENTS = [
    ("n", None),
    ("~rollout.n", "rollout.n"),
    ("=3", None),
    ("a..b=3", None),
    (".a=1", None),
    ("reward.functions=[gsm8k] reward.functions.1.weight=1", "reward.functions.1"),
    ("reward.functions=[gsm8k] reward.functions.weight=1", "reward.functions"),
]
COMBINATIONS = [
    ("model.path=null", "model"),
    ("trainer.warm_start=sft.yaml", "trainer.warm_start"),
    ("model.path=null model.config={hidden_size: 4} model.tokenizer=t", "model.config"),
    ("model.path=null model.config={model_type: qwen3}", "model.config"),
    (
        "model.path=null model.config={model_type: qwen3} model.tokenizer=t model.override={use_cache: true}",
        "model.override",
    ),
    ("critic.override={use_cache: true}", "critic.override"),
    ("trainer.total_steps=null", "trainer"),
    ("data.batch_size=12 actor.mini_batch_size=8", "actor.mini_batch_size"),
    ("actor.param_dtype=bfloat16", "actor.param_dtype"),
    ("critic.param_dtype=float16", "critic.param_dtype"),
    ("cluster.env.NCCL_DEBUG=INFO", "cluster.env.NCCL_DEBUG"),
    ("cluster.backend=process cluster.env.OMP_NUM_THREADS=4", "cluster.env.OMP_NUM_THREADS"),
    ("cluster.timeout_seconds=0", "cluster.timeout_seconds"),
    ("data.pretrain_batch_size=4", "data.pretrain_batch_size"),
    ("data.pretrain=[{type: jsonl, path: x}]", "data.pretrain"),
    ("algorithm.pretrain_coef=0.1", "algorithm.pretrain_coef"),
    (
        "data.pretrain=[{type: jsonl, path: x}] algorithm.pretrain_coef=0.1 rollout.temperature=0.8",
        "algorithm.pretrain_coef",
    ),
    ("rollout.engine.process=host rollout.replicas=2", "rollout.replicas"),
    ("rollout.sleep=true trainer.max_staleness=1", "rollout.sleep"),
    ("reward.models=[{path: x, name: critic}]", "reward.models.0.name"),
    (
        "algorithm.rollout_correction.importance={lower: 3}",
        "algorithm.rollout_correction.importance.lower",
    ),
    (
        "algorithm.rollout_correction.reject=[{statistic: k1, upper: 0.5}]",
        "algorithm.rollout_correction.reject.0.upper",
    ),
    ("trainer.on_update=resume", "trainer.on_update.name"),
    ("trainer.order=completion", "trainer.order"),
    ("tracking.keep_rollouts=3 tracking.save_rollouts=false", "tracking.keep_rollouts"),
    ("tracking.keep_token_columns=3", "tracking.keep_token_columns"),
    (
        "trainer.evaluation={every: 1, greedy: false} data.eval=[{type: jsonl, path: x}]",
        "trainer.evaluation.every",
    ),
    ("trainer.evaluation.every=1", "trainer.evaluation.every"),
    ("trainer.stages=[{step: 2, rollout: {n: 8}}]", "trainer.stages.0.rollout.n"),
    ("trainer.stages=[{step: 2, rollout: {max_tokens: 99999}}]", "trainer.stages.0.rollout.max_tokens"),
    ("trainer.stages=[{step: 2}, {step: 2}]", "trainer.stages.1.step"),
    ("trainer.stages=[{step: 2, data: {}}]", "trainer.stages.0.data"),
    ("trainer.stages=[{step: 2, rollout: {temperature: hot}}]", "trainer.stages.0.rollout.temperature"),
    ("trainer.stages=[{step: 2}] rollout.recorded=run", "trainer.stages"),
    ("cluster.devices=2", "cluster.devices"),
    ("cluster.pools={a: 1, b: 1}", "cluster.pools"),
    ("cluster.placement={rollout: gpu}", "cluster.placement.rollout"),
    ("cluster.pools={a: 1} cluster.placement={sampler: a}", "cluster.placement.sampler"),
    ("tracking.trackers=[wandb, wandb]", "tracking.trackers.1"),
]
# All is said at once; but not what would follow from another problem.
SEVERAL = [
    (
        "rollout.n=four actor.lr=1 actor.mini_batch_size=3 cluster.devices=2 =3",
        "None actor.lr rollout.n actor.mini_batch_size cluster.devices",
    ),
    ("trainer.total_steps=many", "trainer.total_steps"),
    ("data.batch_size=many actor.mini_batch_size=3", "data.batch_size"),
    (
        "data.train=[{type: jsonl, path: 3}, {path: 4, weight: -1}]",
        "data.train.0.path data.train.1",
    ),
    ("model.path=7 trainer.warm_start=sft.yaml", "model.path"),
]
CASES = [*TYPES, *BOUNDS, *UNKNOWN, *CHOICES, *ARGUMENTS, *COMBINATIONS, *SEVERAL]


def arguments(case: str) -> list[str]:
    """The case's arguments, which are apart where a space is followed by `key=`, and those of BASE."""
    given: list[str] = []
    for word in case.split(" "):
        if not given or "=" in word.split("{")[0].split("[")[0]:
            given.append(word)
        else:
            given[-1] += f" {word}"
    keys = {argument.partition("=")[0] for argument in given}
    return [*(f"{key}={value}" for key, value in BASE.items() if key not in keys), *given]


def error(case: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load([], arguments(case))
    return caught.value


def written() -> str:
    return "\n".join(f"{case}\n{error(case)}\n" for case, _ in CASES)


@pytest.mark.parametrize(("case", "keys"), CASES)
def test_an_error_is_about_its_keys(case: str, keys: str | None) -> None:
    found = error(case)
    assert " ".join(str(problem.key) for problem in found.problems) == str(keys)
    assert str(found) == "\n".join(map(str, found.problems))
    assert found.key == found.problems[0].key


def test_what_it_says() -> None:
    assert MESSAGES.read_text(encoding="utf-8") == written()


if __name__ == "__main__":
    MESSAGES.write_text(written(), encoding="utf-8")
