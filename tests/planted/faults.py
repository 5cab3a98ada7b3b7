"""The field's silent faults, each planted where somebody else's code or data enters a run.

A fault is a function that plants it, by monkeypatch or in a file, and returns the settings of a run of the
smallest model that meets it. Its docstring says what is wrong; `@fault` says where it enters, who met it
(public threads), and what rondo says, and when. `docs/trust.md` is made of that (`python -m tests.planted`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rondo.core.types import Completion
from rondo.rollout.native import compiled, generic
from rondo.rollout.requests import Pending
from rondo.rollout.weights import WeightStore
from tests.trainers.conftest import RECIPE, inline
from tests.trainers.test_images import RL as WITH_IMAGES
from tests.trainers.test_images import blind_model

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch, Path], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row of the table."""

    plant: Plant
    """Plants it, with a folder for files; returns settings of the run."""
    where: str
    """Where it enters."""
    others: tuple[str, ...]
    """Public threads of people who met it, below github.com."""
    ends: Literal["stops", "warns"]
    """What rondo does."""
    by: str
    """What finds it: a check of `tracking.checks`, or another sentence for the table."""
    step: int
    """The last step that was made before a run stops (-1: none, 0: the evaluation before the first), or the
    one in which what is warned of began.
    """
    says: str
    """A part of the message."""
    recipe: Mapping[str, Any]
    """What it is planted in."""

    @property
    def name(self) -> str:
        return self.plant.__name__

    @property
    def what(self) -> str:
        return " ".join((self.plant.__doc__ or "").split())


FAULTS: dict[str, Fault] = {}


