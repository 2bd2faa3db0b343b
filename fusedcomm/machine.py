"""The versions and the environment of this process, for reports and dumps. Nothing here touches a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import re

PACKAGES = ("fusedcomm", "torch", "triton", "nvidia-ml-py")
RELEVANT = re.compile(
    r"(FUSEDCOMM|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|GLOO|TRITON|OMP|THP)_\w+|TORCH_?LOGS|TORCH_SYMMMEM"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|XDG_CACHE_HOME"
)


def environment() -> dict[str, str]:
    """The variables that concern fusedcomm and what it is built on."""
    return {name: value for name, value in sorted(os.environ.items()) if RELEVANT.fullmatch(name)}


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
