"""verl's programs: `rondo train verl.trainer.main_ppo key=value …` is its command line, with the program in
the place of a recipe. Most are other algorithms or other ways to run, which the keys alone do not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rondo.core.errors import ConfigError

# Says which program's keys these are; not a key of verl's.
PROGRAM = "verl.program"
# While a batch is trained on, the next one is generated; all of its weights are those of one version.
_ONE_AHEAD = {"trainer.max_staleness": 1}
_STREAM = {"async_training.require_batches": 1, "data.train_batch_size": 0}
# Whose keys mean what the table says, and what each sets beneath them.
TRANSLATED: Mapping[str, Mapping[str, Any]] = {
    "verl.trainer.main_ppo": {},
    "recipe.dapo.main_dapo": {},
    "recipe.one_step_off_policy.main_ppo": _ONE_AHEAD,
    "verl.experimental.one_step_off_policy.main_ppo": _ONE_AHEAD,
    "recipe.fully_async_policy.fully_async_main": _STREAM,
    "verl.experimental.fully_async_policy.fully_async_main": _STREAM,
    "verl.trainer.sft_trainer": {PROGRAM: "sft_trainer"},
    "verl.trainer.sft_trainer_ray": {PROGRAM: "sft_trainer"},
    "verl.trainer.fsdp_sft_trainer": {PROGRAM: "fsdp_sft_trainer"},
}
_GROUP = re.compile(r"\+*(model|engine|optim|profiler)=(\w+)")
_PROGRAM = re.compile(r"(?!.*\.ya?ml$)(verl|recipe)(\.\w+)+|main_\w+(\.py)?|\w+\.main_\w+")
_AHEAD = (
    "its rollout runs ahead of the training: give the keys alone, with async_training.staleness_threshold or "
    "trainer.max_staleness"
)
_GENERATION = "it does not train: use `rondo eval` or `rondo serve`"
# Others, by their name or the folder that they are in, and what they are instead.
_OTHERS = {
    "main_ppo_split": "it gives actor and critic devices of their own: name cluster.pools, cluster.placement",
    "main_ppo_sync": "it is a trainer of its own: give the keys alone if they are those of main_ppo",
    "async_flow": _AHEAD,
    "partial_rollout": _AHEAD,
    "main_generation": _GENERATION,
    "main_generation_server": _GENERATION,
    "main_eval": _GENERATION,
    "entropy": "it is main_ppo with the losses clip_cov and kl_cov: give the keys alone",
    "prime": "it trains an implicit reward model: see the recipe prime",
    "main_gkd": "it is distillation on the policy's own samples: see the recipe distill",
    "gkd": "it is distillation on the policy's own samples: see the recipe distill",
    "sppo": "it is self-play preference optimisation: see the recipe sppo",
    "spin": "it is self-play fine-tuning (a DPO loss on its own answers): see `rondo preference`",
    "spo": "its baseline is kept per prompt over steps, which rondo does not have",
    "flowrl": "its loss matches the reward's distribution, which rondo does not have",
    "gvpo": "its loss is another: see docs/algorithms.md",
    "rep_exp": "it adds an exploration bonus to the reward, which rondo does not have",
    "dance_grpo": "it trains diffusion models",
}


def argument(text: str) -> str:
    """Returns an argument of a program: Hydra's choice of a file for a section, `engine=fsdp`, in its long
    form (`engine@engine=fsdp`), which no key of that section is in the way of.
    """
    found = _GROUP.fullmatch(text)
    return f"{found[1]}@{found[1]}={found[2]}" if found else text


def program(name: str) -> Mapping[str, Any] | None:
    """Returns what one of verl's programs sets beneath its keys; None for a name that is none. Raises
    ConfigError for one whose keys would mean something else here.
    """
    if name in TRANSLATED:
        return TRANSLATED[name]
    if not _PROGRAM.fullmatch(name):
        return None
    parts = name.removesuffix(".py").split(".")
    reason = next(
        (_OTHERS[part] for part in reversed(parts) if part in _OTHERS), "it is a program of its own"
    )
    known = ", ".join(TRANSLATED)
    raise ConfigError(f"{name} is not translated: {reason}. The programs whose keys are: {known}")
