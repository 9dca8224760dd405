"""Histograms of weights and gradients by the names of parameters, over the ranks that hold them.

    every `monitor.histograms.every` updates:
        backward --> count gradients --> optimizer --> count weights --> the update's report: gather, merge --> monitors

Of the ranks that hold the same part of a parameter one counts it, so each element counts once under every strategy, and
ranks divide the work. Who counts what is agreed on again whenever what a rank holds changes.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed.shard_boxes import Box, local_shards, local_tensor
from lockstep.monitor.histogram import Histogram, HistogramCounts, merge_histograms
from lockstep.monitor.metric_log import Logged

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.schema import HistogramsConfig
    from lockstep.core.protocols import Axis
    from lockstep.core.records import StepReport
    from lockstep.training.components import Components

_log = logging.getLogger("lockstep.monitor")
_Part = tuple[str, tuple[Box, ...]]
_Pairs = Callable[[], Iterable[tuple[str, "Tensor"]]]


class ModelHistograms:
    """Counts what this rank holds in the updates that are recorded; others cost nothing.

    Args:
        names: of the model's parameters, on all ranks.
        weights: returns the trained parameters that this rank holds, or its shards of them.
        gradients: returns their gradients, summed over ranks and not unscaled.

    Raises:
        ConfigError: a pattern matches no parameter.
    """

    def __init__(
        self, config: HistogramsConfig, axis: Axis, names: Sequence[str], weights: _Pairs, gradients: _Pairs
    ) -> None:
        unmatched = [pattern for pattern in config.parameters if not any(fnmatchcase(name, pattern) for name in names)]
        if unmatched:
            text = f"{unmatched[0]!r} matches none of the model's {len(names)} parameters, such as {names[0]}"
            raise ConfigError(Problem("", "monitor.histograms.parameters", text))
        self._config = config
        self._axis = axis
        self._pairs = {"weights": weights, "gradients": gradients}
        self._shares = {kind: _Shares(axis) for kind in self._pairs}
        self._counts: dict[int, dict[str, list[HistogramCounts]]] = {}  # by steps whose reports haven't arrived
        self._warned = False

    def count_gradients(self, step: int, scale: float | Tensor) -> None:
        """Count the gradients of update `step` / `scale`, before they are clipped. All ranks together."""
        self._count("gradients", step, scale)

    def count_weights(self, step: int) -> None:
        """Count the weights after update `step`. All ranks together."""
        self._count("weights", step)

    def see(self, report: StepReport) -> Logged:
        """Return the histograms of an update whose report has arrived, merged over ranks. All ranks together."""
        counts = self._counts.pop(report.step, None)
        if counts is None:
            return Logged()
        own = {name: merge_histograms([count.read() for count in parts]) for name, parts in counts.items()}
        by_name: dict[str, list[Histogram]] = {}
        for of_rank in cast("list[Mapping[str, Histogram]]", self._axis.gather(own)):
            for name, histogram in of_rank.items():
                by_name.setdefault(name, []).append(histogram)
        histograms = {name: merge_histograms(by_name[name]) for name in sorted(by_name)}
        self._warn(report.step, histograms)
        return Logged(of_model=histograms)

    def _count(self, kind: str, step: int, scale: float | Tensor = 1.0) -> None:
        if step % self._config.every or self._config.of not in (kind, "both"):
            return
        counts = self._counts.setdefault(step, {})
        for name, tensor in self._shares[kind].own(self._chosen(kind)):
            local = local_tensor(tensor)
            values = local if isinstance(scale, float) and scale == 1.0 else local / scale
            counts.setdefault(f"{kind}/{name}", []).append(HistogramCounts.of(values))

    def _chosen(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._pairs[kind]():
            if any(fnmatchcase(name, pattern) for pattern in self._config.parameters):
                yield name, tensor

    def _warn(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Name what has values that aren't finite, once, on the first rank."""
        names = [name for name, histogram in histograms.items() if histogram.not_finite]
        if names and not self._warned and self._axis.rank == 0:
            self._warned = True
            number = histograms[names[0]].not_finite
            more = f", and so do {len(names) - 1} more" if len(names) > 1 else ""
            _log.warning("%s has %d values at step %d that are not finite%s", names[0], number, step, more)


def histograms_of(components: Components) -> ModelHistograms | None:
    """Return the histograms that the config has, which see each update's gradients from now on; None: it has none."""
    config, tensors, sharding = components.config.monitor.histograms, components.tensors, components.sharding
    if config is None:
        return None
    names = [name for name in tensors.shapes if name in tensors.parameters]
    axis = components.world.axis
    histograms = ModelHistograms(config, axis, names, sharding.state.trained_parameters, sharding.step.gradients)
    components.gradient_observers.append(histograms.count_gradients)
    return histograms


class _Shares:
    """The parts of tensors that this rank counts, of those that it holds."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._known: list[object] = []
        self._own: frozenset[_Part] = frozenset()

    def own(self, pairs: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the tensors that this rank counts. All ranks together."""
        held = {(name, local_shards(tensor).boxes): tensor for name, tensor in pairs if local_tensor(tensor).numel()}
        checksum = zlib.crc32(repr([(name, _numbers(boxes)) for name, boxes in held]).encode())
        checksums = self._axis.gather(checksum)
        if checksums != self._known:
            self._known = checksums
            everywhere = cast("list[list[_Part]]", self._axis.gather(list(held)))
            self._own = _assigned(everywhere, self._axis.rank)
        return [(part[0], tensor) for part, tensor in held.items() if part in self._own]


def _assigned(everywhere: Sequence[Sequence[_Part]], rank: int) -> frozenset[_Part]:
    """Return the parts that `rank` counts: of those that several ranks hold, each its share."""
    holders: dict[_Part, list[int]] = {}
    for holder, parts in enumerate(everywhere):
        for part in parts:
            holders.setdefault(part, []).append(holder)
    return frozenset(part for index, (part, ranks) in enumerate(holders.items()) if ranks[index % len(ranks)] == rank)


def _numbers(boxes: Sequence[Box]) -> list[Any]:
    return [(box.offsets, box.sizes) for box in boxes]
