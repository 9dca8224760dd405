"""The entry of ranks that are fresh interpreters: pickled into a file in memory, which a rank inherits.

    entry --> values of tensors, functions and classes by name, or, of `__main__`, by value (cloudpickle) --> entry()

Multiprocessing's pickler would put tensors into memory that all ranks share: a step of one changed the others' weights.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, MutableMapping
from multiprocessing.reduction import DupFd, ForkingPickler
from types import SimpleNamespace
from typing import Any

from lockstep.core.errors import ConfigError

_MAX_REASON_LENGTH = 300  # characters
_REASONS = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)


class SentEntry:
    """An entry that is pickled when a process is started with it: only then locks may be."""

    def __init__(self, entry: Callable[[], int]) -> None:
        self._entry = entry
        self._file: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        self._file = os.fdopen(os.memfd_create("entry"), "w+b")
        try:
            _write(self._entry, self._file)
        except _REASONS as error:
            raise _unsendable(error) from error
        self._file.flush()
        return _ReceivedEntry, (DupFd(self._file.fileno()),)


class _ReceivedEntry:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __call__(self) -> int:
        import torch

        try:
            with os.fdopen(self._file.detach(), "rb") as file:
                file.seek(0)
                entry = torch.load(file, map_location="cpu", weights_only=False)
        except AttributeError as error:  # a class of an interactive `__main__`, without cloudpickle
            raise _unsendable(error) from error
        return entry()  # type: ignore[no-any-return]


def _write(entry: Callable[[], int], file: Any) -> None:
    import torch

    try:
        from cloudpickle import Pickler as ByValue
    except ImportError:
        ByValue = None
    if ByValue is None or "__file__" in vars(sys.modules["__main__"]):  # a script, which the ranks import
        try:
            return torch.save(entry, file, pickle_module=_pickle_module(pickle.Pickler, copyreg.dispatch_table))
        except _REASONS:
            if ByValue is None:
                raise
            file.seek(0)
            file.truncate()
    return torch.save(entry, file, pickle_module=_pickle_module(ByValue, ByValue.dispatch_table))


def _pickle_module(pickler: type[pickle.Pickler], table: MutableMapping[Any, Any]) -> Any:
    """Return a module for `torch.save`, whose pickler sends what multiprocessing does, and tensors' values."""
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    others = {kind: how for kind, how in reducers.items() if not how.__module__.startswith("torch.")}

    class Pickler(pickler):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.dispatch_table = ChainMap(others, table)

    return SimpleNamespace(__name__="pickle", Pickler=Pickler)


def _unsendable(error: Exception) -> ConfigError:
    return ConfigError(
        f"what the ranks need can't be sent to them: {str(error)[:_MAX_REASON_LENGTH]}. This process has threads or "
        "uses an accelerator, or launch.environment has a variable that is read when a process starts, so its ranks "
        "are fresh interpreters. Install cloudpickle, which sends lambdas and what a notebook's cells define, or "
        "define functions and classes at the top of a module. Locks, open files and connections can't be sent: open "
        "them in the ranks, such as in the dataset's first __getitem__"
    )
