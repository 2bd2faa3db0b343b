"""Single kernels on real tensors: each call is a schedule of one launch, which runs at once.

``workspace``: a `Workspace`, or a stand-in with its facts, segments and kept kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.plan import launches
from fusedcomm.plan.builder import Builder, Layout, RmsNorm, layout_of
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.schedule import Schedule
from fusedcomm.run import python_executor

_schedules: WeakKeyDictionary[Any, dict[Any, Schedule]] = WeakKeyDictionary()  # by workspace


def prepared(
    program: Callable[..., None], workspace: Any, fingerprint: int, *tensors: Tensor | None
) -> Callable[[], None]:
    """A call of ``program(builder, *tensors)``, of launches of its own, planned once."""
    with outside_modes():
        layouts = [None if t is None else layout_of(t) for t in tensors]
        s = Builder(workspace.memory_facts(), workspace.device_facts(), layouts)
        program(s, *s.inputs)
        schedule = s.finish()

    def run() -> None:
        python_executor.run(schedule, workspace, "", fingerprint, tensors)

    return run


def push(x: Tensor, w: Tensor, bias: Tensor | None, spans: RoundSpans, workspace: Any, fingerprint: int) -> None:
    _run("push", workspace, fingerprint, x, w, bias, spans=spans)


def pack(t: Tensor, spans: RoundSpans, workspace: Any, fingerprint: int, *, own: bool = True) -> None:
    _run("pack", workspace, fingerprint, t, spans=spans, own=own)


def gather_matmul(
    out: Tensor,
    w: Tensor,
    bias: Tensor | None,
    spans: RoundSpans,
    workspace: Any,
    fingerprint: int,
    *,
    end_round: bool,
    own: bool = True,
) -> None:
    _run("gather_matmul", workspace, fingerprint, out, w, bias, spans=spans, end_round=end_round, own=own)


def unpack(
    out: Tensor, spans: RoundSpans, workspace: Any, fingerprint: int, *, end_round: bool = True, own: bool = True
) -> None:
    _run("unpack", workspace, fingerprint, out, spans=spans, end_round=end_round, own=own, arrived=True)


def reduce(
    out: Tensor,
    spans: RoundSpans,
    bias: Tensor | None,
    scale: float,
    workspace: Any,
    fingerprint: int,
    residual: Tensor | None = None,
) -> None:
    _run("reduce", workspace, fingerprint, out, residual, bias=bias, spans=spans, scale=scale, arrived=True)


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
    tensors, options = (out, residual, normed, weight), {"scale": 1.0, "beside": True, "eps": eps}
    _run("reduce", workspace, fingerprint, *tensors, bias=bias, spans=spans, **options)


def norm(normed: Tensor, x: Tensor, weight: Tensor | None, eps: float, workspace: Any) -> None:
    _run("norm", workspace, 0, normed, x, weight, eps=eps)


def begin_push(workspace: Any) -> None:
    _run("begin_push", workspace, 0)


def signal(workspace: Any, dst_rank: int | None, fingerprint: int) -> None:
    _run("signal", workspace, fingerprint, dst_rank=dst_rank)


def wait_source(src_rank: int, workspace: Any, fingerprint: int) -> None:
    _run("wait_source", workspace, fingerprint, src_rank=src_rank)


def wait(workspace: Any, fingerprint: int) -> None:
    _run("wait", workspace, fingerprint)


def finish(out: Tensor, workspace: Any, fingerprint: int, *, end_round: bool) -> None:
    _run("finish", workspace, fingerprint, out, end_round=end_round)


def _run(name: str, workspace: Any, fingerprint: int, *tensors: Tensor | None, **options: Any) -> None:
    """``fusedcomm.plan.launches.NAME(s, *tensors, **options)``; a bias among the options is a tensor too."""
    bias = options.pop("bias", None)
    inputs = [*tensors, bias]
    layouts = tuple(None if t is None else layout_of(t) for t in inputs)
    key = name, layouts, workspace.device_facts(), *options.values()
    schedules = _schedules.setdefault(workspace, {})
    if key not in schedules:
        schedules[key] = _plan(name, workspace, layouts, options)
    python_executor.run(schedules[key], workspace, name, fingerprint, inputs)


@outside_modes()
def _plan(name: str, workspace: Any, layouts: Sequence[Layout | None], options: dict[str, Any]) -> Schedule:
    s = Builder(workspace.memory_facts(), workspace.device_facts(), layouts)
    *tensors, bias = s.inputs
    if name == "reduce":
        tensors, (residual, *others) = tensors[:1], tensors[1:]
        options = {**options, "residual": residual, "bias": bias}
        if others and others[0] is not None:
            options["norm"] = RmsNorm(others[0], others[1], options.pop("eps"))
    getattr(launches, name)(s, *tensors, **options)
    return s.finish()
