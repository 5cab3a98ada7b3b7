"""What verl's keys say about rewards, and a run of the command line on rows of verl's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rondo.config.schema import RewardConfig, RewardFunctionConfig
from tests.rondo_verl.translated import BASE, load, message
from tests.trainers.conftest import RECIPE, inline, metrics

SPELLINGS = pytest.mark.parametrize(
    ("custom", "manager", "kwargs"),
    [
        ("custom_reward_function", "reward_model.reward_manager", "reward_model.reward_kwargs"),
        ("reward.custom_reward_function", "reward.reward_manager.name", "reward.reward_kwargs"),
    ],
    ids=["0.6.1", "main"],
)
OVERLONG = RewardFunctionConfig("overlong", 0.5, options={"max_tokens": 64, "buffer": 16, "bounded": False})
VERL = RewardFunctionConfig("verl")


def reward(*overrides: str) -> RewardConfig:
    return load([], [*BASE, *overrides]).config.reward


def notes(*overrides: str) -> str:
    return "\n".join(load([], [*BASE, *overrides]).notes)


def test_verls_rules_are_the_default() -> None:
    loaded = load([], BASE)
    assert loaded.config.reward == RewardConfig(functions=(VERL,), accuracy="verl/acc")
    assert "reward.accuracy=verl/acc, reward.functions=['verl']" in loaded.notes[0]
    for manager in ("naive", "prime", "dapo"):
        assert reward(f"reward_model.reward_manager={manager}").functions == (VERL,)


def test_rondos_own_keys_stand() -> None:
    """Then nothing of verl's default is there."""
    assert reward("reward.functions=[gsm8k]") == RewardConfig(functions=(RewardFunctionConfig("gsm8k"),))
    models = reward("reward.models=[{path: rm}]")
    assert (models.functions, models.accuracy) == ((), None)
    assert reward("reward.accuracy=verl").accuracy == "verl"
    said = notes("reward.functions=[gsm8k]", "reward_model.overlong_buffer.enable=True")
    assert "reward_model.overlong_buffer.enable has no meaning in rondo: reward.functions or" in said


@SPELLINGS
def test_a_function_of_the_users(custom: str, manager: str, kwargs: str) -> None:
    """verl waits longer for it than rondo does by itself."""
    own = RewardFunctionConfig("r.py:compute_score")
    alone = reward(f"{custom}.path=r.py")
    assert alone == RewardConfig(functions=(own,), accuracy="compute_score/acc", timeout_seconds=300.0)
    named = reward(f"{custom}.path=r.py", f"{custom}.name=f", f"+{custom}.reward_kwargs.bonus=2")
    assert named.functions == (RewardFunctionConfig("r.py:f", options={"bonus": 2}),)
    assert (
        reward(f"{custom}.path=pkg://mine.rewards", f"{custom}.name=f").functions[0].name == "mine.rewards:f"
    )
    assert reward(f"{custom}.path=null", f"{custom}.name=null").functions == (VERL,)
    assert reward(f"{custom}.path=r.py", "reward.timeout_seconds=5").timeout_seconds == 5.0
    later = reward(f"{custom}.path=r.py", "reward.functions=[gsm8k]")
    assert later == RewardConfig(functions=(RewardFunctionConfig("gsm8k"),))
    earlier = reward("reward.functions=[gsm8k]", f"{custom}.path=r.py")
    assert (earlier.functions, earlier.accuracy) == ((own,), "compute_score/acc")
    assert "weight is a key of reward.functions" in message(
        f"{custom}.path=r.py", f"+{custom}.reward_kwargs.weight=2"
    )


