"""`rondo.train` and its like train what the command trains, to the bit, and leave a recipe to repeat it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import yaml

import rondo
from rondo.config import load
from rondo.core.errors import ConfigError, DataError, RewardError
from rondo.data.sources import open_source
from rondo.recipes.quickstart import CHAT_TEMPLATE
from rondo.tracking import read_metrics
from rondo.trainers.supervised import SFT
from tests.messages import full_text
from tests.trainers import scorers
from tests.trainers.conftest import MODEL, RECIPE, cli, metrics, weights

# As RECIPE has it, but for what a caller hands over.
SETTINGS = {
    "model": {"config": MODEL, "tokenizer": "rondo.recipes.quickstart.tokenizer"},
    "data": {"batch_size": 4, "max_prompt_tokens": 64, "eval": RECIPE["data"]["eval"]},
    **{key: RECIPE[key] for key in ("actor", "rollout", "cluster", "tracking", "checkpoint", "trainer")},
}
ROWS = [{"prompt": f"{a} red, {b} blue and 2 green pens. How many?", "answer": str(a + b + 2)}
        for a in range(2, 6) for b in range(2, 6)]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> dict[str, Any]:
    return {"trainer.run_dir": str(tmp_path / "run")}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def even(prompt: Any, trajectory: Any) -> float:
    return scorers.even_share(prompt, trajectory)


def test_the_same_settings_give_the_bits_of_the_command(tmp_path: Path, recipe: Path) -> None:
    cli("train", str(recipe), f"trainer.run_dir={tmp_path / 'a'}")
    run = rondo.train(recipe, **{"trainer.run_dir": tmp_path / "b"})
    assert metrics(run.path) == metrics(tmp_path / "a")
    assert weights(run.path) == weights(tmp_path / "a")
    data, folder = RECIPE["data"]["train"], {"trainer.run_dir": tmp_path / "c"}
    run = rondo.train(data=data, reward=scorers.even_share, config=SETTINGS, **folder)
    assert weights(run.path) == weights(tmp_path / "a")


@pytest.mark.slow
def test_the_recipe_in_the_folder_repeats_the_run(tmp_path: Path, run_dir: dict[str, Any]) -> None:
    """Rows from memory and a function of this file, in another process."""
    run = rondo.train(data=ROWS, reward=even, config=SETTINGS, **run_dir)
    cli("train", str(run.path / "recipe.yaml"), f"trainer.run_dir={tmp_path / 'again'}")
    assert metrics(tmp_path / "again") == metrics(run.path)
    assert weights(tmp_path / "again") == weights(run.path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "ray"])
def test_a_closure_scores_on_every_backend(backend: str, run_dir: dict[str, Any]) -> None:
    share = 0.25

    def constant(prompt: Any, trajectory: Any) -> float:
        return share

    run = rondo.train(
        data=ROWS, reward=constant, config=SETTINGS, steps=1,
        **run_dir, **{"cluster.backend": backend, "cluster.devices": 2, "trainer.evaluation.every": None},
    )  # fmt: skip
    assert run.metrics["reward/mean"].tolist()[-1] == share


def test_estimators_and_losses_are_functions_too(run_dir: dict[str, Any], tmp_path: Path) -> None:
    called: list[int] = []

    def mine(reward: Any, group_id: Any, *, scale: float = 1.0) -> Any:
        called.append(len(reward))
        return scale * (reward - reward.mean())

    algorithm = {"advantage": {"name": mine, "scale": 0.5}, "policy_loss": "reinforce"}
    rondo.train(data=ROWS, reward=even, algorithm=algorithm, config=SETTINGS, steps=1, **run_dir)
    assert called[-1] == 16


def test_a_recipes_algorithm_is_its_section(run_dir: dict[str, Any]) -> None:
    run = rondo.train(data=ROWS, reward=even, algorithm="dr_grpo", config=SETTINGS, steps=1, **run_dir)
    config = load([str(run.path / "config.yaml")]).config
    assert config.algorithm.advantage.name == "dr_grpo"
    assert config.algorithm.aggregation.name == "seq-mean-token-sum-norm"
    assert config.data.batch_size == 4  # and nothing else of that recipe
    with pytest.raises(ConfigError, match="no recipe of that name"):
        rondo.train(algorithm="drgrpo")


def test_a_callback_hears_every_step_and_ends_the_run(run_dir: dict[str, Any]) -> None:
    heard: list[dict[str, Any]] = []

    def enough(step: Any) -> bool:
        heard.append(dict(step))
        return step["step"] == 2

    run = rondo.train(data=ROWS, reward=even, config=SETTINGS, steps=5, on_step=enough, **run_dir)
    assert [one["step"] for one in heard] == [1, 2]
    assert [one["reward/mean"] for one in heard] == run.metrics["reward/mean"].tolist()[-2:]
    assert run.summary["steps"] == 2
    assert (run.model / "config.json").is_file()


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(run_dir: dict[str, Any], tmp_path: Path) -> None:
    """Longer by two steps, it is the run that was that long from the start."""
    whole = rondo.train(
        data=ROWS, reward=even, config=SETTINGS, steps=4, **{"trainer.run_dir": tmp_path / "whole"}
    )
    run = rondo.train(data=ROWS, reward=even, config=SETTINGS, steps=2, **run_dir, **{"checkpoint.every": 1})
    assert run.summary["steps"] == 2
    assert rondo.load(run.path).resume(steps=4).summary["steps"] == 4
    assert weights(run.path) == weights(whole.path)


def test_two_runs_without_a_name_are_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward: Callable[..., float] = even
    monkeypatch.chdir(tmp_path)
    runs = [rondo.train(data=ROWS, reward=reward, config=SETTINGS, steps=1) for _ in range(2)]
    assert [str(run.path) for run in runs] == ["runs/train", "runs/train-2"]
    assert weights(runs[0].path) == weights(runs[1].path)


@pytest.mark.parametrize("how", ["recipe", "home", "nested", "dotted", "verl"])
def test_the_run_folder_is_where_the_recipe_says(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However that is spelled; a second call finds the run there, finished."""
    monkeypatch.chdir(tmp_path)
    name = "mine"
    if how == "home":
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine" / "cache"))
        name = "~/mine"
    section, recipe = {**RECIPE["trainer"], "total_steps": 1}, {**RECIPE}
    settings: dict[str, Any] = {"trainer": {**section, "run_dir": name}, "checkpoint": {"every": 1}}
    recipe["reward"] = {"functions": [{"name": str(Path(scorers.__file__)) + ":even_share"}]}
    if how in ("recipe", "home"):
        recipe, settings = {**recipe, **settings}, {}
    elif how != "nested":
        key = "trainer.run_dir" if how == "dotted" else "trainer.default_local_dir"
        settings = {"trainer": section, key: Path("mine")}
        settings |= {"algorithm.adv_estimator": "grpo"} if how == "verl" else {}
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe))
    runs = [rondo.train("tiny.yaml", config=settings) for _ in range(2)]
    assert [run.path for run in runs] == [tmp_path / "mine" if how == "home" else Path("mine")] * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["mine"]
    assert len(runs[1].metrics) == 2
    assert not (Path("mine") / "discarded").exists()


