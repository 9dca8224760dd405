"""Opens the store that an address names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError
from lockstep.stores.addresses import checked_address, parts_of

if TYPE_CHECKING:
    from lockstep.stores.blobs import BlobStore

RETRY_SECONDS = 60.0


def open_store(address: str, retry_seconds: float = RETRY_SECONDS) -> BlobStore:
    """Return the store of an address; it isn't connected yet. Raises ConfigError."""
    try:
        checked = checked_address(address)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if parts_of(checked)[0] == "s3":
        from lockstep.stores.s3 import S3Store

        return S3Store(checked, retry_seconds)
    from lockstep.stores.filesystems import FileSystemStore

    return FileSystemStore(checked)
