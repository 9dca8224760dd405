"""DeepSpeed ZeRO: each rank updates a range of the flattened parameters; higher stages hold less of the rest.

    parameters of a group    [ a a a a | b b b b b b | c c ]
    rank 0 updates            a a a a   b b                        fp32 master values, moments (stage 1)
    rank 1 updates                          b b b b   c c          and gradients (stage 2), and parameters (stage 3)

DeepSpeed reduces, holds and updates; the session scales the loss, clips, follows the schedule and skips updates.
DeepSpeed's private names are only in this file and in those named `deepspeed_...`.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lockstep.config.deepspeed import derived_of, engine_config
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.protocols import NO_CONTEXT, GradientStep
from lockstep.core.slow_imports import not_importable
from lockstep.distributed.shard_boxes import FlatShard
from lockstep.sharding.buffers import SyncedBuffers
from lockstep.sharding.context import Builder, Sharding, ShardingContext
from lockstep.sharding.deepspeed_accelerator import use_accelerator
from lockstep.sharding.deepspeed_order import deepspeed_order
from lockstep.sharding.deepspeed_shards import ReachedParameters, ZeroOptimizer
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.single import named_gradients, present_gradients, refuse_other_than_fp32, trainable_parameters

if TYPE_CHECKING:
    from lockstep.core.protocols import Optimizer


def build(context: ShardingContext) -> Sharding:
    """Return the sharding of the ZeRO stage that the config names."""
    model, device = context.model, context.world.device
    config = engine_config(context.config, derived_of(context.plan))
    deepspeed = import_for(model, device)
    variables = {"LOCAL_RANK", *(os.environ.keys() & {"OMPI_COMM_WORLD_LOCAL_RANK"})}
    index = str(device.index or 0)  # not the launcher's number, if each rank sees only one GPU
    with patch.dict(os.environ, dict.fromkeys(variables, index)):  # the index of DeepSpeed's device
        try:
            return _build(context, deepspeed, config)
        except BaseException:
            restore_functions()
            raise


def _build(context: ShardingContext, deepspeed: Any, config: Mapping[str, Any]) -> Sharding:
    model = context.model
    buffers = SyncedBuffers(model)
    if context.config.parallel.deepspeed.zero_stage == 0:
        optimizer = context.optimizer(model.named_parameters())
        unused = torch.optim.SGD(trainable_parameters(model))  # DeepSpeed requires one
        engine = _initialize(deepspeed, model, unused, config)
        step = DeepSpeedReplicaStep(context, engine, optimizer, buffers)
        return Sharding(step, ModelState(model, optimizer, buffers=buffers))
    in_bf16 = context.config.parallel.deepspeed.bf16_weights
    fp32_values = _fp32_values(model) if in_bf16 else {}
    if any(parameter.is_meta for parameter in model.parameters()):
        fp32_values = {}  # they come later
        partition(model, config, context.world.device)
    elementwise = context.optimizer.elementwise(model.named_parameters())
    engine = _initialize(deepspeed, model, elementwise.optimizer, config)
    zero = ZeroOptimizer(engine, model, elementwise.entries, counts=elementwise.counts, in_bf16=in_bf16)
    for name, values in fp32_values.items():  # DeepSpeed's are rounded
        zero.shards[name].flat.memory.copy_(zero.shards[name].flat.of(values))
    if zero.stage == 3 and context.compute is not None and not in_bf16:
        gather_in(context.compute, context.cast_weights, model, engine.optimizer)
    flat = {name: shard.flat for name, shard in zero.shards.items()} if zero.stage == 3 or in_bf16 else {}
    held: dict[str, Any] = {"shards": zero.shards, "flat": flat, "held": zero.held}
    state = ModelState(model, zero, buffers=buffers, after_restore=zero.copy_parameters, **held)
    return Sharding(ZeroStep(context, engine, zero, buffers), state)


BUILDER = Builder(build, shards_in_build=lambda config: config.parallel.deepspeed.zero_stage == 3)


def _fp32_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the values that DeepSpeed's bf16 mode will round."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            why = f"true would round {name} for good, in checkpoints too, because it is frozen; write false"
            raise ConfigError(Problem("", "parallel.deepspeed.bf16_weights", why))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def import_for(model: nn.Module, device: torch.device) -> Any:
    """Return DeepSpeed, which will work on the device."""
    deepspeed = import_deepspeed(device)
    refuse_other_than_fp32(model.named_parameters(), "parallel.strategy", "deepspeed keeps parameters")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:  # parameters are sent as bytes, and torch can't view a 0-dim tensor as bytes
            why = f"deepspeed can't send a parameter of shape [] to other ranks, and {name} is one"
            raise ConfigError(Problem("", "parallel.strategy", f"{why}; give it the shape [1], or take fsdp or ddp"))
    return deepspeed


def _initialize(deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
    """Return DeepSpeed's engine around the model, which is sharded in place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    refusals = (AssertionError, ValueError, NotImplementedError, deepspeed.runtime.zero.utils.ZeRORuntimeException)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = {"model": model, "model_parameters": parameters, "optimizer": optimizer}
            engine, *_ = deepspeed.initialize(**parts, config=dict(config), dist_init_required=False)
    except refusals as error:
        raise ConfigError(Problem("", "parallel.deepspeed", f"DeepSpeed refuses: {error}")) from error
    return engine


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device; return its module."""
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):  # DeepSpeed uses their old names
        warnings.filterwarnings("ignore", f".*{name}. is deprecated", FutureWarning)
    try:
        with warnings.catch_warnings(), not_importable("mlflow"):  # two seconds, for an autotuner that isn't used
            warnings.simplefilter("ignore")
            use_accelerator(device)
            import deepspeed
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # Lockstep reports what matters
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = _nothing  # it is for inference; each rank would try all operators with a compiler
    except ImportError as error:
        message = f"deepspeed is not installed ({error}); {pip_install('deepspeed')}"
        raise ConfigError(Problem("", "parallel.strategy", message)) from error
    return deepspeed


def _nothing() -> None:
    pass


class DeepSpeedReplicaStep(GradientStep):
    """The step of stage 0: every rank holds everything; DeepSpeed averages the gradients."""

    def __init__(self, context: ShardingContext, engine: Any, optimizer: Optimizer, buffers: SyncedBuffers) -> None:
        self.module = context.model
        self._ranks = context.world.size
        self._engine = engine
        self._optimizer = optimizer
        self._parameters = trainable_parameters(context.model)
        self._squared_norm = context.squared_norm
        self._buffers = buffers
        self._reached = ReachedParameters(context.model)

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        self._engine.set_gradient_accumulation_boundary(last)
        self._buffers.before_forward(last)
        return NO_CONTEXT

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        _backward(self._engine, loss, seed)

    def parameters_without_gradient(self) -> list[str]:
        return self._reached.missing()

    def squared_norm(self) -> Tensor:
        return self._squared_norm(present_gradients(self._parameters)).double() * self._ranks**2

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return named_gradients(self.module, self._ranks)

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._reached.stop()
        self._optimizer.update(rate, divisor / self._ranks, keep)

    def close(self) -> None:
        _release(self._engine)
        self._engine = None


class ZeroStep(GradientStep):
    """The step of stages 1, 2 and 3.

    On an accelerator DeepSpeed's step is made also for an update that is discarded, and torch's fused kernels change
    nothing then: the host never waits to know. It does where the host updates (offloading), and for lion.
    """

    def __init__(self, context: ShardingContext, engine: Any, optimizer: ZeroOptimizer, buffers: SyncedBuffers) -> None:
        self.module = context.model
        self._world = context.world.axis
        self._ranks = context.world.size
        self._device = context.world.device
        self._engine = engine
        self._zero = engine.optimizer
        self._optimizer = optimizer
        self._squared_norm = context.squared_norm
        self._buffers = buffers
        self._reached = ReachedParameters(context.model)
        _leave_out_norm(self._zero, optimizer.stage)
        self._order = deepspeed_order(self._zero, optimizer.stage, context)

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        self._engine.set_gradient_accumulation_boundary(last)
        self._zero.clear_backward_seen_flag()  # as the engine's own forward does
        self._buffers.before_forward(last)
        self._order.begin(last=last)
        return NO_CONTEXT

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        _backward(self._engine, loss, seed)
        self._order.end()

    def parameters_without_gradient(self) -> list[str]:
        return self._reached.missing()

    def squared_norm(self) -> Tensor:
        own = self._squared_norm(self._optimizer.gradients()).to(self._device)  # offloaded gradients are on the host
        return self._world.sum(own.double() * self._ranks**2)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        flats = [
            torch.cat([part.reshape(-1) for part in self._optimizer.gradients_of(group)]) * self._ranks
            for group in range(len(self._optimizer.flats))
        ]
        for name, shard in self._optimizer.shards.items():
            if shard.group is not None:
                own = shard.section(flats[shard.group])
                flat: Any = FlatShard(own, shard.flat.start, shard.flat.shape, self._device)
                yield name, flat

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._reached.stop()
        if isinstance(keep, Tensor) and self._device_decides(keep):
            inner: Any = self._zero.optimizer  # its kernels read this attribute, as torch's GradScaler sets it
            inner.found_inf = keep.logical_not().float()
            self._step(rate, divisor / self._ranks)
            del inner.found_inf
        elif bool(keep):
            self._step(rate, divisor / self._ranks)
        else:
            self._discard()
        if self._optimizer.stage == 3:  # else a parameter that the next update doesn't use keeps this gradient
            self._zero.grad_partitions_flat_buffer.zero_()

    def _device_decides(self, keep: Tensor) -> bool:
        """Return whether the update is made where `keep` is, which isn't the host, by kernels that can skip it."""
        flats = self._optimizer.flats
        fused = bool(self._zero.optimizer.defaults.get("fused"))
        return fused and keep.device.type != "cpu" and all(flat.device == keep.device for flat in flats)

    def _step(self, rate: float, divisor: float | Tensor) -> None:
        gradients = self._optimizer.gradients()
        if isinstance(divisor, Tensor) or divisor != 1.0:
            torch._foreach_div_(gradients, divisor.to(gradients[0]) if isinstance(divisor, Tensor) else divisor)
        for group in self._zero.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._engine.step()
        if not self._engine.was_step_applied():
            raise RunFailed("DeepSpeed has skipped an update that all ranks had voted to keep")

    def _discard(self) -> None:
        """Clear the gradients and the traces of the backward. `engine.micro_steps` counts the steps that were made."""
        zero = self._zero
        if self._optimizer.stage == 3:
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

    def close(self) -> None:
        _release(self._engine)
        self._engine = self._zero = None


