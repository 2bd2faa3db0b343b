"""From which sources the native part is built: setup.py compiles their digest into it."""

import hashlib
from pathlib import Path


def digest() -> str | None:
    """The digest of the C++ files beside this one. There is none in a wheel, which leaves them out."""
    files = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
    texts = [f"{path.name}\0".encode() + path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join(texts)).hexdigest() if texts else None
