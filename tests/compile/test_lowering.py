"""The code that Inductor generates around the fused ops: no copies, the program's order, what caches keep apart."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from tests.helpers.graphs import cache_counts
from tests.helpers.on_ranks import on_ranks

_c10d = torch.ops._c10d_functional
CALLED = re.compile(r"torch\.ops\.(?:fusedcomm|_c10d_functional)\.(\w+\.\w+)\(")


def codes_of(run: Callable[..., Any], program: Any, **settings: Any) -> tuple[Any, list[str]]:
    """Returns (result of ``run(compiled program)``, Inductor's code of the forward and, if it runs, the backward)."""
    import torch._functorch.config as functorch_config
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    # no cached graphs; but cached kernels, as C++ takes long
    no_graphs = functorch_config.patch(enable_autograd_cache=False)
    with config.patch(fx_graph_cache=False, **settings), no_graphs:
        return run_and_get_code(run, torch.compile(program, fullgraph=True, dynamic=False))


def called(code: str) -> list[str]:
    return [name for name in CALLED.findall(code) if not name.startswith("wait_tensor")]


def five_ops(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = fusedcomm.matmul_all_to_all(x, w, 1, -2, out_shape=[4, 2])
    y = fusedcomm.matmul_reduce_scatter(y.flatten(-2), w[:4], 0)
    a, b = fusedcomm.all_gather_matmul(y, [w, w.mT], 0)
    return fusedcomm.matmul_all_reduce(fusedcomm.all_to_all_matmul(a, w, 1, 0), w), b


def check_five_ops(rank: int) -> list[str]:
    x, w = torch.randn(2, 5, 8, requires_grad=True), torch.randn(8, 8) / 4

    def run(program: Callable[..., Any]) -> list[Tensor]:
        outs = program(x, w)
        return [*(out.detach() for out in outs), *torch.autograd.grad(outs, x, [torch.ones_like(out) for out in outs])]

    outs, codes = codes_of(run, five_ops)
    torch.testing.assert_close(outs, run(five_ops))
    return codes


def test_each_op_is_called_once(ranks: Any) -> None:
    """Both ranks run the same code."""
    codes, others = ranks(2).run(check_five_ops)
    numbers = "# AOT ID: .*"  # of the graphs that a rank has compiled before
    assert [re.sub(numbers, "", code) for code in codes] == [re.sub(numbers, "", code) for code in others]
    forward, backward = map(called, codes)
    ops = "matmul_all_to_all", "matmul_reduce_scatter", "all_gather_matmul", "all_to_all_matmul", "matmul_all_reduce"
    assert forward == [f"{op}.default" for op in ops]
    assert backward == forward[:4]  # of an all_reduce none


@on_ranks(2)
def test_operands_are_written_as_the_op_reads_them(rank: int) -> None:
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        return [
            fusedcomm.matmul_all_reduce(x, w.mT),
            fusedcomm.matmul_reduce_scatter(x.mT.relu(), w, 0),
            fusedcomm.matmul_all_to_all(x, w.mT * 2, 0, 1),
        ]

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    outs, (code,) = codes_of(lambda compiled: compiled(x, w), program)
    torch.testing.assert_close(outs, program(x, w))
    strides = dict(re.findall(r"(buf\d+) = \w+\((?:buf\d+, )?\(8, 8\), (\(.*?\)),", code))
    # inputs as they lie
    assert re.search(r"matmul_all_reduce\.default\(arg\d_1, reinterpret_tensor\(arg\d_1, \(8, 8\), \(1, 8\), 0\)", code)
    # contiguous from relu, though eager keeps the transposed strides; and the transpose that the program has, kept
    (x_of_scatter,) = re.findall(r"matmul_reduce_scatter\.default\((buf\d+), arg\d_1,", code)
    (w_of_exchange,) = re.findall(r"matmul_all_to_all\.default\(arg\d_1, (buf\d+),", code)
    assert (strides[x_of_scatter], strides[w_of_exchange]) == ("(8, 1)", "(1, 8)")
    assert len(re.findall(r"^ +cpp_fused\w+\(", code, re.MULTILINE)) == 2  # those two, and no copies


def between_collectives(x: Tensor, w: Tensor) -> list[Tensor]:
    world = dist.group.WORLD.group_name
    first = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x, 2, world))
    outs = [fusedcomm.matmul_all_reduce(x, w), fusedcomm.all_gather_matmul(x, w, 0)]
    second = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "sum", 2, world))
    outs += [fusedcomm.matmul_all_to_all(x, w, 0, 1)]
    third = _c10d.wait_tensor(_c10d.all_to_all_single(x, [4, 4], [4, 4], world))
    return [*outs, first, second, third]


