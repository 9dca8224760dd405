"""DeepSpeed ZeRO: each rank updates a stretch of all parameters, laid end to end; stage by stage it holds less else.

    parameters of a group    [ a a a a | b b b b b b | c c ]       one after the other, whatever their shapes
    rank 0 updates            a a a a   b b                        fp32 master values, moments (stage 1)
    rank 1 updates                          b b b b   c c          and gradients (stage 2), and parameters (stage 3)

                 backward        judged here                 update
    gradients --> averaged  -->  norm of this rank's part --> divided, then engine.step(), or forgotten

Stage 3 cuts every parameter by itself, so that each rank has a stretch of each. DeepSpeed reduces, keeps and updates;
it doesn't scale the loss, clip, follow a schedule, or skip an update: that is the session's, under every strategy.

What is used of DeepSpeed beyond its documented API is in this file alone; `tests/training/test_deepspeed.py` fails if
one of these names goes.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import FlatShard
from lockstep.sharding.buffers import SharedBuffers
from lockstep.sharding.deepspeed_order import DeepSpeedOrder
from lockstep.sharding.single import NO_WINDOW, SquaredNorm, gradients, trainable_parameters
from lockstep.sharding.state import (
    live_state,
    of_model,
    restore_state,
    whole_gradients,
    whole_weights,
)

if TYPE_CHECKING:
    from lockstep.core.protocols import Optimizer

_MODEL, _OPTIMIZER = "model.", "optimizer."


def engage(model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], device: torch.device) -> Any:
    """DeepSpeed's engine around the model, which is divided in place.

    Args:
        config: as `deepspeed.initialize` takes it.

    Raises:
        ConfigError: DeepSpeed is not installed, or can't do this with this config.
    """
    deepspeed = _import(device)
    _refuse(model)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed insists on it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=parameters,
                optimizer=optimizer,
                config=dict(config),
                dist_init_required=False,
            )
    except (
        AssertionError,
        ValueError,
        NotImplementedError,
        deepspeed.runtime.zero.utils.ZeRORuntimeException,
    ) as error:
        raise ConfigError(Problem("", "parallel.deepspeed", f"DeepSpeed refuses: {error}")) from error
    return engine


def _refuse(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            message = f"deepspeed keeps parameters in fp32, and {name} is {str(parameter.dtype).removeprefix('torch.')}"
            raise ConfigError(Problem("", "parallel.strategy", f"{message}; convert the model with .float()"))
        if parameter.dim() == 0:  # it sends parameters as bytes, and torch views no number as bytes
            message = f"deepspeed can't send a parameter of shape [] to other ranks, and {name} is one"
            raise ConfigError(
                Problem("", "parallel.strategy", f"{message}; give it the shape [1], or take fsdp or ddp")
            )


def _import(device: torch.device) -> Any:
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):  # DeepSpeed calls them by their old names
        warnings.filterwarnings("ignore", f".*{name}. is deprecated", FutureWarning)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # what matters is said by us
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled first
    except ImportError as error:
        raise ConfigError(
            Problem(
                "",
                "parallel.strategy",
                f"deepspeed is not installed ({error}); {pip_install('deepspeed')}",
            )
        ) from error
    return deepspeed


class ReplicatedByDeepSpeed:
    """Stage 0: every rank holds everything; DeepSpeed averages the gradients.

    Args:
        engine: of `engage`, with an optimizer that is never asked.
        optimizer: the one that updates.
    """

    norm_is_whole = True

    def __init__(self, engine: Any, model: nn.Module, optimizer: Optimizer, squared_norm: SquaredNorm) -> None:
        self.bare = self.module = model
        self.averages_over = dist.get_world_size()
        self._engine = engine
        self._optimizer = optimizer
        self._parameters = trainable_parameters(model)
        self._squared_norm = squared_norm
        self._buffers = SharedBuffers(model)
        self._reached = _Reached(model)

    def window(self, last: bool) -> AbstractContextManager[object]:
        self._engine.set_gradient_accumulation_boundary(last)
        self._buffers.before_forward(last)
        return NO_WINDOW

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        _backward(self._engine, loss, seed)

    def unreached(self) -> list[str]:
        return self._reached.lacking()

    def squared_norm(self) -> Tensor:
        return self._squared_norm(gradients(self._parameters))

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._reached.stop()
        self._optimizer.update(rate, divisor, keep)

    def synchronize(self) -> None:
        self._buffers.synchronize()

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(self.bare, wanted)

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_gradients(self.bare, wanted)

    def close(self) -> None:
        _let_go(self._engine)
        self._engine = None

    def state(self) -> TrainingState:
        return live_state(self.bare, self._optimizer)

    def restore(self, state: TrainingState) -> None:
        restore_state(self.bare, self._optimizer, state)


class DividedByDeepSpeed:
    """Stages 1, 2 and 3. An update that is discarded makes the host of a GPU wait, and so does one that is kept:
    DeepSpeed's step is the host's decision.

    Args:
        engine: of `engage`.
        entries: what the optimizer keeps of each element (`exp_avg`, ...), zero at first.
        counts: it also counts updates (`step`).
        device: where ranks compute.
        before_unused: as `sharding.state.unused_parameters` has it.
    """

    norm_is_whole = False

    def __init__(
        self,
        engine: Any,
        model: nn.Module,
        squared_norm: SquaredNorm,
        entries: Sequence[str],
        *,
        counts: bool,
        device: torch.device,
        before_unused: str,
    ) -> None:
        self.bare = self.module = model
        self.averages_over = dist.get_world_size()
        self._engine = engine
        self._zero = engine.optimizer
        self._torch: torch.optim.Optimizer = engine.optimizer.optimizer
        self._stage = int(engine.zero_optimization_stage())
        self._squared_norm = squared_norm
        self._entries = tuple(entries)
        self._counts = counts
        self._buffers = SharedBuffers(model)
        self._flats = _flats(self._zero, self._stage)
        self._parts = {part.name: part for part in _parts(self._zero, self._stage, model, self._flats)}
        self._reached = _Reached(model)
        self._order = DeepSpeedOrder(self._zero, self._stage, model, device, before_unused)
        self._make_state()

    def _make_state(self) -> None:
        """At once, so that it can be restored before a first update, and saved."""
        flats = {id(flat) for flat in self._flats}
        for whole in [one for one in self._torch.state if id(one) not in flats]:
            del self._torch.state[whole]  # an optimizer may have made it for the parameters that were divided since
        for flat in self._flats:
            state = self._torch.state[flat]
            for entry in self._entries:
                state.setdefault(entry, torch.zeros_like(flat, requires_grad=False))
            if self._counts:
                state.setdefault("step", torch.zeros((), device=flat.device))

    # --- an update ------------------------------------------------------------------------------------------------

    def window(self, last: bool) -> AbstractContextManager[object]:
        self._engine.set_gradient_accumulation_boundary(last)
        self._zero.clear_backward_seen_flag()  # a forward begins: as the engine's own does
        self._buffers.before_forward(last)
        self._order.begin(last=last)
        return NO_WINDOW

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        _backward(self._engine, loss, seed)
        self._order.end()

    def unreached(self) -> list[str]:
        return self._reached.lacking()

    def squared_norm(self) -> Tensor:
        return self._squared_norm(self._reduced())

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._reached.stop()
        if bool(keep):
            self._step(rate, divisor)
        else:
            self._forget()
        if self._stage == 3:  # else a parameter that the next update doesn't use has this one's gradient again
            self._zero.grad_partitions_flat_buffer.zero_()

    def _step(self, rate: float, divisor: float | Tensor) -> None:
        reduced = self._reduced()
        if isinstance(divisor, Tensor) or divisor != 1.0:
            torch._foreach_div_(reduced, divisor.to(reduced[0]) if isinstance(divisor, Tensor) else divisor)
        for group in self._torch.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._engine.step()
        if not self._engine.was_step_applied():
            raise RunFailed("DeepSpeed has left out an update that all ranks had judged to be good")

    def _forget(self) -> None:
        """The gradients, and that there was a backward. `engine.micro_steps` counts steps that were made: none was."""
        zero = self._zero
        if self._stage == 3:
            zero._pre_step()
            zero._overflow_clean_up(1.0)
            return
        zero.micro_step_id = -1
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = None
            zero.all_grad_tensors[group] = None

    def _reduced(self) -> list[Tensor]:
        """This rank's part of the gradient; what fills up a partition is zero."""
        return [part for group in range(len(self._flats)) for part in self._reduced_of(group)]

    def _reduced_of(self, group: int) -> list[Tensor]:
        if _offloads(self._zero, self._stage):
            return [cast("Tensor", self._flats[group].grad)]
        return list(self._zero.averaged_gradients[group])

    # --- whole ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        self._buffers.synchronize()

    @torch.no_grad()
    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        if self._stage < 3:
            yield from whole_weights(self.bare, wanted)
            return
        for name, value in of_model(self.bare)[0].items():
            part = self._parts.get(name)
            found = part.gathered(part.memory) if part is not None else value
            if wanted:
                yield name, found.detach().cpu()

    @torch.no_grad()
    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        flat = [torch.cat([one.reshape(-1) for one in self._reduced_of(group)]) for group in range(len(self._flats))]
        for name, part in self._parts.items():
            if part.group is None:
                continue
            found = part.gathered(part.section(flat[part.group]))
            if wanted:
                yield name, found.cpu()

    def close(self) -> None:
        _let_go(self._engine)
        self._engine = self._zero = None

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self) -> TrainingState:
        found: dict[str, Any] = {}
        tensors, tied = of_model(self.bare)
        for name, value in tensors.items():
            part = self._parts.get(name)
            found[_MODEL + name] = part.shown(part.memory) if part is not None and self._stage == 3 else value
        for name, part in self._parts.items():
            if part.group is None:
                continue
            state = self._torch.state[self._flats[part.group]]
            for entry in self._entries:
                found[f"{_OPTIMIZER}{entry}.{name}"] = part.shown(part.section(state[entry]))
            if self._counts:
                found[f"{_OPTIMIZER}step.{name}"] = state["step"]
        parameters = {name for name, _ in self.bare.named_parameters()}
        changing = frozenset(_MODEL + name for name in tensors if name not in parameters)
        return TrainingState(found, {"optimizer": {}, "groups": [], "tied": tied}, changing)

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        saved = _Saved(state, self._entries, counts=self._counts)
        for name, value in of_model(self.bare)[0].items():
            part = self._parts.get(name)
            if part is None or self._stage < 3:
                value.copy_(saved.tensor(_MODEL + name, value.shape))
            else:
                part.memory.copy_(part.cut(saved.tensor(_MODEL + name, part.shape, part.memory.shape)))
        self._restore_optimizer(saved)
        if self._stage == 3:
            self._hand_out_masters()
        else:
            for part in self._parts.values():
                part.memory.copy_(part.cut(part.parameter.detach()))

    def _restore_optimizer(self, saved: _Saved) -> None:
        steps: dict[int, float] = {}
        for name, part in self._parts.items():
            if part.group is None:
                continue
            state = self._torch.state[self._flats[part.group]]
            for entry in self._entries:
                value = saved.entry(entry, name, part)
                part.section(state[entry]).copy_(part.cut(value) if value is not None else torch.zeros(()))
            if self._counts:
                step = saved.step(name)
                if steps.setdefault(part.group, step) != step:
                    raise RunFailed(
                        f"{name} has had {step:g} updates, and others beside it {steps[part.group]:g}: "
                        f"DeepSpeed counts for all parameters of a group together; go on under ddp or fsdp"
                    )
        for group, step in steps.items():
            self._torch.state[self._flats[group]]["step"].fill_(step)

    def _hand_out_masters(self) -> None:
        """Stage 3: what is computed with follows what is updated, as after a step."""
        zero = self._zero
        zero._partition_all_parameters()
        for group in range(len(self._flats)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


class _Part:
    """Of a parameter, the stretch of elements that this rank holds.

    Attributes:
        group: the flat memory that it lies in; None: it is frozen.
        memory: fp32 values, those that are updated.
        start: its first element's place in the parameter.
        at: its first element's place in the flat memory.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        shape: Sequence[int],
        group: int | None,
        memory: Tensor,
        start: int,
        at: int,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = torch.Size(shape)
        self.group = group
        self.memory = memory
        self.start = start
        self.at = at

    def shown(self, memory: Tensor) -> FlatShard:
        return FlatShard(memory, self.start, self.shape)

    def section(self, flat: Tensor) -> Tensor:
        """What belongs to it of another flat memory like its own."""
        return flat.detach().reshape(-1)[self.at : self.at + self.memory.numel()]

    def cut(self, value: Tensor) -> Tensor:
        """Its elements of a whole tensor; one that is no more than these is returned."""
        return self.shown(self.memory).of(value) if value.shape == self.shape else value

    def gathered(self, memory: Tensor) -> Tensor:
        """The whole of which each rank has its stretch, to the bit: bits are added to zeros."""
        whole = torch.zeros(self.shape.numel(), dtype=memory.dtype, device=memory.device)
        whole[self.start : self.start + memory.numel()] = memory
        dist.all_reduce(whole.view(torch.int32))
        return whole.view(self.shape)


class _Saved:
    """What is restored, checked."""

    def __init__(self, state: TrainingState, entries: Sequence[str], *, counts: bool) -> None:
        self._tensors = state.tensors
        self._numbers = state.values["optimizer"]

    def tensor(self, key: str, *shapes: torch.Size) -> Tensor:
        if key not in self._tensors:
            raise RunFailed(f"the saved state has no {key.removeprefix(_MODEL)}")
        found = cast("Tensor", self._tensors[key])
        if found.shape not in shapes:
            name = key.removeprefix(_MODEL)
            raise RunFailed(f"{name} is {list(shapes[0])} here, but {list(found.shape)} in the saved state")
        return found

    def entry(self, entry: str, name: str, part: _Part) -> Tensor | None:
        """None if the parameter has never been updated."""
        key = f"{_OPTIMIZER}{entry}.{name}"
        if key not in self._tensors:
            if any(other.startswith(_OPTIMIZER) and other.endswith(f".{name}") for other in self._tensors):
                raise RunFailed(f"the saved optimizer state of {name} has no {entry}: it is another optimizer's")
            return None
        return self.tensor(key, part.shape, part.memory.shape)

    def step(self, name: str) -> float:
        if f"{_OPTIMIZER}step.{name}" in self._tensors:
            return float(self._tensors[f"{_OPTIMIZER}step.{name}"])
        return float(self._numbers.get(name, {}).get("step", 0.0))


class _Reached:
    """Which parameters a gradient has reached in the first update: afterwards nothing is watched. DeepSpeed takes
    gradients away, and gives zeros to parameters that have none."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(one): name for name, one in model.named_parameters() if one.requires_grad}
        self._seen: set[int] = set()
        trained = [cast("Any", one) for one in model.parameters() if one.requires_grad]
        self._hooks = [
            one.register_post_accumulate_grad_hook(lambda parameter: self._seen.add(id(parameter))) for one in trained
        ]

    def lacking(self) -> list[str]:
        return [name for key, name in self._names.items() if key not in self._seen]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


# --- where DeepSpeed has it ---------------------------------------------------------------------------------------


def _flats(zero: Any, stage: int) -> list[Tensor]:
    """What this rank updates: one flat tensor a group of parameters."""
    return list(zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)


def _offloads(zero: Any, stage: int) -> bool:
    return bool(zero.offload_optimizer if stage == 3 else zero.cpu_offload)


def _parts(zero: Any, stage: int, model: nn.Module, flats: Sequence[Tensor]) -> Iterator[_Part]:
    for name, parameter in model.named_parameters():
        if stage == 3:
            yield _part_of_parameter(zero, name, parameter, flats)
        elif parameter.requires_grad:
            yield _part_of_group(zero, name, parameter, flats)


def _part_of_parameter(zero: Any, name: str, parameter: Any, flats: Sequence[Tensor]) -> _Part:
    """Stage 3: all ranks have as many elements, and the last ones perhaps some that are none of the parameter's."""
    length = parameter.partition_numel()
    start = min(dist.get_rank() * length, parameter.ds_numel)
    mine = min(length, parameter.ds_numel - start)
    if not parameter.requires_grad:
        return _Part(name, parameter, parameter.ds_shape, None, parameter.ds_tensor.detach()[:mine], start, 0)
    group, at, _ = zero.grad_position[zero.get_param_id(parameter)]
    return _Part(name, parameter, parameter.ds_shape, group, flats[group].detach()[at : at + mine], start, at)


def _part_of_group(zero: Any, name: str, parameter: Any, flats: Sequence[Tensor]) -> _Part:
    """Stages 1 and 2: a parameter may lie in one partition, in several, or in none of this rank's."""
    group = next(place for place, group in enumerate(zero.bit16_groups) if any(one is parameter for one in group))
    mapping = parameter._hp_mapping
    if mapping is None:
        return _Part(name, parameter, parameter.shape, group, flats[group].detach()[:0], 0, 0)
    at, start = mapping.hp_fragment_address.start, mapping.lp_fragment_address.start
    memory = flats[group].detach()[at : at + mapping.hp_fragment_address.numel]
    return _Part(name, parameter, parameter.shape, group, memory, start, at)


def _backward(engine: Any, loss: Tensor, seed: Tensor) -> None:
    """The model was called without the engine, whose forward would turn autocast off and has a hook on its outputs, of
    whatever type, that begins a backward: here it is on the loss."""
    scaled: Any = loss * seed
    scaled.register_hook(lambda grad: engine._backward_prologue())
    engine.backward(scaled, scale_wrt_gas=False)


def _let_go(engine: Any) -> None:
    """DeepSpeed remembers process groups, which the next session's would not be."""
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    engine.destroy()
    groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None
