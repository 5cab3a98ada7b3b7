#!/usr/bin/env bash
# A run as a job of a Ray cluster that is there, with the folder that this is started in. Not run: no cluster with a
# dashboard was there. rondo is in the cluster's image; the run folder is on a file system that all machines see.
#   RAY_ADDRESS=http://HEAD:8265 deploy/ray_job_submit.sh recipe.yaml cluster.devices=16 trainer.run_dir=/shared/runs/a
set -euo pipefail

: "${RAY_ADDRESS:?set RAY_ADDRESS to the cluster\'s dashboard, as http://HEAD:8265}"
exec ray job submit --working-dir . -- \
  rondo train "$@" cluster.backend=ray cluster.backend.address=auto tracking.console=plain
