"""Keys in verl's spelling: translated, without a meaning (reported once), or refused with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.config import Origin
from rondo.config.keys import schema_keys
from rondo.config.schema import FunctionConfig, KlConfig
from rondo.core.errors import ConfigError
from rondo_verl.table import FOREIGN_SECTIONS, TABLE, To
from tests.rondo_verl.translated import BASE, GAE, A, R, load, message, settings

# The keys of verl's GSM8K GRPO example, with its values.
GRPO_EXAMPLE = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=gsm8k/train.parquet",
    "data.val_files=gsm8k/test.parquet",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation='error'",
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    'trainer.logger=["console","wandb"]',
    "trainer.project_name=verl_grpo_example_gsm8k",
    "trainer.experiment_name=qwen3_8b",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]


def test_the_grpo_example() -> None:
    loaded = load([], GRPO_EXAMPLE)
    c = loaded.config
    assert [(s.type, s.path) for s in (*c.data.train, *c.data.eval)] == [
        ("parquet", "gsm8k/train.parquet"),
        ("parquet", "gsm8k/test.parquet"),
    ]
    assert (c.data.batch_size, c.data.max_prompt_tokens, c.rollout.max_tokens) == (1024, 512, 1024)
    assert (c.model.path, c.actor.optimizer.lr, c.actor.mini_batch_size) == ("Qwen/Qwen3-8B", 1e-6, 256)
    assert c.actor.gradient_checkpointing
    assert c.reference.offload_params
    assert c.algorithm.advantage == FunctionConfig("grpo", {"normalize_std": True})
    assert c.algorithm.kl == KlConfig("k3", "loss", 0.001)
    assert (c.rollout.engine.name, c.rollout.n) == ("native", 5)
    assert (c.cluster.devices, c.cluster.backend.name) == (8, "ray")
    assert (c.checkpoint.every, c.trainer.evaluation.every, c.trainer.epochs) == (20, 5, 15.0)
    assert c.tracking.trackers == (FunctionConfig("wandb"),)
    assert c.tracking.project == "verl_grpo_example_gsm8k"
    assert loaded.origins["rollout.n"] == Origin("argument 'actor_rollout_ref.rollout.n=5'")
    assert len(loaded.notes) == 6
    assert c.trainer.run_dir == "checkpoints/verl_grpo_example_gsm8k/qwen3_8b"
    assert loaded.notes[1] == (
        "argument 'actor_rollout_ref.model.use_remove_padding=True': "
        "actor_rollout_ref.model.use_remove_padding has no "
        "meaning in rondo: sequences are always packed; there is no padding to remove"
    )


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("data.train_batch_size=512", {"data.batch_size": 512}),
        (f"{A}.ppo_epochs=3", {"actor.epochs": 3}),
        (f"{A}.ppo_max_token_len_per_gpu=9000", {"actor.token_budget": 9000}),
        (f"{A}.clip_ratio_low=0.1", {"algorithm.policy_loss.clip_low": 0.1}),
        (f"{A}.clip_ratio_high=0.28", {"algorithm.policy_loss.clip_high": 0.28}),
        (f"{A}.grad_clip=0.5", {"actor.optimizer.grad_clip": 0.5}),
        (f"{A}.optim.lr_warmup_steps=-1", {"actor.optimizer.schedule.warmup_steps": 0}),
        (f"{A}.loss_agg_mode=seq-mean-token-mean", {"algorithm.aggregation.name": "seq-mean-token-mean"}),
        (f"{R}.temperature=0.7", {"rollout.temperature": 0.7}),
        (f"{R}.top_k=-1", {"rollout.top_k": 0}),
        ("trainer.save_freq=-1", {"checkpoint.every": None}),
        ("trainer.resume_mode=disable", {"checkpoint.resume": "never"}),
        ("+trainer.val_before_train=False", {"trainer.evaluation.before": False}),
    ],
)
def test_one_key(argument: str, expected: dict[str, object]) -> None:
    found = settings(argument)
    assert {key: found[key] for key in expected} == expected
    assert set(found) - set(expected) <= {f"{key.rpartition('.')[0]}.name" for key in expected}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("critic.optim.lr=1e-4", {"critic.optimizer.lr": 1e-4}),
        ("critic.ppo_epochs=2", {"critic.epochs": 2}),
        ("critic.cliprange_value=0.2", {"algorithm.value_loss.clip": 0.2}),
        ("trainer.critic_warmup=3", {"critic.warmup_steps": 3}),
    ],
)
def test_one_key_of_the_critic(argument: str, expected: dict[str, object]) -> None:
    assert settings(*GAE, argument) == {"critic.path": "critic", **expected}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [f"{R}.name=vllm", f"{R}.gpu_memory_utilization=0.6", f"{R}.tensor_model_parallel_size=2"],
            ("vllm", 2, {"gpu_memory_utilization": 0.6}),
        ),
        (
            [f"{R}.name=sglang", f"{R}.gpu_memory_utilization=0.6", f"{R}.enforce_eager=True"],
            ("sglang", 1, {"mem_fraction_static": 0.6, "disable_cuda_graph": True}),
        ),
        (
            [f"{R}.name=vllm", f"+{R}.engine_kwargs.vllm.swap_space=8", f"{R}.enforce_eager=False"],
            ("vllm", 1, {"swap_space": 8, "enforce_eager": False}),
        ),
    ],
)
def test_engines(overrides: list[str], expected: tuple[str, int, dict[str, object]]) -> None:
    found = load([], [*BASE, *overrides])
    name, tensor_parallel, options = expected
    engine = found.config.rollout.engine
    assert (engine.name, engine.tensor_parallel) == (name, tensor_parallel)
    assert engine.options == ENGINE_DEFAULTS[name] | options
    assert len(found.notes) == 1  # verl's defaults


# gpu_memory_utilization, …, and free_cache_engine
ENGINE_DEFAULTS: dict[str, dict[str, object]] = {
    "vllm": {
        "gpu_memory_utilization": 0.5,
        "max_num_batched_tokens": 8192,
        "enforce_eager": False,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
    },
    "sglang": {"mem_fraction_static": 0.5, "disable_cuda_graph": False, "enable_memory_saver": True},
}


def test_options_that_the_engine_does_not_have_are_noted() -> None:
    native = load([], [*BASE, f"{R}.gpu_memory_utilization=0.6"])
    assert native.config.rollout.engine.name == "native"
    assert "the native engine, the default here, has no such option" in native.notes[1]
    sglang = load([], [*BASE, f"{R}.name=sglang", f"{R}.max_num_batched_tokens=8192"])
    assert "max_num_batched_tokens has no meaning in rondo: the sglang engine has no" in sglang.notes[1]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["staleness_threshold=0"], (0, "auto", "bypass")),
        (["staleness_threshold=0.5"], (1, "resume", "bypass")),
        ([], (1, "resume", "bypass")),
        (["staleness_threshold=1", "partial_rollout=False"], (1, "finish", "bypass")),
        (["staleness_threshold=2", "use_rollout_log_probs=False"], (2, "resume", None)),
        (["staleness_threshold=1", "compute_prox_log_prob=True"], (1, "resume", "decoupled")),
    ],
)
def test_asynchrony(overrides: list[str], expected: tuple[int, str, str | None]) -> None:
    written = ["trigger_parameter_sync_step=1", *overrides]
    config = load([], [*BASE, *(f"async_training.{override}" for override in written)]).config
    correction = config.algorithm.rollout_correction
    mode = None if correction is None else correction.mode
    assert (config.trainer.max_staleness, config.trainer.on_update.name, mode) == expected


def test_devices_of_the_rollout() -> None:
    split = [
        "trainer.n_gpus_per_node=4",
        "rollout.n_gpus_per_node=2",
        "actor_rollout_ref.hybrid_engine=False",
    ]
    config = load([], [*BASE, *split, "trainer.max_staleness=1"]).config
    cluster = config.cluster
    assert not config.rollout.sleep  # its devices are its own
    assert "runs ahead of the training" in message(*split)
    assert (cluster.devices, cluster.backend.name) == (6, "ray")
    assert cluster.pools == {"train": 4, "rollout": 2}
    assert cluster.placement == {"rollout": "rollout"}
    assert load([], [*BASE, "actor_rollout_ref.hybrid_engine=True"]).config.cluster.devices == 1
    assert "devices of its own: remove either" in message(*split[:2], "actor_rollout_ref.hybrid_engine=True")


def test_each_value_says_which_key_it_is_from(in_tmp_path: Path) -> None:
    """Of several keys that mean something together: the one that the value is from, not the last."""
    Path("base.yaml").write_text(
        "data: {prompt_key: q, train_files: a.parquet}\n"
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    use_kl_loss: true\n"
        "    kl_loss_type: k1\n"
        "algorithm:\n"
        "  adv_estimator: gae\n"
        "  lam: 0.9\n"
        "  rollout_correction:\n"
        "    rollout_is: token\n"
        "    rollout_rs: token_k1\n"
        "    rollout_rs_threshold: 0.5_2.0\n"
        "trainer:\n"
        "  total_epochs: 2\n"
        "  nnodes: 2\n"
        "async_training:\n"
        "  staleness_threshold: 1\n"
        "  trigger_parameter_sync_step: 1\n"
        "  use_rollout_log_probs: false\n"
    )
    arguments = {
        "loss": f"{A}.kl_loss_coef=0.5",
        "gamma": "algorithm.gamma=0.9",
        "val": "data.val_files=b.parquet",
        "bound": "algorithm.rollout_correction.rollout_is_threshold=3.0",
        "partial": "async_training.partial_rollout=true",
        "rollout": "rollout.n_gpus_per_node=3",
        "prompts": "rollout.total_rollout_steps=2560",
    }
    loaded = load(["base.yaml"], ["model.path=m", "critic.path=c", *arguments.values()])
    where = {
        key: origin.where
        for key, origin in loaded.origins.items()
        if origin.written and key not in ("model.path", "critic.path")
    }
    said = {name: f"argument '{argument}'" for name, argument in arguments.items()}
    correction = "algorithm.rollout_correction"
    assert where == {
        "data.train.0.type": "base.yaml:1",
        "data.train.0.path": "base.yaml:1",
        "data.train.0.prompt_key": "base.yaml:1",
        "data.eval.0.type": said["val"],
        "data.eval.0.path": said["val"],
        "data.eval.0.prompt_key": "base.yaml:1",
        "algorithm.kl.where": "base.yaml:4",
        "algorithm.kl.name": "base.yaml:5",
        "algorithm.kl.coef": said["loss"],
        "algorithm.advantage.name": "base.yaml:7",
        "algorithm.advantage.lam": "base.yaml:8",
        "algorithm.advantage.gamma": said["gamma"],
        f"{correction}.importance.level": "base.yaml:10",
        f"{correction}.importance.upper": said["bound"],
        f"{correction}.reject.0.statistic": "base.yaml:11",
        f"{correction}.reject.0.level": "base.yaml:11",
        f"{correction}.reject.0.lower": "base.yaml:12",
        f"{correction}.reject.0.upper": "base.yaml:12",
        "trainer.epochs": "base.yaml:14",
        "trainer.total_steps": said["prompts"],
        "data.batch_size": "base.yaml:18",
        "trainer.max_staleness": "base.yaml:17",
        "trainer.on_update.name": said["partial"],
        "cluster.devices": said["rollout"],
        "cluster.pools.train": "base.yaml:15",
        "cluster.pools.rollout": said["rollout"],
        "cluster.placement.rollout": said["rollout"],
        "cluster.backend.name": said["rollout"],
    }


def test_a_setting_of_ours_is_between_two_of_verls(in_tmp_path: Path) -> None:
    """A key of a joint translation ranks where it was written, not where the last of them was."""
    Path("base.yaml").write_text("algorithm: {adv_estimator: grpo}\n")
    loaded = load(["base.yaml"], [*BASE[:2], "algorithm.advantage=gae", "algorithm.gamma=0.9"])
    assert loaded.config.algorithm.advantage == FunctionConfig("gae")
    both = load([], [*BASE, *GAE, "algorithm.gamma=0.9"])
    assert both.config.algorithm.advantage == FunctionConfig("gae", {"gamma": 0.9, "lam": 1.0})


def test_a_later_spelling_of_ours_wins_and_loses() -> None:
    assert settings("data.train_batch_size=256", "data.batch_size=512")["data.batch_size"] == 512
    assert settings("data.batch_size=512", "data.train_batch_size=256")["data.batch_size"] == 256


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (
            f"{A}.optim.learning_rate=1",
            "'actor_rollout_ref.actor.optim.learning_rate' is verl's spelling, but rondo does not "
            "translate it; see "
            "docs/verl.md for the keys that are translated",
        ),
        (
            f"{A}.ppo_epoch=1",
            "'actor_rollout_ref.actor.ppo_epoch' is verl's spelling, but rondo does not translate it; did "
            "you mean "
            "'actor_rollout_ref.actor.ppo_epochs'?",
        ),
        (
            f"{A}.strategy=veomni",
            "actor_rollout_ref.actor.strategy (verl's spelling) cannot be veomni here: this release "
            "trains with FSDP2 and Megatron",
        ),
        (
            "async_training.staleness_treshold=1",
            "'async_training.staleness_treshold' is verl's spelling, but rondo does not translate it; did "
            "you mean 'async_training.staleness_threshold'?",
        ),
        (
            "actor_rollout_ref.hybrid_engine=False",
            "actor_rollout_ref.hybrid_engine (verl's spelling) cannot be boolean false here: name the "
            "devices of the rollout: cluster.pools and cluster.placement",
        ),
        (
            f"{R}.update_weights_bucket_megabytes=0.5",
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes (verl's spelling) cannot be 0.5 here: "
            "give a whole number of megabytes",
        ),
        (
            "reward_model.sandbox_fusion.url=http://sandbox/run_code",
            "reward_model.sandbox_fusion.url (verl's spelling) cannot be http://sandbox/run_code here: "
            "it is the back end of the scorer: reward.functions=[{name: code, "
            "cases_key: reward_model.ground_truth, max_cases: 10, backend: http://…}]",
        ),
        (
            f"{A}.kl_loss_typ=k3",
            "'actor_rollout_ref.actor.kl_loss_typ' is verl's spelling, but rondo does not translate it; "
            "did you mean "
            "'actor_rollout_ref.actor.kl_loss_type'?",
        ),
    ],
)
def test_refused(argument: str, expected: str) -> None:
    assert message(argument) == f"argument '{argument}': {expected}"


def test_mappings_as_hydra_writes_them() -> None:
    """Without a space YAML reads another key, which would be lost, or be another one's."""
    key = "data.apply_chat_template_kwargs"
    found = load([], [*BASE, f"+{key}={{enable_thinking: False}}"]).config.model.chat_template_options
    assert found == {"enable_thinking": False}
    for text in ("{enable_thinking:False}", "{a: {enable_thinking:False}}", "{a: [{b:1}]}"):
        assert f"write a space behind each colon of a mapping: {key}=" in message(f"+{key}={text}")


