"""verl's keys of losses, advantages, KL, filter and correction."""

from __future__ import annotations

import pytest

from rondo.algorithms.registry import bind
from rondo.config.schema import (
    AdaptiveKlConfig,
    BypassConfig,
    DivergenceRejectionConfig,
    FilterConfig,
    FunctionConfig,
    ImportanceConfig,
    KlConfig,
    RatioRejectionConfig,
    RolloutCorrectionConfig,
)
from rondo_verl.algorithm import ESTIMATORS
from tests.rondo_verl.translated import BASE, GAE, A, C, load, message

FILTER = "algorithm.filter_groups"


def test_options_of_a_default_function_keep_its_name() -> None:
    found = load(
        [], [*BASE, f"{A}.clip_ratio_low=0.1", f"{A}.clip_ratio_high=0.3"]
    ).config.algorithm.policy_loss
    assert found == FunctionConfig("ppo_clip", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0})


def test_kl() -> None:
    def kl(*overrides: str) -> KlConfig | None:
        return load([], [*BASE, *overrides]).config.algorithm.kl

    assert kl(f"{A}.use_kl_loss=True") == KlConfig("k3", "loss", 0.001)  # verl's defaults
    assert kl(f"{A}.use_kl_loss=False", f"{A}.kl_loss_coef=0.1") is None
    assert kl(f"{A}.kl_loss_coef=0.1") is None  # a coefficient switches nothing on
    adaptive = (
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.2",
    )
    assert kl(*adaptive) == KlConfig("k1", "reward", 0.001, AdaptiveKlConfig(target=0.2, horizon=10000.0))
    both = message(f"{A}.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    assert both.endswith("cannot be boolean true here: the KL is in the loss already; choose one of the two")


def test_advantage() -> None:
    def advantage(*overrides: str) -> FunctionConfig:
        return load([], [*BASE, *overrides]).config.algorithm.advantage

    gae = advantage(*GAE, "algorithm.lam=0.95", "algorithm.gamma=1.0")
    assert gae == FunctionConfig("gae", {"gamma": 1.0, "lam": 0.95})
    grpo = ("algorithm.adv_estimator=grpo", "algorithm.gamma=1.0", "algorithm.norm_adv_by_std_in_grpo=False")
    assert advantage(*grpo) == FunctionConfig("grpo", {"normalize_std": False})
    assert "use one of gae, grpo" in message("algorithm.adv_estimator=magic")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [f"{A}.policy_loss.loss_mode=gspo", f"{A}.clip_ratio_low=3e-4"],
            ("gspo", {"clip_low": 3e-4, "clip_high": 0.2}),
        ),
        (
            [f"{A}.policy_loss.clip_cov_ratio=1e-3", f"{A}.policy_loss.loss_mode=clip_cov"],
            ("clip_cov", {"clip": 0.2, "fraction": 1e-3, "low": 1.0, "high": 5.0}),
        ),
        (
            [
                f"{A}.policy_loss.loss_mode=kl_cov",
                f"{A}.policy_loss.kl_cov_ratio=2e-4",
                f"{A}.policy_loss.ppo_kl_coef=1",
            ],
            ("kl_cov", {"fraction": 2e-4, "beta": 1}),
        ),
        (
            [f"{A}.policy_loss.loss_mode=dppo_tv", f"{A}.clip_ratio_low=0.15"],
            ("dppo_tv", {"threshold_low": 0.15, "threshold_high": 0.2, "cap": 3.0}),
        ),
        (
            [f"{A}.policy_loss.loss_mode=sapo", f"{A}.tau_neg=1.1"],
            ("sapo", {"tau_positive": 1.0, "tau_negative": 1.1}),
        ),
    ],
)
def test_policy_loss(overrides: list[str], expected: tuple[str, dict[str, float]]) -> None:
    found = load([], [*BASE, *overrides]).config.algorithm.policy_loss
    assert found == FunctionConfig(*expected)
    bind("policy_loss", found)  # a loss that there is, with options that it has


@pytest.mark.parametrize(("theirs", "ours"), sorted(ESTIMATORS.items()))
def test_estimators_exist(theirs: str, ours: str) -> None:
    critic = ["critic.model.path=critic"] if theirs == "gae" else []
    overrides = [*BASE, f"algorithm.adv_estimator={theirs}", *critic]
    found = load([], overrides).config.algorithm.advantage
    assert found.name == ours
    assert found.options.get("turn_aligned", False) == theirs.startswith("tir_")
    bind("advantage", found)


