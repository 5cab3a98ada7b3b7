"""Every model family against transformers itself: what is loaded, what travels, what is exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, revert_weight_conversion

from rondo.config.schema import EngineConfig, OptimizerConfig
from rondo.core.batch import Batch, ragged_rows
from rondo.core.errors import CheckpointError, ConfigError, DataError
from rondo.models import ModelSource, build_model
from rondo.models.family import auto_class
from rondo.models.loading import build_empty
from rondo.models.names import parts_of, persistent_buffers, separate, weights_of
from rondo.models.precision import kept_in_float32
from rondo.rollout.third_party_engine import expected_weights
from rondo.rollout.weights import WeightStore, build_module
from rondo.training import ModelSpec, make_engine
from rondo.training import engine as rondo_engine
from rondo.training.export import export_folder
from rondo.weights.checksum import checksum
from rondo.weights.layout import Box
from tests.messages import full_text
from tests.models.families import VOCAB, every_family, make, of_text, source_of, write
from tests.models.table import lines
from tests.ranks import run_ranks
from tests.training.conftest import mesh  # noqa: F401 (a fixture)


class Checkpoint:
    """A family's folder as transformers writes it, and the model that it was written from."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.folder = folder
        self.model = write(family, folder)
        self.source = ModelSource(path=str(folder))


