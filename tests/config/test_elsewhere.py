"""Names of TRL and OpenRLHF in a recipe, an override or a keyword of `rondo.train`: the error says what each
is called here, and in which unit (config/elsewhere.tsv).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rondo
from rondo.algorithms import registry
from rondo.cli.main import main
from rondo.config import keys as keys_of_recipes
from rondo.config import load
from rondo.config.keys import elsewhere, schema_keys
from rondo.config.schema import Config
from rondo.core.errors import ConfigError, did_you_mean

ROWS = [
    tuple(line.split("\t"))
    for line in Path(keys_of_recipes.__file__).with_name("elsewhere.tsv").read_text("utf-8").splitlines()
    if not line.startswith("#")
]
BASE = ("model.path=model", "trainer.total_steps=10")
EVALUATED = (
    "data.eval=[{type: jsonl, path: held_out.jsonl}]",
    "trainer.evaluation.every=5",
    "checkpoint.every=5",
)

# What the table says that a setting of theirs is, as a setting of ours: each is read.
SAID = [
    ("peft_config", "actor.lora={rank: 16, alpha: 32}"),
    ("reward_weights", "reward.functions=[{name: gsm8k, weight: 0.5}]"),
    ("optim", "actor.optimizer.moments=8bit"),
    *(("lr_scheduler_type", f"actor.optimizer.schedule.name={x}") for x in ("linear", "cosine", "wsd")),
    ("vllm_gpu_memory_utilization", "rollout.engine={name: vllm, gpu_memory_utilization: 0.3}"),
    ("vllm_tensor_parallel_size", "rollout.engine={name: vllm, tensor_parallel: 2}"),
    ("beta", "algorithm.kl={name: k3-unbiased, where: loss, coef: 0.04}"),
    ("beta", "algorithm.preference_loss.beta=0.1"),
    ("epsilon", "algorithm.policy_loss.clip=0.2"),
    ("epsilon_high", "algorithm.policy_loss={name: cispo, clip_high: 4.0}"),
    ("delta", "algorithm.policy_loss.dual_clip=null"),
    ("loss_type", "algorithm.aggregation=token-mean"),
    ("loss_type", "algorithm.aggregation=seq-mean-token-mean"),
    ("loss_type", "algorithm.aggregation={name: seq-mean-token-sum-norm, divisor: 512}"),
    *(("loss_type", f"algorithm.policy_loss={x}") for x in ("cispo", "sapo")),
    *(("loss_type", f"algorithm.preference_loss={x}") for x in ("dpo", "ipo", "simpo")),
    ("scale_rewards", "algorithm.advantage.normalize_std=false"),
    ("importance_sampling_level", "algorithm.policy_loss=gspo"),
    ("top_entropy_quantile", "algorithm.policy_loss={name: top_entropy, share: 0.2, divide: all}"),
    ("bf16", "actor.compute_dtype=bfloat16"),
    ("activation_offloading", "actor.gradient_checkpointing=offload"),
    ("use_liger_kernel", "actor.backend.kernels=liger"),
    ("use_cpu", "cluster.device=cpu"),
    *(
        ("report_to", f"tracking.trackers=[{x}]")
        for x in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
    ),
    ("load_best_model_at_end", "checkpoint.best={metric: eval/greedy/reward}"),
    ("greater_is_better", "checkpoint.best={metric: eval/greedy/reward, mode: min}"),
    ("resume_from_checkpoint", "checkpoint.resume=auto"),
    *(
        ("advantage_estimator", f"algorithm.advantage={x}")
        for x in ("grpo", "reinforce_pp", "reinforce_pp_baseline", "gae", "rloo", "dr_grpo")
    ),
    ("policy_loss_type", "algorithm.policy_loss=ppo_clip"),
    ("use_kl_loss", "algorithm.kl={name: k1, where: reward, coef: 0.01}"),
    (
        "kl_target",
        "algorithm.kl={name: k1, where: reward, coef: 1, controller: {name: adaptive, target: 6}}",
    ),
    ("async_train", "trainer.max_staleness=1"),
    ("load_in_4bit", "actor.lora={base_dtype: nf4}"),
    ("zero_stage", "actor.backend.reshard=false"),
    ("reward_pretrain", "reward.models=[{path: model}]"),
]  # fmt: skip
DUAL_CLIP = inspect.signature(registry.lookup("policy_loss", "ppo_clip")).parameters["dual_clip"].default
# Defaults that it mentions.
DEFAULTS = {
    "learning_rate": ("1e-6", Config().actor.optimizer.lr, 1e-6),
    "weight_decay": ("0.01", Config().actor.optimizer.weight_decay, 0.01),
    "lr_scheduler_type": ("constant", Config().actor.optimizer.schedule.name, "constant"),
    "seed": ("is 0", Config().trainer.seed, 0),
    "save_steps": ("no checkpoint", Config().checkpoint.every, None),
    "save_total_limit": ("is 2", Config().checkpoint.keep, 2),
    "loss_type": ("the default", Config().algorithm.aggregation.name, "token-mean"),
    "delta": ("is 3", DUAL_CLIP, 3),
}


def said_of(*arguments: str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load([], [*BASE, *arguments], settings=settings)
    return str(caught.value)


def options_of(function_key: str) -> Mapping[str, Any]:
    """The options of all built-in functions that may stand at a key."""
    kind = {"preference_loss": "pair_loss"}.get(function_key.removeprefix("algorithm."), function_key[10:])
    found: dict[str, Any] = {}
    for name in registry.names(kind):  # type: ignore[arg-type]
        found |= inspect.signature(registry.lookup(kind, name)).parameters  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_each_name_has_a_key_that_is_there(row: tuple[str, ...]) -> None:
    library, name, keys, note = row
    known = schema_keys()
    assert library in ("TRL", "TRL GRPO", "TRL SFT", "TRL DPO", "OpenRLHF")
    assert name not in Config.__dataclass_fields__, "a section here: nothing would ever ask for it"
    for key in keys.split() if keys != "-" else ():
        above, _, last = key.rpartition(".")
        assert key in known or (f"{above}.name" in known and last in options_of(above)), key
    for mentioned in re.findall(
        r"\b(?:actor|algorithm|data|rollout|trainer|cluster|checkpoint)\.[\w.]+\w", note
    ):
        assert mentioned in known, mentioned
    assert keys != "-" or note, "a name without a key needs its reason"
    if name not in known:
        expected = f"{library}'s {name} " + (
            "has no key here" if keys == "-" else f"is {' and '.join(map(repr, keys.split()))} here"
        )
        assert f"unknown key '{name}'; " in (message := said_of(f"{name}=1"))
        assert expected + (f": {note}" if note else "") in message


def test_no_name_twice_for_the_same_trainer() -> None:
    assert len({row[:2] for row in ROWS}) == len(ROWS)
    assert len({name for library, name, *_ in ROWS if library.startswith("TRL")}) >= 80


@pytest.mark.parametrize(("name", "ours"), SAID)
def test_what_it_says_in_values_is_read(name: str, ours: str) -> None:
    key, _, value = ours.partition("=")
    words = [word for word in re.findall(r"[a-z][\w/-]*", value) if word != "name"]
    said = elsewhere(name)
    keys = [part.strip("'") for part in re.findall(r"'[\w.]+'", said)]
    assert any(key.startswith(one) or one.startswith(key) for one in keys), said
    assert any(word in said for word in words) or not words, said
    load([], [*BASE, *EVALUATED, ours])


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_that_it_mentions(name: str) -> None:
    said, found, expected = DEFAULTS[name]
    assert said in elsewhere(name)
    assert found == expected


def test_a_recipe_an_override_and_a_keyword_say_the_same(tmp_path: Path) -> None:
    same = (
        "unknown key 'num_generations'; TRL's num_generations is 'rollout.n' here: answers of each prompt, "
    )
    same += "and not counted in data.batch_size"
    file = tmp_path / "mine.yaml"
    file.write_text("num_generations: 8\n")
    with pytest.raises(ConfigError) as caught:
        load([str(file)], [*BASE])
    assert str(caught.value) == f"{file}:1: {same}"
    assert said_of("num_generations=8") == f"argument 'num_generations=8': {same}"
    with pytest.raises(ConfigError) as caught:
        rondo.train(model="model", steps=1, num_generations=8)
    assert str(caught.value) == f"setting num_generations=8: {same}"
    with pytest.raises(ConfigError) as caught:
        rondo.sft(model="model", steps=1, config={"learning_rate": 1e-5})
    assert "TRL's learning_rate is 'actor.optimizer.lr' here" in str(caught.value)


def test_an_option_of_theirs_is_named_too(capsys: pytest.CaptureFixture[str]) -> None:
    for option, said in (
        ("--learning_rate=1e-5", "; TRL's learning_rate is 'actor.optimizer.lr' here: the default is 1e-6"),
        ("--algo.kl.init_kl_coef", "; OpenRLHF's init_kl_coef is 'algorithm.kl.coef' here"),
        ("--rollout.n=8", "key.sub=value\n"),
    ):
        with pytest.raises(SystemExit):
            main(["train", "quickstart", option])
        assert f"unrecognized arguments: {option}; a setting is written key.sub=value" in (
            shown := capsys.readouterr().err
        )
        assert said in shown


def test_two_trainers_with_one_name_are_both_said() -> None:
    for said in (said_of("beta=0.1"), said_of("algorithm.beta=0.1")):
        assert "; TRL GRPO's beta is 'algorithm.kl' here: {name: k3-unbiased" in said
        assert "; TRL DPO's beta is 'algorithm.preference_loss.beta' here" in said


def test_a_section_is_of_no_matter_and_our_own_names_come_first() -> None:
    assert "TRL's max_steps is 'trainer.total_steps' here" in said_of("trainer.max_steps=3")
    assert "TRL's bf16 is 'actor.compute_dtype' here" in said_of("actor.bf16=true")
    assert "OpenRLHF's eps_clip is" in said_of("actor.eps_clip=0.2")
    expected = "unknown key 'critic.temperature'; did you mean 'rollout.temperature' (or"
    assert expected in said_of("critic.temperature=1")


def test_an_object_of_theirs_is_named_too() -> None:
    class LoraConfig:
        r = 8

    said = said_of(peft_config=LoraConfig())
    assert (
        "peft_config is LoraConfig, which no recipe can hold; TRL's peft_config is 'actor.lora' here" in said
    )
    assert "no recipe can hold; TRL" not in said_of(**{"actor.lora": LoraConfig()})


def test_delta_is_the_dual_clip_and_beta_weighs_the_unbiased_k3() -> None:
    torch.manual_seed(0)
    old, ref = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    log_probs = torch.randn(64, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(64, dtype=torch.float64)
    ratio = (log_probs - old).exp()
    delta, low, high = 1.5, 0.2, 0.28
    # As TRL computes them, written out.
    clipped = torch.clamp(ratio, 1 - low, 1 + high)
    theirs = -torch.min(torch.clamp(ratio, max=delta) * advantages, clipped * advantages)
    loss = registry.lookup("policy_loss", "ppo_clip")
    ours, _ = loss(log_probs, old, advantages, torch.ones(64), clip_low=low, clip_high=high, dual_clip=delta)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    kl = (torch.exp(ref - log_probs) - (ref - log_probs) - 1) * ratio
    mine = registry.lookup("kl", "k3-unbiased")(log_probs, ref, old)
    torch.testing.assert_close(mine, kl, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x.sum(), log_probs, retain_graph=True)[0] for x in (mine, kl)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_nobody_is_asked_whether_the_word_itself_was_meant() -> None:
    """What is wrong with a word that exists is where it stands, say, and not its spelling."""
    assert did_you_mean("entropy", ["entropy", "entropies"]) == "; did you mean 'entropies'?"
    assert did_you_mean("entropy", ["entropy", "kl"]) == "."
