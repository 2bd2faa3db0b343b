"""The plain collectives: values, gradients, graphs, errors, and calls without Python."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.ops.table import OPS
from tests.helpers.groups import empty_is_nan, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.plain_cases import EVEN, UNEVEN, Case
from tests.helpers.prepared import CALLS, IN_PYTHON, python_calls, started_group
from tests.helpers.spies import Dispatched, pushed
from tests.helpers.tiers import thorough_but

ALGORITHMS = ["unfused", "chunked", "pipelined"]
PLAIN = [op for op, spec in OPS.items() if spec.is_plain and spec.num_results == 1]
EACH = {op: next(case for case in EVEN if case.op == op) for op in PLAIN}


def check(case: Case, group: Any = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    xs = case.cut(case.whole(dtype, seed), num_ranks)
    got = case.call(xs[rank], group)
    want = case.results([x.double() for x in xs])[rank].to(dtype)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=0, atol=0, msg=str(case))
    return got


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values(rank: int, world_size: int, algorithm: str) -> None:
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        for case in [*EVEN, *UNEVEN]:
            for seed, dtype in enumerate([torch.float32, torch.bfloat16] * 2):
                check(case, None, dtype, seed)


@on_ranks(3)
def test_values_of_fused(rank: int) -> None:
    with fusedcomm.force_algorithm("fused", strict=True):
        for case in [*EACH.values(), *EVEN[-4:-2]]:
            check(case)


@on_ranks(2)
def test_values_in_several_rounds(rank: int) -> None:
    with fresh_group(WORKSPACE_BYTES="8192") as group, fusedcomm.force_algorithm("chunked", strict=True):
        for case in [*EVEN, *UNEVEN]:
            dims = {name: dim for name in ("gather_dim", "scatter_dim") if (dim := getattr(case, name)) is not None}
            front = {name: dim % len(case.shape) for name, dim in dims.items()}
            check(case._replace(shape=(*case.shape, 97), **front), group)


@on_ranks(2)
def test_the_caller_keeps_x(rank: int) -> None:
    """A group of one rank returns no view of x either."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    for case in EACH.values():
        x = case.whole(torch.float32)
        for group in (groups[rank], None):
            before = x.clone()
            getattr(fusedcomm, case.op)(x, group=group, **case.options(1)).zero_()
            assert torch.equal(x, before)


@on_ranks(2)
def test_strides_of_x(rank: int) -> None:
    with fusedcomm.force_algorithm("chunked", strict=True):
        for case in EACH.values():
            xs = case.cut(case.whole(torch.float32), 2)
            x = torch.stack([xs[rank], xs[rank]], -1)[..., 0]
            torch.testing.assert_close(case.call(x), case.results(xs)[rank], rtol=0, atol=0)


@on_ranks()
@pytest.mark.parametrize("world_size", thorough_but([2], [2, 3]))
@pytest.mark.parametrize("algorithm", ALGORITHMS[:2])
def test_gradients(rank: int, world_size: int, algorithm: str) -> None:
    """They are those of the sum of all ranks' losses, but all_reduce's, whose loss all ranks share."""
    with fusedcomm.force_algorithm(algorithm, strict=True):
        for case in [*EVEN, *UNEVEN]:
            xs = [x.double().requires_grad_() for x in case.cut(case.whole(torch.float32), world_size)]
            ys = case.results(xs)
            shares = case.op == "all_reduce"
            grads = [torch.full_like(y, 6.0).cumsum(-1) + (0 if shares else r) for r, y in enumerate(ys)]
            of = slice(rank, rank + 1) if shares else slice(None)
            want = torch.autograd.grad(ys[of], xs[rank], grads[of])[0]
            x = xs[rank].detach().float().requires_grad_()
            got = torch.autograd.grad(case.call(x), x, grads[rank].float())[0]
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0, msg=str(case))


