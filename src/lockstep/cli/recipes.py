"""The verb `recipes`: lockstep recipes."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli.arguments import Parser
from lockstep.core.terminal import echo


def run(arguments: Sequence[str]) -> int:
    """Print name and description, a line each; the default first."""
    Parser("recipes", "Lists the configs that come with Lockstep.").parse_args(arguments)

    from lockstep.config.recipes import recipes

    available = recipes()
    width = max(len(recipe.name) for recipe in available)
    for recipe in available:
        echo(f"{recipe.name:<{width}}  {recipe.description}")
    return 0
