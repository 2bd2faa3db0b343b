"""Passes for torch.compile: unchanged programs run with their collectives fused into the matmuls beside them::

    fusedcomm.compile.enable()                  # once; graphs compiled from now on
    compiled = torch.compile(program)
    compiled(x)
    print(fusedcomm.compile.report())           # every collective: fused, merged, or left and why

Graphs compiled from then on are looked at, forward and backward; the program stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fusedcomm.compile.overlap.estimator import Estimator
    from fusedcomm.compile.passes import FusedcommPass
    from fusedcomm.compile.reports import CompileReport

__all__ = ["disable", "enable", "enabled", "register_collective", "report"]

_added: list[Any] = []  # the passes in Inductor's settings, the FusedcommPass first
_report: CompileReport | None = None  # of the last enable()


def enable(
    fuse: Sequence[str] | None = None,
    *,
    overlap: bool = False,
    estimator: Estimator | None = None,
    merge: DeviceMesh | Sequence[DeviceMesh] | None = None,
    commute: bool = False,
) -> None:
    """Add the passes to torch.compile's (Inductor's), after existing ones, and begin a new `report()`.

    Graphs compiled until `disable()` have, forward and backward, each collective that stands beside a matmul fused with
    it where an op of fusedcomm has the same result. Reductions that are added to each other become one of their sum if
    an op makes that too, and custom ops that `register_collective` knows are written out before. Nothing else changes:
    a collective that cannot be fused stays as it was, and `report()` says why. Call it alike on every rank.

    Args:
        fuse: the ops to use, of "matmul_all_to_all", "all_to_all_matmul", "all_gather_matmul", "matmul_reduce_scatter",
            "matmul_all_reduce", and with "_norm" behind it the last two; None: all.
        overlap: whether to start collectives early too and wait for them late, merge small ones, and fuse only ones
            that nothing else hides, as `fusedcomm.compile.overlap.schedule` does. The ranks agree on the estimates
            here, so call it after ``init_process_group``. The schedule of a rank depends on its graph alone: ranks
            that share a group must compile equal graphs, equal sizes too if not dynamic.
        estimator: times of nodes, for graphs on its type of device. None: estimated from tuned numbers if there are
            any, else from the default ones (`fusedcomm/plan/cost/model.py`).
        merge: the DeviceMesh, or several. Collectives that follow each other over its dims, one mesh dim at a time, as
            DTensor writes them, become one over these dims together, which never sends more bytes. A sum is then made
            in another order. The groups of all dims together are made here, so this call is a collective of the mesh's
            ranks, which must compile equal graphs.
        commute: whether an exchange moves over ops that act on each of its blocks alone, as norms, rotary embeddings
            and streams of tokens do between a projection and attention, where it can then be fused and the cost model
            expects a gain (no GPU has shown one yet). Every rank's values and gradients stay the program's, in another
            order of sums; where ranks' programs differ there, the exchange stays, as everything that needs all ranks'
            consent.

    Raises:
        ValueError: fuse names no op; estimator comes without overlap; overlap comes before
            ``init_process_group``; merge is no mesh, one without this rank, or one whose ranks do not ascend; ranks
            differ in the type of device or the ranks per node of their estimates.
        PeerTimeoutError: a rank did not come to the agreement on estimates within ``FUSEDCOMM_TIMEOUT_S``.
    """
    from fusedcomm.compile.merge.flattened_mesh import flatten
    from fusedcomm.compile.overlap.estimator import agreed_ones
    from fusedcomm.compile.passes import OPS, FusedcommPass, Settings
    from fusedcomm.compile.reports import CompileReport

    fuse = OPS if fuse is None else tuple(fuse)
    if not set(fuse) <= set(OPS):
        raise ValueError(f"fuse must name ops of {', '.join(OPS)}, got {', '.join(map(repr, fuse))}")
    if estimator is not None and not overlap:
        raise ValueError("estimator must come with overlap=True")
    if overlap and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError("overlap=True must come after init_process_group: the ranks agree on estimates")
    meshes = () if merge is None else flatten(merge)
    settings = Settings(fuse, agreed_ones(estimator) if overlap else (), meshes, commute)
    _install(FusedcommPass(settings, CompileReport()))


def disable() -> None:
    """Take the passes out again; other passes, set before or since, stay.

    Graphs that are compiled already stay as they are, and the last `report()` stays readable.
    """
    if _added:
        from fusedcomm.compile import inductor

        for each in _added:
            inductor.remove(each)
        _added.clear()


@contextmanager
def enabled(
    fuse: Sequence[str] | None = None,
    *,
    overlap: bool = False,
    estimator: Estimator | None = None,
    merge: DeviceMesh | Sequence[DeviceMesh] | None = None,
    commute: bool = False,
) -> Iterator[CompileReport]:
    """Add the passes for graphs compiled inside the ``with`` statement, backwards included, then restore the former.
    torch compiles a backward at its first use, which may come after the statement: inside it backwards are compiled
    together with their forwards (torch._functorch.config.force_non_lazy_backward_lowering). ``retain_graph=True`` then
    needs ``torch._functorch.config.donated_buffer = False``, as torch's error says.

    Args:
        fuse: as in `enable`.
        overlap: as in `enable`.
        estimator: as in `enable`.
        merge: as in `enable`.
        commute: as in `enable`.

    Yields:
        The `report()` of the statement.

    Raises:
        ValueError: as in `enable`.
        PeerTimeoutError: as in `enable`.
    """
    import torch._functorch.config as functorch_config

    outer = [*_added]
    enable(fuse, overlap=overlap, estimator=estimator, merge=merge, commute=commute)
    try:
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            yield report()
    finally:
        disable()
        if outer:
            _install(outer[0])


def register_collective(name: str, program: Callable[..., Any]) -> None:
    """Register the program that replaces a custom op of another package in graphs compiled from now on.

    DeepSpeed's ``deepspeed::dim_zero_all_to_all`` is known. Call it alike on every rank. Graphs compiled behind a call
    are in Inductor's cache for this process alone.

    Args:
        name: the op's qualified name, "namespace::op". An earlier program of that name is replaced.
        program: a function with the op's arguments and results, written with functional collectives. It is traced with
            fake tensors of each call, and its results must have the shapes, dtypes and strides of the op's. A backward
            that calls the op is covered too.

    Raises:
        ValueError: name is not of that form, or is one of torch's or fusedcomm's own.
        TypeError: program is not callable.

    Example::

        def program(x, group_name):
            return torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(x, "sum", group_name)
            )


        fusedcomm.compile.register_collective("package::all_reduce", program)
    """
    from fusedcomm.compile.graph import opaque

    opaque.register(name, program)


def report() -> CompileReport:
    """Return the outcome of every collective of the graphs compiled by this process since the last `enable()`."""
    from fusedcomm.compile.reports import CompileReport

    return CompileReport() if _report is None else _report


def _install(new: FusedcommPass) -> None:
    global _report
    from fusedcomm.compile import inductor
    from fusedcomm.compile.passes import CommutePass, OrderPass

    disable()
    added: list[tuple[Any, str]] = [(new, inductor.PRE)]
    if new.settings.commute:
        added.append((CommutePass(new.settings), inductor.JOINT))
    if new.settings.overlap:
        added.append((OrderPass(new.settings), inductor.POST))
    for each, setting in added:
        inductor.add(each, setting)
        _added.append(each)
    _report = new.report
