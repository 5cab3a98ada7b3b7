"""The trainer's packed forward and backward pass of every family with an attention or a head of its own,
against transformers' own model on each document alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rondo.core.batch import Batch
from rondo.core.columns import UNIT
from rondo.core.errors import ConfigError, TrainError
from rondo.models import ModelSource, build_model, family_of
from rondo.models import documents as models_documents
from rondo.models.documents import Heads
from rondo.models.family import AS_THEY_ARE, LogitTransform
from rondo.training import Engine
from rondo.training.packed import plan_passes
from rondo.training.torch_backend.head import check_head
from tests.messages import full_text
from tests.models.families import FAMILIES, WINDOW, config_of, source_of, write
from tests.training.helpers import (
    FLOAT64,
    PolicyLoss,
    full_gradients,
    make_batch,
    relative_difference,
    tiny_engine,
    with_groups,
)
from tests.training.test_outputs import reference_outputs

# Beside the families as they are: windows that only a mask tells of, and one on a sparse model.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phimoe": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "mimo_v2_flash": {  # key/value heads and sinks by layer, values narrower than keys
        "model_type": "mimo_v2_flash",
        "num_key_value_heads": 1,
        "head_dim": 12,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma4_text": {  # heads of 512 in full attention: transformers reads no number of the config as a whole
        "model_type": "gemma4_text",
        "head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "longrope": {
        "model_type": "phi3",
        "sliding_window": None,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 16,
        },
    },
}
EXACT = (
    "llama",
    "qwen3",
    "mistral",
    "mixtral",
    "phimoe",
    "qwen2_moe",
    "phi3",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "granite",
    "granitemoe",
    "cohere2",
    "smollm3",
    "seed_oss",
    "gpt_oss",
    "longrope",  # other rotary embeddings for documents of more than 16 tokens
    "gemma4_text",
    "mimo_v2_flash",
    "llama4_text",  # chunks: one document per pass
)
TEMPERATURE = 0.8


def written(family: str, folder: Path) -> None:
    """A folder of the family, with its changes."""
    write(family if family in FAMILIES else "phi3", folder, **CHANGES.get(family, {}))


class InFloat64(TorchFunctionMode):
    """Inside, nothing is rounded to float32, neither by us nor by transformers (norms, rotary tables,
    routers, eager attention's softmax).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(one: Any) -> Any:
            return torch.float64 if one is torch.float32 else one

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widened, args), **{name: widened(one) for name, one in (kwargs or {}).items()})


def plain_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.set_experts_implementation("eager")  # the other one has no float64
    return model.eval()


def documents() -> Batch:
    """Prompt groups, documents shorter and longer than the window, one without response."""
    lengths = ((4, 7), (4, 1), (4, 20), (9, 14), (9, 3), (2, 0), (30, 20), (1, 9))
    return with_groups(make_batch(lengths), (3, 2))


def long_documents() -> Batch:
    return make_batch(((100, 20), (90, 60), (5, 3)))


