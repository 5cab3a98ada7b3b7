"""LoRA in the training engine: what learns, what it equals, what is saved and exported, what is refused."""

from __future__ import annotations

import functools
import json
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from rondo.checkpoint import Files
from rondo.config.schema import LoraConfig, TorchBackendConfig
from rondo.core.batch import Batch
from rondo.core.errors import CheckpointError, ConfigError, TrainError
from rondo.models import ModelSource
from rondo.models.loading import build_model
from rondo.models.lora import adapter_set, add_adapters, check_for_peft, config_for_peft
from rondo.planning.batches import balance
from rondo.training import Engine
from rondo.weights.checksum import checksum
from tests.messages import full_text
from tests.models.families import config_of, source_of
from tests.ranks import run_ranks
from tests.training.helpers import (
    FLOAT64,
    PolicyLoss,
    ValueLoss,
    make_batch,
    relative_difference,
    source,
    tiny_engine,
)

pytest.importorskip("peft")
LORA = LoraConfig(rank=4, alpha=8.0)
LOG_PROBS = {"log_probs": "old_log_probs"}


def _engine(mesh: DeviceMesh, lora: LoraConfig | None = LORA, **arguments: Any) -> Engine:
    config = {**arguments.pop("config", {}), "lora": lora}
    return tiny_engine(mesh, arguments.pop("model", source("llama")), config=config, **arguments)


def _shard(rank: int, world: int, seed: int = 0) -> Batch:
    batch = make_batch(seed=seed)
    costs = batch.lengths("prompt_ids") + batch.lengths("response_ids")
    return batch.take(balance(costs, world)[rank])


def _steps(engine: Engine, seeds: range, rank: int = 0, world: int = 1) -> list[float]:
    norms = []
    for seed in seeds:
        engine.forward_backward(_shard(rank, world, seed), PolicyLoss())
        norms.append(engine.optimizer_step().grad_norm)
    return norms


def _log_probs(engine: Engine, batch: Batch | None = None) -> torch.Tensor:
    made = engine.forward(batch if batch is not None else make_batch(), LOG_PROBS)
    return made.ragged("old_log_probs")[0].clone()


def _base_log_probs(engine: Engine, batch: Batch | None = None) -> torch.Tensor:
    assert engine.backend.adapters is not None
    with engine.backend.adapters.off():
        return _log_probs(engine, batch)


def _everything(engine: Engine) -> dict[str, torch.Tensor]:
    state = engine.backend.state()
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
    return {name: tensor.clone() for name, tensor in whole.items()}


def _base(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: shard.full_tensor().clone() for name, shard in engine.backend.shards.items()}


