"""The ops of a mixture of experts behind interfaces of others: torch's TokenSwitch, torchtitan's token dispatcher."""

import importlib
from typing import Any

from fusedcomm.moe.token_dispatcher import TokenDispatcher

__all__ = ["TokenDispatcher"]


def __getattr__(name: str) -> Any:
    if name != "TokenSwitch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("fusedcomm.moe.token_switch").TokenSwitch
    except ImportError as error:
        raise AttributeError(f"{__name__}.TokenSwitch: torch must be 2.15 or newer ({error})") from error
