"""Measures this machine for `lockstep plan --calibrate`: a row of `plan/gpus.toml`, with the speeds of operations.

workloads    small forwards and backwards: each operation in them is timed by itself, over sizes and dtypes
collectives  over sizes, between the ranks of this machine
host         the rest of a step of a tiny model: what Python takes for an operation, a collective, a step

On the CPU ranks share cores and memory, so all of it is measured with as many ranks as a plan may be asked for.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config, Launch
from lockstep.core.errors import RunFailed
from lockstep.core.terminal import muted_stderr
from lockstep.distributed.measurements import timed_collectives
from lockstep.distributed.memory import rank_memory
from lockstep.distributed.process_group import joined
from lockstep.launch.devices import count_accelerators, count_cores
from lockstep.launch.local import launch
from lockstep.plan.gpus import GPU, GPUCluster
from lockstep.simulation.estimate import estimator_of
from lockstep.simulation.repeats import tensors_in
from lockstep.simulation.timing import collective_seconds, operation_seconds
from lockstep.simulation.trace import NO_KERNEL, Operation, Order, Sent, StepTrace, operation_of
from lockstep.training.job import opened

_SIDES = (16, 64, 192, 768, 2048)  # of matrices
_LENGTHS, _HEADS, _TOKENS = (32, 128, 512), (16, 32, 48, 64, 96, 128), 2048  # of attention
_ROWS, _WIDTH = (2**6, 2**8, 2**11, 2**14), 256
_IMAGES = [(3, 16, 32), (3, 64, 32), (8, 8, 8), (8, 32, 32), (32, 32, 8), (32, 64, 32), (64, 128, 8), (128, 128, 32)]
"""Channels of the inputs, channels, and sides."""
_PARAMETERS = (2**12, 2**16, 2**20, 2**23)
_ROUNDS, _MOST_CALLS, _ENOUGH_S = 2, 9, 4e-3
_EVICTING, _KEPT = 2**22, 2**27  # bytes that are written between two timed calls, and of results that are kept
_LEAST_SIZES = 3  # of an operation: with fewer, its times say nothing about others
_SHARES = ("matmul", "attention", "memory", "link", "network")
_MESSAGES = (2**8, 2**12, 2**16, 2**20, 2**23, 2**26)  # bytes
_STEPS, _LAYERS = 60, (2, 8)
_FASTEST = 5  # one of this many steps counts: others are slowed by other programs, and one alone is a lucky one
_LARGE = (384, 128, 16, _STEPS // 4)  # width, length, samples and steps of a model with operations like others'
_VIEW = 0.25  # of what the host takes for an operation with a kernel
Points = dict[str, dict[tuple[int, ...], float]]


class Timed(TorchDispatchMode):
    """Times each operation that runs while it is active, once for each size."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.points: Points = {}
        self.round = 0
        self.seen: set[tuple[int, str, tuple[int, ...]]] = set()
        self._others = torch.zeros(_EVICTING // 4)
        self._kept: deque[tuple[int, object]] = deque()
        self._bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if func.is_view or func._overloadpacket in NO_KERNEL:
            return result
        operation = operation_of(func, args, kwargs, tensors_in(result))
        points = self.points.setdefault(operation.name, {})
        if all(operation.sizes) and (self.round, operation.name, operation.sizes) not in self.seen:
            self.seen.add((self.round, operation.name, operation.sizes))
            seconds = self.seconds(lambda: func(*args, **kwargs)) / operation.times
            points[operation.sizes] = min(seconds, points.get(operation.sizes, math.inf))
        return result

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the fastest of some calls, which other processes on the machine have not slowed.

        As in a step: others have had a CPU's caches, and the result's memory was used long before.
        """
        times: list[float] = []
        with _disable_current_modes(), torch.no_grad():
            until = time.perf_counter() + _ENOUGH_S
            while len(times) < 3 or (len(times) < _MOST_CALLS and time.perf_counter() < until):
                self._others.add_(1)
                began = time.perf_counter()
                result = call()
                if self.device.type != "cpu":
                    torch.accelerator.synchronize(self.device)
                times.append(time.perf_counter() - began)
                self._kept.append((sum(each.nbytes for each in tensors_in(result)), result))
                self._bytes += self._kept[-1][0]
                while self._bytes > _KEPT:
                    self._bytes -= self._kept.popleft()[0]
        return min(times)


def timed_operations(device: torch.device) -> Points:
    """Return the seconds of operations by name and sizes."""
    timed = Timed(device)
    for timed.round in range(_ROUNDS):
        for workload in _workloads(device):
            with timed:
                workload()
    return {name: smoothed(points) for name, points in timed.points.items() if len(points) >= _LEAST_SIZES}


def smoothed(points: Mapping[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """Return no more seconds for a size than for one that is larger in every dim: something else ran then."""
    return {
        sizes: min(
            seconds for other, seconds in points.items() if all(a <= b for a, b in zip(sizes, other, strict=True))
        )
        for sizes in points
    }


def _workloads(device: torch.device) -> Iterator[Callable[[], object]]:
    """Yield forwards with backwards, and steps of optimizers."""

    def backwards(functions: Iterable[Callable[[Tensor], Tensor]], *shape: int) -> Iterator[Callable[[], object]]:
        for function in functions:
            x = torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)
            yield partial(_backward, function, x)

    for dtype in (torch.float32, torch.bfloat16):
        for m, n, k in itertools.product(_SIDES, repeat=3):
            yield from backwards([nn.Linear(k, n, device=device, dtype=dtype)], m, k)
        for length, width in itertools.product(_LENGTHS, _HEADS):
            yield from backwards(_ATTENTION, max(2, _TOKENS // length), 4, length, width)
        for rows in _ROWS:
            yield from backwards(_elementwise(device, dtype, rows), rows, _WIDTH)
        for inputs, channels, side in _IMAGES:
            layer = nn.Sequential(nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels)).to(device, dtype)
            yield from backwards([layer], 16, inputs, side, side)
            yield partial(_backward, layer, torch.randn(16, inputs, side, side, device=device, dtype=dtype))
    for elements in _PARAMETERS:
        yield partial(_optimizers, device, elements)


def _backward(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    result = function(x)
    result.backward(torch.ones_like(result))


_ATTENTION: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: functional.scaled_dot_product_attention(x, x, x),
    lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    lambda x: (x @ x.transpose(-1, -2) * x.shape[-1] ** -0.5).softmax(-1) @ x,  # scaled: denormal numbers are slow
)


def _elementwise(device: torch.device, dtype: torch.dtype, rows: int) -> list[Callable[[Tensor], Tensor]]:
    other, table = (torch.randn(rows, _WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.ones(_WIDTH, device=device, dtype=dtype, requires_grad=True)
    index, classes = (torch.randint(most, (rows,), device=device) for most in (rows, _WIDTH))
    change = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    return [
        functional.gelu,
        lambda x: functional.gelu(x, approximate="tanh"),
        functional.silu,
        functional.relu,
        torch.tanh,
        torch.linalg.vector_norm,
        lambda x: x.flatten().dot(other.flatten()),
        lambda x: x * other,
        lambda x: x * weight,
        lambda x: x + other,
        lambda x: x + weight,
        lambda x: x.pow(2) * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt(),
        lambda x: functional.layer_norm(x, (_WIDTH,), weight, weight),
        lambda x: functional.softmax(x, -1),
        lambda x: functional.cross_entropy(x, classes),
        lambda x: functional.dropout(x, 0.1),
        lambda x: functional.embedding(index, table) * x,
        lambda x: torch.cat((x, other), -1),
        lambda x: x.view(rows, 4, -1).transpose(0, 1).contiguous(),
        lambda x: x.roll(8, -1),
        lambda x: x.to(change),
        lambda x: torch.where(x > 0, x, other),
        lambda x: x.clone().mul_(2).add_(x).div_(2),
    ]


def _optimizers(device: torch.device, elements: int) -> None:
    parameters = [nn.Parameter(torch.randn(elements // 4, device=device)) for _ in range(4)]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for make in (torch.optim.AdamW, torch.optim.SGD):
        make(parameters, lr=1e-3, fused=True).step()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    torch._foreach_copy_([parameter.data for parameter in parameters], gradients)


# --- the machine --------------------------------------------------------------------------------------------------


def calibrate(section: Launch) -> str:
    """Measure this machine, and return a file of GPUs that has it as its row."""
    most = count_accelerators(section)[1] or count_cores()
    numbers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    if isinstance(section.ranks, int):
        numbers = [section.ranks]
    measurements = {ranks: _launched(section, ranks) for ranks in numbers}
    first, last = measurements[numbers[0]], measurements[numbers[-1]]
    rates = _rates(first["measured"])
    messages: list[list[float]] = last["measured"].get(f"all_reduce {numbers[-1]}", [])
    link = max((2 * (1 - 1 / numbers[-1]) * size / seconds for size, seconds in messages), default=1e9)
    row = {
        "device": first["device"], "tf32": rates[4] / 1e12,
        "bf16": rates[2] / 1e12, "fp8": rates[2] / 1e12,
        "bandwidth": max(size / seconds for size, seconds in first["measured"]["_foreach_copy_ 4"][-1:]) / 1e9,
        "multiprocessors": first["multiprocessors"], "link": link / 1e9, "network": link / 1e9, "watts": 0,
    }  # fmt: skip
    tables: dict[str, dict[str, Any]] = {"reached": dict.fromkeys(_SHARES, 1.0)}
    for ranks, measurement in measurements.items():
        prefix = f"ranks.{ranks}."
        tables[f"ranks.{ranks}"] = {"memory": measurement["memory"] / 2**30}
        tables[f"{prefix}measured"] = measurement["measured"]
        seconds, reached = _in_steps(section, ranks, measurement)
        tables[f"{prefix}seconds"] = seconds
        tables[f"{prefix}reached"] = {**dict.fromkeys(_SHARES, 1.0), "measured": reached}
    lines = [f"[{first['name']}]", *(f"{key} = {_written(value)}" for key, value in row.items())]
    for table, values in tables.items():
        lines += ["", f"[{first['name']}.{table}]", *(f'"{key}" = {_written(value)}' for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _rates(measured: dict[str, Any]) -> dict[int, float]:
    """Return the most FLOP/s of products of matrices by the bytes of an element."""
    names = {width: [f"mm {layout} {width}" for layout in ("nn", "nt", "tn")] for width in (4, 2)}
    return {
        width: max(
            2 * math.prod(sizes) / seconds for each in names[width] for *sizes, seconds in measured.get(each, ())
        )
        for width in names
    }


def _written(value: object) -> str:
    return json.dumps(json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.4g}")))


def _launched(section: Launch, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lockstep-calibrate-") as folder:
        result = launch(partial(_measure, section, ranks, Path(folder)), ranks, section, None, own_process=True)
        if code := result.show():
            raise RunFailed(f"this machine can't be measured: the ranks ended with exit code {code}")
        record: dict[str, Any] = json.loads(Path(folder, "0").read_text())
        return record


def _measure(section: Launch, ranks: int, folder: Path) -> int:
    runs = _tiny(section, ranks)
    before = {name: _step_seconds(config) for name, config in runs.items()}
    with joined(section, grouped=True) as world:
        points = timed_operations(world.device)
        measured = {name: [[*sizes, each] for sizes, each in sorted(rows.items())] for name, rows in points.items()}
        for row in timed_collectives(world, _MESSAGES) if world.size > 1 else ():
            name = row.operation.replace("-", "_").partition("/")[0]
            measured.setdefault(f"{name} {world.size}", []).append([row.size, row.seconds])
        record = {"measured": measured, "memory": rank_memory(world.device, world.axis)}
        record |= {"device": "cpu", "name": "cpu", "multiprocessors": torch.get_num_threads()}
        if world.device.type != "cpu":
            properties = torch.get_device_module(world.device).get_device_properties(world.device)
            record |= {
                "device": "gpu",
                "name": properties.name.replace(" ", "-"),
                "multiprocessors": properties.multi_processor_count,
            }
    record["steps"] = {name: min(before[name], _step_seconds(config)) for name, config in runs.items()}
    (folder / str(world.rank)).write_text(json.dumps(record))
    return 0


# --- the host -----------------------------------------------------------------------------------------------------


def _tiny(section: Launch, ranks: int) -> dict[str, Config]:
    """Return runs in which a step is what Python takes, of few layers and of many; and one of a larger model."""

    def run(kind: str, layers: int, width: int = 16, length: int = 16, batch: int = 1, steps: int = _STEPS) -> Config:
        return Config.model_validate(
            {
                "model": {"kind": "transformer", "vocabulary": 256, "layers": layers, "heads": 2, "width": width},
                "data": {"train": {"kind": "stdlib-text", "length": length}},
                "batch": {"global_size": ranks * batch},
                "optim": {"name": "adamw", "lr": 1e-3},
                "parallel": {"strategy": kind},
                "precision": {"compute": "fp32"},
                "run": {"steps": steps},
                "launch": section.model_dump(exclude_unset=True) | {"ranks": ranks},
            }
        )

    plain = "single" if ranks == 1 else "ddp"
    few, many = (run(plain, layers) for layers in _LAYERS)
    runs = {"few": few, "many": many, "large": run(plain, _LAYERS[0], *_LARGE)}
    if ranks > 1:
        runs |= {"sharded": run("fsdp", _LAYERS[1]), "large sharded": run("fsdp", _LAYERS[0], *_LARGE)}
    return runs


def _step_seconds(config: Config) -> float:
    times = []
    with opened(config, UserObjects()) as session:
        began = time.perf_counter()
        for batch in session.batches():
            session.accumulate(batch)
            session.commit().result()
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
    fastest = sorted(times)[: len(times) // _FASTEST]
    return sum(fastest) / len(fastest)


def _in_steps(section: Launch, ranks: int, measurement: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Return the host's seconds for a step, an operation, a view and a collective that it waits for, by short runs.

    `late` is what a rank then waits for slower ones, as a share of the time since the last collective. The second
    result is the share of their speed alone that operations reach in a step.
    """
    with muted_stderr():
        counts = {name: _counts(config, ranks, measurement) for name, config in _tiny(section, ranks).items()}
    left = {name: measurement["steps"][name] - sent for name, (_, _, _, sent) in counts.items()}
    few, many = counts["few"], counts["many"]
    call = max(0.0, (left["many"] - many[2] - left["few"] + few[2]) / (many[0] - few[0]))
    step = max(0.0, left["few"] - few[2] - call * few[0])
    seconds = {"step": step, "call": call, "issue": call * _VIEW}
    calls, _, operations, _ = counts["large"]
    reached = min(1.0, operations / max(left["large"] - step - call * calls, 1e-9))
    if "sharded" in left:
        calls, waits, operations, _ = counts["sharded"]
        wait = seconds["collective"] = max(0.0, (left["sharded"] - step - call * calls - operations) / waits)
        calls, waits, operations, _ = counts["large sharded"]
        late = (left["large sharded"] - step - call * calls - wait * waits) * reached / operations - 1
        seconds["late"] = max(0.0, late) if measurement["device"] == "cpu" else 0.0
    return seconds, reached


def _counts(config: Config, ranks: int, measurement: dict[str, Any]) -> tuple[float, int, float, float]:
    """Return how many operations and collectives a step has, and the seconds of the former and of the latter."""
    reached, flops = dict.fromkeys(_SHARES, 1.0), _rates(measurement["measured"])
    measured, link = measurement["measured"], 1e9
    gpu = GPU("", 0, flops, 1e11, 1, link, link, link, link, 0, reached, measurement["device"], measured=measured)
    cluster, traces = GPUCluster(gpu, ranks, 1), list[StepTrace]()
    estimator_of(config, ranks, None, UserObjects(), cluster).peak(config, traces)
    calls, collectives, seconds, sent = 0.0, 0, 0.0, 0.0
    for entry in traces[0].entries:
        if isinstance(entry, Operation):
            calls, seconds = calls + 1, seconds + operation_seconds(entry, gpu)
        elif isinstance(entry, Sent):
            collectives, sent = collectives + (not entry.asynchronous), sent + collective_seconds(entry, cluster)
        elif isinstance(entry, Order) and entry.what == "issue":
            calls += _VIEW
    return calls, collectives, seconds, sent
