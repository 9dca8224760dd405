"""The facts about this run's machines, and what `auto` takes on them: the first rank asks, all ranks get its answer."""

from __future__ import annotations

import io
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.assembly.companion import companion_facts
from lockstep.data.loader import first_batch
from lockstep.distributed.memory import rank_memory
from lockstep.loop.components import Purpose
from lockstep.models.build import describe_model, parameter_facts
from lockstep.plan.choosing import TOKEN_BYTES, is_plenty
from lockstep.plan.gpus import GPUCluster, known_gpu
from lockstep.plan.plan import Machine
from lockstep.strategies.registry import AUTO

if TYPE_CHECKING:
    from lockstep.assembly.user_objects import UserObjects
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Source
    from lockstep.distributed.process_group import World
    from lockstep.plan.choosing import Decision

SECONDS = 60.0
_MODULE = "lockstep.simulation.answering"
_LARGE = 1 << 16  # bytes; an array with as many is passed on without its values
_MOST = 64 << 20  # bytes of all objects
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Question:
    """A run with an `auto` to decide; `memory` is the bytes of each rank, `cluster` its GPUs, if they are known."""

    config: Config
    ranks: int
    memory: int
    given: UserObjects
    on_cpu: bool
    cluster: GPUCluster | None = None


class NoAnswer(RuntimeError):
    """The simulation can't answer; the message is the reason."""


def ask(question: Question, seconds: float = SECONDS) -> Decision:
    """Return the decision. Raises NoAnswer if the run can't be simulated, or not in this time."""
    return cast("Decision", ask_process(_MODULE, question, seconds))


def ask_process(module: str, question: object, seconds: float) -> Any:
    """Run a module with a folder that has the question; return what it writes there.

    Raises NoAnswer if it writes a sentence instead, or nothing, or not in this time.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-estimate-") as folder:
        try:
            Path(folder, "question").write_bytes(_pickled(question))
        except Exception as error:  # an object may raise anything
            raise NoAnswer(
                f"the objects of this run can't be passed to a simulation: {type(error).__name__}: {error}"
            ) from error
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, folder],
                env=_environment(os.environ),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"a simulation takes longer than {seconds:.0f} s") from error
        except OSError as error:
            raise NoAnswer(f"a simulation can't be started: {error}") from error
        answer = Path(folder, "answer")
        if not answer.is_file():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise NoAnswer(f"a simulation failed: {last}")
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, str):
        raise NoAnswer(result)
    return result


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in own.items() if name not in _RANK_VARIABLES}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _pickled(question: object) -> bytes:
    buffer = _Limited()
    _ShapesOnly(buffer, pickle.HIGHEST_PROTOCOL).dump(question)
    return buffer.getvalue()


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST:
            raise NoAnswer(f"they take more than {_MOST >> 20} MiB without the values of arrays")
        return super().write(data)


class _ShapesOnly(pickle.Pickler):
    """Pickles large arrays as zeros, which take no memory until they are read."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) or not isinstance(value, Tensor | np.ndarray) or value.nbytes < _LARGE:
            return NotImplemented
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return np.zeros, (value.shape, value.dtype)
        if type(value) is Tensor and value.layout is torch.strided:
            return partial(torch.zeros, value.shape, dtype=value.dtype, requires_grad=value.requires_grad), ()
        return NotImplemented


def decides(config: Config, ranks: int) -> bool:
    """Return whether `auto` has a choice that depends on memory."""
    chooses = config.parallel.strategy == AUTO and ranks > 1
    splits = config.batch.micro_size == "auto" and config.batch.global_size > ranks
    is_whole = config.parallel.pipeline == 1  # a pipeline's micro-batches keep its stages busy
    return (chooses or splits) and is_whole and config.run.determinism != "invariant"


def machine_of(config: Config, world: World, given: UserObjects, source: Source, purpose: Purpose) -> Machine:
    """Return the facts about the machines of a run, the same on all ranks; a collective."""
    machine_ranks = _machine_ranks(world)
    has_choice = decides(config, world.size)
    if not has_choice and config.parallel.strategy != AUTO:
        return Machine(machine_ranks, None, world.device.type)
    memory = rank_memory(world.device, world.axis, world.machine_ranks)
    machine = Machine(machine_ranks, memory, world.device.type)
    if purpose is Purpose.EVALUATE or not has_choice:
        return machine
    answer = _decision(config, world, given, source, machine) if world.rank == 0 else None
    world.axis.barrier()
    decision, note = cast("tuple[Decision | None, str]", world.axis.gather(answer or (None, ""))[0])
    return replace(machine, decision=decision, undecided=note)


def _machine_ranks(world: World) -> int:
    """Return the ranks of a machine; if machines differ, the largest number that divides all of them."""
    if world.machine_ranks == world.size:
        return world.size
    return math.gcd(*cast("list[int]", world.axis.gather(world.machine_ranks)))


def _decision(
    config: Config, world: World, given: UserObjects, source: Source, machine: Machine
) -> tuple[Decision | None, str]:
    """Return the decision; or None, and why there is none: empty if none is needed."""
    memory, on_cpu = cast("int", machine.memory), world.device.type == "cpu"
    try:
        if isinstance(given.model, nn.Module):
            facts = parameter_facts(given.model)
        else:
            facts = describe_model(config.model, source.facts, trust_remote_code=given.trust_remote_code)
        facts += companion_facts(config, source.facts, facts, trust_remote_code=given.trust_remote_code)
        if is_plenty(config, world.size, facts, _sample_bytes(source), memory):
            return None, ""
    except Exception:  # what is wrong with the model or the data is reported where they are used, on all ranks
        return None, ""
    try:
        cluster = cluster_of(world.device, world.size, machine.ranks or world.size)
        return ask(Question(config, world.size, memory, given, on_cpu, cluster)), ""
    except NoAnswer as reason:
        return None, str(reason)


def cluster_of(device: torch.device, ranks: int, per_node: int) -> GPUCluster | None:
    """Return the GPUs of a run; None: their speeds aren't known."""
    if device.type == "cpu":
        return None
    gpu = known_gpu(str(torch.get_device_module(device).get_device_name(device)))
    return None if gpu is None else GPUCluster(gpu, per_node, ranks // per_node)


def _sample_bytes(source: Source) -> int:
    if source.facts.tokens_per_sample is not None:
        return source.facts.tokens_per_sample * TOKEN_BYTES
    inputs = first_batch(source, 1).inputs
    values = inputs if isinstance(inputs, tuple) else inputs.values()
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
