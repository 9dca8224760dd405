"""Explains a path that isn't a run: a misspelled run, or another program's checkpoint.

runs/digts    --> runs/digits, beside it        digits, rusn/digits   --> runs/digits
out/checkpoint-5, last.pt, global_step2         --> `lockstep ckpt import`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError
from lockstep.core.terminal import command_line

_FILES = ("config.yaml", "run.lock")
_RUNS = Path("runs")
_MOST = 2000  # entries of a folder that are looked at
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".index.json"
IN_FOLDERS = ("model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin", f"pytorch_model.bin{_INDEX}")
"""Files of a folder's weights."""
BESIDE = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "trainer_state.json")
"""Files of HF Trainer and Accelerate beside the weights."""
_OTHERS = ("training_args.bin", "rng_state.pth", "scaler.pt", "scaler.bin")
_A_RUN = ("RUN", "--config", "FILE")


def did_you_mean_run(path: Path) -> str:
    """Return `; did you mean runs/digits?`, or what else it is, to end a message about a path."""
    foreign, near = peer_checkpoint(path), nearest_run(path)
    return f"; it {foreign}" if foreign is not None else f"; did you mean {near}?" if near is not None else ""


def peer_checkpoint(path: Path, *target: str) -> str | None:
    """Return what another program's checkpoint is, and the command that converts it to `target` (none: a run)."""
    convert = f"`{command_line('lockstep', 'ckpt', 'import', path, *(target or _A_RUN))}`"
    if path.suffix in _WEIGHTS and path.is_file():
        return part_of_checkpoint(path) or f"has weights; {convert} makes a run of them"
    with suppress(OSError):
        names = {entry.name for entry in islice(path.iterdir(), _MOST)}
        steps = [name for name in names if name[:11] == "checkpoint-" and name[11:].isdecimal()]
        if (path / "latest").is_file() or any(name.endswith("_model_states.pt") for name in names):
            return f"is a checkpoint of DeepSpeed; {convert} converts it"
        if names & {".metadata", "pytorch_model_fsdp_0"}:
            return f"is a checkpoint of torch.distributed.checkpoint; {convert} converts it"
        if not names.isdisjoint(IN_FOLDERS):
            return f"has weights; {convert} makes a run of them"
        if "adapter_config.json" in names:
            return _UNMERGED
        if steps:
            return f"has checkpoints of HF Trainer: name one, {path / max(steps, key=lambda name: int(name[11:]))}"
    return None


def part_of_checkpoint(file: Path) -> str | None:
    """Return what a file is, if not a whole checkpoint, and what to do instead, if known."""
    if file.name.startswith("adapter_model."):
        return _UNMERGED
    if file.name.endswith(("_model_states.pt", "_optim_states.pt")):
        return f"is a part of a checkpoint of DeepSpeed: name its folder, {file.parent}"
    return f"has no weights: name its folder, {file.parent}" if file.name in (*BESIDE, *_OTHERS) else None


_UNMERGED = (
    "is an adapter of peft, without the weights that it changes: set model.adapter to train it further, or merge it "
    "(peft's `merge_and_unload()`, then `save_pretrained(FOLDER)`), and name that folder"
)


def not_a_run(path: Path) -> ConfigError:
    """Return the error for a path without a run."""
    neither = " nor ".join(_FILES)
    return ConfigError(f"{path} is not the folder of a run: it has neither {neither}{did_you_mean_run(path)}")


def nearest_run(path: Path) -> Path | None:
    """Return the run with the most similar name, beside the path or where runs are by default."""
    for folder in dict.fromkeys((path.parent, _RUNS, Path())):
        by_name = {run.name: run for run in _runs_in(folder)}
        name = closest_match(path.name, by_name)
        if name is not None and by_name[name] != path:
            return by_name[name]
    return None


def _runs_in(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        for entry in islice(folder.iterdir(), _MOST):
            if any((entry / name).is_file() for name in _FILES):
                yield entry
