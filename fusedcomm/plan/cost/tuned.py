"""The file of measured constants: one per machine, group size and versions, in the user's cache directory.

The file is data from outside. It is ignored, with a warning that says why, unless it is a small regular file of this
user that nobody else can write, with the expected version, key and fields, and numbers that a machine can have.
"""

import functools
import hashlib
import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fusedcomm import env, files
from fusedcomm.env import cpu_name, version
from fusedcomm.plan.cost.model import TUNED, Constants

log = logging.getLogger("fusedcomm")

MAX_BYTES = 1 << 16


def key(device: torch.device, group_size: int) -> dict[str, Any]:
    """The facts that the numbers depend on: they are valid only where all of this is the same."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "device_type": device.type,
        "threads": 0 if cuda else torch.get_num_threads(),  # a rank's threads
        "world_size": group_size,
        "fusedcomm": version("fusedcomm"),
        "torch": torch.__version__,
        "triton": version("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "driver": _driver_version() if cuda else None,
    }


def path_of(key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return env.cache_dir() / f"tuned-{key['device_type']}-{key['world_size']}-{name}.json"


def read(key: dict[str, Any]) -> Constants | None:
    """The constants kept under a key; None if there are none, or, with a warning, if the file is not valid."""
    try:
        file = path_of(key)
        return _parse(files.read_own(file, MAX_BYTES), key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _warn_once(file, error.strerror if isinstance(error, OSError) else str(error))
        return None


@functools.cache
def _warn_once(file: Path, reason: str) -> None:
    log.warning("tuned numbers in %s are ignored: %s", file, reason)


def write(constants: Constants, key: dict[str, Any]) -> Path:
    """Replace the file in one step: a reader finds either the old file or the new one, whole. Raises OSError."""
    make_directory()
    content = {"key": key, "constants": asdict(constants)}
    return files.replace(path_of(key), json.dumps(content, indent=2))


def make_directory() -> None:
    """The cache directory, in which this user can then write. Raises OSError."""
    folder = env.cache_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def _parse(content: bytes, expected: dict[str, Any]) -> Constants:
    """Raises ValueError for all that is not as expected, broken JSON included."""
    data = json.loads(content)
    if not isinstance(data, dict) or set(data) != {"key", "constants"}:
        raise ValueError("it must have the fields key and constants")
    if data["key"] != expected:
        raise ValueError("it must be of this device, group size and these versions")
    return Constants.from_json(data["constants"], TUNED, expected["device_type"])


def _driver_version() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML is missing or broken; the topology vote says so
        return None
