"""What Megatron's backend refuses, and how its stages share out layers; what it computes is in
tests/host_card/test_megatron.py, since megatron-core wants a card.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rondo.config.schema import (
    ActorConfig,
    ActorLoraConfig,
    ActorRouterConfig,
    CriticConfig,
    MegatronBackendConfig,
    OptimizerConfig,
    ParallelConfig,
)
from rondo.controller import Mesh
from rondo.core.batch import Batch
from rondo.core.errors import ConfigError
from rondo.training import ModelSpec, check_model_spec
from rondo.training.megatron.families import (
    FAMILIES,
    check_layout,
    check_settings,
    check_targets,
    chunks_of,
    layers_of_stages,
    pieces_of,
)
from rondo.training.packed import PackedLayout
from rondo.training.passes import Passes
from rondo.training.torch_backend.axes import check_axes
from tests.models import families
from tests.training.helpers import ARCHITECTURES, make_batch, one_rank_mesh, source, tiny_engine

MEGATRON = MegatronBackendConfig(name="megatron")


def config_of(name: str = "qwen3", **changes: Any) -> Any:
    own = ARCHITECTURES[name] if name in ARCHITECTURES else families.config_of(name)
    return AutoConfig.for_model(**{**own, "num_hidden_layers": 4, "vocab_size": 64, **changes})


@pytest.mark.parametrize(
    ("pipeline", "layers", "first", "last", "expected"),
    [
        (1, 5, None, None, (5,)),
        (2, 4, None, None, (2, 2)),
        (4, 12, None, None, (3, 3, 3, 3)),
        (2, 4, 1, None, (1, 3)),
        (3, 10, 3, None, None),
        (3, 10, 4, 2, (4, 4, 2)),
        (4, 10, 4, 2, (4, 2, 2, 2)),
        (2, 5, 3, 2, (3, 2)),
        (2, 5, None, None, None),
        (2, 5, 3, 3, None),
        (4, 4, 3, None, None),
    ],
)
def test_layers_are_shared_out_or_refused(
    pipeline: int, layers: int, first: int | None, last: int | None, expected: tuple[int, ...] | None
) -> None:
    sizes = ParallelConfig(pipeline=pipeline)
    backend = MegatronBackendConfig(name="megatron", first_stage_layers=first, last_stage_layers=last)
    if expected is None:
        with pytest.raises(ConfigError, match="cannot be shared out among") as raised:
            layers_of_stages(layers, sizes, backend)
        assert raised.value.key == "parallel.pipeline"
        return
    assert layers_of_stages(layers, sizes, backend) == expected
    assert sum(expected) == layers


def test_chunks_of_stages_are_interleaved() -> None:
    """By hand; each of all layers is in one chunk, and those of a turn follow stage after stage."""
    assert [chunks_of((2, 2), 1, stage) for stage in (0, 1)] == [[range(2)], [range(2, 4)]]
    assert [chunks_of((2, 2), 2, stage) for stage in (0, 1)] == [
        [range(1), range(2, 3)],
        [range(1, 2), range(3, 4)],
    ]
    uneven = [chunks_of((2, 4, 4, 2), 2, stage) for stage in range(4)]
    assert uneven[1] == [range(1, 3), range(7, 9)]
    turns = [layer for turn in range(2) for chunks in uneven for layer in chunks[turn]]
    assert turns == list(range(12))


@pytest.mark.parametrize(
    ("virtual", "pipeline", "layers", "ends", "says"),
    [
        (2, 1, 4, (None, None), r"virtual: there is one stage"),
        (3, 2, 4, (None, None), r"virtual=3: the 2 layers of a stage"),
        (2, 2, 6, (None, None), r"virtual=2: the 3 layers of a stage"),
        (2, 2, 6, (2, None), ""),
        (2, 2, 6, (None, 5), r"virtual=2: the 1 layers of a stage"),
        (2, 3, 10, (3, None), "3 layers of a stage|7 layers beside"),
        (2, 4, 12, (2, 2), ""),
    ],
)
def test_layers_that_chunks_do_not_divide_are_refused(
    virtual: int, pipeline: int, layers: int, ends: tuple[int | None, int | None], says: str
) -> None:
    """And what megatron-core has for the same: of first and last stages too it is each one's layers."""
    backend = MegatronBackendConfig("megatron", virtual, *ends)
    if not says:
        assert not any(
            one % virtual for one in layers_of_stages(layers, ParallelConfig(pipeline=pipeline), backend)
        )
        return
    with pytest.raises(ConfigError, match=says) as raised:
        layers_of_stages(layers, ParallelConfig(pipeline=pipeline), backend)
    assert raised.value.key in ("actor.backend.virtual", "parallel.pipeline")


