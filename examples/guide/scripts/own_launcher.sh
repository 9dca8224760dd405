#!/usr/bin/env bash
# One machine, without train.py and torchrun, by the command alone: scripts/own_launcher.sh ddp|fsdp|deepspeed [overrides]
# Settings: RANKS (by default 2), MODEL_NAME, OUTPUT_DIR, CONFIG, BASE (model and data for a DeepSpeed JSON), SEED
set -euo pipefail

mode=${1:?which mode: ddp, fsdp or deepspeed}
if [[ ! $mode =~ ^(ddp|fsdp|deepspeed)$ ]]; then
    echo "own_launcher.sh: there is no mode $mode; which mode: ddp, fsdp or deepspeed" >&2
    exit 2
fi
shift
guide=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=${OUTPUT_DIR:-runs/guide-$mode}

if [[ $mode == deepspeed ]]; then # import the JSON as a config, and merge it over one that has a model and data
    imported=$(mktemp --suffix .yaml)
    trap 'rm -f "$imported"' EXIT
    lockstep config import "${CONFIG:-$guide/configs/deepspeed.json}" --to "$imported" --force
    files=("${BASE:-$guide/configs/ddp.yaml}" "$imported")
else
    files=("${CONFIG:-$guide/configs/$mode.yaml}")
fi

lockstep train "${files[@]}" \
    --ranks "${RANKS:-2}" \
    --parallel.strategy "$mode" \
    --model.pretrained "${MODEL_NAME:-gpt2}" \
    --run.folder "$output" \
    --run.seed "${SEED:-42}" \
    "$@"
