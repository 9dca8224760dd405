"""Finds configs by name.

stdlib-lm         ->  recipes/stdlib-lm.yaml, in a checkout or in the wheel
tiny/llama2       ->  recipes/tiny/llama2.yaml: an incomplete config to merge over a recipe
path/to/run.yaml  ->  itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.reading import Leaf, read_file
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError
from lockstep.core.local_paths import local_path
from lockstep.core.near_runs import nearest_run, peer_checkpoint

DEFAULT_RECIPE = "stdlib-lm"
_PACKAGE = Path(__file__).parents[1]
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A config file, under the name of its runs; `of_run`: it was given as the folder of its run."""

    name: str
    path: Path
    of_run: bool = False

    @property
    def description(self) -> str:
        """The line that `lockstep recipes` prints."""
        tree, _ = read_file(self.path)
        node = tree.get("description") if tree is not None else None
        return str(node.value) if isinstance(node, Leaf) else ""


def recipes() -> list[Recipe]:
    """Return the recipes; the default one first."""
    bundled = [Recipe(path.stem, path) for path in _folder().glob("*.yaml")]
    return sorted(bundled, key=lambda recipe: (recipe.name != DEFAULT_RECIPE, recipe.name))


def overlays() -> list[Recipe]:
    """Return the files to merge over a recipe, by folder and name."""
    folder = _folder()
    files = [(path.relative_to(folder).with_suffix(""), path) for path in sorted(folder.glob("*/*.yaml"))]
    return [Recipe(name.as_posix(), path) for name, path in files]


def resolve_recipe(name_or_path: str) -> Recipe:
    """Return the recipe or overlay of that name, or the config file or run at that path. Raises ConfigError."""
    path = local_path(name_or_path)
    foreign = peer_checkpoint(path)
    if path.suffix in _SUFFIXES or (path.is_file() and foreign is None):
        return _file(path)
    if (path / "config.yaml").is_file():
        return Recipe(path.absolute().name, path / "config.yaml", of_run=True)
    known = {recipe.name: recipe for recipe in recipes()}
    every = known | {recipe.name: recipe for recipe in overlays()}
    if name_or_path in every:
        return every[name_or_path]
    if foreign is not None:
        raise ConfigError(f"{name_or_path} is no recipe and no run: it {foreign}")
    of_recipes = closest_match(name_or_path, every)
    near = of_recipes if of_recipes and path.name == name_or_path else nearest_run(path) or of_recipes
    hint = f"did you mean {near}?" if near else f"the recipes are {', '.join(known)}"
    raise ConfigError(f"{name_or_path!r} is neither a recipe nor a file nor a run's folder; {hint}")


def resolve_all(names_or_paths: Sequence[str]) -> list[Recipe]:
    """Return the recipe, with the run's name, and the files to merge over it."""
    return [resolve_recipe(name) for name in names_or_paths or (DEFAULT_RECIPE,)]


def _file(path: Path) -> Recipe:
    if path.is_file():
        return Recipe(path.stem, path)
    if path.exists():
        raise ConfigError(f"{path} is not a file, and a config is one")
    neighbors = {item.stem: item for item in sorted(path.parent.glob("*")) if item.suffix in _SUFFIXES}
    near = closest_match(path.stem, neighbors)
    raise ConfigError(f"there is no file {path}" + (f"; did you mean {neighbors[near]}?" if near else ""))


def recipes_folder() -> Path:
    """Return the folder of the recipes, in the package or beside it."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "recipes"


def _folder() -> Path:
    folder, here = recipes_folder(), Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder  # short paths in messages
