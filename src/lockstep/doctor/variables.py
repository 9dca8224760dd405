"""Checks of environment variables, and of contradictions among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lockstep.core.errors import ConfigError
from lockstep.core.hub import means_offline
from lockstep.core.ranks import RankEnvironment, names_a_rank
from lockstep.doctor import nvidia
from lockstep.doctor.findings import Finding, FindingState, MachineView, not_here, ok, warning, wrong

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_variables(machine: MachineView) -> Iterator[Finding]:
    """Check the variables that make a process a rank."""
    environ = machine.environ
    present = [name for name in _RANK_VARIABLES if name in environ]
    if not names_a_rank(environ):
        if "LOCAL_RANK" in present:
            yield warning(
                f"LOCAL_RANK={environ['LOCAL_RANK']} is set, and RANK and WORLD_SIZE are not",
                "Unset it: unset LOCAL_RANK; a launcher sets all of them.",
            )
        else:
            yield not_here("no launcher has made this process a rank")
        return
    try:
        rank = RankEnvironment.read(environ)
    except ConfigError as error:
        for problem in error.problems:
            fact, _, remedy = problem.message.partition("; ")
            yield wrong(
                f"{problem.key} {fact}", f"{remedy[:1].upper()}{remedy[1:]}." if remedy else "Correct or unset it."
            )
        return
    for name, other in (("SLURM_PROCID", "RANK"), ("SLURM_NTASKS", "WORLD_SIZE")):
        if environ.get(name, environ[other]) != environ[other] and environ.get("TORCHELASTIC_RUN_ID") is None:
            yield warning(
                f"{other}={environ[other]}, and Slurm's {name}={environ[name]}",
                f"Set {other}=${name} in each task, or unset {' '.join(present)}.",
            )
    if rank.world_size > 1:
        yield warning(
            f"this process is rank {rank.rank} of {rank.world_size} ({', '.join(present)})",
            f"If no launcher is meant, unset them, or commands wait for other ranks: unset {' '.join(present)}",
        )
    else:
        yield ok("rank 0 of 1")


def visible_devices(machine: MachineView) -> Iterator[Finding]:
    """Check CUDA_VISIBLE_DEVICES."""
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(nvidia.devices(machine))
    if value is None:
        yield not_here("CUDA_VISIBLE_DEVICES is not set; all GPUs are visible")
        return
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    seen = f"CUDA_VISIBLE_DEVICES={value}"
    numbers = [int(entry) for entry in entries if entry.isdecimal()]
    strange = [entry for entry in entries if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-"))]
    ranks = machine.environ.get("LOCAL_WORLD_SIZE", "")
    if value.strip() in ("", "-1"):
        yield warning(f"{seen} hides all GPUs", "Unset it.") if present else ok(f"{seen}; there are no GPUs")
    elif strange:
        yield wrong(f"{seen}: {strange[0]!r} is no GPU", "Write numbers from 0, separated by commas, or GPU-... names.")
    elif len(set(entries)) < len(entries):
        yield wrong(f"{seen} names a GPU twice: CUDA then sees none", "Name each once.")
    elif present and numbers and max(numbers) >= present:
        yield wrong(f"{seen}, and GPUs are 0 to {present - 1}: CUDA ignores what follows", "Name those that are here.")
    elif ranks.isdecimal() and 1 < len(entries) < int(ranks):
        yield wrong(f"{seen}, and LOCAL_WORLD_SIZE={ranks}: two ranks would share a GPU", "Start one rank a GPU.")
    else:
        yield ok(seen)


def threads(machine: MachineView) -> Iterator[Finding]:
    """Check OMP_NUM_THREADS against the cores."""
    value = machine.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    if value is None:
        yield ok(f"OMP_NUM_THREADS is not set; ranks share {cores} core{'s' * (cores > 1)} evenly")
        return
    first = value.split(",")[0]
    if not first.isdecimal() or int(first) < 1:
        yield wrong(f"OMP_NUM_THREADS={value} is not a whole number above 0", "Unset it.")
        return
    ranks = machine.environ.get("LOCAL_WORLD_SIZE", "1")
    total = int(first) * (int(ranks) if ranks.isdecimal() else 1)
    if total > cores:
        yield warning(
            f"OMP_NUM_THREADS={value}: {total} threads on {cores} cores wait for each other", "Lower or unset it."
        )
    else:
        yield ok(f"OMP_NUM_THREADS={value}, {cores} cores")


_Environ = Mapping[str, str]


@dataclass(frozen=True)
class _Rule:
    """Variables that fail or slow training when `holds`.

    Attributes:
        names: The variables, separated by spaces, which the finding shows with their values.
        holds: Given the environment and the names of InfiniBand's adapters.
    """

    names: str
    holds: Callable[[_Environ, list[str]], bool]
    effect: str
    remedy: str
    state: FindingState = FindingState.WARNING


def _is(name: str, value: str) -> Callable[[_Environ, list[str]], bool]:
    return lambda environ, _: environ.get(name, "").upper() == value


def _set(name: str) -> Callable[[_Environ, list[str]], bool]:
    return lambda environ, _: name in environ


def _differ(first: str, second: str) -> Callable[[_Environ, list[str]], bool]:
    return lambda environ, _: first in environ and environ.get(second, environ[first]) != environ[first]


def _no_adapter(environ: _Environ, adapters: list[str]) -> bool:
    value = environ.get("NCCL_IB_HCA", "")
    if not value or value.startswith("^"):
        return False
    wanted = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    return not any(adapter.startswith(name) for adapter in adapters for name in wanted)


def _offline_differs(environ: _Environ, adapters: list[str]) -> bool:
    values = [environ.get(name) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
    return len({means_offline(value) for value in values if value is not None}) > 1


def _loopback_of_many(environ: _Environ, adapters: list[str]) -> bool:
    is_loopback = environ.get("MASTER_ADDR", "").startswith(("127.", "localhost"))
    return is_loopback and environ.get("SLURM_NNODES", "1") != "1"


_KEEP = "Unset it when the fault is clear."
_RULES = (
    _Rule(
        "NCCL_IB_DISABLE",
        lambda environ, adapters: environ.get("NCCL_IB_DISABLE") == "1" and bool(adapters),
        "InfiniBand is here, and NCCL uses sockets",
        "Unset it.",
    ),
    _Rule("NCCL_IB_HCA", _no_adapter, "no such adapter", "Name one of /sys/class/infiniband.", FindingState.WRONG),
    _Rule("NCCL_P2P_DISABLE", _is("NCCL_P2P_DISABLE", "1"), "GPUs exchange by way of the host: slow", "Unset it."),
    _Rule("NCCL_SHM_DISABLE", _is("NCCL_SHM_DISABLE", "1"), "GPUs exchange by the network: slow", "Unset it."),
    _Rule("NCCL_DEBUG", _is("NCCL_DEBUG", "TRACE"), "NCCL logs every call: slow", "Set it to WARN."),
    _Rule(
        "NCCL_ASYNC_ERROR_HANDLING",
        _set("NCCL_ASYNC_ERROR_HANDLING"),
        "an old name",
        "Rename it: TORCH_NCCL_ASYNC_ERROR_HANDLING.",
    ),
    _Rule("NCCL_BLOCKING_WAIT", _set("NCCL_BLOCKING_WAIT"), "an old name", "Rename it: TORCH_NCCL_BLOCKING_WAIT."),
    _Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _is("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        "a rank whose peer has ended waits without a limit",
        "Unset it.",
    ),
    _Rule("TORCH_DISTRIBUTED_DEBUG", _is("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), "checks each collective: slow", _KEEP),
    _Rule("CUDA_LAUNCH_BLOCKING", _is("CUDA_LAUNCH_BLOCKING", "1"), "the host waits for each kernel: slow", _KEEP),
    _Rule(
        "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME",
        _differ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        "gloo and NCCL use different interfaces",
        "Set both to the interface between the hosts.",
    ),
    _Rule(
        "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF",
        _differ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        "they contradict each other",
        "Unset PYTORCH_CUDA_ALLOC_CONF, the older name.",
    ),
    _Rule(
        "HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES",
        _differ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        "they contradict each other",
        "Unset one of them.",
        FindingState.WRONG,
    ),
    _Rule(
        "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE",
        _offline_differs,
        "they contradict each other, and HF_HUB_OFFLINE counts",
        "Unset TRANSFORMERS_OFFLINE.",
    ),
    _Rule(
        "MASTER_ADDR SLURM_NNODES",
        _loopback_of_many,
        "each node would wait at its own loopback",
        "Set it to the first of: scontrol show hostnames",
        FindingState.WRONG,
    ),
)


def contradictions(machine: MachineView) -> Iterator[Finding]:
    """Check variables of NCCL, gloo, torch and the hub for what fails, contradicts itself, or is slow."""
    environ, adapters = machine.environ, machine.names("sys/class/infiniband")
    broken = [rule for rule in _RULES if rule.holds(environ, adapters)]
    for rule in broken:
        values = ", ".join(f"{name}={environ[name]}" for name in rule.names.split())
        yield Finding(rule.state, f"{values}: {rule.effect}", rule.remedy)
    if not broken:
        present = sorted(name for name in environ if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_")))
        yield ok(", ".join(f"{name}={environ[name]}" for name in present) or "none of NCCL's or gloo's is set")
