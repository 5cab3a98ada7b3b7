"""The table of verl's keys: each is translated, has no meaning here, or is refused with a remedy.

Keys whose meaning depends on one another (the KL's, the length of the run, …) go to one function of
`algorithm.py`, `models.py` or `run.py`. What needs no code is data: `defaults.tsv` has the keys that are
another key here, `plain.tsv` those without a counterpart, the values that are fine (`*`: all), and why, or
what to do in place of another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rondo.config.tree import Node
from rondo_verl import algorithm, megatron, models, rewards, run
from rondo_verl.defaults import SAME, VERSION, defaults_beside
from rondo_verl.values import Setting, Values, choice, number, rows, whole


@dataclass(frozen=True)
class To:
    """Translated: the value goes to our key `target`, converted."""

    target: str
    """Our key."""
    convert: Callable[[Any], Any] = lambda value: value
    """Turns their value into ours."""


@dataclass(frozen=True)
class Joint:
    """Translated together with the other keys of the same function."""

    together: Callable[[Values], list[Setting]]
    """Returns our settings from all keys that name this function."""


@dataclass(frozen=True)
class Late:
    """As Joint, but translated after all others: the function also gets our settings so far."""

    together: Callable[[Values, Node], list[Setting]]
    """Returns our settings from all keys that name this function and from our settings so far."""


@dataclass(frozen=True)
class Ignored:
    """No meaning here; reported once, with the reason."""

    reason: str
    """Why it has no meaning here."""


@dataclass(frozen=True)
class Only:
    """Fine with one of these values (then nothing changes); an error with the remedy otherwise."""

    values: tuple[Any, ...]
    """The values that are fine."""
    remedy: str
    """What to do instead, where it has another value."""


Rule = To | Joint | Late | Ignored | Only


@dataclass(frozen=True)
class Spelled:
    """The keys of some of verl's programs."""

    table: Mapping[str, Rule]
    """What becomes of each, by its name in RL."""
    names: Mapping[str, str]
    """Those names, by their own."""
    defaults: Callable[[Collection[str], str], dict[str, Node]]
    """Returns the defaults beside the keys that are written, in a version."""
    foreign: tuple[str, ...]
    """What keys that rondo cannot have begin with."""
    command: str
    """What trains on them here."""


# ---- converters of one value


def off_at(off: int, becomes: Any = None) -> Callable[[Any], Any]:
    """Returns a converter of a number whose value `off` switches something off (here: `becomes`)."""
    return lambda value: becomes if value == off else whole(value)


