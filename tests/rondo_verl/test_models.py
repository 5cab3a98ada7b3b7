"""The models' keys in verl's spelling: adapters, axes, what is offloaded, by the values that they become."""

from __future__ import annotations

import pytest

from rondo.config import Config
from rondo.config.schema.models import ActorLoraConfig, LoraConfig, ParallelConfig
from tests.rondo_verl.translated import BASE, GAE, A, F, R, load, message

M = "actor_rollout_ref.model"
EIGHT = ("trainer.n_gpus_per_node=4", "trainer.nnodes=2")
KL = f"{A}.use_kl_loss=True"


def config(*overrides: str) -> Config:
    return load([], [*BASE, *overrides]).config


# ---- adapters


def test_with_adapters_the_reference_is_the_actor_without_them() -> None:
    """As in verl, which then has no other model; keys of one are noted, and the run starts."""
    keys = [f"{F}.fsdp_config.param_offload=True", f"{F}.log_prob_max_token_len_per_gpu=9000"]
    loaded = load([], [*BASE, KL, f"{M}.lora_rank=8", *keys])
    assert [key for key in loaded.origins if key.startswith("reference.")] == []
    noted = [note for note in loaded.notes if "the reference is the actor without them" in note]
    assert len(noted) == 2
    assert load([], [*BASE, KL, *keys]).config.reference.offload_params is True


def test_adapters() -> None:
    rank = f"{M}.lora_rank=64"
    assert config(rank).actor.lora == ActorLoraConfig(64, 16.0)  # verl's alpha is 16
    both = config(rank, f"{M}.lora_alpha=32", f"{M}.target_modules=[q_proj, v_proj]", f"{R}.name=vllm")
    assert both.actor.lora == ActorLoraConfig(64, 32.0, ("q_proj", "v_proj"), send="adapters")
    assert "set lora_rank and lora_alpha to r and lora_alpha" in message(f"{M}.lora_adapter_path=adapter")
    path = config(rank, f"{M}.lora_adapter_path=adapter", f"{R}.name=sglang").actor.lora
    assert path == ActorLoraConfig(64, 16.0, path="adapter")
    critic = config(*GAE, "critic.model.lora_rank=8", "critic.model.lora_alpha=4")
    assert (critic.actor.lora, critic.critic.lora) == (None, LoraConfig(8, 4.0))


def test_no_adapters() -> None:
    loaded = load([], [*BASE, f"{M}.lora_rank=0", f"{M}.lora_alpha=0"])
    assert loaded.config.actor.lora is None
    assert [
        note for note in loaded.notes if note.endswith("lora_alpha has no meaning in rondo: lora_rank is 0")
    ]


def test_adapters_in_the_parts_for_images() -> None:
    """verl's all-linear is of every part; here the language part gets adapters where nothing else is said."""
    seen = [f"{M}.lora_rank=64", "data.image_key=images", "data.train_files=a.parquet"]
    assert "set exclude_modules='.*visual.*'" in message(*seen)
    assert "name the modules that get adapters" in message(*seen, f"{M}.exclude_modules=.*head")
    language = config(*seen, f"{M}.exclude_modules=.*visual.*").actor.lora
    assert language is not None
    assert language.parts == ("language",)
    every = config(*seen, "actor.lora.parts=[tower, projector, language]").actor.lora
    assert every is not None
    assert every.parts == ("tower", "projector", "language")
    assert "give all-linear, or a list of names" in message(f"{M}.lora_rank=8", f"{M}.target_modules=.*proj")


# ---- axes


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (1, 1)),
        ([f"{A}.fsdp_config.fsdp_size=-1"], (1, 1)),
        ([f"{A}.fsdp_config.fsdp_size=8"], (1, 1)),
        ([f"{A}.fsdp_config.fsdp_size=16"], (1, 1)),  # more than there are: all
        ([f"{A}.fsdp_config.fsdp_size=4"], (2, 1)),
        ([f"{A}.fsdp_config.fsdp_size=1"], (8, 1)),  # plain data parallelism
        ([f"{A}.ulysses_sequence_parallel_size=2", f"{A}.fsdp_config.fsdp_size=4"], (2, 2)),
        ([f"{A}.fsdp_config.ulysses_sequence_parallel_size=4"], (1, 4)),
    ],
)
def test_axes(overrides: list[str], expected: tuple[int, int]) -> None:
    parallel = config(*EIGHT, *overrides).actor.parallel
    assert parallel == ParallelConfig(replicate=expected[0], context=expected[1])


