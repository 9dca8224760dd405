"""The right-hand sides of the page for those who come from a script: each name is there, each value can be written."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.main import VERBS
from lockstep.config import shape
from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe
from lockstep.core.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
ROWS = [
    (heading, *(cell.strip() for cell in row.strip("|").split(" | ")))
    for heading, table in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for row in re.findall(r"^\|.*\|$", table, re.MULTILINE)[2:]
    if "| there | here |" in table
]
HERE = sorted({name for *_, here in ROWS for name in re.findall(r"`([^`]+)`", here)})
OF_AN_OBJECTIVE = ("count", "loss_sum", "metric_sums", "metrics")


def test_every_row_has_a_counterpart_or_states_that_none_is_needed() -> None:
    assert {heading for heading, *_ in ROWS} == {
        "A DDP loop", "An FSDP loop", "A DeepSpeed engine", "HF Trainer", "Accelerate", "Lightning",
    }  # fmt: skip
    for heading, there, here in ROWS:
        assert "`" in here or here.startswith("nothing"), (heading, there)


@pytest.mark.parametrize("name", HERE)
def test_named_items_exist(name: str) -> None:
    if name.startswith("lockstep "):
        return command_is_there(name.split()[1:])
    if name.startswith(("lockstep.", "session.")):
        return python_is_there(name.replace("session.", "Session."))
    if name in OF_AN_OBJECTIVE or name == "for report in session":
        return None
    key, _, value = name.partition(": ")
    assert key in keys(), name
    if value:
        value_is_taken(key, value)
    return None


def command_is_there(words: list[str]) -> None:
    verb, *more = words
    assert verb in VERBS, words
    if verb in ("config", "ckpt"):
        module = importlib.import_module(f"lockstep.cli.{verb}")
        assert f'"{more[0]}"' in inspect.getsource(module), words


def python_is_there(name: str) -> None:
    dotted, _, arguments = name.removeprefix("lockstep.").partition("(")
    thing: object = lockstep
    for part in dotted.split("."):
        thing = getattr(thing, part)
    for argument in re.findall(r"(\w+)=", arguments):
        assert callable(thing)
        assert argument in {*inspect.signature(thing).parameters, *lockstep.Objects.__annotations__}, name


def keys() -> set[str]:
    """Return all keys and sections."""
    whole = {".".join(key) for key in shape.all_keys()}
    return whole | {key.rpartition(".")[0] for key in whole}


def value_is_taken(key: str, value: str) -> None:
    """Check that the recipe takes the value, with the kinds that have the key."""
    kinds = [f"{key.rpartition('.')[0]}.kind=huggingface"] if key.startswith(("model.task", "data.train.")) else []
    assert key not in refused([*kinds, f"{key}={value}"])


def refused(overrides: list[str]) -> set[str]:
    try:
        load([resolve_recipe("stdlib-lm").path], overrides, environ={})
    except ConfigError as error:
        return {problem.key for problem in error.problems}
    return set()
