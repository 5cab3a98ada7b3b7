"""docs/method.md, "write a method": each program as it stands there, run, and checked by an identity."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from rondo.algorithms import registry
from rondo.core.batch import Batch, BatchRef
from rondo.trainers.sessions import Session
from tests.trainers.conftest import REPOSITORY, inline, metrics, weights

PAGE = (REPOSITORY / "docs" / "method.md").read_text(encoding="utf-8")
D = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def _registered_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page registers is gone after each test."""
    functions = {kind: dict(named) for kind, named in registry._FUNCTIONS.items()}
    monkeypatch.setattr(registry, "_FUNCTIONS", functions)
    monkeypatch.setattr(registry, "_PREPARE", dict(registry._PREPARE))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a program of the page into a file of its name."""

    def written(name: str) -> Path:
        (program,) = re.findall(rf"```python\n(# {name}\n.*?)```", PAGE, re.S)
        assert len([line for line in program.splitlines() if line.strip()]) <= 42, "a screen"
        path = tmp_path / name
        path.write_text(program)
        return path

    return written


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def trained(recipe: Path, run: Path, *overrides: str) -> list[dict[str, Any]]:
    inline("train", str(recipe), *overrides, f"trainer.run_dir={run}")
    return [line for line in metrics(run) if "actor/grad_norm" in line]


def test_a_loss_that_leaks_nothing_is_cispo(write: Any, recipe: Path, tmp_path: Path) -> None:
    path = write("leaky.py")
    losses = (f"{{name: '{path}:leaky', leak: 0.0}}", "{name: cispo, clip_low: 0.2}", f"'{path}:leaky'")
    runs = [
        trained(recipe, tmp_path / str(i), f"algorithm.policy_loss={loss}", "actor.optimizer.lr=0.03")
        for i, loss in enumerate(losses)
    ]
    norms = [[line["actor/grad_norm"] for line in run[:2]] for run in runs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[2] != pytest.approx(norms[1], rel=5e-3)
    assert runs[0][0]["actor/outside"] > 0
    assert runs[0][0]["actor/outside"] == pytest.approx(runs[1][0]["actor/clip_fraction"])


def test_a_coupled_loss_has_the_gradient_of_the_whole(write: Any) -> None:
    made = module(write("listwise.py"))
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(4, 3, generator=generator, **D).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]], **D)
    reward, groups = torch.tensor([1.0, 0.0, 0.5, 0.5], **D), torch.tensor([3, 3, 8, 8])
    given = [column[:, None].expand(4, 3) * mask for column in (reward, groups)]
    pull = made.pulls(log_probs.detach(), torch.zeros(4, 3, **D), *given, mask, beta=0.7)["pull"]
    loss, _ = made.listwise(log_probs.flatten(), pull.flatten())
    ours = torch.autograd.grad((loss * mask.flatten()).sum(), log_probs)[0]
    of_answer = 0.7 * (log_probs * mask).sum(1)
    whole = -sum(
        ((reward[rows] / 0.5).softmax(0) * of_answer[rows].log_softmax(0)).sum() for rows in ([0, 1], [2, 3])
    )
    torch.testing.assert_close(ours, torch.autograd.grad(whole, log_probs)[0], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_coupled_loss_does_not_depend_on_how_a_batch_is_cut(
    write: Any, recipe: Path, tmp_path: Path
) -> None:
    path = write("listwise.py")
    settings = (f"algorithm.policy_loss={path}:listwise", "algorithm.aggregation=seq-mean-token-sum")
    cuts = ((), ("actor.token_budget=80",), ("cluster.backend=process", "cluster.devices=2"))
    lines = [trained(recipe, tmp_path / str(i), *settings, *cut) for i, cut in enumerate(cuts)]
    norms = [[line["actor/grad_norm"] for line in run] for run in lines]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert norms[2] == pytest.approx(norms[0], rel=1e-3)


def test_an_advantage_over_turns(write: Any, recipe: Path, tmp_path: Path) -> None:
    """By hand: two episodes of a group, [turn 1 | user | turn 2]; and a run in the page's environment."""
    path = write("turns.py")
    made = module(path)
    advantages = made.from_here(
        torch.tensor([[1.0, torch.nan, 0.5], [0.0, torch.nan, 0.5]]),
        torch.tensor([[2, 3, 5], [1, 2, 3]]),
        torch.tensor([[0, 3, 0], [0, 3, 0]]),
        torch.tensor([7, 7]),
        torch.tensor([[1.0, 1, 0, 1, 1], [1, 0, 1, 0, 0]]),
    )
    assert advantages.tolist() == [[0.5, 0.5, 0, -0.5, -0.5], [-0.5, 0, -0.5, 0, 0]]
    (settings,) = re.findall(r"```yaml\n(rollout:.*?)```", PAGE, re.S)
    own = yaml.safe_load(settings.replace("turns.py:", f"{path}:"))
    file = tmp_path / "turns.yaml"
    file.write_text(yaml.safe_dump({**own, "rollout": {**own["rollout"], "max_tokens": 4}}))
    limits = ("data.max_prompt_tokens=160", "actor.token_budget=2048", "trainer.total_steps=2")
    inline("train", str(recipe), str(file), *limits, f"trainer.run_dir={tmp_path / 'run'}")
    lines = [line for line in metrics(tmp_path / "run") if "actor/grad_norm" in line]
    assert [line["step"] for line in lines] == [1, 2]


