"""What a step is made of: stages from the columns that are read, learners, weights, resume with all of it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from rondo.algorithms import ActorLoss
from rondo.config import load
from rondo.config.schema import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    BypassConfig,
    Config,
    DataConfig,
    FilterConfig,
    FunctionConfig,
    ImportanceConfig,
    KlConfig,
    ReferenceConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RolloutCorrectionConfig,
    TrainerConfig,
)
from rondo.controller import Cluster
from rondo.core.batch import ROW_ID, Batch, BatchRef
from rondo.core.columns import column
from rondo.core.errors import ConfigError
from rondo.planning.roles import config_for
from rondo.platform import platform_of
from rondo.trainers.commands.check import check_rl
from rondo.trainers.program.plan import plan_program, plan_schedule
from rondo.trainers.program.producers import stages
from rondo.trainers.program.stages import Resampling
from rondo.trainers.program.step import Coefficients, Roles, Stage, Step
from rondo.trainers.program.update import ActorWeights, lm_weights, without_idle
from rondo.trainers.supervised.tasks import total_steps as supervised_steps
from tests.messages import full_text
from tests.trainers.conftest import MODEL, RECIPE, inline, metrics, registered_for_now, weights


def columns_of(config: Config) -> list[tuple[str, ...]]:
    return [producer.columns for producer in plan_program(config).producers]


def algorithm(**changes: Any) -> Config:
    return Config(
        reward=RewardConfig(functions=(RewardFunctionConfig("gsm8k"),)), algorithm=AlgorithmConfig(**changes)
    )


@pytest.mark.parametrize(
    ("total_steps", "epochs", "steps", "groups"),
    [
        (7, None, 7, 1 << 62),
        (None, 2.0, 5, 20),
        (7, 2.0, 5, 20),  # the epochs end first
        (3, 2.0, 3, 20),
        (7, 0.5, 2, 5),
    ],
)
def test_a_run_ends_with_its_steps_or_its_epochs(
    total_steps: int | None, epochs: float | None, steps: int, groups: int
) -> None:
    config = Config(data=DataConfig(batch_size=4), trainer=TrainerConfig(total_steps, epochs))
    schedule = plan_schedule(config, 10, ())
    assert (schedule.total_steps, schedule.total_groups) == (steps, groups)
    assert supervised_steps(config, 10) == steps


def test_nothing_is_computed_that_nobody_reads() -> None:
    assert columns_of(algorithm()) == []
    assert plan_program(algorithm()).roles == ()


def test_each_column_once_and_after_what_it_is_made_from() -> None:
    otb = algorithm(advantage=FunctionConfig("otb"))
    assert columns_of(otb) == [("old_log_probs", "sum_p_squared")]  # one forward for both
    both = stages(["sum_p_squared", "entropy", "values", "cost_values"], "prepare")
    made = [producer.columns for producer in both]
    assert made == [("cost_values",), ("old_log_probs", "entropy", "sum_p_squared"), ("values",)]
    assert both[1].options == {"also": ("entropy", "sum_p_squared")}
    prime = plan_program(algorithm(advantage=FunctionConfig("prime")))
    assert [p.columns for p in prime.producers] == [("ref_log_probs",), ("process_rewards",)]
    assert [(x.role, x.first) for x in prime.learners] == [("prm", True)]
    assert prime.roles == ("prm", "reference")


def test_a_preparation_reads_the_entropy_in_a_recipe(
    monkeypatch: pytest.MonkeyPatch, recipe: Path, tmp_path: Path
) -> None:
    """The 80/20 rule; what it sees is what the update measures while the policy is the same."""
    seen: list[float] = []

    def sharpest(entropy: torch.Tensor, response_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        known = entropy[response_mask > 0]
        seen.append(float(known.mean()))
        return {"is_fork": (entropy >= known.quantile(0.8)).to(torch.float32)}

    def forking(log_probs: Any, advantages: Any, is_fork: Any, entropy: Any) -> Any:
        return -log_probs * advantages * is_fork, {}

    registered_for_now(monkeypatch, "forking", forking, sharpest)
    settings = ["algorithm.policy_loss=forking", "actor.mini_batch_size=null", "trainer.total_steps=2"]
    settings += ["trainer.evaluation={before: false, after: false, every: null}", "checkpoint.export=false"]
    inline("train", str(recipe), *settings, f"trainer.run_dir={tmp_path / 'run'}")
    told = [line["actor/entropy"] for line in metrics(tmp_path / "run")]
    assert len(told) == 2
    np.testing.assert_allclose(seen, told, rtol=1e-5)


def test_bypass_takes_the_samplers_log_probs() -> None:
    correction = BypassConfig()
    config = algorithm(advantage=FunctionConfig("reinforce_pp"), rollout_correction=correction)
    (producer,) = plan_program(config).producers
    assert producer.method.__name__ == "adopt_rollout_log_prob"


def test_bypass_refuses_what_only_a_forward_of_the_old_policy_gives() -> None:
    with pytest.raises(ConfigError, match=full_text("'sum_p_squared', which is of the policy")):
        stages(["sum_p_squared"], "otb", bypass=True)


def test_a_column_that_nobody_makes_is_named() -> None:
    with pytest.raises(ConfigError, match=full_text("'gold_log_probs', which nothing")):
        stages(["gold_log_probs"], "the loss")


def index(**columns: Any) -> BatchRef:
    rows = len(next(iter(columns.values())))
    made = {ROW_ID: np.arange(rows), "step_index": np.zeros(rows, np.int32)}
    return BatchRef(Batch.of({**made, **{k: np.asarray(v) for k, v in columns.items()}}))


def stepped(stage: Stage, batch: BatchRef, **shared: Any) -> BatchRef:
    """What a stage that asks no worker makes of the batch in the fourth step."""

    async def main() -> BatchRef:
        return await stage(batch, Step(3, 0, cast(Cluster, None), cast(Roles, None), **shared))

    return asyncio.run(main())


def test_resampled_rows_weigh_as_if_they_stood_there_repeatedly() -> None:
    config = algorithm(resample=FunctionConfig("pf_ppo", {"strategy": "best"}))
    batch = index(
        reward=np.array([1.0, 0.0, 0.0, 1.0], np.float32),
        group_id=[7, 7, 9, 9],
        num_trained_tokens=[2, 5, 4, 3],
        mini_batch=[0, 0, 0, 0],
    )
    assert config.algorithm.resample is not None
    batch = stepped(Resampling(config.algorithm.resample), batch)
    assert batch.index.scalars("row_id").tolist() == [0, 3]  # the best of each prompt, twice
    assert batch.index.scalars("sample_weight").tolist() == [2.0, 2.0]
    weight = stepped(ActorWeights(config), batch).index.scalars("loss_weight")
    assert weight == pytest.approx([2 / 10, 2 / 10])


def test_truncated_rows_carry_no_loss_where_asked() -> None:
    batch = index(
        num_trained_tokens=[2, 3], mini_batch=[0, 0], finish_reason=np.array(["length", "stop"], object)
    )
    plain = stepped(ActorWeights(algorithm()), batch).index.scalars("loss_weight")
    masked = stepped(ActorWeights(algorithm(mask_truncated=True)), batch).index.scalars("loss_weight")
    assert plain == pytest.approx([1 / 5, 1 / 5])
    assert masked == pytest.approx([0.0, 1 / 3])


@pytest.mark.parametrize(
    ("changes", "writes"),
    [
        ({}, ("loss_weight",)),
        ({"kl": KlConfig("k3", "loss", 0.1)}, ("loss_weight", "kl_coef")),
        ({"positive_lm_coef": 0.1}, ("loss_weight", "lm_weight")),
    ],
)
def test_weights_are_the_columns_that_the_stage_says_it_writes(
    changes: dict[str, Any], writes: tuple[str, ...]
) -> None:
    batch = index(num_trained_tokens=[2, 3], mini_batch=[0, 0], accuracy=[1.0, 0.0])
    config = algorithm(**changes)
    stage, numbers = ActorWeights(config), Coefficients(config.algorithm).read
    made = stepped(stage, batch, coefficients=numbers).index
    assert stage.writes == writes == tuple(made.without(*batch.index.columns).columns)
    assert [made.array(name).type for name in writes] == [column(name).type for name in writes]


def test_language_model_weights_are_the_mean_over_their_tokens() -> None:
    tokens, mini_batch = np.array([4, 0, 6, 5]), np.array([0, 0, 0, 1])
    assert lm_weights(tokens, mini_batch, 0.5) == pytest.approx([0.05, 0.0, 0.05, 0.1])


def test_mini_batches_that_weigh_nothing_take_no_optimizer_step() -> None:
    batch = index(mini_batch=[0, 0, 1, 2], loss_weight=[0.0, 0.0, 0.5, 0.0], lm_weight=[0.0, 0.0, 0.0, 0.1])
    order = [[2, 0, 1], [0, 1, 2]]
    assert without_idle(order, batch, "mini_batch", "loss_weight") == ([[1], [1]], 4)
    assert without_idle(order, batch, "mini_batch", "loss_weight", "lm_weight") == ([[2, 1], [1, 2]], 2)


def test_positive_example_loss_is_the_mean_log_loss_of_right_answers() -> None:
    """Two rows, the first right: the gradient is the policy's plus μ · (-1/L) on the first row's tokens."""
    log_probs = torch.tensor([-1.0, -2.0, -0.5, -0.25], dtype=torch.float64, requires_grad=True)
    columns = {
        "response_mask": torch.ones(4),
        "rollout_log_probs": log_probs.detach(),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
        "loss_weight": torch.full((4,), 0.25, dtype=torch.float64),
        "lm_weight": torch.tensor([0.05, 0.05, 0.0, 0.0], dtype=torch.float64),
    }
    loss = ActorLoss(AlgorithmConfig(positive_lm_coef=0.1), on_policy=True)
    assert not loss.zero_where_advantage_is_zero
    total, found = loss({"log_probs": log_probs}, columns, torch.tensor([0, 2, 4], dtype=torch.int32))
    total.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.3, -0.3, 0.25, 0.25])
    numerator, denominator = found["actor/lm_loss"]
    assert (numerator.item(), denominator.item()) == (3.0, 2.0)


def test_rows_of_no_loss_weight_have_no_part_in_policy_terms_or_metrics() -> None:
    """A pretraining row (loss_weight 0, lm_weight > 0) adds its language-model loss and nothing else."""
    log_probs = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    columns = {
        "response_mask": torch.ones(2),
        "rollout_log_probs": torch.tensor([-1.0, 0.0], dtype=torch.float64),
        "advantages": torch.tensor([1.0, float("nan")], dtype=torch.float64),
        "loss_weight": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "lm_weight": torch.tensor([0.0, 0.5], dtype=torch.float64),
    }
    loss = ActorLoss(AlgorithmConfig(pretrain_coef=0.5), on_policy=True)
    total, found = loss({"log_probs": log_probs}, columns, torch.tensor([0, 1, 2], dtype=torch.int32))
    total.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-1.0, -0.5]
    assert float(found["rollout/log_prob_gap"][0]) == 0.0
    assert float(found["rollout/log_prob_gap"][1]) == 1.0


def rollout_weighted(weight: float) -> torch.Tensor:
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    columns = {
        "response_mask": torch.ones(2),
        "rollout_log_probs": log_probs.detach(),
        "advantages": torch.tensor([1.0, 1.0], dtype=torch.float64),
        "loss_weight": torch.full((2,), 0.5, dtype=torch.float64),
        "rollout_weights": torch.full((2,), weight, dtype=torch.float64),
    }
    correction = RolloutCorrectionConfig(importance=ImportanceConfig())
    config = AlgorithmConfig(rollout_correction=correction)
    total, _ = ActorLoss(config, on_policy=True)(
        {"log_probs": log_probs}, columns, torch.tensor([0, 2], dtype=torch.int32)
    )
    total.backward()
    assert log_probs.grad is not None
    return log_probs.grad


def test_rollout_weights_multiply_the_policy_loss() -> None:
    assert rollout_weighted(1.0).tolist() == [-0.5, -0.5]  # ratio 1: no correction
    assert rollout_weighted(0.5).tolist() == [-0.25, -0.25]


FIRST_IS_EVEN = "reward.functions=[tests/trainers/scorers.py:first_is_even]"
# Programs with state beside the actor's: the PRM, a cost critic with its multiplier, a moving reference,
# pretraining rows that follow from the step.
STATEFUL = {
    "prime": ["algorithm.advantage=prime", "prm.lr=1e-3", "reference.token_budget=512"],
    "safe_rlhf": [
        "algorithm.advantage=safe_rlhf",
        "algorithm.constraint={cost: first_is_even, limit: 0.1, lr: 0.5}",
        "critic={token_budget: 512, mini_batch_size: 2}",
    ],
    "sppo": [
        "algorithm={advantage: win_rate, policy_loss: {name: sppo, eta: 5.0}}",
        "algorithm.aggregation=seq-mean-token-mean",
        "reference={token_budget: 512, refresh_every: 2}",
    ],
    "ptx": [
        "data.pretrain=[{type: function, task: rondo.recipes.quickstart.demonstrations, "
        "options: {size: 16}}]",
        "data.pretrain_batch_size=3",
        "algorithm.pretrain_coef=0.3",
        "algorithm.policy_loss=kl_cov",  # whose selection at each optimizer step must not see those rows
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_resume_equals_undisturbed(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    common = [
        FIRST_IS_EVEN,
        *STATEFUL[name],
        "checkpoint.every=2",
        "data.eval=[]",
        "trainer.evaluation.every=null",
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    inline("train", str(recipe), *common, "trainer.total_steps=4", f"trainer.run_dir={whole}")
    inline("train", str(recipe), *common, "trainer.total_steps=2", f"trainer.run_dir={cut}")
    inline("train", str(recipe), *common, "trainer.total_steps=4", f"trainer.run_dir={cut}")
    assert metrics(cut) == metrics(whole)
    assert weights(cut) == weights(whole)


@pytest.mark.slow
def test_a_step_without_signal_leaves_the_policy_where_it_is(tmp_path: Path) -> None:
    """Constant rewards: no optimizer step, so that neither weight decay nor momentum moves the weights."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    constant = ["reward.functions=[{name: overlong, max_tokens: 100, buffer: 1}]", "data.eval=[]"]
    constant += ["trainer.evaluation.every=null", "actor.optimizer.weight_decay=0.5"]
    for steps in (1, 2):
        run = f"trainer.run_dir={tmp_path / str(steps)}"
        inline("train", str(recipe), *constant, f"trainer.total_steps={steps}", run)
    assert weights(tmp_path / "1") == weights(tmp_path / "2")
    assert metrics(tmp_path / "2")[-1]["actor/idle_mini_batches"] == 2


