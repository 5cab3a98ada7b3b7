"""The loop in one process, on a tiny model: identities between variants, versions, and what failures do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from rondo.config import load
from rondo.core.errors import ConfigError, RewardError, TrainError, WorkerError
from rondo.trainers.commands.train import train
from tests.messages import full_text
from tests.trainers.conftest import metrics, weights


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Iterator[Any]:
    """run(name, *overrides) -> the run folder."""

    def start(name: str, *overrides: str) -> Path:
        train(load([str(recipe)], [f"trainer.run_dir={tmp_path / name}", "cluster.threads=1", *overrides]))
        return tmp_path / name

    return start


def exported(run: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(run / "export" / "model.safetensors")


def moved(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Norm of the difference over the norm."""
    difference = sum(float(((a[name] - b[name]) ** 2).sum()) for name in a)
    return (difference / sum(float((a[name] ** 2).sum()) for name in a)) ** 0.5


def test_the_run_folder_holds_what_the_docs_say(run: Any) -> None:
    folder = run("files", "checkpoint.every=2")
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["eval/greedy/reward"] == pytest.approx(
        np.mean(
            [
                json.loads(row)["reward"]
                for row in (folder / "evaluations/step-000000.jsonl").read_text().splitlines()
            ]
        )
    )
    rows = pq.read_table(folder / "rollouts" / "step-000001.parquet").to_pydict()
    assert len(rows["reward"]) == 16
    assert sorted(set(rows["group_id"])) == [0, 1, 2, 3]
    assert lines[1]["reward/mean"] == pytest.approx(np.mean(rows["reward"]))
    for row in range(16):
        ids, reward = np.array(rows["response_ids"][row]), rows["reward"][row]
        assert reward == pytest.approx(float((ids % 2 == 0).mean()))
        assert rows["policy_versions"][row] == [0] * len(ids)
    third = pq.read_table(folder / "rollouts" / "step-000003.parquet").to_pydict()
    assert {version for versions in third["policy_versions"] for version in versions} == {2}
    summary = json.loads((folder / "summary.json").read_text())
    wanted = {
        "reward_first",
        "reward_last",
        "eval_before",
        "eval_after",
        "steps",
        "wall_seconds",
        "cpu_seconds",
    }
    wanted |= {"generated_tokens", "trained_tokens", "peak_memory_bytes", "phase_shares"}
    assert wanted <= set(summary)
    assert summary["steps"] == 3
    generated = sum(
        len(ids)
        for step in (1, 2, 3)
        for ids in pq.read_table(folder / f"rollouts/step-00000{step}.parquet")["response_ids"].to_pylist()
    )
    assert summary["generated_tokens"] >= generated
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]


def test_sampler_and_trainer_agree(run: Any) -> None:
    for line in metrics(run("gap"))[1:]:
        assert line["rollout/log_prob_gap"] < 1e-5


def test_one_update_per_batch_needs_no_old_log_probs_and_equals_recomputing_them(
    run: Any, recipe: Path
) -> None:
    detached = run("detached", "actor.mini_batch_size=4", "trainer.total_steps=2")
    # the same update, but with the old log-probs recomputed because a KL with a negligible weight reads them
    recomputed = run(
        "recomputed",
        "actor.mini_batch_size=4",
        "trainer.total_steps=2",
        "algorithm.kl={name: k1, where: reward, coef: 1.0e-12}",
    )
    assert moved(exported(detached), exported(recomputed)) < 1e-6


def test_micro_batching_does_not_change_the_run(run: Any) -> None:
    small = run("small", "actor.token_budget=80")
    large = run("large", "actor.token_budget=4096")
    assert moved(exported(small), exported(large)) < 1e-5


def test_inline_and_threaded_are_the_same_bits(run: Any) -> None:
    assert weights(run("inline", "cluster.inline=true")) == weights(run("threaded"))


def test_one_step_off_policy_keeps_the_bound_and_its_bits(run: Any) -> None:
    first = run("a", "trainer.max_staleness=1", "trainer.total_steps=4")
    second = run("b", "trainer.max_staleness=1", "trainer.total_steps=4")
    assert weights(first) == weights(second)
    assert [line["buffer/staleness_mean"] for line in metrics(first)[1:]] == [0.0, 1.0, 1.0, 1.0]


def test_ppo_trains_the_critic_alone_while_it_warms_up(run: Any) -> None:
    ppo = (
        "algorithm.advantage=gae",
        "critic.warmup_steps=2",
        "critic.token_budget=512",
        "critic.optimizer.lr=1e-2",
    )
    after = run("after", *ppo, "trainer.total_steps=3")
    assert ["actor/grad_norm" in line for line in metrics(after)[1:]] == [False, False, True]
    losses = [line["critic/loss"] for line in metrics(after)[1:]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "aggregation",
    [
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "{name: seq-mean-token-sum-norm, divisor: 8}",
    ],
)
def test_every_aggregation_trains(run: Any, aggregation: str) -> None:
    folder = run(
        "agg",
        f"algorithm.aggregation={aggregation}",
        "trainer.total_steps=2",
        "trainer.evaluation.every=null",
    )
    assert all(line["actor/grad_norm"] > 0 for line in metrics(folder)[1:])


