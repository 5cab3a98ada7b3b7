#!/bin/bash
#SBATCH --nodes=2
# A job of Slurm's, whose shell launches.
module load cuda/12.4
export MASTER_PORT=$((20000 + 1))
srun --nodes=$SLURM_NNODES --ntasks-per-node=1 bash -c '
    source venv/bin/activate
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \
        actor_rollout_ref.model.path=tiny trainer.nnodes='"$SLURM_NNODES"
