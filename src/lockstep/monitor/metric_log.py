"""The metric log: what user code logs, kept on its rank until it is written.

    from lockstep import log

    log.mean("accuracy", right.sum(), right.numel())     sum and weight: summed over micro-batches and ranks
    log.scalar("temperature", t)                         the last value; mean over ranks
    log.histogram("logits", logits)                      counts in fixed bins; summed over micro-batches and ranks
    log.text, log.image, log.table                       the last one; of the first rank that logged one

Outside of a run nothing is kept. Values are detached at once; a GPU's tensors are read when the log is drained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.monitor.histogram import Histogram, HistogramCounts, merge_histograms
from lockstep.monitor.media import pixels_of, read_image, table_of

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Axis

_OWN = frozenset(
    {
        *(f"train/{name}" for name in ("loss", "grad_norm", "lr", "loss_scale", "discarded")),
        *(f"speed/{name}" for name in ("samples_per_second", "tokens_per_second", "mfu")),
        *(f"save/{name}" for name in ("seconds", "lost_seconds")),
        *(f"epoch/{name}" for name in ("loss", "seconds")),
        *(f"ranks/{name}" for name in ("step_seconds", "slowest_step_seconds")),
        *(f"run/{name}" for name in ("attempt", "resumed_from", "failure")),
        "step",
        "checkpoint",
    }
)
_OWN_GROUPS = ("evaluation", "time")


def refuse_own_name(kind: str, name: str) -> None:
    """Raise ValueError for an empty name, or one that the run itself writes."""
    group, _, rest = name.partition("/")
    if not name.strip():
        raise ValueError(f"log.{kind}({name!r}): the name is empty; give it one, such as 'accuracy'")
    if name in _OWN or (rest and group in _OWN_GROUPS):
        raise ValueError(f"log.{kind}({name!r}): the run itself writes {name}; give it another name, such as 'own_...'")


LONGEST_TEXT = 65536


@dataclass(frozen=True, slots=True)
class LogEntries:
    """Values that one rank logged since the last drain, as plain numbers; of `media` that isn't sent, None."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    media: Mapping[str, LoggedImage | LoggedTable | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.scalars or self.means or self.histograms or self.texts or self.media)


@dataclass(frozen=True, slots=True)
class Logged:
    """Values that all ranks logged, merged."""

    values: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    media: Mapping[str, LoggedImage | LoggedTable] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values or self.histograms or self.texts or self.media)

    @property
    def images(self) -> dict[str, LoggedImage]:
        return {name: value for name, value in self.media.items() if isinstance(value, LoggedImage)}

    @property
    def tables(self) -> dict[str, LoggedTable]:
        return {name: value for name, value in self.media.items() if isinstance(value, LoggedTable)}

    def numbers(self) -> dict[str, float]:
        """Return the values, and how many elements of each histogram aren't finite."""
        not_finite = {f"{name}/not_finite": float(part.not_finite) for name, part in self.histograms.items()}
        return {**self.values, **{name: number for name, number in not_finite.items() if number}}


class MetricLog:
    """The log of one rank: `entries`. `drain` empties it; while user code logs nothing, it costs nothing."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self.entries: dict[str, Any] = {}  # of their kinds, on their devices

    @property
    def empty(self) -> bool:
        return not self.entries

    def scalar(self, name: str, value: object) -> None:
        self._claim(name, "scalar")
        self.entries[name] = _number("scalar", name, value)

    def mean(self, name: str, total: object, weight: object) -> None:
        self._claim(name, "mean")
        self._add(name, (_number("mean", name, total), _number("mean", name, weight)))

    def histogram(self, name: str, values: object) -> None:
        self._claim(name, "histogram")
        self._add(name, HistogramCounts.of(_tensor("histogram", name, values)))

    def text(self, name: str, text: object) -> None:
        self._claim(name, "text")
        if not isinstance(text, str):
            raise TypeError(f"log.text({name!r}): expected a str, got {type(text).__name__}; log.scalar takes numbers")
        self.entries[name] = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"

    def image(self, name: str, pixels: object) -> None:
        self._claim(name, "image")
        self.entries[name] = pixels_of(name, pixels)

    def table(self, name: str, columns: object, rows: object) -> None:
        self._claim(name, "table")
        self.entries[name] = table_of(name, columns, rows)

    def drain(self) -> LogEntries:
        """Return what was logged since the last drain. Waits for what is on a GPU."""
        of_kind: dict[str, dict[str, Any]] = {kind: {} for kind in ("scalar", "mean", "histogram", "text", "media")}
        for name, value in self.entries.items():
            kind = self._kinds[name]
            of_kind["media" if kind in ("image", "table") else kind][name] = self._read(kind, value)
        self.entries = {}
        return LogEntries(*of_kind.values())

    def _read(self, kind: str, value: Any) -> Any:
        match kind:
            case "scalar":
                return float(value)
            case "mean":
                return float(value[0]), float(value[1])
            case "histogram":
                return value.read()
            case "image":
                return read_image(value)
        return value

    def take(self) -> MetricLog:
        """Move the entries since the last drain to a log of their own, without reading them."""
        taken = MetricLog()
        taken._kinds = self._kinds
        taken.entries, self.entries = self.entries, {}
        return taken

    def put_back(self, earlier: MetricLog) -> None:
        """Put entries that were taken before those that have come since."""
        since, self.entries = self.entries, {**earlier.entries}
        for name, value in since.items():
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        before = self.entries.get(name)
        if before is not None and isinstance(value, tuple):
            value = _sum(before[0], value[0]), _sum(before[1], value[1])
        elif before is not None and isinstance(value, HistogramCounts):
            value = before.plus(value)
        self.entries[name] = value

    def _claim(self, name: str, kind: str) -> None:
        before = self._kinds.get(name)
        if before is None:
            refuse_own_name(kind, name)
            self._kinds[name] = kind
        elif before != kind:
            raise ValueError(f"log.{kind}({name!r}): {name!r} was logged by log.{before} before; give it another name")


def merge(entries: Sequence[LogEntries]) -> Logged:
    """Merge all ranks' entries, in the order of ranks. A mean without weight is left out."""
    scalars, means, histograms, texts = (
        _by_name([getattr(entry, kind) for entry in entries]) for kind in ("scalars", "means", "histograms", "texts")
    )
    weights = {name: sum(weight for _, weight in parts) for name, parts in means.items()}
    return Logged(
        {
            **{name: sum(values) / len(values) for name, values in scalars.items()},
            **{name: sum(total for total, _ in means[name]) / weight for name, weight in weights.items() if weight},
        },
        {name: merge_histograms(parts) for name, parts in histograms.items()},
        {name: parts[0] for name, parts in texts.items()},
        {name: part for entry in reversed(entries) for name, part in entry.media.items() if part is not None},
    )


