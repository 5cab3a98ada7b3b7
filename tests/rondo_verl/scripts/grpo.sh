#!/usr/bin/env bash
# Variables with defaults, several files, one command over many lines, and what is typed behind it.
set -x

export VLLM_USE_V1=1
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=$HOME/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=5 \
    trainer.logger='["console"]' \
    trainer.project_name='gsm8k' \
    trainer.experiment_name="qwen3_$(date +%Y)" \
    trainer.default_local_dir='checkpoints/${trainer.project_name}' \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 "$@" 2>&1 | tee grpo.log
