"""Runs with actor.lora: GRPO, PPO, SFT, pairs and reward models; routes, resume, export, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from rondo.config import load
from rondo.config.schema import ActorLoraConfig
from rondo.core.errors import CheckpointError, ConfigError, OtherRunError, WeightSyncError
from rondo.models.lora import Adapter
from rondo.planning import reference_in_actor
from rondo.trainers.commands.check import check_rl
from rondo.trainers.commands.check_supervised import check_supervised
from rondo.trainers.commands.supervised import preference, reward_model, sft
from rondo.trainers.program import plan_program
from rondo.trainers.supervised import PREFERENCE
from rondo.training.torch_backend.adapters import Adapters
from rondo.training.views import as_shard
from tests.messages import full_text
from tests.trainers.conftest import RECIPE, inline, metrics, weights

pytest.importorskip("peft")

Run = Callable[..., Path]
LORA = "actor.lora={rank: 4, alpha: 8}"
KL = "algorithm.kl={name: k3, where: loss, coef: 0.01}"
NO_EVALUATION = "trainer.evaluation.every=null"
PAIRS = {"type": "function", "task": "rondo.recipes.quickstart.pairs"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder, with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    inline(
        "train",
        str(folder / "tiny.yaml"),
        "trainer.total_steps=1",
        NO_EVALUATION,
        f"trainer.run_dir={folder}/run",
    )
    return folder / "run" / "export"


def _of(base: Path) -> tuple[str, ...]:
    return "model.config=null", f"model.path={base}", f"model.tokenizer={base}"


@pytest.mark.slow
def test_grpo_with_a_reference_that_is_the_actor(run: Run, base: Path) -> None:
    settings = (*_of(base), LORA, KL, "trainer.total_steps=3", "actor.optimizer.lr=0.02", NO_EVALUATION)
    settings += ("actor.mini_batch_size=4",)
    folder = run("lora", *settings)
    config = load([str(folder / "config.yaml")]).config
    assert reference_in_actor(config)
    assert plan_program(config).roles == ()  # there is no second model
    lines = metrics(folder)
    assert lines[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-7)  # one update, under the start
    assert lines[3]["actor/kl_loss"] > 1e-4
    assert all(line["rollout/log_prob_gap_max"] < 1e-4 for line in lines[1:])  # the sampler has the adapters
    # The same with a reference of its own, which reads the same folder by another name.
    (folder.parent / "link").symlink_to(base)
    other = run("own", *settings, f"reference.path={folder.parent / 'link'}")
    assert plan_program(load([str(other / "config.yaml")]).config).roles == ("reference",)
    assert weights(other) == weights(folder)
    assert [line["actor/kl_loss"] for line in metrics(other)[1:]] == [
        line["actor/kl_loss"] for line in lines[1:]
    ]
    # What is exported: the merged model, which is the base and the adapter.
    import peft

    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder / "export")(input_ids=ids).logits
        start = AutoModelForCausalLM.from_pretrained(base)
        before = start(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(start, folder / "export" / "adapter")(input_ids=ids).logits
    assert (merged - adapted).abs().max() < 1e-4
    assert (merged - before).abs().max() > 1e-2
    written = json.loads((folder / "export" / "adapter" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["base_model_name_or_path"]) == (4, 8, str(base))


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_stopped_and_exports_its_checkpoints(run: Run, tmp_path: Path) -> None:
    settings = (LORA, KL, "checkpoint.every=2", NO_EVALUATION)
    whole = run("whole", *settings, "trainer.total_steps=4")
    run("parts", *settings, "trainer.total_steps=2")
    parts = run("parts", *settings, "trainer.total_steps=4")
    assert weights(parts) == weights(whole)
    assert metrics(parts)[-1] == metrics(whole)[-1]
    full = run("full", "checkpoint.every=2", "trainer.total_steps=2", NO_EVALUATION)
    sizes = [
        sum(file.stat().st_size for file in (folder / "checkpoints").glob("step-*2/actor/*.bin"))
        for folder in (parts, full)
    ]
    assert 0 < sizes[0] < sizes[1] / 4
    inline("export", str(whole), str(tmp_path / "out"))
    assert weights(whole) == b"".join(
        f.read_bytes() for f in sorted((tmp_path / "out").glob("*.safetensors"))
    )
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_base_that_changed_is_noticed_at_a_resume(
    run: Run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a piece of each tensor does not show it."""
    monkeypatch.setattr("rondo.trainers.loop.checkpoints.named_files", lambda config: {})
    import shutil

    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    settings = (*_of(copy), LORA, "checkpoint.every=1", NO_EVALUATION)
    run("run", *settings, "trainer.total_steps=2")
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    (copy / "manifest.json").unlink(missing_ok=True)
    # The checkpoint is whole, and the one before it has the same base: nothing is to be moved aside.
    with pytest.raises(OtherRunError, match=full_text("holds adapters of a model")):
        run("run", *settings, "trainer.total_steps=3")


