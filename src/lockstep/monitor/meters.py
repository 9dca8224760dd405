"""Throughput, remaining time, and the share of the hardware's peak (MFU)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lockstep.core.records import RunInfo, StepReport

_Point = tuple[float, int, int, int]
"""Seconds of training, steps, samples, tokens."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second of training, without evaluations; 0 while nothing is known."""

    steps: float
    samples: float
    tokens: float


class Throughput:
    """Rates from some of the run's reports, the first among them; `moving` ones over `window` seconds of training."""

    def __init__(self, window: float = 10.0) -> None:
        self._window = window
        self._paused = 0.0
        self._pauses: list[tuple[int, float]] = []  # those that no report has followed yet
        self._first_rates = Rates(0.0, 0.0, 0.0)
        self._points: list[_Point] = []  # the first, and the window's

    def add(self, report: StepReport) -> None:
        self._paused += sum(seconds for step, seconds in self._pauses if step < report.step)
        self._pauses = [(step, seconds) for step, seconds in self._pauses if step >= report.step]
        point = (report.seconds - self._paused, report.step, report.samples, report.tokens)
        if not self._points:
            self._points.append(point)
            seconds = report.seconds
            if report.step == 1 and seconds > 0:  # the first seconds of a resumed run may be of many steps
                self._first_rates = Rates(1 / seconds, report.update_samples / seconds, report.update_tokens / seconds)
        elif report.step <= self._points[-1][1]:
            return
        self._points.append(point)
        while len(self._points) > 3 and point[0] - self._points[2][0] >= self._window:
            del self._points[1]

    def pause(self, step: int, seconds: float) -> None:
        """Take out seconds after update `step`, such as an evaluation's."""
        self._pauses.append((step, seconds))

    @property
    def moving(self) -> Rates:
        """Rates over the window."""
        return self._since(1)

    @property
    def overall(self) -> Rates:
        """Rates since the first report, without what the first step takes longer."""
        return self._since(0)

    def remaining(self, step: int, steps: int | None) -> float | None:
        """Return the seconds of training until `steps` are done; None if that isn't known."""
        rate = self.moving.steps
        return (steps - step) / rate if steps is not None and rate > 0 else None

    def _since(self, place: int) -> Rates:
        if not self._points:
            return self._first_rates
        pairs = zip(self._points[place], self._points[-1], strict=True)
        seconds, steps, samples, tokens = (later - earlier for earlier, later in pairs)
        if not steps or seconds <= 0:
            return self._first_rates
        return Rates(steps / seconds, samples / seconds, tokens / seconds)


def model_flops_utilization(facts: RunInfo, tokens_per_second: float) -> float | None:
    """Return the share of the peak of all ranks' devices that the model's operations use, in [0, 1]; None if unknown.

    MFU as in Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B: recomputation doesn't count.
    """
    return utilization(facts.flops_per_token, facts.peak_flops, facts.ranks, tokens_per_second)


def utilization(flops: float | None, peak: float | None, ranks: float | None, tokens_per_second: float) -> float | None:
    """Return the MFU, given operations a token and the peak of a device."""
    if not flops or not peak or not ranks or not math.isfinite(tokens_per_second):
        return None
    return tokens_per_second * flops / (peak * ranks)


def update_values(report: StepReport, rates: Rates, facts: RunInfo | None) -> dict[str, float]:
    """Return the values of an update's curves; one without a target has no loss and no gradient."""
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


