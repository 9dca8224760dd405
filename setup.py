"""Copies recipes/ into the wheel, as lockstep/recipes: in sight in the repository, and there when installed.

Everything else about the build stands in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """An editable install reads recipes/ where it is, so that there is nothing to copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for recipe in sorted(Path("recipes").rglob("*.yaml")):
                target = Path(self.build_lib, "lockstep", recipe)
                self.mkpath(str(target.parent))
                self.copy_file(str(recipe), str(target))


setup(cmdclass={"build_py": BuildWithRecipes})
