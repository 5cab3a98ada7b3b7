"""The run's keys in verl's spelling: its folder, its steps, its batches, by the values that they become."""

from __future__ import annotations

from collections import Counter

import pytest

from rondo.config import Config
from rondo.config.schema.algorithm import ImportanceConfig, RolloutCorrectionConfig
from rondo.core.errors import ConfigError
from rondo_verl.defaults import only_in
from rondo_verl.table import TABLE, Ignored, Late, To
from tests.rondo_verl.translated import BASE, GAE, A, R, load, message

P, X = "trainer.project_name", "trainer.experiment_name"
AHEAD = ("async_training.staleness_threshold=0.5", "data.train_batch_size=0", "data.gen_batch_size=1")


def config(*overrides: str) -> Config:
    return load([], [*BASE, *overrides]).config


@pytest.mark.parametrize(
    ("overrides", "run_dir", "project", "name"),
    [
        ([], None, "rondo", None),
        ([f"{P}=gsm8k", f"{X}=qwen"], "checkpoints/gsm8k/qwen", "gsm8k", "qwen"),
        ([f"{P}=gsm8k"], "checkpoints/gsm8k/gsm8k", "gsm8k", None),
        ([f"{X}=qwen"], "checkpoints/verl_examples/qwen", "rondo", "qwen"),
        ([f"{P}=p", f"{X}=qwen", "trainer.default_local_dir=/data/run"], "/data/run", "p", "qwen"),
        ([f"{P}=p", "trainer.run_dir=mine"], "mine", "p", None),
        (["trainer.run_dir=mine", f"{X}=qwen"], "mine", "rondo", "qwen"),
    ],
)
def test_the_runs_folder_and_name(
    overrides: list[str], run_dir: str | None, project: str, name: str | None
) -> None:
    c = config(*overrides)
    assert (c.trainer.run_dir, c.tracking.project, c.tracking.run_name) == (run_dir, project, name)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["lr_warmup_steps_ratio=0.1"], 4),  # int(0.1 * 10) trainer steps of 4 mini-batches
        (["lr_warmup_steps_ratio=0.285"], 2 * 4),  # 2.85
        (["lr_warmup_steps_ratio=0.1", "lr_warmup_steps=5"], 5 * 4),
        (["lr_warmup_steps_ratio=0.1", "lr_warmup_steps=-1"], 4),
        (["lr_warmup_steps_ratio=0.1", "lr_warmup_steps=null"], 4),
        (["lr_warmup_steps=null"], 0),
        (["lr_warmup_steps_ratio=0.1", "lr_warmup_steps=0"], 0),
    ],
)
def test_a_share_of_the_steps(overrides: list[str], steps: int) -> None:
    written = [f"{A}.optim.{override}" for override in overrides]
    assert config(*written).actor.optimizer.schedule.warmup_steps == steps
    theirs = ["model.path=m", "algorithm.adv_estimator=grpo", "trainer.total_training_steps=10", *written]
    assert load([], theirs).config.actor.optimizer.schedule.warmup_steps == steps


def test_a_share_of_steps_that_nobody_counted() -> None:
    """Of trainer steps, rounded down: it is one of optimizer steps where a trainer step is one of these."""
    epochs = ["model.path=m", "algorithm.adv_estimator=grpo", "trainer.total_epochs=2"]
    share = f"{A}.optim.lr_warmup_steps_ratio=0.1"
    schedule = load([], [*epochs, share, "data.train_batch_size=256"]).config.actor.optimizer.schedule
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (0, 0.1)
    with pytest.raises(ConfigError) as caught:
        load([], [*epochs, share])
    assert "verl rounds the share down to trainer steps" in str(caught.value)


def test_batches_of_the_asynchronous_trainer() -> None:
    """4 batches of 4 times 32 prompts are trained on between two syncs: a step of 512, in 16 mini-batches."""
    said = [*AHEAD, "async_training.require_batches=4", "async_training.trigger_parameter_sync_step=4"]
    more = [f"{A}.ppo_mini_batch_size=32", f"{A}.optim.lr_warmup_steps=10", "rollout.test_freq=20"]
    length = ["rollout.total_rollout_steps=51200", "rollout.total_epochs=10", "data.val_files=v.parquet"]
    c = load([], [*BASE[:1], BASE[2], *said, *more, *length]).config
    assert (c.data.batch_size, c.actor.mini_batch_size) == (512, 32)
    assert (c.trainer.total_steps, c.trainer.epochs) == (100, 10.0)
    assert (c.trainer.max_staleness, c.trainer.evaluation.every) == (1, 20)
    # verl's scheduler steps once for 4 mini-batches, 4 times between two syncs.
    assert c.actor.optimizer.schedule.warmup_steps == 10 * 4
    own = config(*said, "data.batch_size=1024")
    assert own.data.batch_size == 1024
    assert "verl wants 0 here" in message(*said, "data.train_batch_size=64")
    assert "give a whole number, 1 or more" in message(*AHEAD, "async_training.require_batches=0")


