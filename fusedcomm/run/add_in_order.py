"""The sum of the ranks' chunks."""

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements of the sum that a core's caches hold


def add_in_order(out: Tensor, parts: Sequence[Tensor], bias: Tensor | None, scale: float) -> None:
    """``out = sum(parts) * scale + bias``, flat: added in float32, in the order given, and rounded once.

    bias [N] repeats. ``scale`` is 1, or 1 / R for the average.
    """
    if len(parts) == 1 and bias is None and scale == 1:
        out.copy_(parts[0])
        return
    if len(parts) == 2 and bias is None and scale == 1:  # rounded once as well, because torch adds in float32
        torch.add(parts[0], parts[1], out=out)
        return
    row = 1 if bias is None else max(bias.numel(), 1)
    step = max(_BLOCK // row, 1) * row if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), step):
        end = min(start + step, out.numel())
        total = parts[0][start:end].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part[start:end]
        if scale != 1:
            total /= len(parts)
        if bias is not None:
            total = (total.view(-1, row) + bias).view(-1)
        out[start:end] = total
