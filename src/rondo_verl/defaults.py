"""verl's defaults: what its command line means where it says nothing.

One table: verl's key, and its default in `ppo_trainer.yaml` of verl's main branch in 2026, which is that of
0.6.1 except where a comment says otherwise. As soon as one key in verl's spelling is seen they are in force
beneath all that is written, in either spelling, and `table.py` translates them like what is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rondo.config.tree import BENEATH, Node, Origin
from rondo_verl.values import like

_A, _R, _F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def _training(section: str, model: str, fsdp: str, lr: float) -> dict[str, Any]:
    """Returns what actor and critic share. model, fsdp: verl's sections for some of it."""
    return {
        f"{section}.optim.lr": lr,
        f"{section}.optim.weight_decay": 0.01,
        f"{section}.optim.betas": [0.9, 0.999],
        f"{section}.optim.lr_warmup_steps": -1,
        f"{section}.optim.lr_scheduler_type": "constant",
        f"{section}.optim.min_lr_ratio": 0.0,
        f"{section}.grad_clip": 1.0,
        f"{model}.enable_gradient_checkpointing": True,
        f"{model}.enable_activation_offload": False,
        f"{fsdp}.model_dtype": "fp32",
        f"{fsdp}.dtype": "bfloat16",
        f"{fsdp}.param_offload": False,
        f"{fsdp}.optimizer_offload": False,
    }


DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "actor_rollout_ref.model.trust_remote_code": False,
    # actor
    **_training(_A, "actor_rollout_ref.model", f"{_A}.fsdp_config", 1e-6),
    f"{_A}.fsdp_config.reshard_after_forward": True,
    f"{_A}.ppo_mini_batch_size": 256,
    f"{_A}.ppo_epochs": 1,
    f"{_A}.ppo_max_token_len_per_gpu": 16384,
    f"{_A}.ulysses_sequence_parallel_size": 1,
    f"{_A}.policy_loss.loss_mode": "vanilla",
    f"{_A}.clip_ratio": 0.2,
    f"{_A}.clip_ratio_low": 0.2,
    f"{_A}.clip_ratio_high": 0.2,
    f"{_A}.clip_ratio_c": 3.0,
    f"{_A}.tau_pos": 1.0,  # not in 0.6.1, as sapo
    f"{_A}.tau_neg": 1.05,
    f"{_A}.policy_loss.clip_cov_ratio": 0.0002,
    f"{_A}.policy_loss.clip_cov_lb": 1.0,
    f"{_A}.policy_loss.clip_cov_ub": 5.0,
    f"{_A}.policy_loss.kl_cov_ratio": 0.0002,
    f"{_A}.policy_loss.ppo_kl_coef": 0.1,
    f"{_A}.loss_agg_mode": "token-mean",
    f"{_A}.entropy_coeff": 0,
    f"{_A}.use_kl_loss": False,
    f"{_A}.kl_loss_coef": 0.001,
    f"{_A}.kl_loss_type": "low_var_kl",
    # critic, reference
    **_training("critic", "critic.model", "critic.model.fsdp_config", 1e-5),
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.ulysses_sequence_parallel_size": 1,
    "critic.cliprange_value": 0.5,
    "trainer.critic_warmup": 0,
    f"{_F}.fsdp_config.model_dtype": "fp32",
    f"{_F}.fsdp_config.dtype": "bfloat16",
    f"{_F}.fsdp_config.param_offload": False,
    # rollout
    f"{_R}.n": 1,
    f"{_R}.temperature": 1.0,
    f"{_R}.top_p": 1,
    f"{_R}.top_k": -1,
    f"{_R}.max_num_seqs": 256,  # 0.6.1: 1024
    f"{_R}.dtype": "bfloat16",
    f"{_R}.free_cache_engine": True,
    f"{_R}.gpu_memory_utilization": 0.5,
    f"{_R}.max_num_batched_tokens": 8192,
    f"{_R}.enforce_eager": False,
    f"{_R}.enable_chunked_prefill": True,
    f"{_R}.val_kwargs.do_sample": False,
    f"{_R}.val_kwargs.n": 1,
    f"{_R}.val_kwargs.temperature": 0,
    f"{_R}.val_kwargs.top_p": 1.0,
    # reward; 0.6.1: reward_model.reward_manager
    "reward.reward_manager.name": "naive",
    "reward_model.enable": False,
    "reward_model.model.fsdp_config.param_offload": False,
    # algorithm
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.enable": False,  # 0.6.1: of recipe.dapo only
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "algorithm.rollout_correction.rollout_rs": None,
    # trainer
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.resume_mode": "auto",
}