@pytest.mark.parametrize("sizes", [("fsdp_size=3", 1), ("fsdp_size=2", 4)])
def test_shards_that_do_not_go_into_the_devices(sizes: tuple[str, int]) -> None:
    ulysses = f"{A}.ulysses_sequence_parallel_size={sizes[1]}"
    loaded = load([], [*BASE, *EIGHT, f"{A}.fsdp_config.{sizes[0]}", ulysses])
    assert loaded.config.actor.parallel == ParallelConfig(context=sizes[1])
    assert [note for note in loaded.notes if note.endswith("all of them hold one model")]


def test_axes_of_the_models_beside() -> None:
    """The reference is as the actor is where verl's is; else it has axes of its own, as the critic always."""
    ulysses = f"{A}.ulysses_sequence_parallel_size=2"
    assert config(*EIGHT, KL, ulysses).reference.parallel is None
    assert config(*EIGHT, KL, ulysses, f"{F}.ulysses_sequence_parallel_size=2").reference.parallel is None
    own = config(*EIGHT, KL, ulysses, f"{F}.ulysses_sequence_parallel_size=4").reference.parallel
    assert own == ParallelConfig(context=4)
    shards = config(*EIGHT, KL, f"{A}.fsdp_config.fsdp_size=4").reference.parallel
    assert shards == ParallelConfig()  # all ranks hold one, in verl too
    critic = ["critic.ulysses_sequence_parallel_size=2", "critic.fsdp.fsdp_size=2"]
    assert config(*EIGHT, *GAE, *critic).critic.parallel == ParallelConfig(replicate=4, context=2)
    two = [f"{A}.ulysses_sequence_parallel_size=2", f"{A}.fsdp_config.ulysses_sequence_parallel_size=4"]
    assert "says another number; keep one of them" in message(*EIGHT, *two)


# ---- memory


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["param_offload=True"], (True, False)),
        (["optimizer_offload=True"], (False, True)),
        (["offload_policy=True", "strategy=fsdp2"], (True, True)),
        (["offload_policy=True", "strategy=fsdp2", "param_offload=False"], (True, True)),
        (["offload_policy=True"], (False, False)),  # FSDP1's does not read it
        (["offload_policy=False", "strategy=fsdp2"], (False, False)),
    ],
)
def test_what_rests_in_host_memory(overrides: list[str], expected: tuple[bool, bool]) -> None:
    c = config(*(f"{A}.fsdp_config.{override}" for override in overrides))
    assert (c.actor.offload_params, c.actor.offload_optimizer) == expected


def test_what_rests_in_host_memory_beside() -> None:
    c = config(*GAE, KL, f"{A}.strategy=fsdp2", f"{F}.fsdp_config.offload_policy=True")
    assert (c.reference.offload_params, c.actor.offload_params) == (True, False)
    for critic in ("critic.fsdp", "critic.model.fsdp_config"):
        c = config(*GAE, f"{critic}.param_offload=True", f"{critic}.optimizer_offload=True")
        assert (c.critic.offload_params, c.critic.offload_optimizer) == (True, True)


def test_dtypes_of_the_critics_newer_section() -> None:
    c = config(*GAE, "critic.fsdp.dtype=fp16").critic
    assert (c.param_dtype, c.compute_dtype) == ("float32", "float16")
    mixed = config(f"{A}.fsdp_config.mixed_precision.param_dtype=bf16").actor
    assert mixed.compute_dtype == "bfloat16"
    assert "gradients are added up in float32" in message(
        f"{A}.fsdp_config.mixed_precision.reduce_dtype=bf16"
    )


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (f"{M}.use_liger=True", "actor.backend.kernels", "liger"),
        (f"{M}.override_config={{attn_implementation: sdpa}}", "model.attention", "sdpa"),
        ("actor_rollout_ref.nccl_timeout=7200", "cluster.timeout_seconds", 7200.0),
        (
            f"{M}.override_config.max_position_embeddings=32768",
            "model.override",
            {"max_position_embeddings": 32768},
        ),
        (
            "data.apply_chat_template_kwargs.enable_thinking=False",
            "model.chat_template_options",
            {"enable_thinking": False},
        ),
        ("ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO", "cluster.env", {"NCCL_DEBUG": "INFO"}),
    ],
)
def test_a_key_by_its_value(override: str, key: str, value: object) -> None:
    found: object = config(f"+{override}", "cluster.backend=process")
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
