"""Published methods as programs that ask prompts of their own: what they compute, by hand, and that each ends
with the same bits after a break, with k = 2, on two processes."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.core.batch import Batch, BatchRef
from rondo.trainers.loop import Branching
from rondo.trainers.sessions import Actor, Session
from tests.trainers.conftest import metrics, weights
from tests.trainers.test_examples import ROOT, TINY

SETTINGS = ("rollout.n=4", "actor.optimizer.lr=1e-2", "checkpoint.every=1", "trainer.total_steps=2")


class EveryText:
    """Stands for the sums that a model of random weights would have to propose."""

    def __contains__(self, text: str) -> bool:
        return True


def even_share(prompt: Any, trajectory: Any) -> float:
    return float((trajectory.response_ids % 2 == 0).mean() > 0.5)


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The example's `main`, for a tiny model."""
    main: Callable[..., Any] = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    tiny = {
        "absolute_zero": {"SUMS": EveryText(), "score": even_share, "eval": len},
        "curriculum": {"PROMPTS": 4, "SAMPLES": 16, "ROWS": 12},
        "vineppo": {},
        "tree_grpo": {},
    }
    for key, value in tiny[name].items():
        monkeypatch.setitem(main.__globals__, key, value)  # type: ignore[attr-defined]
    return main


class Seen:
    """What a program got from the engines and logged, step by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generated: list[BatchRef] = []
        self.steps: list[tuple[list[Batch], Batch]] = []
        generate, log = Actor.generate_sequences, Session.log

        async def generating(actor: Actor, *arguments: Any, **options: Any) -> BatchRef:
            made = await generate(actor, *arguments, **options)
            self.generated.append(made)
            return made

        async def logging(session: Session, batch: BatchRef, *stats: Any) -> None:
            names = ["advantages", "response_ids"]
            rows = await batch.fetch(
                [*batch.index.columns, *(n for n in names if n not in batch.index.columns)]
            )
            self.steps.append(([await made.fetch() for made in self.generated], rows))
            self.generated.clear()
            await log(session, batch, *stats)

        branch = Branching.__call__

        async def branching(branches: Branching, *arguments: Any) -> BatchRef:
            made = await branch(branches, *arguments)
            self.generated.append(made)
            return made

        monkeypatch.setattr(Branching, "__call__", branching)
        monkeypatch.setattr(Actor, "generate_sequences", generating)
        monkeypatch.setattr(Session, "log", logging)


def run(main: Callable[..., Any], folder: Path, *overrides: str) -> Path:
    asyncio.run(main([*TINY, *SETTINGS, *overrides, f"trainer.run_dir={folder}"]))
    return folder


def test_roles_are_compared_each_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    run(program("absolute_zero", monkeypatch), tmp_path / "run")
    assert len(seen.steps) == 2
    for (proposals, solved), rows in seen.steps:
        text = [text.strip() for text in proposals.scalars("text")]
        right = solved.scalars("reward").reshape(-1, 4).mean(1)
        rate = dict(zip(dict.fromkeys(text), right, strict=True))
        earned = np.array([0 if rate[t] in (0, 1) else 1 - rate[t] for t in text])
        rewards = np.concatenate([earned, solved.scalars("reward")])
        np.testing.assert_allclose(rows.scalars("reward"), rewards, rtol=1e-6)
        assert 0 < earned.max() < 1
        for own in (np.arange(len(rows)) < 16, np.arange(len(rows)) >= 16):
            by_hand = (rewards[own] - rewards[own].mean()) / (rewards[own].std(ddof=1) + 1e-6)
            np.testing.assert_allclose(rows.scalars("advantages")[own], by_hand, atol=1e-4)


def test_samples_go_where_they_teach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    run(program("curriculum", monkeypatch), tmp_path / "run", "trainer.total_steps=4")
    success = np.full(12, 0.5)
    assert len(seen.steps) == 4
    for step, (_, rows) in enumerate(seen.steps):
        _, counts = np.unique(rows.scalars("group_id"), return_counts=True)
        rng = np.random.default_rng(step)
        chosen = rng.choice(12, 4, replace=False)
        worth = success[chosen] * (1 - success[chosen]) + 0.01
        assert counts.tolist() == (2 + rng.multinomial(8, worth / worth.sum())).tolist()
        groups = np.split(rows.scalars("reward"), np.cumsum(counts)[:-1])
        success[chosen] = [group.mean() for group in groups]
        advantages = np.split(rows.scalars("advantages"), np.cumsum(counts)[:-1])
        for own, rewards in zip(advantages, groups, strict=True):
            baseline = (rewards.sum() - rewards) / (len(rewards) - 1)
            np.testing.assert_allclose(own, rewards - baseline, atol=1e-5)


def test_a_line_is_worth_what_it_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token that the model says most often as a line's end."""
    seen = Seen(monkeypatch)
    main = program("vineppo", monkeypatch)
    ends = {7, 12, 30, *range(60, 200)}

    def is_end(tokens: np.ndarray, lines: list[int]) -> np.ndarray:
        return np.isin(tokens, list(ends))

    class Numpy:
        isin = staticmethod(is_end)

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    monkeypatch.setitem(main.__globals__, "np", Numpy())  # type: ignore[attr-defined]
    run(main, tmp_path / "run", "reward.functions.0={name: 'tests/trainers/scorers.py:even_share'}")
    segments = 0
    for (_, vines), rows in seen.steps:
        worth = iter(vines.scalars("reward").reshape(-1, 4).mean(1).tolist())
        for given, ids, reward in zip(
            rows.rows("advantages"), rows.rows("response_ids"), rows.scalars("reward"), strict=True
        ):
            starts = [0, *(t + 1 for t, token in enumerate(ids[:-1]) if int(token) in ends)]
            values = [*(next(worth) for _ in starts), float(reward)]
            for place, (start, stop) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
                np.testing.assert_allclose(given[start:stop], values[place + 1] - values[place], atol=1e-6)
            gains = [given[start] for start in starts]
            assert sum(gains) == pytest.approx(values[-1] - values[0], abs=1e-5)  # they telescope
            segments += len(starts)
        assert next(worth, None) is None
    assert segments > sum(len(rows) for _, rows in seen.steps)


