"""The table of columns: every stage, producer and worker method keeps to it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path

import pyarrow as pa
import pytest

import rondo.workers
from rondo.config.schema import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    BypassConfig,
    Config,
    ConstraintConfig,
    FunctionConfig,
    KlConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RolloutCorrectionConfig,
)
from rondo.controller.worker import MARK
from rondo.core.columns import (
    ADVANTAGE_STAGE,
    CORRECTION,
    EPISODE,
    ESTIMATOR,
    LOSS_WEIGHT,
    MINI_BATCH,
    RESAMPLING,
    SCORE,
    SCORE_PREFIX,
    SCORERS,
    TABLE,
    TOKENIZER,
    UPDATE_PLAN,
    column,
    declared,
    documented,
    made_by,
    per_row,
)
from rondo.core.errors import DataError
from rondo.data.rows import index_columns, rows_from_trajectories
from rondo.trainers.program.advantages import MADE_OF, AdvantageStage
from rondo.trainers.program.plan import HOOK_COLUMNS, plan_program
from rondo.trainers.program.producers import ADOPT, PRODUCERS
from rondo.trainers.program.stages import (
    CorrectionStage,
    PreparationStage,
    Production,
    Resampling,
    RewardModelScores,
    SeesImages,
)
from rondo.trainers.program.update import ActorWeights, LearnerUpdate, MiniBatches

ROOT = Path(__file__).resolve().parents[2]
MAKERS = {
    MiniBatches: UPDATE_PLAN,
    ActorWeights: UPDATE_PLAN,
    LearnerUpdate: UPDATE_PLAN,
    RewardModelScores: SCORERS,
    Resampling: RESAMPLING,
    AdvantageStage: ESTIMATOR,
    CorrectionStage: CORRECTION,
}


def test_every_name_is_declared_once() -> None:
    names = [c.name for c in TABLE]
    assert len(set(names)) == len(names)
    assert column("reward").made_by == EPISODE
    with pytest.raises(DataError, match="no column 'rewards'"):
        declared("reward", "rewards")


def test_a_family_is_one_declaration_of_many_columns() -> None:
    assert SCORE("harmless") == "score/harmless"
    assert SCORE.member("score/harmless") == "harmless"
    assert MINI_BATCH("critic") == "critic_mini_batch"
    assert column("critic_mini_batch") is MINI_BATCH
    assert MINI_BATCH.member("mini_batch") is None
    assert SCORE.member("scores") is None
    assert [c.name for c in TABLE if c.name.startswith(SCORE_PREFIX)] == [SCORE.name]
    assert LOSS_WEIGHT.member("prm_mini_batch") is None


def test_rows_have_the_columns_and_types_of_the_table() -> None:
    rows = rows_from_trajectories([], {"score/helpful": "helpful"})
    assert set(rows.columns) == {*made_by(EPISODE, TOKENIZER), "score/helpful"}
    assert per_row(rows.columns) == (*index_columns(["helpful"]), *made_by(TOKENIZER))
    assert index_columns(greedy_baseline=True) == HOOK_COLUMNS == (*index_columns(), "greedy_reward")
    assert column("response_mask").type == pa.list_(pa.uint8())
    assert column("row_id").type == pa.int64()


PROGRAMS = {
    "everything": AlgorithmConfig(
        advantage=FunctionConfig("safe_rlhf"),
        policy_loss=FunctionConfig("clip_cov"),
        kl=KlConfig("k3", coef=0.1, where="loss", controller=AdaptiveKlConfig()),
        constraint=ConstraintConfig(cost="harm"),
        resample=FunctionConfig("pf_ppo"),
        rollout_correction=RolloutCorrectionConfig(mode="auto"),
        positive_lm_coef=0.1,
    ),
    "prime": AlgorithmConfig(advantage=FunctionConfig("prime")),
    "otb": AlgorithmConfig(advantage=FunctionConfig("otb")),
    "teacher": AlgorithmConfig(policy_loss=FunctionConfig("forward_kl_topk")),
    "bypass": AlgorithmConfig(advantage=FunctionConfig("reinforce_pp"), rollout_correction=BypassConfig()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_stages_make_what_the_table_says_they_make(name: str) -> None:
    reward = RewardConfig(
        functions=(RewardFunctionConfig("gsm8k"),), models=(RewardModelConfig(name="harm", path="x"),)
    )
    base = Config(reward=reward, algorithm=PROGRAMS[name])
    config = dataclasses.replace(base, trainer=dataclasses.replace(base.trainer, max_staleness=1))
    program = plan_program(config)
    # SeesImages makes no column.
    stages = [one for one in (*program.scoring, *program.stages) if not isinstance(one, SeesImages)]
    assert {type(stage) for stage in stages} - {Production} <= {*MAKERS, PreparationStage}
    # Between a policy loss and its `prepare`: no columns of the table.
    prepares = [program.preparation, *(stage for stage in stages if isinstance(stage, PreparationStage))]
    own = {name for one in prepares if one is not None for name in one.writes}
    assert not own & {one.name for one in TABLE}
    for stage in stages:
        if isinstance(stage, PreparationStage):
            continue
        maker = stage.producer.role if isinstance(stage, Production) else MAKERS[type(stage)]
        first = set(stage.writes) - set(made_by(EPISODE))  # what it makes anew is the episode's
        assert {name: column(name).made_by for name in first} == dict.fromkeys(first, maker)
        for read in getattr(stage, "columns", ()):
            column(read)
    for learner in program.learners:
        declared(*learner.columns)
    declared(*(set(program.actor_loss.columns) - own))


def test_producers_are_the_makers_of_their_columns() -> None:
    for producer in (*PRODUCERS, ADOPT):
        assert {column(name).made_by for name in producer.columns} == {producer.role}
        declared(*producer.reads)


def test_the_advantage_stage_makes_its_own_inputs() -> None:
    assert set(MADE_OF) == set(made_by(ADVANTAGE_STAGE))


def test_worker_methods_read_and_write_declared_columns() -> None:
    seen = set()
    for module in pkgutil.iter_modules(rondo.workers.__path__, "rondo.workers."):
        for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            for _, method in inspect.getmembers(found, inspect.isfunction):
                mark = getattr(method, MARK, None)
                if mark is not None:
                    seen |= set(declared(*mark.reads, *mark.writes))
    assert {"prompt_ids", "old_log_probs", "process_rewards", "teacher_topk_ids"} <= seen


def test_the_page_has_the_table() -> None:
    assert documented() in (ROOT / "docs" / "columns.md").read_text(encoding="utf-8")


def test_the_page_on_recorded_rollouts_names_every_column_and_its_type() -> None:
    page = (ROOT / "docs" / "recorded.md").read_text(encoding="utf-8").split("## Files of your own")[1]
    for name in made_by(EPISODE, TOKENIZER):
        found = column(name)
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line)
        said = f"list of {found.type_name}" if found.per == "token" else found.type_name
        assert row.split("|")[2].strip() == said
