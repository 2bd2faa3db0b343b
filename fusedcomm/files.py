"""Replaces files that other processes may read, reads files that only this user can have written, and makes the key of
compiled graphs from the package's sources.
"""

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
from pathlib import Path

# Folders of the package that cannot change a compiled graph: the tools, and modules that ops call only when they run.
_BESIDE_GRAPHS = {"bench", "kernels", "launch", "testing.py", "tools"}


def replace(file: Path, text: str) -> Path:
    """A reader finds the old file or the new one, whole; only the owner may read the new one. Raises OSError."""
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


def read_own(file: Path, max_bytes: int) -> bytes:
    """The content of a file that only this user can have written. Raises OSError, also for a symlink, or ValueError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe would wait for its writer
    with open(os.open(file, flags), "rb") as opened:
        facts = os.fstat(opened.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it must be a regular file")
        if facts.st_uid != os.geteuid():
            raise ValueError(f"it must be owned by user {os.geteuid()}, got {facts.st_uid}")
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"only its owner may be able to write it, got mode {stat.S_IMODE(facts.st_mode):o}")
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it must have at most {max_bytes} bytes")
    return content


def cache_key(*facts: object) -> str:
    """The key of compiled graphs. It changes with the repr of any fact and with any source that can change graphs."""
    return hashlib.sha256(f"{_sources_digest()} {facts!r}".encode()).hexdigest()


@functools.cache
def _sources_digest() -> str:
    package, digest = Path(__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package)
        if name.parts[0] not in _BESIDE_GRAPHS:
            digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()
