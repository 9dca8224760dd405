"""Modules that others import without need can be hidden from them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from lockstep.core.slow_imports import not_importable


def test_a_module_counts_as_not_installed_in_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needless.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with not_importable("needless"), pytest.raises(ImportError):
        importlib.import_module("needless")
    assert "needless" not in sys.modules
    needless = importlib.import_module("needless")
    with not_importable("needless"):
        assert importlib.import_module("needless") is needless
    assert sys.modules.pop("needless") is needless
