"""All five ops in exported programs, in AOTInductor's packages, and behind Inductor's C++ wrapper."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedcomm
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import program_of
from tests.helpers.problems import OPS
from tests.helpers.tiers import nightly_but


class Program(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.program = program_of(op)
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.program(x, [*self.weights])


def exported(program: Program) -> torch.export.ExportedProgram:
    """With any even number of tokens."""
    tokens = {1: 2 * torch.export.Dim("pairs", min=2, max=64)}
    return torch.export.export(program, (torch.randn(2, 4, 8),), dynamic_shapes=(tokens,))


def check(run: Callable[[Tensor], list[Tensor]], program: Program) -> None:
    for tokens in (4, 10):
        x = torch.randn(2, tokens, 8)
        torch.testing.assert_close(run(x), program(x))


@on_ranks(2)
@pytest.mark.parametrize("op", nightly_but(["matmul_all_to_all", "all_gather_matmul"], OPS))
def test_an_exported_program(rank: int, op: str, tmp_path: Path) -> None:
    """Run, with gradients; saved and loaded; with core aten ops only."""
    torch.manual_seed(rank)
    program = Program(op)
    found = exported(program)
    x = torch.randn(2, 6, 8)
    grads = []
    for module in (program, found.module()):
        loss = torch.stack([out.square().sum() for out in module(x)]).sum()
        weights = dict(module.named_parameters())
        found_grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        grads.append({name: g for name, g in zip(weights, found_grads, strict=True) if g is not None})
    torch.testing.assert_close(*grads)
    path = tmp_path / f"{rank}.pt2"
    torch.export.save(found, path)
    with torch.no_grad():
        for each in (found, torch.export.load(path), found.run_decompositions()):
            check(each.module(), program)


class UnevenProgram(nn.Module):
    """7 tokens and 3 heads on 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return fusedcomm.matmul_all_to_all(x, self.w, 1, -2, out_shape=[3, 2], gather_size=7)


@on_ranks(2)
def test_parts_of_different_sizes_are_those_of_one_rank(rank: int, tmp_path: Path) -> None:
    """Such a program has its rank's shapes: each rank exports its own, and refuses that of another."""
    program, x = UnevenProgram(), torch.randn(2, (4, 3)[rank], 8)
    torch.export.save(torch.export.export(program, (x,)), tmp_path / f"{rank}.pt2")
    dist.barrier()
    own, other = (torch.export.load(tmp_path / f"{each}.pt2").module() for each in (rank, 1 - rank))
    torch.testing.assert_close(own(x), program(x))
    with pytest.raises(ValueError, match=f"rank must be this process' rank in the group, {rank}, got {1 - rank}"):
        other(torch.randn(2, (3, 4)[rank], 8))


@pytest.mark.nightly
@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_a_package_of_aot_inductor(rank: int, op: str, tmp_path: Path) -> None:
    program = Program(op).requires_grad_(False)
    path = torch._inductor.aoti_compile_and_package(exported(program), package_path=str(tmp_path / f"{rank}.pt2"))
    dist.barrier()  # a rank compiles for longer than its peers wait for it in an op
    check(torch._inductor.aoti_load_package(path), program)


@pytest.mark.thorough
@on_ranks(2)
def test_the_cpp_wrapper(rank: int) -> None:
    """C++ takes long to compile; this op has a list among its results, and backwards make plain collectives."""
    check_training(rank, "all_gather_matmul", {"cpp_wrapper": True})


@pytest.mark.nightly
@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_without_lowerings(rank: int, op: str) -> None:
    """Inductor then calls the ops as any others, as it does in its lite mode."""
    check_training(rank, op, {"fallback_by_default": True})


def check_training(rank: int, op: str, options: dict[str, Any]) -> None:
    torch.manual_seed(rank)
    torch._dynamo.reset()
    program, x = Program(op), torch.randn(2, 6, 8, requires_grad=True)
    # no cached graphs, as their code has the schemas of when it was made; but cached kernels, as C++ takes long
    compiled: Any = torch.compile(program, fullgraph=True, options=options | {"fx_graph_cache": False})
    answers = []
    for run in (program, compiled):
        with fusedcomm.force_algorithm("unfused"):
            outs = run(x)  # gloo waits for as long as a rank compiles
            loss = torch.stack([out.square().sum() for out in outs]).sum()
            grads = torch.autograd.grad(loss, [x, *program.parameters()], allow_unused=True)
            answers.append([*outs, *(grad for grad in grads if grad is not None)])
    torch.testing.assert_close(*answers)


# Inductor knows the lowerings, and the FLOP counter the formulas, whoever imports these tables, and whenever.
CHECK = """
from fusedcomm.ops.table import OPS
ops = torch.ops.fusedcomm
overloads = [getattr(ops, name).default for name in OPS if "matmul" in name]
assert len(overloads) == 12
from torch._inductor import lowering
assert all(overload in lowering.lowerings for overload in [*overloads, ops.moe_dispatch.default]), overloads
from torch._inductor.fx_passes import overlap_scheduling
assert overlap_scheduling.benchmark_node_with_cache_key.__module__ == "fusedcomm.ops.roofline"
import torch.utils.flop_counter
assert all(getattr(ops, op._opname) in torch.utils.flop_counter.flop_registry for op in overloads)
assert not any(type(finder).__name__ == "_AfterTable" for finder in sys.meta_path)
"""
FOUND = "assert importlib.util.find_spec('torch._inductor.lowering') is not None"
NEITHER = "assert not {'torch._inductor.lowering', 'torch.utils.flop_counter'} & {*sys.modules}"
PROGRAMS = {
    "fusedcomm first": f"import sys, torch, fusedcomm\n{NEITHER}\n{CHECK}",
    "looked up before": f"import importlib.util, sys, torch, fusedcomm\n{FOUND}\n{CHECK}",
    "its lowerings first": f"import sys, torch, fusedcomm, fusedcomm.ops.lowering\n{CHECK}",
    "both first": f"import sys, torch, torch.utils.flop_counter, torch._inductor.lowering, fusedcomm\n{CHECK}",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", nightly_but(["fusedcomm first"], PROGRAMS))
def test_lowerings_are_registered_when_inductor_is_there(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAMS[name]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_overlap_scheduling_makes_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark of torch's would, at compile time, and not equally many on all ranks."""
    from torch._inductor.fx_passes import overlap_scheduling

    monkeypatch.setattr(overlap_scheduling, "get_collective_do_bench", lambda: lambda call: call())
    of_a_gpu = "torch.utils._runtime_estimation"
    monkeypatch.setattr(f"{of_a_gpu}.flops_to_ns", lambda flops, dtype: 1e6 * flops)
    monkeypatch.setattr(f"{of_a_gpu}.get_transfer_time", lambda *_: 0.0)
    graph = torch.fx.Graph()
    x, w = (graph.create_node("placeholder", name) for name in "xw")
    x.meta["val"], w.meta["val"] = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    call = graph.call_function(torch.ops.fusedcomm.matmul_all_reduce.default, (x, w, None, "sum", 2, "no group"))
    call.meta["val"] = torch.empty(3, 5, device="meta")
    assert overlap_scheduling.benchmark_node(call) == 2 * 3 * 4 * 5


BROKEN = """
import sys, torch, fusedcomm
sys.modules["fusedcomm.ops.lowering"] = None
import torch._inductor.lowering
assert torch.compile(torch.sin, backend="eager")(torch.zeros(3)).sum() == 0
"""


@pytest.mark.nightly
def test_lowerings_that_cannot_be_imported_leave_inductor_usable() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch._inductor.lowering does not know the ops of fusedcomm" in done.stderr
