"""Throughput, remaining time, and the share of the hardware's peak (MFU).

reports     t=0 ........ 10 ....... 12 [evaluation 5 s] 17 ... 19      seconds of the run
training    0 .......... 10 ....... 12 ................ 12 ... 14      the pause is taken out
                                    `-- moving: over the last `window` seconds --'
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass

from lockstep.core.records import RunInfo, StepReport


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second of training, evaluations not counted; 0 while nothing is known."""

    steps: float
    samples: float
    tokens: float


@dataclass(frozen=True, slots=True)
class _Point:
    seconds: float  # of training
    steps: int
    samples: int
    tokens: int


class Throughput:
    """Rates from reports, of which it needs only some. The first that it gets should be the run's first.

    Args:
        window: training seconds that `moving` covers; 0 for those since the last report but one.
    """

    def __init__(self, window: float = 10.0) -> None:
        self._window = window
        self._paused = 0.0
        self._pauses: list[tuple[int, float]] = []  # those that no report has followed yet
        self._first: _Point | None = None
        self._first_rates = Rates(0.0, 0.0, 0.0)
        self._points: deque[_Point] = deque()

    def add(self, report: StepReport) -> None:
        """Take in a report; one of a known step changes nothing."""
        self._paused += sum(seconds for step, seconds in self._pauses if step < report.step)
        self._pauses = [(step, seconds) for step, seconds in self._pauses if step >= report.step]
        point = _Point(report.seconds - self._paused, report.step, report.samples, report.tokens)
        if self._first is None:
            self._first = point
            seconds = report.seconds
            if report.step == 1 and seconds > 0:  # the first seconds of a resumed run may be of many steps
                self._first_rates = Rates(1 / seconds, report.update_samples / seconds, report.update_tokens / seconds)
        elif point.steps <= self._points[-1].steps:
            return
        self._points.append(point)
        while len(self._points) > 2 and point.seconds - self._points[1].seconds >= self._window:
            self._points.popleft()

    def pause(self, step: int, seconds: float) -> None:
        """Take out seconds after update `step`, such as an evaluation's, in which no training was done."""
        self._pauses.append((step, seconds))

    @property
    def moving(self) -> Rates:
        """Rates over the window."""
        return self._between(self._points[0], self._points[-1]) if self._points else self._first_rates

    @property
    def overall(self) -> Rates:
        """Rates since the first report: what the first step takes longer, such as compilation, doesn't count."""
        return self._between(self._first, self._points[-1]) if self._first and self._points else self._first_rates

    def remaining(self, step: int, steps: int | None) -> float | None:
        """Return the seconds of training until `steps` are done; None if that isn't known."""
        rate = self.moving.steps
        return (steps - step) / rate if steps is not None and rate > 0 else None

    def _between(self, earlier: _Point, later: _Point) -> Rates:
        seconds = later.seconds - earlier.seconds
        if later.steps == earlier.steps or seconds <= 0:
            return self._first_rates
        return Rates(
            (later.steps - earlier.steps) / seconds,
            (later.samples - earlier.samples) / seconds,
            (later.tokens - earlier.tokens) / seconds,
        )


def model_flops_utilization(facts: RunInfo, tokens_per_second: float) -> float | None:
    """Return the share of the peak of all ranks' devices that the model's operations use, in [0, 1]; None if unknown.

    MFU as in Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B: recomputation doesn't count.
    """
    if not facts.peak_flops or not facts.flops_per_token or not math.isfinite(tokens_per_second):
        return None
    return tokens_per_second * facts.flops_per_token / (facts.peak_flops * facts.ranks)


def update_values(report: StepReport, rates: Rates, facts: RunInfo | None) -> dict[str, float]:
    """Return the values of an update that curves are drawn of; one without a target has no loss, and no gradient."""
    learned = {"train/loss": report.loss, "train/grad_norm": report.grad_norm} if report.count else {}
    values = {
        **learned,
        "train/lr": report.lr,
        "train/loss_scale": report.loss_scale,
        "train/discarded": float(report.discarded),
        "speed/samples_per_second": rates.samples,
        "speed/tokens_per_second": rates.tokens,
    }
    mfu = model_flops_utilization(facts, rates.tokens) if facts else None
    return values if mfu is None else {**values, "speed/mfu": mfu}


@dataclass(frozen=True, slots=True)
class _Peak:
    """The peaks of a GPU in TFLOP/s, dense (without 2:4 sparsity), with fp32 accumulation; None: no such units.

    Attributes:
        name: Pattern of the driver's whole name, without the vendor's prefixes. The first that matches counts.
        source: The vendor's document that has the figures.
    """

    name: str
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float | None
    source: str


