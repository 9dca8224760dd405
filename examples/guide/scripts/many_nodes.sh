#!/usr/bin/env bash
# Run the same command on every machine: scripts/many_nodes.sh ddp|fsdp|deepspeed [arguments of train.py]
# Settings: NODES (machines), HEAD (host:port of one of them, such as node0:29500), RANKS (processes on this machine, by
# default 2), RUN_ID (the same on all; by default guide), MODEL_NAME, OUTPUT_DIR (seen by all), CONFIG, SEED
set -euo pipefail

mode=${1:?which mode: ddp, fsdp or deepspeed}
shift
guide=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

exec torchrun \
    --nnodes "${NODES:?how many machines}" \
    --nproc-per-node "${RANKS:-2}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?host:port of one of the machines}" \
    --rdzv-id "${RUN_ID:-guide}" \
    "$guide/train.py" \
    --mode "$mode" \
    --model_name "${MODEL_NAME:-gpt2}" \
    --output_dir "${OUTPUT_DIR:-runs/guide-$mode}" \
    --seed "${SEED:-42}" \
    ${CONFIG:+--config "$CONFIG"} \
    "$@"
