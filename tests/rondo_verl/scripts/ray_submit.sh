#!/usr/bin/env bash
# A job that Ray runs, from a working directory of its own.
set -euxo pipefail

RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/verl/trainer/runtime_env.yaml"}
NNODES=${NNODES:-1}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
CKPTS_DIR=${CKPTS_DIR:-"${RAY_DATA_HOME}/ckpts/dapo"}

until ray status >/dev/null; do
    sleep 5
done

ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \
    --working-dir "${WORKING_DIR}" \
    -- python3 -m recipe.dapo.main_dapo \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=False \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.model.path="${RAY_DATA_HOME}/models/Qwen2.5-32B" \
    actor_rollout_ref.rollout.name=hf \
    data.train_files="${RAY_DATA_HOME}/data/dapo-math-17k.parquet" \
    trainer.nnodes="${NNODES}" \
    trainer.n_gpus_per_node=8 \
    trainer.default_local_dir="${CKPTS_DIR}"
