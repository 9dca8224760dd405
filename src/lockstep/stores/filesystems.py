"""Objects in what fsspec knows by a scheme: `gs://` (gcsfs), `az://` (adlfs), `memory://`, and others.

Repeating calls is left to the package behind the scheme, which has its own settings for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.core.secrets import without_secrets
from lockstep.stores.addresses import parts_of
from lockstep.stores.blobs import ended_early


class FileSystemStore:
    """The objects under a prefix of a file system of fsspec."""

    def __init__(self, address: str) -> None:
        self.place = address
        self._opened: tuple[int, Any, str] | None = None

    def sizes(self, prefix: str) -> dict[str, int]:
        system, root = self._system()
        folder = prefix.rpartition("/")[0]
        try:
            system.invalidate_cache()
            listed = system.find(f"{root}/{folder}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._fault(error, prefix) from error
        names = {path.removeprefix(root).lstrip("/"): int(entry["size"]) for path, entry in listed.items()}
        return {name: names[name] for name in sorted(names) if name.startswith(prefix)}

    def size(self, name: str) -> int:
        system, path = self._at(name)
        try:
            return int(system.info(path)["size"])
        except Exception as error:
            raise self._fault(error, name) from error

    def read(self, name: str, offset: int, into: memoryview) -> None:
        system, path = self._at(name)
        try:
            data = system.cat_file(path, start=offset, end=offset + len(into))
        except Exception as error:
            raise self._fault(error, name) from error
        if len(data) != len(into):
            raise ended_early(offset, len(data), len(into))
        into[:] = data

    def write(self, name: str, *pieces: memoryview) -> None:
        system, path = self._at(name)
        try:
            system.makedirs(system._parent(path), exist_ok=True)
            file = system.open(path, "wb", autocommit=False)
            try:
                for piece in pieces:
                    file.write(piece)
                file.close()
                file.commit()
            except BaseException:
                with suppress(Exception):
                    file.discard()
                raise
        except Exception as error:
            raise self._fault(error, name) from error

    def write_new(self, name: str, data: memoryview) -> None:
        if name in self.sizes(name):
            raise FileExistsError(errno.EEXIST, "it exists", f"{self.place}/{name}")
        system, path = self._at(name)
        try:
            system.makedirs(system._parent(path), exist_ok=True)
            system.pipe_file(path, bytes(data))
        except Exception as error:
            raise self._fault(error, name) from error

    def copy(self, source: str, target: str) -> None:
        system, path = self._at(source)
        new = self._at(target)[1]
        try:
            system.makedirs(system._parent(new), exist_ok=True)
            system.cp_file(path, new)
        except Exception as error:
            raise self._fault(error, source) from error

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            system, path = self._at(name)
            try:
                system.rm_file(path)
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._fault(error, name) from error

    def remove_unfinished(self, prefix: str) -> None: ...

    def _at(self, name: str) -> tuple[Any, str]:
        system, root = self._system()
        return system, f"{root}/{name}"

    def _system(self) -> tuple[Any, str]:
        """Return this process's file system: one that a fork has copied has no threads."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), *_open(self.place))
        return self._opened[1], self._opened[2]

    def _fault(self, error: Exception, name: str) -> OSError:
        if isinstance(error, OSError) and error.strerror:
            return OSError(error.errno, error.strerror, f"{self.place}/{name}")
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        return kind(errno.EIO, without_secrets(f"{type(error).__name__}: {error}"), f"{self.place}/{name}")

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _open(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path of the prefix in it. Raises ConfigError."""
    scheme = parts_of(address)[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(f"{address} needs the package fsspec: {pip_install('fsspec')}") from None
    try:
        system, path = url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(f"{address}: fsspec needs one more package for {scheme}:// ({error})") from None
    except ValueError as error:
        raise ConfigError(
            f"{address}: {error}; s3://, and what fsspec knows (gs://, az://, ...) are supported"
        ) from None
    return system, str(path).rstrip("/")
