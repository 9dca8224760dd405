"""Lockstep as pip knows it: stated here, and in pyproject.toml; a test compares them."""

from __future__ import annotations

DISTRIBUTION = "lockstep-torch"


def pip_install(extra: str) -> str:
    """The command that installs what an extra stands for."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
