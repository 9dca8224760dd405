"""Ranks that connect ask the store a number of questions that doesn't grow with the number of their peers."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from kit.worlds import in_world

from lockstep.config.schema import Launch
from lockstep.distributed import process_group

METHODS = ("set", "get", "add", "check", "wait", "delete_key", "multi_get", "multi_set", "compare_set", "append")
asked: Counter[str] = Counter()


class Counting(dist.Store):
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store = store

    def has_extended_api(self) -> bool:
        return True


def _counted(name: str) -> Any:
    def method(self: Counting, *arguments: Any) -> Any:
        asked[name] += 1
        return getattr(self.store, name)(*arguments)

    return method


for each in METHODS:
    setattr(Counting, each, _counted(each))


@pytest.mark.parametrize(("set_by_user", "waits"), [(None, 0), ("0", 4)])
def test_gloo_asks_for_all_addresses_at_once(set_by_user: str | None, waits: int) -> None:
    for questions in in_world(4, _questions, set_by_user):
        assert questions.get("wait", 0) == waits, questions


def _questions(set_by_user: str | None) -> dict[str, int]:
    if set_by_user is None:
        os.environ.pop("GLOO_ENABLE_STORE_V2_API", None)
    else:
        os.environ["GLOO_ENABLE_STORE_V2_API"] = set_by_user
    store_of, kept = process_group._store, []  # torch keeps the store, and not what Python adds to it

    def counted(*arguments: Any) -> Any:
        kept.append(Counting(store_of(*arguments)))
        return kept[0]

    process_group._store = counted
    with process_group.joined(Launch(device="cpu"), grouped=True):
        return dict(asked)
