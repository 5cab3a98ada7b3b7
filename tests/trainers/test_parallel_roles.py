"""Every role with a model, along each axis: supervised training, and runs with a critic, a reward model, a
teacher, a reference and a PRM, end as on one process.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from rondo.config import LoadedConfig, load
from rondo.trainers.commands.supervised import preference, reward_model, sft
from rondo.trainers.commands.train import train
from tests.trainers.conftest import RECIPE, SFT_RECIPE, metrics
from tests.trainers.test_parallel import DENSE, MIXTURE

# What rounds to nothing is then no step of full length: Adam divides by it.
OPTIMIZER = "actor.optimizer={lr: 1e-2, eps: 1e-3}"
PAIRS = {"type": "function", "task": "rondo.recipes.quickstart.pairs", "options": {"size": 8}}
OF_PAIRS = SFT_RECIPE | {"data": {"train": [PAIRS], "batch_size": 4, "max_prompt_tokens": 64}}
# Name: (command, recipe, settings, whose weights are compared). JUDGE and TEACHER: what the first two export.
# In float32 on a card, too (tests/host_card/test_megatron.py).
F32 = "compute_dtype: float32"
REFERENCE = f"reference={{{F32}}}"
TASKS: dict[str, tuple[Callable[[LoadedConfig], Any], dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "sft": (sft, SFT_RECIPE, (), ("actor",)),
    "reward model": (reward_model, OF_PAIRS, (), ("actor",)),
    "preference": (preference, OF_PAIRS, (REFERENCE,), ("actor",)),
    "judged and distilled": (
        train,
        RECIPE,
        (
            "algorithm.advantage={name: gae, lam: 0.9}",
            "algorithm.policy_loss=forward_kl_topk",
            "algorithm.kl={name: k3, where: loss, coef: 0.1}",
            f"critic={{token_budget: 512, optimizer: {{eps: 1e-3}}, {F32}}}",
            f"reward.models=[{{path: JUDGE, name: judge, token_budget: 512, {F32}AXES}}]",
            f"teacher={{path: TEACHER, top_k: 4, token_budget: 512, {F32}AXES}}",
            REFERENCE,
        ),
        ("actor", "critic"),
    ),
    "process rewards": (
        train,
        RECIPE,
        ("algorithm.advantage=prime", "prm.lr=1e-2", REFERENCE),
        ("actor", "prm"),
    ),
}
SLOW = pytest.mark.slow
AXES = [
    pytest.param(DENSE, 2, "{tensor: 2}", id="tensor"),
    pytest.param(DENSE, 2, "{context: 2}", id="context", marks=SLOW),
    pytest.param(MIXTURE, 2, "{expert: 2}", id="expert", marks=SLOW),
    pytest.param(DENSE, 4, "{replicate: 2}", id="replicate x shard", marks=SLOW),
]
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(task, model) -> the run folder; with (devices, axes, settings) along these, else on one process,
    once.
    """
    alone: dict[tuple[str, tuple[str, ...]], Path] = {}

    def start(task: str, model: tuple[str, ...], devices: int = 1, axes: str = "", *more: str) -> Path:
        if not axes and (task, model) in alone:
            return alone[task, model]
        command, recipe, settings, _ = TASKS[task]
        folder = tmp_path_factory.mktemp("run")
        (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
        given = [*model, OPTIMIZER, f"actor={{{F32}}}", f"trainer.run_dir={folder / 'run'}", *more]
        given += ["trainer.total_steps=2", "checkpoint={every: 2, export: true}", "cluster.threads=1"]
        given += ["trainer.evaluation.every=null"] if command is train else []
        if axes:
            given += ["cluster.backend=process", f"cluster.devices={devices}", f"actor.parallel={axes}"]
        for setting in settings:
            for name, source in (("JUDGE", "reward model"), ("TEACHER", "sft")):
                if name in setting:
                    setting = setting.replace(name, str(start(source, model) / "export"))
            given.append(setting.replace("AXES", f", parallel: {axes}" if axes else ""))
        command(load([str(folder / "tiny.yaml")], given))
        if not axes:
            alone[task, model] = folder / "run"
        return folder / "run"

    return start


def learned(run: Path, role: str) -> Mapping[str, torch.Tensor]:
    """The weights in a role's last checkpoint, put together from what its ranks wrote."""
    (folder,) = run.glob(f"checkpoints/step-*2/{role}")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    sizes = {name: entry.size for name, entry in metadata.state_dict_metadata.items()}
    out = {name: torch.full(size, torch.nan) for name, size in sizes.items() if name.startswith("model.")}
    for index, place in metadata.storage_data.items():
        if index.fqn in out:
            assert place.dtype == torch.float32
            data = np.fromfile(folder / place.file, np.float32, math.prod(place.shape), offset=place.start)
            offset = index.offset or (0,) * len(place.shape)
            where = (slice(at, at + size) for at, size in zip(offset, place.shape, strict=True))
            out[index.fqn][tuple(where)] = torch.from_numpy(data).view(place.shape)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("model", "devices", "axes"), AXES)
def test_every_role_ends_as_on_one_process(
    run: Run, task: str, model: tuple[str, ...], devices: int, axes: str
) -> None:
    compare(task, run(task, model), run(task, model, devices, axes))


def compare(task: str, alone: Path, spread: Path) -> None:
    """Asserts that two runs have the same metrics, and their roles the same weights."""
    for expected, found in zip(metrics(alone), metrics(spread), strict=True):
        keys = {key for key in {*expected, *found} if not key.startswith("weights/")}  # alone, nothing moves
        for key in keys:
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    for role in TASKS[task][3]:
        before, after = learned(alone, role), learned(spread, role)
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            assert float((after[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()) + 1e-7, (role, name)
