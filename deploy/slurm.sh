#!/usr/bin/env bash
# Ray over the machines of a Slurm allocation, one run of rondo, and Ray stopped again. Tested with stand-ins for srun,
# scontrol, ray and rondo; not run on Slurm.
#   sbatch --nodes=2 --gpus-per-node=8 deploy/slurm.sh recipe.yaml [key=value …]
#SBATCH --job-name=rondo
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=rondo-%j.log
set -euo pipefail

port=${RAY_PORT:-6379}
gpus=${SLURM_GPUS_ON_NODE:-0}
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${machines[0]}
# An address, not a name: a name may stand for 127.0.0.1 on its own machine.
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | awk '{print $1}')

# One token for all, in a folder that they share: Ray asks for it (RAY_AUTH_MODE=disabled does without).
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [ "$RAY_AUTH_MODE" = token ]; then
  export RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$PWD/.ray-token-$SLURM_JOB_ID}
  [ -e "$RAY_AUTH_TOKEN_PATH" ] || (umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH")
fi

# Ends with this script, also where the run fails: `--block` keeps each Ray in its step.
steps=()
stop() {
  kill "${steps[@]}" 2> /dev/null || true
  wait 2> /dev/null || true
  rm -f "$PWD/.ray-token-$SLURM_JOB_ID"
}
trap stop EXIT

start() {  # start MACHINE ARGUMENT…: Ray on one machine, until the end
  local machine=$1
  shift
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$machine" \
    ray start --block --num-gpus="$gpus" --disable-usage-stats "$@" &
  steps+=($!)
}
start "$first" --head --node-ip-address="$address" --port="$port"
for machine in "${machines[@]:1}"; do
  start "$machine" --address="$address:$port"
done

devices=$((${#machines[@]} * (gpus > 0 ? gpus : 1)))
# Every machine has to be there before devices are asked for.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" python - "$address:$port" "${#machines[@]}" << 'WAIT'
import sys
import time

import ray

address, machines = sys.argv[1], int(sys.argv[2])
for second in range(300):
    try:
        ray.init(address=address, logging_level="ERROR")
        if sum(node["Alive"] for node in ray.nodes()) >= machines:
            sys.exit(0)
        ray.shutdown()
    except ConnectionError:
        pass
    time.sleep(1)
sys.exit(f"after 300 s not all of {machines} machines have joined the Ray at {address}")
WAIT

srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" \
  rondo train "$@" cluster.backend=ray cluster.backend.address="$address:$port" \
  cluster.devices="$devices" cluster.device="$([ "$gpus" -gt 0 ] && echo cuda || echo cpu)"