def test_targets_are_keys_of_the_schema() -> None:
    """Except options of functions, which the schema does not list; and no key of ours is shadowed."""
    options = {"clip", "divisor"}
    override = {"model.override.max_position_embeddings"}
    targets = {rule.target for rule in TABLE.values() if isinstance(rule, To)}
    assert {t for t in targets if t not in schema_keys()} <= {
        f"algorithm.{name}.{option}" for name in ("aggregation", "value_loss") for option in options
    } | override
    assert not set(TABLE) & set(schema_keys())
    assert not [key for key in schema_keys() if key.startswith(FOREIGN_SECTIONS)]


def test_options_belong_to_the_choice_that_is_made_last(in_tmp_path: Path) -> None:
    """Whichever spelling makes it: what was set before for another is gone, what is set later stays."""
    Path("base.yaml").write_text(
        "algorithm: {policy_loss: {clip_low: 0.1}}\nrollout: {engine: {decode: lean}}\n"
    )
    mode = f"{A}.policy_loss.loss_mode=gspo"
    theirs = load(["base.yaml"], [*BASE, mode, f"{R}.name=sglang"]).config
    assert theirs.algorithm.policy_loss == FunctionConfig("gspo", {"clip_low": 0.2, "clip_high": 0.2})
    assert "decode" not in theirs.rollout.engine.options
    after = load([], [*BASE, mode, "algorithm.policy_loss.clip_low=0.1"]).config.algorithm.policy_loss
    assert after == FunctionConfig("gspo", {"clip_low": 0.1, "clip_high": 0.2})
    ours = load([], [*BASE, mode, f"{A}.clip_ratio_low=0.3", "algorithm.policy_loss=cispo"]).config
    assert ours.algorithm.policy_loss == FunctionConfig("cispo")
    late = load([], [*BASE, mode, "algorithm.policy_loss=cispo", f"{A}.clip_ratio_low=0.3"]).config
    assert late.algorithm.policy_loss == FunctionConfig("cispo", {"clip_low": 0.3})


def test_both_spellings_in_one_file(in_tmp_path: Path) -> None:
    Path("both.yaml").write_text(
        "data:\n  batch_size: 8\n  train_batch_size: 8\nactor: {mini_batch_size: 8}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(["both.yaml"], BASE)
    assert str(caught.value) == (
        "both.yaml:3: sets data.batch_size in another spelling, and both.yaml:2 sets it too; keep one of them"
    )


def test_an_error_is_placed_where_somebody_wrote() -> None:
    """And not at a default of verl's in the same section."""
    with pytest.raises(ConfigError) as caught:
        load([], [f"{R}.n=4", "algorithm.adv_estimator=grpo"])
    assert str(caught.value).startswith("nothing says where the model comes from")