def _backward(engine: Any, loss: Tensor, seed: Tensor) -> None:
    scaled: Any = loss * seed
    # The engine's own forward, which would turn autocast off, registers this hook on its outputs
    scaled.register_hook(lambda grad: engine._backward_prologue())
    engine.backward(scaled, scale_wrt_gas=False)


def _leave_out_norm(zero: Any, stage: int) -> None:
    """Keep DeepSpeed from reducing the norm of a gradient again, and from waiting to see whether it is finite.

    The session has checked and clipped the gradient already.
    """
    finite = torch.ones(())
    if stage == 3:
        zero._get_norm_groups = lambda: [finite]
    else:
        zero.scaled_global_norm = lambda: finite
        zero.update_offload_overflow_tracker = lambda grad: None  # it waits for every gradient that is offloaded


def _release(engine: Any) -> None:
    """Release what DeepSpeed keeps process-wide: functions and process groups, since the next session has others."""
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    engine.destroy()
    restore_functions()
    groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None


def partition(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Partition all parameters, which are on the meta device; shards have no values yet.

    `zero.Init` gives values from torch's generators while modules are constructed; here they depend on names only.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import Init

    comm.init_distributed(get_accelerator().communication_backend_name(), verbose=False, dist_init_required=False)
    init: Any = Init(config_dict_or_path=dict(config))
    if init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    for parameter in model.parameters():
        whole = torch.empty(parameter.shape, dtype=init.dtype, device=device)
        swap_tensors: Any = torch.utils.swap_tensors
        swap_tensors(parameter, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]


def restore_functions() -> None:
    """Restore what was replaced for stage 3: torch's linear function, and DeepSpeed's comparison of gathers."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, utils

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = utils.assert_ints_same_as_other_ranks
    if nn.functional.linear is partition_parameters.zero3_linear_wrap:  # it saves the parameter for the backward
        nn.functional.linear = partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk


_COMM_DTYPE = "comm_dtype"  # deepspeed.runtime.torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME


def gather_in(dtype: torch.dtype, names: Collection[str], model: nn.Module, zero: Any) -> None:
    """Let DeepSpeed's stage 3, with the optimizer `zero`, gather the weights of these names in `dtype`."""
    if zero.partition_count == 1:
        return  # nothing is gathered
    _keep_dtype_of_gathered()
    for name, parameter in model.named_parameters():
        weight: Any = parameter
        if name in names and not weight.ds_persist:  # those are always there, and gathered once an update
            setattr(weight, _COMM_DTYPE, dtype)
            weight.data = torch.empty(0, dtype=dtype, device=weight.device)
    zero.dtype = torch.bfloat16  # else a gradient larger than a bucket is reduced in its own dtype, not in fp32


def _keep_dtype_of_gathered() -> None:
    """Replace the ends of DeepSpeed's gathers, which cast the result to the dtype of the shards."""
    from deepspeed.runtime.zero import partition_parameters

    single: Any = partition_parameters.AllGatherHandle
    several: Any = partition_parameters.AllGatherCoalescedHandle
    begin, wait = single.__init__, several.wait
    if begin.__module__ == __name__:
        return  # an earlier session has

    def begin_single(
        handle: Any,
        work: Any,
        param: Any,
        quantization: Any = None,
        param_buffer: Any = None,
        original_dtype: torch.dtype | None = None,
    ) -> None:
        kept = original_dtype if param_buffer is None else param.dtype
        begin(handle, work, param, quantization, param_buffer, kept)

    def end_several(handle: Any, handle_dependency: bool = True) -> None:
        if handle.complete or handle.params[0].dtype == handle.params[0].ds_tensor.dtype:
            wait(handle, handle_dependency)
        else:
            _end_gather(handle)

    single.__init__, several.wait = begin_single, end_several


def _end_gather(handle: Any) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    handle.allgather_handle.wait()
    waits_in_stream = not get_accelerator().is_synchronized_device()
    offset = 0
    for parameter in handle.params:
        length = parameter.ds_tensor.ds_numel  # of each rank's shard, the last ones perhaps padded
        shards = [
            partition.narrow(0, offset, min(parameter.ds_numel - rank * length, length))
            for rank, partition in enumerate(handle.partitions)
            if rank * length < parameter.ds_numel
        ]
        parameter.data = torch.cat(shards).view(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
        for shard in shards if waits_in_stream else ():
            shard.record_stream(get_accelerator().current_stream())
        offset += length
    handle.complete = True