@SPELLINGS
def test_the_buffer_of_the_manager_dapo(custom: str, manager: str, kwargs: str) -> None:
    buffer = f"+{kwargs}.overlong_buffer_cfg"
    on = [f"{buffer}.enable=True", f"{buffer}.len=16", f"{buffer}.penalty_factor=0.5", f"{buffer}.log=False"]
    longest = f"+{kwargs}.max_resp_len=64"
    assert reward(f"{manager}=dapo", *on, longest).functions == (VERL, OVERLONG)
    own = reward(f"{manager}=dapo", *on, longest, f"{custom}.path=r.py").functions
    assert own == (RewardFunctionConfig("r.py:compute_score"), OVERLONG)
    off = (f"{manager}=dapo", f"{buffer}.enable=False", f"{buffer}.len=0", longest)
    assert reward(*off).functions == (VERL,)
    assert f"{kwargs} has no meaning in rondo: overlong_buffer is not enabled" in notes(*off)
    assert reward(*on, longest).functions == (VERL,)
    assert f"{kwargs} has no meaning in rondo: the manager naive does not read it" in notes(*on, longest)
    assert "at most max_resp_len, got 16 and max_resp_len=8" in message(
        f"{manager}=dapo", *on, f"+{kwargs}.max_resp_len=8"
    )
    assert "not llm_judge_kwargs" in message(f"{manager}=dapo", f"+{kwargs}.llm_judge_kwargs.model=x")


def test_the_buffer_of_recipe_dapo() -> None:
    """Its manager is dapo where none is written, and the longest response is the run's."""
    section = "reward_model.overlong_buffer"
    on = [f"{section}.enable=True", f"{section}.len=16", f"{section}.penalty_factor=0.5"]
    assert reward(*on, "data.max_response_length=64").functions == (VERL, OVERLONG)
    assert reward(f"{section}.enable=False", f"{section}.len=16").functions == (VERL,)
    assert reward("reward_model.reward_manager=naive", *on).functions == (VERL,)


def test_a_reward_model_that_reads_the_policys_tokens() -> None:
    """Then it is all that scores, as in 0.6.1."""
    on = ("reward_model.enable=True", "reward_model.model.input_tokenizer=null")
    sizes = ("reward_model.forward_max_token_len_per_gpu=98304", "reward_model.micro_batch_size_per_gpu=32")
    (model,) = reward(*on, *sizes, "reward_model.model.path=rm").models
    assert (model.path, model.token_budget, model.offload_params, model.weight) == ("rm", 98304, False, 1.0)
    assert reward(*on, "reward_model.model.path=rm").functions == ()
    assert "reward_model.model.path is not set" in message(*on)
    asked = message(*on, "reward_model.model.path=rm", "custom_reward_function.path=r.py")
    assert "verl serves it for the function to ask" in asked


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("reward_model.reward_manager=batch", "it gives a function all answers of a step"),
        ("reward.reward_manager.name=gdpo", "list each score as a function of its own"),
        ("reward_model.reward_manager=collabllm", "it is none of naive, dapo and prime"),
        ("reward_model.enable=True", "say so as in verl: reward_model.model.input_tokenizer=null"),
        ("reward.reward_model.enable=True", "verl writes the conversation anew with the template"),
        ("reward.sandbox_fusion.url=http://x", "it is the back end of the scorer"),
        ("data.reward_fn_key=kind", "name the column data_source"),
        ("reward.reward_manager.nam=dapo", "did you mean 'reward.reward_manager.name'?"),
    ],
)
def test_refused(argument: str, why: str) -> None:
    assert why in message(argument)
    assert message(argument).startswith(f"argument '{argument}': ")


def test_what_has_no_meaning_is_noted() -> None:
    said = notes("reward_model.launch_reward_fn_async=True", "reward.num_workers=8")
    assert "reward_model.launch_reward_fn_async has no meaning in rondo: answers are scored" in said
    assert "reward.num_workers has no meaning in rondo: rollout processes score" in said
    said = notes("reward_model.model.path=rm", "custom_reward_function.name=f")
    assert "reward_model.model.path has no meaning in rondo: reward_model.enable is not True" in said
    assert "custom_reward_function.name has no meaning in rondo: custom_reward_function.path" in said


def test_one_spelling_only() -> None:
    twice = message("reward.reward_manager.name=dapo", "reward_model.reward_manager=naive")
    assert "reward.reward_manager.name says the same; remove either" in twice


# ---- runs


