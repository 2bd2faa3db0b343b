"""The file of proofs: which algorithms were right on this GPU with these versions, and what was wrong with others.

There is one per machine, group size and versions, in the user's cache directory. It is believed under the conditions
under which `fusedcomm.cost.tuned` believes its file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from fusedcomm import files
from fusedcomm.cost import tuned

log = logging.getLogger("fusedcomm")

VERSION = 1
MAX_BYTES = 1 << 16
Outcomes = dict[str, str]  # by `name_of`: empty where the algorithm was right, else what was wrong
_logged: set[tuple[str, ...]] = set()


def name_of(op: str, algorithm: str, dtype: torch.dtype, uneven: bool) -> str:
    """``uneven``: with parts of different sizes, for which there are other kernels."""
    return f"{op} {algorithm} {str(dtype).removeprefix('torch.')}{' uneven' if uneven else ''}"


def of_all(by_rank: list[Mapping[str, str]]) -> Outcomes:
    """What holds for all ranks: what is wrong for one is wrong, and what is right must be on record for each."""
    found = {name: [outcomes.get(name) for outcomes in by_rank] for outcomes in by_rank for name in outcomes}
    wrong = {name: next(filter(None, texts), "") for name, texts in found.items()}
    return {name: wrong[name] for name, texts in found.items() if wrong[name] or None not in texts}


def path_of(device: torch.device, group_size: int) -> Path:
    """Raises FileNotFoundError where there is no place for it."""
    file = tuned.path_of(tuned.key(device, group_size))
    return file.with_name(file.name.replace("tuned", "proofs", 1))


def read(device: torch.device, group_size: int) -> Outcomes:
    """What is on record; nothing, with a warning, if the file is not valid."""
    try:
        file = path_of(device, group_size)
        return _parse(files.read_own(file, MAX_BYTES), device, group_size)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if _is_new(str(file), str(reason)):
            log.warning("proofs in %s are ignored: %s", file, reason)
        return {}


def add(device: torch.device, group_size: int, outcomes: Outcomes) -> None:
    """Put ``outcomes`` on record. What another process adds at the same moment may be lost, and is proved again."""
    content = {"version": VERSION, "key": tuned.key(device, group_size)}
    try:
        tuned.make_directory()
        content["outcomes"] = read(device, group_size) | outcomes
        files.replace(path_of(device, group_size), json.dumps(content, indent=2))
    except OSError as error:
        if _is_new(str(error)):
            log.warning("proofs are not kept, and made again by every group: %s", error)


def _parse(content: bytes, device: torch.device, group_size: int) -> Outcomes:
    """Raises ValueError for all that is not as expected, broken JSON included."""
    data = json.loads(content)
    if not isinstance(data, dict) or set(data) != {"version", "key", "outcomes"}:
        raise ValueError("it must have the fields version, key and outcomes")
    if (data["version"], data["key"]) != (VERSION, tuned.key(device, group_size)):
        raise ValueError(f"it must be of version {VERSION}, of this device, group size and these versions")
    outcomes = data["outcomes"]
    if not isinstance(outcomes, dict) or not all(isinstance(text, str) for text in outcomes.values()):
        raise ValueError("its outcomes must be texts")
    return outcomes


def _is_new(*facts: str) -> bool:
    """Whether this has not been told before."""
    known = facts in _logged
    _logged.add(facts)
    return not known
