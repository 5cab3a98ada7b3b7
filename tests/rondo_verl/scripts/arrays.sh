#!/bin/bash
# Options in arrays, put together by a function; the program by a name in a variable.
set -euo pipefail

PYTHON=${PYTHON:-/opt/conda/envs/verl/bin/python3}
DATA=(
    algorithm.adv_estimator=rloo
    data.train_files="$PWD/data/train set.parquet"
    data.train_batch_size=16
)
declare -A SIZES=([prompt]=256 [response]=512)
ROLLOUT=(actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4)

launch() {
    local steps=$1
    shift
    mkdir -p /shared/checkpoints "$HOME/logs"
    "$PYTHON" -u -m verl.trainer.main_ppo "${DATA[@]}" "${ROLLOUT[@]}" \
        data.max_prompt_length=${SIZES[prompt]} \
        data.max_response_length=${SIZES[response]} \
        actor_rollout_ref.model.path="$HOME/models/tiny" \
        actor_rollout_ref.actor.ppo_mini_batch_size=16 \
        trainer.n_gpus_per_node=1 \
        trainer.total_training_steps="$steps" "$@" >"$HOME/logs/$steps.log" 2>&1
}

launch $((10 * 4)) trainer.save_freq=-1