# Of `fully_async_ppo_trainer.yaml`: in force as soon as one key of its section is seen.
ASYNC_DEFAULTS: Mapping[str, Any] = {
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "async_training.partial_rollout": True,
    "async_training.use_rollout_log_probs": True,
}

_U, _O = ("custom_reward_function", "reward.custom_reward_function"), "reward_model.overlong_buffer"
_NONE = "none is set"
_PLACE, _MACHINE = "a place or name of verl's authors", "what a machine has is not verl's to know"
_TWICE, _FOLLOWS = "another key says the same", "it follows another key, as in verl"
# Keys that are translated, but have no default here, and why.
WITHOUT_DEFAULT: Mapping[str, str] = {
    "data.train_files": _PLACE,
    "data.val_files": _PLACE,
    "actor_rollout_ref.model.path": _PLACE,
    "actor_rollout_ref.model.tokenizer_path": _PLACE,
    "critic.model.path": _PLACE,
    f"{_F}.model.path": _PLACE,
    "trainer.default_local_dir": _PLACE,
    "trainer.project_name": _PLACE,
    "trainer.logger": "wandb needs an account; rondo writes its own curves",
    "trainer.log_val_generations": "of the display only",
    "trainer.device": _MACHINE,
    "trainer.n_gpus_per_node": _MACHINE,
    "trainer.nnodes": _MACHINE,
    "rollout.n_gpus_per_node": _MACHINE,
    "rollout.nnodes": _MACHINE,
    "actor_rollout_ref.hybrid_engine": _MACHINE,
    f"{_R}.tensor_model_parallel_size": _MACHINE,
    f"{_R}.update_weights_bucket_megabytes": _MACHINE,
    f"{_R}.checkpoint_engine.update_weights_bucket_megabytes": _MACHINE,
    f"{_R}.name": "verl has none: it is an error there, and rondo's own engine here",
    f"{_R}.engine_kwargs.vllm": _NONE,
    f"{_R}.engine_kwargs.sglang": _NONE,
    "data.trust_remote_code": _TWICE,
    f"{_A}.optim.clip_grad": _TWICE,
    f"{_A}.optim.warmup_style": _TWICE,
    "critic.optim.clip_grad": _TWICE,
    "critic.optim.warmup_style": _TWICE,
    f"{_R}.response_length": _TWICE,
    f"{_R}.prompt_length": _TWICE,
    "critic.ppo_mini_batch_size": _FOLLOWS,
    "critic.ppo_epochs": _FOLLOWS,
    f"{_F}.log_prob_max_token_len_per_gpu": _FOLLOWS,
    f"{_A}.loss_scale_factor": _FOLLOWS,
    "data.gen_batch_size": _FOLLOWS,
    "rollout.total_rollout_steps": _NONE,
    "reward_model.reward_manager": _TWICE,
    "reward_model.model.path": _PLACE,
    "reward_model.model.input_tokenizer": _FOLLOWS,
    "reward_model.forward_max_token_len_per_gpu": _FOLLOWS,
    **dict.fromkeys((f"{at}.{one}" for at in _U for one in ("path", "name", "reward_kwargs")), _NONE),
    **dict.fromkeys(("reward_model.reward_kwargs", "reward.reward_kwargs"), _NONE),
    **dict.fromkeys((f"{_O}.{one}" for one in ("enable", "len", "penalty_factor", "log")), _NONE),
    "algorithm.filter_groups.metric": _NONE,
    "algorithm.filter_groups.max_num_gen_batches": "0: no bound, which is refused when the filter is on",
    "algorithm.rollout_correction.rollout_rs_threshold": _NONE,
    "async_training.compute_prox_log_prob": "off",
}


def default(key: str, value: Any) -> Node:
    """Makes the node of a default, which says so."""
    return like(Node(None, Origin(f"verl's default of {key}", written=False), BENEATH), value)


def defaults_beside(written: Collection[str]) -> dict[str, Node]:
    """Returns the defaults that are in force where these keys of verl's are written, those of the keys
    themselves left out.
    """
    table = dict(DEFAULTS)
    if any(key.startswith("async_training.") for key in written):
        table |= ASYNC_DEFAULTS
    return {key: default(key, value) for key, value in table.items() if key not in written}
