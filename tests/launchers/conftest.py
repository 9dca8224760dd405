"""What is installed is looked up once, not in each of a thousand calls of `lockstep launch`: that is half of a call."""

import functools
import importlib.metadata
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _packages_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", functools.cache(importlib.metadata.entry_points))
        yield
