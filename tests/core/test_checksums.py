"""The list of hashes beside published files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.failures import fails, gives

from lockstep.core import checksums


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return a small file, an empty one, and one of several chunks."""
    paths = []
    for name, data in {"a": b"some", "b c": b"", "d": bytes(40_000_000)}.items():
        (tmp_path / name).write_bytes(data)
        paths.append(tmp_path / name)
    checksums.record(paths)
    return paths


def test_a_changed_byte_and_a_changed_length_are_detected(files: list[Path]) -> None:
    for file in files:
        assert checksums.fault(file) is None
        whole = file.read_bytes()
        for changed in (whole + b"!", whole[:-1], whole[:-1] + b"!"):
            file.write_bytes(changed)
            assert (checksums.fault(file) is None) == (changed == whole)
        file.write_bytes(whole)


def test_the_list_has_the_format_of_xxhsum(files: list[Path]) -> None:
    """Compare with the output of `xxhsum -H2 a 'b c'`, version 0.8.1."""
    assert (files[0].parent / "XXH128SUMS").read_text().splitlines()[:2] == [
        "d30d9a6c4a70218eeee6b87a4ce0696c  a",
        "99aa06d3014798d86001c324468d497f  b c",
    ]


def test_a_file_that_is_not_listed_is_not_checked(files: list[Path]) -> None:
    first, second, third = files
    checksums.forget(first)
    first.write_bytes(b"another")
    assert checksums.fault(first) is None
    assert checksums.listed(first.parent) == [second, third]
    second.unlink()
    assert gives(checksums.fault(second) or "", "missing", first.parent / "XXH128SUMS")
    for file in files:
        checksums.forget(file)
    assert not (first.parent / "XXH128SUMS").exists()
    assert checksums.listed(first.parent) == []


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe", b"a\nb  \n  \n", b"0" * 32 + b"  ../a\n", b"0" * 32 + b"  /etc/passwd\n"]
)
def test_a_malformed_list_is_damaged_and_names_no_file_elsewhere(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "XXH128SUMS").write_bytes(text)
    assert checksums.listed(tmp_path) == [tmp_path / "XXH128SUMS"]
    for file in ("a", "XXH128SUMS"):
        assert "XXH128SUMS has a line that isn't a hash" in (checksums.fault(tmp_path / file) or "")


def test_every_flipped_bit_of_a_list_is_detected_until_it_is_written_again(tmp_path: Path) -> None:
    """Also one that makes a name that of another file."""
    files = [tmp_path / f"model-0000{number}" for number in (1, 3)]
    for file in files:
        file.write_text(file.name)
    checksums.record(files)
    place = tmp_path / "XXH128SUMS"
    whole = place.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        place.write_bytes(flipped)
        assert any(checksums.fault(file) for file in checksums.listed(tmp_path)), bytes(flipped)
    checksums.record(files)
    assert place.read_bytes() == whole
    assert not any(checksums.fault(file) for file in checksums.listed(tmp_path))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["a", "XXH128SUMS"])
def test_a_pipe_is_not_waited_for(files: list[Path], name: str) -> None:
    pipe = files[0].with_name(name)
    pipe.unlink()
    os.mkfifo(pipe)
    with fails(OSError, "not a file") as raised:
        checksums.fault(files[0])
    assert raised.value.filename == str(pipe)
