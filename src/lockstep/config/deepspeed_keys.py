"""The keys of DeepSpeed's config: the rows of `deepspeed_keys.md`, for `deepspeed_check` and `lockstep.interop`.

    rule      in parallel.deepspeed.config              imported
    same      must equal `ours`                          sets `ours`
    pass      passed to DeepSpeed                        sets parallel.deepspeed.config.KEY
    only      must be `value`                            not needed; unsupported if another value and it `matters`
    refuse    refused unless it is off                   not needed; unsupported if it is on and it `matters`
    other     done by Lockstep instead                   sets `ours`
    ignore    ignored                                    not needed
    section   holds further keys

A row may have several keys and sections, separated by spaces; `*` in `ours` stands for the key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class DeepSpeedKey:
    """One key of DeepSpeed's config.

    Attributes:
        path: Sections and key, with dots.
        `ours`: The same key in Lockstep's config, or empty.
        value: The only value that is accepted; for a scheduler's parameter, DeepSpeed's default.
        matters: Whether leaving it out makes another run, needs another machine, or loses an output.
    """

    path: str
    rule: str
    ours: str
    value: Any
    matters: bool
    note: str


@cache
def deepspeed_keys() -> dict[str, DeepSpeedKey]:
    """Return the table by path."""
    keys = {}
    for line in Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()[2:]:
        sections, names, rule, ours, value, matters, note = (cell.strip() for cell in line.strip("|").split("|"))
        for section in sections.split() or [""]:
            for name in names.split():
                path = f"{section}.{name}".strip(".")
                given = json.loads(value) if value else None
                keys[path] = DeepSpeedKey(path, rule, ours.replace("*", name), given, matters == "yes", note)
    return keys


def keys_of(section: str, rules: Sequence[str] = ()) -> list[str]:
    """Return the last names of a section's keys, of these rules if given; the outermost section is empty."""
    split = (key.path.rpartition(".") for key in deepspeed_keys().values() if not rules or key.rule in rules)
    return [name for within, _, name in split if within == section]
