"""Small files are appended to, and forgotten, whatever state they are in."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lockstep.core.files import append_line, forget


@pytest.mark.parametrize(
    ("before", "after"), [(None, "b\n"), ("", "b\n"), ("a\n", "a\nb\n"), ("a", "a\nb\n"), ("a\n{", "a\n{\nb\n")]
)
def test_a_line_is_appended_on_a_line_of_its_own(tmp_path: Path, before: str | None, after: str) -> None:
    file = tmp_path / "lines"
    if before is not None:
        file.write_text(before)
    append_line(file, "b")
    assert file.read_text() == after


def test_a_line_is_written_whole_if_the_disk_takes_it_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, text: write(handle, text[:3]))
    append_line(tmp_path / "lines", "0123456789")
    assert (tmp_path / "lines").read_text() == "0123456789\n"


def test_a_file_is_forgotten_if_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "record"
    forget(file)
    file.touch()
    forget(file)
    assert not file.exists()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    file.touch()
    monkeypatch.setattr(os, "unlink", refuse)
    forget(file)
    assert file.exists()
