"""Runs of models that see, on rows of text and on rows with images."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoModelForImageTextToText

import rondo
from rondo.config import load
from rondo.config.schema import FileSourceConfig
from rondo.core.errors import ConfigError, DataError, TrainError
from rondo.core.images import images_of_text
from rondo.data import ConversationStream
from rondo.models import ModelSource, build_model, load_model_config
from rondo.models.family import auto_class
from rondo.models.pixels import write_settings
from rondo.recipes import visual
from rondo.trainers.commands.evaluate import evaluate_model
from rondo.trainers.program import complete_model
from rondo.trainers.sessions import Session
from tests import begun
from tests.models.families import WITH_IMAGES, config_of
from tests.models.test_images import NAMED, TURNING
from tests.rollout.test_images import REFUSED
from tests.trainers.conftest import (
    PYTHONPATH,
    RECIPE,
    REPOSITORY,
    SFT_RECIPE,
    cli,
    in_a_session,
    metrics,
    weights,
)
from tests.trainers.test_geo3k import model_of
from tests.trainers.test_placement import SPLIT, learned
from tests.waiting import wait_for


def test_supervised_fine_tuning_of_text_exports_the_whole_model(tmp_path: Path) -> None:
    """The tower, which is frozen, is what it was; the vocabulary and the end of text are the tokenizer's."""
    config = config_of("qwen3_vl")
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        del config["text_config"][key]
    rows = [{"prompt": "what is red", "response": "a colour"}, {"prompt": "and two", "response": "a number"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model": {"config": config, "tokenizer": "tests.byte_tokenizers:tokenizer_of_200"},
        "data": {"train": [{"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}], "batch_size": 2},
        "actor": {"freeze": ["tower"], "optimizer": {"lr": 1e-2}},
        "trainer": {"total_steps": 2},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    run = rondo.sft(tmp_path / "recipe.yaml", **{"trainer.run_dir": str(tmp_path / "run")})
    first_loss, last_loss = run.metrics["sft/loss"]
    assert last_loss < first_loss - 1
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "export")
    assert trained.config.text_config.vocab_size == 200
    assert (tmp_path / "run" / "export" / "preprocessor_config.json").is_file()
    config["text_config"] |= {"vocab_size": 200, "eos_token_id": trained.config.text_config.eos_token_id}
    first = dict(build_model(ModelSource(config=config, seed=0), torch.float32).named_parameters())
    moved = {name for name, one in trained.named_parameters() if not torch.equal(one, first[name])}
    assert moved >= {name for name in first if "language_model.layers" in name}
    assert not [name for name in moved if "visual" in name]


# ---- rows with images

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
VISUAL = yaml.safe_load(Path(visual.__file__).with_name("visual_sft.yaml").read_text())["model"]
MODEL = {
    **VISUAL,
    "config": {
        **VISUAL["config"],
        "text_config": {
            **VISUAL["config"]["text_config"], **TEXT, "num_key_value_heads": 1, "head_dim": 16,
            "rope_parameters": {
                **VISUAL["config"]["text_config"]["rope_parameters"], "mrope_section": [4, 2, 2]
            },
        },
        "vision_config": {**VISUAL["config"]["vision_config"], **TOWER},
    },
}  # fmt: skip
BOARDS = "rondo.recipes.visual"


def rows_of(**options: Any) -> dict[str, Any]:
    return {"type": "function", "name": "boards", "task": f"{BOARDS}.train_rows", "options": options}


RL = {
    **RECIPE,
    "model": MODEL,
    "data": {**RECIPE["data"], "train": [rows_of(size=16)], "eval": []},
    "trainer": {"total_steps": 4},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "visual.yaml").write_text(yaml.safe_dump(RL))
    return tmp_path / "visual.yaml"


def gaps(run: Path) -> list[float]:
    return [line["rollout/log_prob_gap_max"] for line in metrics(run)]


@pytest.mark.parametrize("engine", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_sampler_and_trainer_see_the_same(engine: str, run: Callable[..., Path]) -> None:
    """In every step, idle rows included: their tokens are often the same, and their images are not."""
    done = run("run", f"rollout.engine.name={engine}")
    assert len(gaps(done)) == 4
    assert max(gaps(done)) < 2e-5
    assert metrics(done)[0]["images/seen"] > 1e-2
    rows = pq.read_table(done / "rollouts" / "step-000001.parquet").to_pylist()
    shown = [images_of_text(row["images"]) for row in rows]
    assert all(len(own) == 1 and own[0].n_tokens == 9 for own in shown)
    assert len({(row["seq"], own[0].sha256) for row, own in zip(rows, shown, strict=True)}) == 4
    paths = [Path(own[0].ref.removeprefix("path:")) for own in shown]
    assert all(path.parent == done / "images" and path.is_file() for path in paths)


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(recipe: Path, tmp_path: Path) -> None:
    folders = []
    for name in ("killed", "whole"):
        folders.append(tmp_path / name)
        arguments = ["train", str(recipe), f"trainer.run_dir={tmp_path / name}", "checkpoint.every=1"]
        if name == "killed":
            cli(*arguments, "trainer.total_steps=2")
        cli(*arguments)
    killed, whole = folders
    assert weights(killed) == weights(whole)
    assert metrics(killed)[-2:] == metrics(whole)[-2:]


@pytest.mark.slow
def test_a_replay_ends_with_the_same_bits(run: Callable[..., Path]) -> None:
    """Its rows have the images that those of the run had."""
    settings = ["trainer.max_staleness=1", "trainer.on_update=resume"]
    first = run("first", *settings)
    again = run("again", *settings, f"trainer.replay={first}")
    assert (again / "journal.jsonl").read_text() == (first / "journal.jsonl").read_text()
    assert weights(again) == weights(first)


@pytest.mark.slow
def test_two_processes_end_as_one(run: Callable[..., Path]) -> None:
    one, two = run("one"), run("two", "cluster.backend=process", "cluster.devices=2")
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["reward/mean"] == b["reward/mean"]
    assert max(gaps(two)) < 2e-5


@pytest.mark.slow
def test_bytes_through_the_controller_do_not_depend_on_the_size_of_images(run: Callable[..., Path]) -> None:
    task = "tests.trainers.test_images"
    through = []
    for name, side in (("small", 64), ("large", 1024)):
        source = {"type": "function", "name": "drawn", "task": f"{task}:drawn", "options": {"side": side}}
        done = run(name, f"data.train={json.dumps([source])}", "cluster.backend=process")
        lines = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
        through.append(sum(line["perf/driver_bytes"] for line in lines))  # in which step depends on time
        files = [file.stat().st_size for file in (done / "images").iterdir() if file.suffix != ".tsv"]
        assert (min(files) > 64 * 1024) == (side == 1024)
    # Answers have other lengths, as the pictures are others; each of the large ones has 3 MB.
    small, large = through
    assert abs(large - small) <= 0.2 * small


def drawn(side: int) -> list[dict[str, Any]]:
    """Makes rows with pictures of noise, which no format makes small."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(16):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (side, side, 3), np.uint8)).save(file, "PNG")
        rows.append({"prompt": "Which way?", "image": file.getvalue()})
    return rows


def blind_model(recipe: Path, folder: Path) -> list[str]:
    """Writes the recipe's model with a projector that makes nothing of an image; returns its settings."""
    source = ModelSource(config=complete_model(load([str(recipe)]).config).model.config)
    config = load_model_config(source)
    model = auto_class(config).from_config(config)
    for name, parameter in model.named_parameters():
        if "merger" in name:
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(folder)
    visual.tokenizer().save_pretrained(folder)
    write_settings(source, config, folder)
    return [f"model.path={folder}", "model.config=null", "model.tokenizer=null"]


@pytest.fixture
def blind(recipe: Path, tmp_path: Path) -> list[str]:
    return blind_model(recipe, tmp_path / "model")


def test_a_blind_policy_stops_in_its_first_step(blind: list[str], run: Callable[..., Path]) -> None:
    with pytest.raises(TrainError, match="the policy is blind: with other images"):
        run("blind", *blind)
    assert len(metrics(run("let", *blind, "model.images.check_seen=false"))) == 4


def test_a_blind_policy_stops_a_program(blind: list[str], recipe: Path, tmp_path: Path) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        async for prompts in session.prompts():
            batch = await actor.compute_log_prob(await actor.generate_sequences(prompts))
            batch = await session.compute_advantages(batch)
            await session.log(batch, await actor.update_actor(batch))

    with pytest.raises(TrainError, match="the policy is blind: with other images"):
        in_a_session(recipe, tmp_path / "blind", program, *blind)
    seeing = in_a_session(recipe, tmp_path / "seeing", program)
    assert ["images/seen" in line for line in metrics(seeing)] == [True, False, False, False]


def test_what_is_learnt_from_demonstrations_depends_on_the_images(tmp_path: Path) -> None:
    """The losses of the same texts: equal with the same pictures, others with others."""
    losses = []
    for number, seed in enumerate((0, 0, 1)):
        source = {
            "type": "function",
            "task": "tests.trainers.test_images:demonstrated",
            "options": {"seed": seed},
        }
        settings = {**SFT_RECIPE, "model": MODEL, "data": {**SFT_RECIPE["data"], "train": [source]}}
        (tmp_path / "sft.yaml").write_text(yaml.safe_dump(settings))
        done = rondo.sft(tmp_path / "sft.yaml", **{"trainer.run_dir": str(tmp_path / f"run{number}")})
        losses.append(list(done.metrics["sft/loss"]))
    assert losses[0] == losses[1]
    assert abs(losses[0][0] - losses[2][0]) > 1e-3


def demonstrated(seed: int) -> list[dict[str, Any]]:
    """Makes rows with the same texts, and boards of a seed."""
    drawn_boards = visual.boards("tests", 16, seed)
    return [{"prompt": "Which way?", "image": one.picture, "response": "#### up"} for one in drawn_boards]


def test_a_text_model_has_no_keys_of_images(recipe: Path, run: Callable[..., Path]) -> None:
    settings = {**RL, "model": {**RECIPE["model"], "images": {"max_pixels": 100}}}
    recipe.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=r"model.images: .* gives no images to"):
        run("text")


def test_a_model_is_evaluated_on_images_that_are_no_files(
    recipe: Path, tmp_path: Path, run: Callable[..., Path]
) -> None:
    """They are kept for as long as it takes: the answers are those of the run's own last evaluation."""
    held_out = {"type": "function", "name": "held_out", "task": f"{BOARDS}.eval_rows", "options": {"size": 8}}
    settings = [
        f"data.eval={json.dumps([held_out])}",
        "trainer.evaluation={greedy: true, before: false}",
        "trainer.seed=1",
    ]
    done = run("run", *settings)
    own = [json.loads(line) for line in (done / "evaluations" / "step-000004.jsonl").read_text().splitlines()]
    trained = done / "export"
    model = [f"model.path={trained}", "model.config=null", f"model.tokenizer={trained}"]
    found = evaluate_model(load([str(recipe)], [*settings, *model])).samples
    assert [one.text for one in found] == [one["text"] for one in own]
    assert len({one["text"] for one in own}) > 1


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_program_shows_images_of_its_own(family: str, recipe: Path, tmp_path: Path) -> None:
    """Its prompts are those of the stream, and its rows those of demonstrations."""
    (tmp_path / "board.png").write_bytes(visual.boards("train", 16, 0)[0].picture)
    row = {"prompt": "<image>Which way?", "images": [str(tmp_path / "board.png")], "response": "#### up"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    source = FileSourceConfig(type="jsonl", path=str(tmp_path / "rows.jsonl"), image_dir=str(tmp_path))
    found: list[Any] = []

    async def program(session: Session) -> None:
        actor, stream = await session.actor(), session.data.train
        demonstrated = ConversationStream(
            (source,), session.tokenizer, max_prompt_tokens=128, images=stream.images
        ).batch([0])
        async for _ in session.steps():
            board = visual.boards("train", 16, 0)[session.step % 2].picture
            own = session.prompt("Which way?", images=[board])
            parts = [
                {"type": "image", "path": str(tmp_path / "board.png")},
                {"type": "text", "text": "Which way?"},
            ]
            same = session.prompt([{"role": "user", "content": parts}])
            asked = next(
                one for one in map(stream.prompt, range(16)) if one.images[0].sha256 == same.images[0].sha256
            )
            assert own.token_ids.tolist() == same.token_ids.tolist() == asked.token_ids.tolist()
            given = await (await session.rows([same], ["#### up"], reward=[1.0])).fetch()
            for name in ("prompt_ids", "response_ids"):
                assert given.rows(name)[0].tolist() == demonstrated.rows(name)[0].tolist()
            batch = await actor.generate_sequences([own], n=4)
            batch = await session.compute_advantages(await actor.compute_log_prob(batch))
            rows = await batch.fetch(["old_log_probs", "rollout_log_probs", "images"])
            gap = rows.ragged("old_log_probs")[0] - rows.ragged("rollout_log_probs")[0]
            found.append((float(gap.abs().max()), images_of_text(rows.scalars("images")[0])[0].sha256))
            await actor.update_actor(batch)
        with pytest.raises(DataError, match="text without a chat template, show"):
            session.prompt([1, 2, 3], images=[b""])

    if family in NAMED:
        recipe.write_text(yaml.safe_dump({**RL, "model": model_of(family)}))
    in_a_session(recipe, tmp_path / "run", program, "data.max_prompt_tokens=128")
    digests = [hashlib.sha256(one.picture).hexdigest() for one in visual.boards("train", 16, 0)[:2]]
    assert [sha for _, sha in found] == [digests[step % 2] for step in range(4)]
    assert max(gap for gap, _ in found) < 2e-5


@pytest.mark.slow
def test_recorded_rows_are_trained_on_with_their_images(run: Callable[..., Path]) -> None:
    done = run("run", "rollout.recorded=null")
    again = run("again", f"rollout.recorded={done}", "data.train=[]", "reward.functions=[]")
    assert weights(again) == weights(done)


@pytest.mark.slow
def test_demonstrations_with_images_join_mini_batches(run: Callable[..., Path]) -> None:
    source = {"type": "function", "task": "tests.trainers.test_images:demonstrated", "options": {"seed": 0}}
    settings = [f"data.pretrain={json.dumps([source])}", "algorithm.pretrain_coef=0.5"]
    done = metrics(run("run", *settings, "data.pretrain_batch_size=4"))
    assert [line["step"] for line in done] == [1, 2, 3, 4]
    assert done[-1]["actor/lm_loss"] < done[0]["actor/lm_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_every_family_learns_from_demonstrations_and_by_reward(family: str, tmp_path: Path) -> None:
    """Log-probs of sampler and trainer agree in each of two steps, the first of which is on what SFT made."""
    blind = family == "gemma3"  # transformers begins with a projector of zeros
    images = {"images": {**(MODEL["images"] if family in TURNING else {}), "check_seen": not blind}}
    model = {**model_of(family), **images}
    source = {"type": "function", "task": "tests.trainers.test_images:demonstrated", "options": {"seed": 0}}
    sft = {**SFT_RECIPE, "model": model, "data": {**SFT_RECIPE["data"], "train": [source]}}
    sft["trainer"] = {"total_steps": 6}
    if family in NAMED:  # of whose tiles the names are many tokens
        sft["data"] |= {"max_prompt_tokens": 900}
        sft["actor"] = {**SFT_RECIPE["actor"], "token_budget": 4096}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(sft))
    rl = {**RL, "model": images, "trainer": {"total_steps": 2, "warm_start": "sft.yaml"}}
    if (family, "native") in REFUSED:
        rl["rollout"] = {**RL["rollout"], "engine": {"name": "transformers"}}
    if family in NAMED:
        rl |= {"data": {**RL["data"], "max_prompt_tokens": 900}}
        rl |= {"actor": {**RL["actor"], "token_budget": 4096}}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(rl))
    done = rondo.train(tmp_path / "rl.yaml", **{"trainer.run_dir": str(tmp_path / "run")})
    losses = [line["sft/loss"] for line in metrics(tmp_path / "run" / "warm_start")]
    assert losses[-1] < losses[0]
    # Of states that are carried along: see RECURRENT_TOLERANCE in tests/rollout/test_transformers_engine.py.
    assert max(done.metrics["rollout/log_prob_gap_max"]) < (1e-4 if family == "qwen3_5" else 2e-5)
    assert blind or len(done.metrics["images/seen"]) == 2


@pytest.mark.slow
def test_a_split_asynchronous_run_goes_on_and_is_replayed(recipe: Path, tmp_path: Path) -> None:
    """One step off, killed and begun again, it ends as whole; two steps off, with answers that go on under
    new weights, its replay has its bits.
    """

    def command(name: str, *settings: str) -> list[str]:
        return ["train", str(recipe), *SPLIT, f"trainer.run_dir={tmp_path / name}", *settings]

    off = ("trainer.max_staleness=1", "trainer.total_steps=8", "checkpoint.every=1")
    killed, file = tmp_path / "killed", tmp_path / "killed" / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    arguments = ["-m", "rondo.cli.main", *command("killed", *off)]
    with begun.Program(arguments, cwd=REPOSITORY, env=environment) as process:
        wait_for("step 3", lambda: file.exists() and '"step": 3' in file.read_text())
        process.send_signal(signal.SIGKILL)
    cli(*command("killed", *off))
    cli(*command("whole", *off))
    assert weights(killed) == weights(tmp_path / "whole")
    assert learned(killed)[-3:] == learned(tmp_path / "whole")[-3:]
    further = ("trainer.max_staleness=2", "rollout.max_concurrent=4")
    cli(*command("first", *further))
    cli(*command("again", *further, f"trainer.replay={tmp_path / 'first'}"))
    first, again = tmp_path / "first", tmp_path / "again"
    assert weights(again) == weights(first)
    assert (again / "journal.jsonl").read_text() == (first / "journal.jsonl").read_text()