def test_passes_come_in_as_many_as_a_pipeline_takes() -> None:
    """Dummies behind those of the rows, which no row is in; none where nobody has a row."""
    backend = tiny_engine(one_rank_mesh(), source(vocab_size=64)).backend
    layout = replace(backend.packing, multiple_of_passes=4)

    def rows_of_passes(batch: Batch, budget: int, layout: PackedLayout) -> list[int]:
        passes = Passes(batch, ("log_probs",), layout, budget, backend.group)
        found = [len(packed.rows) for packed in passes]
        assert len(passes) == len(found)
        return found

    batch = make_batch()
    own = rows_of_passes(batch, 40, backend.packing)
    assert len(own) % 4
    assert rows_of_passes(batch, 40, layout) == own + [0] * (-len(own) % 4)
    assert rows_of_passes(batch, 10_000, layout) == [len(batch.lengths("response_ids").nonzero()[0]), 0, 0, 0]
    assert rows_of_passes(batch.take([]), 40, layout) == []


def test_sends_in_batches_are_no_sends_of_chunks() -> None:
    """With them gradients are ten times what they are to be, and nothing says so."""
    pytest.importorskip("megatron.core")
    stage = importlib.import_module("rondo.training.megatron.stage")
    core = importlib.import_module("megatron.core.transformer.transformer_config")

    def settings(**sends: bool) -> Any:
        return core.TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, **sends)

    stage.check_interleaving(settings(overlap_p2p_comm=True, batch_p2p_comm=False))
    for sends in ({}, {"overlap_p2p_comm": True}, {"batch_p2p_comm": False}):
        with pytest.raises(ConfigError, match=r"with which gradients are wrong") as raised:
            stage.check_interleaving(settings(**sends))
        assert raised.value.key == "actor.backend.virtual"


# DeepSeek's parameters are a checkpoint's, but for the MLPs, which are as here.
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "deepseek_v3"])
def test_each_tensor_of_a_checkpoint_is_in_one_place(family: str) -> None:
    """Pieces of a parameter cover it once: its elements, numbered, come out once each."""
    config = config_of(family)
    heads, groups, width, hidden = 4, 2, config.head_dim if family == "qwen3" else 8, 32
    shapes = {"self_attention.linear_qkv.weight": ((heads + 2 * groups) * width, hidden)}
    shapes |= {"mlp.linear_fc1.weight": (2 * 48, hidden), "mlp.linear_fc2.weight": (hidden, 48)}
    if family == "qwen2":
        shapes["self_attention.linear_qkv.bias"] = ((heads + 2 * groups) * width,)
    for name, shape in shapes.items():
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        pieces = pieces_of(f"decoder.layers.1.{name}", 2, config)
        seen = torch.cat([piece.view(numbers).reshape(-1) for piece in pieces])
        assert torch.equal(seen.sort().values, numbers.view(-1)), name
        assert {piece.name.split(".")[2] for piece in pieces} == {"3"}  # of all layers, not of the stage's
    # By hand: two groups of two queries, a key and a value each.
    rows = torch.arange(8).repeat_interleave(width)[:, None].expand(-1, hidden)
    parts = {
        piece.name: piece
        for piece in pieces_of("decoder.layers.0.self_attention.linear_qkv.weight", 0, config)
    }
    found = {
        name.split(".")[-2]: piece.view(rows).reshape(-1, hidden)[::width, 0].tolist()
        for name, piece in parts.items()
    }
    assert found == {"q_proj": [0, 1, 4, 5], "k_proj": [2, 6], "v_proj": [3, 7]}
    assert pieces_of("decoder.layers.0.self_attention.linear_gate.weight", 0, config) == ()


