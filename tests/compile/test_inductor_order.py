"""The order of a scheduled graph in the code that Inductor generates, and what still fuses; the pass among others."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import ir
from torch.fx import Graph, Node

import fusedcomm.compile
from fusedcomm.bench.start_program import matmul_and_reshard_heads
from fusedcomm.compile.overlap import inductor_order
from fusedcomm.compile.overlap.estimator import Estimator
from tests.compile.test_lowering import codes_of

_c10d = torch.ops._c10d_functional
CALL = re.compile(r"_c10d_functional\.(\w+)\.\w+\(|extern_kernels\.(\w*mm)\(|^ +(cpp_fused)\w*\(", re.MULTILINE)


def calls(code: str) -> list[str]:
    """What the code does, in order: "start", "wait", "mm" for any matmul, "fused" for a kernel of pointwise ops."""
    names = [next(filter(None, match)) for match in CALL.findall(code)]
    short = {"wait_tensor": "wait", "mm": "mm", "addmm": "mm", "bmm": "mm", "cpp_fused": "fused"}
    return [short.get(name, "start") for name in names]


def wait_late(graph: Graph, keep: bool) -> None:
    """The order by hand: starts stay; waits, and all that reads them, come last."""
    late: set[Node] = set()
    output = next(iter(graph.find_nodes(op="output")))
    for node in list(graph.nodes):
        waits = node.target is _c10d.wait_tensor.default or late.intersection(node.all_input_nodes)
        if waits and node is not output:
            late.add(node)
            output.prepend(node)
    if keep:
        inductor_order.keep(graph)


def matmuls_between(names: list[str]) -> list[int]:
    """How many matmuls stand between each start and its wait, where waits come in the order of the starts."""
    names = names[names.index("start") :]  # a graph that ranks agreed on waits for the comparison first
    starts, waits = ([i for i, name in enumerate(names) if name == what] for what in ("start", "wait"))
    return [names[start:wait].count("mm") for start, wait in zip(starts, waits, strict=True)]


def gather_beside_matmuls(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    group_name = dist.group.WORLD.group_name
    a = x.relu()
    top = u.amax(-1, keepdim=True)
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(w, 2, group_name))
    y = a @ w
    e = (u - top).exp()
    y = (y + 1) @ w
    return y, x + gathered[:8], e / e.sum(-1, keepdim=True)


def check_fusing(rank: int) -> list[tuple[list[str], list[int]]]:
    args = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)] + [torch.randn(4, 7, 9)]
    want, found = gather_beside_matmuls(*args), []
    sizes: list[int] = []

    def look(nodes: list[Any]) -> list[Any]:
        sizes[:] = sorted(len(node.get_nodes()) for node in nodes if not isinstance(node.node, ir.ExternKernel))
        return nodes

    for keep in (True, False):
        settings = {"post_grad_custom_post_pass": partial(wait_late, keep=keep), "_post_fusion_custom_pass": look}
        got, (code,) = codes_of(lambda compiled: compiled(*args), gather_beside_matmuls, **settings)
        torch.testing.assert_close(got, want)
        found.append((calls(code), list(sizes)))
    return found


@pytest.mark.thorough
def test_what_fuses_leaves_the_others_in_place(ranks: Any) -> None:
    """The softmax of u is one kernel, though matmuls stand between its ops. What reads the wait's result is not fused
    with what the first matmul reads; in the control it is, and the wait comes before all matmuls."""
    (kept, lost), other = ranks(2).run(check_fusing)
    assert other == [kept, lost]
    assert matmuls_between(kept[0]) == [2] and matmuls_between(lost[0]) == [0]
    assert kept[1] == [1, 1, 1, 4] and lost[1] == [1, 2, 4]


# enable(overlap=True)
PAIRS = 3


def integers(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes]


def start_program() -> tuple[Any, list[Tensor]]:
    """The start program, so large that one exchange for all of them would not pay."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def program(*args: Tensor) -> list[Tensor]:
        return matmul_and_reshard_heads(list(args[:PAIRS]), list(args[PAIRS:]), mesh)

    return program, integers(*[(2, 256, 64)] * PAIRS, *[(2, 64, 1024)] * PAIRS)


def check_start_program(rank: int, overlap: bool) -> tuple[list[str], list[str]]:
    program, args = start_program()
    want = program(*args)
    with fusedcomm.compile.enabled(fuse=(), overlap=overlap) as report:
        got, (code,) = codes_of(lambda compiled: compiled(*args), program)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return calls(code), [line.status for line in report.collectives]


def test_matmuls_stand_between_starts_and_waits_of_the_start_program(ranks: Any) -> None:
    """Behind the last exchange every matmul needs it. As traced (the control) no exchange has one."""
    (names, statuses), other = ranks(2).run(check_start_program, True)
    assert other == (names, statuses)
    assert len(matmuls_between(names)) == PAIRS and all(matmuls_between(names)[:-1])
    assert set(statuses) <= {"overlapped", "exposed"} and len(statuses) == PAIRS
    (names, statuses), _ = ranks(2).run(check_start_program, False)
    assert matmuls_between(names) == [0] * PAIRS and set(statuses) == {"exposed"}


def beside(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """A product that does not need the exchange is added to what it brings: Inductor makes one addmm of both."""
    group_name = dist.group.WORLD.group_name
    arrived = _c10d.wait_tensor(_c10d.all_to_all_single(u, [1, 1], [1, 1], group_name))
    return arrived + x @ w


def check_addition(rank: int, overlap: bool) -> list[str]:
    args = integers((2, 8), (8, 16), (2, 16))
    want = beside(*args)
    with fusedcomm.compile.enabled(fuse=(), overlap=overlap):
        got, (code,) = codes_of(lambda compiled: compiled(*args), beside)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return calls(code)


@pytest.mark.thorough
def test_a_product_added_to_what_arrives_runs_meanwhile(ranks: Any) -> None:
    for overlap, number in ((True, 1), (False, 0)):
        names, other = ranks(2).run(check_addition, overlap)
        assert names == other and matmuls_between(names) == [number]


def check_exposed(rank: int) -> list[str]:
    program, args = start_program()
    want = program(*args)
    with fusedcomm.compile.enabled(overlap=True) as report:
        got = torch.compile(program, fullgraph=True)(*args)
    torch.testing.assert_close(got, want)
    assert all(line.reason for line in report.collectives if line.status != "fused")
    return [line.status for line in report.collectives]


def test_what_stays_exposed_is_fused(ranks: Any) -> None:
    first, second = ranks(2).run(check_exposed)
    assert first == second and "fused" in first


def test_an_estimator_alone_does_nothing() -> None:
    with pytest.raises(ValueError, match="estimator must come with overlap=True"):
        fusedcomm.compile.enable(estimator=Estimator("cpu"))


def test_overlap_needs_ranks_to_agree_with() -> None:
    with pytest.raises(ValueError, match="must come after init_process_group"):
        fusedcomm.compile.enable(overlap=True)
