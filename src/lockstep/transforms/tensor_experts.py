"""Experts divided over a tensor group: each rank has some whole ones, and all tokens.

    rank 0    experts 0, 1    tokens that chose them -->  outcome, zeros elsewhere --.
    rank 1    experts 2, 3    tokens that chose them -->  outcome, zeros elsewhere --+--> sum: the same on both again

For modules that hold all experts in tensors [experts, ...], and are called with (hidden, choices, shares), as those of
the transformers library are. (Lepikhin et al. 2020, GShard, arXiv:2006.16668, sends tokens to their experts; here they
are at hand everywhere, as what other matrices of the group take is.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lockstep.transforms.undivided import Undivided

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divide_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """In place; its parameters may be without values.

    Args:
        mesh: of the tensor axis alone, whose size divides the experts.
    """
    experts: Any = module
    experts.num_experts //= mesh.size()
    experts._is_expert_parallel = True  # what transformers' kernels ask: a choice may be none of theirs
    for name, whole in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)  # all ranks have the same values
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
    experts.forward = partial(_forward, module, module.forward, mesh)


def number_of_experts(module: nn.Module) -> int | None:
    """None: it isn't such a module."""
    number = getattr(module, "num_experts", None)
    own = [parameter for _, parameter in module.named_parameters(recurse=False)]
    return number if isinstance(number, int) and own and all(len(one) == number for one in own) else None


def _forward(
    module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, hidden: Tensor, choices: Tensor, shares: Tensor
) -> Tensor:
    """hidden [N, W], choices [N, k] of all experts, their shares [N, k] -> [N, W]."""
    experts: Any = module
    if Undivided.now:
        with _all_of(module, mesh):
            return forward(hidden, choices, shares)
    number: int = experts.num_experts
    if not any(isinstance(one, DTensor) for one in module.parameters(recurse=False)):
        return forward(hidden, choices.clamp(max=number - 1), shares)  # stand-ins: a pipeline asks for shapes
    own = choices - mesh.get_local_rank() * number
    own = torch.where((own >= 0) & (own < number), own, number)
    with _parts_of(module):
        outcome = forward(_on_all(hidden, mesh), own, _on_all(shares, mesh))
    summands = DTensor.from_local(outcome, mesh, [Partial()], run_check=False)
    return summands.redistribute(placements=[Replicate()]).to_local()


def _on_all(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same on each rank; its gradient is the sum of what the ranks' experts say."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


@contextmanager
def _all_of(module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """No choice is another rank's."""
    experts: Any = module
    number: int = experts.num_experts
    experts.num_experts, experts._is_expert_parallel = number * mesh.size(), False
    try:
        yield
    finally:
        experts.num_experts, experts._is_expert_parallel = number, True


@contextmanager
def _parts_of(module: nn.Module) -> Iterator[None]:
    """The module's parameters are this rank's parts, as plain tensors."""
    held: dict[str, Any] = dict(module._parameters)
    slots: dict[str, Any] = module._parameters
    try:
        slots |= {name: one.to_local() for name, one in held.items() if one is not None}
        yield
    finally:
        slots |= held
