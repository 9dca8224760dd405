#!/usr/bin/env bash
# One machine, started by torchrun: scripts/one_node.sh ddp|fsdp|deepspeed [arguments of train.py]
# Settings: RANKS (processes, by default 2), MODEL_NAME, OUTPUT_DIR, CONFIG, SEED
set -euo pipefail

mode=${1:?which mode: ddp, fsdp or deepspeed}
shift
guide=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

exec torchrun --standalone --nproc-per-node "${RANKS:-2}" "$guide/train.py" \
    --mode "$mode" \
    --model_name "${MODEL_NAME:-gpt2}" \
    --output_dir "${OUTPUT_DIR:-runs/guide-$mode}" \
    --seed "${SEED:-42}" \
    ${CONFIG:+--config "$CONFIG"} \
    "$@"
