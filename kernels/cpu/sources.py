"""From which sources the native part is built: setup.py compiles their digest into it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest() -> str | None:
    """Of the C++ files beside this one, None where there are none: wheels leave them out."""
    files = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
    texts = [f"{path.name}\0".encode() + path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join(texts)).hexdigest() if texts else None
