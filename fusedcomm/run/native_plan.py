"""A schedule as the native executor takes it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fusedcomm.kernels.native_part import loaded
from fusedcomm.memory.launch_order import order_of
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import schedule as steps
from fusedcomm.run.packing import NotPackableError, pack
from fusedcomm.run.scaled_matmul import torch_can


def load(schedule: steps.Schedule, workspace: Workspace, fingerprint: int, numbers: Sequence[int]) -> Any:
    """``numbers``: of each input among the op's tensor arguments, -1 for one that is not there. On GPUs the schedule
    has run, so that its kernels are compiled and loaded.
    """
    plan = loaded().Plan(
        workspace.device,
        workspace.streams,
        order_of(workspace) if workspace.device.type == "cuda" else None,
        list(schedule.results),
        schedule.temporary_bytes,
        list(schedule.temporaries),
        schedule.num_events,
    )
    for step in schedule.steps:
        if isinstance(step.work, steps.Launch):
            kept = workspace.kernels.get(id(step.work))
            if kept is None or workspace.device.type == "cpu":
                raise NotPackableError("the kernel is not one that the driver can launch")
            places, packed = pack(step.work, kept[1], workspace, fingerprint)
            plan.launch(_facts(step), _places(places, numbers), *packed)
        elif isinstance(step.work, steps.Multiply) and (scales := step.work.scales):
            work = step.work
            places = [work.out, work.x, work.w, *scales, *([] if work.bias is None else [work.bias])]
            how = work.bias is not None, work.adds, torch_can(work, workspace.device), work.fast
            plan.scaled_multiply(_facts(step), _places(places, numbers), *how)
        else:
            _append(plan, step, numbers)
    plan.finish(_places(schedule.returned, numbers))
    return plan


def bound(
    schedule: steps.Schedule, workspace: Workspace, op: str, fingerprint: int, inputs: Sequence[Tensor | None]
) -> Callable[[], list[Tensor]]:
    """`python_executor.run` of these arguments by the native part, loaded. Raises where it does not take them."""
    given = [t for t in inputs if t is not None]
    numbers = [next((i for i, each in enumerate(given) if each is t), -1) for t in inputs]
    plan = load(schedule, workspace, fingerprint, numbers)

    def wait(src_rank: int, epoch: int) -> None:
        workspace.wait(src_rank, epoch, op, fingerprint)

    def check(epoch: int) -> None:
        workspace.check_peers(op, fingerprint, epoch)

    return partial(plan.run, given, *workspace.for_plans(), fingerprint, wait, check)


def _facts(step: steps.Step) -> tuple[str, int]:
    return step.lane, int(step.stream)


def _append(plan: Any, step: steps.Step, numbers: Sequence[int]) -> None:
    native, work, facts = loaded(), step.work, _facts(step)

    def places(*given: steps.Place | None) -> list[Any]:
        return _places([each for each in given if each is not None], numbers)

    match work:
        case steps.Multiply():
            plan.multiply(facts, places(work.out, work.x, work.w, work.bias), work.bias is not None, work.adds)
        case steps.Copy():
            plan.copy(facts, places(work.to, work.source))
        case steps.Reduce():
            plan.reduce(facts, places(work.out, *work.parts, work.bias), work.bias is not None, work.scale != 1)
        case steps.Norm():
            plan.norm(facts, places(work.out, work.x, work.weight), work.weight is not None, work.eps)
        case steps.Signal():
            plan.with_number(facts, native.SIGNAL, work.dst_rank)
        case steps.Wait():
            plan.with_number(facts, native.WAIT, work.src_rank)
        case steps.Record():
            plan.with_number(facts, native.RECORD, work.event)
        case steps.Await():
            plan.with_number(facts, native.AWAIT, work.event)
        case steps.EndRound():
            plan.with_number(facts, native.END_ROUND, 0)
        case _:
            raise NotPackableError("the step is not one that the native part has")


def _places(places: Sequence[steps.Place], numbers: Sequence[int]) -> list[Any]:
    return [
        loaded().Place(int(base), numbers[number] if base == steps.Base.INPUT else number, *rest)
        for base, number, *rest in places
    ]
