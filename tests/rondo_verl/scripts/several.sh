#!/bin/bash
# A sweep in a loop, and one more launch behind it.
for lr in 1e-6 5e-6; do
    for n in 4 8; do
        python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
            data.train_files=train.parquet \
            actor_rollout_ref.model.path=tiny \
            actor_rollout_ref.actor.optim.lr=$lr \
            actor_rollout_ref.rollout.n=$n
    done
done
torchrun --standalone --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=sft.parquet
