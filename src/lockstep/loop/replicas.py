"""Finds which ranks hold other copies of the same training state than the others.

    each rank    parts: what it holds whole, what it holds a shard of   --> an id of each part: names, shapes, place
    all ranks    ids gathered                                           --> which ranks hold the same part
    each rank    the bits of such a part, summed on its device          --> one number for each tensor
    all ranks    numbers gathered, hashed                               --> alike? else: which ranks are in the minority

Buffers that a forward changes differ by design, and what only one rank holds has nothing to be compared with: under
`fsdp` and ZeRO 3 without replicas all. Ranks of one matrix (`parallel.tensor`) are not compared with each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.checkpoint.hashing import hash_bytes
from lockstep.core.errors import ReplicasDiffer, RunFailed, named_ranks
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import listed
from lockstep.distributed.shard_boxes import FlatShard, is_sharded, local_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Axis
    from lockstep.core.records import TrainingState
    from lockstep.loop.components import Components

_NAMED = 3
CORRUPTED = "the cause is memory or a device that corrupts data, or code that changes parameters on one rank"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between copies of a part as text, and the ranks of the minority, empty without a majority."""

    text: str
    ranks: tuple[int, ...] = ()


class StateNotFinite(RunFailed):
    """The training state has a NaN or an infinity: it is not saved, and training it further is in vain."""

    kind = FailureKind.BAD_NUMBERS


def refuse_bad_state(components: Components, step: int, since: int) -> None:
    """Look for the cause of an update with a loss that isn't finite in the state, not the samples; all ranks together.

    Args:
        since: The last update that was kept.

    Raises:
        ReplicasDiffer: Copies that ranks hold of the same part differ.
        StateNotFinite: A trained parameter, or its optimizer state, isn't finite.
    """
    fault, held = difference(components), components.sharding.state
    if fault is not None:
        raise ReplicasDiffer(f"update {step:,} isn't finite, and {fault.text}; {CORRUPTED}", fault.ranks)
    names = cast("list[str | None]", components.world.axis.gather(held.not_finite(held.live_state())))
    refuse_not_finite(next(filter(None, names), None), f"since update {since:,}")


def refuse_not_finite(name: str | None, when: str) -> None:
    """Raise StateNotFinite if there is a tensor that isn't finite."""
    if name is not None:
        raise StateNotFinite(
            f"{name} isn't finite {when}, and isn't saved: the optimizer's step has made it so (an eps of 0, a rate "
            "that is too large), or memory that corrupts data; the run continues from the newest checkpoint before"
        )


def difference(components: Components) -> Difference | None:
    """Return how the ranks' copies of the state differ; None if they don't. All ranks together."""
    live = components.sharding.state.live_state()
    return difference_in(live, components.world.axis, components.position.coordinates["tensor"])


@torch.no_grad()
def difference_in(state: TrainingState, axis: Axis, tensor_rank: int) -> Difference | None:
    """Return the first difference between copies that ranks hold of the same part; None: all copies are alike."""
    parts = _parts(state)
    own_ids = [_id(part, tensor_rank) for part in parts]
    ids = cast("list[list[str]]", axis.gather(own_ids))
    holders = Counter(each for of_rank in ids for each in of_rank)
    if all(number == 1 for number in holders.values()):
        return None
    shared = {name: part for name, part in zip(own_ids, parts, strict=True) if holders[name] > 1}
    sums = {name: bit_sums(part.values()) for name, part in shared.items()}
    hashes = {name: hash_bytes(numbers.numpy().tobytes()) for name, numbers in sums.items()}
    everywhere = cast("list[dict[str, str]]", axis.gather(hashes))
    by_part: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, of_rank in enumerate(everywhere):
        for name, number in of_rank.items():
            by_part[name][rank] = number
    differing = [name for name, copies in by_part.items() if len(set(copies.values())) > 1]
    if not differing:
        return None
    tensors = {name: dict(zip(shared[name], sums[name].tolist(), strict=True)) for name in differing if name in shared}
    numbers = cast("list[dict[str, dict[str, int]]]", axis.gather(tensors))
    first = differing[0]
    return _named(by_part[first], {rank: numbers[rank][first] for rank in by_part[first]})


def _parts(state: TrainingState) -> list[dict[str, Tensor]]:
    whole: dict[str, Tensor] = {}
    sharded: dict[str, Tensor] = {}
    for name in sorted(state.tensors.keys() - state.changes_in_forward):
        tensor = state.tensors[name]
        if not isinstance(tensor, FlatShard):  # each rank holds another range of it
            (sharded if is_sharded(tensor) else whole)[name] = tensor
    return [part for part in (whole, sharded) if part]


def _id(part: Mapping[str, Tensor], tensor_rank: int) -> str:
    places = [
        (name, [*tensor.shape], [([*chunk.offsets], [*chunk.sizes]) for chunk in _chunks(tensor)])
        for name, tensor in part.items()
    ]
    return hash_bytes(repr((tensor_rank, places)).encode())


def _chunks(tensor: Any) -> list[Any]:
    return list(tensor.__create_chunk_list__()) if is_sharded(tensor) else []


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of each tensor's bits as integers, on the host, which waits once: int64 [tensors]."""
    sums = []
    for tensor in tensors:
        local = local_tensor(tensor).contiguous().view(-1)
        if local.is_complex():
            local = torch.view_as_real(local).view(-1)
        bits = local.view(_INTEGERS[local.element_size()])
        sums.append(bits.sum(dtype=bits.dtype if bits.element_size() > 2 else torch.int64).long())  # without a copy
    device = next((number.device for number in sums if number.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([number.to(device) for number in sums]).cpu()


def _named(copies: Mapping[int, str], numbers: Mapping[int, Mapping[str, int]]) -> Difference:
    """Return the difference between copies, given the hash of each rank's, and the numbers of its tensors."""
    by_copy: dict[str, list[int]] = defaultdict(list)
    for rank, copy in copies.items():
        by_copy[copy].append(rank)
    largest = max(by_copy.values(), key=len)
    names = [name for name in numbers[largest[0]] if len({of_rank[name] for of_rank in numbers.values()}) > 1]
    what = f"the training state ({listed(names, _NAMED)})"
    if 2 * len(largest) > len(copies):
        wrong = sorted(set(copies) - set(largest))
        return Difference(
            f"{named_ranks(wrong)} hold{'s' * (len(wrong) == 1)} another copy of {what} than the other "
            f"{len(largest)} ranks with this part",
            tuple(wrong),
        )
    return Difference(
        f"{named_ranks(sorted(copies))} hold different copies of {what}, and no majority shows which is right"
    )