@pytest.fixture(scope="module", params=every_family())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def equal(found: dict[str, Any], model: PreTrainedModel) -> None:
    """Asserts that two models have the same tensors under the same names, to the bit."""
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_every_tensor_is_loaded(checkpoint: Checkpoint) -> None:
    equal(dict(weights_of(build_model(checkpoint.source, torch.float32))), checkpoint.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ranks_read_what_transformers_loads(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Each its own rows, of every tensor, over what was there; computed buffers are made with the model."""
    kept = kept_in_float32(checkpoint.model, dtype)
    expected = {
        name: one.detach().to(torch.float32 if name in kept else dtype)
        for name, one in checkpoint.model.named_parameters()
    }
    for name, buffer in persistent_buffers(checkpoint.model):
        expected[name] = buffer.to(torch.promote_types(buffer.dtype, dtype))  # never narrower
    model, stored = build_empty(checkpoint.source, dtype)
    assert stored is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    found = {name: torch.full_like(tensor, 7.0) for name, tensor in expected.items()}
    for rank in range(3):
        wanted = []
        for name, tensor in found.items():
            if tensor.ndim == 0:
                wanted.append((name, tensor, Box((), ()), ()))
                continue
            rows = -(-len(tensor) // 3)
            piece = tensor[rank * rows : (rank + 1) * rows]
            box = Box((min(rank * rows, len(tensor)), *(0,) * (tensor.ndim - 1)), tuple(piece.shape))
            wanted += [(name, piece, box, tuple(tensor.shape))] * bool(piece.numel())
        stored.fill(wanted, parts_of(model))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert {name: one.dtype for name, one in weights_of(model) if name in expected} == {
        name: one.dtype for name, one in expected.items()
    }
    computed = dict(checkpoint.model.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in expected:
            torch.testing.assert_close(buffer.float(), computed[name].float(), rtol=1e-7, atol=0)


def test_names_in_checkpoints_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    model = checkpoint.model
    ours = dict(separate(weights_of(model), parts_of(model)))
    theirs = revert_weight_conversion(model, dict(model.state_dict()))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    own = {tensor.untyped_storage().data_ptr() for _, tensor in weights_of(model)}
    assert {tensor.untyped_storage().data_ptr() for tensor in ours.values()} == own  # views, no copies


def test_exports_and_samplers_get_all_of_it(
    checkpoint: Checkpoint,
    mesh: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    engine = make_engine(ModelSpec(checkpoint.source, EngineConfig(), OptimizerConfig()), mesh=mesh)
    engine.export(str(tmp_path))
    loader = auto_class(engine.hf_config)
    back, found = loader.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values())
    equal(back.state_dict(), checkpoint.model)

    module = build_module(
        engine.hf_config, "eager", torch.float32, torch.device("cpu"), trust_remote_code=False
    )
    sampler = WeightStore(module, None, torch.float32, torch.device("cpu"))
    sampler.begin(1)
    for name, tensor in engine.parameters().gathered(1 << 20):
        sampler.receive(name, tensor)
    sampler.commit(1, engine.parameters().checksums())
    equal(dict(weights_of(module)), checkpoint.model)


def _from_two_ranks(rank: int, world: int, folder: str, export: str) -> dict[str, int]:
    ranks = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    engine = make_engine(ModelSpec(ModelSource(path=folder), EngineConfig(), OptimizerConfig()), mesh=ranks)
    checksums = engine.parameters().checksums()
    engine.export(export)
    files = engine.save(export + "-state")
    other = make_engine(ModelSpec(source_of("deepseek_v3"), EngineConfig(), OptimizerConfig()), mesh=ranks)
    assert other.parameters().checksums() != checksums
    other.load(export + "-state", files)
    assert other.parameters().checksums() == checksums
    gathered = dict(engine.parameters().gathered(2000, "bfloat16"))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert gathered[bias].dtype == torch.float32  # half a hundredth of it decides which experts are asked
    assert gathered["model.norm.weight"].dtype == torch.bfloat16
    sent = {name: checksum(tensor) for name, tensor in gathered.items()}
    assert sent == engine.parameters().checksums("bfloat16")
    return checksums


@pytest.mark.slow
def test_a_buffer_that_is_a_weight_travels_from_several_ranks(tmp_path: Path) -> None:
    model = write("deepseek_v3", tmp_path / "model")
    first, second = run_ranks(2, _from_two_ranks, str(tmp_path / "model"), str(tmp_path / "export"))
    assert first == second == {name: checksum(tensor.detach()) for name, tensor in weights_of(model)}
    equal(AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict(), model)


def test_an_export_that_comes_back_as_another_is_no_export(
    mesh: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(ModelSpec(source_of("qwen3"), EngineConfig(), OptimizerConfig()), mesh=mesh)

    def damaged(tensors: Any, *rest: Any) -> None:
        changed = ((n, t + torch.arange(len(t)).eq(3) if n == "model.norm.weight" else t) for n, t in tensors)
        export_folder(changed, *rest)

    monkeypatch.setattr(rondo_engine, "export_folder", damaged)
    with pytest.raises(CheckpointError, match=full_text("not the trained one: 'model.norm.weight'")):
        engine.export(str(tmp_path))


def test_a_conversion_that_is_more_than_cutting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text model of transformers has one today: the table of a mixture, with one step more."""
    model = make("qwen3_moe")
    table = get_model_conversion_mapping(model)
    table[1].operations = [*table[1].operations, Transpose(1, 2)]
    monkeypatch.setattr("rondo.models.names.get_model_conversion_mapping", lambda *_, **__: table)
    with pytest.raises(ConfigError, match=r"hold 'model\.layers\.1\.mlp.*Transpose"):
        parts_of(model)
    with pytest.raises(ConfigError, match=full_text("use rollout.engine=native")):
        expected_weights(model.config)


# ---- what a folder must hold ----


def test_tensors_that_are_missing_unknown_or_of_another_shape(tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    file = next(file for file in tmp_path.glob("*.safetensors") if "model.norm.weight" in load_file(file))
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    cases = {
        r"lack 1 tensor \(first: 'model\.norm\.weight'\) of a qwen3 model": {},
        r"hold 1 tensor \(first: 'model\.extra'\), in model.*\.safetensors, that a qwen3 model": {
            "model.norm.weight": norm,
            "model.extra": norm.clone(),
        },
        r"hold 1 of another .*'model\.norm\.weight' in model.*\.safetensors is \(31,\), .* wants \(32,\)": {
            "model.norm.weight": norm[:31].clone()
        },
    }
    for message, changed in cases.items():
        save_file(tensors | changed, file, metadata={"format": "pt"})
        with pytest.raises(DataError, match=message):
            build_model(ModelSource(path=str(tmp_path)), torch.float32)
    save_file(tensors | {"model.norm.weight": norm}, file, metadata={"format": "pt"})
    build_model(ModelSource(path=str(tmp_path)), torch.float32)


def test_tensors_that_a_family_declares_ignorable_are_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that predict further tokens lie in published folders, and are no part of the model."""
    model = write("qwen3_next", tmp_path)
    file = next(iter(sorted(tmp_path.glob("*.safetensors"))))
    save_file(load_file(file) | {"mtp.norm.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    equal(dict(weights_of(build_model(ModelSource(path=str(tmp_path)), torch.float32))), model)
    assert "left out 1 tensor (first: 'mtp.norm.weight'), no part of a qwen3_next" in caplog.text


def test_the_text_tower_of_kimi_k25_is_what_is_trained(
    mesh: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A folder as it is published: the language model's tensors under a prefix, and a tower for images."""
    model = write("deepseek_v3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    published = {"vision_tower.x.weight": torch.ones(2)}
    for file in tmp_path.glob("*.safetensors"):
        published |= {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
        file.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = ModelSource(path=str(tmp_path))
    equal(dict(weights_of(build_model(source, torch.float32))), model)
    make_engine(ModelSpec(source, EngineConfig(), OptimizerConfig()), mesh=mesh).export(
        str(tmp_path / "export")
    )
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert back.config.model_type == "deepseek_v3"
    equal(back.state_dict(), model)


# ---- weights of a few bits ----


def _quantise(folder: Path, quantisation: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Makes the folder one of quantised weights: `tensors` in the place of all files."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))


def test_fp8_blocks_are_what_they_stand_for(
    mesh: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Also where the last block is cut off, as in DeepSeek-V3's 576 rows in blocks of 128."""
    model, block = write("deepseek_v3", tmp_path), (24, 16)
    stored: dict[str, torch.Tensor] = {}
    plain = dict(separate(weights_of(model), parts_of(model)))
    for name, tensor in plain.items():
        if not name.endswith("proj.weight"):
            stored[name] = tensor.detach()
            continue
        quantised = (tensor.detach() * 100).to(torch.float8_e4m3fn)
        rows, columns = tensor.shape
        scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) / 100
        stored[name], stored[name + "_scale_inv"] = quantised, scale
        for i in range(rows):
            for j in range(columns):
                tensor.data[i, j] = quantised[i, j].float() * scale[i // block[0], j // block[1]]
    quantisation = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    _quantise(tmp_path, quantisation, stored)
    engine = make_engine(
        ModelSpec(ModelSource(path=str(tmp_path)), EngineConfig(), OptimizerConfig()), mesh=mesh
    )
    for name, tensor in separate(engine.parameters().gathered(1 << 20), parts_of(model)):
        assert torch.equal(tensor, plain[name]), name
    engine.export(str(tmp_path / "export"))
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 64}
    model = write("gpt_oss", tmp_path, **changes)
    stored = {name: tensor.detach() for name, tensor in weights_of(model)}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape  # a checkpoint has them the other way round
        shape = (experts, rows, columns // 32, 16)
        stored[name + "_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        stored[name + "_scales"] = torch.randint(120, 127, shape[:3], dtype=torch.uint8, generator=generator)
    _quantise(tmp_path, {"quant_method": "mxfp4"}, stored)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    ours = build_model(ModelSource(path=str(tmp_path)), torch.float32)
    equal(dict(weights_of(ours)), theirs)
    # The second number of the first block, by hand: the high half of the byte, as sign, exponent, mantissa.
    byte = int(stored["model.layers.0.mlp.experts.down_proj_blocks"][0, 0, 0, 0]) >> 4
    exponent = int(stored["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0]) - 127
    value = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][byte & 7] * (-1 if byte & 8 else 1)
    assert float(ours.model.layers[0].mlp.experts.down_proj[0, 1, 0].detach()) == value * 2.0**exponent


def test_other_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    _quantise(tmp_path, {"quant_method": "gptq", "bits": 4}, {"x": torch.ones(1)})
    with pytest.raises(ConfigError, match=full_text("reads fp8 and mxfp4; take")):
        build_model(ModelSource(path=str(tmp_path)), torch.float32)


# ---- what is computed ----

# Prompt and response tokens: beyond the window, within it, a single token; two rows with one prompt.
LENGTHS = ((5, 30), (9, 12), (9, 7), (3, 4), (1, 1))


class Weighted:
    """-Σ weight · log-prob: the gradient of SFT, and of every policy loss at its first step."""

    outputs = ("log_probs",)
    columns = ("token_weight",)

    def __call__(
        self,
        outputs: Mapping[str, torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return -(outputs["log_probs"] * columns["token_weight"]).sum(), {}


def rows() -> Batch:
    rng = np.random.default_rng(0)
    prompts = [of_text(rng.integers(0, VOCAB, length)) for length, _ in LENGTHS]
    prompts[2] = prompts[1]
    return Batch.of(
        {
            "row_id": np.arange(len(LENGTHS)),
            "prompt_ids": ragged_rows(prompts, np.int32),
            "response_ids": ragged_rows([of_text(rng.integers(0, VOCAB, n)) for _, n in LENGTHS], np.int32),
            "token_weight": ragged_rows([rng.standard_normal(n) for _, n in LENGTHS], np.float32),
        }
    )


def log_probs_alone(model: PreTrainedModel, batch: Batch) -> list[torch.Tensor]:
    """Returns the responses' log-probs by transformers' own forward, row by row."""
    out = []
    for prompt, response in zip(batch.rows("prompt_ids"), batch.rows("response_ids"), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        out.append(logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0])
    return out


def test_log_probs_and_gradients_are_those_of_transformers(
    checkpoint: Checkpoint,
    mesh: Any,  # noqa: F811
) -> None:
    """Packed with others, and most alone in a pass."""
    batch = rows()
    expected = log_probs_alone(checkpoint.model, batch)
    weights = [torch.from_numpy(row) for row in batch.rows("token_weight")]
    loss = -sum((weight * one).sum() for weight, one in zip(weights, expected, strict=True))
    checkpoint.model.zero_grad()
    loss.backward()
    wanted = {name: one.grad for name, one in checkpoint.model.named_parameters() if one.grad is not None}
    for token_budget in (1000, 34):
        config = EngineConfig(token_budget=token_budget)
        engine = make_engine(ModelSpec(checkpoint.source, config, OptimizerConfig()), mesh=mesh)
        found = engine.forward(batch, {"log_probs": "log_probs"}).rows("log_probs")
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
        engine.forward_backward(batch, Weighted())
        gradients = {name: one.grad for name, one in engine.backend.model.lm.named_parameters()}
        assert {name for name, one in gradients.items() if one is not None} >= wanted.keys()
        for name, theirs in wanted.items():
            ours = gradients[name]
            assert float((ours - theirs).norm()) <= 2e-5 * float(theirs.norm()) + 1e-6, name


@pytest.mark.slow
def test_the_page_has_the_table_of_today() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("|")] == lines()