@pytest.mark.parametrize("kernels", ["auto", "transformers"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_model_starts_as_it_was_bit_for_bit(mesh: DeviceMesh, name: str, kernels: str) -> None:
    backend = TorchBackendConfig(kernels=kernels)  # type: ignore[arg-type]
    plain, adapted = (_engine(mesh, lora, model=source(name), backend=backend) for lora in (None, LORA))
    assert torch.equal(_log_probs(plain), _log_probs(adapted))
    assert plain.parameters().checksums() == adapted.parameters().checksums()
    assert plain.parameters().layout() == adapted.parameters().layout()


class _Made(TorchDispatchMode):
    """Counts what tensors of a shape got memory of their own."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._numel = math.prod(shape)
        self.places = set[int]()
        self.kept = list[torch.Tensor]()  # so that no place is used twice

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = function(*arguments, **(keywords or {}))
        if isinstance(made, torch.Tensor) and made.numel() == self._numel:
            self.places.add(made.untyped_storage().data_ptr())
            self.kept.append(made)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_computes_what_pefts_does_in_half_the_memory(dtype: torch.dtype) -> None:
    """Outputs and gradients to the bit, with a scaling that rounds: W x and B A x, and not what they make."""
    model = build_model(source("llama"), dtype)
    add_adapters(model, LoraConfig(rank=3, alpha=4.0), 0)
    for name in ("gate_proj", "down_proj"):  # of which input and output have other sizes
        layer: Any = getattr(model.model.layers[0].mlp, name)
        b = layer.lora_B["default"].weight
        torch.nn.init.normal_(b, generator=torch.Generator().manual_seed(1))
        x = torch.randn(1, 5, layer.in_features, generator=torch.Generator().manual_seed(2)).to(dtype)
        found = []
        for forward in (layer.forward, functools.partial(type(layer).forward, layer)):
            given = x.clone().requires_grad_()
            with _Made((1, 5, layer.out_features)) as made:
                out = forward(given)
            found.append((len(made.places), out, *torch.autograd.grad(out.square().sum(), (given, b))))
        (ours, *own), (theirs, *pefts) = found
        assert all(torch.equal(one, other) for one, other in zip(own, pefts, strict=True))
        assert own[0].dtype == dtype
        assert dtype == torch.bfloat16 or (ours, theirs) == (2, 4)  # casts are of that size, too


def test_only_adapters_learn(mesh: DeviceMesh) -> None:
    engine = _engine(mesh)
    before, base = _everything(engine), _base(engine)
    _steps(engine, range(2))
    after = _everything(engine)
    assert all(torch.equal(base[name], tensor) for name, tensor in _base(engine).items())
    learned = [
        name for name in after if name.startswith("model.") and not torch.equal(before[name], after[name])
    ]
    # Two layers, seven linear modules each, A and B: at the second step A has a gradient, too.
    assert len(learned) == 2 * 7 * 2
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in learned)
    # A [4, in] and B [out, 4] of q, k, v, o (32 and 16 wide), gate, up, down (48 wide).
    sizes = {"q": 4 * 64, "k": 4 * 48, "v": 4 * 48, "o": 4 * 64, "gate": 4 * 80, "up": 4 * 80, "down": 4 * 80}
    assert sum(after[name].numel() for name in learned) == 2 * sum(sizes.values())


def _one_module_by_hand(mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of B of one adapter, and what the chain rule says from a full model's gradient."""
    full = tiny_engine(mesh, source("llama"), config=FLOAT64)
    full.forward_backward(make_batch(), PolicyLoss())
    name = "model.layers.1.mlp.down_proj"
    dense = full.backend.by_name[f"{name}.weight"].grad
    engine = _engine(mesh, LoraConfig(rank=4, alpha=8.0, targets=("down_proj",)), config=FLOAT64)
    engine.forward_backward(make_batch(), PolicyLoss())
    a, b = (engine.backend.by_name[f"{name}.lora_{one}.default.weight"] for one in "AB")
    assert not a.grad.any()  # B is 0
    return b.grad, 8.0 / 4 * dense @ a.detach().t()


def test_the_gradient_of_b_is_that_of_the_weight_times_a(mesh: DeviceMesh) -> None:
    """dL/dB = alpha / r · dL/dW · Aᵀ where B = 0."""
    found, expected = _one_module_by_hand(mesh)
    assert relative_difference(found, expected) < 1e-12


def _train(rank: int, world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    out: dict[str, torch.Tensor] = {}
    cases: dict[str, dict[str, Any]] = {
        "all": {"config": FLOAT64},
        "checkpointing": {"config": {**FLOAT64, "gradient_checkpointing": True, "token_budget": 30}},
        "some": {
            "config": FLOAT64,
            "lora": LoraConfig(rank=3, targets=("q_proj", "v_proj"), init="gaussian"),
        },
        "tied": {"config": FLOAT64, "model": source("qwen3")},
        "experts": {"config": FLOAT64, "model": source("qwen3_moe")},
        "float32": {},
    }
    for name, arguments in cases.items():
        engine = _engine(mesh, **arguments)
        norms = _steps(engine, range(3), rank, world)
        out |= {f"{name} {key}": tensor for key, tensor in _everything(engine).items()}
        out |= {f"{name} merged {key}": tensor.clone() for key, tensor in engine.parameters().gathered(4000)}
        out[f"{name} norms"] = torch.tensor(norms)
    critic = _engine(mesh, head="value", config=FLOAT64)
    for seed in range(3):
        critic.forward_backward(_shard(rank, world, seed), ValueLoss())
        critic.optimizer_step()
    return out | {f"critic {key}": tensor for key, tensor in _everything(critic).items()}


@pytest.mark.slow
def test_two_ranks_learn_what_one_does() -> None:
    alone = run_ranks(1, _train)[0]
    for both in run_ranks(2, _train):
        assert both.keys() == alone.keys()
        for name, expected in alone.items():
            limit = 5e-4 if name.startswith("float32") else 1e-5 if name.startswith("experts") else 1e-9
            assert relative_difference(both[name], expected) < limit, name
    assert alone["critic model.value_head.weight"].any()


def _save(rank: int, world: int, path: str) -> tuple[dict[str, torch.Tensor], list[float], Files]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    engine = _engine(mesh)
    _steps(engine, range(3), rank, world)
    files, saved = engine.save(path), _everything(engine)
    return saved, _steps(engine, range(3, 5), rank, world), files


def _resume(rank: int, world: int, path: str, files: Files) -> tuple[dict[str, torch.Tensor], list[float]]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    engine = _engine(mesh)
    engine.load(path, files)
    return _everything(engine), _steps(engine, range(3, 5), rank, world)


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_a_checkpoint_holds_the_adapters_and_goes_on_exactly(
    tmp_path: Path, saving: int, loading: int
) -> None:
    path = str(tmp_path / "state")
    saved, norms, files = run_ranks(saving, _save, path)[0]
    kinds = {name.partition(".")[0] for name in saved}
    assert kinds == {"model", "optimizer", "base"}
    assert all(".lora_" in name for name in saved if name.startswith(("model.", "optimizer.exp")))
    size = sum(file.stat().st_size for file in (tmp_path / "state").glob("*.bin"))
    parameters = sum(tensor.numel() for name, tensor in saved.items() if name.startswith("model."))
    assert size < 3 * 4 * parameters + 2000  # A, B and their two moments, in float32
    loaded, later = run_ranks(loading, _resume, path, files)[0]
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
    assert later == (norms if saving == loading else pytest.approx(norms, rel=1e-4))


def test_a_checkpoint_of_another_base_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    files = _engine(mesh).save(str(tmp_path))
    other = _engine(mesh, model=ModelSource(config=source("llama").config, seed=4))
    with pytest.raises(CheckpointError, match="other weights"):
        other.load(str(tmp_path), files)


def test_merged_weights_compute_what_the_adapters_do(mesh: DeviceMesh) -> None:
    engine = _engine(mesh)
    start = _log_probs(engine)
    _steps(engine, range(3))
    plain = tiny_engine(mesh, source("llama"))
    plain.copy_parameters_from(engine)
    assert (_log_probs(engine) - start).abs().max() > 0.1
    assert (_log_probs(plain) - _log_probs(engine)).abs().max() < 2e-5
    assert plain.parameters().checksums() == engine.parameters().checksums()
    shards = dict(plain.parameters().gathered(1 << 20))
    with engine.parameters().local() as rows:
        assert all(torch.equal(rows[name], shards[name]) for name in rows)
    own = engine.parameters_in_place()
    assert all(torch.equal(own[name], shard) for name, shard in _base(engine).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_sent_beside_merged_weights(mesh: DeviceMesh, dtype: str) -> None:
    engine = _engine(mesh)
    _steps(engine, range(2))
    alone, everything = engine.parameters("adapters"), engine.parameters("all")
    factors = {name: factor.full_tensor() for name, factor in engine.backend.factors.items()}
    assert alone.layout(dtype).num_bytes == sum(4 * factor.numel() for factor in factors.values())
    assert {one.name: one.dtype for one in alone.layout(dtype).parameters} == dict.fromkeys(
        factors, "float32"
    )
    for source_, base in ((alone, {}), (everything, _base(engine))):
        wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in base.items()} | factors
        came = {name: tensor.clone() for name, tensor in source_.gathered(1 << 12, dtype)}
        assert came.keys() == wanted.keys()
        assert all(torch.equal(came[name], wanted[name]) for name in wanted)
        assert source_.checksums(dtype) == {name: checksum(one) for name, one in wanted.items()}
    with pytest.raises(TrainError):
        tiny_engine(mesh, source("llama")).parameters("adapters")


@pytest.mark.parametrize("config", [{}, {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}])
def test_without_its_adapters_the_actor_is_the_reference(mesh: DeviceMesh, config: dict[str, Any]) -> None:
    reference = tiny_engine(mesh, source("llama"), None, config=config)
    engine = _engine(mesh, config=config)
    expected = _log_probs(reference)
    # The first pass of all: nothing may remember that the adapters were off.
    assert torch.equal(_base_log_probs(engine), expected)
    _steps(engine, range(3))
    found = _base_log_probs(engine)
    assert torch.equal(found, expected)
    assert not torch.equal(_log_probs(engine), expected)


def _reference_on_ranks(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    reference, engine = tiny_engine(mesh, source("llama"), None), _engine(mesh)
    _steps(engine, range(2), rank, world)
    batch = _shard(rank, world)
    base = _base_log_probs(engine, batch)
    return base, _log_probs(reference, batch)


@pytest.mark.slow
def test_the_reference_on_two_ranks() -> None:
    for base, expected in run_ranks(2, _reference_on_ranks):
        assert torch.equal(base, expected)


def _half(rank: int, world: int) -> tuple[dict[str, torch.Tensor], list[float], torch.Tensor]:
    """Adapters on a base in bfloat16, with both compute dtypes."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    out: dict[str, torch.Tensor] = {}
    for dtype in ("bfloat16", "float32"):
        engine = _engine(mesh, config={"param_dtype": "bfloat16", "compute_dtype": dtype})
        norms = _steps(engine, range(3), rank, world)
        out |= {f"{dtype} {name}": tensor for name, tensor in _everything(engine).items()}
    return out, norms, _base(engine)["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.slow
def test_the_base_may_rest_in_half_precision() -> None:
    alone, norms, weight = run_ranks(1, _half)[0]
    both, norms_of_both, _ = run_ranks(2, _half)[0]
    assert weight.dtype == torch.bfloat16
    for name, tensor in alone.items():
        if "lora" in name:
            assert tensor.dtype == torch.float32, name  # and the moments
            limit = 0.1 if name.startswith("bfloat16") else 1e-4
            assert relative_difference(both[name], tensor) < limit, name
    assert norms == pytest.approx(norms_of_both, rel=1e-4)


def test_peft_loads_what_is_exported(mesh: DeviceMesh, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    first = tiny_engine(mesh, source("llama"))
    first.export(str(tmp_path / "base"))
    model = ModelSource(path=str(tmp_path / "base"))
    engine = _engine(mesh, model=model)
    _steps(engine, range(3))
    engine.export(str(tmp_path / "export"))
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        before = base(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "export" / "adapter")
        found = adapted(input_ids=ids).logits
        assert (found - merged(input_ids=ids).logits).abs().max() < 1e-4
        assert (found - before).abs().max() > 0.1
    # Started from it, an engine is what the trained one was, in every bit.
    path = str(tmp_path / "export" / "adapter")
    again = _engine(mesh, LoraConfig(rank=4, alpha=8.0, path=path), model=model)
    assert torch.equal(_log_probs(again), _log_probs(engine))
    assert _everything(again).keys() == _everything(engine).keys()


def _response_log_probs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Row by row, as transformers and peft compute them."""
    found = []
    for prompt, response in zip(batch.rows("prompt_ids"), batch.rows("response_ids"), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0])
    return torch.cat(found)


DOTS1 = {**config_of("glm4_moe"), "model_type": "dots1"}
del DOTS1["use_qk_norm"]
MIXTURES = {
    name: config_of(name)
    for name in (
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "mixtral",
    )
} | {"dots1": DOTS1}


@pytest.mark.parametrize("family", MIXTURES)
def test_peft_loads_what_is_exported_of_mixtures(mesh: DeviceMesh, tmp_path: Path, family: str) -> None:
    """It takes dense layers and shared experts of most of them for the experts, by the ends of their names
    (`peft.utils.transformers_weight_conversion`).
    """
    import peft
    from transformers import AutoModelForCausalLM

    random = ModelSource(config=MIXTURES[family], seed=3)
    tiny_engine(mesh, random).export(str(tmp_path / "base"))
    model = ModelSource(path=str(tmp_path / "base"))
    engine = _engine(mesh, model=model)
    _steps(engine, range(3))
    engine.export(str(tmp_path / "export"))
    adapter, batch = tmp_path / "export" / "adapter", make_batch()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before, expected = _response_log_probs(base, batch), _log_probs(engine, batch)
    assert (expected - before).abs().max() > 0.1
    adapted = peft.PeftModel.from_pretrained(base, adapter)
    assert (_response_log_probs(adapted, batch) - expected).abs().max() < 1e-4
    merged = adapted.merge_and_unload()
    assert (_response_log_probs(merged, batch) - expected).abs().max() < 1e-4
    again = _engine(mesh, LoraConfig(rank=4, alpha=8.0, path=str(adapter)), model=model)
    assert torch.equal(_log_probs(again, batch), expected)


def test_an_adapter_that_peft_would_read_as_another_is_refused(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    model = source_of("deepseek_v3")
    adapter = _exported(mesh, tmp_path / "export", model=model)
    check_for_peft(str(adapter), model)
    file = adapter / "adapter_config.json"
    written = json.loads(file.read_text())
    named = [name.removesuffix(".weight") for name in written["target_parameters"]]
    ends = ("gate_proj", "up_proj", "down_proj")
    assert sorted(named) == sorted(
        f"model.layers.{module}.{end}" for module in ("0.mlp", "1.mlp.shared_experts") for end in ends
    )
    plain = {"target_modules": written["target_modules"] + named, "target_parameters": None}
    first = "model.layers.0.self_attn.o_proj"
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        (plain, "model.layers.0.mlp.down_proj"),  # as it was written before
        ({"alpha_pattern": {"o_proj": 3.0}}, first),
        ({"rank_pattern": {"o_proj": 3}}, "model.layers.0.mlp.down_proj"),  # the first: it takes none at all
        ({"target_modules": [name for name in written["target_modules"] if name != first]}, first),
        ({"target_modules": [*written["target_modules"], "lm_head"]}, "lm_head"),
    )
    for change, astray in changes:
        file.write_text(json.dumps({**written, **change}))
        with pytest.raises(CheckpointError, match=f"reads the exported adapter as another one: '{astray}'"):
            check_for_peft(str(adapter), model)
    file.write_text(json.dumps(written))
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors[f"base_model.model.{first}.lora_B.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=f"as another one: '{first}' \\(and 0 others"):
        check_for_peft(str(adapter), model)
    # Also when the engine itself exports; and before a run, what no config makes right.
    config = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=plain["target_modules"])
    monkeypatch.setattr("rondo.models.lora.config_for_peft", lambda *_: config)
    with pytest.raises(CheckpointError, match=full_text("'model.layers.0.mlp.down_proj'")):
        _exported(mesh, tmp_path / "again", model=model)
    monkeypatch.undo()
    shapes = {f"base_model.model.{first.replace('0', '7')}.lora_{one}.weight": (4, 32) for one in "AB"}
    with pytest.raises(ConfigError, match=r"layers\.7") as caught:
        config_for_peft(model, LORA, shapes)
    assert caught.value.key == "lora.targets"


def test_merging_holds_one_tensor_at_a_time(mesh: DeviceMesh) -> None:
    engine = _engine(mesh)
    _steps(engine, range(1))
    with engine.parameters().local() as rows:
        first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
        assert rows[first] is rows[first]  # which is sent in pieces
        gone = weakref.ref(rows[first])
        assert rows[second].shape == (48, 32)
        assert gone() is None
    whole = weakref.WeakSet[torch.Tensor]()
    for name, tensor in engine.parameters().gathered(1 << 20):
        if "_proj" in name:
            whole.add(tensor)
            assert len(whole) <= 2, name  # the one that is read, and the one before


def _exported(mesh: DeviceMesh, folder: Path, lora: LoraConfig = LORA, **arguments: Any) -> Path:
    engine = _engine(mesh, lora, **arguments)
    _steps(engine, range(1)) if arguments.get("head") != "value" else None
    engine.export(str(folder))
    return folder / "adapter"


def test_adapters_that_do_not_fit_are_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    adapter = _exported(mesh, tmp_path / "export")

    llama = source("llama")

    def refused(key: str, model: ModelSource = llama, **settings: Any) -> str:
        lora = LoraConfig(**{"rank": 4, "alpha": 8.0, "path": str(adapter), **settings})
        with pytest.raises(ConfigError) as caught:
            adapter_set(model, lora)
        assert caught.value.key == key
        return str(caught.value)

    adapter_set(source("llama"), LoraConfig(rank=4, alpha=8.0, path=str(adapter)))
    assert "r=4" in refused("lora.rank", rank=8)
    assert "lora_alpha=8.0" in refused("lora.alpha", alpha=16.0)
    refused("lora.targets", targets=("q_proj",))
    refused("lora.path", source("llama", hidden_size=64))
    refused("lora.targets", source("llama", num_hidden_layers=3))
    with pytest.raises(ConfigError, match=full_text("no adapter_config.json in")):
        adapter_set(source("llama"), LoraConfig(path=str(tmp_path)))
    # The same shapes with other weights: only who has these can tell.
    other = ModelSource(config=source("llama").config, seed=4)
    with pytest.raises(ConfigError, match="other weights"):
        _engine(mesh, LoraConfig(rank=4, alpha=8.0, path=str(adapter)), model=other)
    written = json.loads((adapter / "adapter_config.json").read_text())
    for change in (
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"bias": "all"},
        {"peft_type": "LOHA"},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({**written, **change}))
        refused("lora.path")
    (adapter / "adapter_config.json").write_text(json.dumps(written))
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if "layers.1" in name}, adapter / "adapter_model.safetensors"
    )
    refused("lora.targets")


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "hunyuan_v1_moe", "qwen3_next", "phimoe"])
def test_mixtures_get_adapters_on_their_linear_modules_only(family: str) -> None:
    """Those of dense layers and shared experts too, whose names peft would take for the experts'."""
    lm = build_model(source_of(family), torch.float32)
    linear = {name for name, one in lm.named_modules() if type(one) is torch.nn.Linear}
    adapters = add_adapters(lm, LORA, 0)
    changed = {name for name, one in lm.named_modules() if hasattr(one, "lora_A")}
    assert changed == {one.module for one in adapters.values()} == linear - {"lm_head"}


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("lm_head", "llama"),
        ("lm_head", "qwen3"),
        ("embed_tokens", "qwen3"),
        ("q_prj", "llama"),
        ("0", "llama"),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_refused(target: str, name: str) -> None:
    """qwen3's head is tied to its embedding: an adapter on either would untie them in what is exported."""
    with pytest.raises(ConfigError) as caught:
        adapter_set(source(name), LoraConfig(targets=("q_proj", target)))
    assert caught.value.key == "lora.targets"
    assert repr(target) in str(caught.value)


def test_the_start_of_adapters_depends_on_the_seed_alone(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = _everything(_engine(mesh))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again = _everything(_engine(mesh))
    assert all(torch.equal(first[name], tensor) for name, tensor in again.items())
    a = next(
        tensor for name, tensor in first.items() if "down_proj.lora_A" in name and name.startswith("model.")
    )
    assert a.abs().max() <= 48**-0.5  # uniform in ±1/√in
    assert float(a.std()) == pytest.approx(48**-0.5 / 3**0.5, rel=0.15)
    assert dist.get_world_size(mesh.get_group()) == 1