HOOKS = """
def graded(reward, group_id):
    return None


def of_tokens(response_mask):
    return None


def uniform(step_reward, group_id):
    return step_reward


def of_turns(log_probs, turn_rewards):
    return -log_probs * turn_rewards, {}
"""
CRITIC = "critic={token_budget: 512}"
JUDGE = "reward.models=[{path: somewhere, name: judge, token_budget: 512}]"
ERRORS = (
    ("prm.beta=0.1", "prm.beta is set, but no chosen function reads process_rewards"),
    ("teacher.top_k=4", "teacher.top_k is set, but no chosen function reads the teacher's"),
    (
        "teacher={path: t, top_k: 4, token_budget: 512} algorithm.advantage=teacher_gap",
        "teacher.top_k is set, but no chosen function reads teacher_topk_*",
    ),
    (
        "actor.token_budget=1",
        "argument 'actor.token_budget=1': actor.token_budget=1 is less than the longest sequence, data.max",
    ),
    (
        "reference.token_budget=1 algorithm.kl={name: k3, where: loss, coef: 0.1}",
        "argument 'reference.token_budget=1': reference.token_budget=1 is less than the longest sequence",
    ),
    ("reference.refresh_every=2", "reference.refresh_every is set, but no chosen function reads"),
    (
        "algorithm.value_loss={name: clipped_value, clip: 0.1}",
        "algorithm.value_loss.clip is set, but no chosen",
    ),
    ("algorithm.constraint={cost: harm}", "algorithm.constraint.cost=harm is no score of this run"),
    (
        "algorithm.constraint={cost: even_share}",
        "algorithm.constraint is set, but algorithm.advantage=grpo reads neither multiplier nor token_costs",
    ),
    ("actor.logits_bytes=null", "actor.logits_bytes=null: kernels in triton run"),
    ("reference.logits_bytes=null", "reference.logits_bytes=null: kernels in triton run"),
    ("critic.logits_bytes=null", "this model has a value head, and makes no logits"),
    (
        "algorithm.policy_loss=forward_kl_topk teacher={path: t, logits_bytes: null}",
        "teacher.logits_bytes=null: its kernels compute the log-probs of the sampled tokens",
    ),
    (
        "algorithm.policy_loss=reverse_kl_topk teacher.path=t actor.logits_bytes=null",
        "actor.logits_bytes=null: its kernels compute the log-probs of the sampled tokens",
    ),
    (
        "algorithm.resample=pf_ppo",
        "use an estimator that does not compare a prompt's samples (gae, reinforce_pp)",
    ),
    (
        f"algorithm.advantage=gae {CRITIC} critic.warmup_steps=3",
        "critic.warmup_steps=3 leaves no step in which the actor learns: the run has 3",
    ),
    (f"{JUDGE} algorithm.filter=HOOKS:graded", "reads reward, which is without the scores of reward.models"),
    (f"{JUDGE} algorithm.advantage=gigpo", "algorithm.advantage=gigpo reads step_reward, which is without"),
    (
        f"{JUDGE} algorithm.advantage=reinforce_pp algorithm.resample=HOOKS:uniform",
        "reads step_reward, which is without",
    ),
    (
        "algorithm.filter=HOOKS:of_tokens",
        "reads 'response_mask', which is not there yet or is per token; it may",
    ),
    ("reward.models=[{path: p, name: rollout}]", "is the name of a role"),
    ("algorithm.advantage=teacher_gap", "teacher.path is not set"),
    (
        f"algorithm.advantage=bi_level_gae {CRITIC}",
        "algorithm.advantage=bi_level_gae reads turn_flags, which is of an agent's turns, and there is no",
    ),
    ("algorithm.policy_loss=HOOKS:of_turns", "hooks.py:of_turns reads turn_rewards, which is of an agent's"),
    ("algorithm.advantage=safe_rlhf", "set algorithm.constraint.cost"),
    ("algorithm.pretrain_coef=0.1", "data.pretrain and algorithm.pretrain_coef"),
    ("reward.models=[{weight: 0.5}]", "has no path"),
    ("rollout.n=1", "rollout.n = 1, but algorithm.advantage = grpo compares the trajectories of one"),
    (
        "rollout.n=4 algorithm.advantage={name: passk_analytic, k: 5}",
        "algorithm.advantage.k = 5, but a prompt has rollout.n = 4 answers",
    ),
    (
        "rollout.n=1 algorithm.advantage=reinforce_pp algorithm.policy_loss=pacs",
        "rollout.n = 1, but algorithm.policy_loss = pacs compares the trajectories of one",
    ),
)


