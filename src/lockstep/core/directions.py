"""The direction of a metric: whether low or high values are best, by the words of its name."""

from __future__ import annotations

import re
from typing import Literal

from lockstep.core.errors import ConfigError, Problem

Direction = Literal["lowest", "highest"]
_LOWEST = frozenset({
    "loss", "error", "err", "perplexity", "ppl", "bits", "bpb", "nll", "mse", "rmse", "mae", "mape", "wer", "cer",
    "fid", "brier", "divergence", "kl", "distance",
})  # fmt: skip
_CAMEL = re.compile("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_HIGHEST = frozenset({
    "accuracy", "acc", "f", "auc", "auroc", "auprc", "precision", "recall", "sensitivity", "specificity", "map", "bleu",
    "chrf", "rouge", "meteor", "iou", "miou", "dice", "r", "correlation", "pearson", "spearman", "mcc", "kappa", "hits",
    "ndcg", "mrr", "psnr", "ssim", "exact", "em", "similarity", "reward",
})  # fmt: skip


def known_direction(metric: str) -> Direction | None:
    """Return which values of a metric (`held-out.loss`) are best, if its name shows it."""
    split = _CAMEL.sub("_", metric.rpartition(".")[2]).lower()  # of a class, such as MulticlassF1Score
    words = {word.rstrip("0123456789") for word in re.findall("[a-z]+[0-9]*", split)}
    low, high = bool(words & _LOWEST), bool(words & _HIGHEST)
    return None if low == high else "lowest" if low else "highest"


def best_of(metric: str, best_is: Literal["auto", "lowest", "highest"]) -> Direction:
    """Return which values of `checkpoint.best` are best. Raises ConfigError if that isn't known."""
    return _direction(metric, None if best_is == "auto" else best_is, "checkpoint.best_is", "highest or lowest")


def improvement_of(
    metric: str, mode: Literal["auto", "min", "max"], key: str = "monitor.early_stopping.mode"
) -> Direction:
    """Return which values of a metric are best. Raises ConfigError, with the key of the mode, if that isn't known."""
    stated: Direction | None = {"min": "lowest", "max": "highest"}.get(mode)  # type: ignore[assignment]
    return _direction(metric, stated, key, "max or min")


def is_better(value: float, other: float, direction: Direction) -> bool:
    return value > other if direction == "highest" else value < other


def _direction(metric: str, stated: Direction | None, key: str, words: str) -> Direction:
    if (direction := stated or known_direction(metric)) is None:
        raise ConfigError(Problem("", key, f"the name of {metric} doesn't show if high is better; set it to {words}"))
    return direction
