"""What engines do with weights, and say of their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.core.types import Completion
from rondo.rollout.native import compiled, generic
from rondo.rollout.requests import Pending
from rondo.rollout.weights import WeightStore
from tests.planted.fault import Patch, fault

# ---- weights on their way to the engine

OWN_WEIGHTS = "rollout.weight_transport=disk"  # they are sent, where one process could share them
CHECKSUMS, CANARY = "checksums of every sync", "the canary"


def _after_commit(patch: Patch, change: Callable[[WeightStore, int], None]) -> None:
    """Has engines change their weights when they have confirmed them."""
    commit = WeightStore.commit

    def confirmed(self: WeightStore, version: int, checksums: Mapping[str, int] | None = None) -> None:
        commit(self, version, checksums)
        change(self, version)

    patch.setattr(WeightStore, "commit", confirmed)


def _received(patch: Patch, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Has engines receive something else than was sent."""
    receive = WeightStore.receive
    patch.setattr(
        WeightStore, "receive", lambda self, name, tensor: receive(self, name, change(name, tensor))
    )


MIXTURE = (
    "model.config.model_type=qwen3_moe",
    "model.config.moe_intermediate_size=32",
    "model.config.num_experts=4",
    "model.config.num_experts_per_tok=2",
)


@fault(
    "stops", "engine", "NovaSky-AI/SkyRL/issues/1680",
    by=CANARY, step=0, says="the first tensor that differs is 'model.layers.0.mlp.experts.gate_up_proj'",
)  # fmt: skip
def experts_swapped(patch: Patch, folder: Path) -> Sequence[str]:
    """From the first sync on the engine has two experts of a mixture in each other's place."""

    def swap(store: WeightStore, version: int) -> None:
        for name, tensor in store.tensors.items():
            if "experts" in name and version > 0:
                tensor[[0, 1]] = tensor[[1, 0]]

    _after_commit(patch, swap)
    return (*MIXTURE, OWN_WEIGHTS)


@fault(
    "stops", "sink", "huggingface/trl/issues/5312", "verl-project/verl/issues/7495",
    by=CANARY, step=0, says="the first tensor that differs is 'model.embed_tokens.weight'",
)  # fmt: skip
def stale_weights(patch: Patch, folder: Path) -> Sequence[str]:
    """The engine confirms new weights, and goes on with the first ones."""
    first: dict[str, torch.Tensor] = {}

    def keep(store: WeightStore, version: int) -> None:
        for name, tensor in store.tensors.items():
            tensor.copy_(first.setdefault(name, tensor.clone()))

    _after_commit(patch, keep)
    return (OWN_WEIGHTS,)


@fault(
    "warns", "sink", "huggingface/trl/issues/5312",
    by="gap_grows", step=2, says="times as far apart as in the first steps",
)  # fmt: skip
def stale_weights_in_half_precision(patch: Patch, folder: Path) -> Sequence[str]:
    """The same in bfloat16, slowly: each single difference is one that rounding could make."""
    return (
        *stale_weights(patch, folder),
        "rollout.dtype=bfloat16",
        "actor.optimizer.lr=4e-4",
        "trainer.total_steps=4",
    )


@fault(
    "stops", "sink", "verl-project/verl/pull/7987",
    by=CHECKSUMS, step=-1, says="'model.layers.1.mlp.down_proj.weight' is not what was sent",
)  # fmt: skip
def zeroed_tensor(patch: Patch, folder: Path) -> Sequence[str]:
    """One tensor is 0 in the engine."""
    name = "model.layers.1.mlp.down_proj.weight"
    _received(patch, lambda own, tensor: torch.zeros_like(tensor) if own == name else tensor)
    return (OWN_WEIGHTS,)


@fault(
    "stops", "sink", "NovaSky-AI/SkyRL/pull/1345",
    by=CHECKSUMS, step=0, says="'model.embed_tokens.weight' is not what was sent",
)  # fmt: skip
def half_written_tensor(patch: Patch, folder: Path) -> Sequence[str]:
    """Half of each tensor is still that of the version before."""
    last: dict[str, torch.Tensor] = {}

    def half(name: str, tensor: torch.Tensor) -> torch.Tensor:
        before, last[name] = last.get(name, tensor), tensor.clone()
        cut = len(tensor) // 2
        return torch.cat([before[:cut], tensor[cut:]])

    _received(patch, half)
    return (OWN_WEIGHTS,)


@fault(
    "stops", "sink", "verl-project/verl/issues/7495",
    by=CHECKSUMS, step=0, says="9 of 24 tensors did not arrive: model.layers.0.input_layernorm.weight",
)  # fmt: skip
def tensors_left_out(patch: Patch, folder: Path) -> Sequence[str]:
    """The norms are left out of the second set of weights."""
    receive = WeightStore.receive
    come: set[str] = set()

    def some(self: WeightStore, name: str, tensor: torch.Tensor) -> None:
        if name not in come or "norm" not in name:
            receive(self, name, tensor)
        come.add(name)

    patch.setattr(WeightStore, "receive", some)
    return (OWN_WEIGHTS,)