_PEAKS: dict[str, tuple[float, float | None, float | None, float | None]] = {
    r"V100-SXM\d.*|V100-DGXS.*": (15.7, None, None, 125.0),  # Tesla V100 data sheet
    r"V100-PCIE.*": (14.0, None, None, 112.0),  # Tesla V100 data sheet
    r"V100S-PCIE.*": (16.4, None, None, 130.0),  # Tesla V100 data sheet
    r"T4": (8.1, None, None, 65.0),  # T4 data sheet
    r"A100[- ](SXM|PCIE|PG|80GB).*": (19.5, 156.0, 312.0, 312.0),  # A100 data sheet
    r"A30": (10.3, 82.0, 165.0, 165.0),  # A30 data sheet
    r"A40": (37.4, 74.8, 149.7, 149.7),  # A40 data sheet
    r"A10": (31.2, 62.5, 125.0, 125.0),  # A10 data sheet
    r"A10G": (31.5, 35.0, 70.0, 70.0),  # A10G data sheet
    r"RTX A6000": (38.7, 77.4, 154.8, 154.8),  # GA102 white paper, appendix A
    r"L4": (30.3, 60.0, 121.0, 121.0),  # L4 data sheet
    r"L40": (90.5, 90.5, 181.05, 181.05),  # L40 data sheet
    r"L40S": (91.6, 183.0, 362.05, 362.05),  # L40S data sheet
    r"RTX 6000 Ada Generation": (91.1, 182.1, 364.2, 364.2),  # Ada white paper, appendix A
    r"H100 NVL": (60.0, 417.5, 835.5, 835.5),  # H100 data sheet
    r"H100 PCIe": (51.0, 378.0, 756.0, 756.0),  # H100 data sheet
    r"H100( \d+GB HBM\d.*)?|GH200 .*": (67.0, 494.5, 989.5, 989.5),  # H100 data sheet
    r"H200 NVL": (60.0, 417.5, 835.5, 835.5),  # H200 data sheet
    r"H200": (67.0, 494.5, 989.5, 989.5),  # H200 data sheet
    r"B200": (75.0, 1100.0, 2250.0, 2250.0),  # HGX B200 data sheet
    r"GB200": (80.0, 1250.0, 2500.0, 2500.0),  # GB200 NVL72 data sheet
    r"RTX 3090": (35.6, 35.6, 71.0, 71.0),  # GA102 white paper, appendix A
    r"RTX 4080": (48.7, 48.7, 97.5, 97.5),  # Ada white paper, appendix A
    r"RTX 4090": (82.6, 82.6, 165.2, 165.2),  # Ada white paper, appendix A
    r"RTX 5090": (104.8, 104.8, 209.5, 209.5),  # RTX Blackwell white paper, appendix A
    r"Instinct MI250": (45.3, None, 181.0, 181.0),  # Instinct MI250 data sheet
    r"Instinct MI250X": (47.9, None, 191.5, 191.5),  # Instinct MI250X data sheet
    r"Instinct MI300X": (163.4, 653.7, 1307.4, 1307.4),  # Instinct MI300X data sheet
}
"""Peaks of GPUs in TFLOP/s of fp32, tf32, bf16, fp16, dense, with fp32 accumulation (None: no such units).

By patterns of the driver's whole name without the vendor's prefixes; the first that matches counts. Where a data sheet
has figures with sparsity, half of them. A device of the MI250 is one of two dies; its fp32 is the matrix units'.
"""
_PREFIX = re.compile(r"(NVIDIA|AMD|Tesla|GeForce|Quadro)\s+", re.IGNORECASE)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of a device in floating-point operations per second; None if it isn't known.

    Args:
        device_name: As of `torch.cuda.get_device_name()`. A slice of a GPU (MIG) or a laptop's has no figure.
        dtype: `fp32`, `tf32`, `bf16` or `fp16`.
    """
    name = device_name.strip()
    while (prefix := _PREFIX.match(name)) is not None:
        name = name[prefix.end() :]
    if re.search(r"\bMIG\b|\bLaptop\b|\bMax-Q\b", name):
        return None
    matching = (peaks for pattern, peaks in _PEAKS.items() if re.fullmatch(pattern, name, re.IGNORECASE))
    fp32, tf32, bf16, fp16 = next(matching, (None,) * 4)
    teraflops = {"fp32": fp32, "tf32": tf32 or fp32, "bf16": bf16, "fp16": fp16}[dtype]
    return None if teraflops is None else teraflops * 1e12