@on_ranks(2)
def test_second_derivatives(rank: int) -> None:
    """The collectives are linear: by g they are the op itself, and all_reduce's are added up over the ranks."""
    for case in [*EACH.values(), *UNEVEN]:
        x = case.cut(case.whole(torch.float32), 2)[rank].clone().requires_grad_()
        y = case.call(x)
        g = torch.ones_like(y).requires_grad_()
        (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
        (second,) = torch.autograd.grad(grad, g, x.detach())
        torch.testing.assert_close(second, y.detach(), rtol=0, atol=0)


@on_ranks(2)
@pytest.mark.thorough
def test_opcheck(rank: int) -> None:
    for case in [*EACH.values(), *UNEVEN]:
        x = case.cut(case.whole(torch.float32), 2)[rank]
        with Dispatched() as dispatched:
            case.call(x)
        args = dispatched.arguments(f"fusedcomm::{case.op}")
        for given in (args, (args[0].detach().requires_grad_(), *args[1:])):
            torch.library.opcheck(getattr(torch.ops.fusedcomm, case.op).default, given)


@on_ranks(2)
@pytest.mark.parametrize("dynamic", thorough_but([True], [False, True]))
def test_compile(rank: int, dynamic: bool) -> None:
    def program(x: Tensor) -> Tensor:
        y = fusedcomm.all_to_all(x * 2, 0, 1)
        y = fusedcomm.all_reduce(y + 1)
        return fusedcomm.reduce_scatter(fusedcomm.all_gather(y, 0), 1, reduce_op="avg") * 2

    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic)
    for size in (4, 8):
        x = torch.arange(size * 12.0).view(size, 12).add(rank).requires_grad_()
        results = []
        for each in (program, compiled):
            y = each(x)
            results.append((y, *torch.autograd.grad(y.sum(), x)))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@on_ranks(2)
def test_out(rank: int) -> None:
    assert "out" not in torch.ops.fusedcomm.all_gather.overloads()  # nor has a gather with a matmul
    for op in ("reduce_scatter", "all_reduce"):
        x, options = EACH[op].whole(torch.float32) + rank, EACH[op].options(2)
        with fusedcomm.force_algorithm("chunked", strict=True):
            want = EACH[op].call(x)
            out = torch.full_like(want, math.nan)
            dims = (options["scatter_dim"], None, None, None) if op == "reduce_scatter" else ()
            getattr(torch.ops.fusedcomm, op).out(x, "sum", *dims, 2, dist.group.WORLD.group_name, out=out)
        assert torch.equal(out, want)


@on_ranks(2)
@pytest.mark.parametrize("op", PLAIN)
def test_bad_input_is_an_error_before_anything_is_sent(rank: int, op: str) -> None:
    case, call = EACH[op], getattr(fusedcomm, op)
    x, options = case.whole(torch.float32), case.options(2)
    dim = next((name for name in ("gather_dim", "scatter_dim") if name in options), None)
    bad: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (x.int(), {}, ValueError, "x must be float32, float16, bfloat16 or float64, got torch.int32"),
        (x.sum(), {}, ValueError, r"x must have at least 1 dim, got shape \(\)"),
        ([1.0], {}, TypeError, "x must be a tensor, got list"),
    ]
    if dim is not None:
        bad += [(x, {dim: 7}, ValueError, rf"{dim} must be in \[-{x.ndim}, {x.ndim - 1}\], got 7")]
        bad += [(x, {dim: 1.5}, TypeError, f"{dim} must be an int, got 1.5")]
    if op == "all_to_all":
        bad += [(x, {"gather_dim": 1}, ValueError, "gather_dim and scatter_dim must differ, got 1 and 1")]
    if "reduce" in op:
        bad += [(x, {"reduce_op": "max"}, ValueError, "reduce_op must be one of sum, avg, got 'max'")]
    for t, change, error, text in bad:
        with pushed() as sent, pytest.raises(error, match=text):
            call(t, **{**options, **change})
        assert not sent.chunks