def test_an_argument_holds_whatever_settings_stand_behind_its_key(run_dir: dict[str, Any]) -> None:
    config = {"trainer.total_steps": 3, **SETTINGS, "trainer": {**SETTINGS["trainer"], "total_steps": 2}}
    run = rondo.train(data=ROWS, reward=even, config=config, steps=1, **run_dir)
    assert run.summary["steps"] == 1


def test_sft_on_rows_from_memory(run_dir: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "response": f"#### {row['answer']}"} for row in ROWS]
    config = {key: SETTINGS[key] for key in ("model", "cluster", "tracking")}
    config |= {"data.batch_size": 4, "data.max_prompt_tokens": 64}
    run = rondo.sft(data=rows, config=config, steps=2, **run_dir)
    (source,) = load([str(run.path / "config.yaml")]).config.data.train
    assert [dict(row) for row in open_source(source).rows] == rows
    assert run.summary["steps"] == 2
    # Both rates are over the same seconds: their ratio is that of whole rows to what is learnt from.
    stream, _ = SFT.streams(load([str(run.path / "config.yaml")]).config)
    for step, line in enumerate(read_metrics(run.path)):
        batch = stream.batch(range(4 * step, 4 * step + 4))
        whole = sum(len(ids) for name in ("prompt_ids", "response_ids") for ids in batch.rows(name))
        learnt = sum(int(mask.sum()) for mask in batch.rows("response_mask"))
        assert 0 < learnt < whole / 2
        assert line["perf/row_tokens_per_s"] * learnt == pytest.approx(
            line["perf/trained_tokens_per_s"] * whole
        )