# Where a data sheet gives figures with sparsity, half of them. A device of the Instinct MI250 and MI250X is one of two
# dies, so half of these, too; their fp32 is that of the matrix units.
_PEAKS = (
    _Peak(r"V100-SXM\d.*|V100-DGXS.*", 15.7, None, None, 125.0, "Tesla V100 data sheet"),
    _Peak(r"V100-PCIE.*", 14.0, None, None, 112.0, "Tesla V100 data sheet"),
    _Peak(r"V100S-PCIE.*", 16.4, None, None, 130.0, "Tesla V100 data sheet"),
    _Peak(r"T4", 8.1, None, None, 65.0, "T4 data sheet"),
    _Peak(r"A100[- ](SXM|PCIE|PG|80GB).*", 19.5, 156.0, 312.0, 312.0, "A100 data sheet"),
    _Peak(r"A30", 10.3, 82.0, 165.0, 165.0, "A30 data sheet"),
    _Peak(r"A40", 37.4, 74.8, 149.7, 149.7, "A40 data sheet"),
    _Peak(r"A10", 31.2, 62.5, 125.0, 125.0, "A10 data sheet"),
    _Peak(r"A10G", 31.5, 35.0, 70.0, 70.0, "A10G data sheet"),
    _Peak(r"RTX A6000", 38.7, 77.4, 154.8, 154.8, "GA102 white paper, appendix A"),
    _Peak(r"L4", 30.3, 60.0, 121.0, 121.0, "L4 data sheet"),
    _Peak(r"L40", 90.5, 90.5, 181.05, 181.05, "L40 data sheet"),
    _Peak(r"L40S", 91.6, 183.0, 362.05, 362.05, "L40S data sheet"),
    _Peak(r"RTX 6000 Ada Generation", 91.1, 182.1, 364.2, 364.2, "Ada white paper, appendix A"),
    _Peak(r"H100 NVL", 60.0, 417.5, 835.5, 835.5, "H100 data sheet"),
    _Peak(r"H100 PCIe", 51.0, 378.0, 756.0, 756.0, "H100 data sheet"),
    _Peak(r"H100( \d+GB HBM\d.*)?|GH200 .*", 67.0, 494.5, 989.5, 989.5, "H100 data sheet"),
    _Peak(r"H200 NVL", 60.0, 417.5, 835.5, 835.5, "H200 data sheet"),
    _Peak(r"H200", 67.0, 494.5, 989.5, 989.5, "H200 data sheet"),
    _Peak(r"B200", 75.0, 1100.0, 2250.0, 2250.0, "HGX B200 data sheet"),
    _Peak(r"GB200", 80.0, 1250.0, 2500.0, 2500.0, "GB200 NVL72 data sheet"),
    _Peak(r"RTX 3090", 35.6, 35.6, 71.0, 71.0, "GA102 white paper, appendix A"),
    _Peak(r"RTX 4080", 48.7, 48.7, 97.5, 97.5, "Ada white paper, appendix A"),
    _Peak(r"RTX 4090", 82.6, 82.6, 165.2, 165.2, "Ada white paper, appendix A"),
    _Peak(r"RTX 5090", 104.8, 104.8, 209.5, 209.5, "RTX Blackwell white paper, appendix A"),
    _Peak(r"Instinct MI250", 45.3, None, 181.0, 181.0, "Instinct MI250 data sheet"),
    _Peak(r"Instinct MI250X", 47.9, None, 191.5, 191.5, "Instinct MI250X data sheet"),
    _Peak(r"Instinct MI300X", 163.4, 653.7, 1307.4, 1307.4, "Instinct MI300X data sheet"),
)
_PREFIX = re.compile(r"(NVIDIA|AMD|Tesla|GeForce|Quadro)\s+", re.IGNORECASE)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of a device in floating-point operations per second; None if it isn't known.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it. A slice of a GPU (MIG) or a laptop's has no figure.
        dtype: `fp32`, `tf32`, `bf16` or `fp16`. bf16 on a GPU without it: None; tf32 there is fp32.
    """
    if (peak := _peak_of(device_name)) is None:
        return None
    teraflops = {"fp32": peak.fp32, "tf32": peak.tf32 or peak.fp32, "bf16": peak.bf16, "fp16": peak.fp16}[dtype]
    return None if teraflops is None else teraflops * 1e12


def _peak_of(device_name: str) -> _Peak | None:
    name = device_name.strip()
    while (prefix := _PREFIX.match(name)) is not None:
        name = name[prefix.end() :]
    if re.search(r"\bMIG\b|\bLaptop\b|\bMax-Q\b", name):
        return None
    return next((peak for peak in _PEAKS if re.fullmatch(peak.name, name, re.IGNORECASE)), None)
