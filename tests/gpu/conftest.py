"""Marks the tests of this folder, and skips them where there is no NVIDIA GPU."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    none = torch.cuda.device_count() == 0  # `is_available` would start CUDA, and no process could be forked afterwards
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            if none:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: `make gpu` runs it on one"))
