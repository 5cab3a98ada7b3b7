"""Weights that rest in four bits (QLoRA): what they stand for, that a model with them is the model of what
they stand for, bit for bit, and what is refused.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rondo.config.schema import LoraConfig
from rondo.core.errors import CheckpointError, ConfigError, DataError, TrainError
from rondo.models import ModelSource
from rondo.models.nf4 import QuantisedLinear
from rondo.training import Engine
from tests.ranks import run_ranks
from tests.training.helpers import FLOAT64, PolicyLoss, ValueLoss, make_batch, source, tiny_engine

pytest.importorskip("bitsandbytes")
LORA = LoraConfig(rank=4, alpha=8.0)
NF4 = replace(LORA, base_dtype="nf4")
LOG_PROBS = {"log_probs": "old_log_probs"}
# Dettmers et al., QLoRA, appendix E.
_BELOW = (-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
_ABOVE = (0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0)
QUANTILES = torch.tensor((*_BELOW, *_ABOVE))
CPU = torch.device("cpu")


def _quantised(weight: torch.Tensor) -> QuantisedLinear:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = torch.nn.Parameter(weight)
    return QuantisedLinear(module, "q_proj", CPU)


def test_each_number_becomes_the_nearest_quantile_times_its_blocks_largest() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    found = _quantised(weight).dequantised()
    for row, of in zip(weight, found, strict=True):
        nearest = QUANTILES[(row[:, None] / row.abs().max() - QUANTILES).abs().argmin(1)]
        torch.testing.assert_close(of, nearest * row.abs().max(), rtol=1e-6, atol=0)


def test_what_a_weight_becomes_does_not_depend_on_the_number_of_threads() -> None:
    weight, threads = torch.randn(1024, 4096), torch.get_num_threads()
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        found.append(_quantised(weight).dequantised())
    torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_what_is_a_quantile_already_stays() -> None:
    weight = (QUANTILES.repeat(4) * 3).repeat(5, 1)
    torch.testing.assert_close(_quantised(weight).dequantised(), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_weight_that_it_stands_for(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    module = _quantised(torch.randn(24, 40, generator=generator).to(dtype))
    module.bias = torch.nn.Parameter(torch.randn(24, generator=generator).to(dtype))
    plain = torch.nn.Linear(40, 24)
    plain.weight, plain.bias = torch.nn.Parameter(module.dequantised()), module.bias
    x = torch.randn(2, 7, 40, generator=generator).to(dtype)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, expected = module(mine), plain(theirs)
    assert torch.equal(ours, expected)
    ours.square().sum().backward()
    expected.square().sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)


def test_it_takes_four_and_a_half_bits_a_weight_wherever_it_goes() -> None:
    module = _quantised(torch.randn(512, 1024))
    module.bias = torch.nn.Parameter(torch.zeros(512))
    before = dict(module.named_parameters())
    module.to(CPU)
    assert module.num_bytes() == 512 * 1024 * 9 // 16 + 4 * 16  # and a table
    assert list(before) == [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert all(module.get_parameter(name) is parameter for name, parameter in before.items())
    assert module.weight.shape == (512, 1024)
    assert module.weight.untyped_storage().nbytes() == 4


def test_a_weight_that_is_not_finite_is_refused() -> None:
    with pytest.raises(DataError, match=r"q_proj\.weight .* not finite"):
        _quantised(torch.full((2, 64), torch.inf))


# ---- engines


def _engine(mesh: DeviceMesh, model: ModelSource, lora: LoraConfig, **arguments: Any) -> Engine:
    return tiny_engine(mesh, model, config={**arguments.pop("config", {}), "lora": lora}, **arguments)


def _folder(mesh: DeviceMesh, name: str, path: Path) -> ModelSource:
    tiny_engine(mesh, source(name)).export(str(path))
    return ModelSource(path=str(path), seed=3)


def _numbers(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.parameters().gathered(1 << 20)}


def _same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_run_is_one_on_the_weights_that_it_stands_for(
    mesh: DeviceMesh, tmp_path: Path, name: str, head: str
) -> None:
    """The model is read from files, or made; its adapters learn what they would on its exported weights."""
    model = _folder(mesh, name, tmp_path / "model")
    config = {"gradient_checkpointing": True}
    quantised = _engine(mesh, model, NF4, head=head, config=config)
    made = _engine(mesh, source(name), NF4, head=head, config=config)
    quantised.export(str(tmp_path / "base"))
    plain = _engine(mesh, ModelSource(path=str(tmp_path / "base"), seed=3), LORA, head=head, config=config)
    original = _numbers(tiny_engine(mesh, model, head=head))
    changed = [n for n, tensor in _numbers(quantised).items() if not torch.equal(tensor, original[n])]
    linear = [n for n in original if "_proj" in n and original[n].ndim == 2]
    assert set(changed) == set(linear)
    loss = PolicyLoss() if head == "lm" else ValueLoss()
    for seed in range(3):
        norms = []
        for engine in (quantised, made, plain):
            engine.forward_backward(make_batch(seed=seed), loss)
            norms.append(engine.optimizer_step().grad_norm)
        assert norms[0] > 0
        assert norms == [norms[0]] * 3
    _same(_numbers(quantised), _numbers(plain))
    _same(_numbers(quantised), _numbers(made))
    assert quantised.parameters().checksums() == plain.parameters().checksums()


def test_what_is_sent_and_the_reference_are_of_the_base_that_it_stands_for(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    quantised = _engine(mesh, _folder(mesh, "llama", tmp_path / "model"), NF4)
    quantised.export(str(tmp_path / "base"))
    base = tiny_engine(mesh, ModelSource(path=str(tmp_path / "base")))
    for _ in range(2):
        quantised.forward_backward(make_batch(), PolicyLoss())
        quantised.optimizer_step()
    assert quantised.backend.adapters is not None
    with quantised.backend.adapters.off():
        reference = quantised.forward(make_batch(), LOG_PROBS).ragged("old_log_probs")[0]
    assert torch.equal(reference, base.forward(make_batch(), LOG_PROBS).ragged("old_log_probs")[0])
    alone = dict(quantised.parameters("all").gathered(1 << 20))
    _same({n: alone[n] for n in _numbers(base)}, _numbers(base))
    assert quantised.parameters("all").checksums().items() >= base.parameters().checksums().items()
    with quantised.parameters("all").local() as shards:
        _same({n: shards[n] for n in _numbers(base)}, _numbers(base))
    with pytest.raises(TrainError, match="plain weights"):
        quantised.parameters_in_place()


def test_a_subset_of_targets_leaves_no_linear_module_in_full(mesh: DeviceMesh) -> None:
    engine = _engine(mesh, source("llama"), replace(NF4, targets=("q_proj",)))
    assert engine.backend.adapters is not None
    assert sum(name.endswith("q_proj.weight") for name in engine.backend.adapters.quantised) == 2
    assert len(engine.backend.adapters.quantised) == 2 * 7  # of each layer
    assert not any(tensor.isnan().any() for tensor in _numbers(engine).values())


def test_checkpoints_go_on_to_the_same_bits_and_know_their_base(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = _folder(mesh, "llama", tmp_path / "model")
    first, second = _engine(mesh, model, NF4), _engine(mesh, model, NF4)

    def step(engine: Engine) -> None:
        engine.forward_backward(make_batch(), PolicyLoss())
        engine.optimizer_step()

    step(first)
    files = first.save(str(tmp_path / "saved"))
    second.load(str(tmp_path / "saved"), files)
    step(first)
    step(second)
    _same(_numbers(first), _numbers(second))
    with pytest.raises(CheckpointError, match="other weights"):
        _engine(mesh, model, LORA).load(str(tmp_path / "saved"), files)
    first.export(str(tmp_path / "export"))
    assert not any(t.isnan().any() for t in load_file(tmp_path / "export" / "model.safetensors").values())
    adapter = str(tmp_path / "export" / "adapter")
    again = _engine(mesh, model, replace(NF4, path=adapter))
    _same(_numbers(first), _numbers(again))
    with pytest.raises(ConfigError, match="other weights"):
        _engine(mesh, model, replace(LORA, path=adapter))


# ---- what is refused


def _two(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    with pytest.raises(ConfigError) as error:
        _engine(mesh, source("llama"), NF4)
    return str(error.value)


@pytest.mark.slow
def test_two_ranks_are_refused() -> None:
    assert all("on one rank, and this engine has 2" in message for message in run_ranks(2, _two))


def test_other_dtypes_and_models_are_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="set param_dtype=bfloat16"):
        _engine(mesh, source("llama"), NF4, config={"compute_dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="float32 at most"):
        _engine(mesh, source("llama"), NF4, config=FLOAT64)
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 61}
    with pytest.raises(ConfigError, match="gpt2 model has no linear modules"):
        _engine(mesh, ModelSource(config=gpt2), NF4)
    for name in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r'pip install "rondo-rl\[qlora\]"'):
        _engine(mesh, source("llama"), NF4)