def test_a_function_that_was_handed_over_goes_by_its_own_name(run_dir: dict[str, Any]) -> None:
    """Its file is for other processes: no message repeats that path, whole or cut."""

    def correctness(prompt: Any, trajectory: Any, *, scale: float = 1.0) -> float:
        return scale

    def tool(*words: str) -> str:
        return "".join(words)

    def said(**settings: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            rondo.train(data=ROWS, reward=correctness, config=SETTINGS, **run_dir, **settings)
        return str(caught.value)

    reward = (
        "setting reward.functions=[{'name': 'correctness', 'scales': 1}]: reward.functions.0: correctness "
    )
    assert said(**{"reward.functions": [{"name": correctness, "scales": 1}]}).startswith(f"{reward}has no ")
    assert said(**{"rollout.tools": [tool]}).startswith(
        "setting rollout.tools=['tool']: rollout.tools.0: tool: "
    )
    # What is long is cut with a mark that says so.
    assert said(**{"rollout.n": "x" * 300}).startswith(f"setting rollout.n='{'x' * 189}… (312 characters): ")


def test_what_is_wrong_is_said_with_its_setting_and_leaves_nothing(run_dir: dict[str, Any]) -> None:
    folder = Path(run_dir["trainer.run_dir"])
    with pytest.raises(ConfigError, match=full_text("setting rollout.n='x': rollout.n must")):
        rondo.train(data=ROWS, reward=even, config=SETTINGS, **run_dir, **{"rollout.n": "x"})
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.nn'; did you mean"):
        rondo.train(data=ROWS, reward=even, config=SETTINGS, **run_dir, **{"rollout.nn": 3})
    with pytest.raises(DataError, match="no column 'prompt'"):
        rondo.train(data=[{"question": "a"}], reward=even, config=SETTINGS, **run_dir)
    assert not folder.exists()

    def broken(prompt: Any, trajectory: Any) -> float:
        raise ZeroDivisionError("mine")

    with pytest.raises(RewardError, match="mine"):
        rondo.train(data=ROWS, reward=broken, config=SETTINGS, **run_dir)


def test_messages_call_a_function_that_was_handed_over_by_its_own_name(run_dir: dict[str, Any]) -> None:
    def only(trajectory: Any) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=full_text("0: only(trajectory: 'Any') -> 'float'")):
        rondo.train(data=ROWS, reward=only, config=SETTINGS, **run_dir)

    def broken(prompt: Any, trajectory: Any) -> float:
        raise ZeroDivisionError

    with pytest.raises(RewardError, match=r"Fix broken, or set reward\.on_error"):
        rondo.train(data=ROWS, reward=broken, config=SETTINGS, **run_dir)


def test_the_recipe_says_what_was_set_however_it_was_set(tmp_path: Path) -> None:
    """numpy's numbers, paths, an element of a recipe's list, a key below a choice's short form; and the file
    that was included may change afterwards.
    """
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "trainer": {"total_steps": 9}}))
    settings = {
        "trainer.run_dir": tmp_path / "run",
        "data.eval": [],
        "data.train.0.options.size": np.int64(16),
        "algorithm.advantage": "grpo",
        "algorithm.advantage.normalize_std": False,
    }
    run = rondo.train(recipe, steps=np.int64(1), **settings)
    recipe.unlink()
    made, again = (load([str(run.path / name)]).config for name in ("config.yaml", "recipe.yaml"))
    assert again.data.train[0].options == {"size": 16}
    assert again.algorithm.advantage.options == {"normalize_std": False}
    assert again.trainer == made.trainer
    assert again.trainer.total_steps == 1


def test_arguments_of_an_evaluation_stand_over_its_config(run_dir: dict[str, Any]) -> None:
    run = rondo.train(data=ROWS, reward=even, config=SETTINGS, steps=1, **run_dir)
    config = {"model": {"path": "nowhere"}}
    result = rondo.evaluate(run.model, ROWS[:1], even, recipe=run.path / "config.yaml", config=config)
    assert [sample.prompt for sample in result.samples] == [ROWS[0]["prompt"]]
    assert run.evaluate(ROWS[:1]).samples == result.samples


