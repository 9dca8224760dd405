"""Pages: text never becomes markup, and a page needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.report.html import render


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A caller's own templates."""
    folder = tmp_path_factory.mktemp("templates")
    (folder / "paragraph.html").write_text('<p title="{{ text }}">{{ text }}</p>')
    (folder / "table.html").write_text('{% import "macros.html" as show %}{{ show.table(rows, caption) }}')
    return folder


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_text_never_becomes_markup(folder: Path, text: str) -> None:
    shown = render("paragraph.html", folder, text=text)
    assert re.fullmatch(r'<p title="[^<>"]*">[^<>]*</p>', shown, re.DOTALL)
    assert shown.encode()


def test_text_is_escaped_once_and_half_of_a_surrogate_pair_is_a_question_mark(folder: Path) -> None:
    assert render("paragraph.html", folder, text="1 < 2") == '<p title="1 &lt; 2">1 &lt; 2</p>'
    assert render("paragraph.html", folder, text="\ud800") == '<p title="?">?</p>'


def test_macros_escape_too(folder: Path) -> None:
    table = render("table.html", folder, rows=[["a <", "b"], ["&", "2"]], caption="<c>")
    assert '<th scope="col">a &lt;</th>' in table
    assert '<tr><th scope="row">&amp;</th><td>2</td></tr>' in table
    assert '<caption class="hidden">&lt;c&gt;</caption>' in table


def test_a_value_that_a_template_lacks_is_an_error(folder: Path) -> None:
    with pytest.raises(jinja2.UndefinedError, match="'text' is undefined"):
        render("paragraph.html", folder)
