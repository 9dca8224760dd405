"""Curves for eyes: TensorBoard's event files.

    run/tensorboard/events.out.tfevents.*     a file of records: length, its checksum, an `Event`, its checksum

The messages are TensorBoard's own; the frame around them is written here, since TensorBoard's writer imports
TensorFlow where that is installed (seconds) and a stub of it where it isn't (0.15 s, against 0.015 s), and loses
its errors in a thread. At most ten points a second are written: more can't be seen, and metrics.jsonl has them all.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.core.records import EvaluationReport, Request, RunInfo, SaveReport, StepReport
from lockstep.monitor.jsonl import LineFile
from lockstep.monitor.meters import Throughput, model_flops_utilization
from lockstep.monitor.metric_log import Histogram, Logged
from lockstep.monitor.monitors import EpochReport, NextReport

_log = logging.getLogger("lockstep.monitor")
_SECONDS_BETWEEN_POINTS = 0.1
_FRAME = 16  # bytes of a record around its data
_numbers = itertools.count()


class TensorBoard:
    """Writes loss, gradient norm, learning rate, rates, evaluations, epochs and what user code logs.

    Args:
        folder: where the event file goes; it is made at the first event.
        every: steps between points, at least.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._file: EventFile | None = None
        self._facts: RunInfo | None = None
        self._throughput = Throughput()
        self._next = NextReport(0, math.inf)
        self._next_seconds = 0.0
        self._pending: StepReport | None = None
        self._warned = False

    @property
    def lost(self) -> int:
        """Events that could not be written."""
        return self._file.lost if self._file else 0

    @property
    def files(self) -> tuple[LineFile, ...]:
        """The event file, once it has been begun."""
        return (self._file.file,) if self._file else ()

    def start(self, facts: RunInfo) -> None:
        self._facts = facts

    def next_report(self) -> NextReport:
        return self._next

    def see(self, report: StepReport) -> Iterable[Request]:
        self._next = NextReport(report.step + self._every - report.step % self._every, math.inf)
        self._throughput.look(report)
        due = report.step == 1 or (report.step % self._every == 0 and report.seconds >= self._next_seconds)
        if due or not report.kept:
            self._write_step(report)
        else:
            self._pending = report
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self._throughput.pause(report.step, report.seconds)
        self._write(report.step, {f"evaluation/{report.name}/{key}": value for key, value in report.metrics.items()})
        return ()

    def saved(self, report: SaveReport) -> None:
        if report.failure is None:
            self._write(report.step, {"save/seconds": report.seconds, "save/lost_seconds": report.lost})

    def epoch(self, report: EpochReport) -> None:
        self._write(report.step, {"epoch/loss": report.loss, "epoch/seconds": report.seconds})

    def logged(self, step: int, logged: Logged) -> None:
        self._write(step, logged.values, logged.histograms, logged.texts)

    def finish(self, error: BaseException | None) -> None:
        if self._pending is not None:
            self._write_step(self._pending)
        if self.lost:
            _log.warning("%s lacks %d events", self._folder, self.lost)

    def _write_step(self, report: StepReport) -> None:
        self._pending = None
        self._next_seconds = report.seconds + _SECONDS_BETWEEN_POINTS
        rates = self._throughput.moving
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/loss_scale": report.loss_scale,
            "train/discarded": float(report.discarded),
            "speed/samples_per_second": rates.samples,
            "speed/tokens_per_second": rates.tokens,
        }
        mfu = model_flops_utilization(self._facts, rates.tokens) if self._facts else None
        if mfu is not None:
            values["speed/mfu"] = mfu
        self._write(report.step, values)

    def _write(
        self,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, Histogram] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        if self._file is None:
            self._file = EventFile(self._folder)
        if not self._file.write(step, values, histograms or {}, texts or {}) and not self._warned:
            self._warned = True
            _log.warning("can't write %s: %s; the run goes on without it", self._folder, self._file.reason)


class EventFile:
    """One event file. Never raises OSError: what can't be written is counted.

    Attributes:
        path: of the file.
        file: what is written to.
    """

    def __init__(self, folder: Path) -> None:
        # the name that TensorBoard looks for; the number tells the writers of one process apart
        stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self.path = folder / stem
        self.file = LineFile(self.path)
        self._has_head = False

    @property
    def lost(self) -> int:
        return self.file.lost

    @property
    def reason(self) -> OSError | None:
        return self.file.reason

    def write(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram], texts: Mapping[str, str]
    ) -> bool:
        """Writes one event; whether it is in the file."""
        from tensorboard.compat.proto.event_pb2 import Event

        if not self._has_head:
            head = Event(wall_time=time.time(), file_version="brain.Event:2")
            self._has_head = self.file.write(_record(head.SerializeToString()))
        event = Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        for name, histogram in histograms.items():
            event.summary.value.add(tag=name, histo=_histogram_message(histogram))
        for name, text in texts.items():
            event.summary.value.add(tag=name, tensor=_text_tensor(text), metadata=_text_metadata())
        return self.file.write(_record(event.SerializeToString()))


def records(data: bytes) -> Iterator[bytes]:
    """An event file cut into its records; what follows the last whole one comes in one piece."""
    at = 0
    while len(data) - at >= _FRAME:
        (length,) = struct.unpack_from("<Q", data, at)
        if length > len(data) - at - _FRAME:
            break
        yield data[at : at + length + _FRAME]
        at += length + _FRAME
    if at < len(data):
        yield data[at:]


def step_of(record: bytes) -> int | None:
    """Of the event in a record; None if it isn't whole."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    if len(record) < _FRAME or record != _record(record[12:-4]):
        return None
    try:
        return int(Event.FromString(record[12:-4]).step)
    except DecodeError:
        return None


def _histogram_message(histogram: Histogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    bins = histogram.bins()
    return HistogramProto(
        min=histogram.low,
        max=histogram.high,
        num=histogram.count,
        sum=histogram.total,
        sum_squares=histogram.squares,
        bucket_limit=[limit for bin_ in _closed(bins) for limit in bin_[:1]],
        bucket=[count for bin_ in _closed(bins) for count in bin_[1:]],
    )


def _closed(bins: list[tuple[float, float, int]]) -> list[tuple[float, int]]:
    """(limit, count) of bins that touch: TensorBoard takes a bin to begin where the one before it ends."""
    closed: list[tuple[float, int]] = []
    for low, high, count in bins:
        if not closed or low > closed[-1][0]:
            closed.append((low, 0))
        closed.append((high, count))
    return closed


def _text_tensor(text: str) -> Any:
    from tensorboard.compat.proto import types_pb2
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    return TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode("utf-8", "replace")], tensor_shape=shape)


def _text_metadata() -> Any:
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata

    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))


def _record(data: bytes) -> bytes:
    """A TFRecord: length (uint64), masked crc32c of the length, the data, masked crc32c of the data."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_crc(length), data, _masked_crc(data)))


def _masked_crc(data: bytes) -> bytes:
    """The mask of the TFRecord format: rotated right by 15 bits, plus a constant."""
    crc = _crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_table() -> tuple[int, ...]:
    """CRC-32C (Castagnoli), reflected polynomial 0x82F63B78 (RFC 3720, appendix B.4)."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def _crc32c(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
