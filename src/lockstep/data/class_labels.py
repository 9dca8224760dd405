"""The classes in a column of a dataset, or in its lists: their names, and their numbers in the run.

values                names                       number
ClassLabel            the feature's               of the name among the run's: model.classes, else the training data's
texts                 the texts, sorted           the same
whole numbers         none                        the value
other numbers                                     they are targets themselves
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError
from lockstep.core.records import IGNORED

_MOST_TEXTS = 1_000


@dataclass(frozen=True)
class ClassLabels:
    """The classes in a column.

    Attributes:
        names: Of all classes of the run, by number; empty: they have none.
        size: Number of classes; of outputs, if the values are targets themselves.
        numbers: Number of each value; None: the values are targets themselves.
        several: Whether the column has lists.
    """

    names: tuple[str, ...]
    size: int
    numbers: Mapping[Any, int] | None
    several: bool

    def tensor(self, values: Sequence[Any]) -> Tensor:
        """Return the targets of samples: classes [samples], or numbers [samples] or [samples, outputs]."""
        if self.numbers is None:
            return torch.tensor(values, dtype=torch.float32)
        if not self.several:
            return torch.tensor([self.numbers[value] for value in values])
        targets = torch.zeros(len(values), self.size)
        for row, classes in zip(targets, values, strict=True):
            row[[self.numbers[value] for value in classes]] = 1.0
        return targets

    @property
    def identity(self) -> str:
        """Tells apart how values become numbers; empty: they are the numbers."""
        changed = {value: number for value, number in (self.numbers or {}).items() if value != number}
        return f" {sorted(changed.items())}" if changed else ""


def class_labels(rows: Any, column: str, where: str, known: Sequence[str] = (), *, tags: bool = False) -> ClassLabels:
    """Return the classes in a column.

    Args:
        where: Names the dataset.
        known: Names of the run's classes.
        tags: A sample has a list of classes, one for each of its words, with -100 for words without one.

    Raises:
        ConfigError: A row has no value, or one that is no class, or not one of the known ones.
    """
    feature = rows.features[column]
    item = getattr(feature, "feature", feature)
    several, named = item is not feature, getattr(item, "names", None)
    is_number = getattr(item, "dtype", "").startswith(("float", "double"))
    lengths, values = _scanned(rows, column, where, several, collects=tags or not is_number)
    if tags and not several:
        raise ConfigError(f"column {column} has one value a sample; token-classification needs a list, a tag a word")
    texts = all(isinstance(value, str) for value in values)
    if not tags and (is_number or (several and not named and not texts)):
        if len(lengths) > 1:
            given = f"column {column} has lists of {min(lengths)} to {max(lengths)} numbers"
            raise ConfigError(f"{given}; for several classes a text, give a list of 0 and 1, one for each class")
        return ClassLabels((), max(lengths, default=1), None, several)
    values -= {IGNORED} if tags else set()
    if not values:
        raise ConfigError(f"column {column} has only empty lists")
    if texts and not named:
        named = sorted(values)
        if len(named) > _MOST_TEXTS and not known:
            why = f"column {column} has {len(named):,} different texts; if they are classes, name them in model.classes"
            raise ConfigError(why)
    elif wrong := [value for value in values if not isinstance(value, int)]:
        raise ConfigError(f"column {column} has {wrong[0]!r}, but classes are numbers from 0, texts, or a ClassLabel")
    elif min(values) < 0:
        raise ConfigError(f"column {column} has {min(values)}, but classes are numbers from 0; is the split labeled?")
    names = {value: value if texts else named[value] for value in values} if named else {}
    for name in names.values() if known else ():
        if name not in known:
            raise ConfigError(f"column {column} has the class {name}, which is unknown; {did_you_mean(name, known)}")
    known = tuple(known or named or ())
    if not named and known and max(values) >= len(known):
        raise ConfigError(f"column {column} has class {max(values)}, but there are {len(known)}: {', '.join(known)}")
    numbers = {value: known.index(names[value]) if names else int(value) for value in values}
    return ClassLabels(known, len(known) or max(values) + 1, numbers | ({IGNORED: IGNORED} if tags else {}), several)


def _scanned(rows: Any, column: str, where: str, several: bool, *, collects: bool) -> tuple[set[int], set[Any]]:
    """Return the lengths of lists in a column, and its distinct values. Raises ConfigError for a row without one."""
    from pyarrow import compute

    number, lengths, values = 1, set[int](), set[Any]()
    for table in rows.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        array = table[column]
        if array.null_count:
            number += array.to_pylist().index(None)
            raise ConfigError(f"{where}, row {number:,} has no value in the column {column}; correct or remove it")
        number += len(array)
        if several:
            lengths.update(compute.list_value_length(array).unique().to_pylist())
            array = compute.list_flatten(array)
        if collects:
            values.update(array.unique().to_pylist())
    return lengths, values
