"""A user's own code, by name: what a config can say of a class or function that Lockstep doesn't know.

    package.module:Name     as Python imports it; the working directory is on the path
    path/to/file.py:Name    a file of its own; its folder is on the path, so that it can import its neighbours

    import_target(target)             the object
    construct(target, arguments)      the object called

Every way this can go wrong is a ConfigError that says where to look.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.core.errors import ConfigError
from lockstep.core.out_of_memory import ran_out

_FORM = "write package.module:Name or path/to/file.py:Name"


def import_target(target: str) -> object:
    """The object that `target` names; a file is run once a process, however often it is asked for.

    Raises:
        ConfigError: malformed, missing file or module, missing name, or code that raises while it is imported.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{target!r} does not say what to take from where; {_FORM}")
    module = _import_file(place, target) if place.endswith(".py") else _import_module(place, target)
    found: object = module
    for part in name.split("."):
        found = _attribute(found, part, target)
    return found


def locate(target: str) -> str:
    """Where the code that `target` names lies, without importing any of it; empty if it can't be found."""
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


def construct(target: str, arguments: Mapping[str, Any]) -> Any:
    """What `target` returns when it is called with `arguments`.

    Raises:
        ConfigError: as `import_target`; not callable; arguments that don't fit; or the call raises.
    """
    function = import_target(target)
    if not callable(function):
        raise ConfigError(f"{target} is a {type(function).__name__}, not a class or function that can be called")
    _check_arguments(target, function, arguments)
    try:
        return function(**arguments)
    except Exception as error:
        if ran_out(error):
            raise
        call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ConfigError(f"{target}({call}) raised {_describe(error)}") from error


def source_file(thing: object) -> Path | None:
    """The file that defines the class or function (or the class of the object), if there is one."""
    try:
        found = inspect.getsourcefile(thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing))
    except TypeError:  # builtins, and classes typed in at a prompt
        return None
    return Path(found) if found else None


def _import_module(name: str, target: str) -> ModuleType:
    _importable_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{target}: there is no module {error.name}, neither installed nor in {Path.cwd()}; "
                "a file of your own can be given by its path: path/to/file.py:Name"
            ) from error
        raise ConfigError(f"{target}: importing {name} raised {_describe(error)}") from error
    except Exception as error:
        raise ConfigError(f"{target}: importing {name} raised {_describe(error)}") from error


def _import_file(place: str, target: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{target}: there is no file {path}{_like(path)}")
    _importable_from(path.parent)
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{target}: running {path.name} raised {_describe(error)}") from error
    return module


def _module_name(path: Path) -> str:
    """The file's own name, under which another process can import it too (and unpickle what it defines); if that
    name means another module, one that can't collide."""
    loaded = sys.modules.get(path.stem)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(path.stem)
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
        return path.stem
    return f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def _importable_from(folder: Path) -> None:
    """Last in the path, so that no file of the user's can hide a module of Python's."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _like(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} either"
    near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _attribute(owner: object, name: str, target: str) -> object:
    try:
        return getattr(owner, name)
    except AttributeError:
        pass
    public = [known for known in dir(owner) if not known.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1)
    where = getattr(owner, "__file__", None) or getattr(owner, "__name__", repr(owner))
    raise ConfigError(f"{target}: {where} has no {name}" + (f"; did you mean {near[0]}?" if near else ""))


def _check_arguments(target: str, function: Any, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins don't tell
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{target} can't take arguments {dict(arguments)}: {error}; it takes {signature}") from error


def _describe(error: BaseException) -> str:
    """Type, message, and the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}"
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
