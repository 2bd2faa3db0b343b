"""The parts of a call as ranges in a profiler's trace, one lane per kind of work; free where nobody profiles.

matmul   a chunk's matmul; in `fused` with the kernel's stores to peers and its waits
push     a chunk's copy to a peer, and its signal
wait     the wait for a peer's signal
copy     moving an arrived chunk to its place in the result, or adding it up; in `fused` with the wait for it"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

LANES = ("matmul", "push", "wait", "copy")
PREFIX = "fusedcomm."
_NOT_PROFILED: AbstractContextManager[Any] = nullcontext()


def lane(name: str, peer: int | None = None) -> AbstractContextManager[Any]:
    """A range of lane ``name``, for ``peer``."""
    if not profiler._is_profiler_enabled:
        return _NOT_PROFILED
    return profiler.record_function(f"{PREFIX}{name}" if peer is None else f"{PREFIX}{name} rank {peer}")
