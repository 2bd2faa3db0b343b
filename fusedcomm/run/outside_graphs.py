"""Calls that torch.compile leaves out of its graphs. To import this loads Dynamo, which compiled code has done."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


@torch.compiler.disable(reason="a DeviceToHost that was started outside is waited for between graphs")
def call(method: Callable[..., T], *args: object) -> T:
    return method(*args)
