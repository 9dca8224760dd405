"""The documentation site builds without a warning, loads nothing remote, and search finds the field's terms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


PUBLIC = {
    *(name for name in lockstep.__all__ if name not in ("__version__", "extend", "loops")),
    *(f"extend.{name}" for name in vars(lockstep.extend) if name[0] != "_" and name != "annotations"),
    *(f"loops.{name}" for name in vars(lockstep.loops) if name[0] != "_" and name != "annotations"),
}


def test_the_api_reference_has_the_public_names() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"^::: lockstep\.((?:extend\.|loops\.)?\w+)$", page, re.MULTILINE))
    assert documented == PUBLIC, "docs/api.md has a line `::: lockstep.NAME` for each"
    assert len({*lockstep.__all__} - {"__version__"}) <= 30
    assert "::: lockstep.core.protocols" in page


def test_the_api_reference_has_signatures_and_descriptions(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in sorted(PUBLIC):
        assert f'id="lockstep.{name}"' in page, name
    assert 'id="lockstep.core.protocols.Monitor"' in page


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    loads = re.compile(r"""<(?:script|img|iframe|link)[^>]*(?:src|href)=["']?(https?://[^"'\s>]+)""")
    for page in site.rglob("*.html"):
        loaded = [
            url for tag, url in ((m[0], m[1]) for m in loads.finditer(page.read_text())) if "canonical" not in tag
        ]
        assert loaded == [], page.name
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(https?:[^)]*)\)|@import", style.read_text()) == [], style.name


@pytest.mark.parametrize(
    ("terms", "page"),
    [
        ("gradient accumulation", "quickstart.html"),
        ("mixed precision", "precision.html"),
        ("all-gather", "choosing.html"),
        ("resume", "checkpoints.html"),
        ("out of memory", "memory.html"),
        ("activation checkpointing", "memory.html"),
        ("learning rate schedule", "optimizers.html"),
    ],
)
def test_search_finds_the_terms_of_the_field(site: Path, terms: str, page: str) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    words = terms.lower().split()
    found = {
        entry["location"].partition("#")[0]
        for entry in entries
        if all(word in f"{entry['title']} {entry['text']}".lower() for word in words)
    }
    assert page in found, (terms, sorted(found))
