"""Whether a start has the data of a checkpoint: samples that one of them hasn't read don't matter, all others do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kit import small

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.core.errors import ConfigError
from lockstep.training.audit import audit
from lockstep.training.data_identity import continued


def identity(fingerprint: str, parts: Sequence[str | None] | None) -> dict[str, Any]:
    facts = {"fingerprint": fingerprint, "samples": 40, "epoch_samples": 40}
    return facts if parts is None else {**facts, "parts": [*parts]}


@pytest.mark.parametrize(
    ("before", "now", "known"),
    [
        ("abc", "abc", "abc"),
        ("abc", "a-c", "abc"),  # left out now
        ("a-c", "abc", "abc"),  # read again
        ("a-c", "ab-", "abc"),
        (None, "abc", "abc"),  # of a version that didn't record parts
        (None, "a-c", "a-c"),
        (None, "", ""),  # of another kind
        ("", "", ""),
    ],
)
def test_the_same_data_keeps_its_identity(before: str | None, now: str, known: str) -> None:
    def parts(text: str) -> list[str | None]:
        return [None if letter == "-" else letter for letter in text]

    all_read = "-" not in f"{before}{now}"
    resumed = continued(
        identity("then", None if before is None else parts(before)),
        identity("then" if all_read else "now", parts(now)),
    )
    assert resumed == identity("then", parts(known))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([None, "b"], ["a", "x"]),
        (["a", "b", None], ["a", "b"]),
        (["a", "b"], ["a", "b"]),  # only the whole differs: of a version that covered more, or less
        (["a", None], []),
        ([], []),
        (None, []),
        (None, ["a", "b"]),
    ],
)
def test_other_data_is_other_data(before: Sequence[str | None] | None, now: Sequence[str | None]) -> None:
    found = identity("now", now)
    assert continued(identity("then", before), found) == found


class Labels:
    """Points, one of which may have another label."""

    def __init__(self, changed: int | None = None) -> None:
        self._points, self._changed = small.points(), changed

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        point, label = self._points[index]
        return point, (label + 1) % 3 if index == self._changed else label


def test_any_sample_can_be_left_out_when_a_run_resumes_and_read_again_while_others_must_be_the_same(
    tmp_path: Path,
) -> None:
    def train(steps: int, *left_out: int, changed: int | None = None) -> Any:
        config = small.config(
            run={"steps": steps, "folder": str(tmp_path / "run")},
            schedule={"kind": "constant"},
            monitor={"tensorboard": False, "progress": "none"},
            data={"train": {"kind": "given"}, "leave_out": [[index, index] for index in left_out]},
        )
        return lockstep.train(config, train_dataset=Labels(changed)).summary["steps"]

    assert [train(2), train(4, 0), train(6, 39), train(8)] == [2, 4, 6, 8]
    for changed in (0, 39):
        with pytest.raises(ConfigError, match="of a run with other data, model or seed"):
            train(10, 39 - changed, changed=changed)
    assert train(10, 39, changed=39) == 10
    storage = LocalStorage(tmp_path / "run" / "checkpoints")
    manifest = read_manifest(storage, storage.names()[-1])
    found = audit(manifest.state, manifest.samples)
    assert found.complete
    assert not found.changes