def test_old_log_probs_of_the_asynchronous_trainer() -> None:
    """Weights and rejection stay, whichever key is written last; with the sampler's there are none."""
    weights = "algorithm.rollout_correction.rollout_is=token"
    prox = "async_training.compute_prox_log_prob=True"
    for written in ([weights, prox], [prox, weights]):
        correction = config(*AHEAD, *written).algorithm.rollout_correction
        assert correction == RolloutCorrectionConfig("decoupled", ImportanceConfig("token"))
    assert "every weight is 1, and nothing is rejected" in message(*AHEAD, weights)
    mine = config(*AHEAD, "algorithm.rollout_correction=null")
    assert mine.algorithm.rollout_correction is None


def test_columns_of_images() -> None:
    c = config("data.image_key=pictures", "data.train_files=a.parquet", "data.val_files=b.parquet").data
    assert [source.image_key for source in (*c.train, *c.eval)] == ["pictures", "pictures"]
    assert [source.image_key for source in config("data.train_files=a.parquet").data.train] == [None]


def test_options_of_engines() -> None:
    both = [f"{R}.enable_prefix_caching=False", f"{R}.cudagraph_capture_sizes=[1, 2, 4]"]
    options = config(f"{R}.name=vllm", *both).rollout.engine.options
    assert options["enable_prefix_caching"] is False
    assert options["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 4]}
    mode = "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY"
    assert config(f"{R}.name=vllm", f"+{mode}").rollout.engine.options["compilation_config"] == {
        "cudagraph_mode": "FULL_DECODE_ONLY"
    }


# What a key that is noted would be here, if rondo had it: none of these may be among them.
COUNTERPARTS = (
    *("lr", "seed_of_data", "temperature", "top_p", "top_k", "epochs", "batch_size", "max_tokens", "dtype"),
    *("offload", "lora", "betas", "weight_decay", "clip", "warmup", "save_freq", "test_freq", "project_name"),
    *("gamma", "lam", "kl_coef", "entropy_coeff", "n", "attn_implementation", "timeout", "env_vars"),
)


def test_no_key_is_noted_that_has_a_counterpart() -> None:
    """By the last part of its name: what changes numbers here is translated, or refused."""
    table = {key: rule for key, rule in TABLE.items() if not key.startswith(("reward", "custom_reward"))}
    noted = {key: rule for key, rule in table.items() if isinstance(rule, Ignored)}
    alike = {key for key in noted if key.rpartition(".")[2] in COUNTERPARTS}
    assert not alike
    # One that another section translates is noted for a reason that names what it follows, or what it is of.
    translated = {key.rpartition(".")[2] for key, rule in table.items() if isinstance(rule, To | Late)}
    shared = {key: rule.reason for key, rule in noted.items() if key.rpartition(".")[2] in translated}
    follows = "it follows trainer.total_training_steps, as in verl"
    assert shared == {
        "actor_rollout_ref.actor.optim.total_training_steps": follows,
        "critic.optim.total_training_steps": follows,
        "critic.model.tokenizer_path": "there is one tokenizer: model.tokenizer",
        "actor_rollout_ref.ref.fsdp_config.reshard_after_forward": "as the actor's: actor.backend.reshard",
        "critic.model.fsdp_config.reshard_after_forward": "as the actor's: actor.backend.reshard",
        "critic.fsdp.reshard_after_forward": "as the actor's: actor.backend.reshard",
        "actor_rollout_ref.ref.fsdp_config.optimizer_offload": "a reference has no optimizer",
        "actor_rollout_ref.ref.megatron.optimizer_offload": (
            "a reference has neither gradients nor an optimizer"
        ),
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "old log-probs use actor.token_budget",
        "critic.enable": "a critic runs when a chosen function reads `values`",
    }


def test_keys_of_one_version_alone() -> None:
    """Those of the recipe dapo's filter are in both: 0.6.1 has them in a file of its own."""
    found = {key: only_in(key) for key in TABLE}
    assert Counter(found.values()) == {None: 448, "main": 71, "0.6.1": 32}
    assert found["trainer.use_v1"] == found["reward.custom_reward_function.path"] == "main"
    assert found["trainer.use_legacy_worker_impl"] == found["reward_model.model.input_tokenizer"] == "0.6.1"
    assert found["algorithm.filter_groups.enable"] is found["data.gen_batch_size"] is None


def test_the_critics_warmup_may_be_a_share() -> None:
    c = config(*GAE, "critic.optim.lr_warmup_steps_ratio=0.5", "critic.ppo_mini_batch_size=512")
    assert c.critic.optimizer.schedule.warmup_steps == 5 * 2
