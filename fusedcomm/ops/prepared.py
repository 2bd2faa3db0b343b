"""Prepared calls: the second call of a kind on CPU tensors is kept with its plan, and from the third on no Python runs.

A kind decides how a call runs: op, sizes, strides, dtypes, other arguments, group, and the state of `force_algorithm`.
The native part (`kernels/cpu/prepared_calls.cpp`) has a table of them. Long waits and failures come back to Python, to
`Rescue`. A new workspace, `reset` and `close` drop all plans of a group.

The first call is not kept: it may make the group, vote, or grow the workspace, and where sizes never repeat all calls
are first ones.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fusedcomm.kernels.native_part import loaded
from fusedcomm.memory import dumps
from fusedcomm.memory.errors import text_of
from fusedcomm.memory.members import known_member
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.forced import Forced, number_of
from fusedcomm.run.calls import Ran
from fusedcomm.run.native_plan import load

log = logging.getLogger("fusedcomm")

FORCED = 2  # where a key has the state of `force_algorithm`
Kernel = Callable[..., Any]  # kernel(*args, **kwargs, seen=Seen)


def record(kernel: Kernel, calls: Any, key: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call by its kernel, and put its plan into ``calls`` under ``key``."""
    if _get_current_dispatch_mode() is not None:  # it would see no op in later calls
        return kernel(*args, **kwargs)
    outs = tuple(kwargs.values())
    args, kwargs = pytree.tree_map_only(Tensor, loaded().alias, (args, kwargs))  # x may be w
    seen = Seen()
    result = kernel(*args, **kwargs, seen=seen)
    seen.keep(calls, key, [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)], result)
    return (outs if isinstance(result, tuple) else outs[0]) if outs else result


class Seen:
    """The plan that a call ran by, if it had one."""

    ran: Ran | None = None
    record: Any = None  # the flight recorder's of all such calls
    forced: Forced | None = None  # what `force_algorithm` said then

    def keep(self, calls: Any, key: list[int], arguments: Sequence[Tensor], result: Any) -> None:
        if self.forced is None or key[FORCED] != number_of(self.forced):  # another thread has changed it
            return
        ran = self.ran
        if ran is None or ran.plan.schedule is None:
            calls.refuse(key)
            return
        plan, schedule, workspace = ran.plan, ran.plan.schedule, cast(Workspace, ran.memory)
        numbers = [next((i for i, each in enumerate(arguments) if each is t), -1) for t in ran.inputs]
        try:
            loaded_plan = load(schedule, workspace, plan.fingerprint, numbers)
        except Exception as error:  # the call is over, and its peers need nothing more of it
            log.debug("a call of %s is not prepared: %s", plan.op, error)
            calls.refuse(key)
            return
        outputs = [_output(each, ran.returned) for each in (result if isinstance(result, tuple) else (result,))]
        kernels = [workspace.kernels.get(id(step.work)) for step in schedule.steps]
        rescue = Rescue(plan.op, plan.fingerprint, workspace, kernels)
        calls.add(key, loaded_plan, outputs, plan.fingerprint, self.record, workspace, rescue)
        if (ours := known_member(self.record.group_name, self.record.device)) is not None:
            ours.count_plan(plan.num_bytes)


def _output(result: Any, returned: Sequence[Tensor]) -> int | list[int]:
    """Index into the plan's results; -1 for a tensor of shape [0], never among them. Lists give lists."""
    if isinstance(result, list):
        return [_output(each, returned) for each in result]  # type: ignore[misc]
    return next((i for i, each in enumerate(returned) if each is result), -1)


@dataclass
class Rescue:
    """The way of a prepared call back to Python, when a peer is late or something fails."""

    op: str
    fingerprint: int
    workspace: Workspace
    kernels: Sequence[Any] = ()  # keeps the launched functions loaded: Triton unloads one with its CompiledKernel

    def wait(self, src_rank: int, epoch: int, call_number: int) -> None:
        """Wait for a signal, within the time-out, or raise the group's error."""
        self.workspace.call_number = call_number
        self.workspace.wait(src_rank, epoch, self.op, self.fingerprint)

    def check(self, epoch: int) -> None:
        """Raise the errors that peers have found by round ``epoch``."""
        self.workspace.check_peers(self.op, self.fingerprint, epoch)

    def abandon(self, error: BaseException) -> None:
        """Tell the peers that the call was left half way."""
        self.workspace.abandon(self.op, error)

    @staticmethod
    def tell(error: BaseException) -> tuple[str, list[int]]:
        """(text, peers) of an error, for the flight recorder."""
        return text_of(error), list(getattr(error, "peers", ()))

    @staticmethod
    def dump(why: str) -> None:
        dumps.write(why)
