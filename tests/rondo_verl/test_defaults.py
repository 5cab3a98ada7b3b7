"""A command line in verl's spelling means verl's defaults, and what is written; each W is one way in which it
once meant something else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.cli import main as cli
from rondo.cli.arguments import load_arguments
from rondo.config import Config, LoadedConfig, show
from rondo.config.schema import CriticConfig, FunctionConfig, KlConfig, ReferenceConfig
from rondo.core.errors import ConfigError
from rondo.trainers.commands.recipe import changed_keys
from rondo_verl.defaults import DEFAULTS, WITHOUT_DEFAULT
from rondo_verl.programs import TRANSLATED
from rondo_verl.resolved import every_default
from rondo_verl.table import TABLE, Ignored, Only
from tests.messages import full_text
from tests.rondo_verl.translated import BASE, GAE, A, C, F, R, load, message

MODEL = "actor_rollout_ref.model.path=model"


def config(*overrides: str) -> Config:
    return load([], [*BASE, *overrides]).config


def origin(loaded: LoadedConfig, key: str) -> str:
    return loaded.origins[key].where


# ---- the layer


def test_the_smallest_command_line() -> None:
    """What verl would do, value by value, where next to nothing is written."""
    c = load([], [MODEL, "critic.model.path=critic"]).config
    assert (c.data.batch_size, c.data.max_prompt_tokens, c.rollout.max_tokens) == (1024, 512, 512)
    assert (c.actor.mini_batch_size, c.actor.epochs, c.rollout.n) == (256, 1, 1)
    assert (c.critic.mini_batch_size, c.critic.epochs) == (256, 1)
    assert (c.actor.token_budget, c.critic.token_budget) == (16384, 32768)
    assert c.algorithm.advantage == FunctionConfig("gae", {"gamma": 1.0, "lam": 1.0})
    assert c.algorithm.policy_loss == FunctionConfig("ppo_clip", {"clip": 0.2, "dual_clip": 3.0})
    assert c.algorithm.value_loss == FunctionConfig("clipped_value", {"clip": 0.5})
    assert (c.algorithm.kl, c.algorithm.rollout_correction, c.algorithm.filter) == (None, None, None)
    assert (c.actor.param_dtype, c.actor.compute_dtype, c.rollout.dtype) == (
        "float32",
        "bfloat16",
        "bfloat16",
    )
    assert (c.trainer.epochs, c.trainer.total_steps) == (30.0, None)
    assert (c.trainer.evaluation.greedy, c.trainer.evaluation.samples) == (True, 0)
    assert (c.data.overlong_prompts, c.rollout.sleep) == ("error", True)
    assert (c.checkpoint.every, c.checkpoint.keep) == (None, 1_000_000)


def test_every_translated_key_has_a_default_or_a_reason() -> None:
    translated = {key for key, rule in TABLE.items() if not isinstance(rule, Ignored | Only)}
    for defaults in DEFAULTS.values():
        assert translated == defaults.keys() | WITHOUT_DEFAULT.keys()
        assert not defaults.keys() & WITHOUT_DEFAULT.keys()


@pytest.mark.parametrize(
    ("overrides", "version", "concurrent"),
    [
        ([], "main (no key tells;", 256),
        (
            ["trainer.use_legacy_worker_impl=disable"],
            "0.6.1 (only it has trainer.use_legacy_worker_impl;",
            1024,
        ),
        (
            ["trainer.use_v1=true", "trainer.use_legacy_worker_impl=disable"],
            "main (only it has trainer.use_v1;",
            256,
        ),
        (["verl.version=0.6.1"], "0.6.1 (argument 'verl.version=0.6.1';", 1024),
    ],
)
def test_defaults_of_a_version(overrides: list[str], version: str, concurrent: int) -> None:
    loaded = load([], [*BASE, *overrides])
    assert loaded.config.rollout.max_concurrent == concurrent
    assert f"verl's defaults hold, those of {version}" in loaded.notes[0]


def test_a_version_that_there_is_not() -> None:
    assert "verl.version is main or 0.6.1" in message("verl.version=0.5")


def test_no_key_of_verls_no_default_of_verls() -> None:
    loaded = load([], ["model.path=m", "trainer.total_steps=1"])
    assert set(loaded.origins) == {"model.path", "trainer.total_steps"}
    assert loaded.notes == ()


def test_what_is_written_in_either_spelling_is_above_the_defaults(in_tmp_path: Path) -> None:
    Path("ours.yaml").write_text(
        "model: {path: m}\n"
        "data: {batch_size: 32}\n"
        "actor: {compute_dtype: float32, mini_batch_size: null}\n"
        "rollout: {n: 8, sleep: false, engine: vllm}\n"
        "algorithm: {advantage: grpo, policy_loss: {name: gspo, clip_low: 0.1}, kl: null}\n"
        "trainer: {total_steps: 60}\n"
    )
    c = load(["ours.yaml"], [f"{R}.temperature=0.5"]).config
    assert (c.data.batch_size, c.rollout.n, c.rollout.temperature) == (32, 8, 0.5)
    assert (c.actor.compute_dtype, c.actor.mini_batch_size) == ("float32", None)
    assert (c.rollout.sleep, dict(c.rollout.engine.options)) == (False, {})
    assert c.algorithm.policy_loss == FunctionConfig("gspo", {"clip_low": 0.1})
    assert (c.trainer.total_steps, c.trainer.epochs) == (60, None)


def test_a_default_says_that_it_is_one() -> None:
    loaded = load([], [*BASE, f"{R}.temperature=0.5"])
    assert origin(loaded, "rollout.n") == "verl's default of actor_rollout_ref.rollout.n"
    assert not loaded.origins["rollout.n"].written
    assert loaded.origins["rollout.temperature"].written
    lines = [
        line for line in show(loaded.config, loaded.origins).splitlines() if line.startswith("rollout.n:")
    ]
    assert [line.split("  # ")[1] for line in lines] == ["verl's default of actor_rollout_ref.rollout.n"]
    (note,) = loaded.notes
    listed = note.partition("nothing is written: ")[2].split(", ")
    assert {"rollout.n=1", "actor.compute_dtype=bfloat16", "rollout.sleep=true"} <= set(listed)
    assert not [one for one in listed if one.startswith(("rollout.temperature", "actor.epochs"))]


def test_a_default_is_no_key_that_somebody_set() -> None:
    """So that nothing which a command does not read is asked to be removed."""
    loaded = load([], [*BASE, f"{A}.optim.lr=1e-3"])
    changed = {key for key, _ in changed_keys(loaded)}
    assert changed == {"model.path", "actor.optimizer.lr", "trainer.total_steps"}


# ---- W1 to W12


def test_w1_one_trajectory_per_prompt() -> None:
    assert config(f"{R}.temperature=1.0").rollout.n == 1


def test_w2_precision() -> None:
    c = config(*GAE, f"{A}.use_kl_loss=True", f"{R}.name=vllm")
    for engine in (c.actor, c.critic, c.reference):
        assert (engine.param_dtype, engine.compute_dtype) == ("float32", "bfloat16")
    assert c.rollout.dtype == "bfloat16"
    other = config(f"{A}.fsdp_config.dtype=fp32")
    assert (other.actor.param_dtype, other.actor.compute_dtype) == ("float32", "float32")
    with pytest.raises(ConfigError, match=full_text("actor.param_dtype = bfloat16 would sum")):
        config(f"{A}.fsdp_config.model_dtype=bf16")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 40),  # 1024 / 256 mini-batches
        ([f"{A}.ppo_epochs=3"], 120),
        ([f"{A}.ppo_mini_batch_size=1024"], 10),
        (["data.batch_size=512"], 20),
        (["actor.mini_batch_size=128"], 80),
        (["actor.mini_batch_size=null"], 10),
    ],
)
def test_w3_warmup_is_in_trainer_steps(overrides: list[str], steps: int) -> None:
    c = config(f"{A}.optim.lr_warmup_steps=10", *overrides)
    assert c.actor.optimizer.schedule.warmup_steps == steps


def test_w3_the_critics_warmup_is_in_its_own_steps() -> None:
    c = config(*GAE, "critic.optim.lr_warmup_steps=3", "critic.ppo_mini_batch_size=512", f"{A}.ppo_epochs=2")
    assert c.critic.optimizer.schedule.warmup_steps == 3 * 2 * 2
    assert "give a whole number" in message(f"{A}.optim.lr_warmup_steps=0.1")


def test_w4_several_files_are_one_data_set() -> None:
    sources = config("data.train_files=[a.parquet, b.parquet]", "data.val_files=[c.jsonl, d.jsonl]").data
    assert [source.weight for source in sources.train] == [None, None]
    assert [source.weight for source in sources.eval] == [1.0, 1.0]
    assert [source.weight for source in config("data.train_files=a.parquet").data.train] == [1.0]


@pytest.mark.parametrize(("theirs", "ours"), [("gspo", "gspo"), ("sapo", "sapo"), ("geo_mean", "gmpo")])
def test_w5_mean_per_response_whatever_is_set(theirs: str, ours: str) -> None:
    mode = f"{A}.policy_loss.loss_mode={theirs}"
    c = config(mode)
    assert c.algorithm.policy_loss.name == ours
    assert c.algorithm.aggregation == FunctionConfig("seq-mean-token-mean")
    written = load([], [*BASE, mode, f"{A}.loss_agg_mode=token-mean"])
    assert written.config.algorithm.aggregation == FunctionConfig("seq-mean-token-mean")
    assert f"verl averages the loss {theirs} per response" in written.notes[1]
    # The KL follows loss_agg_mode in verl.
    assert "set loss_agg_mode=seq-mean-token-mean" in message(mode, f"{A}.use_kl_loss=True")
    both = config(mode, f"{A}.use_kl_loss=True", f"{A}.loss_agg_mode=seq-mean-token-mean")
    assert both.algorithm.aggregation == FunctionConfig("seq-mean-token-mean")


def test_w6_the_critic_follows_the_actor() -> None:
    both = (f"{A}.ppo_mini_batch_size=128", f"{A}.ppo_epochs=4")
    loaded = load([], [*BASE, *GAE, *both])
    assert (loaded.config.critic.mini_batch_size, loaded.config.critic.epochs) == (128, 4)
    assert origin(loaded, "critic.epochs") == "verl's default of critic.ppo_epochs"
    own = config(*GAE, *both, "critic.ppo_mini_batch_size=512", "critic.epochs=2").critic
    assert (own.mini_batch_size, own.epochs) == (512, 2)
    ours = config(*GAE, "actor.mini_batch_size=64").critic
    assert ours.mini_batch_size == 64


def test_w7_the_estimator_is_gae() -> None:
    c = load([], ["model.path=m", "critic.model.path=critic", f"{A}.optim.lr=1e-6"]).config
    assert (c.algorithm.advantage.name, c.critic.path) == ("gae", "critic")
    with pytest.raises(ConfigError, match=full_text("critic.model.path is not set")) as caught:
        load([], ["model.path=m", f"{A}.optim.lr=1e-6"])
    assert caught.value.key == "algorithm.adv_estimator"
    assert load([], ["model.path=m", "critic.path=c", f"{A}.optim.lr=1e-6"]).config.critic.path == "c"


def test_w8_no_rollout_correction() -> None:
    assert config(f"{R}.name=vllm").algorithm.rollout_correction is None
    ours = config(f"{R}.name=vllm", "algorithm.rollout_correction.mode=decoupled")
    assert ours.algorithm.rollout_correction is not None
    assert ours.algorithm.rollout_correction.mode == "decoupled"


@pytest.mark.parametrize(
    ("name", "option"), [("vllm", "enable_sleep_mode"), ("sglang", "enable_memory_saver"), ("hf", None)]
)
def test_w9_the_engine_sleeps(name: str, option: str | None) -> None:
    rollout = config(f"{R}.name={name}").rollout
    assert rollout.sleep
    assert option is None or rollout.engine.options[option]
    off = config(f"{R}.name={name}", f"{R}.free_cache_engine=False").rollout
    assert not off.sleep
    assert option not in off.engine.options


def test_w9_checkpointing_and_not_asleep_where_it_runs_ahead() -> None:
    c = config(*GAE, "trainer.max_staleness=1")
    assert not c.rollout.sleep
    assert (c.actor.gradient_checkpointing, c.critic.gradient_checkpointing) == (True, True)
    off = config("actor_rollout_ref.model.enable_gradient_checkpointing=False")
    assert off.actor.gradient_checkpointing is False
    offload = "actor_rollout_ref.model.enable_activation_offload=True"
    found = config(*GAE, offload)
    assert (found.actor.gradient_checkpointing, found.critic.gradient_checkpointing) == ("offload", True)
    with pytest.raises(ConfigError, match="set enable_gradient_checkpointing=True"):
        config(offload, "actor_rollout_ref.model.enable_gradient_checkpointing=False")


def test_w10_steps_and_epochs() -> None:
    def trainer(*overrides: str) -> tuple[int | None, float | None]:
        found = load([], ["model.path=m", "algorithm.adv_estimator=grpo", *overrides]).config.trainer
        return found.total_steps, found.epochs

    assert trainer("trainer.total_epochs=3", "trainer.total_training_steps=7") == (7, 3.0)
    assert trainer("trainer.total_training_steps=7") == (7, 30.0)
    assert trainer("trainer.total_steps=7") == (7, None)  # ours says it all
    assert trainer("trainer.epochs=2") == (None, 2.0)
    prompts = "rollout.total_rollout_steps=51200"  # of the fully asynchronous trainer
    assert trainer(prompts, "data.batch_size=512") == (100, 30.0)
    assert trainer(prompts, "trainer.total_steps=7") == (7, 30.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("recipe.sppo.main_sppo", "self-play preference optimisation"),
        ("recipe.spin.main_spin", "self-play fine-tuning"),
        ("recipe.prime.main_prime", "implicit reward model"),
        ("main_gkd", "distillation"),
        ("main_ppo_split.py", "actor and critic devices of their own"),
        ("recipe.partial_rollout.main_ppo", "runs ahead of the training"),
        ("recipe.async_flow.grpo_main", "runs ahead of the training"),
        ("verl.trainer.main_generation", "it does not train"),
        ("rep_exp.main_rep_exp", "exploration bonus"),
        ("recipe.nobody_knows.main_it", "a program of its own"),
    ],
)
def test_w11_other_programs_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not translated: .*{reason}"):
        load_arguments([name, *BASE])


@pytest.mark.parametrize("name", [name for name in TRANSLATED if "sft" not in name])
def test_w11_the_program_that_is_translated(name: str) -> None:
    loaded = load_arguments([name, *BASE, f"{R}.name=hf"])
    assert (loaded.files, loaded.config.rollout.n) == ((), 1)
    ahead = "one_step_off" in name or "fully_async" in name
    assert loaded.config.trainer.max_staleness == int(ahead)
    # 4 mini-batches of 256 between two syncs, or verl's batch
    assert loaded.config.data.batch_size == 1024


def test_w11_what_a_program_says_is_beneath_its_keys() -> None:
    name, split = (
        "recipe.one_step_off_policy.main_ppo",
        ["trainer.n_gpus_per_node=6", "rollout.n_gpus_per_node=2"],
    )
    c = load([name], [*BASE, *split, "actor_rollout_ref.hybrid_engine=False"])
    assert origin(c, "trainer.max_staleness") == f"program {name}"
    assert (c.config.cluster.pools, c.config.rollout.sleep) == ({"train": 6, "rollout": 2}, False)
    assert load([name], [*BASE, "trainer.max_staleness=2", f"{R}.n=4"]).config.trainer.max_staleness == 2
    stream = "recipe.fully_async_policy.fully_async_main"
    with pytest.raises(ConfigError, match="say how many prompts"):
        load([stream], ["model.path=m", "algorithm.adv_estimator=grpo"])


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("vanilla", {"clip": 0.2, "dual_clip": 3.0}),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("cispo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("geo_mean", {"clip": 0.2}),
        ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("gpg", {}),
        ("clip_cov", {"clip": 0.2, "fraction": 2e-4, "low": 1.0, "high": 5.0}),
        ("kl_cov", {"fraction": 2e-4, "beta": 0.1}),
        ("dppo_tv", {"threshold": 0.2, "cap": 3.0}),
        ("dppo_kl", {"threshold": 0.2, "cap": 3.0}),
    ],
)
def test_w12_options_of_losses(mode: str, options: dict[str, float]) -> None:
    assert config(f"{A}.policy_loss.loss_mode={mode}").algorithm.policy_loss.options == options


def test_w12_clip_ratio_is_read_only_where_a_bound_is_null() -> None:
    alone = load([], [*BASE, f"{A}.clip_ratio=0.1"])
    assert alone.config.algorithm.policy_loss.options == {"clip": 0.2, "dual_clip": 3.0}
    assert "which verl gives defaults, overrule it" in alone.notes[1]
    low = config(f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_low=null").algorithm.policy_loss
    assert low.options == {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 3.0}


def test_the_divisor_is_the_longest_response() -> None:
    mode = f"{A}.loss_agg_mode=seq-mean-token-sum-norm"
    longest = config(mode, "data.max_response_length=2048").algorithm.aggregation
    assert longest == FunctionConfig("seq-mean-token-sum-norm", {"divisor": 2048})
    given = config(mode, f"{A}.loss_scale_factor=7").algorithm.aggregation
    assert given == FunctionConfig("seq-mean-token-sum-norm", {"divisor": 7})


# ---- errors where verl runs


def test_keys_of_a_reference_that_there_is_not() -> None:
    keys = [f"{F}.log_prob_max_token_len_per_gpu=9999", f"{F}.fsdp_config.param_offload=True"]
    loaded = load([], [*BASE, *keys])
    assert loaded.config.reference == ReferenceConfig()
    assert [note.endswith("no KL is on, so there is no reference model") for note in loaded.notes[1:]] == [
        True
    ] * 2
    on = config(*keys, f"{A}.use_kl_loss=True").reference
    assert (on.token_budget, on.offload_params) == (9999, True)
    # A function that verl does not have may read it.
    assert config(*keys, "algorithm.advantage=prime").reference.token_budget == 9999


def test_keys_of_a_critic_that_there_is_not() -> None:
    keys = ["critic.optim.lr=1e-3", "critic.model.path=critic", "trainer.critic_warmup=0"]
    loaded = load([], [*BASE, *keys])
    assert loaded.config.critic == CriticConfig()
    assert [note.split("rondo: ")[1] for note in loaded.notes[1:]] == [
        "the estimator grpo reads no values, so there is no critic"
    ] * 2
    assert "trains nothing in these steps" in message(*keys[:2], "trainer.critic_warmup=5")


def test_budgets_follow_the_actors() -> None:
    c = config(f"{A}.use_kl_loss=True", f"{A}.ppo_max_token_len_per_gpu=40000")
    assert c.reference.token_budget == 40000


def test_a_kl_of_weight_0() -> None:
    loss = load([], [*BASE, f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.0"])
    assert loss.config.algorithm.kl is None
    assert "a KL with the coefficient 0 changes nothing" in loss.notes[1]
    reward = config("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0")
    assert reward.algorithm.kl is None
    assert config("algorithm.use_kl_in_reward=True").algorithm.kl == KlConfig("k1", "reward", 0.001)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["temperature=0"], (True, 0, 1.0, 1.0)),
        (["do_sample=True", "n=4"], (True, 0, 1.0, 1.0)),  # verl's default is the temperature 0
        (["do_sample=True", "n=4", "temperature=0.6", "top_p=0.9"], (False, 4, 0.6, 0.9)),
        (["n=30", "temperature=1.0"], (False, 30, 1.0, 1.0)),
    ],
)
def test_evaluation(overrides: list[str], expected: tuple[bool, int, float, float]) -> None:
    found = config(*(f"{R}.val_kwargs.{override}" for override in overrides)).trainer.evaluation
    assert (found.greedy, found.samples, found.temperature, found.top_p) == expected


@pytest.mark.parametrize(("every", "expected"), [("-1", (None, False)), ("5", (5, True))])
def test_when_to_evaluate(every: str, expected: tuple[int | None, bool]) -> None:
    found = config(f"trainer.test_freq={every}", "data.val_files=x.parquet").trainer.evaluation
    assert (found.every, found.after) == expected
    assert found.before
    ours = config("trainer.evaluation.every=20", "data.val_files=x.parquet").trainer.evaluation
    assert (ours.every, ours.after) == (20, True)


@pytest.mark.parametrize(
    ("said", "greedy"),
    [
        (f"{R}.mode=async", False),
        (f"{R}.mode=sync", True),
        ("verl.version=0.6.1", True),
        ("verl.version=main", False),
        ("trainer.use_v1=true", False),
    ],
)
def test_evaluation_that_verls_versions_read_differently(said: str, greedy: bool) -> None:
    both = [f"{R}.val_kwargs.do_sample=False", f"{R}.val_kwargs.temperature=0.7"]
    assert "set do_sample=True, or temperature=0" in message(*both)
    found = config(*both, said).trainer.evaluation
    assert (found.greedy, found.samples) == (greedy, 0 if greedy else 1)
    if not greedy:
        assert found.temperature == 0.7


def test_evaluation_cuts_as_training_does() -> None:
    """One top_k is for both here: another one in evaluation would not be what verl does."""
    sampled = [f"{R}.val_kwargs.temperature=0.7"]
    assert "set rollout.top_k to it, too" in message(*sampled, f"{R}.top_k=50")
    assert "set rollout.top_k to it, too" in message(*sampled, f"{R}.val_kwargs.top_k=20")
    both = config(*sampled, f"{R}.top_k=20", f"{R}.val_kwargs.top_k=20")
    assert (both.rollout.top_k, both.trainer.evaluation.samples) == (20, 1)
    assert config(f"{R}.top_k=50").trainer.evaluation.greedy


@pytest.mark.parametrize(("value", "kept"), [("null", 1_000_000), ("-1", 1_000_000), ("3", 3)])
def test_checkpoints_that_are_kept(value: str, kept: int) -> None:
    assert config(f"trainer.max_actor_ckpt_to_keep={value}").checkpoint.keep == kept


def test_a_schedule_without_a_floor() -> None:
    constant = load([], [*BASE, f"{A}.optim.min_lr_ratio=0.1"])
    assert constant.config.actor.optimizer.schedule.name == "constant"
    assert "the rate of a constant schedule stays" in constant.notes[1]
    cosine = config(f"{A}.optim.min_lr_ratio=0.1", f"{A}.optim.lr_scheduler_type=cosine")
    assert cosine.actor.optimizer.schedule.min_ratio == 0.1  # type: ignore[union-attr]
    older = config(f"{A}.optim.warmup_style=cosine").actor.optimizer.schedule
    assert older.name == "cosine"


def test_asynchrony_has_its_own_defaults() -> None:
    """verl takes 4 times a mini-batch between two syncs, which is a step here."""
    c = config("async_training.staleness_threshold=1", "data.train_batch_size=0")
    assert (c.data.batch_size, c.actor.mini_batch_size) == (4 * 256, 256)


def test_both_passes_take_a_recipe_and_verls_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """The second pass would ask to remove keys that nothing reads."""
    said = [f"{F}.log_prob_max_token_len_per_gpu=9999", "critic.optim.lr=1e-3", f"{C}.rollout_is=null"]
    arguments = ["quickstart", f"{A}.ppo_mini_batch_size=8", f"{R}.n=4", *said]
    code = cli.main(["config", "show", *arguments])
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "critic.optim.lr has no meaning in rondo" in out.err
    assert "actor.compute_dtype: bfloat16" in out.out
    assert cli.main(["check", *arguments]) == 0
    out = capsys.readouterr()
    assert out.out.endswith("Placement:\n  all: device 0: actor, rollout\n")


@pytest.mark.parametrize(("version", "of_it"), [("main", 118), ("0.6.1", 119)])
def test_defaults_are_those_of_the_versions_config(version: str, of_it: int) -> None:
    """Where the other version alone has a key, its default is taken; main's has no reward model, and null."""
    whole = every_default(version)
    both = {key: value for key, value in DEFAULTS[version].items() if key in whole}
    assert len(both) == of_it
    assert not any("${" in str(value) for value in both.values())
    assert both["reward_model.enable"] is False
