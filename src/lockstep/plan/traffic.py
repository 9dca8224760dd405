"""How many bytes a rank sends in an update: of parameters that are gathered, and of gradients that are reduced.

                 gathered                reduced            in units of (N - 1) / N, as rings do it
    ddp             -                      2 G
    fsdp         M (2 P - P root)            G              P: bytes of all parameters, P root: of those in no block
    fsdp-grad-op M P                         G              G: bytes of all gradients
    zero1           P                      2 G              M: micro-batches of an update
    zero2           P                      2 M G
    zero3        2 M P                     M G

With rings a rank sends (N - 1) / N of what is gathered or scattered, and twice that of what is all-reduced, on N ranks
(Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", section 2). Where P = G
and M = 1, ddp's 2 G and the 3 G of fsdp and zero3 are those of Rajbhandari et al. 2020, "ZeRO: Memory optimizations
toward training trillion parameter models" (arXiv:1910.02054), section 7. Its 2 G of stages 1 and 2 would need gradients
to be scattered; DeepSpeed 0.19 all-reduces them (`use_multi_rank_bucket_allreduce`), which makes it 3 G.

zero3 is what a model of more than `stage3_max_live_parameters` (10^9 elements) sends: what is smaller stays gathered
from forward to backward, which saves up to M P. Votes and norms (a few numbers) and buffers are not in here, nor what a
pipeline hands from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes of a model on its way between ranks.

    Attributes:
        parameters: in the type that they are gathered in.
        gradients: in the type that they are reduced in.
        at_root: of the parameters, those in no block: gathered once, where those of blocks are gathered twice.
    """

    parameters: int
    gradients: int
    at_root: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank sends in an update, at most 1 byte off.

    Attributes:
        gathered: parameters.
        reduced: gradients.
    """

    gathered: float = 0.0
    reduced: float = 0.0

    @property
    def total(self) -> float:
        return self.gathered + self.reduced


@dataclass(frozen=True, slots=True)
class _Case:
    volume: Volume
    shards: int
    replicas: int
    micro_batches: int

    @property
    def cut(self) -> float:
        """What a rank sends of what is gathered or scattered among the shards."""
        return (self.shards - 1) / self.shards

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas


def traffic(strategy: str, volume: Volume, ranks: int, *, micro_batches: int = 1, replicas: int = 1) -> Traffic:
    """Args:
    strategy: a key of `plan.placement.DIVISIONS`.
    micro_batches: of an update, on each rank; gradients of ddp and fsdp are reduced once, in the last of them.
    replicas: of a hybrid; it divides `ranks`.
    """
    assert ranks % replicas == 0
    case = _Case(volume, ranks // replicas, replicas, micro_batches)
    return _SENT[strategy](case)


def _nothing(case: _Case) -> Traffic:
    return Traffic()


def _all_reduced(case: _Case) -> Traffic:
    return Traffic(reduced=2 * (case.ranks - 1) / case.ranks * case.volume.gradients)


def _full_shard(case: _Case) -> Traffic:
    volume = case.volume
    gathered = case.cut * case.micro_batches * (2 * volume.parameters - volume.at_root)
    return Traffic(gathered, _scattered(case))


def _grad_op(case: _Case) -> Traffic:
    return Traffic(case.cut * case.micro_batches * case.volume.parameters, _scattered(case))


def _scattered(case: _Case) -> float:
    """Among shards, and then each part among the replicas."""
    among_replicas = 2 * (case.replicas - 1) / case.replicas * case.volume.gradients / case.shards
    return case.cut * case.volume.gradients + among_replicas


def _zero1(case: _Case) -> Traffic:
    return Traffic(case.cut * case.volume.parameters, 2 * case.cut * case.volume.gradients)


def _zero2(case: _Case) -> Traffic:
    return Traffic(case.cut * case.volume.parameters, 2 * case.cut * case.micro_batches * case.volume.gradients)


def _zero3(case: _Case) -> Traffic:
    once = case.cut * case.micro_batches
    return Traffic(once * 2 * case.volume.parameters, once * case.volume.gradients)


_SENT: Mapping[str, Callable[[_Case], Traffic]] = {
    "single": _nothing,
    "dp": _nothing,
    "ddp": _all_reduced,
    "fsdp": _full_shard,
    "fsdp-grad-op": _grad_op,
    "fsdp-no-shard": _all_reduced,
    "fsdp-hybrid": _full_shard,
    "fsdp-hybrid-grad-op": _grad_op,
    "zero0": _all_reduced,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
}
