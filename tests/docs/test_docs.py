"""The pages are correct: named items exist, shown files are current, and quoted messages are those that are printed."""

from __future__ import annotations

import ast
import importlib
import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path

import pytest
import yaml
from kit.commands import run_lockstep, run_script

from lockstep.cli import plan
from lockstep.cli.launch_command import VERBS as LAUNCHED
from lockstep.cli.main import VERBS, main
from lockstep.config import shape
from lockstep.config.loading import validate

ROOT = Path(__file__).parents[2]
GENERATED = {"config.md"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED),
]
FENCE = re.compile(r"(?:<!-- file: (\S+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PLACEHOLDERS = {"path/to/file.py:Name"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for _, language, text in FENCE.findall(page.read_text()) if language in languages]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def commands(page: Path) -> list[list[str]]:
    """Return the command lines of the blocks without a language or of a shell, without comments and output."""
    shown = [block.replace("\\\n", " ") for block in blocks(page, "", "bash")]
    lines = [line.removeprefix("$ ") for block in shown for line in block.splitlines()]
    starts = ("lockstep ", "make ", "torchrun ", "python ", "LOCKSTEP_")
    split = [shlex.split(line, comments=True) for line in lines if line.startswith(starts)]
    return [words for words in split if not words[0].endswith(":")]


def verb_lines(page: Path) -> list[list[str]]:
    """Return the words after `lockstep`, under any launcher."""
    lines = [words[words.index("lockstep") + 1 :] for words in commands(page) if "lockstep" in words]
    return [words for words in lines if words[0] != "..."]


@cache
def help_of(verb: str, *more: str) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        assert main([verb, *more, "--help"]) == 0
    return printed.getvalue()


# --- commands -------------------------------------------------------------------------------------------------------


@pages
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        if words[0] == "make":
            assert words[1] in targets, words
        if words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), words


@pages
def test_verbs_and_flags_exist(page: Path) -> None:
    quoted = "\n".join(block for block in blocks(page, "") if "lockstep: " in block)
    for verb, *words in verb_lines(page):
        assert verb in VERBS, verb
        has_command = verb in ("config", "data", "launch") or (verb, *words[:1]) in (
            ("profile", "data"),
            ("profile", "memory"),
        )
        named = help_of(verb, words[0]) if has_command else help_of(verb)
        if launched := [word for word in words if verb == "launch" and word in LAUNCHED]:
            named += help_of(launched[0])
        for word in words:
            flag = re.match(r"--?[\w.-]+", word)
            if flag and f"{flag[0]}:" not in quoted:  # a mistake with its message is shown on purpose
                assert re.search(rf"{re.escape(flag[0])}\b", named) or is_key(flag[0][2:]), (verb, word)


