"""TensorBoard's event files.

    run/tensorboard/events.out.tfevents.*     a file of records: length, its checksum, an `Event`, its checksum

The messages are TensorBoard's own; the frame around them is written here, since TensorBoard's writer imports
TensorFlow where that is installed (seconds) and a stub of it where it isn't (0.15 s, against 0.015 s), and loses
its errors in a thread. A run that resumes begins a file with a `SessionLog`, for which TensorBoard drops the later
steps of earlier files. At most ten points a second are written: more can't be seen, and metrics.jsonl has them all.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.core.media import LoggedImage
from lockstep.core.records import EvaluationReport, Request, RunInfo, SaveReport, StepReport
from lockstep.monitor.histogram import Histogram
from lockstep.monitor.jsonl import LineFile
from lockstep.monitor.meters import Throughput, update_values
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import EpochReport, ReportWriter
from lockstep.monitor.rank_meters import MeterReport, meter_values

_log = logging.getLogger("lockstep.monitor")
_SECONDS_BETWEEN_POINTS = 0.1
_TABLE_ROWS = 100  # of a table, which is shown as text
_numbers = itertools.count()


class TensorBoard(ReportWriter):
    """Writes loss, gradient norm, learning rate, rates, evaluations, epochs and what user code logs.

    Args:
        folder: of the event file, which is made at the first event.
        every: steps between points, at least.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._file: LineFile | None = None
        self._has_head = False
        self._facts: RunInfo | None = None
        self._throughput = Throughput()
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
        return (self._file,) if self._file else ()

    def start(self, info: RunInfo) -> None:
        self._facts = info

    def see(self, report: StepReport) -> Iterable[Request]:
        self._throughput.add(report)
        is_point = report.step == 1 or (report.step % self._every == 0 and report.seconds >= self._next_seconds)
        if is_point or not report.kept:
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
        tables = {name: table.markdown(_TABLE_ROWS) for name, table in logged.tables.items()}
        self._write(step, logged.numbers(), logged.histograms, {**logged.texts, **tables}, logged.images)

    def measured(self, report: MeterReport) -> None:
        self._write(report.step, meter_values(report))

    def finish(self, error: BaseException | None) -> None:
        if self._pending is not None:
            self._write_step(self._pending)
        if self.lost:
            _log.warning("%s lacks %d events", self._folder, self.lost)

    def _write_step(self, report: StepReport) -> None:
        self._pending = None
        self._next_seconds = report.seconds + _SECONDS_BETWEEN_POINTS
        self._write(report.step, update_values(report, self._throughput.moving, self._facts))

    def _write(
        self,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, Histogram] | None = None,
        texts: Mapping[str, str] | None = None,
        images: Mapping[str, LoggedImage] | None = None,
    ) -> None:
        """Write one event; the file begins with one that has its version."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        if self._file is None:  # the name that TensorBoard looks for; the number distinguishes files of one process
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
            self._file = LineFile(self._folder / name)
        if not self._has_head:
            head = [Event(wall_time=time.time(), file_version="brain.Event:2")]
            if (resumed := self._facts.resumed_from if self._facts is not None else None) is not None:
                began = SessionLog(status=SessionLog.START)
                head.append(Event(wall_time=time.time(), step=resumed + 1, session_log=began))
            self._has_head = self._file.write(b"".join(_record(event.SerializeToString()) for event in head))
        event = Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        for name, histogram in (histograms or {}).items():
            event.summary.value.add(tag=name, histo=_histogram_message(histogram))
        for name, text in (texts or {}).items():
            event.summary.value.add(tag=name, **_text_messages(text))
        for name, image in (images or {}).items():
            event.summary.value.add(tag=name, image=_image_message(image))
        if not self._file.write(_record(event.SerializeToString())) and not self._warned:
            self._warned = True
            _log.warning("can't write %s: %s; the run continues without it", self._folder, self._file.reason)


def _histogram_message(histogram: Histogram) -> Any:
    """Return a HistogramProto with empty bins between: TensorBoard begins a bin where the last one ends."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    bins: list[tuple[float, int]] = []  # limit, count
    for low, high, count in histogram.bins():
        if not bins or low > bins[-1][0]:
            bins.append((low, 0))
        bins.append((high, count))
    return HistogramProto(
        min=histogram.low,
        max=histogram.high,
        num=histogram.count,
        sum=histogram.total,
        sum_squares=histogram.squares,
        bucket_limit=[limit for limit, _ in bins],
        bucket=[count for _, count in bins],
    )


def _image_message(image: LoggedImage) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    encoded = image.png()
    return Summary.Image(
        height=image.height, width=image.width, colorspace=image.channels, encoded_image_string=encoded
    )


def _text_messages(text: str) -> dict[str, Any]:
    from tensorboard.compat.proto import types_pb2
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    data = [text.encode("utf-8", "replace")]
    return {
        "tensor": TensorProto(dtype=types_pb2.DT_STRING, string_val=data, tensor_shape=shape),
        "metadata": SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
    }


def _record(data: bytes) -> bytes:
    """Return a TFRecord: length (uint64), masked crc32c of the length, the data, masked crc32c of the data."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_crc(length), data, _masked_crc(data)))


def _crc_table() -> tuple[int, ...]:
    """Return the table of CRC-32C (Castagnoli), reflected polynomial 0x82F63B78 (RFC 3720, appendix B.4)."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    """Return the CRC-32C, masked as TFRecords have it: rotated right by 15 bits, plus a constant."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
