"""verl's Megatron: what a launch becomes, key by key, and what is refused by its name."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from pathlib import Path

import pytest
import yaml

from rondo.config import Config, LoadedConfig
from rondo.config.schema import MegatronBackendConfig, ParallelConfig, TorchBackendConfig
from rondo_verl import launch
from rondo_verl.megatron import _FIELDS
from rondo_verl.resolved import every_default
from rondo_verl.values import rows
from tests.rondo_verl.launched import SCRIPTS, refused, script
from tests.rondo_verl.translated import BASE, GAE, A, F, load, message, settings
from tests.sandboxes import need_sandbox

M = f"{A}.megatron"
T = f"{M}.override_transformer_config"
FULL = (f"+{T}.recompute_granularity=full", f"+{T}.recompute_method=uniform", f"+{T}.recompute_num_layers=1")
KL = f"{A}.use_kl_loss=True"


def config(*overrides: str) -> Config:
    return load([], [*BASE, *overrides]).config


def noted(loaded: LoadedConfig) -> list[str]:
    return [note for note in loaded.notes if " has no meaning in rondo: " in note]


# ---- launches


def test_a_launch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole: each key that it sets, by its value here."""
    need_sandbox()
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(shutil.copytree(SCRIPTS, tmp_path / "scripts"))
    loaded = launch.load("megatron.sh")
    c = loaded.config
    options = {"apply_rope_fusion": True}
    assert c.actor.backend == MegatronBackendConfig("megatron", last_stage_layers=12, options=options)
    assert c.actor.parallel == ParallelConfig(tensor=2, pipeline=2, context=2)
    assert c.reference.parallel == ParallelConfig(tensor=4, pipeline=1, context=2)
    assert (c.actor.gradient_checkpointing, c.actor.param_dtype) == (True, "float32")
    assert (c.actor.compute_dtype, c.reference.compute_dtype) == ("auto", "auto")  # bfloat16 on CUDA
    assert (c.actor.offload_params, c.actor.offload_optimizer, c.actor.lora) == (False, False, None)
    assert (c.actor.optimizer.lr, c.actor.optimizer.weight_decay) == (1e-6, 0.1)
    assert (c.actor.optimizer.schedule.name, c.actor.optimizer.grad_clip) == ("constant", 1.0)
    assert (c.actor.mini_batch_size, c.cluster.devices, c.rollout.n) == (32, 8, 5)
    assert loaded.origins["actor.backend.name"].where == f"megatron.sh:8 '{A}.strategy=megatron'"
    assert [key for key in loaded.origins if key.startswith("actor.backend.")] == [
        *("actor.backend.name", "actor.backend.recompute", "actor.backend.last_stage_layers"),
        "actor.backend.options.apply_rope_fusion",
    ]
    said = "\n".join(loaded.notes)
    for key in (
        "use_mbridge",
        "override_transformer_config.attention_backend",
        "use_precision_aware_optimizer",
    ):
        assert key in said
    (tmp_path / "recipe.yaml").write_text(launch.translate("megatron.sh").recipe, encoding="utf-8")
    again = load([str(tmp_path / "recipe.yaml")], []).config
    assert again == c
    offloads = f"{M}.use_dist_checkpointing (verl's spelling) cannot be boolean true"
    assert offloads in refused("megatron.sh", arguments=[f"{M}.use_dist_checkpointing=True"])
    other = "of the configs rondo knows ppo_trainer only"
    assert other in refused("megatron.sh", arguments=["--config-name=dapo_megatron_trainer"])


def test_a_name_with_megatron_in_it(tmp_path: Path) -> None:
    need_sandbox()
    keys = "algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m data.train_files=a.parquet"
    named = f"python3 -m verl.trainer.main_ppo {keys} trainer.project_name=megatron_trainer\n"
    assert isinstance(launch.load(script(tmp_path, named)).config.actor.backend, TorchBackendConfig)


