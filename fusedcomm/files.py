"""Files of this user that other processes may read while they are written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace(file: Path, text: str) -> Path:
    """Who reads finds the old file or the new one, whole; only its owner may. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 0600
    try:
        with open(handle, "w") as opened:
            opened.write(text + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return file
