"""Imported before fusedcomm: gives it the native part that was built for this torch, or none. That of the checkout is
for another torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch  # noqa: F401 the native part needs its libraries

from benchmarks.host_cost.build import FOLDER, NATIVE, native_file


class Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != NATIVE:
            return None
        file = native_file(Path(os.environ[FOLDER]))
        if file is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.insert(0, Finder)
