"""What stands in files: models, templates, settings, data, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from rondo.models import ModelSource
from rondo.models.loading import build_model
from rondo.recipes.quickstart import tokenizer
from tests.chat.test_tail import BACKWARDS
from tests.planted.fault import Patch, fault
from tests.trainers.conftest import MODEL, SFT_RECIPE, inline
from tests.trainers.test_images import RL as WITH_IMAGES
from tests.trainers.test_images import blind_model

# ---- models


@fault(
    "stops", "model", "microsoft/agent-lightning/issues/559",
    by="model.images.check_seen", step=-1, says="the policy is blind: with other images",
    recipe=WITH_IMAGES,
)  # fmt: skip
def picture_not_seen(patch: Patch, folder: Path) -> Sequence[str]:
    """Pictures do not reach the language model."""
    return blind_model(folder / "tiny.yaml", folder / "model")


def model_folder(folder: Path, *, added: Mapping[str, torch.Tensor] = {}, end: int | None = None) -> Path:
    """Writes the recipe's model and its tokenizer as a folder. added: further tensors in its file. end: the
    token at which generation_config.json ends answers.
    """
    words = tokenizer()
    model = build_model(ModelSource(config={**MODEL, "vocab_size": len(words)}), torch.float32)
    own = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    words.save_pretrained(folder)
    save_file({**own, **added}, folder / "model.safetensors", {"format": "pt"})
    if end is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return folder


def _critic(folder: Path, **added: torch.Tensor) -> Sequence[str]:
    return ("algorithm.advantage=gae", f"critic.path={model_folder(folder / 'critic', added=added)}")


@fault(
    "stops", "model", "hiyouga/LlamaFactory/issues/4379", "OpenRLHF/OpenRLHF/issues/209",
    by="names of a model's tensors", step=-1,
    says="hold 1 tensor (first: 'reward_head.weight'), in model.safetensors, that a qwen3 model does not",
)  # fmt: skip
def value_head_of_another_name(patch: Patch, folder: Path) -> Sequence[str]:
    """A critic's value head has a name that nobody here knows, and others begin with a new one."""
    return _critic(folder, **{"reward_head.weight": torch.ones(1, 32)})


@fault(
    "warns", "model",
    by="critic_off", step=1, says="the critic predicts returns worse than a constant would",
)  # fmt: skip
def value_head_of_other_rewards(patch: Patch, folder: Path) -> Sequence[str]:
    """A critic's value head is that of a reward model, with scores of another size and place."""
    generator = torch.Generator().manual_seed(0)
    head = {"score.weight": 4 * torch.randn(1, 32, generator=generator), "score.bias": torch.ones(1)}
    return (*_critic(folder, **head), "trainer.total_steps=5")


@fault(
    "warns", "model", "salesforce/CodeGen/issues/32", "huggingface/transformers/issues/7275",
    by="foreign_end", step=0, says="no special token of the tokenizer: 35, '",
)  # fmt: skip
def end_of_another_vocabulary(patch: Patch, folder: Path) -> Sequence[str]:
    """generation_config.json ends answers at a number that is an ordinary word in this tokenizer."""
    where = model_folder(folder / "model", end=35)
    return ("model.config=null", "model.tokenizer=null", f"model.path={where}")


# ---- templates

# As Qwen3's.
FORGETFUL = BACKWARDS.replace("{%- if '</think>'", "{%- if content is string and '</think>'")


def with_template(folder: Path) -> str:
    (folder / "qwen3.jinja").write_text(FORGETFUL)
    return f"model.chat_template={folder}/qwen3.jinja"


THOUGHTFUL = (
    {"role": "user", "content": "Sam took 3 nuts."},
    {"role": "assistant", "content": "<think>\nthree\n</think>\n\n3"},
    {"role": "user", "content": "Then 4."},
    {"role": "assistant", "content": "<think>\nfour more\n</think>\n\n7"},
)


@fault(
    "warns", "template", "axon-rl/gem/issues/44", "THUDM/slime/pull/330",
    by="template_thoughts", step=0, says="in 6 of the first 8 rows an answer is learnt without the thought",
    recipe=SFT_RECIPE, command="sft",
)  # fmt: skip
def thoughts_not_learnt(patch: Patch, folder: Path) -> Sequence[str]:
    """The template drops what earlier answers of a conversation thought: SFT learns to answer without it."""
    once = ({"messages": THOUGHTFUL[2:]}, {"messages": THOUGHTFUL[:2]})
    lines = [*once, *[{"messages": THOUGHTFUL}] * 6]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return (
        with_template(folder),
        f"data.train=[{{type: jsonl, name: rows, path: {folder}/rows.jsonl}}]",
        "tracking.checks.repeated_rows=off",
    )


# ---- settings and files


@fault(
    "warns", "settings", "NVIDIA-NeMo/Automodel/pull/3173",
    by="warm_up", step=0, says="warmup_steps is 100, and actor takes 6 optimizer steps",
)  # fmt: skip
def warm_up_without_end(patch: Patch, folder: Path) -> Sequence[str]:
    """The learning rate is still warming up when the run ends."""
    return ("actor.optimizer.schedule.warmup_steps=100",)


@fault(
    "warns", "data", "hpcaitech/ColossalAI/issues/3894",
    by="repeated_rows", step=0, says="rows: 63 of 64 rows",
)  # fmt: skip
def one_row_for_all(patch: Patch, folder: Path) -> Sequence[str]:
    """A data set that has one row, again and again."""
    (folder / "rows.jsonl").write_text('{"prompt": "Sam took 3 nuts."}\n' * 64)
    return (f"data.train=[{{type: jsonl, name: rows, path: {folder}/rows.jsonl}}]",)


@fault(
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


@fault(
    "stops", "data",
    by="digests of the rows", step=2, says="64 rows, as before, with other content",
)  # fmt: skip
def other_rows_at_each_call(patch: Patch, folder: Path) -> Sequence[str]:
    """A function draws other rows each time: an asynchronous run that is resumed would lose some, and double
    others.
    """
    (folder / "rows.py").write_text(
        "import random\nfrom rondo.recipes.quickstart import train_rows\n"
        "def rows():\n    return random.SystemRandom().sample(train_rows(80), 64)\n"
    )
    return _resumed(folder, f"data.train=[{{type: function, name: train, task: '{folder}/rows.py:rows'}}]")


SAMPLER = """
class InTurn:
    place = 0
    def choose(self, k, sizes):
        self.place += k
        return [("train", (self.place - k + i) % sizes["train"], 4) for i in range(k)]
    def state(self):
        return {"place": self.place}
    def load(self, state): ...
"""


@fault(
    "stops", "data",
    by="a sampler's own state", step=2, says="rows would be left out, or come again",
)  # fmt: skip
def sampler_begins_anew(patch: Patch, folder: Path) -> Sequence[str]:
    """A sampler begins with the first rows again when an asynchronous run is resumed."""
    (folder / "sampler.py").write_text(SAMPLER)
    return _resumed(folder, f"data.sampler={folder}/sampler.py:InTurn")


def _resumed(folder: Path, *settings: str) -> Sequence[str]:
    """Makes two steps of an asynchronous run; returns what goes on with it."""
    settings = (*settings, "checkpoint={every: 1, export: false}", "trainer.max_staleness=1")
    inline(
        "train",
        str(folder / "tiny.yaml"),
        *settings,
        "trainer.total_steps=2",
        f"trainer.run_dir={folder}/run",
    )
    return (*settings, "trainer.total_steps=3")
