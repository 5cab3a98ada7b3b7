#!/usr/bin/env bash
# Starts Ray on every node of a Slurm allocation, trains, and stops Ray. Not run on a Slurm; tests/deploy runs it with
# stand-ins for srun, scontrol, ray and rondo.
#
#   sbatch --nodes=2 deploy/slurm.sh recipe.yaml trainer.run_dir=/shared/runs/x checkpoint.every=20
#
# All nodes see the working directory, the recipe and the run folder at the same path, and have rondo on their PATH
# (activate the environment before sbatch, or here). HEAD_ADDRESS: the first node's address in the network that
# joins the nodes; default: the first that it has.
#SBATCH --job-name=rondo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head")
address=${HEAD_ADDRESS:-$("${on_head[@]}" hostname --all-ip-addresses | awk '{ print $1 }')}
ray=$address:$((20000 + SLURM_JOB_ID % 10000)) # another port for each job

# Ray runs the code of whoever reaches its ports, and others share this network: all of these want a token, which
# lies in a file of the working directory while the job runs.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$PWD/.ray-token-$SLURM_JOB_ID}
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH")

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun does not take from sbatch (Slurm 22.05 and later)
steps=()
stop_ray() {
  kill "${steps[@]}" 2> /dev/null || true
  wait "${steps[@]}" 2> /dev/null || true
  rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap stop_ray EXIT
start=(ray start --block --disable-usage-stats --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_ON_NODE")
"${on_head[@]}" "${start[@]}" --head --node-ip-address="$address" --port="${ray##*:}" --include-dashboard=false &
steps+=($!)
others=$((${#nodes[@]} - 1))

# ready N: waits until Ray has N nodes; fails after 5 minutes.
ready() {
  local deadline=$((SECONDS + 300))
  until [ "$(ray status --address="$ray" 2> /dev/null | grep --count ' node_')" -ge "$1" ]; do
    if [ "$SECONDS" -ge "$deadline" ]; then
      echo "Ray has fewer than $1 nodes after 5 minutes: see the lines of ray start above" >&2
      return 1
    fi
    sleep "${POLL_SECONDS:-2}"
  done
}
ready 1
if [ "$others" -gt 0 ]; then
  srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" "${start[@]}" --address="$ray" &
  steps+=($!)
fi
ready "${#nodes[@]}"

# In the background, so that bash hears Slurm's SIGTERM while it waits: the run then writes a checkpoint.
rondo train "$@" cluster.backend=ray cluster.backend.address="$ray" cluster.device=cuda \
  cluster.devices=$((${#nodes[@]} * SLURM_GPUS_ON_NODE)) \
  cluster.threads=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE)) &
run=$!
trap 'kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
while kill -0 "$run" 2> /dev/null; do # the signal has ended the wait, not the run
  status=0
  wait "$run" || status=$?
done
if [ "$status" = 143 ]; then # ended by SIGTERM, and not finished: the same command goes on
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
