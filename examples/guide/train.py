"""Train a language model, or BERT, under ddp, fsdp or deepspeed, with the arguments that training scripts usually have.

torchrun --nproc-per-node 2 train.py --mode fsdp --model_name gpt2 --output_dir out
torchrun --nproc-per-node 2 train.py --mode ddp --config configs/bert.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lockstep

CONFIGS = {"ddp": "ddp.yaml", "fsdp": "fsdp.yaml", "deepspeed": "deepspeed.json"}
DATA = {
    "train": {"kind": "stdlib-text", "split": "train", "length": 256},
    "evaluation": {"held-out": {"kind": "stdlib-text", "split": "held-out", "length": 256, "samples": 256}},
}

DECIDED = {
    "batch": {"global_size": 32, "micro_size": 4},
    "optim": {"lr": 5e-5, "weight_decay": 0.01},
    "schedule": {"kind": "linear", "warmup_steps": 0},
}
"""What a file may leave to its script: an imported config has `???` there."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=CONFIGS, required=True)
    parser.add_argument("--config", help="a YAML, or for deepspeed its own JSON; by default from the folder configs")
    parser.add_argument("--model_name", help="hub name or folder; by default the one in the file, or gpt2")
    parser.add_argument("--output_dir", help="by default a new folder under runs")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def config(asked: argparse.Namespace) -> dict[str, Any]:
    """Merge the command line over the file, and add what a DeepSpeed JSON can't contain: model, data, length."""
    file = asked.config or Path(__file__).parent / "configs" / CONFIGS[asked.mode]
    values: dict[str, Any] = lockstep.import_config(file)
    for section, choices in DECIDED.items():
        given = values.get(section, {})
        given.update({key: value for key, value in choices.items() if given.get(key) == "???"})
    model = values.setdefault("model", {"kind": "huggingface", "pretrained": "gpt2"})
    model.setdefault("task", "causal-lm")
    if asked.model_name is not None:
        model["pretrained"] = asked.model_name
    values.setdefault("data", DATA)
    values.setdefault("parallel", {})["strategy"] = asked.mode
    values.setdefault("run", {"steps": 500}).update(seed=asked.seed, folder=asked.output_dir)
    return values


def main() -> None:
    try:
        lockstep.train(config(arguments()), name="guide")
    except lockstep.Failure as failure:
        lockstep.exit_with(failure)


if __name__ == "__main__":
    main()