TWO_POOLS = (
    "cluster.backend=process",
    "cluster.devices=2",
    "cluster.pools={train: 1, rollout: 1}",
    "cluster.placement={rollout: rollout}",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        ("rollout.replicas=2",),
        ("rollout.weight_transport=disk", "rollout.bucket_bytes=20000"),
        ("rollout.engine=transformers",),
        ("trainer.max_staleness=1",),
        TWO_POOLS,
        ("cluster.backend=process", "cluster.devices=2"),
    ],
)
def test_every_route_brings_the_adapters(run: Run, way: tuple[str, ...]) -> None:
    """The gap between sampler and trainer, after updates that change the policy, says that they are used."""
    folder = run("run", LORA, "actor.optimizer.lr=0.02", "trainer.total_steps=3", NO_EVALUATION, *way)
    lines = metrics(folder)[1:]
    behind = any("max_staleness" in one for one in way)
    for line in lines:
        assert line["weights/canary_gap"] < 1e-4
        if not behind:
            assert line["rollout/log_prob_gap_max"] < 1e-4
    assert max(line["actor/grad_norm"] for line in lines) > 0


ALONE = "actor.lora={rank: 4, alpha: 8, send: adapters}"
# A and B of the tiny model: per layer q, k, v, o, gate, up, down; rank 4 times inputs and outputs, float32.
FACTOR_BYTES = 4 * 2 * 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 64))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_adapters_alone_give_the_same_run_as_merged_weights(run: Run, engine: str) -> None:
    """One rank, float32: they are merged in the engine as the trainer does it, bit for bit."""
    settings = (f"rollout.engine={engine}", "actor.optimizer.lr=0.02", "trainer.total_steps=3")
    merged = run("merged", LORA, *settings)
    alone = run("alone", ALONE, *settings)
    timed = ("timing/", "perf/", "plan/", "weights/")
    for ours, theirs in zip(metrics(alone), metrics(merged), strict=True):
        assert {k: v for k, v in ours.items() if not k.startswith(timed)} == {
            k: v for k, v in theirs.items() if not k.startswith(timed)
        }
        assert ours.get("weights/canary_gap") == theirs.get("weights/canary_gap")
    assert weights(alone) == weights(merged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "copies"),
    [
        (("rollout.engine.process=own",), 1),
        (("rollout.replicas=2",), 2),
        (("rollout.weight_transport=disk", "rollout.bucket_bytes=20000"), 2),  # written, and read
        (("trainer.max_staleness=2",), 0),
        pytest.param(TWO_POOLS, 1, marks=pytest.mark.slow),
        pytest.param(("cluster.backend=process", "cluster.devices=2"), 1, marks=pytest.mark.slow),
    ],
)
def test_a_sync_moves_a_and_b_alone(run: Run, way: tuple[str, ...], copies: int) -> None:
    settings = ("actor.optimizer.lr=0.02", "trainer.total_steps=3", "checkpoint.every=2", NO_EVALUATION)
    folder = run("run", ALONE, *settings, *way)
    lines = metrics(folder)[1:]
    assert [line["weights/bytes_moved"] for line in lines] == [copies * FACTOR_BYTES] * 3
    assert all(line["weights/canary_gap"] < 1e-4 for line in lines)
    assert max(line["actor/grad_norm"] for line in lines) > 0
    more = run("run", ALONE, *settings, *way, "trainer.total_steps=4")  # new engines get the base again
    assert metrics(more)[-1]["weights/bytes_moved"] == copies * FACTOR_BYTES
    assert metrics(more)[-1]["weights/canary_gap"] < 1e-4


