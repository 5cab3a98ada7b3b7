#!/usr/bin/env bash
# Everything worth doing when a CUDA machine is at hand: correctness of every engine path first, then throughput.
# Needs the machine's own torch and transformers; neither Ray nor vLLM. Writes its results to ${OUT:-build/gpu}.
#   bash benchmarks/gpu/run.sh            PYTHON=python3 by default
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1
failed=0
step() { echo "== $1"; shift; "$@" 2>&1 | tee -a "$OUT/log.txt"; [ "${PIPESTATUS[0]}" -eq 0 ] || { failed=1; echo "!! failed: $*"; }; }

step "what is here" "$PYTHON" -m rondo.cli.main doctor
step "correctness on CUDA" "$PYTHON" -m pytest -q -m gpu tests --timeout 300
step "decode" "$PYTHON" benchmarks/decode.py --device cuda --json "$OUT/decode.json"
step "the quickstart on CUDA" "$PYTHON" -m rondo.cli.main train recipes/quickstart.yaml cluster.device=cuda \
    tracking.trackers=[] trainer.run_dir="$OUT/quickstart" checkpoint.every=null
cp "$OUT/quickstart/summary.json" "$OUT/quickstart-summary.json" 2>/dev/null
exit $failed
