"""Strict checks of compose files against the schema of the Compose Specification, which check-jsonschema carries."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import jsonschema

SCHEMA = ("builtin_schemas", "vendor", "compose-spec.json")


@cache
def _validator() -> Any:
    schema = json.loads(resources.files("check_jsonschema").joinpath(*SCHEMA).read_text())
    return jsonschema.validators.validator_for(schema)(schema)


def problem_of(compose: object) -> str:
    """Return why a compose file is invalid; empty: it is valid."""
    errors = (f"{error.json_path}: {error.message}" for error in _validator().iter_errors(compose))
    return next(errors, "")