@on_ranks(2)
def test_autocast_leaves_x(rank: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for case in EACH.values():
            assert check(case).dtype == torch.float32


@on_ranks(2)
def test_check_compares_calls(rank: int) -> None:
    with fresh_group(CHECK="1") as group:
        for case in EACH.values():
            check(case, group)
        with pytest.raises(fusedcomm.PeerMismatchError, match=r"got op all_gather on rank 0 and all_reduce on rank 1"):
            check(EACH["all_reduce" if rank else "all_gather"], group)
        with pytest.raises(fusedcomm.PeerMismatchError, match=r"got x shape"):
            check(Case("all_reduce", (4 + rank, 3)), group)
        check(EACH["all_reduce"], group)


@on_ranks(2)
def test_the_third_call_runs_without_python(rank: int) -> None:
    with started_group("chunked") as group, empty_is_nan():
        for case in [*EVEN, *UNEVEN]:
            with python_calls() as ran:
                for seed in range(CALLS):
                    check(case, group, torch.float32, seed)
            assert len(ran) == IN_PYTHON, case


@on_ranks(2)
def test_explain(rank: int) -> None:
    for case in EACH.values():
        x = case.cut(case.whole(torch.float32), 2)[rank].to("meta")
        plan = fusedcomm.explain(case.op, x, **case.options(2))
        assert plan.op == case.op and plan.algorithm in ("unfused", "chunked")
    plan = fusedcomm.explain("all_reduce", fusedcomm.all_reduce(torch.ones(1 << 20)))
    assert plan.algorithm == "chunked" and len(str(plan.schedule).splitlines()) > 1


@on_ranks(2)
def test_ranks_with_another_matmul_or_none_meet(rank: int) -> None:
    """Each rank has a K of its own, and one multiplies by hand. In Python, and natively from the third call on."""
    x, w = torch.ones(6, 3 + rank), torch.arange(4.0).expand(3 + rank, 4)
    gathered_w = torch.ones(4, 2 + rank)
    with started_group("chunked") as group:
        for call in range(CALLS + 1):
            y = (call + 1) * x @ w  # (call + 1) * (3 + rank) * [0, 1, 2, 3] in each row
            by_op = (call + rank) % 2 == 0
            given = ((call + 1) * x, w) if by_op else (y,)
            prefix = "matmul_" if by_op else ""
            rows = (call + 1) * torch.arange(4.0)
            exchanged = getattr(fusedcomm, f"{prefix}all_to_all")(*given, 0, 1, group)
            assert torch.equal(exchanged, torch.cat([(3 + r) * rows[2 * rank :][:2].expand(6, 2) for r in range(2)]))
            total = getattr(fusedcomm, f"{prefix}all_reduce")(*given, group)
            assert torch.equal(total, 7 * rows.expand(6, 4))
            part = getattr(fusedcomm, f"{prefix}reduce_scatter")(*given, 0, group)
            assert torch.equal(part, 7 * rows.expand(3, 4))
            if by_op:
                found = fusedcomm.all_gather_matmul(part, gathered_w, 0, group)
            else:
                found = fusedcomm.all_gather(part, 0, group) @ gathered_w
            assert torch.equal(found, (7 * rows.sum()).expand(6, 2 + rank))


@on_ranks(2)
def test_an_input_may_be_frozen_on_one_rank_alone(rank: int) -> None:
    """Its backward only exchanges the gradient, which its peer's multiplies too."""
    x, w = torch.ones(4, 3, requires_grad=rank == 1), torch.ones(3, 2, requires_grad=True)
    with started_group("chunked") as group:
        for _ in range(CALLS + 1):
            w.grad = x.grad = None
            fusedcomm.matmul_all_to_all(x, w, 0, 1, group).backward(torch.full((8, 1), 1.0 + rank))
            assert torch.equal(w.grad, torch.tensor([4.0, 8.0]).expand(3, 2))
            assert rank == 0 or torch.equal(x.grad, torch.full((4, 3), 3.0))
            w.grad = x.grad = None
            fusedcomm.matmul_reduce_scatter(x, w, 0, group).backward(torch.full((2, 2), 1.0 + rank))
            assert torch.equal(w.grad, torch.full((3, 2), 6.0))
