"""Blocks computed again from host memory, MLPs a tile at a time: the gradients stay, memory goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rondo.config.schema import LoraConfig, TorchBackendConfig
from rondo.core.errors import ConfigError
from rondo.planning.batches import balance
from rondo.training import Engine
from rondo.training.gathering import gather_buckets
from rondo.training.torch_backend.activations import tile_mlps
from rondo.training.views import local_of
from tests.models.families import source_of
from tests.ranks import run_ranks
from tests.training.helpers import (
    FLOAT64,
    PolicyLoss,
    full_gradients,
    make_batch,
    relative_difference,
    source,
    tiny_engine,
)
from tests.training.layouts import layout

TILES = TorchBackendConfig(mlp_chunk=5)
LONG = ((3, 7), (1, 1), (5, 12), (70, 50))
LOG_PROBS = {"log_probs": "old_log_probs"}


def _gradients(engine: Engine, batch: Any = None) -> dict[str, torch.Tensor]:
    engine.forward_backward(make_batch(LONG) if batch is None else batch, PolicyLoss())
    return {name: one for name, one in full_gradients(engine).items() if one is not None}


def _same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_difference(got[name], gradient) <= limit, name


@pytest.mark.parametrize("checkpointing", [False, True, "offload"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_tiles_and_checkpoints_leave_the_gradients(mesh: DeviceMesh, family: str, checkpointing: Any) -> None:
    model, limit = source(family), 1e-6 if family == "qwen3_moe" else 1e-10  # its router rounds to float32
    expected = _gradients(tiny_engine(mesh, model, config=FLOAT64))
    config = {**FLOAT64, "gradient_checkpointing": checkpointing}
    _same(_gradients(tiny_engine(mesh, model, config=config)), expected, limit)
    _same(_gradients(tiny_engine(mesh, model, config=config, backend=TILES)), expected, limit)


@pytest.mark.parametrize(
    "family", ["gpt_oss", "gemma2", "gpt2", "deepseek_v3", "granitemoe", "llama4_text", "lfm2"]
)
def test_tiles_of_other_families(mesh: DeviceMesh, family: str) -> None:
    """Tuples with a router's scores, fused experts, other names, shared experts."""
    config = {**FLOAT64, "gradient_checkpointing": True}
    plain, tiled = (
        tiny_engine(mesh, source_of(family), config=config, backend=backend)
        for backend in (TorchBackendConfig(), TILES)
    )
    _same(_gradients(tiled), _gradients(plain), 1e-6)
    batch = make_batch(LONG)
    ours, theirs = (one.forward(batch, LOG_PROBS).ragged("old_log_probs")[0] for one in (tiled, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_no_more_than_a_tile_is_in_an_mlp(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the forward pass nor where a tile is computed again; and each is computed again once."""
    sizes: list[int] = []
    inner = torch.nn.functional.silu

    def seen(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append(x.shape[1])
        return inner(x, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "silu", seen)
    batch = make_batch(((6, 7),))  # 12 tokens
    engine = tiny_engine(mesh, source("llama"), backend=TILES)
    engine.forward(batch, LOG_PROBS)
    # In two layers; and of the first tile, once, its last token by itself and behind the others.
    assert sizes == 2 * [5, 1, 5, 5, 2]
    sizes.clear()
    engine.forward_backward(batch, PolicyLoss())
    assert sorted(sizes) == sorted(2 * [5, 5, 2] + 2 * [5, 5, 2])


def test_what_waits_is_each_blocks_input(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """(On a CPU it is a copy beside the other: only a CUDA device has memory of its own.)"""
    packed: list[tuple[int, ...]] = []
    real = torch.autograd.graph.save_on_cpu

    class Noted(real):  # type: ignore[misc, valid-type]
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory=pin_memory)
            pack = self.pack_hook

            def noted(tensor: torch.Tensor) -> Any:
                packed.append(tuple(tensor.shape))
                return pack(tensor)

            self.pack_hook = noted

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Noted)
    engine = tiny_engine(mesh, source("llama"), config={"gradient_checkpointing": "offload"})
    engine.forward(make_batch(((6, 7),)), LOG_PROBS)
    assert packed == []  # nothing waits for a backward pass that does not come
    engine.forward_backward(make_batch(((6, 7),)), PolicyLoss())
    assert [shape for shape in packed if shape != (0,)] == [
        (1, 12, 32)
    ] * 2  # torch 2.11 keeps an empty one, too


def _on_ranks(rank: int, world: int) -> dict[str, dict[str, torch.Tensor]]:
    batch, out = make_batch((*LONG, (70, 40))), {}
    costs = batch.lengths("prompt_ids") + batch.lengths("response_ids")
    cases: dict[str, tuple[str, Any, TorchBackendConfig]] = {
        "plain": ("llama", False, TorchBackendConfig()),
        "tiles": ("llama", False, TILES),
        "all": ("llama", "offload", TILES),
        "tensor": ("llama", "offload", TILES),
        "context": ("llama", "offload", TILES),
        "kept": ("llama", True, TorchBackendConfig(mlp_chunk=5, reshard=False)),
        "experts plain": ("qwen3_moe", False, TorchBackendConfig()),
        "experts all": ("qwen3_moe", "offload", TILES),
    }
    for name, (model, checkpointing, backend) in cases.items():
        config = {**FLOAT64, "gradient_checkpointing": checkpointing, "token_budget": 200}
        views, index, count = layout(world, **({name: world} if name in ("tensor", "context") else {}))
        engine = tiny_engine(views, source(model), config=config, backend=backend)
        own = batch.take(balance(costs, count)[index])
        engine.forward_backward(own, PolicyLoss())
        gradients = {key: local_of(one.grad) for key, one in engine.backend.by_name.items()}
        gathered = gather_buckets(engine.parameters().layout(), gradients, dist.group.WORLD, 1 << 20)
        out[name] = {key: one.clone() for key, one in gathered}
    return out


@pytest.mark.slow
def test_on_two_ranks_under_fsdp() -> None:
    """Also on a rank that has none of the long rows; and along the axes tensor and context."""
    alone, two = run_ranks(1, _on_ranks)[0], run_ranks(2, _on_ranks)[0]
    for name in two.keys() - {"experts all", "experts plain"}:
        _same(two[name], alone["plain"], 1e-10)
    _same(two["experts all"], alone["experts plain"], 1e-6)


def test_adapters_in_a_tiled_mlp(mesh: DeviceMesh) -> None:
    pytest.importorskip("peft")
    config = {**FLOAT64, "lora": LoraConfig(rank=4, targets=("down_proj",))}
    expected = _gradients(tiny_engine(mesh, source("llama"), config=config))
    config["gradient_checkpointing"] = "offload"
    _same(_gradients(tiny_engine(mesh, source("llama"), config=config, backend=TILES)), expected, 1e-10)


def test_a_model_that_cannot_be_tiled_is_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no MLP of its own") as caught:
        tile_mlps([torch.nn.Linear(2, 2)], 5)  # as OPT's blocks, that have two such in the place of one
    assert caught.value.key == "actor.backend.mlp_chunk"
    with pytest.raises(ConfigError, match="on other ranks"):
        tile_mlps([torch.nn.Linear(2, 2)], 5, exchanging=True)
    engine = tiny_engine(mesh, source("llama"), backend=TILES)
    mlp = next(module for module in engine.backend.model.modules() if type(module).__name__ == "LlamaMLP")
    plain = mlp.forward._forward
    monkeypatch.setattr(mlp.forward, "_forward", lambda hidden: plain(hidden).cumsum(1))
    with pytest.raises(ConfigError, match=r"LlamaMLP.*each token by itself"):
        engine.forward_backward(make_batch(LONG), PolicyLoss())
    with pytest.raises(ConfigError, match="more than hidden states"):
        mlp(torch.zeros(1, 3, 32), torch.zeros(1, 3, 32))
