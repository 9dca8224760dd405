"""A name for each round of ranks, so that none reads keys of an earlier one.

    rank 3   ask/3 = a token of its own          --> rank 0
             answer/TOKEN = the round's name     <--           once all have asked
             joined/NAME/3                       -->
             open/NAME                           <--           once all have joined

torchrun keeps one store over restarts, with the keys of ranks that have ended, and nothing in a rank's environment
names the round. So rank 0 makes up a name and answers tokens that no earlier process knew. A rank that was killed while
it asked leaves a token: its successor replaces it, and rank 0 answers again until all have joined.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from lockstep.core.errors import named_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SHORTEST, _LONGEST = 0.001, 0.2  # seconds between two looks into the store
_ASK_AGAIN = 10.0  # seconds until a rank that was answered, perhaps by a rank 0 that has ended, asks again


class RoundTimeout(RuntimeError):
    """Not all ranks have come."""


def next_round(store: Store, rank: int, size: int, limit: float) -> str:
    """Return the name of this round, the same on all ranks. All ranks together.

    Args:
        limit: Seconds to wait for other ranks.

    Raises:
        RoundTimeout: Ranks have not come within the limit.
    """
    deadline = time.monotonic() + limit
    return _hand_out(store, range(1, size), deadline) if rank == 0 else _ask(store, rank, deadline)


def poll(condition: Callable[[], bool], until: float, longest: float = _LONGEST, shortest: float = _SHORTEST) -> bool:
    """Return whether a condition became true before `until` (of `time.monotonic`).

    The store's own `wait` prints a warning on timeout, and blocks torch's watchdog meanwhile.
    """
    pause = shortest
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(1.2 * pause, longest)
    return True


def _hand_out(store: Store, others: Sequence[int], deadline: float) -> str:
    name = uuid.uuid4().hex
    if others:
        requests, joined = [f"ask/{rank}" for rank in others], [f"joined/{name}/{rank}" for rank in others]
        answered: set[bytes] = set()

        def all_have_joined() -> bool:
            if not store.check(requests):
                return False
            new = [token for token in store.multi_get(requests) if token not in answered]
            if new:
                cast("Any", store).multi_set([_answer(token.decode()) for token in new], [name] * len(new))
                answered.update(new)
            return bool(store.check(joined))

        if not poll(all_have_joined, deadline):
            missing = [rank for rank, key in zip(others, joined, strict=True) if not store.check([key])]
            raise RoundTimeout(f"{named_ranks(missing)} did not come")
    store.set(f"open/{name}", "")
    return name


def _ask(store: Store, rank: int, deadline: float) -> str:
    names: list[str] = []

    def open_round() -> str | None:
        return next((name for name in names if store.check([f"open/{name}"])), None)

    while time.monotonic() < deadline:
        token = uuid.uuid4().hex
        store.set(f"ask/{rank}", token)
        if not poll(lambda: open_round() is not None or store.check([_answer(token)]), deadline):  # noqa: B023
            break
        if open_round() is None:
            names.append(store.get(_answer(token)).decode())
            store.set(f"joined/{names[-1]}/{rank}", "")
            poll(lambda: open_round() is not None, min(deadline, time.monotonic() + _ASK_AGAIN))
        if (name := open_round()) is not None:
            store.delete_key(f"ask/{rank}")
            return name
    raise RoundTimeout("rank 0 did not answer" if not names else "not all other ranks came")


def _answer(token: str) -> str:
    return f"answer/{token}"
