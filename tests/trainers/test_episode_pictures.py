"""Runs of a model that sees, in environments that show pictures: sampler and trainer read the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from rondo.core.errors import ConfigError, WorkerError
from rondo.core.images import images_of_text
from rondo.trainers.sessions import Session
from tests.models.families import WITH_IMAGES
from tests.models.test_images import NAMED, TURNING
from tests.rollout.test_images import REFUSED
from tests.trainers.conftest import RECIPE, in_a_session, metrics, weights
from tests.trainers.test_episode_branches import TOKENS, turns_of
from tests.trainers.test_geo3k import model_of
from tests.trainers.test_images import MODEL, gaps
from tests.trainers.test_journal import broken_off

WORLDS = "tests/agents/own_worlds.py"
READS = f"action: '{WORLDS}:by_length'"
LOOPS = {
    "concatenated": f"{{name: concatenated, max_steps: 3, {READS}}}",
    "steps": f"{{name: steps, max_steps: 4, history: 1, {READS}}}",
    "summary": f"{{name: steps, max_steps: 4, history: 0, memory: {{name: summary, every: 2}}, {READS}}}",
}
RL = {
    **RECIPE,
    "model": MODEL,
    "data": {
        **RECIPE["data"],
        "train": [
            {"type": "function", "task": "rondo.environments.episodes", "options": {
                "environment": "frozen_lake", "size": 16, "prompt": "Go"}}
        ],
        "eval": [],
        "max_prompt_tokens": 200,
    },
    "rollout": {
        **RECIPE["rollout"],
        "max_tokens": 250,
        "stop": list("aeiostnr 0123456789=+<>."),
        "environments": [{"name": "frozen_lake", "size": 3, "observe": "image"}],
    },
    "reward": {"functions": ["environment"]},
    "actor": {**RECIPE["actor"], "token_budget": 4096},
    "trainer": {"total_steps": 2},
}  # fmt: skip
DRAWN = (
    f"rollout.environments=[{{name: '{WORLDS}:Drawn', says: here}}]",
    "data.train=[{type: function, task: rondo.recipes.quickstart.train_rows, options: {size: 16}}]",
)
LOOKS = (
    "data.train=[{type: function, task: rondo.recipes.visual.train_rows, options: {size: 16}}]",
    "rollout.environments=[]",
    "rollout.tools=[{name: zoom, enlarge: 2.0}]",
    "rollout.agent=tests/agents/own_image_tools.py:looks",
    "rollout.max_tokens=300",
    "reward.functions=[tests/trainers/scorers.py:even_share]",
)
# An image of 17 tiles, whose names are written in letters.
ROOM = ("data.max_prompt_tokens=900", "rollout.max_tokens=1100")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "seen.yaml").write_text(yaml.safe_dump(RL))
    return tmp_path / "seen.yaml"


def rows_of(run: Path, step: int = 1) -> list[dict[str, Any]]:
    return pq.read_table(run / "rollouts" / f"step-{step:06}.parquet").to_pylist()


@pytest.mark.parametrize(
    "loop", [one if one == "steps" else pytest.param(one, marks=pytest.mark.slow) for one in LOOPS]
)
def test_sampler_and_trainer_see_the_same(loop: str, run: Callable[..., Path]) -> None:
    """Each row has as many tokens of images as its pictures have, and the policy is not blind to them."""
    done = run("run", f"rollout.agent={LOOPS[loop]}")
    assert max(gaps(done)) < 2e-5
    assert metrics(done)[0]["images/seen"] > 1e-3
    seen = set[int]()
    for row in rows_of(done):
        images = images_of_text(row["images"])
        assert sum(image.n_tokens for image in images) == [*row["prompt_ids"], *row["response_ids"]].count(5)
        assert all(image.n_tokens == 9 and Path(image.path).parent == done / "images" for image in images)
        assert not np.array(row["response_mask"])[np.array(row["response_ids"]) == 5].any()
        seen.add(len(images))
    assert seen >= {"concatenated": {2, 3}, "steps": {1, 2}, "summary": {1, 2}}[loop]


@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_pictures_of_other_sizes_in_one_row(loop: str, run: Callable[..., Path]) -> None:
    done = run("run", f"rollout.agent={LOOPS[loop]}", *DRAWN)
    assert max(gaps(done)) < 2e-5
    sizes = [tuple(one.n_tokens for one in images_of_text(row["images"])) for row in rows_of(done)]
    assert max(len(set(own)) for own in sizes) > 1


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_every_family_sees_what_episodes_show(family: str, recipe: Path, run: Callable[..., Path]) -> None:
    """Pictures of other sizes, those of the steps before beside them: sampler and trainer read the same."""
    blind = family == "gemma3"  # transformers begins with a projector of zeros
    images = {**(MODEL["images"] if family in TURNING else {}), "check_seen": not blind}
    rl = {**RL, "model": {**model_of(family), "images": images}}
    if (family, "native") in REFUSED:
        rl["rollout"] = {**RL["rollout"], "engine": {"name": "transformers"}}
    recipe.write_text(yaml.safe_dump(rl))
    room = ROOM if family in NAMED else ()
    done = run("run", f"rollout.agent={LOOPS['steps']}", *DRAWN, *room)
    assert max(gaps(done)) < (1e-4 if family == "qwen3_5" else 2e-5)
    assert blind or metrics(done)[0]["images/seen"] > 1e-3
    shown = [len(images_of_text(row["images"])) for row in rows_of(done)]
    assert set(shown) >= {1, 2}
    done = run("tools", *LOOKS, *room)
    assert max(gaps(done)) < (1e-4 if family == "qwen3_5" else 2e-5)
    shown = [len(images_of_text(row["images"])) for row in rows_of(done)]
    assert set(shown) in ({3}, {2, 3})  # 2: nothing more fits


def without(folder: Path, rows: list[dict[str, Any]]) -> str:
    return repr(rows).replace(str(folder), "")


def whole_as_parts(run: Callable[..., Path], settings: tuple[str, ...]) -> Path:
    """Returns a run, which ends as one does that was broken off in its second step and begun again."""
    whole = run("whole", *settings)
    with broken_off(2), pytest.raises(WorkerError, match="broken off"):
        run("parts", *settings)
    parts = run("parts", *settings)
    assert weights(parts) == weights(whole)
    assert without(parts, rows_of(parts, 2)) == without(whole, rows_of(whole, 2))
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_a_run_that_was_broken_off_and_a_replay_end_with_the_same_bits(
    loop: str, run: Callable[..., Path]
) -> None:
    settings = (f"rollout.agent={LOOPS[loop]}", *DRAWN, "checkpoint.every=1")
    whole_as_parts(run, settings)
    moving = (*settings, "trainer.max_staleness=1", "trainer.on_update=resume", "rollout.max_concurrent=5")
    first = run("first", *moving)
    again = run("again", *moving, f"trainer.replay={first}")
    assert (again / "journal.jsonl").read_text() == (first / "journal.jsonl").read_text()
    assert without(again, rows_of(again, 2)) == without(first, rows_of(first, 2))
    assert weights(again) == weights(first)


def test_what_tools_show_is_trained_on(run: Callable[..., Path]) -> None:
    """Rows of three images: the prompt's, a part of it, and a part of that."""
    done = run("run", *LOOKS)
    assert max(gaps(done)) < 2e-5
    sizes = set()
    for row in rows_of(done):
        images = images_of_text(row["images"])
        assert [image.turn for image in images] == [0, 2, 4]
        where = np.array(row["response_ids"]) == 5
        assert where.sum() == images[1].n_tokens + images[2].n_tokens
        assert not np.array(row["response_mask"])[where].any()
        assert all(Path(image.path).parent == done / "images" for image in images)
        sizes.add(tuple(image.grid for image in images[1:]))
    assert len(sizes) > 1


