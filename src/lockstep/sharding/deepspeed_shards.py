"""DeepSpeed's optimizer state by the names of parameters.

parameter b [2, 3]                  0 1 2 3 4 5
this rank's shard of it                 2 3 4 5         elements 2 to 6 of b
its group's flat memory             a a b b b b c       where masters and moments of these elements lie
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.errors import RunFailed
from lockstep.core.protocols import Optimizer
from lockstep.distributed.shard_boxes import FlatShard


class ZeroShard:
    """The range `flat` of one parameter's elements, as fp32 values; `group` of None: the parameter is frozen."""

    def __init__(self, parameter: nn.Parameter, flat: FlatShard, group: int | None, offset: int) -> None:
        self.parameter = parameter
        self.flat = flat
        self.group = group
        self._offset = offset

    def section(self, flat: Tensor) -> Tensor:
        """Return its section of a flat memory that is laid out like its own."""
        return flat.detach().reshape(-1)[self._offset : self._offset + self.flat.elements]

    def as_shard(self, entry: str, value: Any) -> Any:
        """Return optimizer state as a shard of the whole tensor's; state that isn't kept for each element unchanged."""
        if not value.ndim:
            return value
        return FlatShard(value, self.flat.start, self.flat.shape, self.flat.device, self.flat.length)

    def as_local(self, entry: str, value: Tensor) -> Tensor:
        """Return its elements of a whole tensor; other tensors unchanged."""
        return self.flat.of(value) if value.shape == self.flat.shape else value


