"""What pyproject.toml can't state: recipes in the wheel, and a README whose links hold on an index page.

recipes/     copied into the wheel as lockstep/recipes: in sight in the repository, and there when installed
Dockerfile   with compose.yaml and .dockerignore copied as lockstep/docker, for `lockstep init docker`
README.md    its links into the repository lead nowhere from an index page; there they are plain words
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n*")
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)[^)]*\)")


_OF_DOCKER = ("Dockerfile", "compose.yaml", ".dockerignore")


class BuildWithRecipes(build_py):
    """An editable install reads these files where they are, so that there is nothing to copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copies = {path: path for path in sorted(Path("recipes").rglob("*.yaml"))}
            copies |= {Path(name): Path("docker", name) for name in _OF_DOCKER}
            for source, place in copies.items():
                target = Path(self.build_lib, "lockstep", place)
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


def index_page(readme: str) -> str:
    """Return the README without relative images, and with the text of relative links instead of the links."""
    return _LINK.sub(r"\1", _IMAGE.sub("", readme))


setup(
    cmdclass={"build_py": BuildWithRecipes},
    long_description=index_page(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