@pytest.mark.slow
def test_a_run_with_tools_that_was_broken_off_and_a_replay_end_with_the_same_bits(
    run: Callable[..., Path],
) -> None:
    settings = (*LOOKS, "checkpoint.every=1")
    whole = whole_as_parts(run, settings)
    again = run("again", *settings, f"trainer.replay={whole}")
    assert without(again, rows_of(again, 2)) == without(whole, rows_of(whole, 2))
    assert weights(again) == weights(whole)


@pytest.mark.slow
def test_episode_workers_show_what_threads_do(run: Callable[..., Path]) -> None:
    settings = (f"rollout.agent={LOOPS['steps']}", *DRAWN, "trainer.total_steps=1")
    threads, workers = run("threads", *settings), run("workers", *settings, "rollout.episode_workers=2")
    assert without(threads, rows_of(threads)) == without(workers, rows_of(workers))
    assert weights(threads) == weights(workers)


@pytest.mark.parametrize("loop", [pytest.param("concatenated", marks=pytest.mark.slow), "steps"])
@pytest.mark.parametrize("world", [pytest.param("Drawn", marks=pytest.mark.slow), "DrawnKept"])
def test_branches_see_what_their_parents_saw(recipe: Path, tmp_path: Path, loop: str, world: str) -> None:
    """Also where prompts have the same tokens and other pictures, and where an environment is restored."""
    sizes = "sizes: [[32, 32], [32, 32], [32, 32], [32, 32]], keep_state: true"
    settings = (
        *DRAWN,
        f"rollout.agent={LOOPS[loop].replace('history: 1', 'history: 0')}",
        f"rollout.environments=[{{name: '{WORLDS}:{world}', {sizes}}}]",
    )

    async def program(session: Session) -> None:
        actor = await session.actor()
        async for prompts in session.prompts():
            batch = await actor.generate_sequences(prompts)
            parents = await batch.fetch([*TOKENS, "images", *batch.index.columns])
            at = [places[-1:] for places in turns_of(parents)]
            branches = await actor.branch(batch, at)
            scored = await actor.compute_log_prob(branches)
            made = await scored.fetch(
                [*TOKENS, "old_log_probs", "images", "parent_id", "fork", *scored.index.columns]
            )
            by_id = dict(zip(parents.scalars("row_id").tolist(), parents.images(), strict=True))
            compared = 0
            for place, parent in enumerate(made.scalars("parent_id").tolist()):
                if parent in by_id and made.scalars("fork")[place]:
                    own = [image.sha256 for image in made.images()[place]]
                    assert own[: len(by_id[parent])] == [image.sha256 for image in by_id[parent]]
                    compared += 1
            assert compared >= len(at)
            columns = (made.rows(name) for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
            for ours, sampled, mask in zip(*columns, strict=True):
                np.testing.assert_allclose(ours[mask > 0], sampled[mask > 0], atol=2e-5)
            scored = await session.compute_advantages(await actor.compute_log_prob(batch))
            await session.log(scored, await actor.update_actor(scored))

    in_a_session(recipe, tmp_path / "run", program, *settings, "trainer.total_steps=1")


def test_a_model_of_text_has_no_tools_that_work_on_images(recipe: Path, run: Callable[..., Path]) -> None:
    recipe.write_text(yaml.safe_dump({**RECIPE, "rollout": {**RECIPE["rollout"], "tools": ["draw"]}}))
    with pytest.raises(ConfigError, match=r"rollout\.tools: draw works on images"):
        run("text")


def test_a_model_of_text_is_shown_no_pictures(recipe: Path, run: Callable[..., Path]) -> None:
    rollout = {**RL["rollout"], "max_tokens": 8}
    recipe.write_text(yaml.safe_dump({**RL, "model": RECIPE["model"], "rollout": rollout}))
    with pytest.raises(ConfigError, match=r"0: observe: image shows pictures"):
        run("text")
