#!/bin/bash
# From wherever it is started: to the root of its repository, where others lie that it reads.
set -eu
SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$SCRIPT_DIR/../.."
source common/env.sh
BATCH=$(sed -n 's/.*"batch": \([0-9]*\).*/\1/p' common/sizes.json)
python3 -m verl.trainer.main_ppo "${COMMON_ARGS[@]}" \
    data.train_files="$(pwd)/train.parquet" \
    data.train_batch_size=$BATCH
