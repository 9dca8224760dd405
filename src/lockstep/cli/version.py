"""The verb `version`: lockstep version."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from lockstep import __version__
from lockstep.cli.arguments import Parser
from lockstep.core.distribution import version_of
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Print the versions of Lockstep, Python and torch, without importing torch."""
    Parser("version", "Prints versions.").parse_args(arguments)
    echo(f"lockstep {__version__}, torch {version_of('torch') or 'not installed'}, Python {platform.python_version()}")
    return 0