@fault(
    "stops", "engine", "radixark/miles/pull/2075", "verl-project/verl/issues/7495",
    by=CANARY, step=0, says="does not hold the trainer's weights, or computes another model",
)  # fmt: skip
def adapters_ignored(patch: Patch, folder: Path) -> Sequence[str]:
    """The engine takes the adapters of LoRA, and computes without them."""

    def base_alone(self: WeightStore) -> None:
        for name in self._adapters:
            self.tensors[name].copy_(self._base[name])

    patch.setattr(WeightStore, "_merge", base_alone)
    return (OWN_WEIGHTS, "actor.lora={rank: 4, alpha: 8, send: adapters}", "actor.optimizer.lr=1e-2")


# ---- what the engine says of its answers


def _answers(patch: Patch, change: Callable[[Completion], Completion]) -> None:
    """Has engines say something else of their answers than is true."""
    completion = Pending.completion
    patch.setattr(Pending, "completion", lambda self, reason: change(completion(self, reason)))


@fault(
    "stops", "engine", "huggingface/trl/issues/4159", "PrimeIntellect-ai/prime-rl/pull/697",
    by=CANARY, step=-1, says="all 24 tensors are equal: the weights arrived, and the two compute another",
)  # fmt: skip
def log_probs_before_temperature(patch: Patch, folder: Path) -> Sequence[str]:
    """The engine samples at a temperature of 0.6 and reports log-probs of the logits as they are."""
    sample = generic.sample

    def as_they_are(logits: torch.Tensor, *arguments: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = sample(logits, *arguments, **more)
        return tokens, logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    patch.setattr(generic, "sample", as_they_are)
    return ("rollout.temperature=0.6", "rollout.engine={name: native, decode: generic}")


@fault(
    "stops", "engine", "PrimeIntellect-ai/prime-rl/pull/1525",
    by=CANARY, step=-1, says="all 24 tensors are equal: the weights arrived, and the two compute another",
)  # fmt: skip
def log_probs_of_another_token(patch: Patch, folder: Path) -> Sequence[str]:
    """The engine reports each token's log-prob one place too late."""
    _answers(patch, lambda done: dataclasses.replace(done, log_probs=np.roll(done.log_probs, 1)))
    return ()


@fault(
    "stops", "engine", "verl-project/verl/issues/3720", "huggingface/trl/issues/5224",
    by=CANARY, step=-1, says="differ from the trainer's by",
)  # fmt: skip
def token_ids_shifted(patch: Patch, folder: Path) -> Sequence[str]:
    """The ids of an answer are those that another tokenizer has for its text."""

    def others(done: Completion) -> Completion:
        return dataclasses.replace(done, token_ids=np.maximum(done.token_ids - 1, 0).astype(np.int32))

    _answers(patch, others)
    return ()


@fault(
    "stops", "engine", "sgl-project/sglang/pull/36404", "NVIDIA/Megatron-LM/pull/4256",
    by=CANARY, step=-1, says="does not hold the trainer's weights, or computes another model",
)  # fmt: skip
def other_routes_than_said(patch: Patch, folder: Path) -> Sequence[str]:
    """The routes of a mixture that the engine reports, to be replayed in training, are not those it took."""

    def others(done: Completion) -> Completion:
        assert done.routes is not None
        return dataclasses.replace(done, routes=(done.routes + 1) % 4)

    _answers(patch, others)
    return (*MIXTURE, "actor.router.replay=sampler")


@fault(
    "stops", "engine", "huggingface/transformers/pull/29285", "EleutherAI/gpt-neox/issues/1003",
    by=CANARY, step=-1, says="behind a prompt of 64 tokens",
)  # fmt: skip
def rotary_tables_in_half_precision(patch: Patch, folder: Path) -> Sequence[str]:
    """The engine keeps the tables of its rotary embedding in bfloat16, where weights are in float32."""
    tables = compiled.rotary_tables
    patch.setattr(
        compiled, "rotary_tables", lambda *given: tuple(one.bfloat16().float() for one in tables(*given))
    )
    return ()


@fault(
    "warns", "engine", "vllm-project/vllm/issues/1595",
    by="no_signal", step=1, says="within each group all rewards are equal",
)  # fmt: skip
def one_seed_for_all(patch: Patch, folder: Path) -> Sequence[str]:
    """All answers to a prompt are one answer: the engine draws them with the same noise."""
    prepare = Pending.__post_init__

    def with_one_seed(self: Pending) -> None:
        self.request = dataclasses.replace(self.request, seed=7)
        prepare(self)

    patch.setattr(Pending, "__post_init__", with_one_seed)
    return ()
