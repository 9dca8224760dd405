"""Keeps the working folder out of the module search path.

    python -m lockstep         puts the working folder first: a yaml.py there would be imported instead of PyYAML
    a spawned interpreter      does the same, before it runs anything

`core.extensions` can still import users' modules from there, once a config names them: it appends the folder to the
path.

This module is imported while the path isn't safe yet, so it imports only what Python has imported already. It can't
protect what `python -m` imports before it (`importlib`, and `lockstep` itself); the command `lockstep`, and
`python -P -m lockstep`, never search the folder.
"""

import os
import sys

VARIABLE = "PYTHONSAFEPATH"
_SET_HERE = "set by lockstep"


def leave_working_folder() -> None:
    """Remove the working folder from the path, if this process is `python -m lockstep`.

    A folder that Lockstep itself was imported from stays.
    """
    if sys.flags.safe_path or sys.argv[:1] != ["-m"] or not _runs_lockstep(sys.orig_argv[1:]):
        return
    if not __file__.startswith(f"{sys.path[0]}/lockstep/core/"):
        del sys.path[0]


def _runs_lockstep(words: list[str]) -> bool:
    """Return whether the interpreter was started with `-m lockstep`, or `-m` and one of its modules."""
    for word, following in zip(words, [*words[1:], ""]):  # noqa: B905  # `strict` has no meaning here
        if word.startswith("-") and not word.startswith("--") and word.endswith("m"):
            return following.split(".")[0] == "lockstep"
        if word.startswith("-mlockstep"):
            return True
    return False


class safe_interpreters:  # noqa: N801  # read as `with safe_interpreters():`; contextlib isn't imported yet
    """A context in which interpreters that are started don't search the working folder.

    Their own child processes may: they call `let_children_search`.
    """

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
    """Unset what `safe_interpreters` has set for this interpreter; keep what users set."""
    if os.environ.get(VARIABLE) == _SET_HERE:
        del os.environ[VARIABLE]
