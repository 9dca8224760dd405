"""A manifest with right hashes and values that no run has written: the run resumes from the checkpoint before it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.failures import fails

import lockstep
from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.cli.main import main
from lockstep.core.errors import VerificationError
from lockstep.core.failure_kinds import FailureKind
from lockstep.loop.ledger import audit


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    section = {"every": "2 steps", "keep_last": 9, "asynchronous": False}
    lockstep.train(small.config(checkpoint=section, run={"steps": 6, "folder": str(run)}))
    return run


def _changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, list):
        return [_changed(part, path[1:], new) if index == path[0] else part for index, part in enumerate(value)]
    return {**value, path[0]: _changed(value.get(path[0]), path[1:], new)}


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("state", "data"), [3]),
        (("state", "data"), 3),
        (("state", "loss_scale"), {}),
        (("state", "patience"), {"discarded": 0}),
        (("state", "sharding", "optimizer"), {"inner.weight": {"step": "x"}}),
        (("state", "sharding", "groups"), [{}]),
        (("state", "sharding", "groups"), [{"lr": [], "betas": 3}]),
        (("state", "sharding", "tied"), 7),
        (("state", "ledger"), 7),
        (("state", "early_stopping"), {"metric": "held-out.loss", "of_another_version": 1}),
        (("config", "run"), 7),
        (("config", "model"), [1]),
    ],
    ids=str,
)
def test_the_checkpoint_before_it_is_taken(
    path: tuple[str, ...], new: Any, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    storage = LocalStorage(run / "checkpoints")
    manifest = read_manifest(storage, "step-00000006")
    body = manifest.model_dump(mode="json")
    wrong = manifests.Manifest.model_validate_json(json.dumps(_changed(body, path, new)))
    (run / "checkpoints/step-00000006/manifest.json").write_bytes(manifests.to_bytes(wrong))
    config = small.config(checkpoint={"keep_last": 9}, run={"steps": 8, "folder": str(run)})
    if path[0] == "config":  # another model, or seed, is no fault: it is named
        with fails(lockstep.ConfigError, kind=FailureKind.OTHER_DATA):
            lockstep.train(config)
        return
    summary = lockstep.train(config).summary
    assert summary["steps"] == 8
    for verb in (["ckpt", "ls"], ["ckpt", "show"], ["ckpt", "audit"], ["ckpt", "verify"]):
        assert main([*verb, str(run)]) in (0, 3)


def test_an_audit_of_more_samples_than_can_be_computed_ends() -> None:
    order = {"seed": 1, "shuffle": True, "samples": 40, "epoch_samples": 40, "fingerprint": "x"}
    state = {"ledger": [{"attempt": 1, "ranks": 1, "first": 0, "last": 2**60, "digest": 0, "order": order}]}
    with fails(VerificationError, "1,152,921,504,606,846,976 samples"):
        audit(state, 2**60)
