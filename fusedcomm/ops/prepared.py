"""Prepared calls: the second call of a kind on CPU tensors is recorded, and from the third on no Python runs.

A kind is what decides how a call runs: op, sizes, strides, dtypes, other arguments, group, and what `force_algorithm`
says. The Python algorithm stays the only statement of what is done. `fusedcomm.runtime.tape` records it while it runs,
and `kernels/cpu/prepared_calls.cpp` runs the tape, with the same signals, waits, records and lanes. Whatever takes long
or fails comes back to Python, to `Rescue`. A new workspace, `reset` and `close` drop all tapes of a group.

The first call is not recorded: it may make the group, vote, or grow the workspace, which drops its tape, and in a
program whose sizes never come again all calls are first ones, which a recording makes slower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fusedcomm.errors import text_of
from fusedcomm.runtime import dumps
from fusedcomm.runtime.members import known_member
from fusedcomm.runtime.native_part import native
from fusedcomm.runtime.tape import Recorder
from fusedcomm.runtime.workspace import Workspace

log = logging.getLogger("fusedcomm")


def record(
    kernel: Callable[..., Any], calls: Any, key: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call by its kernel, and put its tape into ``calls`` under ``key``."""
    assert native is not None
    if _get_current_dispatch_mode() is not None:  # it would see the ops of the recorder
        return kernel(*args, **kwargs)
    out = kwargs.get("out")
    args, kwargs = pytree.tree_map_only(Tensor, native.alias, (args, kwargs))
    with Recorder([t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]) as recorder:
        result = kernel(*args, **kwargs)
    found = recorder.record
    if found is None:
        recorder.reasons.append("its algorithm has no tapes")
    recorder.finish(result if isinstance(result, tuple) else (result,))
    if not recorder.is_usable:
        log.debug("a call is not prepared: %s", "; ".join(recorder.reasons))
        calls.refuse(key)
        return result if out is None else out
    assert found is not None
    rescue = Rescue(found.op, recorder.fingerprint, recorder.workspace)
    has_rounds = recorder.workspace is not None
    calls.add(key, recorder.tape, has_rounds, recorder.fingerprint, found.kind(), recorder.workspace, rescue)
    if (ours := known_member(found.group_name, found.device)) is not None:
        ours.count_tape(recorder.num_bytes)
    return result if out is None else out


@dataclass
class Rescue:
    """What a prepared call asks for when a peer is late or something fails."""

    op: str
    fingerprint: int
    workspace: Workspace | None

    def wait(self, src_rank: int, epoch: int, call_number: int) -> None:
        """Wait for a signal as long as it may take, or raise what has happened instead."""
        assert self.workspace is not None
        self.workspace.call_number = call_number
        self.workspace.wait(src_rank, epoch, self.op, self.fingerprint)

    def check(self, epoch: int) -> None:
        """Raise what peers have found by round ``epoch``."""
        assert self.workspace is not None
        self.workspace.check_peers(self.op, self.fingerprint, epoch)

    def abandon(self, error: BaseException) -> None:
        """Tell the peers that the call was left half way."""
        assert self.workspace is not None
        self.workspace.abandon(self.op, error)

    @staticmethod
    def tell(error: BaseException) -> tuple[str, list[int]]:
        """What the flight recorder keeps of an error."""
        return text_of(error), list(getattr(error, "peers", ()))

    @staticmethod
    def dump(why: str) -> None:
        dumps.write(why)
