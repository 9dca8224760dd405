"""TensorBoard's event files: records of length, its checksum, an `Event`, its checksum.

TensorBoard's own writer takes seconds to import, and loses its errors in a thread. A resumed run begins a file with
a `SessionLog`, so that TensorBoard drops the later steps of earlier files.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.core.tracking import Bins, TrackedRun, Tracker, edges_and_counts
from lockstep.monitor.jsonl import LineFile

_TABLE_ROWS = 100  # of a table, which is shown as text
_numbers = itertools.count()


class TensorBoard(Tracker):
    """Writes an event file in `folder`, with the first event."""

    def __init__(self, folder: Path) -> None:
        number = next(_numbers)  # distinguishes files of one process
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number:06d}"
        self.files = (LineFile(folder / name),)
        self._resumed_from: int | None = None
        self._has_head = False

    def start(self, run: TrackedRun) -> None:
        self._resumed_from = run.resumed_from

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, [{"tag": name, "simple_value": value} for name, value in values.items()])

    def histograms(self, step: int, histograms: Mapping[str, Bins]) -> None:
        self._write(step, [{"tag": name, "histo": _histogram(bins)} for name, bins in histograms.items()])

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._write(step, [{"tag": name, **_text(text)} for name, text in texts.items()])

    def images(self, step: int, images: Mapping[str, LoggedImage]) -> None:
        self._write(step, [{"tag": name, "image": _image(image)} for name, image in images.items()])

    def tables(self, step: int, tables: Mapping[str, LoggedTable]) -> None:
        self.texts(step, {name: table.markdown(_TABLE_ROWS) for name, table in tables.items()})

    def _write(self, step: int, values: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.time()
        head = [Event(wall_time=now, file_version="brain.Event:2")]
        if self._resumed_from is not None:
            began = SessionLog(status=SessionLog.START)
            head.append(Event(wall_time=now, step=self._resumed_from + 1, session_log=began))
        event = Event(wall_time=now, step=step, summary=Summary(value=[Summary.Value(**value) for value in values]))
        events = [event] if self._has_head else [*head, event]
        data = b"".join(_record(each.SerializeToString()) for each in events)
        self._has_head = self.files[0].write(data) or self._has_head


def _histogram(bins: Bins) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    if not bins:
        return HistogramProto()
    edges, counts = edges_and_counts(bins)
    return HistogramProto(
        min=edges[0], max=edges[-1], num=sum(counts), bucket_limit=edges, bucket=[0, *counts]
    )  # the first bucket ends at the smallest value


def _image(image: LoggedImage) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    encoded = image.png()
    return Summary.Image(
        height=image.height, width=image.width, colorspace=image.channels, encoded_image_string=encoded
    )


def _text(text: str) -> dict[str, Any]:
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
