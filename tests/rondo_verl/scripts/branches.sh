#!/bin/bash
# What the machine has, and an argument, decide.
GPUS=$(nvidia-smi --list-gpus | wc -l)
case "${1:-small}" in
    large) MODEL=Qwen/Qwen3-8B; LENGTH=$((1024 * 8)) ;;
    *) MODEL=Qwen/Qwen3-0.6B; LENGTH=1024 ;;
esac
if (( GPUS >= 8 )) && [[ -z "${ONE_NODE:-}" ]]; then
    NODES=2
else
    NODES=1
fi
if [ ! -f "$HOME/data/train.parquet" ]; then
    python3 examples/data_preprocess/gsm8k.py --local_dir "$HOME/data"
fi
nohup env TOKENIZERS_PARALLELISM=false python3 /workspace/verl/verl/trainer/main_ppo.py \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/train.parquet \
    data.max_response_length=$LENGTH \
    actor_rollout_ref.model.path=$MODEL \
    trainer.n_gpus_per_node=$GPUS \
    trainer.nnodes=$NODES &
wait
