"""A store whose host is cut off: its calls block, as those of torch's TCPStore do while TCP tries again."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import HashStore, Store


class CutStore(Store):
    """``calls`` calls succeed; the later ones set ``blocked``, and block until ``back`` is set."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner = HashStore()
        self.calls_left = calls
        self.blocked, self.back = threading.Event(), threading.Event()

    def _call(self, name: str, *args: Any) -> Any:
        self.calls_left -= 1
        if self.calls_left < 0:
            self.blocked.set()
            assert self.back.wait(60)
        return getattr(self.inner, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return self._call("get", key)

    def check(self, keys: list[str]) -> bool:
        return self._call("check", keys)

    def add(self, key: str, value: int) -> int:
        return self._call("add", key, value)

    def delete_key(self, key: str) -> bool:
        return self._call("delete_key", key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._call("multi_get", keys)
