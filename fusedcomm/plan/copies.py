"""Copies of chunks between slots and the tensors that they are parts of."""

from torch import Tensor

from fusedcomm.plan.builder import Builder

_LONG_RUN = 1 << 20  # bytes of a run that is worth a copy of its own; a matter of microseconds on the link


def copy_between(s: Builder, to: Tensor, source: Tensor) -> None:
    """``to.flatten()[i] = source.flatten()[i]`` in one pass, for two Span views, (outer, inner) each, or flat ones."""
    if to.shape == source.shape:
        s.copy(to, source)
    elif source.is_contiguous():
        s.copy(to, source.view(to.shape))
    elif to.shape[0] % source.shape[0] == 0:
        shape = (source.shape[0], to.shape[0] // source.shape[0], to.shape[1])
        s.copy(to.view(shape), source.view(shape))
    elif source.shape[0] % to.shape[0] == 0:
        shape = (to.shape[0], source.shape[0] // to.shape[0], source.shape[1])
        s.copy(to.view(shape), source.view(shape))
    else:
        s.copy(to, s.contiguous(source).view(to.shape))


def copy_runs(s: Builder, to: Tensor, source: Tensor) -> None:
    """``to.view(source.shape).copy_(source)`` for runs (outer, inner), which copy engines take only one by one."""
    to = to.view(source.shape)
    if source.shape[1] * source.itemsize < _LONG_RUN:
        s.copy(to, source)
        return
    for run, chunk in zip(source, to, strict=True):
        s.copy(chunk, run)
