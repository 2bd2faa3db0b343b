from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    raise NotImplementedError(name)
