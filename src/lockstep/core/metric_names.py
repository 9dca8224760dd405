"""The classes of torchmetrics by the names that people write, read from its files: nothing is imported.

f1 -> F1Score     mse -> MeanSquaredError     pearson -> PearsonCorrCoef     average_precision -> AveragePrecision
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

PARTS = ("classification", "regression", "text")
"""The packages of torchmetrics with metrics of outputs and targets, and of texts."""
_ENDINGS = ("score", "error", "corrcoef", "index")


@cache
def metric_classes() -> dict[str, str]:
    """Return the part of each class by its name; empty if torchmetrics isn't installed."""
    spec = importlib.util.find_spec("torchmetrics")
    if spec is None or spec.origin is None:
        return {}
    classes: dict[str, str] = {}
    for part in PARTS:
        tree = ast.parse(Path(spec.origin).with_name(part).joinpath("__init__.py").read_text(encoding="utf-8"))
        for node in tree.body + [inner for block in tree.body if isinstance(block, ast.If) for inner in block.body]:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AugAssign) and isinstance(target, ast.Name) and target.id == "__all__":
                classes |= dict.fromkeys(ast.literal_eval(node.value), part)
    return classes


@cache
def metric_names() -> dict[str, str]:
    """Return the class of each accepted name: in lower case, without underscores."""
    classes = metric_classes()
    short = [(name.lower().removesuffix(ending), name) for name in classes for ending in _ENDINGS]
    initials = [("".join(re.findall("[A-Z]", name)).lower(), name) for name in classes]
    names = [(name.lower(), name) for name in classes] + short + [pair for pair in initials if len(pair[0]) > 2]
    return dict(reversed(names))  # the first of equals counts


def plain(kind: str) -> str:
    """Return a name as `metric_names` has it."""
    return kind.lower().replace("_", "").replace("-", "")
