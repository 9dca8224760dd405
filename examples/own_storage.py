"""A storage: checkpoints in memory. Replace the dict by the client of a bucket or a database.

In Python:  lockstep.train(config, storage=Memory(), ...), or session.checkpoints(Memory())
In YAML:    checkpoint: {storage: {target: own_storage.py:MEMORY}}
"""

from __future__ import annotations


class Memory:
    place = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def names(self, prefix: str) -> list[str]:
        return [name for name in list(self.objects) if name.startswith(prefix)]

    def size(self, name: str) -> int:
        return len(self._get(name))

    def read(self, name: str, offset: int, size: int) -> bytes:
        return self._get(name)[offset : offset + size]

    def write(self, name: str, data: memoryview) -> None:
        self.objects[name] = bytes(data)

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def _get(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(f"there is no object {name}")
        return self.objects[name]


MEMORY = Memory()