def test_a_whole_config(tmp_path: Path) -> None:
    """As Hydra writes it, of Megatron's own file: its sections in the place of FSDP's, at their defaults."""
    engine = {
        **dict.fromkeys(
            ("param_offload", "grad_offload", "optimizer_offload", "use_dist_checkpointing"), False
        ),
        **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 2),
        **{"context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None},
        **{"virtual_pipeline_model_parallel_size": None, "sequence_parallel": True, "seed": 42},
        **{
            "use_distributed_optimizer": True,
            "dist_checkpointing_path": None,
            "dist_checkpointing_prefix": "",
        },
        **{"override_ddp_config": {}, "override_mcore_model_config": {}, "use_mbridge": True},
        **{"vanilla_mbridge": True, "use_remove_padding": True, "forward_only": False, "dtype": "bfloat16"},
        "override_transformer_config": {
            **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers")),
            **{"recompute_modules": ["core_attn"], "attention_backend": "flash"},
        },
    }
    optimizer = {
        **{"optimizer": "adam", "lr_warmup_init": 0.0, "lr_decay_steps": None, "lr_decay_style": "constant"},
        **{"min_lr": 0.0, "weight_decay_incr_style": "constant", "lr_wsd_decay_style": "exponential"},
        **{"lr_wsd_decay_steps": None, "use_checkpoint_opt_param_scheduler": False},
        "override_optimizer_config": {},
    }
    values = {key: value for key, value in every_default("main").items() if ".fsdp" not in key}
    values |= {
        "actor_rollout_ref.model.path": "m",
        "data.train_files": "a.parquet",
        f"{A}.strategy": "megatron",
    }
    values |= {"critic.strategy": "megatron", "algorithm.adv_estimator": "grpo", KL.partition("=")[0]: True}
    values |= {f"{section}.megatron": engine for section in (A, F, "critic")}
    values |= {f"{section}.optim.{key}": one for section in (A, "critic") for key, one in optimizer.items()}
    tree: dict[str, object] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node: dict = tree  # type: ignore[type-arg]
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    c = launch.load(str(tmp_path / "config.yaml")).config
    assert c.actor.backend == MegatronBackendConfig("megatron")
    assert c.actor.parallel == ParallelConfig(tensor=2, pipeline=2)
    assert (c.reference.parallel, c.actor.gradient_checkpointing) == (None, False)


# ---- which framework


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        ([f"{A}.strategy=megatron"], "megatron"),
        (["model_engine=megatron"], "megatron"),
        ([f"{M}.tensor_model_parallel_size=1"], "megatron"),
        ([f"{A}.strategy=fsdp2", f"{M}.tensor_model_parallel_size=2"], "torch"),
        (["model_engine=dp", f"{M}.tensor_model_parallel_size=2"], "torch"),
        ([f"{F}.megatron.tensor_model_parallel_size=2"], "torch"),
    ],
)
def test_which_framework_trains(overrides: list[str], backend: str) -> None:
    """What only the other one reads is noted."""
    fsdp = [f"{A}.fsdp_config.param_offload=True", f"{A}.ulysses_sequence_parallel_size=2"]
    loaded = load([], [*BASE, *overrides, *fsdp, "actor_rollout_ref.model.use_liger=True"])
    c = loaded.config.actor
    assert c.backend.name == backend
    assert (c.offload_params, c.parallel.context) == ((False, 1) if backend == "megatron" else (True, 2))
    of_fsdp = [note for note in noted(loaded) if "verl's Megatron does not read it" in note]
    assert len(of_fsdp) == (3 if backend == "megatron" else 0)
    assert backend == "megatron" or isinstance(c.backend, TorchBackendConfig)


@pytest.mark.parametrize(
    ("keys", "params", "optimizer"),
    [
        (["megatron.param_offload=True"], True, False),
        (["megatron.optimizer_offload=True"], False, True),
        (["megatron.param_offload=True", "megatron.optimizer_offload=False"], True, False),
        (["optim.override_optimizer_config.optimizer_cpu_offload=True"], False, True),
        (
            [
                "optim.override_optimizer_config.optimizer_cpu_offload=True",
                "megatron.optimizer_offload=False",
            ],
            False,
            True,
        ),
        (["optim.override_optimizer_config.optimizer_cpu_offload=False"], False, False),
        (["megatron.grad_offload=True"], False, False),
    ],
)
def test_what_rests_in_host_memory(keys: list[str], params: bool, optimizer: bool) -> None:
    """Of each model by itself: the critic's and the reference's are not the actor's."""
    for section in (A, "critic"):
        loaded = load([], [*BASE, *GAE, f"{A}.strategy=megatron", *(f"+{section}.{key}" for key in keys)])
        c = loaded.config
        mine, other = (c.actor, c.critic) if section == A else (c.critic, c.actor)
        assert (mine.offload_params, mine.offload_optimizer) == (params, optimizer)
        assert (other.offload_params, other.offload_optimizer) == (False, False)
        said = [note for note in noted(loaded) if "grad_offload" in note]
        assert len(said) == ("grad_offload" in keys[0])
    c = load([], [*BASE, KL, f"{A}.strategy=megatron", f"{F}.megatron.param_offload=True"]).config
    assert (c.reference.offload_params, c.actor.offload_params) == (True, False)


def test_a_section_of_the_other_framework_is_noted() -> None:
    loaded = load([], [*BASE, f"{A}.strategy=fsdp", f"{M}.param_offload=True"])
    assert [note.rpartition(": ")[2] for note in noted(loaded)] == [
        "verl reads it with strategy=megatron only"
    ]