def test_an_answer_is_compared_in_its_prompt_and_in_its_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    run(program("tree_grpo", monkeypatch), tmp_path / "run", "rollout.n=2")
    assert len(seen.steps) == 2
    signal = 0.0
    for (roots, branches), rows in seen.steps:
        assert (len(roots), len(branches), len(rows)) == (8, 16, 24)
        rewards, given = rows.scalars("reward").astype(np.float64), rows.scalars("advantages")
        by_hand = np.zeros(24)
        for cells, size in ((rows.scalars("group_id"), 6), (rows.scalars("tree_id"), 3)):
            for cell in np.unique(cells):
                own = cells == cell
                assert own.sum() == size
                by_hand[own] += (rewards[own] - rewards[own].mean()) / (rewards[own].std(ddof=1) + 1e-6)
        np.testing.assert_allclose(given, by_hand, atol=1e-4)
        signal += np.abs(given).sum()
    assert signal > 0


class BrokenError(Exception):
    """In the program, at its second step."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["absolute_zero", "curriculum", "vineppo", "tree_grpo"])
def test_a_method_ends_with_the_same_bits_after_a_break(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = program(name, monkeypatch)
    where = ("cluster.backend=process", "cluster.devices=2", "trainer.max_staleness=2")
    settings = (*where, "trainer.on_update=finish", "trainer.total_steps=3")
    whole = run(main, tmp_path / "whole", *settings)
    log = Session.log

    async def broken(session: Session, *arguments: Any) -> None:
        if session.step == 1:
            raise BrokenError
        await log(session, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "log", broken)
        with pytest.raises(BrokenError):
            run(main, tmp_path / "broken", *settings)
    assert [line["step"] for line in metrics(tmp_path / "broken")] == [1]
    run(main, tmp_path / "broken", *settings)
    assert metrics(tmp_path / "broken") == metrics(whole)
    assert weights(tmp_path / "broken") == weights(whole)