def check_order(rank: int) -> tuple[list[str], list[bool]]:
    from torch._inductor.utils import is_collective

    collectives: list[bool] = []

    def look(nodes: list[Any]) -> list[Any]:
        ours = [node.node for node in nodes if "fusedcomm" in str(getattr(node.node, "op_overload", None))]
        collectives.extend(is_collective(node) for node in ours)
        return nodes

    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    settings = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms"],
        "_pre_fusion_custom_pass": look,
    }
    outs, (code,) = codes_of(lambda compiled: compiled(x, w), between_collectives, **settings)
    torch.testing.assert_close(outs, between_collectives(x, w))
    return called(code), collectives


def test_ops_keep_their_place_among_other_collectives(ranks: Any) -> None:
    """They keep it although Inductor is told to start collectives as early as it can."""
    (order, collectives), other = ranks(2).run(check_order)
    assert other == (order, collectives)
    assert order == [
        "all_gather_into_tensor.default",
        "matmul_all_reduce.default",
        "all_gather_matmul.default",
        "reduce_scatter_tensor.default",
        "matmul_all_to_all.default",
        "all_to_all_single.default",
    ]
    assert collectives == [True] * 3


@on_ranks(2)
@pytest.mark.parametrize("trains", [False, True])
def test_ops_keep_their_place_whatever_a_rank_reads(rank: int, trains: bool) -> None:
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        first, y, z = fusedcomm.all_reduce(x * 10), fusedcomm.matmul_all_reduce(x, w), fusedcomm.all_reduce(x)
        return [z * 2, y.max()] if rank else [y + 1, z * 2, first]

    x, w = torch.full((8, 8), 1.0 + rank, requires_grad=trains), torch.ones(8, 8)
    outs, (code, *_) = codes_of(lambda compiled: compiled(x, w), program)
    torch.testing.assert_close(outs, program(x, w))
    assert called(code) == ["all_reduce.default", "matmul_all_reduce.default", "all_reduce.default"]


@pytest.mark.thorough
@on_ranks(2)
def test_operands_are_there_until_the_op_is_done(rank: int) -> None:
    def program(x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
        a, b = x + 1, w.exp()
        z = fusedcomm.all_gather_matmul(g, b, 0)
        g.relu_()
        y = fusedcomm.matmul_all_reduce(a, b)
        return [a * y, b - y, z]

    inputs = [[torch.randn(8, 8, generator=torch.Generator().manual_seed(s)) for s in range(3)] for _ in range(2)]
    outs, (code,) = codes_of(lambda compiled: compiled(*inputs[0]), program)
    torch.testing.assert_close(outs, program(*inputs[1]))
    torch.testing.assert_close(inputs[0], inputs[1])
    ((a, b),) = re.findall(r"matmul_all_reduce\.default\((buf\d+), (buf\d+),", code)
    before, _, after = code.partition("matmul_all_reduce.default(")
    for operand in (a, b):  # whose memory is another's later on, or there would be nothing to see
        reuse = f"= {operand}; del {operand}  # reuse"
        assert reuse in after and reuse not in before


@pytest.mark.thorough
@on_ranks(2)
def test_symbolic_sizes(rank: int) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = fusedcomm.matmul_all_to_all(x, w, 0, 1, out_shape=[w.shape[1] // 2, 2])
        return fusedcomm.all_to_all_matmul(y.relu(), w[: y.shape[1]], 0, 1)

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=True)
    for i, (tokens, columns) in enumerate([(6, 16), (10, 24), (4, 32)]):
        x, w = torch.randn(tokens, 20), torch.randn(20, columns)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            torch.testing.assert_close(compiled(x, w), program(x, w))


@on_ranks(2)
def test_a_result_that_nothing_reads(rank: int) -> None:
    """A later pass removes what reads the op's result, but the op still runs, on all ranks alike."""

    def drop(graph: torch.fx.Graph) -> None:
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.fusedcomm.matmul_all_reduce.default)
        node.replace_all_uses_with(node.args[0])

    def program(x: Tensor, w: Tensor) -> Tensor:
        return fusedcomm.matmul_all_reduce(x, w)

    x, w = torch.randn(4, 8), torch.randn(8, 8)
    out, codes = codes_of(lambda compiled: compiled(x, w), program, post_grad_custom_post_pass=drop)
    assert out.equal(x) and called(codes[0]) == ["matmul_all_reduce.default"]


def cache_hits(rank: int, tag: str) -> tuple[int, int]:
    """Cache (hits, misses) of a program whose graph is the same for every group, but for what ops say of theirs."""

    def run() -> None:
        program = torch.compile(lambda x, w: fusedcomm.matmul_all_reduce(x, w), fullgraph=True)
        assert (program(torch.ones(12, 3), torch.ones(3, 6)) == 3 * dist.get_world_size()).all()

    return cache_counts(f"{tag}/{rank}", run)[:2]


@pytest.mark.thorough
def test_a_cached_graph_is_for_one_group_size(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(cache_hits, str(tmp_path)) == [(0, 1)] * 2
    assert ranks(3).run(cache_hits, str(tmp_path)) == [(0, 1)] * 3
    assert ranks(2).run(cache_hits, str(tmp_path)) == [(1, 0)] * 2
