"""What a piece of code holds in tensors at its peak, and what it sends between ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracked(TorchDispatchMode):
    """Attributes:
    peak: most bytes at once in tensors that were made in the block.
    sent: bytes of the larger side of each collective, by its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.sent: Counter[str] = Counter()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            self.sent[name] += max((sum(map(_bytes, tree_leaves(each))) for each in args), default=0)
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = getattr(leaf, "_local_tensor", leaf).untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self._now())
        return result

    def _now(self) -> int:
        """A storage's size is read each time: FSDP frees by resizing."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


def _bytes(value: object) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0
