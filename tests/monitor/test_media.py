"""Images and tables of user code: what is accepted, which rank's counts, and what the run's files have."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.worlds import in_world
from PIL import Image as Pillow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep
from lockstep import log
from lockstep.core import slow_imports
from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.monitor import history
from lockstep.monitor.media import MediaFolder, file_name
from lockstep.monitor.metric_log import MetricLog, merge

COLORS = torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(3, 2, 3)


def logged_image(pixels: object) -> LoggedImage:
    entries = MetricLog()
    entries.image("x", pixels)
    image = merge([entries.drain()]).images["x"]
    assert isinstance(image, LoggedImage)
    return image


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        (COLORS, COLORS.permute(1, 2, 0).numpy()),
        (COLORS / 255, COLORS.permute(1, 2, 0).numpy()),
        (COLORS[:1], COLORS[0].numpy()),
        (COLORS[1].numpy(), COLORS[1].numpy()),
        (torch.tensor([[-1.0, 0.5, 2.0, float("nan")]], dtype=torch.bfloat16), np.array([[0, 128, 255, 0]])),
    ],
)
def test_an_image_is_a_png_that_other_readers_read(pixels: object, expected: np.ndarray) -> None:
    image = logged_image(pixels)
    assert np.array_equal(np.asarray(Pillow.open(io.BytesIO(image.png()))), expected)


def test_a_later_change_doesn_t_show() -> None:
    entries, pixels = MetricLog(), COLORS.clone()
    entries.image("x", pixels)
    pixels.zero_()
    assert entries.drain().media["x"] == logged_image(COLORS)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), "floats from 0 to 1, got int64; convert them"),
        (torch.zeros(8, 3, 4, 4), "got a tensor of shape [8, 3, 4, 4]"),
        (torch.zeros(32, 32, 3), "got a tensor of shape [32, 32, 3]"),
        (torch.zeros(3, 0, 4), "expected [height, width] or [1, 3 or 4 channels, height, width]"),
        (torch.zeros(1, 1, dtype=torch.uint8).expand(4096, 4096), "4096 x 4096 is more than 4,194,304 pixels"),
    ],
)
def test_what_is_no_image_is_refused(pixels: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        MetricLog().image("x", pixels)


def test_a_table_has_plain_cells_and_is_cut() -> None:
    entries = MetricLog()
    rows = [["a" * 2000, np.float32(0.5), torch.tensor(3), True, None]] + [["b", 1, 2, 3, 4]] * 1999
    entries.table("x", ["text", "a", "b", "c", "d"], rows)
    table = merge([entries.drain()]).tables["x"]
    assert table.rows[0] == ("a" * 999 + "…", 0.5, 3, True, None)
    assert (len(table.rows), table.left_out) == (1000, 1000)
    assert LoggedTable(("a|b",), (("x\ny",), (None,)), 5).markdown(1) == "| a\\|b |\n| --- |\n| x y |\n\n6 more rows"


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ("ab", [], "columns must be a list, not str"),
        ([], [], "0 columns; a table has 1 to 100"),
        (["a"], 3, "rows must be a list, not int"),
        (["a"], ["b"], "row 0 must be a list, not str"),
        (["a", "b"], [[1, 2], [1]], "row 1 has 1 cells, but there are 2 columns"),
        (["a"], [[torch.zeros(2)]], "row 0: expected a string, a number, a bool or None, got Tensor"),
    ],
)
def test_what_is_no_table_is_refused(columns: Any, rows: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        MetricLog().table("x", columns, rows)


class Logging(small.CrossEntropy):
    """Logs an image on the second rank alone, and a table on both."""

    def loss_sum(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        rank = torch.distributed.get_rank()
        if rank == 1:
            log.image("only/second", COLORS)
        log.table("ranks", ["rank"], [[rank]])
        return super().loss_sum(outputs, batch)


def _train(folder: str) -> None:
    monitor = {"every": 2, "progress": "none"}
    sections = {"run": {"steps": 4, "folder": folder}, "monitor": monitor, "parallel": {"strategy": "ddp"}}
    lockstep.train(small.config(**sections), objective=Logging())


def test_the_first_rank_that_has_one_counts(tmp_path: Path) -> None:
    in_world(2, _train, str(tmp_path))
    name = file_name("only/second")
    expected = [f"{name}-00000002.png", f"{name}-00000004.png", "ranks-00000002.json", "ranks-00000004.json"]
    assert sorted(file.name for file in (tmp_path / "media").iterdir()) == expected
    table = json.loads((tmp_path / "media" / "ranks-00000004.json").read_text())
    assert table == {"columns": ["rank"], "rows": [[0]], "left_out": 0}
    logged = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines() if "logged" in line]
    assert logged[0]["logged"]["only/second"] == {"width": 3, "height": 2, "file": f"media/{name}-00000002.png"}
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    points = events.Images("only/second")
    assert [(point.step, point.width, point.height) for point in points] == [(2, 3, 2), (4, 3, 2)]
    assert np.array_equal(np.asarray(Pillow.open(io.BytesIO(points[0].encoded_image_string))), COLORS.permute(1, 2, 0))
    (text,) = {event.tensor_proto.string_val[0] for event in events.Tensors("ranks")}
    assert text == b"| rank |\n| --- |\n| 0 |"


def test_the_folder_is_bounded_and_rewound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = logged_image(COLORS)
    folder = MediaFolder(tmp_path / "media", most_bytes=2 * len(image.png()))
    for step in (10, 20, 30, 40):
        folder.write(step, {"x": image})
    assert sorted(file.name for file in (tmp_path / "media").iterdir()) == ["x-00000010.png", "x-00000020.png"]
    assert caplog.messages == [
        f"{tmp_path / 'media'} has {2 * len(image.png())} bytes: further images and tables are not kept there"
    ]
    assert MediaFolder(tmp_path / "media", 100).write(50, {"x": image})["x"]["file"] is None, "earlier attempts count"
    history.rewind(tmp_path, 10, tmp_path / "earlier" / "1")
    assert [file.name for file in (tmp_path / "media").iterdir()] == ["x-00000010.png"]
    assert [file.name for file in (tmp_path / "earlier" / "1" / "media").iterdir()] == ["x-00000020.png"]


def test_a_full_disk_costs_the_files_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "media").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        record = MediaFolder(tmp_path / "media").write(1, {"x": logged_image(COLORS), "y": LoggedTable(("a",), ())})
    assert [entry["file"] for entry in record.values()] == [None, None]
    assert len(caplog.messages) == 1


def test_file_names_differ_where_names_do() -> None:
    names = ["a/b", "a_b", "a b", "../x", "x", "ä", "é" * 300]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert all(re.fullmatch(r"[\w\-.]{1,109}", file) and not file.startswith(".") for file in files)


def test_a_fork_waits_for_an_import_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_slow_module.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=slow_imports.import_beside, args=("a_slow_module",))
    began = time.perf_counter()
    thread.start()
    time.sleep(0.1)
    slow_imports._before_fork()
    slow_imports._after_fork()
    assert time.perf_counter() - began > 0.4
    thread.join()