@pytest.mark.parametrize("key", ["critic.strategy", f"{F}.strategy"])
def test_models_have_one_framework(key: str) -> None:
    both = "all models have one framework"
    assert both in message(*GAE, KL, f"{key}=megatron")
    assert both in message(*GAE, KL, f"{key}=fsdp2", f"{A}.strategy=megatron")
    assert config(*GAE, KL, f"{key}=megatron", f"{A}.strategy=megatron").actor.backend.name == "megatron"


# ---- layouts, and fields


def test_layouts_of_the_models_beside() -> None:
    """As the actor's where nothing else is written: then none is set."""
    two = [f"{M}.tensor_model_parallel_size=2", f"{M}.pipeline_model_parallel_size=2"]
    alike = config(*GAE, KL, *two)
    assert alike.actor.parallel == ParallelConfig(tensor=2, pipeline=2)
    assert (alike.critic.parallel, alike.reference.parallel) == (None, None)
    same = config(
        *GAE, KL, *two, *(one.replace(A, "critic") for one in two), *(one.replace(A, F) for one in two)
    )
    assert same == alike
    other = config(
        *GAE, KL, *two, "critic.megatron.tensor_model_parallel_size=4", f"{F}.megatron.dtype=float16"
    )
    assert other.critic.parallel == ParallelConfig(tensor=4, pipeline=2)
    assert (other.reference.parallel, other.reference.compute_dtype) == (None, "float16")
    assert "give a whole number, 1 or more" in message(f"{M}.context_parallel_size=0")


def test_chunks_of_stages_are_the_actors() -> None:
    """verl's sends overlap with chunks, as here: what is written of them means nothing beside."""
    key = "megatron.virtual_pipeline_model_parallel_size"
    sends = [f"+{T}.overlap_p2p_comm=True", f"+{T}.batch_p2p_comm=False"]
    actor = [f"{M}.pipeline_model_parallel_size=2", f"{A}.{key}=2", *sends]
    loaded = load([], [*BASE, *GAE, KL, *actor])
    assert loaded.config.actor.backend == MegatronBackendConfig("megatron", virtual=2)
    assert sum("it follows from actor.backend.virtual" in note for note in loaded.notes) == 2
    same = config(*GAE, KL, *actor, f"critic.{key}=2", f"{F}.{key}=2")
    assert same == loaded.config
    for section in ("critic", F):
        for other in ("null", "4"):
            assert "all models have the actor's" in message(*GAE, KL, *actor, f"{section}.{key}={other}")
        assert "all models have the actor's" in message(*GAE, KL, *actor[:1], f"{section}.{key}=2")


def test_what_is_computed_again() -> None:
    assert settings(*FULL) == {
        **{"actor.backend.name": "megatron", "actor.backend.recompute": "full"},
        "actor.gradient_checkpointing": True,
    }
    selective = config(f"+{T}.recompute_granularity=selective").actor
    assert (selective.gradient_checkpointing, selective.backend) == (
        *(True, MegatronBackendConfig("megatron", recompute="selective")),
    )
    critic = config(*GAE, f"{A}.strategy=megatron", *(one.replace(A, "critic") for one in FULL))
    assert (critic.actor.gradient_checkpointing, critic.critic.gradient_checkpointing) == (False, True)
    assert critic.actor.backend == MegatronBackendConfig("megatron", recompute="full")
    none = config("actor_rollout_ref.model.enable_gradient_checkpointing=True", f"{A}.strategy=megatron")
    assert none.actor.gradient_checkpointing is False  # verl's Megatron reads the fields alone


def test_fields_of_megatron_core() -> None:
    first, last = f"+{T}.num_layers_in_first_pipeline_stage=3", f"+{T}.num_layers_in_last_pipeline_stage=4"
    fused = [f"+{T}.bias_activation_fusion=True", f"{T}.overlap_p2p_comm=null", f"+{T}.hidden_dropout=0.0"]
    assert settings(first, last, *fused) == {
        **{"actor.backend.name": "megatron", "actor.backend.first_stage_layers": 3},
        **{"actor.backend.last_stage_layers": 4, "actor.backend.options.bias_activation_fusion": True},
    }
    reference = [one.replace(A, F) for one in (first, last, *fused)]
    assert settings(first, last, *fused, KL, *reference) == {
        **settings(first, last, *fused),
        "algorithm.kl.where": "loss",
    }
    assert "all models have the actor's" in message(first, KL, first.replace(A, F).replace("=3", "=2"))