def rows(size: int, source: str) -> list[dict[str, Any]]:
    """Rows as verl's scripts for data write them."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Sam took {n} nuts. How many?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(size)
    ]


def write(path: Path, *parts: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist([one for part in parts for one in part]), path)
    return path


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """verl's command line for a tiny model. Keys of rondo's are the model's, the machine's, the display's."""
    ours = {key: RECIPE[key] for key in ("model", "cluster", "tracking")}
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(ours))
    train = write(tmp_path / "train.parquet", rows(8, "openai/gsm8k"))
    test = write(tmp_path / "test.parquet", rows(2, "openai/gsm8k"), rows(2, "aime_2024"))
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        *(str(tmp_path / "machine.yaml"), f"data.train_files={train}", f"data.val_files={test}"),
        *("data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=8"),
        *("algorithm.adv_estimator=grpo", f"{actor}.ppo_mini_batch_size=4", f"{rollout}.n=2"),
        *(f"{actor}.ppo_max_token_len_per_gpu=512", f"{rollout}.max_num_seqs=16"),
        *(
            "trainer.total_training_steps=2",
            "trainer.test_freq=2",
            f"trainer.default_local_dir={tmp_path}/run",
        ),
    ]


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [
        row
        for file in sorted((run / "rollouts").glob("step-??????.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]


@pytest.mark.slow
def test_a_run_with_verls_own_rules(tmp_path: Path, command: list[str]) -> None:
    """An untrained model is wrong everywhere: 0 of gsm8k, -1 and accuracy 0 of aime; and the penalty of each
    answer is verl's formula on its length.
    """
    buffer = "+reward_model.reward_kwargs.overlong_buffer_cfg"
    inline(
        *("train", *command, "reward_model.reward_manager=dapo", f"{buffer}.enable=True", f"{buffer}.len=6"),
        *(f"{buffer}.penalty_factor=0.5", "+reward_model.reward_kwargs.max_resp_len=6"),
    )
    found = rollouts(tmp_path / "run")
    assert len(found) == 16
    for one in found:
        length = len(one["response_ids"])
        penalty = min(-(length - (6 - 6)) / 6, 0)
        assert (one["score/verl"], one["score/verl/acc"], one["accuracy"]) == (0, 0, 0)
        assert one["score/overlong"] == pytest.approx(penalty)
        assert one["reward"] == pytest.approx(0.5 * penalty)
    evaluated = next(line for line in metrics(tmp_path / "run") if "eval/greedy/reward" in line)
    assert evaluated["eval/greedy/score/verl/openai/gsm8k"] == 0
    assert evaluated["eval/greedy/score/verl/aime_2024"] == -1
    assert evaluated["eval/greedy/score/verl/acc/aime_2024"] == 0
    assert evaluated["eval/greedy/score/verl"] == -0.5


@pytest.mark.slow
def test_a_run_with_a_function_for_verl(tmp_path: Path, command: list[str]) -> None:
    """Unchanged: what it was given is what it returns, and its further numbers are in evaluations."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1):\n"
        "    assert str(extra_info['index']) == ground_truth\n"
        "    score = factor * len(solution_str)\n"
        "    return {'score': score, 'acc': ground_truth == '1', 'index': extra_info['index']}\n"
    )
    own = (
        f"custom_reward_function.path={tmp_path}/mine.py",
        "+custom_reward_function.reward_kwargs.factor=2",
    )
    inline("train", *command, *own)
    for one in rollouts(tmp_path / "run"):
        assert one["reward"] == pytest.approx(2 * len(one["text"]))
        assert one["score/compute_score"] == pytest.approx(2 * len(one["text"]))
    evaluated = next(line for line in metrics(tmp_path / "run") if "eval/greedy/reward" in line)
    assert evaluated["eval/greedy/score/compute_score/acc/openai/gsm8k"] == 0.5
    assert evaluated["eval/greedy/score/compute_score/index"] == 0.5


@pytest.mark.slow
def test_a_row_without_a_rule_stops_before_the_first_step(tmp_path: Path, command: list[str]) -> None:
    write(tmp_path / "train.parquet", rows(4, "openai/gsm8k"), rows(1, "my/data"))
    done = inline("train", *command, check=False)
    assert done.returncode != 0
    assert "train.parquet, row 4): prompt train/0/4, data_source 'my/data': verl has no rule" in done.stderr
