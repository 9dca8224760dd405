"""Before ranks start again, their launcher finds folders that can't be written, as far as that may be over soon."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest
from kit import small

from lockstep.config.schema import Config
from lockstep.training.job import Job
from lockstep.training.writable import why_unwritable


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.EACCES, None])
@pytest.mark.parametrize("place", ["run", "checkpoints"])
def test_folders_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, place: str
) -> None:
    for name in ("run", "checkpoints"):
        (tmp_path / name).mkdir()
    opened = tempfile.TemporaryFile

    def failing(**options: Any) -> Any:
        if options["dir"].name == place and number is not None:
            raise OSError(number, "no")
        return opened(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", failing)
    config = small.config(checkpoint={"folder": str(tmp_path / "checkpoints")})
    job = Job(Config.model_validate(config), "small")
    passes = number in (None, errno.EACCES)  # which the ranks report
    assert why_unwritable(job, tmp_path / "run").partition(":")[0] == ("" if passes else str(tmp_path / place))
    assert not [*tmp_path.glob("*/*")]


def test_a_folder_that_was_deleted_is_written_again_by_the_ranks(tmp_path: Path) -> None:
    assert why_unwritable(Job(Config.model_validate(small.config()), "small"), tmp_path / "run") == ""
