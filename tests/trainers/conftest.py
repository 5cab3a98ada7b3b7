"""A tiny model on the quickstart task: one step takes a fraction of a second."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen3Config

from rondo.algorithms import registry
from rondo.cli.main import main
from rondo.config import LoadedConfig, load
from rondo.controller import Cluster, Mesh, WorkerGroup
from rondo.core.errors import ConfigError
from rondo.core.types import GenerateRequest
from rondo.recipes.quickstart import tokenizer
from rondo.rollout import NativeEngine, in_process
from rondo.rollout.decoder import Decoder
from rondo.rollout.in_process import InProcessEngine
from rondo.rollout.native.decoder import PagedDecoder
from rondo.rollout.requests import News
from rondo.trainers.commands.train import train
from rondo.trainers.program.step import Roles
from rondo.trainers.sessions import Session, open_session
from rondo.workers.estimating import EstimatingWorker
from tests import begun
from tests.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])  # of processes that a test starts

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
}

RECIPE: dict[str, Any] = {
    "model": {"config": MODEL, "tokenizer": "rondo.recipes.quickstart.tokenizer"},
    "data": {
        "train": [
            {
                "type": "function",
                "name": "train",
                "task": "rondo.recipes.quickstart.train_rows",
                "options": {"size": 64},
            }
        ],
        "eval": [
            {
                "type": "function",
                "name": "held_out",
                "task": "rondo.recipes.quickstart.eval_rows",
                "options": {"size": 4},
            }
        ],
        "batch_size": 4,
        "max_prompt_tokens": 64,
    },
    "actor": {"token_budget": 512, "mini_batch_size": 2, "optimizer": {"lr": 1.0e-3}},
    "rollout": {"n": 4, "max_tokens": 8, "max_concurrent": 16},
    "reward": {"functions": [{"name": "tests/trainers/scorers.py:even_share"}]},
    "trainer": {"total_steps": 3, "evaluation": {"every": 2, "samples": 2}},
    "cluster": {"threads": 1},
    "tracking": {"console": "off", "plot": False},
    "checkpoint": {"export": True},
}

SFT_RECIPE: dict[str, Any] = {
    "model": RECIPE["model"],
    "data": {
        "train": [
            {
                "type": "function",
                "task": "rondo.recipes.quickstart.demonstrations",
                "options": {"size": 16},
            }
        ],
        "batch_size": 8,
        "max_prompt_tokens": 64,
    },
    "actor": {"token_budget": 512, "optimizer": {"lr": 1.0e-2}},
    "trainer": {"total_steps": 2},
    "tracking": RECIPE["tracking"],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The tiny recipe as a file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def saved_model(path: Path) -> Path:
    """Writes a folder of MODEL with the quickstart's tokenizer, as `rondo train` exports it."""
    fields = {name: value for name, value in MODEL.items() if name != "model_type"}
    torch.manual_seed(0)
    config = Qwen3Config(**fields, vocab_size=len(tokenizer()))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def cli(
    *arguments: str, check: bool = True, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`rondo …` in a process of its own, from the repository."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **environment}
    command = ["-m", "rondo.cli.main", *arguments]
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": env, "capture_output": True, "text": True}
    if begun.suits(env):
        done = begun.run(command, timeout=timeout, **options)
    else:
        done = subprocess.run([sys.executable, *command], timeout=timeout, **options)
    if check and done.returncode != 0:
        raise AssertionError(
            f"rondo {' '.join(arguments)} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done


def in_a_session(
    recipe: Path, folder: Path, program: Callable[[Session], Awaitable[None]], *settings: str, **options: Any
) -> Path:
    """Runs a program in a session of the recipe, and returns its folder."""

    async def whole() -> None:
        async with open_session([recipe], [f"trainer.run_dir={folder}", *settings], **options) as session:
            await program(session)

    asyncio.run(whole())
    return folder


def killed_and_undisturbed(module: str, folder: Path, recipe: Path, *settings: str) -> list[Path]:
    """Runs a test module's program twice in processes of its own, once killed behind its third step and
    started again; returns the folders of both.
    """
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    killed, whole = folder / "killed", folder / "whole"

    def begin(run: Path) -> begun.Program:
        command = ["-m", module, str(recipe), f"trainer.run_dir={run}", *settings]
        return begun.Program(command, cwd=REPOSITORY, env=environment)

    with begin(whole) as process:
        assert process.wait(240) == 0
    process = begin(killed)
    file = killed / "metrics.jsonl"
    wait_for("step 3", lambda: file.exists() and '"step": 3' in file.read_text())
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    with begin(killed) as process:
        assert process.wait(240) == 0
    return [killed, whole]


@dataclass(frozen=True)
class Finished:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


def inline(*arguments: str, check: bool = True) -> Finished:
    """`rondo …` in this process: the same code, without the seconds of a new interpreter."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    if check and code != 0:
        raise AssertionError(f"rondo {' '.join(arguments)} exited {code}\n{out.getvalue()}\n{err.getvalue()}")
    return Finished(code, out.getvalue(), err.getvalue())


def registered_for_now(
    monkeypatch: pytest.MonkeyPatch, name: str, loss: Callable[..., Any], prepare: Callable[..., Any]
) -> None:
    """Registers a policy loss with its preparation until the end of the test."""
    functions = {kind: dict(named) for kind, named in registry._FUNCTIONS.items()}
    monkeypatch.setattr(registry, "_FUNCTIONS", functions)
    monkeypatch.setattr(registry, "_PREPARE", dict(registry._PREPARE))
    registry.policy_loss(name, prepare=prepare)(loss)


def said_at_once(wrong: Mapping[str, str], recipe: Path, check: Callable[[LoadedConfig], Any]) -> None:
    """Asserts that `check` names every key of `wrong` at one time, each by the argument that set it."""
    with pytest.raises(ConfigError) as caught:
        check(load([str(recipe)], [*wrong.values()]))
    found = {problem.key: str(problem) for problem in caught.value.problems}
    assert set(found) == set(wrong)
    assert all(found[key].startswith(f"argument '{argument}': ") for key, argument in wrong.items())


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on clocks and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    engines = ("tokens_per_second", "queue_length", "in_flight", "cache_hit_rate")
    timed = ("timing/", "perf/", "plan/", *(f"rollout/{name}" for name in engines))
    return [
        {
            k: v
            for k, v in line.items()
            if not k.removeprefix("judge/").startswith(timed) and "seconds" not in k
        }
        for line in lines
    ]


def weights(run: Path) -> bytes:
    """The exported parameters, as bytes."""
    files: Sequence[Path] = sorted((run / "export").glob("*.safetensors"))
    assert files, f"{run} exported nothing"
    return b"".join(file.read_bytes() for file in files)


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """run(name, *overrides) -> the run folder."""

    def start(name: str, *overrides: str) -> Path:
        train(load([str(recipe)], [f"trainer.run_dir={tmp_path / name}", *overrides]))
        return tmp_path / name

    return start


def hold_an_answer(monkeypatch: pytest.MonkeyPatch, kind: type[InProcessEngine[Any]] = NativeEngine) -> None:
    """Whoever is faster, trainer or engine: when the first new weights come, an answer has begun and is not
    done. With the first batch answered, the engine waits at such a token boundary until it is paused.
    """
    drain, generate, answer = kind._drain, kind.generate, in_process.deliver
    size = RECIPE["data"]["batch_size"] * RECIPE["rollout"]["n"]
    first_batch: list[str] = []  # the buffer asks in the order of prompts
    answered: set[str] = set()
    held = threading.Event()

    def noting(self: InProcessEngine[Any], request: GenerateRequest, on_tokens: Any = None) -> Any:
        if request.request_id.startswith("train/") and len(first_batch) < size:
            first_batch.append(request.request_id)
        return generate(self, request, on_tokens)

    def answering(news: Iterable[News]) -> None:
        all_of_it = list(news)
        answered.update(call.request.request_id for call, _, end in all_of_it if end is not None)
        answer(all_of_it)

    def waiting(self: InProcessEngine[Any]) -> bool:
        first_is_done = len(first_batch) == size and answered.issuperset(first_batch)
        if first_is_done and not held.is_set() and _has_begun(self._decoder):
            held.set()
            patience = time.monotonic() + 240
            while not self._paused:
                assert time.monotonic() < patience, "no new weights come"
                time.sleep(0.001)
        return drain(self)

    monkeypatch.setattr(kind, "generate", noting)
    monkeypatch.setattr(in_process, "deliver", answering)
    monkeypatch.setattr(kind, "_drain", waiting)


def _has_begun(decoder: Decoder[Any]) -> bool:
    """Some sequence has a token, and is not done."""
    if isinstance(decoder, PagedDecoder):  # while it has a slot, its newest tokens are in the slot's table
        return any(decoder.scheduler.table.indices[slot] for slot, _ in decoder.scheduler.running)
    return any(sequence.token_ids for sequence in decoder.sequences())


@pytest.fixture
def begun_at_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `hold_an_answer`."""
    hold_an_answer(monkeypatch)


def roles_without_models(cluster: Cluster) -> Roles:
    """With an actor that has no model, on all devices: it computes columns of columns."""
    mesh = Mesh.data_parallel(cluster.num_devices)
    if "actor" not in cluster._handles[0].roles:
        return Roles(asyncio.run(cluster.create_group("actor", EstimatingWorker)), None)
    given = cluster._handles, cluster.resolve, (), cluster.placer
    return Roles(WorkerGroup("actor", EstimatingWorker, mesh, *given), None)
