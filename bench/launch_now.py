"""Single kernels on real tensors: each call is a schedule of one launch, which runs at once.

A function has the arguments of its namesake in `fusedcomm.plan.launches`, then ``workspace, fingerprint``.
``workspace``: a `Workspace`, or a stand-in with its facts, segments and kept kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.plan import launches
from fusedcomm.plan.builder import Builder, RmsNorm, layout_of
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.schedule import Schedule
from fusedcomm.run import python_executor

_schedules: WeakKeyDictionary[Any, dict[Any, Schedule]] = WeakKeyDictionary()  # by workspace


def prepared(
    program: Callable[..., None], workspace: Any, fingerprint: int, *tensors: Tensor | None
) -> Callable[[], None]:
    """A call of ``program(builder, *tensors)``, of launches of its own, planned once."""
    schedule = _planned(program, workspace, tensors)

    def run() -> None:
        python_executor.run(schedule, workspace, "", fingerprint, tensors)

    return run


@outside_modes()
def _planned(program: Callable[..., None], workspace: Any, tensors: Sequence[Tensor | None]) -> Schedule:
    layouts = [None if t is None else layout_of(t) for t in tensors]
    s = Builder(workspace.memory_facts(), workspace.device_facts(), layouts)
    program(s, *s.inputs)
    return s.finish()


def _run(program: Callable[..., None], workspace: Any, fingerprint: int, *args: Any, **options: Any) -> None:
    """``program(s, *args, **options)``, with the schedule's inputs in place of tensors."""
    given = [*args, *options.values()]
    tensors = [each for each in given if isinstance(each, Tensor)]
    facts = [layout_of(each) if isinstance(each, Tensor) else each for each in given]
    key = program, workspace.device_facts(), *facts, *options
    kept = _schedules.setdefault(workspace, {})
    if key not in kept:

        def on_inputs(s: Builder, *inputs: Any) -> None:
            left = iter(inputs)
            placed = [next(left) if isinstance(each, Tensor) else each for each in given]
            program(s, *placed[: len(args)], **dict(zip(options, placed[len(args) :], strict=True)))

        kept[key] = _planned(on_inputs, workspace, tensors)
    python_executor.run(kept[key], workspace, program.__name__, fingerprint, tensors)


def _now(program: Callable[..., None], **always: Any) -> Callable[..., None]:
    def run(*args: Any, **options: Any) -> None:
        *first, workspace, fingerprint = args
        _run(program, workspace, fingerprint, *first, **always, **options)

    return run


push, pack, gather_matmul = _now(launches.push), _now(launches.pack), _now(launches.gather_matmul)
unpack, reduce = _now(launches.unpack, arrived=True), _now(launches.reduce, arrived=True)
wait_source, wait, finish = _now(launches.wait_source), _now(launches.wait), _now(launches.finish)


def reduce_norm(
    normed: Tensor,
    out: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spans: RoundSpans,
    eps: float,
    workspace: Any,
    fingerprint: int,
) -> None:
    """`reduce` with a norm behind it, beside a matmul."""

    def program(s: Builder, normed: Any, out: Any, residual: Any, weight: Any, bias: Any) -> None:
        norm = RmsNorm(normed, weight, eps)
        launches.reduce(s, out, spans, bias, 1.0, residual=residual, norm=norm, beside=True)

    prepared(program, workspace, fingerprint, normed, out, residual, weight, bias)()


def norm(normed: Tensor, x: Tensor, weight: Tensor | None, eps: float, workspace: Any) -> None:
    _run(launches.norm, workspace, 0, normed, x, weight, eps)


def begin_push(workspace: Any) -> None:
    _run(launches.begin_push, workspace, 0)


def signal(workspace: Any, dst_rank: int | None, fingerprint: int) -> None:
    _run(launches.signal, workspace, fingerprint, dst_rank)
