"""Thumbnails of the images that user code logged, as data in the page: it stays one file.

media/attention-00000300.png --> 8 bits a channel, rows unfiltered: as runs write them --> mean of k x k pixels
"""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from lockstep.core.media import LoggedImage
from lockstep.report.logged_files import MOST_BYTES, content, newest_of_each
from lockstep.report.run_data import LoggedFile, RunData

_SIDE = 256  # pixels of a thumbnail, at most
_SMALLEST = 96  # pixels on the screen, to which smaller images are enlarged
_CHANNELS = {0: 1, 2: 3, 6: 4}  # by the color type of a PNG
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small image.

    Attributes:
        source: The PNG as an address of the scheme `data`.
        width, height: Pixels on the screen.
        size: Of the whole image, such as `640 x 480`.
    """

    step: int
    name: str
    source: str
    width: int
    height: int
    size: str


def thumbnails(run: RunData) -> list[Thumbnail]:
    """Return the last image of each name, as far as they can be read."""
    shown = (_thumbnail(run, image) for image in newest_of_each(run.images))
    return [thumbnail for thumbnail in shown if thumbnail is not None]


def _thumbnail(run: RunData, image: LoggedFile) -> Thumbnail | None:
    try:
        decoded = _decoded(content(run, image))
    except (OSError, ValueError, IndexError, struct.error, zlib.error):
        return None
    small = _shrunk(decoded)
    shown = max(1, round(_SMALLEST / max(small.width, small.height)))
    source = "data:image/png;base64," + base64.b64encode(small.png()).decode()
    size = f"{decoded.width} x {decoded.height}"
    return Thumbnail(image.step, image.name, source, small.width * shown, small.height * shown, size)


def _decoded(data: bytes) -> LoggedImage:
    """Return the image of a PNG that a run has written. Raises ValueError for any other file."""
    if not data.startswith(_SIGNATURE):
        raise ValueError("not a PNG")
    chunks: dict[bytes, bytes] = {}
    at = len(_SIGNATURE)
    while at < len(data) and b"IEND" not in chunks:
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        chunks[kind] = chunks.get(kind, b"") + data[at + 8 : at + 8 + length]
        at += length + 12
    width, height, bits, color, *rest = struct.unpack(">IIBBBBB", chunks.get(b"IHDR", b""))
    channels = _CHANNELS.get(color, 0)
    stride = 1 + width * channels
    if bits != 8 or not channels or any(rest) or not 0 < height * stride <= MOST_BYTES:
        raise ValueError("not as a run writes it")
    pixels = zlib.decompressobj().decompress(chunks.get(b"IDAT", b""), height * stride)
    if len(pixels) != height * stride or any(pixels[::stride]):
        raise ValueError("not as a run writes it")
    rows = np.frombuffer(pixels, np.uint8).reshape(height, stride)
    return LoggedImage(width, height, channels, rows[:, 1:].tobytes())


def _shrunk(image: LoggedImage) -> LoggedImage:
    """Return the means of squares of pixels that make it small enough; what is left of them at the edges is cut."""
    factor = -(-max(image.width, image.height) // _SIDE)
    width, height = image.width // factor, image.height // factor
    if factor == 1 or not width or not height:
        return image
    whole = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, image.channels)
    cut = whole[: height * factor, : width * factor].reshape(height, factor, width, factor, image.channels)
    return LoggedImage(width, height, image.channels, cut.mean(axis=(1, 3)).round().astype(np.uint8).tobytes())