def test_kl_in_the_loss_starts_at_zero_and_pulls_back(run: Any) -> None:
    four = ("trainer.total_steps=4", "actor.optimizer.lr=3e-3", "actor.mini_batch_size=4")
    free = run("free", *four)
    held = run("held", *four, "algorithm.kl={name: k3, where: loss, coef: 5.0}")
    start = run("still", "trainer.total_steps=1", "actor.optimizer.lr=1e-12")
    assert metrics(held)[1]["actor/kl_loss"] < 1e-4
    assert moved(exported(start), exported(held)) < moved(exported(start), exported(free))


def test_kl_in_the_reward_adapts_its_coefficient_after_use(run: Any) -> None:
    adaptive = "{name: adaptive, target: 0.5, horizon: 100}"
    kl = f"algorithm.kl={{name: k1, where: reward, coef: 0.1, controller: {adaptive}}}"
    lines = metrics(run("adaptive", kl, "trainer.total_steps=3"))[1:]
    assert lines[0]["actor/kl_coef"] == pytest.approx(0.1)
    assert lines[0]["actor/kl_reward"] == pytest.approx(0.0, abs=1e-5)
    assert lines[1]["actor/kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 16 / 100))


@pytest.mark.slow
def test_numbers_that_adapt_go_on_with_a_run(run: Any) -> None:
    """An entropy bonus, an estimator that reads a number, and a KL coefficient: two steps, then two more from
    the checkpoint, are four; each step uses what the one before made.
    """
    settings = (
        "algorithm.coefficients={"
        "alpha: {name: entropy_target, target: 99.0, step: 0.125, most: 9, start: 0.5}, "
        f"scale: {{name: '{__file__}:halved', start: 4.0}}}}",
        "algorithm.terms=[{name: entropy, by: alpha, coef: 0.01}]",
        f"algorithm.advantage={{name: '{__file__}:scaled'}}",
        "algorithm.kl={name: k3, where: loss, coef: 0.1}",
        "algorithm.kl.controller={name: adaptive, target: 0.5, horizon: 100}",
        "checkpoint.every=2",
    )
    whole = run("whole", *settings, "trainer.total_steps=4")
    for steps in (2, 4):
        parts = run("parts", *settings, f"trainer.total_steps={steps}")
    assert weights(parts) == weights(whole)
    lines = [line for line in metrics(whole) if "actor/loss" in line]
    assert [line["actor/coefficient/alpha"] for line in lines] == [0.5, 0.625, 0.75, 0.875]
    assert [line["actor/coefficient/scale"] for line in lines] == [4.0, 2.0, 1.0, 0.5]
    of_parts = [line for line in metrics(parts) if "actor/loss" in line]
    assert [line["actor/kl_coef"] for line in of_parts] == [line["actor/kl_coef"] for line in lines]
    unscaled = run(
        "unscaled",
        *settings[3:],
        f"algorithm.advantage={{name: '{__file__}:plain'}}",
        "trainer.total_steps=1",
    )
    assert lines[0]["actor/advantage_max"] == 4 * metrics(unscaled)[1]["actor/advantage_max"] > 0


@pytest.mark.slow
def test_a_choice_among_answers_goes_on_with_a_run(run: Any) -> None:
    """Of four groups a step the two of largest spread: two steps and two more are four, and what is trained
    on is theirs alone; a choice of all is none.
    """
    half = "algorithm.select={name: reward_spread, by: count, share: 0.5}"
    every = "algorithm.select={name: reward_spread, by: count, share: 1.0}"
    whole = run("whole", half, "checkpoint.every=2", "trainer.total_steps=4")
    for steps in (2, 4):
        parts = run("parts", half, "checkpoint.every=2", f"trainer.total_steps={steps}")
    assert weights(parts) == weights(whole)
    lines = [line for line in metrics(whole) if "actor/loss" in line]
    assert {line["buffer/selected_share"] for line in lines} == {0.5}
    plain = run("plain", "trainer.total_steps=4")
    assert weights(run("all", every, "trainer.total_steps=4")) == weights(plain) != weights(whole)
    theirs = [line for line in metrics(plain) if "actor/loss" in line]
    assert lines[0]["reward/mean"] == theirs[0]["reward/mean"]  # of all that were generated


def halved(value: float, metrics: Any) -> float:
    assert metrics["rows"] == 16.0
    assert metrics["reward/min"] <= metrics["reward/mean"] <= metrics["reward/max"]
    return value / 2


def scaled(reward: Any, scale: Any) -> Any:
    return reward * scale


def plain(reward: Any) -> Any:
    return reward.clone()


def test_a_reward_that_can_be_learned_is_learned(run: Any) -> None:
    folder = run(
        "learns",
        "trainer.total_steps=25",
        "data.batch_size=8",
        "actor.optimizer.lr=3e-3",
        "trainer.evaluation.every=null",
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.2


def test_a_scorer_that_raises_stops_the_run_with_the_sample(run: Any) -> None:
    with pytest.raises((RewardError, WorkerError), match="no answer column"):
        run("raises", "reward.functions=[tests/trainers/scorers.py:raises]")


@pytest.mark.parametrize(("scorer", "said"), [("not_a_number", "nan"), ("a_string", "str")])
def test_a_scorer_that_returns_no_number_stops_the_run(run: Any, scorer: str, said: str) -> None:
    with pytest.raises((RewardError, WorkerError), match=said):
        run("odd", f"reward.functions=[tests/trainers/scorers.py:{scorer}]")


def test_failed_trajectories_are_dropped_counted_and_in_no_baseline(run: Any) -> None:
    folder = run("drops", "reward.functions=[tests/trainers/scorers.py:raises]", "reward.on_error=drop")
    lines = metrics(folder)[1:]
    assert all(line["reward/failed_share"] == 0.25 for line in lines)
    rows = pq.read_table(folder / "rollouts" / "step-000001.parquet").to_pydict()
    assert [o for o, i in zip(rows["outcome"], rows["sample_index"], strict=True) if i == 1] == [
        "reward_error"
    ] * 4


def test_a_scorer_that_hangs_is_timed_out(run: Any) -> None:
    folder = run(
        "hangs",
        "reward.functions=[tests/trainers/scorers.py:hangs]",
        "reward.timeout_seconds=0.3",
        "trainer.total_steps=1",
        "trainer.evaluation={before: false, after: false, every: null}",
    )
    assert metrics(folder)[0]["reward/failed_share"] == 0.25


def test_too_many_failures_stop_the_run(run: Any) -> None:
    with pytest.raises(RewardError, match="max_dropped_share"):
        run(
            "many",
            "reward.functions=[tests/trainers/scorers.py:raises]",
            "reward.on_error=drop",
            "reward.max_dropped_share=0.2",
        )


NO_EVALUATION = "trainer.evaluation={before: false, after: false, every: null}"


def test_a_scorer_that_is_down_stops_the_run_instead_of_eating_the_prompts(run: Any) -> None:
    down = (
        "reward.functions=[tests/trainers/scorers.py:never]",
        "reward.timeout_seconds=0.05",
        NO_EVALUATION,
    )
    with pytest.raises((RewardError, WorkerError), match="reward_timeout"):
        run("down", *down)


def test_dropped_groups_count_and_an_early_end_of_the_prompts_is_an_end(run: Any) -> None:
    dropped = (
        "reward.functions=[tests/trainers/scorers.py:always_raises]",
        "reward.on_error=drop",
        NO_EVALUATION,
    )
    with pytest.raises(TrainError, match="no prompt group could be trained"):
        run(
            "none",
            *dropped,
            "reward.max_dropped_share=1.0",
            "trainer.total_steps=null",
            "trainer.epochs=0.0625",
        )


def test_requests_that_expire_in_the_queue_are_failures_not_trajectories(run: Any) -> None:
    with pytest.raises((RewardError, WorkerError), match="rollout_error"):
        run("late", "rollout.deadline_seconds=1.0e-6", "rollout.max_concurrent=1", NO_EVALUATION)


def test_sections_of_roles_that_the_run_does_not_have_are_refused(run: Any) -> None:
    with pytest.raises(ConfigError, match=full_text("critic.optimizer.lr is set")):
        run("unused", "critic.optimizer.lr=1e-3")
    with pytest.raises(ConfigError, match=full_text("budget to 20008, or lower one of the two")):
        run("small", "algorithm.advantage=gae", "data.max_prompt_tokens=20000", "actor.token_budget=32768")


def test_a_column_that_nothing_produces_is_named(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text("def odd(reward, moon_phase):\n    return reward\n")
    with pytest.raises(ConfigError, match="moon_phase"):
        run("odd", f"algorithm.advantage={file}:odd")


def test_the_readme_estimator_runs(run: Any, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    code = readme.split("# my_advantage.py\n")[1].split("```")[0]
    file = tmp_path / "my_advantage.py"
    file.write_text(code)
    folder = run("mine", f"algorithm.advantage={{name: '{file}:best_of_group', scale: 2.0}}")
    assert metrics(folder)[1]["actor/grad_norm"] > 0


def test_the_readme_reward_runs(run: Any, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    file = tmp_path / "my_reward.py"
    file.write_text(readme.split("# my_reward.py\n")[1].split("```")[0])
    folder = run("mine", f"reward.functions=[{{name: '{file}:short_and_right', max_tokens: 24}}]")
    assert "reward/score/short_and_right/right" in metrics(folder)[1]
