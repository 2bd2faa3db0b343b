"""Finds fusedcomm.kernels in a checkout, where they lie beside this folder, whether it is installed or not."""

import sys
from pathlib import Path

_package = Path(__file__).parent
if not (_package / "kernels").exists() and (_package.parent / "kernels/triton").exists():
    sys.modules[__package__].__path__.append(str(_package.parent))
