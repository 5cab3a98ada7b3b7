#!/usr/bin/env bash
# Everything worth doing when a CUDA machine is at hand, in parts of at most LIMIT seconds each (what each took on
# one H100, in brackets):
#   doctor       what is there (3 s)
#   correctness  the tests marked `gpu`: kernels, every family, whole runs of every role and way (65 s with
#                pytest-xdist, which is used where it is installed)
#   quickstart   the quickstart, on the device (65 s)
#   train        GRPO of a model of Qwen3-0.6B's shape with random weights (train.py, qwen3_0.6b.yaml) (70 s)
#   kernels      the same with short answers: which kernels take the device's time
#   budget       where the host waits for the device, verb by verb (../cards.py)
#   parts        decode steps, a pass, an optimizer step and checksums by themselves (parts.py) (about 150 s)
#   decode       the native engine against transformers' generate; decode-0.6b: a model of Qwen3-0.6B's shape
#
#   bash benchmarks/gpu/run.sh [PART …]    no PART: all. Variables: PYTHON=python3 OUT=build/gpu LIMIT=300
#
# Where a machine is lent for ten minutes at a time: `doctor correctness train`, then `parts budget quickstart`, then
# `kernels decode decode-0.6b`. docs/cards.md lists what has been seen, and what has not.
#
# Writes PART.log to OUT, and PART.json where a part measures something. Needs the machine's own torch and
# transformers; no Ray, no vLLM, no package index: what wheels.sh has put into .whl/ is installed from there, into a
# temporary folder. Without a CUDA device the tests are skipped, and the parts that need one say so; no failure.
set -uo pipefail
cd "$(dirname "$0")/../.."
PARTS=(doctor correctness train parts budget quickstart kernels decode decode-0.6b)
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
LIMIT=${LIMIT:-300}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$OUT"
export PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1 COLUMNS=120
if compgen -G ".whl/*.whl" > /dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" .whl/*.whl || exit 1
  export PYTHONPATH=$PYTHONPATH:$scratch/site
fi
several=$("$PYTHON" -c 'import xdist; print("-n 6")' 2> /dev/null)
has_cuda=$("$PYTHON" -c 'import torch; print(int(torch.cuda.is_available()))') || exit 1

command_of() {  # sets COMMAND, and WANTS_CUDA: whether it is of no use without a device
  WANTS_CUDA=1
  case $1 in
    doctor) WANTS_CUDA=0 COMMAND=("$PYTHON" -m rondo.cli.main doctor) ;;
    correctness)
      # shellcheck disable=SC2206  # two words, or none
      WANTS_CUDA=0 COMMAND=("$PYTHON" -m pytest -q -p no:cacheprovider --timeout 200 -m gpu $several tests/gpu) ;;
    decode)
      COMMAND=("$PYTHON" benchmarks/decode.py --device cuda --batches 64 256 --repeats 3 --json "$OUT/decode.json") ;;
    decode-0.6b)
      COMMAND=("$PYTHON" benchmarks/decode.py --device cuda --batches 64 256 --repeats 3 --json "$OUT/decode-0.6b.json"
        --model benchmarks/gpu/qwen3_0.6b.yaml --dtype bfloat16) ;;
    quickstart)
      COMMAND=("$PYTHON" -m rondo.cli.main train quickstart cluster.device=cuda "trainer.run_dir=$scratch/quickstart"
        tracking.trackers=[] checkpoint.every=null) ;;
    train)
      COMMAND=("$PYTHON" benchmarks/gpu/train.py --json "$OUT/train.json" "trainer.run_dir=$scratch/train") ;;
    budget)
      COMMAND=("$PYTHON" benchmarks/cards.py real) ;;
    parts)
      COMMAND=("$PYTHON" benchmarks/gpu/parts.py --kernels 24 --json "$OUT/parts.json") ;;
    kernels)
      COMMAND=("$PYTHON" benchmarks/gpu/train.py --kernels 40 --json "$OUT/kernels.json"
        "trainer.run_dir=$scratch/kernels" trainer.total_steps=2 rollout.n=32 rollout.max_tokens=64
        rollout.max_concurrent=256) ;;
    *) return 1 ;;
  esac
}

parts=("$@")
[ $# -gt 0 ] || parts=("${PARTS[@]}")
for part in "${parts[@]}"; do
  command_of "$part" || { echo "there is no part '$part'; there are: ${PARTS[*]}" >&2; exit 2; }
done
failed=()
for part in "${parts[@]}"; do
  command_of "$part"
  echo "== $part" | tee "$OUT/$part.log"
  if [ $((WANTS_CUDA && !has_cuda)) -eq 1 ]; then
    echo "skipped: no CUDA device here" | tee -a "$OUT/$part.log"
    continue
  fi
  started=$SECONDS
  timeout --signal INT --kill-after 20 "$LIMIT" "${COMMAND[@]}" 2>&1 | tee -a "$OUT/$part.log"
  status=${PIPESTATUS[0]}
  echo "-- $part: exit $status after $((SECONDS - started)) s" | tee -a "$OUT/$part.log"
  [ "$status" -eq 0 ] || failed+=("$part")
  [ "$part" = quickstart ] && cp "$scratch/quickstart/summary.json" "$OUT/quickstart.json" 2> /dev/null
done
[ ${#failed[@]} -eq 0 ] || { echo "!! failed: ${failed[*]}"; exit 1; }