class ZeroOptimizer(Optimizer):
    """The optimizer inside DeepSpeed's engine of stage 1, 2 or 3, with state by the names of parameters.

    Args:
        entries, counts: See `optim.optimizers.Elementwise`.
        in_bf16: Whether the forward's parameters are bf16; the state has the fp32 values that are updated.

    Attributes:
        flats: The values that this rank updates: one flat tensor for each group of parameters.
        shards: This rank's shards by the names of parameters.
    """

    def __init__(
        self, engine: Any, model: nn.Module, entries: Sequence[str], *, counts: bool, in_bf16: bool = False
    ) -> None:
        self.stage = int(engine.zero_optimization_stage())
        self._zero = engine.optimizer
        self._torch: torch.optim.Optimizer = engine.optimizer.optimizer
        self._entries = tuple(entries)
        self._counts = counts
        self._in_bf16 = in_bf16
        zero = self._zero
        flats = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        self.flats = list(flats)
        self.shards = dict(self._shards(model))
        self._make_state()

    @property
    def groups(self) -> list[dict[str, object]]:
        """torch's parameter groups."""
        return self._torch.param_groups

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """Never called: DeepSpeed's engine updates."""
        raise AssertionError("DeepSpeed's engine updates")

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of the averaged gradient; it is zero at a partition's padding."""
        return [part for group in range(len(self.flats)) for part in self.gradients_of(group)]

    def gradients_of(self, group: int) -> list[Tensor]:
        """Return this rank's part of one group's averaged gradient."""
        zero = self._zero
        if zero.offload_optimizer if self.stage == 3 else zero.cpu_offload:
            if self.stage < 3:
                zero._wait_for_offload_copies()  # stage 3 has waited in the backward
            return [cast("Tensor", self.flats[group].grad)]
        return list(zero.averaged_gradients[group])

    def state_dict(self) -> dict[str, object]:
        """Return the state by the names of parameters. Settings are in the config, not in groups."""
        parameters: dict[str, dict[str, Any]] = {}
        for name, shard in self.shards.items():
            if shard.group is not None:
                state = self._torch.state[self.flats[shard.group]]
                parameters[name] = {entry: shard.section(state[entry]) for entry in self._entries}
                if self._counts:
                    parameters[name]["step"] = state["step"]
        return {"parameters": parameters, "groups": []}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Set the state by the names of parameters; a parameter without state has never been updated.

        Raises:
            RunFailed: It is another optimizer's, or parameters of one group have had different numbers of updates.
        """
        saved = cast("dict[str, dict[str, Any]]", state["parameters"])
        steps: dict[int, float] = {}
        for name, shard in self.shards.items():
            if shard.group is None:
                continue
            entries = saved.get(name, {})
            of_group = self._torch.state[self.flats[shard.group]]
            for entry in self._entries:
                shard.section(of_group[entry]).copy_(_entry(entries, entry, name, shard))
            if self._counts:
                step = float(entries.get("step", 0.0))
                if steps.setdefault(shard.group, step) != step:
                    raise RunFailed(
                        f"{name} has had {step:g} updates, and others beside it {steps[shard.group]:g}: DeepSpeed "
                        "counts for all parameters of a group together; resume under ddp or fsdp"
                    )
        for group, step in steps.items():
            self._torch.state[self.flats[group]]["step"].fill_(step)

    @torch.no_grad()
    def copy_parameters(self) -> None:
        """Make the parameters of the forward and the fp32 masters the same, after either was set."""
        if self.stage < 3 and self._in_bf16:
            self._zero.update_lp_params()
            return
        if self.stage < 3:
            for shard in self.shards.values():
                shard.flat.memory.copy_(shard.flat.of(shard.parameter.detach()))
            return
        zero = self._zero
        zero._partition_all_parameters()
        for group in range(len(self.flats)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def held(self) -> dict[str, list[Tensor]]:
        """Return what DeepSpeed holds between updates beside the state, by the categories of `lockstep plan`."""
        if self.stage < 3:
            return {"optimizer": self.flats}
        zero = self._zero
        return {
            "optimizer": self.flats,
            "parameters": [cast("Any", shard.parameter).ds_tensor for shard in self.shards.values()],
            "gradients": [zero.grad_partitions_flat_buffer],
            "communication": [bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None],
        }

    def _make_state(self) -> None:
        """Make the state at once, so that it can be restored before a first update, and saved."""
        for flat in self.flats:
            state = self._torch.state[flat]
            for entry in self._entries:
                state.setdefault(entry, torch.zeros_like(flat, requires_grad=False))
            if self._counts:
                state.setdefault("step", torch.zeros((), device=flat.device))

    def _shards(self, model: nn.Module) -> Iterator[tuple[str, ZeroShard]]:
        for name, parameter in model.named_parameters():
            if self.stage == 3:
                yield name, self._shard_of_parameter(parameter)
            elif parameter.requires_grad:
                yield name, self._shard_of_group(parameter)

    def _shard_of_parameter(self, parameter: Any) -> ZeroShard:
        """Return a shard of stage 3: all ranks have the same number of elements, the last ones perhaps padding."""
        length = parameter.partition_numel()
        start = min(dist.get_rank() * length, parameter.ds_numel)
        own = min(length, parameter.ds_numel - start)
        if not parameter.requires_grad:
            frozen = FlatShard(parameter.ds_tensor.detach()[:own], start, parameter.ds_shape, parameter.device, length)
            return ZeroShard(parameter, frozen, None, 0)
        group, offset, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
        memory = self.flats[group].detach()[offset : offset + own]
        flat = FlatShard(memory, start, parameter.ds_shape, parameter.device, length)
        return ZeroShard(parameter, flat, group, offset)

    def _shard_of_group(self, parameter: Any) -> ZeroShard:
        """Return a shard of stages 1 and 2: a parameter may be in one partition or several, or not in this rank's."""
        groups = enumerate(self._zero.bit16_groups)
        group = next(number for number, members in groups if any(member is parameter for member in members))
        mapping = parameter._hp_mapping
        if mapping is None:
            nothing = FlatShard(self.flats[group].detach()[:0], 0, parameter.shape, parameter.device)
            return ZeroShard(parameter, nothing, group, 0)
        offset, start = mapping.hp_fragment_address.start, mapping.lp_fragment_address.start
        memory = self.flats[group].detach()[offset : offset + mapping.hp_fragment_address.numel]
        return ZeroShard(parameter, FlatShard(memory, start, parameter.shape, parameter.device), group, offset)


def _entry(entries: dict[str, Any], entry: str, name: str, shard: ZeroShard) -> Tensor:
    if entry not in entries:
        if any(isinstance(value, Tensor) for value in entries.values()):
            raise RunFailed(f"the saved optimizer state of {name} has no {entry}: it is another optimizer's")
        return torch.zeros(())
    value = cast("Tensor", entries[entry])
    if value.shape != (shard.flat.elements,):
        key = f"optimizer.{entry}.{name}"
        raise RunFailed(f"{key} is {list(shard.flat.shape)} here, but {list(value.shape)} in the saved state")
    return value


class ReachedParameters:
    """The parameters that a gradient has reached in the first update.

    `.grad` doesn't show them: DeepSpeed removes gradients, and uses zeros for parameters that have none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._seen: set[int] = set()
        self._hooks = [
            cast("Any", parameter).register_post_accumulate_grad_hook(lambda reached: self._seen.add(id(reached)))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def missing(self) -> list[str]:
        """Return the names of the parameters that no gradient has reached."""
        return [name for key, name in self._names.items() if key not in self._seen]

    def stop(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
