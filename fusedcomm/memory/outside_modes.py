"""State that outlives a call is made, and written, as if its caller were in no mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_modes() -> Iterator[None]:
    """A context, or a decorator, without inference mode, gradients, autocast, functorch, dispatch and function modes.

    The default device is a function mode. The default dtype is no mode: kept tensors name their own.
    """
    # A guard restores the state at its making, so each is made only once the guards before it have begun.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
        _disable_current_modes(),
    ):
        yield
