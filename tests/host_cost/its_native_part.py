"""Imported as the Python of `make host-cost` starts: fusedcomm gets the native part that was built for this torch, or
none. That of the checkout is for another torch.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

NATIVE = "fusedcomm.kernels.cpu.native"


class Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != NATIVE:
            return None
        import torch  # noqa: F401 the native part needs its libraries

        file = next(Path(sys.prefix).parent.glob("native/fusedcomm/kernels/cpu/native.*.so"), None)
        if file is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.util.spec_from_file_location(name, file)


if __name__ == "its_native_part":
    sys.meta_path.insert(0, Finder)