@pytest.mark.parametrize("send", ["merged", "adapters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_ignores_the_adapters_is_noticed(
    run: Run, dtype: str, send: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It confirms checksums and versions, and goes on with the model without them. In bfloat16 what they
    change is within the tolerance of two implementations.
    """
    merged = Adapters.merged

    def without(self: Adapters, shards: Any, factors: Any, group: Any) -> Any:
        nothing = {
            name: as_shard(factor, torch.zeros_like(factor.to_local()), factor.device_mesh)
            for name, factor in factors.items()
        }
        return merged(self, shards, nothing, group)

    monkeypatch.setattr(Adapters, "merged", without)
    monkeypatch.setattr(Adapter, "delta", lambda self, a, b, *part: torch.zeros(()))  # merged in the engine
    settings = (
        f"actor.lora.send={send}",
        f"rollout.dtype={dtype}",
        "actor.optimizer.lr=0.005",
        NO_EVALUATION,
    )
    with pytest.raises(WeightSyncError) as caught:
        run("run", LORA, *settings, "trainer.total_steps=9")
    message = str(caught.value)
    assert "without the adapters" in message or (dtype == "float32" and "tolerance" in message)


def test_adapters_are_on_all_linear_layers_where_nothing_is_said() -> None:
    arguments = ["model.path=x", "trainer.total_steps=1"]
    config = load([], arguments).config
    adapted = load([], [*arguments, "actor.lora={}"]).config
    assert adapted.actor.lora == ActorLoraConfig()
    assert adapted.actor.lora.targets == ("all-linear",)
    assert config.actor.lora is None


@pytest.mark.slow
@pytest.mark.parametrize("send", ["merged", "adapters"])
def test_a_base_in_four_bits_gives_the_run_on_the_weights_that_it_stands_for(
    run: Run, base: Path, send: str
) -> None:
    pytest.importorskip("bitsandbytes")
    nf4 = "actor.lora.base_dtype=nf4"
    settings = (LORA, f"actor.lora.send={send}", KL, NO_EVALUATION, "checkpoint.every=2")
    # Nothing is learnt, and what is exported is what the base stands for.
    stands = run("stands", *_of(base), *settings, nf4, "actor.optimizer.lr=1e-30", "trainer.total_steps=1")
    learn = (*settings, "actor.optimizer.lr=0.02", "trainer.total_steps=4")
    quantised = run("quantised", *_of(base), *learn[:-1], nf4, "trainer.total_steps=2")
    quantised = run("quantised", *_of(base), *learn, nf4)  # goes on
    plain = run("plain", *_of(stands / "export"), *learn)
    assert weights(quantised) == weights(plain) != weights(stands)
    own = ("rollout/", "reward/", "actor/", "response")
    for ours, theirs in zip(metrics(quantised), metrics(plain), strict=True):
        assert {k: v for k, v in ours.items() if k.startswith(own)} == {
            k: v for k, v in theirs.items() if k.startswith(own)
        }
    with pytest.raises(CheckpointError, match="other weights"):
        run("quantised", *_of(base), *learn, "trainer.total_steps=5")


def test_what_a_base_in_four_bits_cannot_be_is_said_before_the_start(run: Run) -> None:
    pytest.importorskip("bitsandbytes")
    nf4 = (LORA, "actor.lora.base_dtype=nf4", "trainer.total_steps=1")
    with pytest.raises(ConfigError, match=full_text("actor.lora.base_dtype: weights in nf4")):
        run("two", *nf4, "cluster.backend=process", "cluster.devices=2")
    with pytest.raises(ConfigError, match=r"actor.*set param_dtype=bfloat16"):
        run("mixed", *nf4, "actor.compute_dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"or remove reference\.refresh_every"):
        run("two models", *nf4, KL, "reference.refresh_every=2")


def test_ppo_with_adapters_on_the_critic(run: Run) -> None:
    settings = ("algorithm.advantage=gae", "critic.token_budget=512", "trainer.total_steps=3", NO_EVALUATION)
    folder = run("ppo", LORA, "critic.lora={rank: 2, targets: [q_proj]}", *settings, "checkpoint.every=3")
    lines = metrics(folder)
    assert all(line["critic/grad_norm"] > 0 for line in lines[1:])
    critic = next((folder / "checkpoints").glob("step-*3/critic"))
    # 2 layers of q_proj, rank 2 of [32, 32]; the value head; each with two moments.
    numbers = 3 * (2 * 2 * (32 + 32) + 33)
    size = sum(file.stat().st_size for file in critic.glob("*.bin"))
    assert 4 * numbers <= size < 4 * numbers + 2000


def test_prime_learns_its_rewards_with_adapters_of_its_own(run: Run) -> None:
    settings = ("algorithm.advantage=prime", "prm.lr=1e-2", "checkpoint.every=2", "trainer.total_steps=2")
    folder = run("prime", LORA, *settings, NO_EVALUATION)
    lines = metrics(folder)
    assert plan_program(load([str(folder / "config.yaml")]).config).roles == ("prm",)
    assert lines[1]["prm/loss"] > 0
    states = [
        sum(f.stat().st_size for f in folder.glob(f"checkpoints/step-*2/{role}/*.bin"))
        for role in ("actor", "prm")
    ]
    assert states[0] == states[1] > 0


@pytest.fixture
def pairs(tmp_path: Path) -> Callable[..., Path]:
    """pairs(command, name, *overrides) -> the run folder."""
    recipe = {key: RECIPE[key] for key in ("model", "cluster", "tracking", "checkpoint")}
    source = {**PAIRS, "name": "pairs", "options": {"size": 8}}
    recipe["data"] = {"train": [source], "batch_size": 4, "max_prompt_tokens": 64}
    recipe["actor"] = {"token_budget": 512, "optimizer": {"lr": 5e-3}, "lora": {"rank": 4}}
    recipe["trainer"] = {"total_steps": 6}
    path = tmp_path / "pairs.yaml"
    path.write_text(yaml.safe_dump(recipe))

    def start(command: Any, name: str, *overrides: str) -> Path:
        command(load([str(path)], [f"trainer.run_dir={tmp_path / name}", *overrides]))
        return tmp_path / name

    return start


def test_dpo_measures_against_the_model_without_the_adapters(pairs: Run, tmp_path: Path) -> None:
    folder = pairs(preference, "dpo")
    lines = metrics(folder)
    assert lines[0]["pair/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["pair/margin"] == 0  # the reference is the actor, bit for bit
    assert lines[-1]["pair/loss"] < math.log(2) - 0.01
    config = load([str(folder / "config.yaml")]).config
    assert PREFERENCE.roles(config) == ("actor",)
    with pytest.raises(ConfigError) as caught:
        check_supervised(load([str(tmp_path / "pairs.yaml")], ["reference.token_budget=300"]), PREFERENCE)
    assert "the reference is the actor" in str(caught.value)
    with pytest.raises(ConfigError) as caught:  # there are no engines
        check_supervised(load([str(tmp_path / "pairs.yaml")], ["actor.lora.send=adapters"]), PREFERENCE)
    assert caught.value.key == "actor.lora.send"


def test_a_reward_model_learns_with_adapters_and_a_head(pairs: Run) -> None:
    folder = pairs(reward_model, "reward")
    lines = metrics(folder)
    assert lines[0]["pair/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[-1]["pair/loss"] < math.log(2) - 0.01
    assert (folder / "export" / "value_head.safetensors").is_file()


def test_sft_with_adapters_then_more_from_its_adapter(base: Path, tmp_path: Path) -> None:
    recipe = {key: RECIPE[key] for key in ("cluster", "tracking", "checkpoint")}
    recipe["model"] = {"path": str(base)}
    task = {"type": "function", "task": "rondo.recipes.quickstart.demonstrations", "options": {"size": 16}}
    recipe["data"] = {"train": [task], "batch_size": 8, "max_prompt_tokens": 64}
    recipe["actor"] = {"token_budget": 512, "optimizer": {"lr": 1e-2}, "lora": {"rank": 4}}
    recipe["trainer"] = {"total_steps": 3}
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(recipe))
    sft(load([str(path)], [f"trainer.run_dir={tmp_path / 'first'}"]))
    first = metrics(tmp_path / "first")
    assert first[-1]["sft/loss"] < first[0]["sft/loss"]
    adapter = f"actor.lora.path={tmp_path / 'first' / 'export' / 'adapter'}"
    sft(load([str(path)], [f"trainer.run_dir={tmp_path / 'second'}", adapter]))
    assert metrics(tmp_path / "second")[0]["sft/loss"] < first[-1]["sft/loss"]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("actor.lora={rank: 0}",), "actor.lora.rank"),
        (("actor.lora={targets: []}",), "actor.lora.targets"),
        (("actor.lora={init: pissa}",), "actor.lora.init"),
        (("actor.lora={modules_to_save: [lm_head]}",), "actor.lora.modules_to_save"),
        (("actor.lora={targets: [lm_head]}",), "actor.lora.targets"),
        (("actor.lora={targets: [embed_tokens]}",), "actor.lora.targets"),
        (("actor.lora={targets: [q_projj]}",), "actor.lora.targets"),
        (("actor.lora={path: nowhere}",), "actor.lora.path"),
        (("actor.lora={}", KL, "reference.param_dtype=bfloat16"), "reference.param_dtype"),
        (("actor.lora={send: both}",), "actor.lora.send"),
        (("critic.lora={send: adapters}",), "critic.lora.send"),
        (("critic.lora={}",), "critic.lora"),
        (("actor.param_dtype=bfloat16",), "actor.param_dtype"),
    ],
)
def test_what_cannot_work_is_said_at_once(recipe: Path, arguments: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rl(load([str(recipe)], [*arguments]))
    assert {problem.key for problem in caught.value.problems} == {key}


def test_an_adapter_that_peft_would_read_as_another_is_refused_at_once(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rondo.models.lora._astray", lambda *_: ["model.layers.1.mlp.up_proj"])
    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.mlp\.up_proj'") as caught:
        check_rl(load([str(recipe)], ["actor.lora={}"]))
    assert {problem.key for problem in caught.value.problems} == {"actor.lora.targets"}


def test_a_base_in_half_precision_trains(run: Run) -> None:
    settings = ("actor.param_dtype=bfloat16", "actor.compute_dtype=float32", LORA, NO_EVALUATION)
    lines = metrics(run("half", *settings, "actor.optimizer.lr=0.02", "trainer.total_steps=3"))
    # The sampler's weights are in float32, so nothing of the adapters is rounded away.
    assert all(line["rollout/log_prob_gap_max"] < 1e-4 for line in lines[1:])
    assert all(np.isfinite(line["actor/grad_norm"]) for line in lines[1:])


@pytest.mark.slow
def test_a_starting_adapter_and_a_reference(base: Path, run: Run, recipe: Path) -> None:
    """A reference would be the model without the adapter: only where somebody says so."""
    first = run("first", *_of(base), LORA, "actor.optimizer.lr=0.02", "trainer.total_steps=2", NO_EVALUATION)
    settings = [*_of(base), f"actor.lora={{rank: 4, alpha: 8, path: {first}/export/adapter}}", KL]
    with pytest.raises(ConfigError) as caught:
        check_rl(load([str(recipe)], settings))
    assert caught.value.key == "actor.lora.path"
    settings += [f"reference.path={base}"]
    assert check_rl(load([str(recipe)], settings)).roles == ()
    lines = metrics(run("second", *settings, "trainer.total_steps=1", NO_EVALUATION))
    assert lines[1]["actor/kl_loss"] > 1e-4  # from the base, where the policy is the adapter's
