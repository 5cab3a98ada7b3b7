#!/usr/bin/env bash
# Trains as a job of a Ray cluster that runs: the controller is a process of its head node, and this shell only shows
# what it prints. Not run: the job server needs ray[default] there and here; tests/deploy lints it.
#
#   RAY_ADDRESS=http://10.0.0.1:8265 deploy/ray_job_submit.sh recipe.yaml cluster.devices=16 \
#       cluster.device=cuda trainer.run_dir=/shared/runs/x
#
# The folder that this is started in travels with it (recipes, rewards, small data); models, large data and
# trainer.run_dir lie at a path that all nodes have.
set -euo pipefail

: "${RAY_ADDRESS:?set it to the address of the job server, as http://HEAD:8265}"
# After `ray job stop`: seconds from SIGTERM, which ends the step and writes a checkpoint, to SIGKILL. Ray's are 3.
exec ray job submit --working-dir . --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}}' -- \
  rondo train "$@" cluster.backend=ray cluster.backend.address=auto
