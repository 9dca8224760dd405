"""Rules for intervals of evaluations, checkpoints and logs, for trackers and folders.

eval_steps: 0.25 of max_steps: 100        evaluation.every: 25
save_strategy: epoch                      checkpoint.every: 1 epoch
report_to: [tensorboard, wandb]           monitor.tensorboard: true; to do: monitor.trackers: [{target: wandb}]
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.config.wording import yaml_like
from lockstep.interop.foreign import ForeignFile, ForeignKey, is_off
from lockstep.interop.keys import NOTHING, Answer, KeyRow, derived, key_rows, not_needed, not_there, taken, to_do
from lockstep.interop.rules import Rule, accumulation_of, epochs_of, steps_of


def interval(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert a number of steps or, below 1, a share of the run, unless the strategy key decides."""
    strategy = file.value(*(word for word, _ in row.values)) if row.values else None
    if strategy in ("no", False, "epoch", "best"):
        return not_needed(f"{yaml_like(strategy)} decides how often")
    value = key.value
    if not (isinstance(value, float) and 0 < value < 1):
        return taken(row.target, int(value) if isinstance(value, float) and row.target == "monitor.every" else value)
    steps, epochs = steps_of(file), epochs_of(file)
    if isinstance(steps, int) and steps > 0:
        return derived(f"{value} of {steps} steps", {row.target: max(1, round(value * steps))})
    if isinstance(epochs, int | float) and row.target != "monitor.every":
        return derived(f"{value} of {epochs} epochs", {row.target: f"{value * epochs:g} epochs"})
    return to_do(f"write {row.target}: a number of steps{'' if row.target == 'monitor.every' else ', or 1 epoch'}")


def interval_in_epochs(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert a number of epochs; Lightning's val_check_interval is a share of one or a number of micro-batches."""
    value = key.value
    if key.word == "val_check_interval" and not isinstance(value, float):
        steps = accumulation_of(file)
        if not isinstance(value, int) or steps == 1:
            return taken(row.target, value)
        return derived(f"{value} micro-batches, {steps} an update", {row.target: max(1, round(value / steps))})
    if key.word == "check_val_every_n_epoch" and value == 1 and file.find("val_check_interval") is not None:
        return not_needed("val_check_interval decides how often")
    if is_off(value) and value != 1:
        return NOTHING
    if key.word == "val_check_interval":
        return derived("a share of an epoch", {row.target: f"{value:g} epochs"})
    return taken(row.target, f"{value} epoch{'s' * (value != 1)}")


def eval_strategy(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert HF Trainer's eval_strategy; without eval_steps its interval is logging_steps."""
    if key.value in ("epoch", "epochs"):
        return taken(row.target, "1 epoch")
    if key.value in ("no", False):
        return taken(row.target, None)
    if file.find("eval_steps") is not None:
        return not_needed("eval_steps decides")
    if key.value != "steps":
        return not_there("choose steps, epoch or no")
    every = file.value("logging_steps")
    how_often = every if isinstance(every, int) else 500
    return derived("without eval_steps the interval is logging_steps", {row.target: how_often})


def save_strategy(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    match key.value:
        case "epoch":
            return taken(row.target, "1 epoch")
        case "no" | False:
            return derived("one is always written when the run is stopped or done", {row.target: None})
        case "steps":
            return not_needed("save_steps decides") if file.value("save_steps") else taken(row.target, 500)
        case "best":
            return to_do("write checkpoint.best: SET.METRIC for a set of data.evaluation")
    return not_there("choose steps, epoch, best or no")


_TRACKERS = ("wandb", "mlflow", "trackio")


def trackers(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if isinstance(key.value, bool):
        return taken(row.target, key.value)
    names = [str(name) for name in key.value] if isinstance(key.value, list) else [str(key.value)]
    others = [name for name in names if name not in ("none", "all", "tensorboard", "None")]
    if others:
        known = all(name in _TRACKERS for name in others)
        why = f"write monitor.trackers: [{', '.join(f'{{target: {name}}}' for name in others)}]"
        strange = "the trackers are wandb, mlflow, trackio, and those of your own (monitor.trackers)"
        return Answer(
            "to do" if known else "not there", {row.target: "tensorboard" in names}, why if known else strange
        )
    return taken(row.target, names != ["none"] and bool(key.value))


def run_name(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    folder = file.find(*key_rows()["output_dir"].unless)
    if is_off(key.value) or not isinstance(key.value, str):
        return NOTHING
    if folder is not None:
        return not_needed(f"a run's name is its folder, which {folder.key} sets")
    return to_do(f"a run's name is its folder; write {row.target}: runs/{key.value}")


def narrow_evaluation(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert bf16_full_eval and fp16_full_eval, which evaluate the model in half precision."""
    if is_off(key.value):
        return NOTHING
    narrow = key.word.partition("_")[0]
    if file.value(narrow) is True:
        return not_needed("evaluation computes in precision.compute, as training does")
    return not_there(f"evaluation computes in precision.compute, as training does, and {narrow} isn't set")


RUN_RULES: Mapping[str, Rule] = {
    "interval": interval, "interval in epochs": interval_in_epochs, "eval strategy": eval_strategy,
    "save strategy": save_strategy, "trackers": trackers, "run name": run_name,
    "narrow evaluation": narrow_evaluation,
}  # fmt: skip
