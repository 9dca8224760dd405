"""The planted runs, made once for all files of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.worlds import in_process, in_world
from profiling import planted


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    in_process(planted.train_alone, folder)
    in_world(2, planted.train_on_two, folder)
    return folder
