"""Images that user code logged, in the report: the last of each name, in the page itself."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from kit.pages import Happening, Page, make_run
from PIL import Image as Pillow

from lockstep.core.media import LoggedImage
from lockstep.monitor.metric_log import Logged
from lockstep.report import write_report
from lockstep.report.page import MOST, thumbnails
from lockstep.report.run_data import read_run


def shown(step: int, **images: np.ndarray) -> Happening:
    media = {
        name: LoggedImage(pixels.shape[1], pixels.shape[0], pixels.shape[2], pixels.tobytes())
        for name, pixels in images.items()
    }
    return lambda log: log.logged(step, Logged(media=media))


def pixels_of(source: str) -> np.ndarray:
    return np.asarray(Pillow.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))


def gray(value: int, height: int = 4, width: int = 6) -> np.ndarray:
    return np.full((height, width, 1), value, np.uint8)


def test_the_last_image_of_each_name_is_in_the_page(tmp_path: Path) -> None:
    halves = np.zeros((600, 1200, 3), np.uint8)
    halves[:, 600:] = (200, 100, 50)
    run = make_run(tmp_path, happenings={3: [shown(3, a=gray(1), b=halves)], 9: [shown(9, a=gray(7))]})
    first, second = thumbnails(read_run(run))
    assert (first.step, first.name) == (9, "a")
    assert pixels_of(first.source).tolist() == [[7] * 6] * 4
    assert np.array_equal(pixels_of(second.source), halves)
    page = write_report(run)
    images = [attributes for tag, attributes in Page(page.read_text()).elements if tag == "img"]
    assert [image["alt"] for image in images] == ["a at step 9", "b at step 3"]
    assert "The last of each name; others in media/: 1." in page.read_text()
    assert page.stat().st_size < 200_000


def test_a_page_has_so_many_images_and_no_more(tmp_path: Path) -> None:
    images = {f"image {n}": gray(n) for n in range(MOST + 5)}
    run = make_run(tmp_path, happenings={3: [shown(3, **images)]})
    assert len(thumbnails(read_run(run))) == MOST


def test_an_image_that_would_make_the_page_large_stays_in_its_file(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)
    run = make_run(tmp_path, happenings={3: [shown(3, a=noise, b=gray(2))]})
    assert [thumbnail.name for thumbnail in thumbnails(read_run(run))] == ["b"]


@pytest.mark.parametrize("damage", ["gone", "torn", "text", "link", "outside"])
def test_a_file_that_is_no_image_of_the_run_is_left_out(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path, happenings={3: [shown(3, a=gray(1), b=gray(2))]})
    (file,) = (run / "media").glob("a-*")
    if damage == "outside":
        os.rename(file, tmp_path / "a.png")
        events = (run / "events.jsonl").read_text().replace(f"media/{file.name}", "../a.png")
        (run / "events.jsonl").write_text(events)
    elif damage == "link":
        os.rename(file, tmp_path / "a.png")
        file.symlink_to(tmp_path / "a.png")
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:60])
    elif damage == "text":
        file.write_text(json.dumps({}))
    else:
        file.unlink()
    assert [thumbnail.name for thumbnail in thumbnails(read_run(run))] == ["b"]