@pytest.mark.parametrize(("keys", "expected"), ERRORS)
def test_what_does_not_fit_is_an_error(keys: str, expected: str, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks.py"
    hooks.write_text(HOOKS)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    overrides = re.split(r" (?=[a-z]+[.=])", keys.replace("HOOKS", str(hooks)))
    done = inline("train", str(recipe), *overrides, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2
    assert expected in " ".join(done.stderr.split()), done.stderr


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    wrong = {
        "critic.epochs": "critic.epochs=2",
        "rollout.n": "rollout.n=1",
        "tracking.trackers.0": "tracking.trackers=[wandbb]",
        "model.chat_template": "model.chat_template=nowhere.jinja",
        "data.train.0": "data.train=[{type: function, task: 'nowhere.py:rows'}]",
    }
    arguments = [*wrong.values(), "algorithm.advantage=grpo"]
    with pytest.raises(ConfigError) as caught:
        check_rl(load([str(recipe)], arguments))
    found = {problem.key: str(problem) for problem in caught.value.problems}
    assert set(found) == set(wrong)
    assert all(found[key].startswith(f"argument '{argument}': ") for key, argument in wrong.items())


def test_right_or_wrong_is_asked_of_every_source(tmp_path: Path) -> None:
    """The only score says which answers are right, and a source that just the model scores has none."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    source = RECIPE["data"]["train"][0]
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for file in ("model.safetensors", "value_head.safetensors"):
        save_file({}, tmp_path / file)
    overrides = [
        JUDGE.replace("somewhere", str(tmp_path)),
        "reward.functions=[{name: 'tests/trainers/scorers.py:even_share', sources: [other]}]",
        f"data.train={json.dumps([source, {**source, 'name': 'other'}])}",
    ]
    run = f"trainer.run_dir={tmp_path / 'run'}"
    done = inline("train", str(recipe), *overrides, "algorithm.positive_lm_coef=0.1", run, check=False)
    assert done.returncode == 2
    assert "reward.accuracy=even_share, is no score of source 'train'" in " ".join(done.stderr.split())


def test_a_step_is_described_in_the_order_in_which_it_runs() -> None:
    judge = RewardModelConfig(name="judge", path="p")
    config = Config(
        reward=RewardConfig((RewardFunctionConfig("gsm8k"),), (judge,)),
        algorithm=AlgorithmConfig(
            advantage=FunctionConfig("prime"),
            filter=FilterConfig("mixed_accuracy"),
            resample=FunctionConfig("pf_ppo"),
            rollout_correction=RolloutCorrectionConfig(importance=ImportanceConfig()),
            policy_loss=FunctionConfig("kl_cov"),
            pretrain_coef=0.1,
            kl=KlConfig("k3", "loss", 0.1, AdaptiveKlConfig()),
        ),
        reference=ReferenceConfig(refresh_every=3),
    )
    lines = plan_program(config).describe(config_for(config, platform_of("cpu")))
    steps = (
        "take complete prompt groups from the buffer; mixed_accuracy (algorithm.filter)",
        "mini_batch, prm_mini_batch <- controller, by prompt groups",
        "score/judge, reward <- judge.compute_reward",
        "sample_weight <- controller (algorithm.resample=pf_ppo)",
        "old_log_probs <- actor",
        "ref_log_probs <- reference",
        "prm.update_prm reads",
        "process_rewards <- prm",
        "advantages <- controller (prime)",
        "rollout_weights, response_mask <- rollout correction",
        "loss_weight <- controller (token-mean)",
        "covariance_selected <- controller, per mini-batch, before each optimizer step (kl_cov)",
        "actor.update_actor reads",
        "adapt the KL coefficient",
        "every 3 steps: reference <- actor",
        "publish weights to the rollout engines",
    )
    assert [line[: len(step)] for line, step in zip(lines, steps, strict=True)] == list(steps)
    assert lines[12].endswith("with rows of data.pretrain in every mini-batch")
    assert lines[-1].endswith("(native, in the host's process), in place: one storage for both")
    greedy = algorithm(advantage=FunctionConfig("remax"))
    assert (
        "each with the reward of a greedy answer"
        in plan_program(greedy).describe(config_for(greedy, platform_of("cpu")))[0]
    )