@pytest.fixture
def through_a_break(
    write: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, Path]]:
    """Runs a program of the page for four steps, and for two and then four; returns both folders."""

    def runs(name: str, *own: str) -> tuple[Path, Path]:
        file = write(name)
        file.write_text(file.read_text().replace('"quickstart"', repr(str(recipe))))
        settings = [
            *own,
            "algorithm.rollout_correction=null",
            "checkpoint.every=1",
            "data.eval=[]",
            "trainer.evaluation={before: false, after: false, every: null}",
        ]
        whole, parts = tmp_path / "whole", tmp_path / "parts"
        for folder, steps in ((whole, 4), (parts, 2), (parts, 4)):
            arguments = [*settings, f"trainer.run_dir={folder}", f"trainer.total_steps={steps}"]
            monkeypatch.setattr("sys.argv", [name, *arguments])
            runpy.run_path(str(file), run_name="__main__")
        return whole, parts

    return runs


@pytest.mark.slow
def test_the_best_answers_are_kept_through_a_break(through_a_break: Any) -> None:
    whole, parts = through_a_break("best.py", "algorithm.policy_loss=reinforce")
    assert weights(parts) == weights(whole)
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/loss" in line] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_judge_learns_beside_the_policy_through_a_break(through_a_break: Any) -> None:
    whole, parts = through_a_break("judged.py")
    for part in ("export", "exports/judge"):
        ours, theirs = (folder / part / "model.safetensors" for folder in (parts, whole))
        assert ours.read_bytes() == theirs.read_bytes()
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "judge/loss" in line] == [1, 2, 3, 4]
    assert {line["reward/mean"] * 32 % 1 for line in lines if "judge/loss" in line} == {0.0}


def test_a_row_that_nobody_solved_comes_again(write: Any, recipe: Path, tmp_path: Path) -> None:
    path = write("again.py")
    run = tmp_path / "run"
    (tmp_path / "nothing.py").write_text("def nothing(prompt, trajectory):\n    return 0.0\n")
    reward = f"reward.functions=[{{name: '{tmp_path}/nothing.py:nothing'}}]"
    inline("train", str(recipe), f"data.sampler={path}:Again", reward, f"trainer.run_dir={run}")
    chosen = [line["sampler/n_mean"] for line in metrics(run) if "sampler/n_mean" in line]
    assert chosen == [4.0, 8.0, 8.0]


def test_halves_of_an_answer_add_up_to_it(
    write: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = write("vines.py").read_text().replace('"quickstart"', repr(str(recipe)))
    (tmp_path / "vines.py").write_text(program)
    log, seen = Session.log, list[Batch]()

    async def logging(session: Session, batch: BatchRef, *stats: Any) -> None:
        seen.append(await batch.fetch(["advantages", "branch_values", "reward"]))
        await log(session, batch, *stats)

    monkeypatch.setattr(Session, "log", logging)
    off = ("data.eval=[]", "trainer.evaluation={before: false, after: false, every: null}")
    monkeypatch.setattr("sys.argv", ["vines.py", *off, f"trainer.run_dir={tmp_path / 'run'}"])
    runpy.run_path(str(tmp_path / "vines.py"), run_name="__main__")
    assert len(seen) == 3
    for rows in seen:
        columns = (rows.rows(name) for name in ("advantages", "branch_values"))
        for given, worth, reward in zip(*columns, rows.scalars("reward"), strict=True):
            middle = len(given) // 2
            gains = {given[0], given[middle]} if middle else {given[0]}
            assert len(set(given[:middle])) <= 1
            assert len(set(given[middle:])) == 1
            by_hand = [worth[middle] - worth[0], reward - worth[middle]] if middle else [reward - worth[0]]
            assert sorted(gains) == pytest.approx(sorted(set(by_hand)), abs=1e-6)
