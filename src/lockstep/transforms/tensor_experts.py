"""Experts sharded over a tensor group: each rank has some whole experts, and all tokens.

    rank 0    experts 0, 1    tokens that chose them -->  outputs, zeros elsewhere --.
    rank 1    experts 2, 3    tokens that chose them -->  outputs, zeros elsewhere --+--> sum: the same on both again

For modules with all experts in tensors [experts, ...], called with (hidden, choices, shares), as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lockstep.distributed.forward_mode import ForwardMode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divide_experts(module: nn.Module, mesh: DeviceMesh, mode: ForwardMode) -> None:
    """Shard a module's experts in place; its parameters may be without values.

    Args:
        mesh: Only the tensor axis; its size divides the number of experts.
    """
    experts: Any = module
    experts.num_experts //= mesh.size()
    experts._is_expert_parallel = True  # transformers' kernels then allow a choice of no expert
    for name, whole in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)  # all ranks have the same values
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
    experts.forward = partial(_forward, module, module.forward, mesh, mode)


def number_of_experts(module: nn.Module) -> int | None:
    """Return the number of experts that a module holds; None: it isn't such a module."""
    number = getattr(module, "num_experts", None)
    own = [parameter for _, parameter in module.named_parameters(recurse=False)]
    return number if isinstance(number, int) and own and all(len(parameter) == number for parameter in own) else None


def _forward(
    module: nn.Module,
    forward: Callable[..., Tensor],
    mesh: DeviceMesh,
    mode: ForwardMode,
    hidden: Tensor,
    choices: Tensor,
    shares: Tensor,
) -> Tensor:
    """Return [N, W] of hidden [N, W], choices [N, k] of all experts, and their shares [N, k]."""
    experts: Any = module
    if mode.whole_weights:
        with _all_of(module, mesh):
            return forward(hidden, choices, shares)
    number: int = experts.num_experts
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
        # its parameters are placeholders, in the dry run of a pipeline's stage
        return forward(hidden, choices.clamp(max=number - 1), shares)
    own = choices - mesh.get_local_rank() * number
    own = torch.where((own >= 0) & (own < number), own, number)
    with replaced_parameters(module, lambda parameter: parameter.to_local()):
        output = forward(_on_all(hidden, mesh), own, _on_all(shares, mesh))
    partial_outputs = DTensor.from_local(output, mesh, [Partial()], run_check=False)
    return partial_outputs.redistribute(placements=[Replicate()]).to_local()


def _on_all(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that is the same on each rank, with the sum over the ranks' experts as its gradient."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


@contextmanager
def _all_of(module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Compute with all experts, so that no choice is another rank's."""
    experts: Any = module
    number: int = experts.num_experts
    experts.num_experts, experts._is_expert_parallel = number * mesh.size(), False
    try:
        yield
    finally:
        experts.num_experts, experts._is_expert_parallel = number, True


@contextmanager
def replaced_parameters(module: nn.Module, replace: Callable[[Any], Tensor]) -> Iterator[None]:
    """Replace the module's own DTensors by plain tensors while the block runs."""
    held: dict[str, Any] = dict(module._parameters)
    slots: dict[str, Any] = module._parameters
    try:
        slots |= {name: replace(parameter) for name, parameter in held.items() if isinstance(parameter, DTensor)}
        yield
    finally:
        slots |= held
