"""The published distribution: its name, its files, and a page that is readable without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import lockstep
from lockstep.core.distribution import DISTRIBUTION, pip_install, why_not_here
from lockstep.core.tracking import TRACKERS

ROOT = Path(__file__).parents[2]
PARTS = ("src", "tests", "docs", "recipes", "examples", "drills", "benchmarks")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist'); build_meta.build_wheel('dist')"


def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a source distribution and a wheel, built from a copy."""
    place = tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "runs")
    for part in PARTS:
        shutil.copytree(ROOT / part, place / part, ignore=ignored)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, place)
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=place, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return place / "dist"


def metadata(dist: Path) -> Message:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_name_is_stated_once_in_the_code() -> None:
    assert project()["name"] == DISTRIBUTION
    stating = [file for file in (ROOT / "src").rglob("*.py") if DISTRIBUTION in file.read_text()]
    assert [file.name for file in stating] == ["distribution.py"]
    installing = [file for file in (ROOT / "src").rglob("*.py") if "pip install '" in file.read_text()]
    assert [file.name for file in installing] == ["distribution.py"]


_NAMED = r"""(?:pip_install\('|partial\(_library, "\w+", "[\w.]+", ")([\w-]+)"""


def test_extras_that_messages_name_exist() -> None:
    texts = [file.read_text() for file in (ROOT / "src").rglob("*.py")]
    extras = {extra for text in texts for extra in re.findall(_NAMED, text)}
    optional = project()["optional-dependencies"]
    assert isinstance(optional, dict)
    assert (
        extras | {*TRACKERS}  # they name the package that they import
        == {
            "hf",
            "peft",
            "optimizers",
            "quantization",
            "metrics",
            "digits",
            "deepspeed",
            "lm-eval",
            "buckets",
            "aws",
            "ray",
            "nvidia",
            "prometheus",
            *TRACKERS,
        }
        <= set(optional)
    )
    assert pip_install("hf") == "pip install 'lockstep-torch[hf]'"


def test_the_documents_name_no_other_distribution() -> None:
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for named in re.findall(r"pip install '?(lockstep[\w-]*)", page.read_text()):
            assert named == DISTRIBUTION, page


def test_a_source_distribution_has_what_its_tests_need(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    assert sdist.name == f"lockstep_torch-{lockstep.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    here = {file.relative_to(ROOT).as_posix() for part in PARTS for file in (ROOT / part).rglob("*") if file.is_file()}
    wanted = {name for name in here if not re.search(r"__pycache__|\.egg-info|(^|/)runs/", name)}
    assert sorted(wanted - names) == []
    assert {"Makefile", "README.md", "CHANGELOG.md", "constraints.txt", "setup.py", "pyproject.toml"} <= names


def test_the_page_of_an_index_has_no_broken_link(dist: Path) -> None:
    found = metadata(dist)
    page = found.get_payload(decode=True).decode()  # type: ignore[union-attr]
    assert page.startswith("# Lockstep")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", page) if not link.startswith("https://")] == []
    assert "Quickstart ·" in page


def test_the_metadata_states_where_it_runs(dist: Path) -> None:
    found = metadata(dist)
    classifiers = found.get_all("Classifier") or []
    assert "Operating System :: POSIX :: Linux" in classifiers
    versions = [line.rpartition(" ")[2] for line in classifiers if re.search(r":: 3\.\d+$", line)]
    assert versions == ["3.11", "3.12", "3.13"]
    assert found["Requires-Python"] == f">={versions[0]}"
    assert found["Version"] == lockstep.__version__
    assert found["Keywords"]


@pytest.mark.drill
def test_tests_of_a_source_distribution_run(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (place,) = tmp_path.iterdir()
    environment = {**os.environ, "PYTHONPATH": str(place / "src")}
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/config", "tests/plan", "tests/core"]
    ran = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]


@pytest.mark.parametrize(("platform", "way"), [("darwin", "a virtual machine or a container"), ("win32", "WSL 2")])
def test_other_systems_are_refused_in_a_sentence(platform: str, way: str) -> None:
    code = (
        f"import sys; sys.platform = {platform!r}\n"
        "import lockstep\n"
        "try:\n    lockstep.train\nexcept ImportError as error:\n    print(error)\n"
        "from lockstep.__main__ import command\ncommand()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stdout.startswith(f"Lockstep runs on Linux, and this is {platform}; use ")
    assert re.fullmatch(rf"lockstep: Lockstep runs on Linux, and this is {platform}; use .*{way}\n", ran.stderr)


def test_linux_is_not_refused() -> None:
    assert why_not_here("linux") is None