def _fault(
    ends: Literal["stops", "warns"],
    where: str,
    *others: str,
    by: str,
    step: int,
    says: str,
    recipe: Mapping[str, Any] = RECIPE,
) -> Callable[[Plant], Plant]:
    def take(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = Fault(plant, where, others, ends, by, step, says, recipe)
        return plant

    return take


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


@_fault(
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


@_fault(
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


@_fault(
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


@_fault(
    "stops", "sink", "verl-project/verl/pull/7987",
    by=CHECKSUMS, step=-1, says="'model.layers.1.mlp.down_proj.weight' is not what was sent",
)  # fmt: skip
def zeroed_tensor(patch: Patch, folder: Path) -> Sequence[str]:
    """One tensor is 0 in the engine."""
    name = "model.layers.1.mlp.down_proj.weight"
    _received(patch, lambda own, tensor: torch.zeros_like(tensor) if own == name else tensor)
    return (OWN_WEIGHTS,)


@_fault(
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


@_fault(
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


@_fault(
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


@_fault(
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


@_fault(
    "stops", "engine", "PrimeIntellect-ai/prime-rl/pull/1525",
    by=CANARY, step=-1, says="all 24 tensors are equal: the weights arrived, and the two compute another",
)  # fmt: skip
def log_probs_of_another_token(patch: Patch, folder: Path) -> Sequence[str]:
    """The engine reports each token's log-prob one place too late."""
    _answers(patch, lambda done: dataclasses.replace(done, log_probs=np.roll(done.log_probs, 1)))
    return ()


@_fault(
    "stops", "engine", "verl-project/verl/issues/3720", "huggingface/trl/issues/5224",
    by=CANARY, step=-1, says="differ from the trainer's by",
)  # fmt: skip
def token_ids_shifted(patch: Patch, folder: Path) -> Sequence[str]:
    """The ids of an answer are those that another tokenizer has for its text."""

    def others(done: Completion) -> Completion:
        return dataclasses.replace(done, token_ids=np.maximum(done.token_ids - 1, 0).astype(np.int32))

    _answers(patch, others)
    return ()


@_fault(
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


@_fault(
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


@_fault(
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


# ---- models


@_fault(
    "stops", "model", "microsoft/agent-lightning/issues/559",
    by="model.images.check_seen", step=-1, says="the policy is blind: with other images",
    recipe=WITH_IMAGES,
)  # fmt: skip
def picture_not_seen(patch: Patch, folder: Path) -> Sequence[str]:
    """Pictures do not reach the language model."""
    return blind_model(folder / "tiny.yaml", folder / "model")


# ---- functions of the user's


def _reward(folder: Path, body: str) -> Sequence[str]:
    (folder / "score.py").write_text(f"def score(prompt, trajectory):\n{body}")
    return (f"reward.functions=[{{name: {folder}/score.py:score}}]",)


@_fault(
    "warns", "reward", "huggingface/trl/issues/3452", "modelscope/ms-swift/issues/4789",
    by="no_signal", step=1, says="nothing is learnt; all rewards are 0.000",
)  # fmt: skip
def reward_hides_its_error(patch: Patch, folder: Path) -> Sequence[str]:
    """A reward function catches its own error, and returns 0."""
    return _reward(
        folder,
        "    try:\n        return float(trajectory.anwser)\n    except AttributeError:\n        return 0.0\n",
    )


@_fault(
    "warns", "reward", "unslothai/unsloth/issues/2291",
    by="no_signal", step=1, says="nothing is learnt; all rewards are 1.000",
)  # fmt: skip
def judge_says_yes(patch: Patch, folder: Path) -> Sequence[str]:
    """A judge says yes to everything."""
    return _reward(folder, "    return 1.0\n")


@_fault(
    "warns", "reward", "modelscope/ms-swift/issues/4547",
    by="no_signal", step=1, says="nothing is learnt; within each group all rewards are equal",
)  # fmt: skip
def example_scored(patch: Patch, folder: Path) -> Sequence[str]:
    """A scorer reads the example in the prompt instead of the answer."""
    return _reward(folder, "    return float(prompt.token_ids.sum() % 7)\n")


LOSS = """
import torch
def loss(log_probs, old_log_probs, advantages, response_mask):
    {line}
    return -torch.exp(log_probs - old_log_probs) * advantages, {{}}
"""


def _loss(folder: Path, line: str) -> Sequence[str]:
    (folder / "loss.py").write_text(LOSS.format(line=line))
    return (f"algorithm.policy_loss={folder}/loss.py:loss",)


@_fault(
    "warns", "loss", "huggingface/trl/issues/3021", "modelscope/ms-swift/pull/10116",
    by="micro_batch", step=1, says="when its rows are in two micro-batches",
)  # fmt: skip
def loss_scales_with_micro_batches(patch: Patch, folder: Path) -> Sequence[str]:
    """A loss normalises by the other rows of its micro-batch."""
    return _loss(folder, "advantages = advantages / (advantages.std() + 1e-6)")


@_fault(
    "warns", "loss", "THUDM/slime/issues/1370",
    by="micro_batch", step=1, says="when its rows are in two micro-batches",
)  # fmt: skip
def padding_votes(patch: Patch, folder: Path) -> Sequence[str]:
    """A loss takes a mean over tokens that are masked."""
    return _loss(folder, "advantages = advantages * (log_probs.detach() * response_mask).mean()")


# ---- training


@_fault(
    "warns", "hook", by="still", step=2, says="still: 1 tensors are as they were before the step",
)  # fmt: skip
def frozen_by_a_hook(patch: Patch, folder: Path) -> Sequence[str]:
    """A hook keeps the gradient of a tensor at 0 that should learn."""
    step = torch.optim.AdamW.step

    def without_one(self: torch.optim.AdamW, *arguments: Any, **more: Any) -> Any:
        own = self.param_groups[0]["params"][3]
        if own.grad is not None:
            own.grad = torch.zeros_like(own.grad)
        return step(self, *arguments, **more)

    patch.setattr(torch.optim.AdamW, "step", without_one)
    return ("trainer.total_steps=4", "actor.optimizer.weight_decay=0")


# ---- environments

WORLD = """
from rondo.environments import Observation, StepResult
class World:
    instructions = "Say a."
    times = 0
    def reset(self, seed, task):
        World.times += 1
        if World.times % 4 == 0:
            raise OSError("the simulator does not answer")
        return Observation("go", actions=("a", "b"))
    def step(self, action):
        return StepResult(Observation("there", actions=("a", "b")), float(action == "a"), done=True)
    def state(self):
        return {}
    def close(self): ...
"""


@_fault(
    "warns", "environment", "NVIDIA-NeMo/RL/issues/4160", "verl-project/verl/issues/6452",
    by="failed", step=1, says="have no score and are dropped",
)  # fmt: skip
def simulator_gone(patch: Patch, folder: Path) -> Sequence[str]:
    """Every fourth episode fails in its simulator, which others score as 0."""
    (folder / "worlds.py").write_text(WORLD)
    world = f"{folder}/worlds.py:World"
    rows = (
        f"{{type: function, task: rondo.environments.episodes, options: {{environment: '{world}', size: 8}}}}"
    )
    return (
        f"data.train=[{rows}]",
        "data.eval=[]",
        "trainer.evaluation.every=null",
        f"rollout.environments=[{{name: '{world}'}}]",
        "rollout.agent={name: steps, max_steps: 1}",
        "reward.functions=[environment]",
    )


# ---- settings and files


@_fault(
    "warns", "settings", "NVIDIA-NeMo/Automodel/pull/3173",
    by="warm_up", step=0, says="warmup_steps is 100, and actor takes 6 optimizer steps",
)  # fmt: skip
def warm_up_without_end(patch: Patch, folder: Path) -> Sequence[str]:
    """The learning rate is still warming up when the run ends."""
    return ("actor.optimizer.schedule.warmup_steps=100",)


@_fault(
    "warns", "data", "hpcaitech/ColossalAI/issues/3894",
    by="repeated_rows", step=0, says="rows: 63 of 64 rows",
)  # fmt: skip
def one_row_for_all(patch: Patch, folder: Path) -> Sequence[str]:
    """A data set that has one row, again and again."""
    (folder / "rows.jsonl").write_text('{"prompt": "Sam took 3 nuts."}\n' * 64)
    return (f"data.train=[{{type: jsonl, name: rows, path: {folder}/rows.jsonl}}]",)


@_fault(
    "stops", "checkpoint", "thinking-machines-lab/tinker-feedback/issues/127",
    by="checksums of the checkpoint", step=2, says="do not have the checksum that the manifest lists",
)  # fmt: skip
def moments_of_another_run(patch: Patch, folder: Path) -> Sequence[str]:
    """In a checkpoint the optimizer's moments are those of another run."""
    settings = ("trainer={total_steps: 2}", "checkpoint={every: 1, export: false}")
    for run, seed in (("run", 0), ("other", 1)):
        inline(
            "train", str(folder / "tiny.yaml"), *settings, f"trainer.run_dir={folder}/{run}",
            f"trainer.seed={seed}",
        )  # fmt: skip
    state = Path("checkpoints/step-00000002/actor/rank-0.bin")
    (folder / "run" / state).write_bytes((folder / "other" / state).read_bytes())
    return ("trainer.total_steps=3", "checkpoint={every: 1, export: false}")


# ---- what only our own code could do


@dataclasses.dataclass(frozen=True)
class Held:
    """A fault that nobody's code but ours could make, and the tests that fail where it is made. Each was made
    once by hand, and those tests failed.
    """

    what: str
    others: tuple[str, ...]
    why: str
    tests: tuple[str, ...]


HELD = (
    Held(
        "An agent's messages are tokenised once more for training",
        ("huggingface/trl/issues/5224", "verl-project/verl/issues/3720"),
        "rows are the tokens of the calls, as the engine had and gave them",
        (
            "tests/agents/test_record.py::test_every_sampled_token_is_trained_on_once_behind_what_the_engine_had",
        ),
    ),
    Held(
        "A template drops earlier reasoning, and what is trained on is another context than was answered",
        ("verl-project/verl/pull/7322",),
        "a context that was written anew is a row of its own",
        ("tests/agents/test_record.py::test_a_context_that_was_written_anew_is_a_row_of_its_own",),
    ),
    Held(
        "Output of tools carries loss",
        ("THUDM/slime/issues/1370",),
        "the mask is who wrote a token",
        ("tests/chat/test_encode.py::test_tool_calls_are_trained_and_tool_results_are_not",),
    ),
    Held(
        "An episode that the clock cut is scored as one that has ended",
        ("huggingface/trl/pull/1536",),
        "how it ended stands in each of its rows",
        ("tests/trainers/test_several_rows.py::test_all_rows_of_an_episode_that_was_cut_off_are_cut_off",),
    ),
    Held(
        "Prompts are lost or come twice when an asynchronous run is resumed",
        ("NVIDIA-NeMo/RL/pull/3599", "OpenRLHF/OpenRLHF/issues/1322"),
        "a checkpoint has the ledger of what was trained on, and the groups that wait",
        (
            "tests/trainers/test_async_faults.py::"
            "test_kill_nine_in_resume_mode_loses_no_prompt_and_no_buffered_group",
        ),
    ),
    Held(
        "A reference that trains with the policy",
        (),
        "a frozen engine has no optimizer, and its weights are compared",
        ("tests/training/test_optimizer.py::test_a_frozen_engine_refuses_to_train",),
    ),
    Held(
        "Values are read one token too late",
        ("verl-project/verl/issues/1758", "alibaba/ROLL/issues/3"),
        "a value stands before its token, a score behind it",
        ("tests/training/test_new_outputs.py::test_scores_are_read_after_each_token",),
    ),
    Held(
        "The end of a turn is masked as padding, where both are one token",
        ("huggingface/trl/issues/734",),
        "there is no padding: rows are packed",
        ("tests/chat/test_encode.py::test_mask_covers_assistant_turns_and_their_end",),
    ),
    Held(
        "Moments of the optimizer are not restored",
        ("thinking-machines-lab/tinker-feedback/issues/127",),
        "a run that was interrupted ends with the bits of one that was not",
        ("tests/trainers/test_resume.py::test_interrupt_saves_at_once_and_resume_equals_undisturbed",),
    ),
)