@pytest.mark.parametrize(
    ("name", "changes", "sizes", "key", "says"),
    [
        ("mixtral", {}, {}, None, "there is no table for mixtral models"),
        ("mistral", {}, {}, None, "there is no table for mistral models"),
        ("llama", {"attention_bias": True}, {}, None, "a llama model with attention_bias"),
        ("llama", {"mlp_bias": True}, {}, None, "a llama model with mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, {}, None, "hidden_act=gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            {},
            None,
            "rope_parameters of the type yarn",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {},
            None,
            "windows of attention",
        ),
        ("qwen3", {}, {"tensor": 4}, "parallel.tensor", "num_key_value_heads=2 cannot be divided"),
        ("qwen3", {"vocab_size": 61}, {"tensor": 2}, "parallel.tensor", "vocab_size=61 cannot be divided"),
        ("qwen3", {}, {"context": 3}, "parallel.context", "does not divide the 4 heads"),
        ("qwen3", {}, {"pipeline": 3}, "parallel.pipeline", "4 layers cannot be shared out among 3 stages"),
        ("qwen3", {}, {"replicate": 2}, "parallel.replicate", "is copied by its data ranks already"),
        ("qwen3", {}, {"expert": 2}, "parallel.expert", "has no experts"),
        ("qwen3_moe", {}, {"expert": 3}, "parallel.expert", "does not divide the 4 experts"),
        (
            "deepseek_v3",
            {"moe_intermediate_size": 15},
            {"tensor": 2},
            "parallel.tensor",
            "n_shared_experts · moe_intermediate_size=15 cannot be divided",
        ),
    ],
)
def test_what_it_would_compute_otherwise_is_refused(
    name: str, changes: dict[str, Any], sizes: dict[str, int], key: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as raised:
        check_layout(config_of(name, **changes), ParallelConfig(**sizes), MEGATRON)
    assert raised.value.key == key


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"lora": ActorLoraConfig(base_dtype="nf4")}, "lora.base_dtype"),
        ({"lora": ActorLoraConfig(), "compute_dtype": "bfloat16"}, "param_dtype"),
        ({"lora": ActorLoraConfig(), "freeze": ("tower",)}, "freeze"),
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing"),
        ({"logits_bytes": None}, "logits_bytes"),
        ({"param_dtype": "bfloat16"}, "param_dtype"),
        ({"optimizer": {"moments": "8bit"}}, "optimizer.moments"),
        ({"optimizer": {"lr_of_parts": {"tower": 0.1}}}, "optimizer.lr_of_parts"),
    ],
)
def test_settings_that_it_does_not_have_are_refused(changes: dict[str, Any], key: str) -> None:
    optimizer = OptimizerConfig(**changes.pop("optimizer", {}))
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}") as raised:
        check_settings(ActorConfig(**changes), optimizer, "cuda:0")
    assert raised.value.key == key


def test_a_processor_is_refused() -> None:
    expected = r"megatron-core calls CUDA everywhere"
    with pytest.raises(ConfigError, match=expected):
        check_settings(ActorConfig(), OptimizerConfig(), "cpu")
    pytest.importorskip("megatron.core")
    with pytest.raises(ConfigError, match=expected):
        tiny_engine(one_rank_mesh(), source(vocab_size=64), backend=MEGATRON)


def test_torch_has_no_pipelines() -> None:
    with pytest.raises(ConfigError, match=r"torch has no pipelines") as raised:
        check_axes(config_of(), ParallelConfig(pipeline=2))
    assert raised.value.key == "parallel.pipeline"


def test_stages_are_the_outermost_axis() -> None:
    mesh = Mesh.parallel(16, ParallelConfig(pipeline=2, tensor=2, context=2))
    assert mesh.axes == (("pp", 2), ("dp", 2), ("cp", 2), ("tp", 2))
    assert mesh.grids["dense"] == (("pipeline", 2), ("shard", 4), ("tensor", 2))
    assert mesh.collect_ranks == (8, 12)  # of the last stage, the first of those with the same rows
    with pytest.raises(ConfigError, match=r"pipeline=3 .* does not divide"):
        Mesh.parallel(16, ParallelConfig(pipeline=3))