def collected(log: MetricLog, ranks: Axis) -> Logged:
    """Drain the logs of all ranks and merge them; a collective."""
    own = log.drain()
    entries = cast("list[LogEntries]", ranks.gather(replace(own, media=dict.fromkeys(own.media))))
    logged = merge(entries)
    if any(entry.media for entry in entries):  # each is sent by one rank only
        before = {name for entry in entries[: ranks.rank] for name in entry.media}
        part = {name: value for name, value in own.media.items() if name not in before}
        parts = cast("list[dict[str, LoggedImage | LoggedTable]]", ranks.gather(part))
        logged = replace(logged, media={name: media for of_rank in parts for name, media in of_rank.items()})
    return logged


def _by_name(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for logged in of_ranks:
        for name, value in logged.items():
            values.setdefault(name, []).append(value)
    return values


# --- the functions that user code calls ----------------------------------------------------------------------------

_current: MetricLog | None = None


@contextmanager
def recording(log: MetricLog) -> Iterator[MetricLog]:
    """Send what user code logs inside the block to `log`."""
    global _current
    before, _current = _current, log
    try:
        yield log
    finally:
        _current = before


def current() -> MetricLog:
    """Return the log that user code writes to; outside of a run an empty one."""
    return _current or MetricLog()


def scalar(name: str, value: float | Tensor) -> None:
    """Log one number: the last value before the log is written, averaged over the ranks that logged it."""
    if _current is not None:
        _current.scalar(name, value)


def mean(name: str, sum: float | Tensor, weight: float | Tensor) -> None:  # noqa: A002
    """Log a mean as its sum and its weight (the number of values), exact over micro-batches, steps and ranks."""
    if _current is not None:
        _current.mean(name, sum, weight)


def histogram(name: str, values: Tensor) -> None:
    """Log the distribution of a tensor's elements, in bins of an eighth of a decade; of a sharded one, its shard."""
    if _current is not None:
        _current.histogram(name, values)


def text(name: str, text: str) -> None:
    """Log a text, cut to 65,536 characters."""
    if _current is not None:
        _current.text(name, text)


def image(name: str, pixels: Tensor) -> None:
    """Log an image: [height, width] or [1, 3 or 4 channels, height, width]; uint8, or floats, clamped to 0 to 1.

    Where several ranks log it, the first one's counts; more than 4,194,304 pixels are refused.
    """
    if _current is not None:
        _current.image(name, pixels)


def table(name: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Log a table of strings, numbers, bools and None, cut to 1,000 rows.

    Where several ranks log it, the first one's counts.
    """
    if _current is not None:
        _current.table(name, columns, rows)


def merged_histogram(values: Tensor) -> Histogram:
    """Return the distribution of all ranks' elements, such as gradients; a collective, in any loop."""
    own = HistogramCounts.of(_tensor("histogram", "values", values)).read()
    from lockstep.distributed.user_collectives import gather  # it imports torch

    return merge_histograms(gather(own))


# --- numbers ------------------------------------------------------------------------------------------------------


def _number(kind: str, name: str, value: object) -> float | Tensor:
    """Return a float if that needs no waiting, otherwise a copy on the device: later in-place changes must not show."""
    if isinstance(value, int | float):
        return float(value)
    tensor = _tensor(kind, name, value)
    if tensor.numel() != 1:
        raise ValueError(
            f"log.{kind}({name!r}): expected one number, got a tensor of shape {list(tensor.shape)}; use log.histogram"
        )
    if tensor.device.type == "cpu":
        return float(tensor)
    wide = tensor.float() if tensor.device.type == "mps" else tensor.double()
    return wide.reshape(()).clone()


def _tensor(kind: str, name: str, value: object) -> Tensor:
    import torch

    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    if tensor.is_complex():
        raise ValueError(f"log.{kind}({name!r}): complex numbers can't be logged; log .abs(), or .real and .imag")
    return tensor


def _sum(total: float | Tensor, more: float | Tensor) -> float | Tensor:
    return total + more if isinstance(total, float) or isinstance(more, float) else total + more.to(total.device)