@pytest.mark.parametrize(
    ("mode", "key", "options"),
    [
        ("gspo", "clip_ratio_c", {"clip_low": 0.2, "clip_high": 0.2}),
        ("clip_cov", "clip_ratio_c", {"clip": 0.2, "fraction": 2e-4, "low": 1.0, "high": 5.0}),
        ("kl_cov", "clip_ratio_low", {"fraction": 2e-4, "beta": 0.1}),
        ("vanilla", "policy_loss.kl_cov_ratio", {"clip": 0.2, "dual_clip": 3.0}),
    ],
)
def test_what_verls_loss_does_not_read(mode: str, key: str, options: dict[str, float]) -> None:
    loaded = load([], [*BASE, f"{A}.policy_loss.loss_mode={mode}", f"{A}.{key}=10"])
    assert loaded.config.algorithm.policy_loss.options == options
    assert [note for note in loaded.notes if note.endswith(f"verl's loss {mode} does not read it")]


def test_group_filter() -> None:
    on = (f"{FILTER}.enable=True", f"{FILTER}.metric=acc")
    found = load([], [*BASE, *on, f"{FILTER}.max_num_gen_batches=10"]).config.algorithm
    assert found.filter == FilterConfig("mixed_accuracy", max_refills=9.0)
    assert load([], [*BASE, f"{FILTER}.enable=False", f"{FILTER}.metric=acc"]).config.algorithm.filter is None
    # DAPO's: 10 batches of 1536, of which 512 are trained on, so 29 times 512 may be filtered.
    dapo = [*on, f"{FILTER}.max_num_gen_batches=10", "data.train_batch_size=512", "data.gen_batch_size=1536"]
    more = load([], [*BASE, *dapo])
    assert more.config.data.batch_size == 512
    assert more.config.algorithm.filter == FilterConfig("mixed_accuracy", max_refills=29.0)
    assert [note for note in more.notes if note.endswith("what it asks beyond a batch verl drops")]
    # Without a filter all that is asked is trained on.
    assert load([], [*BASE, "data.gen_batch_size=512"]).config.data.batch_size == 512


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout_is=null"], None),
        (["rollout_is=token"], RolloutCorrectionConfig(importance=ImportanceConfig("token", upper=2.0))),
        (
            ["rollout_is=token", "rollout_is_threshold=0.5_5.0", "rollout_is_batch_normalize=True"],
            RolloutCorrectionConfig(importance=ImportanceConfig("token", 0.5, 5.0, "mask", True)),
        ),
        (
            ["rollout_rs='token_k1,seq_max_k3'", "rollout_rs_threshold='0.5_2.0,0.01'"],
            RolloutCorrectionConfig(
                reject=(
                    RatioRejectionConfig("k1", 2.0, "token", 0.5),
                    DivergenceRejectionConfig("k3", 0.01, "max"),
                )
            ),
        ),
        (["bypass_mode=True", "loss_type=ppo_clip"], BypassConfig()),
        (["bypass_mode=True", "rollout_is=token"], BypassConfig()),
        (  # 0.6.1's names
            ["rollout_rs=geometric", "rollout_rs_threshold=1.001", "rollout_rs_threshold_lower=0.99"],
            RolloutCorrectionConfig(reject=(RatioRejectionConfig("k1", 1.001, "mean", 0.99),)),
        ),
        (
            ["rollout_rs=sequence", "rollout_rs_threshold=2.0"],
            RolloutCorrectionConfig(reject=(RatioRejectionConfig("k1", 2.0, "sum"),)),
        ),
        (
            ["rollout_is=token", "rollout_is_threshold=1_2"],  # not twelve
            RolloutCorrectionConfig(importance=ImportanceConfig("token", 1.0, 2.0, "mask")),
        ),
    ],
)
def test_rollout_correction(overrides: list[str], expected: RolloutCorrectionConfig | None) -> None:
    found = load([], [*BASE, *(f"{C}.{override}" for override in overrides)])
    assert found.config.algorithm.rollout_correction == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{A}.policy_loss.loss_mode=bypass_mode"], "it is algorithm.rollout_correction.mode=bypass"),
        (
            [f"{FILTER}.enable=True", f"{FILTER}.metric=seq_reward"],
            "the built-in filters read the column accuracy",
        ),
        ([f"{FILTER}.enable=True", f"{FILTER}.max_num_gen_batches=0"], "there is a bound here"),
        ([f"{FILTER}.enable=True", f"{FILTER}.max_num_gen_batches=1"], "set algorithm.filter.max_refills"),
        ([f"{C}.rollout_rs=median", f"{C}.rollout_rs_threshold=2"], "use one of token_k1"),
        ([f"{C}.rollout_rs=token_k2"], "it needs rollout_rs_threshold"),
        ([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=high"], "give a number, or lower_upper"),
        ([f"{C}.loss_type=reinforce"], "choose the loss itself"),
        (
            [f"{A}.policy_loss.loss_mode=gspo", f"{C}.bypass_mode=True"],
            "verl trains with the loss vanilla then, whatever loss_mode says",
        ),
        ([f"{C}.rollout_token_veto_threshold=1e-4"], "reject by rollout_rs"),
    ],
)
def test_algorithms_without_a_counterpart(overrides: list[str], expected: str) -> None:
    assert expected in message(*overrides)
