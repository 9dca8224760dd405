"""Keeps the working folder out of the module search path, where a yaml.py would be imported instead of PyYAML.

`python -m lockstep` and spawned interpreters put it first. `core.extensions` appends it for users' modules. This module
imports only what Python has imported already. What `python -m` imports before it can't be protected; `lockstep` and
`python -P -m lockstep` never search the folder.
"""

import os
import sys

VARIABLE = "PYTHONSAFEPATH"
_SET_HERE = "set by lockstep"


def leave_working_folder() -> None:
    """Remove the working folder from the path of `python -m lockstep`, unless Lockstep is imported from it."""
    if sys.flags.safe_path or sys.argv[:1] != ["-m"] or not _runs_lockstep(sys.orig_argv[1:]):
        return
    if not __file__.startswith(f"{sys.path[0]}/lockstep/core/"):
        del sys.path[0]


def _runs_lockstep(words: list[str]) -> bool:
    for word, following in zip(words, [*words[1:], ""]):  # noqa: B905  # `strict` has no meaning here
        if word.startswith("-") and not word.startswith("--") and word.endswith("m"):
            return following.split(".")[0] == "lockstep"
        if word.startswith("-mlockstep"):
            return True
    return False


class safe_interpreters:  # noqa: N801  # read as `with safe_interpreters():`; contextlib isn't imported yet
    """Let interpreters started in this context not search the working folder."""

    def __enter__(self) -> None:
        self._before = os.environ.get(VARIABLE)
        if not self._before:
            os.environ[VARIABLE] = _SET_HERE

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._before


def let_children_search() -> None:
    """Undo `safe_interpreters` for the children of this interpreter."""
    if os.environ.get(VARIABLE) == _SET_HERE:
        del os.environ[VARIABLE]
