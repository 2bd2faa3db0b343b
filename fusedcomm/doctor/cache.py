"""The cache directory: where it is, and whether what is there can be trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from fusedcomm import env
from fusedcomm.doctor.findings import OK, WARNING, Finding

REMOTE = ("nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "gpfs", "beegfs", "fuse.sshfs", "9p", "afs")
ADVICE = "set FUSEDCOMM_CACHE_DIR to a directory of yours on a local disk; without one nothing that was tuned is kept"


def survey() -> dict[str, Any] | None:
    """Facts of the directory, or of the nearest existing one above it. None where there is no place for it."""
    try:
        path = env.cache_dir().absolute()
    except FileNotFoundError:
        return None
    nearest = next(
        each for each in (path, *path.parents) if os.path.exists(each)
    )  # False, too, for what this process may not look at
    status = nearest.stat()
    return {
        "path": str(path),
        "exists": nearest == path,
        "directory": nearest.is_dir(),
        "writable": os.access(nearest, os.W_OK | os.X_OK),
        "ours": status.st_uid == os.getuid(),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "file_system": file_system(nearest),
    }


def find(found: dict[str, Any] | None) -> list[Finding]:
    if found is None:
        return [Finding("cache", "directory", WARNING, "this user has no home directory", ADVICE)]
    problems = []
    if not found["directory"]:
        problems.append("is no directory")
    elif not found["writable"]:
        problems.append("cannot be written")
    if found["exists"] and not found["ours"]:
        problems.append("belongs to another user")
    if found["exists"] and int(found["mode"], 8) & 0o022:
        problems.append(f"can be written by others (mode {found['mode']})")
    if found["file_system"] in REMOTE:
        problems.append(f"is on {found['file_system']}: slow, and ranks of several hosts share it")
    if problems:
        return [Finding("cache", "directory", WARNING, f"{found['path']} {', '.join(problems)}", ADVICE)]
    text = f"{found['path']}" + ("" if found["exists"] else ", made when it is needed")
    return [Finding("cache", "directory", OK, text)]


def file_system(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the mount that ``path`` is in."""
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return None
    path, longest, found = path.resolve(), -1, None
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = Path(mount.split()[4].encode().decode("unicode_escape"))  # blanks are written as \040
        if (path == point or point in path.parents) and len(point.parts) >= longest:
            longest, found = len(point.parts), source.split()[0]
    return found
