"""`training.backend.Backend` is enough: an engine over a framework that has nothing of ours (transformers, a
row at a time, one rank) does what the engine over the `torch` backend does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from rondo.config.schema import EngineConfig, OptimizerConfig, TorchBackendConfig
from rondo.core.errors import TrainError
from rondo.models import ModelSource
from rondo.models.family import family_of
from rondo.models.loading import load_model_config
from rondo.platform import Residency
from rondo.training import Engine, OptimizerStats
from rondo.training.backend import Backend, Use
from rondo.training.checkpoint import State
from rondo.training.packed import PackedLayout
from rondo.training.passes import Passes, RecordedRoutes
from rondo.weights.checksum import checksum
from rondo.weights.layout import Layout, Parameter
from rondo.weights.sync import Sent, WeightSource, gather_into
from tests.training.helpers import FLOAT64, PolicyLoss, full_gradients, make_batch, source, tiny_engine
from tests.weights.sinks import Keeping

Tensors = dict[str, torch.Tensor]


class PlainWeights:
    """`weights.sync.WeightSource` of tensors that are here."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def layout(self, dtype: str | None = None) -> Layout:
        parameters = [
            Parameter(name, tuple(one.shape), dtype or str(one.dtype).removeprefix("torch."))
            for name, one in self._tensors.items()
        ]
        return Layout.replicated(parameters, (0,), whole_tensors=False)

    def local(self) -> contextlib.AbstractContextManager[Mapping[str, torch.Tensor]]:
        return contextlib.nullcontext(self._tensors)

    def gathered(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in self._tensors.items():
            yield name, one if dtype is None else one.to(getattr(torch, dtype))

    def release_memory(self) -> None:
        pass

    def checksums(self, dtype: str | None = None) -> dict[str, int]:
        return {name: checksum(one) for name, one in self.gathered(0, dtype)}


class PlainBackend:
    """`training.backend.Backend`."""

    def __init__(self, model: ModelSource, config: OptimizerConfig, mesh: DeviceMesh, folder: Path) -> None:
        tiny_engine(mesh, model, config=FLOAT64).export(str(folder))  # the same weights to begin with
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.hf_config = load_model_config(model)
        self.group = mesh.get_group()
        self.routes = None
        self.residency = Residency("cpu")
        self.parts = {}
        family = dataclasses.replace(family_of(self.hf_config), not_packable="it is plain")
        self.packing = PackedLayout(family, torch.device("cpu"), torch.float64, "auto")
        self._config = config
        self._tensors = {name: one.detach() for name, one in self._model.named_parameters()}
        self._adamw = torch.optim.AdamW(
            self._model.parameters(), config.lr, config.betas, config.eps, config.weight_decay
        )
        for one in self._model.parameters():
            moments = {name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")}
            self._adamw.state[one] = {"step": torch.zeros(()), **moments}

    def run(
        self,
        passes: Passes,
        outputs: tuple[str, ...],
        use: Use,
        *,
        backward: bool = False,
        recorded: RecordedRoutes | None = None,
    ) -> None:
        with torch.set_grad_enabled(backward):
            for packed in passes:
                logits = self._model(packed.input_ids[None], position_ids=packed.position_ids[None]).logits
                log_softmax = torch.log_softmax(logits[0, packed.positions], -1)
                computed = {
                    "log_probs": log_softmax.gather(1, packed.targets[:, None])[:, 0],
                    "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
                }
                total = use(packed, {name: computed[name] for name in outputs})
                if backward:
                    assert total is not None
                    total.backward()

    def step(self) -> OptimizerStats:
        assert self._config.grad_clip is not None
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.grad_clip)
        skipped = not bool(norm.isfinite())
        if not skipped:
            self._adamw.step()
        self._adamw.zero_grad()
        return OptimizerStats(float(norm), skipped, self._config.lr)

    def num_parameters(self) -> int:
        return sum(one.numel() for one in self._tensors.values())

    def parameters(self, what: Sent) -> PlainWeights:
        assert what == "merged"
        return PlainWeights(self._tensors)

    def take(self, source: WeightSource) -> None:
        with source.local() as weights:
            for name, one in self._tensors.items():
                one.copy_(weights[name])

    def parameters_in_place(self) -> Tensors:
        return self._tensors

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        raise TrainError("there are no adapters to take off")

    def export_adapters(self, path: str) -> None:
        pass

    def state(self) -> State:
        state = {f"model.{name}": one for name, one in self._tensors.items()}
        for name, one in self._model.named_parameters():
            state |= {f"optimizer.{key}.{name}": entry for key, entry in self._adamw.state[one].items()}
        return state

    def adopt(self, state: State, path: str) -> None:
        pass  # it shares all of its storage


def plain_engine(mesh: DeviceMesh, model: ModelSource, folder: Path) -> Engine:
    backend: Backend = PlainBackend(model, OPTIMIZER, mesh, folder)
    return Engine(backend, model, EngineConfig(**FLOAT64))


OPTIMIZER = OptimizerConfig(lr=1e-2)


def weights_of(engine: Engine) -> Tensors:
    return {name: one.clone() for name, one in engine.parameters().gathered(1 << 20)}


def close(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_an_engine_over_another_framework(mesh: DeviceMesh, tmp_path: Path, name: str) -> None:
    model, batch, columns = source(name), make_batch(), {"log_probs": "a", "entropy": "b"}
    ours = tiny_engine(mesh, model, OPTIMIZER, FLOAT64, backend=TorchBackendConfig(kernels="transformers"))
    plain = plain_engine(mesh, model, tmp_path / "start")
    assert plain.num_parameters() == ours.num_parameters()
    for step in range(3):
        made = [engine.forward(batch, columns) for engine in (ours, plain)]
        for column in columns.values():
            torch.testing.assert_close(made[1].ragged(column), made[0].ragged(column), rtol=0, atol=1e-10)
        stats = [engine.forward_backward(batch, PolicyLoss()).means for engine in (ours, plain)]
        assert stats[1]["loss"][0] == pytest.approx(stats[0]["loss"][0], rel=1e-9)
        mine = {key: one.grad.clone() for key, one in plain.backend._model.named_parameters()}
        close(mine, full_gradients(ours))
        ends = [engine.optimizer_step() for engine in (ours, plain)]
        assert ends[1].grad_norm == pytest.approx(ends[0].grad_norm, rel=1e-9), step
    close(weights_of(plain), weights_of(ours))

    files = plain.save(str(tmp_path / "state"))
    again = plain_engine(mesh, model, tmp_path / "again")
    again.load(str(tmp_path / "state"), files)
    for engine in (plain, again):
        engine.forward_backward(batch, PolicyLoss())
        engine.optimizer_step()
    assert again.parameters().checksums() == plain.parameters().checksums()

    plain.export(str(tmp_path / "export"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    close({key: one.detach() for key, one in exported.named_parameters()}, weights_of(plain))
    ours.copy_parameters_from(again)
    assert ours.parameters().checksums() == again.parameters().checksums()
    other = tiny_engine(mesh, source(name, initializer_range=0.1), config=FLOAT64)
    again.copy_parameters_from(other)
    assert again.parameters().checksums() == other.parameters().checksums()
    next(iter(plain.backend._model.parameters())).grad = torch.full(
        (61, 32), float("nan"), dtype=torch.float64
    )
    held = plain.parameters().checksums()
    assert plain.optimizer_step().skipped
    assert plain.parameters().checksums() == held
    sampler = Keeping()
    gather_into(plain.parameters(), sampler, 1)
    close(sampler.tensors, weights_of(plain))