def trackers(value: Any) -> list[Any]:
    """Takes verl's console and file out: here these two are always there."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name not in ("console", "file")]


def kept(value: Any) -> Any:
    """verl keeps all checkpoints where no number above 0 is given."""
    return 1_000_000 if value is None or value == -1 else value


def megabytes(value: Any) -> int:
    """Converts to bytes."""
    given: int = number("give a whole number of megabytes", whole=True, least=1)(value)
    return given << 20


# ---- the table

FOREIGN_SECTIONS = (
    "actor_rollout_ref",
    "reward_model",
    "custom_reward_function",
    *(
        "reward.reward_model",
        "reward.custom_reward_function",
        "reward.reward_manager",
        "reward.reward_kwargs",
    ),
    "reward.sandbox_fusion",
    "critic.optim.",
    "critic.model.",
    "critic.fsdp.",
    "critic.megatron.",
    "async_training.",
    "ray_kwargs.",
    "global_profiler.",
    "trainer.v1.",
    "transfer_queue.",
)
_DTYPES = {
    **{"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"},
    **{"fp16": "float16", "float16": "float16", "half": "float16"},
}
_ATTENTION = {"flash_attention_2": "flash", "flash_attention_3": "flash", "sdpa": "sdpa"}


def plain_rule(values: str, why: str) -> Rule:
    return Ignored(why) if values == "*" else Only(tuple(json.loads(values)), why)


def _together(rule: Rule, section: str, *keys: str) -> dict[str, Rule]:
    return {f"{section}.{key}": rule for key in keys}


def _training(theirs: str, ours: str, model: str, fsdps: tuple[str, ...], schedule: Rule) -> dict[str, Rule]:
    """Returns what actor and critic share. theirs, ours: the section; model, fsdps: verl's sections for some
    of it.
    """
    warmup = ("lr_warmup_steps", "lr_warmup_steps_ratio", "lr_scheduler_type", "warmup_style", "min_lr_ratio")
    adapters = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
    found = {
        **_together(schedule, f"{theirs}.optim", *warmup),
        f"{theirs}.ulysses_sequence_parallel_size": Late(models.axes),
        **_together(
            Late(models.checkpointing), model, "enable_gradient_checkpointing", "enable_activation_offload"
        ),
        **_together(Late(models.adapters), model, *adapters),
        f"{theirs}.optim.override_optimizer_config": Late(megatron.optimizers),
        f"{theirs}.megatron.optimizer_offload": Late(megatron.optimizers),
    }
    for fsdp in fsdps:
        found |= _sharded(ours, fsdp) | {f"{fsdp}.optimizer_offload": Late(models.offload)}
    return found


def _by_megatron(theirs: str, ours: str) -> dict[str, Rule]:
    return {
        **_together(Late(megatron.layout), theirs, *megatron.AXES, megatron.VIRTUAL),
        f"{theirs}.dtype": To(f"{ours}.compute_dtype", choice(_DTYPES)),
        f"{theirs}.override_transformer_config": Late(megatron.fields),
        f"{theirs}.param_offload": To(f"{ours}.offload_params"),
    }


def _sharded(ours: str, fsdp: str) -> dict[str, Rule]:
    """Returns the rows that the reference has, too."""
    return {
        f"{fsdp}.model_dtype": To(f"{ours}.param_dtype", choice(_DTYPES)),
        f"{fsdp}.dtype": To(f"{ours}.compute_dtype", choice(_DTYPES)),
        f"{fsdp}.mixed_precision.param_dtype": To(f"{ours}.compute_dtype", choice(_DTYPES)),
        **_together(Late(models.offload), fsdp, "param_offload", "offload_policy"),
        **_together(Late(models.axes), fsdp, "fsdp_size", "ulysses_sequence_parallel_size"),
    }


_S = "async_training"
_C = "algorithm.rollout_correction"
_A, _R, _F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_M = "actor_rollout_ref.model"

TABLE: Mapping[str, Rule] = {
    **{key: plain_rule(values, why) for key, values, why in rows("plain.tsv")},
    **{key: To(ours) for key, ours in SAME.items()},
    # data
    **_together(Joint(run.batch), "data", "train_batch_size", "gen_batch_size"),
    **_together(Joint(run.data), "data", "train_files", "val_files", "prompt_key", "image_key"),
    **_together(Joint(run.overlong), "data", "filter_overlong_prompts", "truncation"),
    # model
    "actor_rollout_ref.hybrid_engine": Late(run.devices),
    f"{_M}.use_liger": To("actor.backend.kernels", lambda value: "liger" if value else "auto"),
    f"{_M}.override_config.attn_implementation": To("model.attention", choice(_ATTENTION)),
    # how long, before what counts the steps of it
    **_together(Late(run.length), "trainer", "total_epochs", "total_training_steps"),
    **_together(Late(run.length), "rollout", "total_rollout_steps", "total_epochs"),
    # actor, critic
    **_training(_A, "actor", _M, (f"{_A}.fsdp_config",), Late(run.actor_schedule)),
    **_together(Late(run.critic), "critic", "ppo_mini_batch_size", "ppo_epochs", "model.path"),
    "trainer.critic_warmup": Late(run.critic),
    **_training(
        "critic",
        "critic",
        "critic.model",
        ("critic.model.fsdp_config", "critic.fsdp"),
        Late(run.critic_schedule),
    ),
    **_by_megatron(f"{_A}.megatron", "actor"),
    **_by_megatron("critic.megatron", "critic"),
    **_by_megatron(f"{_F}.megatron", "reference"),
    **_together(Joint(algorithm.policy_loss), _A, "policy_loss.loss_mode", *algorithm.LOSS_KEYS),
    **_together(Late(algorithm.aggregation), _A, "loss_agg_mode", "loss_scale_factor"),
    **_together(Joint(algorithm.kl), _A, "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
    # reference
    f"{_F}.log_prob_max_token_len_per_gpu": Late(run.reference),
    f"{_F}.ulysses_sequence_parallel_size": Late(models.axes),
    **_sharded("reference", f"{_F}.fsdp_config"),
    # rollout
    **_together(Joint(run.engine), _R, "name", *run.ENGINE_KEYS),
    f"{_R}.top_k": To("rollout.top_k", off_at(-1, 0)),
    f"{_R}.dtype": To("rollout.dtype", choice(_DTYPES)),
    f"{_R}.free_cache_engine": Late(run.sleep),
    f"{_R}.update_weights_bucket_megabytes": To("rollout.bucket_bytes", megabytes),
    f"{_R}.checkpoint_engine.update_weights_bucket_megabytes": To("rollout.bucket_bytes", megabytes),
    **_together(Late(run.turns), f"{_R}.multi_turn", *run.TURNS),
    f"{_R}.agent.default_agent_loop": Late(run.turns),
    "data.tool_config_path": Late(run.turns),
    **_together(Late(run.evaluation), f"{_R}.val_kwargs", "do_sample", "n", "temperature", "top_p", "top_k"),
    VERSION: Late(run.evaluation),
    # reward: 0.6.1 and main
    **dict.fromkeys(rewards.KEYS, Late(rewards.rewards)),
    # algorithm
    **_together(
        Joint(algorithm.advantage), "algorithm", "adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo"
    ),
    **_together(
        Joint(algorithm.group_filter), "algorithm.filter_groups", "enable", "metric", "max_num_gen_batches"
    ),
    # asynchrony (verl's one-step-off and fully asynchronous trainers)
    **_together(Joint(run.asynchrony), _S, "staleness_threshold", "partial_rollout"),
    **_together(Joint(algorithm.rollout_correction), _S, "use_rollout_log_probs", "compute_prox_log_prob"),
    **_together(Joint(run.batch), _S, "trigger_parameter_sync_step", "require_batches"),
    **_together(Late(run.devices), "rollout", "nnodes", "n_gpus_per_node"),
    **_together(Joint(algorithm.rollout_correction), _C, "bypass_mode", "rollout_rs", "rollout_rs_threshold"),
    **_together(Joint(algorithm.rollout_correction), _C, "rollout_is", "rollout_is_threshold"),
    f"{_C}.rollout_is_batch_normalize": Joint(algorithm.rollout_correction),
    f"{_C}.rollout_rs_threshold_lower": Joint(algorithm.rollout_correction),
    **_together(Joint(algorithm.kl), "algorithm", "use_kl_in_reward", "kl_penalty"),
    **_together(Joint(algorithm.kl), "algorithm.kl_ctrl", "type", "kl_coef", "horizon", "target_kl"),
    # trainer
    "trainer.save_freq": To("checkpoint.every", off_at(-1)),
    "trainer.test_freq": Late(run.testing),
    "rollout.test_freq": Late(run.testing),
    "trainer.logger": To("tracking.trackers", trackers),
    "trainer.log_val_generations": To("tracking.samples", off_at(-1, 0)),
    **_together(Late(run.folder), "trainer", "default_local_dir", "project_name", "experiment_name"),
    **_together(Late(run.devices), "trainer", "n_gpus_per_node", "nnodes"),
    "trainer.max_actor_ckpt_to_keep": To("checkpoint.keep", kept),
    "trainer.resume_mode": To("checkpoint.resume", choice({"auto": "auto", "disable": "never"})),
}
RL = Spelled(TABLE, {key: key for key in TABLE}, defaults_beside, FOREIGN_SECTIONS, "train")
