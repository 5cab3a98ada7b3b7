#!/bin/bash
# Stands for a program: writes down its words, and does nothing. What it prints says that it did not run.
name=${0##*/}
if [ "$name" = .program.sh ]; then
    name=$1
    shift
fi
[ "$name" = sleep ] && exit 0
set -C
n=1
until { : >"$RONDO_ROOT/.ran/$n"; } 2>/dev/null; do
    n=$((n + 1))
    [ $n -lt 1000 ] || exit 1
done
printf '%s\0' "$RONDO_AT" "$(($# + 1))" "$name" "$@" >>"$RONDO_ROOT/.ran/$n"
each() { for _ in {1..8}; do echo "$1"; done; }
case "$name $*" in
    nvidia-smi*name*) each "NVIDIA H100 80GB HBM3" ;;
    nvidia-smi*count*) each 8 ;;
    nvidia-smi*memory*) each 81559 ;;
    nvidia-smi*) each "GPU: NVIDIA H100 80GB HBM3" ;;
    srun* | ray\ job* | sudo*) # a shell behind it is the script's own
        while [ $# -gt 0 ]; do
            case "${1##*/}" in bash | sh) exec "$@" ;; esac
            shift
        done
        ;;
    *) echo "$RONDO_MARKER$n@" ;;
esac
