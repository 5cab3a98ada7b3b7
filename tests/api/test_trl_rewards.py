"""Runs whose reward functions are in TRL's form: the bits of the same functions in ours, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rondo
from rondo.core.errors import ConfigError
from rondo.recipes.quickstart import tokenizer
from tests.api.test_training import ROWS, SETTINGS, even
from tests.messages import full_text
from tests.trainers.conftest import metrics, weights


def even_of_a_group(completion_ids: Any, completions: Any, **kwargs: Any) -> list[float]:
    assert len(completion_ids) == len(completions)
    return [float((np.array(ids) % 2 == 0).mean()) for ids in completion_ids]


def of_small_sums(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float | None]:
    """Applies to some rows only."""
    return [
        len(said) / 100 if int(a) < 8 else None for said, a in zip(completions, answer, strict=True)
    ]  # fmt: skip


def small(prompt: Any, trajectory: Any) -> float:
    return len(trajectory.text) / 100 if int(prompt.fields["answer"]) < 8 else 0.0


def test_the_same_function_in_trls_form_trains_to_the_same_bits(tmp_path: Path) -> None:
    """A None adds nothing, as a 0 does, and is in no statistic of its score."""
    runs = {}
    for name, reward in (
        ("ours", [even, {"name": small, "weight": 0.5}]),
        ("theirs", [even_of_a_group, {"name": of_small_sums, "weight": 0.5}]),
    ):
        runs[name] = rondo.train(
            data=ROWS, reward=reward, config=SETTINGS, steps=2, **{"trainer.run_dir": tmp_path / name}
        )
    assert weights(runs["ours"].path) == weights(runs["theirs"].path)
    ours, theirs = runs["ours"].samples(2), runs["theirs"].samples(2)
    assert ours["reward"].tolist() == theirs["reward"].tolist()
    applies = [int(ROWS[int(i.rpartition("/")[2])]["answer"]) < 8 for i in theirs["prompt_id"]]
    assert theirs["score/of_small_sums"].notna().tolist() == applies
    assert theirs["score/of_small_sums"].dropna().tolist() == ours["score/small"][applies].tolist()


@pytest.mark.slow
def test_a_run_with_functions_of_trl_goes_on_where_it_was(tmp_path: Path) -> None:
    reward: Any = [even_of_a_group, {"name": of_small_sums, "weight": 0.5}]
    given: dict[str, Any] = {"data": ROWS, "reward": reward, "config": SETTINGS}
    whole = rondo.train(**given, steps=4, **{"trainer.run_dir": tmp_path / "whole"})
    settings = {"trainer.run_dir": tmp_path / "run", "checkpoint.every": 1, "reward.isolation": "process"}
    run = rondo.train(**given, steps=2, **settings)
    assert rondo.load(run.path).resume(steps=4).summary["steps"] == 4
    assert weights(run.path) == weights(whole.path)
    assert metrics(run.path) == metrics(whole.path)


def test_a_chat_row_is_messages_and_a_text_row_a_text(tmp_path: Path) -> None:
    """The prompt's own form decides, where a chat template makes messages of both."""
    told: list[Any] = []

    def telling(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        told.append((prompts, completions))
        return [0.0] * len(prompts)

    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}{% endif %}"
    )
    words.save_pretrained(tmp_path / "words")
    rows = [ROWS[0], {**ROWS[1], "prompt": [{"role": "user", "content": ROWS[1]["prompt"]}]}]
    model = {**SETTINGS["model"], "tokenizer": str(tmp_path / "words")}
    rondo.train(
        data=rows, reward=telling, config={**SETTINGS, "model": model}, steps=1,
        **{"trainer.run_dir": tmp_path / "run", "data.batch_size": 2, "trainer.evaluation.every": None,
           "trainer.evaluation.before": False, "trainer.evaluation.after": False, "data.eval": []},
    )  # fmt: skip
    assert len(told) == 2  # once for each prompt group
    (text, said), (chat, said_in_chat) = sorted(told, key=lambda one: isinstance(one[0][0], list))
    assert text == [ROWS[0]["prompt"]] * 4
    assert chat == [[{"role": "user", "content": ROWS[1]["prompt"]}]] * 4
    assert all(isinstance(one, str) for one in said)
    assert [[*one[0]] for one in said_in_chat] == [["role", "content"]] * 4
    samples = rondo.load(tmp_path / "run").samples(1)
    assert sorted(samples["text"]) == sorted([*said, *(one[0]["content"] for one in said_in_chat)])


def test_an_episode_is_more_than_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=full_text("gives it all messages of an episode")):
        rondo.train(
            data=ROWS, reward=even_of_a_group, config=SETTINGS, steps=1,
            **{"trainer.run_dir": tmp_path / "run", "rollout.tools": ["calculator"]},
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_what_trl_alone_has_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    def by_step(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        raise AssertionError

    with pytest.raises(ConfigError, match=full_text("trainer_state (the progress of TRL's")):
        rondo.train(
            model="nowhere", data=ROWS, reward=by_step, steps=1, **{"trainer.run_dir": tmp_path / "run"}
        )
    assert not (tmp_path / "run").exists()