def plain_loss(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """PolicyLoss, whose terms are those of GRPO's first step and of SFT, and log-probs, row by row."""
    loss, every = torch.zeros((), dtype=torch.float64), []
    for i, (log_probs, entropy) in enumerate(reference_outputs(model, batch, TEMPERATURE)):
        weight = torch.from_numpy(batch.rows("token_weight")[i] * batch.rows("response_mask")[i])
        loss = loss - (weight * (batch.scalars("advantages")[i] * log_probs + 0.1 * entropy)).sum()
        every.append(log_probs.detach())
    return loss, every


@pytest.mark.parametrize("family", EXACT)
def test_packed_equals_alone(mesh: DeviceMesh, tmp_path: Path, family: str) -> None:
    """Log-probs and all gradients, in float64: prompts that are shared, or not (a pass for every document),
    short and long documents.
    """
    written(family, tmp_path)
    plain = plain_model(tmp_path, torch.float64)
    tolerance = 1e-10 if family != "longrope" else 1e-6  # transformers keeps its tables in float32
    for batch, budgets in ((documents(), (10_000, 50)), (long_documents(), (10_000,))):
        plain.zero_grad()
        with InFloat64():
            loss, expected = plain_loss(plain, batch)
            loss.backward()
        wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        for budget in budgets:
            config = {**FLOAT64, "token_budget": budget, "logits_bytes": 4096}
            engine = tiny_engine(mesh, ModelSource(str(tmp_path)), config=config, temperature=TEMPERATURE)
            with InFloat64():
                got = engine.forward(batch, {"log_probs": "x"}).rows("x")
                engine.forward_backward(batch, PolicyLoss())
            for mine, theirs in zip(got, expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)
            gradients = {name: one for name, one in full_gradients(engine).items() if one is not None}
            assert set(gradients) == set(wanted)
            for name, gradient in gradients.items():
                assert relative_difference(gradient, wanted[name]) <= tolerance, name


@pytest.mark.parametrize("family", EXACT)
def test_in_float32_packed_is_as_close_as_rounding(mesh: DeviceMesh, tmp_path: Path, family: str) -> None:
    written(family, tmp_path)
    engine = tiny_engine(mesh, ModelSource(str(tmp_path)), None, temperature=TEMPERATURE)
    engine.check_causal()
    for batch in (documents(), long_documents()):
        got = engine.forward(batch, {"log_probs": "x"}).rows("x")
        with torch.no_grad():
            expected = reference_outputs(plain_model(tmp_path, torch.float32), batch, TEMPERATURE)
        for mine, (theirs, _) in zip(got, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_heads_that_a_config_does_not_have(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A key that its class does not read: GPT-NeoX has as many key/value heads as others."""
    config = config_of("llama", model_type="gpt_neox", attention_bias=True)
    for key in ("num_key_value_heads", "mlp_bias"):
        del config[key]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_key_value_heads": 2}))
    got = (
        tiny_engine(mesh, ModelSource(str(tmp_path)), None).forward(documents(), {"log_probs": "x"}).rows("x")
    )
    with torch.no_grad():
        expected = reference_outputs(plain_model(tmp_path, torch.float32), documents(), 1.0)
    for mine, (theirs, _) in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "heads"), [("llama", [(4, 2)]), ("mimo_v2_flash", [(4, 1), (4, 2)])])
def test_layers_with_as_many_heads_share_a_plan(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, heads: list[Heads]
) -> None:
    """Where FSDP casts, and copies, what blocks are given, too."""
    planned, plan = [], models_documents._plan_buckets

    def counted(lengths: Any, prefixes: Any, of: Heads, device: torch.device) -> Any:
        planned.append(of)
        return plan(lengths, prefixes, of, device)

    written(family, tmp_path)
    engine = tiny_engine(mesh, ModelSource(str(tmp_path)), None, config={"compute_dtype": "bfloat16"})
    monkeypatch.setattr(models_documents, "_plan_buckets", counted)
    engine.forward(documents(), {"log_probs": "x"})
    assert planned == heads


def test_the_windows_bite(mesh: DeviceMesh) -> None:
    """The tests above would see a window that is dropped: it moves log-probs by far more than rounding."""
    batch = long_documents()
    for family in ("mistral", "qwen2_moe", "phimoe"):
        narrow, wide = (
            tiny_engine(mesh, source_of(family, **CHANGES.get(family, {}) | {"sliding_window": window}), None)
            for window in (WINDOW, 200)
        )
        one, other = (engine.forward(batch, {"log_probs": "x"}).ragged("x")[0] for engine in (narrow, wide))
        assert (one - other).abs().max() > 0.1, family


def test_a_head_that_is_not_known_is_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """HyperCLOVA X multiplies by what Granite divides by."""
    monkeypatch.setitem(FAMILIES, "hyperclovax", {"logits_scaling": 2.0})
    with pytest.raises(ConfigError, match=full_text("a hyperclovax model changes its logits")):
        tiny_engine(mesh, source_of("hyperclovax"))


@pytest.mark.parametrize("family", ["gemma2", "cohere2", "granite"])
def test_a_head_is_tried(family: str) -> None:
    """Each setting matters to the trial, in half precision too; and the model is as it was."""
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(source_of(family), dtype)
        before = vars(model.base_model).copy()
        known = family_of(model.config).logits
        check_head(model, known)
        for wrong in (AS_THEY_ARE, LogitTransform(1.3 * known.scale, known.softcap)):
            with pytest.raises(ConfigError, match="changes its logits"):
                check_head(model, wrong)
        assert vars(model.base_model) == before


def test_attention_past_the_interface_is_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family nobody has written down, one of whose layers attends by itself."""
    engine = tiny_engine(mesh, source_of("qwen3"), None)
    attention = engine.backend.model.lm.model.layers[1].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(ConfigError, match=full_text("only 1 of the 2 layers of this qwen3")):
        engine.forward(documents(), {"log_probs": "x"})


def test_a_pass_has_one_rotary_embedding(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Documents of more than 16 tokens, and of at most 16; units that would need both are refused."""
    written("longrope", tmp_path)
    engine = tiny_engine(mesh, ModelSource(str(tmp_path)), None)
    family = engine.backend.packing.family
    batch = make_batch(((4, 7), (10, 20), (4, 13), (4, 14), (3, 3), (2, 0)))
    passes = [rows.tolist() for rows in plan_passes(batch, family, 10_000)]
    assert passes == [[1, 3], [0, 2, 4]]
    pairs = batch.with_columns({UNIT: np.array([0, 0, 1, 1, 2, 3])})
    with pytest.raises(TrainError, match="unit 0 has rows of 10 and 29 tokens"):
        plan_passes(pairs, family, 10_000)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_whose_earlier_tokens_see_later_ones_is_refused(mesh: DeviceMesh, dtype: str) -> None:
    """An indexer that keeps 4 of 32 tokens chooses among those behind, too, in transformers' own code."""
    dtypes = {"param_dtype": dtype, "compute_dtype": dtype}
    sizes = {**source_of("deepseek_v3").config, "model_type": "deepseek_v32"}  # type: ignore[dict-item]
    sizes.pop("topk_method")
    sizes |= {"index_n_heads": 2, "index_head_dim": 8}

    def engine(keeps: int) -> Engine:
        source = ModelSource(config={**sizes, "index_topk": keeps}, seed=3)
        return tiny_engine(mesh, source, config=dtypes)

    engine(64).check_causal()
    with pytest.raises(TrainError, match=full_text("model from scratch (deepseek_v32)")):
        engine(4).check_causal()