@pytest.mark.parametrize(
    "page", [ROOT / "docs" / f"{name}.md" for name in ("watching", "slow")], ids=lambda page: page.stem
)
def test_what_is_trained_is_a_config(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that a key doesn't take is found, too; the other commands of these pages have tests of their own."""
    trained = [words for verb, *words in verb_lines(page) if verb == "train"]
    assert trained
    for words in trained:
        assert main(["config", "check", *words]) == 0, capsys.readouterr().err


def test_no_page_has_commands_that_are_not_checked() -> None:
    """Blocks of other languages aren't commands."""
    known = {"", "bash", "python", "yaml", "toml", "json", "text", "dockerfile", "mermaid", "html"}
    assert {
        language for page in PAGES for language, _ in [match[1:] for match in FENCE.findall(page.read_text())]
    } <= known


def is_key(dotted: str) -> bool:
    return tuple(dotted.split(".")) in set(shape.all_keys())


@pages
def test_quoted_messages_are_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(blocks(ROOT / "README.md", "yaml")[0])
    for block in blocks(page, ""):
        command, _, output = block.partition("\n")
        if command.startswith("$ lockstep ") and output.startswith("lockstep: "):
            assert main(shlex.split(command)[2:]) == 2
            assert capsys.readouterr().err == output


def texts(tree: ast.AST) -> str:
    """Return the strings of a module, with an ellipsis for each value that is put into them."""
    strings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            strings.append(
                "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    return "\n".join(strings)


def test_troubleshooting_has_messages_that_the_code_prints() -> None:
    elsewhere = {"Watchdog caught collective operation timeout", "Cuda is not available", "Killed"}
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = {message for title in re.findall(r"^### (.*)$", page, re.MULTILINE) for message in INLINE.findall(title)}
    source = "\n".join(texts(ast.parse(file.read_text())) for file in (ROOT / "src").rglob("*.py"))
    assert sorted(message for message in quoted - elsewhere if message not in source) == []


# --- names ----------------------------------------------------------------------------------------------------------


@pages
def test_files_exist(page: Path) -> None:
    kinds = r"[\w./-]+/[\w.-]+\.(?:py|md|yaml|json|toml|svg)|(?:src|tests|examples|docs|recipes|benchmarks)/[\w/.-]*"
    for name in INLINE.findall(prose(page)):
        if name not in PLACEHOLDERS and re.fullmatch(kinds, name) and not name.startswith("model/"):
            assert any((root / name).exists() for root in (ROOT, ROOT / "src" / "lockstep")), name


@pages
def test_python_names_exist(page: Path) -> None:
    text = "\n".join([*INLINE.findall(prose(page)), *blocks(page, "python")])
    for name in set(re.findall(r"(?<![\w./-])lockstep(?:\.[A-Za-z_]\w*)+", text)):
        assert resolves(name), name


def resolves(dotted: str) -> bool:
    """Return whether the longest importable module of the name has the rest of it."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reach(thing, parts[end:])
    return False


def reach(thing: object, names: list[str]) -> bool:
    try:
        for name in names:
            thing = getattr(thing, name)
    except AttributeError:
        return False
    return True


@pages
def test_config_keys_exist(page: Path) -> None:
    sections = {key[0] for key in shape.all_keys()}
    for name in INLINE.findall(prose(page)):
        key = name.split(":")[0].split("=")[0]
        if re.fullmatch(rf"(?:{'|'.join(sections)})(?:\.[a-z_]+)+", key):
            assert is_key(key) or any(
                known[: key.count(".") + 1] == tuple(key.split(".")) for known in shape.all_keys()
            ), key


@pages
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert name.startswith("http") or target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}, link


def test_the_architecture_lists_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {file.parent.name for file in (ROOT / "src" / "lockstep").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `src/lockstep/(\w+)` \|", page, re.MULTILINE)) == packages
    layers = page.split("## Layers")[1].split("```")[1]
    assert {name for line in layers.splitlines() for name in line[:59].split()} == packages


# --- snippets -------------------------------------------------------------------------------------------------------


@pages
def test_configs_are_valid(page: Path) -> None:
    for block in blocks(page, "yaml"):
        validate(yaml.safe_load(block.replace("3e-3", "0.003").replace("1e-2", "0.01")))


@pages
def test_python_comes_from_the_examples(page: Path) -> None:
    examples = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    for block in blocks(page, "python"):
        ast.parse(block)
        assert any(block in example for example in examples), block


def test_shown_files_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    filled = importlib.import_module("fill_examples").filled
    for page in PAGES:
        assert page.read_text() == filled(page.read_text()), "python docs/fill_examples.py"


def test_the_index_lists_all_pages() -> None:
    listed = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= listed


def test_plans_of_large_models_need_no_weights_and_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the peak, which tests/simulation compares."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    pages = [ROOT / name for name in ("README.md", "docs/memory.md", "docs/choosing.md", "docs/gpu-memory.md")]
    plans = {tuple(words) for page in pages for words in verb_lines(page) if words[0] == "plan" and "llama" in words[1]}
    assert len(plans) == 4
    for words in sorted(plans):
        assert main([*words, "--peak", "none"]) == 0
    shown = capsys.readouterr().out
    assert "68,976,648,192" in shown
    assert "6,738,415,616" in shown
    assert "6,738,415,616" in (ROOT / "README.md").read_text()


def test_each_question_before_paying_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = ROOT / "docs" / "know-before-you-pay.md"
    monkeypatch.chdir(tmp_path)
    lines = verb_lines(page)
    assert len(lines) == 6
    for words in lines:
        assert words[0] == "plan"
        plan.prepare(words[1:])


@pytest.mark.drill
def test_the_answers_before_paying_are_current(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = ROOT / "docs" / "know-before-you-pay.md"
    started = [sys.executable, "-m", "lockstep"]
    done = [
        subprocess.run([*started, *words], cwd=tmp_path, capture_output=True, text=True) for words in verb_lines(page)
    ]
    shown = "".join(each.stdout for each in done)
    for line in "".join(blocks(page, "text")).splitlines():
        assert line in shown.splitlines()


# --- examples run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["train_from_python.py"], "'loss'"),
        (["own_loop.py"], "{'sparse': 0."),
        (["nanogpt.py"], "arrays: 0."),
        (["loop_of_reports.py"], "update "),
        (["own_checkpoints.py", "saves"], "update 200"),
        (["verify_own_model.py", "2"], "fsdp 2 sgd 2 passed"),
        (["long_sequences.py"], "data x context) loss "),
        (["own_text_data.py", "prompts"], "prompts: loss "),
        (["own_text_data.py", "seq2seq"], "seq2seq: loss "),
        (["on_simulated_accelerator.py"], "Event.synchronize in readback.py:land"),
        (["average_of_weights.py"], "the average: {'sparse': {'loss': 0.0"),
        (["checkpoint_any_module.py"], "activation checkpointing, full: blocks.0"),
        (["train", "examples/squares.yaml", "--run.epochs", "1"], "evaluation sparse: loss"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_examples_run(words: list[str], output: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    name, *further = words
    start = run_lockstep if name == "train" else partial(run_script, Path("examples", name))
    run = start(*(words if name == "train" else further), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert output in run.stdout