def test_carried_fields_are_those_that_megatron_core_has_and_rondo_leaves() -> None:
    core = pytest.importorskip("megatron.core.transformer")
    stage = importlib.import_module("rondo.training.megatron.stage")
    carried = [field for field, values, _ in rows("megatron.tsv") if not values]
    known = {field.name for field in dataclasses.fields(core.TransformerConfig) if field.init}
    assert len(carried) == 10
    assert set(carried) <= known
    source = Path(str(stage.__file__)).read_text(encoding="utf-8").partition("ours: dict")[2]
    set_here = source.partition("# These want kernels")[0]
    assert not [field for field in carried if f'"{field}":' in set_here]


def test_a_mixture() -> None:
    """Its layout, and the dispatcher that it asks for; what is of layout or speed only is noted."""
    tokens = [f"+{T}.moe_token_dispatcher_type=flex", f"+{T}.moe_enable_deepep=True"]
    layout = [f"{M}.expert_model_parallel_size=4", f"{M}.expert_tensor_parallel_size=1"]
    loaded = load([], [*BASE, *tokens, *layout, f"+{T}.moe_grouped_gemm=True"])
    options = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    assert loaded.config.actor.backend == MegatronBackendConfig("megatron", options=options)
    assert loaded.config.actor.parallel == ParallelConfig(expert=4)
    assert [note.rpartition(": of ")[2] for note in loaded.notes[1:]] == [
        "layout only, since no expert is cut, and expert_model_parallel_size spreads them",
        "speed only, since the products of a rank's experts are one here",
    ]


# ---- what is refused


@pytest.mark.parametrize("section", [A, "critic"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("megatron.param_offload=half", "must be true or false"),
        ("optim.override_optimizer_config.optimizer_cpu_offload=half", "say true or false"),
        ("megatron.override_transformer_config.moe_expert_capacity_factor=1.2", "no token is dropped"),
        ("megatron.override_transformer_config.moe_aux_loss_coeff=0.01", "set actor.router.balance"),
        ("megatron.virtual_pipeline_model_parallel_size=0", "give a whole number, 1 or more"),
        (
            "megatron.override_transformer_config.virtual_pipeline_model_parallel_size=2",
            "say it in megatron.",
        ),
        ("megatron.use_dist_checkpointing=True", "name that as model.path"),
        ("megatron.use_megatron_fsdp=True", "strategy=fsdp2 shards parameters"),
        ("megatron.override_ddp_config={bucket_size: 1}", "rondo reduces gradients itself"),
        ("megatron.override_transformer_config.fp8=hybrid", "computes in bfloat16, float16 or float32"),
        ("megatron.override_transformer_config.attention_dropout=0.1", "rondo trains without dropout"),
        ("megatron.override_transformer_config.sequence_length=1", "it is not translated: leave it out"),
        ("megatron.override_transformer_config.recompute_granularity=full", "recompute_method=uniform"),
        ("megatron.override_transformer_config.recompute_granularity=half", "use one of full, selective"),
        ("megatron.qat.enable=True", "rondo does not translate it"),
        ("optim.lr_decay_style=cosine", "optimizer.schedule"),
        ("optim.lr_warmup_init=1e-7", "the learning rate rises from 0"),
        ("optim.override_optimizer_config.fp8_recipe=blockwise", "it is not translated: leave it out"),
    ],
)
def test_what_is_refused(section: str, override: str, words: str) -> None:
    text = message(*GAE, f"{A}.strategy=megatron", f"+{section}.{override}")
    key = override.partition("=")[0]
    assert f"{section}.{key}" in text
    assert words in text


def test_refused_beside_one_another() -> None:
    """All at once; a field of the optimizer's with FSDP is none; adapters are FSDP's."""
    text = message(f"{T}.fp8=e4m3", f"{T}.moe_z_loss_coeff=0.1", f"{M}.use_megatron_fsdp=True")
    assert [line.count("cannot be") for line in text.splitlines()] == [1, 1, 1]
    assert "set the keys of actor.optimizer" in message(f"{A}.optim.override_optimizer_config.eps=1e-6")
    lora = ("actor_rollout_ref.model.lora_rank=8", f"{A}.strategy=megatron")
    assert "verl's Megatron does not read it; rondo's has adapters: actor.lora" in message(*lora)
    again = (f"+{T}.recompute_granularity=selective", f"+{T}.recompute_modules=[mlp]")
    assert "computes attention again: [core_attn]" in message(*again)
    assert "all models have the actor's" in message(
        *GAE, *FULL, f"+critic.{T[len(A) + 1 :]}.recompute_granularity=selective"
    )


def test_values_that_are_fine_are_of_the_table() -> None:
    """Each field but those that are carried has a reason, or is looked at by a function."""
    without = [field for field, (values, why) in _FIELDS.items() if values and not why]
    again = ["granularity", "method", "num_layers", "modules"]
    assert without == [f"recompute_{one}" for one in again]
