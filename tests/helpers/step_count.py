"""How many steps the passes take: a measure of their time that is equal on every machine and in every run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np

from fusedcomm.compile.overlap import list_scheduler

FOLDER = str(Path(list_scheduler.__file__).parents[1])  # fusedcomm/compile


class _Counted(np.ndarray):
    """A one-dimensional array whose slices are counted, by their elements: NumPy goes through them unseen by Python."""

    num_elements = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            _Counted.num_elements += len(found)
        return found


def steps(call: Callable[[], object], *sources: str) -> int:
    """The lines that ``call()`` runs of files whose paths begin with one of ``sources``, and the elements of the memory
    profile that it reads or writes.
    """
    num_lines = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        return count if frame.f_code.co_filename.startswith(sources) else None

    profile = list_scheduler._ListScheduler._profile
    _Counted.num_elements = 0
    before = sys.gettrace()
    with mock.patch.object(list_scheduler._ListScheduler, "_profile", lambda self: profile(self).view(_Counted)):
        sys.settrace(enter)
        try:
            call()
        finally:
            sys.settrace(before)
    return num_lines + _Counted.num_elements
