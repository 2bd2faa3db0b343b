"""A model of a package, tiny, with random weights, and how it runs on several ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn


def skip_without(package: str) -> None:
    """The packages are no development tools."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make models` installs it")


def all_of_it(whole: Any) -> Any:
    return whole


def of_this_rank(whole: Any) -> Any:
    """This rank's tokens of a tensor [batch, tokens, ...], or of each in a dict."""
    if isinstance(whole, dict):
        return {name: of_this_rank(value) for name, value in whole.items()}
    return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


@dataclass(frozen=True)
class Case:
    """``make(layers)`` is the model of one process; ``parallelize(model)`` changes it into this rank's part.

    ``local`` takes this rank's part of the inputs, and of the result of one process. ``summed``: each rank has a part
    of the gradient of every parameter, of its own tokens. Everything runs in the context ``around()``.
    """

    package: str
    make: Callable[[int], nn.Module]
    parallelize: Callable[[nn.Module], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    local: Callable[[Any], Any] = all_of_it
    summed: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def random(*shape: int) -> Tensor:
    return torch.randn(shape)