@pytest.mark.slow
def test_a_runs_model_is_asked_as_it_was_trained(run_dir: dict[str, Any], tmp_path: Path) -> None:
    """With its chat template options: what it generates, and is served with."""
    template = tmp_path / "template.jinja"
    template.write_text(CHAT_TEMPLATE + "{{ '<think></think>' if think is defined and not think }}")
    options = {"model.chat_template": str(template), "model.chat_template_options": {"think": False}}
    run = rondo.train(data=ROWS, reward=even, config={**SETTINGS, **options}, steps=1, **run_dir)
    question, answer = ROWS[0]["prompt"], {"max_tokens": 4, "temperature": 0.0}
    (one,) = run.generate(question, **answer)
    (same,) = rondo.generate(run.model, question, chat_template_options={"think": False}, **answer)
    (other,) = run.generate(question, chat_template_options={}, **answer)
    assert one == same
    assert one["log_probs"] != other["log_probs"]
    ask: Any = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 4}
    with (
        run.serve(**{"cluster.threads": 1}) as server,
        openai.OpenAI(base_url=server.base_url, api_key=server.api_key) as client,
    ):
        given = client.chat.completions.create(model="export", extra_body={"return_token_ids": True}, **ask)
    assert given.prompt_token_ids[-3:] == run.samples(1)["prompt_ids"].iloc[0][-3:].tolist()  # type: ignore[attr-defined]
    assert given.choices[0].token_ids == one["token_ids"]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_evaluate_and_generate_with_a_runs_model(run_dir: dict[str, Any]) -> None:
    run = rondo.train(data=ROWS, reward=even, config=SETTINGS, steps=1, **run_dir)
    before, step = run.metrics["eval/greedy/reward"].dropna().tolist(), run.evaluate().metrics
    assert step["eval/greedy/reward"] == before[-1]  # of the last step, by the run itself
    result = rondo.evaluate(run.model, ROWS[:3], even, recipe=run.path / "config.yaml")
    assert [sample.prompt for sample in result.samples] == [row["prompt"] for row in ROWS[:3]]
    (one,) = run.generate(ROWS[0]["prompt"], max_tokens=4, temperature=0.0)
    assert one == rondo.generate(run.model, [ROWS[0]["prompt"]], max_tokens=4, temperature=0.0)[0]
    ask: Any = {
        "messages": [{"role": "user", "content": ROWS[0]["prompt"]}],
        "temperature": 0,
        "max_tokens": 4,
    }
    with (
        run.serve(**{"cluster.threads": 1}) as server,
        openai.OpenAI(base_url=server.base_url, api_key=server.api_key) as client,
    ):
        ids = {"return_token_ids": True}
        answer = client.chat.completions.create(model="export", extra_body=ids, **ask)
    assert answer.choices[0].token_ids == one["token_ids"]
    assert run.samples(1)["reward"].mean() == pytest.approx(run.metrics["reward/mean"][1])
    assert run.plot().axes[0].get_title(loc="left") == "reward"
    with pytest.raises(DataError, match="no rollouts of step 9"):
        run.samples(9)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not the folder of a run"):
        rondo.load(tmp_path)


@pytest.mark.slow
def test_import_rondo_is_light_and_lists_what_it_offers() -> None:
    code = (
        "import sys, rondo; heavy = ('torch', 'numpy', 'pydantic', 'pyarrow'); "
        "print([m for m in heavy if m in sys.modules]); "
        "print(set(rondo.__all__) <= set(dir(rondo)), rondo.train.__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["[]", "True train"]
    with pytest.raises(AttributeError, match="'rondo' has no attribute 'trian'"):
        rondo.trian  # noqa: B018


def test_a_run_in_another_thread_is_refused_while_one_goes_on(recipe: Path, tmp_path: Path) -> None:
    """Torch's process groups are the process's. The run that goes on ends with the bits of one alone."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(line: Any) -> None:
        begun.set()
        assert go_on.wait(60)

    def run(name: str, **more: Any) -> rondo.Run:
        return rondo.train(recipe, **{"trainer.run_dir": str(tmp_path / name)}, **more)

    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(run, "first", on_step=hold)
        assert begun.wait(60)
        with pytest.raises(ConfigError, match="another thread of this process is"):
            run("second")
        go_on.set()
        first = going.result()
    assert weights(first.path) == weights(run("second").path)
