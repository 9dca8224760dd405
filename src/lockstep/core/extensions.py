"""Loads users' code and installed packages' extensions, by the name that a config or a call gives.

package.module:Name     as Python imports it; the working directory is on the path
path/to/file.py:Name    a file; its folder is on the path, so that it can import its neighbors
name                    an entry point of the group `lockstep.KIND` that an installed package declares:

[project.entry-points."lockstep.monitors"]
slack = "my_package.slack:SlackMonitor"
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.core.closest import hint
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.out_of_memory import out_of_memory_cause

KINDS = (
    "launchers", "models", "monitors", "objectives", "optimizers", "sources", "storage", "strategies", "trackers",
    "transforms",
)  # fmt: skip
_FORM = "write package.module:Name or path/to/file.py:Name"


def load(kind: str, name: str, *, key: str = "", builtin: Iterable[str] = ()) -> Any:
    """Import and return the object that `name` stands for.

    Args:
        kind: One of `KINDS`.
        key: The config key that holds the name, for errors.
        builtin: Names that the caller resolves itself, for errors.

    Raises:
        ConfigError: Nothing has that name, two packages register it, or its import raises.
    """
    assert kind in KINDS, kind
    with _errors_name(key):
        return import_target(name) if ":" in name else _entry_point(kind, name, tuple(builtin))


def registered(kind: str) -> dict[str, str]:
    """Return what installed packages register: name -> `module:Name`."""
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group=f"lockstep.{kind}")}


def construct(kind: str, name: str, arguments: Mapping[str, Any], *, key: str = "", builtin: Iterable[str] = ()) -> Any:
    """Call the class or function `name` with `arguments`, and return the result.

    Raises:
        ConfigError: As `load`; it is not callable; the arguments do not fit; or the call raises.
    """
    function = load(kind, name, key=key, builtin=builtin)
    with _errors_name(key):
        return _call(name, function, arguments)


def instance(kind: str, name: str, arguments: Mapping[str, Any], protocol: type, *, key: str = "") -> Any:
    """Return the object that `name` stands for; a class or function is called with `arguments` first.

    Raises:
        ConfigError: As `construct`; there are arguments for an object; or it doesn't implement the protocol.
    """
    target = load(kind, name, key=key)
    if inspect.isclass(target) or inspect.isroutine(target):
        target = construct(kind, name, arguments, key=key)
    elif arguments:
        raise ConfigError(Problem("", key, f"{name} is an object, which takes no arguments; leave them out"))
    if (reason := unimplemented(target, protocol)) is not None:
        raise ConfigError(Problem("", key, f"{name} {reason}"))
    return target


def unimplemented(thing: object, protocol: type) -> str | None:
    """Return why an object does not implement a protocol, as the end of a sentence; None if it does."""
    if inspect.isclass(thing):
        return f"is the class {thing.__name__}; pass an object of it: {thing.__name__}(...)"
    wanted = {*dir(protocol), *protocol.__annotations__}
    missing = sorted(name for name in wanted.difference(dir(thing)) if not name.startswith("_"))
    if isinstance(thing, protocol) and not missing:
        return None
    lacks = f", which lacks {', '.join(missing)}" if missing else ""
    return f"is of type {type(thing).__name__}{lacks}; subclass lockstep.{protocol.__name__}"


def import_target(target: str) -> object:
    """Return the object that `target` names, as `module:Name` or `file.py:Name`; a file runs once per process.

    Raises:
        ConfigError: There is no such file, module or name, or importing it raises.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{target!r} does not name a module and an object in it; {_FORM}")
    value: object = _import_file(place, target) if place.endswith(".py") else _import_module(place, target)
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            public = [known for known in dir(value) if not known.startswith("_")]
            where = getattr(value, "__file__", None) or getattr(value, "__name__", repr(value))
            raise ConfigError(f"{target}: {where} has no {part}{hint(part, public)}") from None
    return value


def locate(target: str) -> str:
    """Return the path of the code that `target` names, without importing it; "" if it can't be found."""
    place, _, _ = target.rpartition(":")
    if place.endswith(".py"):
        return str(Path(place).expanduser().resolve())
    try:
        spec = importlib.machinery.PathFinder.find_spec(place.split(".")[0], [*sys.path, str(Path.cwd())])
    except (ImportError, ValueError, OSError):
        return ""
    if spec is None:
        return ""
    return str(Path(spec.origin or next(iter(spec.submodule_search_locations or ("",)))).resolve())


def source_file(thing: object) -> Path | None:
    """Return the file that defines the class or function, or the object's class, if any."""
    try:
        path = inspect.getsourcefile(thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing))
    except (TypeError, OSError):  # builtins; classes typed in at a prompt, or in a notebook
        return None
    return Path(path) if path else None


@contextmanager
def _errors_name(key: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if not key:
            raise
        raise ConfigError(Problem("", key, str(error))) from error.__cause__


def _entry_point(kind: str, name: str, builtin: tuple[str, ...]) -> object:
    from importlib.metadata import entry_points

    entries = {entry.value: entry for entry in entry_points(group=f"lockstep.{kind}", name=name)}
    if len(entries) > 1:
        raise ConfigError(f"{name} is registered more than once: {', '.join(sorted(entries))}; {_FORM}")
    for target, entry in entries.items():
        try:
            return entry.load()
        except Exception as error:
            raise ConfigError(f"{name}: importing {target} raised {_describe(error)}") from error
    known = [*builtin, *sorted(registered(kind))]
    names = f" (there are {', '.join(known)})" if known else ""
    raise ConfigError(f"{name!r} is not registered in lockstep.{kind}{names}{hint(name, known)}; {_FORM}")


def _call(name: str, function: Any, arguments: Mapping[str, Any]) -> object:
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, not a class or function that can be called")
    with suppress(TypeError, ValueError):  # some builtins have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            known = signature.parameters
            near = "".join(hint(given, known) for given in arguments if given not in known)
            message = f"{name} can't take arguments {dict(arguments)}: {error}{near}; it takes {signature}"
            raise ConfigError(message) from error
    try:
        return function(**arguments)
    except Exception as error:
        if out_of_memory_cause(error):
            raise
        call = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
        raise ConfigError(f"{name}({call}) raised {_describe(error)}") from error


def _import_module(name: str, target: str) -> ModuleType:
    _importable_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(missing + ".")):
            raise ConfigError(
                f"{target}: there is no module {missing}, installed or in {Path.cwd()}; "
                "for a file write its path: path/to/file.py:Name"
            ) from error
        raise ConfigError(f"{target}: importing {name} raised {_describe(error)}") from error


def _import_file(place: str, target: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        neighbors = [file.name for file in path.parent.glob("*.py")]
        raise ConfigError(f"{target}: there is no file {path}{hint(path.name, neighbors)}")
    _importable_from(path.parent)
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{target}: running {path.name} raised {_describe(error)}") from error
    return module


def _module_name(path: Path) -> str:
    """Return the file's stem, for pickling in other processes; a unique name if a module has it already."""
    loaded = sys.modules.get(path.stem)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(path.stem)
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
        return path.stem
    return f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def _importable_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that a user's file can't hide a module of Python's


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
