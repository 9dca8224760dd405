"""Measures the peak of a run's devices, for those that have no data sheet: a matrix product, and a copy in memory.

CPU      all cores of this host, divided by the run's ranks here, which share them
other    the device of one rank
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.core.errors import Failure, RunFailed
from lockstep.monitor.attempts import read_attempts
from lockstep.report.roofline import DevicePeak

_SECONDS = 0.4  # for each measurement
_SIZE = 1024
_LARGE_SIZE = 8192  # for an accelerator
_COPIED = 1 << 27  # bytes: more than any cache has


def peak_of_run(run: Path) -> DevicePeak:
    """Measure the peak of a rank's device, on this host, and count the operations of the model if the run didn't.

    Raises:
        RunFailed: This host is none of the run's, or it isn't known where the run was.
    """
    import torch

    attempts = read_attempts(run)
    if not attempts:
        raise RunFailed(f"{run} has no attempts.jsonl: it isn't known on which hosts it ran")
    hosts = {host for host, _ in attempts[-1].hosts}
    here = socket.gethostname()
    if here not in hosts:
        raise RunFailed(f"--measure: the run was on {', '.join(sorted(hosts))}, and this is {here}; measure there")
    facts = attempts[-1].facts
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(facts.get("precision")), torch.float32)
    if facts.get("device") != "cpu":
        if not torch.accelerator.is_available():
            raise RunFailed(f"--measure: the run was on {facts.get('device')}, and torch sees no accelerator here")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "there is one"
        return measured_peak(accelerator, dtype)
    peak = measured_peak(torch.device("cpu"), dtype)
    ranks = max(1, sum(number for host, number in attempts[-1].hosts if host == here))
    peak = DevicePeak(peak.flops / ranks, peak.bandwidth / ranks)
    return peak if attempts[-1].number("flops_per_token") else _with_operations(peak, run)


def _with_operations(peak: DevicePeak, run: Path) -> DevicePeak:
    try:
        return replace(peak, flops_per_token=operations_of_run(run))
    except Exception as error:  # of the config, or of the model's forward
        return replace(peak, uncounted=why_uncounted(error).rstrip("."))


def operations_of_run(run: Path) -> float:
    """Return the operations of forward and backward per token, or per sample, of a model as the run's config has it.

    Raises:
        ConfigError: The config can't be used here: objects were handed over in Python, or another user's code is named.
        Exception: Whatever the model's forward raises.
    """
    from lockstep.config.loading import load
    from lockstep.config.trust import approved
    from lockstep.core.errors import ConfigError
    from lockstep.core.terminal import muted_stderr
    from lockstep.models.build import sketch_model
    from lockstep.monitor.folder import CONFIG
    from lockstep.training.flops import flops_of_first_samples
    from lockstep.training.sources import make_objective, open_sources, users_model
    from lockstep.training.user_objects import UserObjects, given_keys

    loaded = load([run / CONFIG], of_runs=[run / CONFIG])
    config = approved(loaded, trusted=False)
    needed = ("model.", "objective.", "data.train.")
    if given := [each.key for each in given_keys(config) if each.key.startswith(needed)]:
        raise ConfigError(f"{given[0]} of its config was handed over in Python")
    config = config.model_copy(update={"data": config.data.model_copy(update={"evaluation": {}})})
    objects = UserObjects()
    with muted_stderr():
        own = users_model(config, objects)
        sources = open_sources(config, objects, own)
        model = own or sketch_model(config.model, sources[0].facts)
        _, source, _ = make_objective(config, sources, objects, model)
        return flops_of_first_samples(model, source)


def why_uncounted(error: Exception) -> str:
    """Return why operations can't be counted with tensors that have no values, as the end of a sentence."""
    from torch._subclasses import fake_tensor

    message = (str(error).splitlines() or [""])[0]
    if isinstance(error, Failure):
        return message
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return "its forward reads the value of a tensor (.item(), float(tensor), if tensor)"
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return "a shape in its forward depends on the values of a tensor (nonzero, a mask as an index)"
    kind = type(error).__name__
    return f"counting them, with tensors that have no values, fails: {kind}{': ' if message else ''}{message}"


def measured_peak(device: object, dtype: object) -> DevicePeak:
    """Return the operations and bytes per second of a device: the fastest of many products and copies."""
    import torch

    place, kind = torch.device(str(device)), dtype
    assert isinstance(kind, torch.dtype)
    size = _SIZE if place.type == "cpu" else _LARGE_SIZE
    left, right = (torch.randn(size, size, device=place).to(kind) for _ in range(2))
    product = torch.empty(size, size, device=place, dtype=kind)
    source = torch.zeros(_COPIED, device=place, dtype=torch.uint8)
    target = torch.empty_like(source)

    def wait() -> None:
        if place.type != "cpu":
            torch.accelerator.synchronize(place)

    with torch.no_grad():
        flops = 2 * size**3 / _fastest(lambda: torch.mm(left, right, out=product), wait)
        return DevicePeak(flops, 2 * _COPIED / _fastest(lambda: target.copy_(source), wait))


def _fastest(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the seconds of the fastest call, as other processes only add to it."""
    work()
    wait()
    until, fastest = time.perf_counter() + _SECONDS, float("inf")
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        wait()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
