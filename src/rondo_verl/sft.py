"""Supervised training: verl's `sft_trainer`, and 0.6.1's `fsdp_sft_trainer`.

Most of their keys are RL's by another name, and mean what `table.py` says of that one: here are the names,
and what conversations, their lengths and the loss mean. `sft.tsv` has the keys that only these programs have,
`sft.json` all keys of both, with their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rondo.config.tree import Node
from rondo_verl import run
from rondo_verl.defaults import VERSION, default
from rondo_verl.programs import PROGRAM
from rondo_verl.resolved import interpolated
from rondo_verl.table import TABLE, Joint, Rule, Spelled, To, plain_rule
from rondo_verl.values import Note, Setting, Values, choice, count, number, rows

_A, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
_ALIKE = (
    *(f"trainer.{key}" for key in ("total_epochs", "total_training_steps", "save_freq", "logger", "device")),
    *(
        f"trainer.{key}"
        for key in ("project_name", "experiment_name", "default_local_dir", "default_hdfs_dir")
    ),
    *(f"trainer.{key}" for key in ("n_gpus_per_node", "nnodes", "resume_mode", "resume_from_path")),
    *("trainer.balance_batch", "data.apply_chat_template_kwargs", "data.use_shm"),
    *("data.custom_cls.path", "data.custom_cls.name"),
)
# RL's names of sections, and of keys, by these programs' own. The first that fits counts.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "sft_trainer": {
        **{"engine.": f"{_A}fsdp_config.", "optim.": f"{_A}optim.", "model.": _M},
        **{"checkpoint.": f"{_A}checkpoint.", "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep"},
    },
    "fsdp_sft_trainer": {
        **{"model.fsdp_config.": f"{_A}fsdp_config.", "optim.lr_scheduler": f"{_A}optim.lr_scheduler_type"},
        **{"optim.": f"{_A}optim.", "model.partial_pretrain": f"{_M}path", "model.strategy": f"{_A}strategy"},
        **{
            "model.": _M,
            "trainer.checkpoint.": f"{_A}checkpoint.",
            "use_remove_padding": f"{_M}use_remove_padding",
        },
        "optim.warmup_steps_ratio": f"{_A}optim.lr_warmup_steps_ratio",
        "ulysses_sequence_parallel_size": f"{_A}ulysses_sequence_parallel_size",
        "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    },
}
# A place or name of verl's authors, what a machine has, or none.
_WITHOUT = (
    *("data.train_files", "data.val_files", "model.path", "model.partial_pretrain", "engine.fsdp_size"),
    *("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name", "trainer.logger"),
    *("trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device", "trainer.resume_from_path"),
)
# What fsdp_sft_trainer does without a key for it.
_FIXED = {
    f"{_A}fsdp_config.dtype": "bfloat16",
    f"{_A}optim.lr_warmup_steps": -1,
    f"{_A}optim.min_lr_ratio": 0.0,
}


def conversations(values: Values) -> list[Setting]:
    """Translates files and their columns, and how a row becomes tokens. The rows that fill no batch are left
    out, as in verl.
    """
    given, by_column = values.below("data."), "multiturn.enable" in values.below("data.").nodes
    columns: dict[str, Any] = {}
    settings: list[Setting] = [("data.drop_last", given.made(True, "train_batch_size"))]
    if by_column and not given.plain("multiturn.enable"):
        for ours in ("prompt_key", "response_key"):
            below = given.plain(ours.replace("_key", "_dict_keys")) or []
            keys = [given.plain(ours), *(below if isinstance(below, list) else [below])]
            columns[ours] = given.made(".".join(map(str, keys)), ours, ours.replace("_key", "_dict_keys"))
        settings.append(("data.turns", given.made("eos", "multiturn.enable")))
        reason = (
            "of a prompt and an answer verl 0.6.1 learns the last token of the prompt, and not the last one "
            "of the answer; here the answer and its end are learnt"
        )
        settings.append(Note("fsdp_sft_trainer", reason))
    else:
        column = "multiturn.messages_key" if by_column else "messages_key"
        columns["messages_key"] = given.nodes[column]
        alone = given.plain("ignore_input_ids_mismatch", False)
        how = given.made("messages" if alone else "template", "ignore_input_ids_mismatch", column)
        settings.append(("data.turns", how))
    if "image_key" in given.nodes:
        columns["image_key"] = given.nodes["image_key"]
    for part, ours in (("train", "data.train"), ("val", "data.eval")):
        theirs, most = f"{part}_files", given.plain(f"{part}_max_samples", -1)
        if given.plain(theirs) is None:
            continue
        sources = given.converted(theirs, run.sources)
        if most > 0 and len(sources) > 1:
            raise given.refused(
                f"{part}_max_samples", f"set size on the sources of {ours}: there are several"
            )
        more: dict[str, Any] = {"size": given.nodes[f"{part}_max_samples"]} if most > 0 else {}
        if part == "train" and len(sources) > 1:
            more["weight"] = None
        settings.append((ours, given.made([{**one, **columns, **more} for one in sources], theirs)))
    return settings


def lengths(values: Values) -> list[Setting]:
    """Says how long a conversation may be, what happens to a longer one, and how many tokens are computed
    together. Unpadded ones are cut at their ends, whatever truncation says, in 0.6.1 also with `error`.
    """
    given = values.below("data.")
    most, batch = given.converted("max_length", count), given.converted("micro_batch_size_per_gpu", count)
    how = given.converted("truncation", choice({one: one for one in ("error", "left", "right")}))
    unpadded = given.plain("pad_mode", "right") == "no_padding"
    if how == "left" and not unpadded:
        remedy = "rondo cuts the end of a conversation, and verl the beginning: set right, or error"
        raise given.refused("truncation", remedy)
    cuts = how != "error" or (unpadded and values.plain(VERSION) == "0.6.1")
    together = given.made(most * batch, "max_length", "micro_batch_size_per_gpu")
    if given.plain("use_dynamic_bsz", False):
        together = given.nodes["max_token_len_per_gpu"]
    settings: list[Setting] = [
        ("data.max_tokens", given.nodes["max_length"]),
        ("data.max_prompt_tokens", given.nodes["max_length"]),
        (
            "data.overlong_prompts",
            given.made("truncate_right" if cuts else "error", "truncation", "pad_mode"),
        ),
        ("actor.token_budget", together),
    ]
    if "pad_mode" not in given.nodes:  # fsdp_sft_trainer
        mean = {"name": "chunk-mean-token-mean", "rows": given.nodes["micro_batch_size_per_gpu"]}
        settings.append(("algorithm.aggregation", given.made(mean, "micro_batch_size_per_gpu")))
        if values.plain("trainer.total_training_steps") is not None:
            remedy = (
                "fsdp_sft_trainer's learning rate falls over all epochs, and rondo's over the run: set "
                "trainer.total_epochs, a part of one perhaps (0.1)"
            )
            raise values.refused("trainer.total_training_steps", remedy)
    return settings


def testing(values: Values) -> list[Setting]:
    """Says when the loss of held-out rows is measured in between."""
    key, ours = "trainer.test_freq", "trainer.evaluation."
    if values.plain(key) == "after_each_epoch":
        return [(ours + "each_epoch", values.made(True, key))]
    every = values.converted(key, number("give a number of steps, or after_each_epoch", whole=True))
    return [(ours + "every", values.made(every if every > 0 else None, key))]


_COMMON: Mapping[str, Rule] = {
    **dict.fromkeys(("data.train_files", "data.val_files", "data.image_key"), Joint(conversations)),
    **dict.fromkeys(("data.train_max_samples", "data.val_max_samples"), Joint(conversations)),
    **dict.fromkeys((f"data.{key}" for key in ("max_length", "truncation")), Joint(lengths)),
    **dict.fromkeys(("data.micro_batch_size_per_gpu", VERSION, PROGRAM), Joint(lengths)),
    "data.train_batch_size": To("data.batch_size"),
    "trainer.test_freq": Joint(testing),
}
_OWN: Mapping[str, Mapping[str, Rule]] = {
    "sft_trainer": {
        **dict.fromkeys(("data.messages_key", "data.ignore_input_ids_mismatch"), Joint(conversations)),
        **dict.fromkeys(
            ("data.pad_mode", "data.use_dynamic_bsz", "data.max_token_len_per_gpu"), Joint(lengths)
        ),
    },
    "fsdp_sft_trainer": dict.fromkeys(
        (
            *(f"data.{part}_{key}" for part in ("prompt", "response") for key in ("key", "dict_keys")),
            *("data.multiturn.enable", "data.multiturn.messages_key"),
        ),
        Joint(conversations),
    ),
}


# All keys of each program, and their defaults as they are written there.
WHOLE: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("sft.json").read_text(encoding="utf-8")
)


def _spelled(program: str) -> Spelled:
    """Returns how a program is spelled."""
    whole = WHOLE[program]
    own: dict[str, Rule] = {**_COMMON, **_OWN[program]}
    own |= {
        key: plain_rule(values, why) for key, which, values, why in rows("sft.tsv") if which in ("", program)
    }
    names = {key: key for key in (*own, *_ALIKE)}
    for theirs, ours in _NAMES[program].items():
        for key in TABLE:
            if key == ours or (ours.endswith(".") and key.startswith(ours)):
                names.setdefault(theirs + key.removeprefix(ours), key)
    fixed = _FIXED if program == "fsdp_sft_trainer" else {}
    used = {*names.values(), *fixed}
    table = {**own, **{key: rule for key, rule in TABLE.items() if key in used and key not in own}}

    def defaults(written: Collection[str], version: str) -> dict[str, Node]:
        found = {key: default(key, value) for key, value in fixed.items()}
        for key, value in whole.items():
            if key in names and key not in _WITHOUT and names[key] not in found:
                found[names[key]] = default(key, interpolated(value, key, whole))
        return {key: node for key, node in found.items() if key not in written}

    foreign = ("engine.", "optim.", "model.fsdp_config.", "data.multiturn.")
    return Spelled(table, names, defaults, foreign, "sft")


SPELLED: Mapping[str, Spelled] = {program: _spelled(program) for program in _OWN}


def program_of(tree: Node) -> str:
    """Returns the program whose keys these are: the one that is named, else the one that alone has some of
    them; empty: RL's.
    """
    named = tree.at(PROGRAM)
    if named is not None and named.plain() in SPELLED:
        return str(named.plain())
    if tree.at("actor_rollout_ref") is not None:
        return ""
    if tree.at("model.partial_pretrain") is not None:
        return "fsdp_sft_trainer"
    sections = (tree.at("optim"), tree.at("engine"))
    return "sft_trainer" if any(one is not None and isinstance(one.value, dict) for one in sections) else ""