def test_experts_have_an_axis_of_their_own_within_a_stage() -> None:
    mesh = Mesh.parallel(16, ParallelConfig(pipeline=2, tensor=2, expert=4))
    assert mesh.grids["expert"] == (("pipeline", 2), ("expert_shard", 2), ("expert", 4))
    (piece,) = pieces_of("decoder.layers.0.mlp.experts.own.gate_up_proj", 3, config_of("qwen3_moe"))
    assert (piece.name, piece.cut, piece.along) == ("model.layers.3.mlp.experts.gate_up_proj", 0, "expert")


def test_what_is_asked_of_routers_is_looked_at_ahead() -> None:
    """By torch's rules: before anything is loaded."""
    asked = ActorConfig(router=ActorRouterConfig(bias_speed=0.1))
    for name, says in (("qwen3", "this qwen3 model has no experts"), ("qwen3_moe", "have no biases")):
        with pytest.raises(ConfigError, match=says) as raised:
            check_model_spec(ModelSpec(source(name), asked, backend=MEGATRON))
        assert raised.value.key == "router.bias_speed"
    own = families.source_of("deepseek_v3")
    check_model_spec(ModelSpec(own, asked, backend=MEGATRON))


def test_adapters_are_looked_at_ahead() -> None:
    """As torch's are; a router's bias stays as it is beside them."""
    pytest.importorskip("peft")
    for model, config, key, says in (
        ("qwen3", {"lora": ActorLoraConfig(targets=("gate",))}, "lora.targets", "is the name of no module"),
        (
            "deepseek_v3",
            {"lora": ActorLoraConfig(), "router": ActorRouterConfig(bias_speed=0.1)},
            "router.bias_speed",
            "the model's own weights stay as they are",
        ),
    ):
        own = families.source_of(model) if model == "deepseek_v3" else source(model)
        with pytest.raises(ConfigError, match=says) as raised:
            check_model_spec(ModelSpec(own, ActorConfig(**config), backend=MEGATRON))
        assert raised.value.key == key
    check_model_spec(ModelSpec(source("qwen3"), ActorConfig(lora=ActorLoraConfig()), backend=MEGATRON))


def test_a_stage_without_adapters_is_refused() -> None:
    """By hand: of two stages with two chunks each the first has layers 0 and 2."""
    stages = [chunks_of((2, 2), 2, stage) for stage in (0, 1)]
    weights = [f"model.layers.{number}.mlp.down_proj.weight" for number in (0, 2)]
    check_targets(weights, stages[:1])
    with pytest.raises(ConfigError, match="is in a layer of pipeline stage 1") as raised:
        check_targets(weights, stages)
    assert raised.value.key == "lora.targets"
    check_targets([*weights, "model.layers.3.self_attn.q_proj.weight"], stages)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_and_b_are_cut_as_their_weight_is(family: str) -> None:
    config, layer = config_of(family), "decoder.layers.1"
    names = {"mlp.shared_experts.linear_fc1": ("gate_proj", "up_proj"), "mlp.linear_fc2": ("down_proj",)}
    for module, parts in names.items():
        owner = module.rpartition(".")[0]
        for number, part in enumerate(parts):
            (weight, a, b) = (
                pieces_of(f"{layer}.{module}.{end}", 2, config)[index]
                for end, index in (("weight", number), (f"lora.{number}.a", 0), (f"lora.{number}.b", 0))
            )
            assert (a.cut, b.cut) == ((1, None) if weight.cut == 1 else (None, 0))
            prefix = f"base_model.model.model.layers.3.{owner}.{part}"
            assert (a.name, b.name) == (f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight")


def test_a_critic_that_follows_the_actors_layout_is_not_asked_for_another() -> None:
    """Ahead of a run a model is looked at by itself: how its stages are is known with its role's devices."""
    stages = MegatronBackendConfig(name="megatron", first_stage_layers=1)
    check_model_spec(ModelSpec(source(vocab_size=64), CriticConfig(), backend=stages))
    with pytest.raises(ConfigError, match="there is no table for mistral"):
        check_model_spec(ModelSpec(source("mistral"), CriticConfig(), backend=stages))
