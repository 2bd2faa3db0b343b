"""All five ops inside checkpoints, torch.func, autocast and compiled graphs. Second derivatives: test_gradcheck.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fusedcomm
from fusedcomm.ops.routed import SCHEMAS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED, as_list, expected_gradients, loss_weights, program_of
from tests.helpers.problems import OPS, Inputs, Problem, flat, integers, unflat

ONE_EACH = ["heads", "all_to_all_matmul-heads-gathered", "all_gather_matmul-list-qkv"]
ONE_EACH += ["matmul_reduce_scatter-batch-columns-scattered", "matmul_all_reduce-nothing-divides"]


@on_ranks(2)
@pytest.mark.parametrize("name", ONE_EACH)
def test_in_a_checkpoint(rank: int, name: str) -> None:
    problem = NAMED[name]
    size = dist.get_world_size()

    def block(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(as_list(problem.call(unflat(problem, tensors))))

    for use_reentrant in (False, True) * 2:  # from the third on the call is prepared
        tensors = [None if t is None else t.requires_grad_() for t in flat(integers(problem, rank, size))]
        outs = checkpoint(block, *tensors, use_reentrant=use_reentrant)
        torch.autograd.backward(outs, [w.float() for w in loss_weights(problem, outs, rank, size)])
        for t, want in zip(tensors, expected_gradients(problem, rank, size), strict=True):
            assert t is want is None or torch.equal(t.grad, want)


def public_and_dispatched(problem: Problem, inputs: Inputs) -> list[Callable[[Tensor], Tensor]]:
    """The op as a function of x, called by the function that users call and by ``torch.ops``."""
    op = getattr(torch.ops.fusedcomm, problem.op)
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: problem.call((x, *inputs[1:])),
        lambda x: op(*problem.dispatched((x, *inputs[1:]))),
    ]
    return [lambda x, call=call: pytree.tree_leaves(call(x))[0] for call in calls]


@on_ranks(2)
@pytest.mark.parametrize("name", ONE_EACH)
def test_torch_func_and_vmap_are_refused(rank: int, name: str) -> None:
    problem = NAMED[name]
    inputs = integers(problem, rank, dist.get_world_size())
    x = inputs[0]
    for call in public_and_dispatched(problem, inputs):

        def total(x: Tensor, call: Callable[[Tensor], Tensor] = call) -> Tensor:
            return call(x).sum()

        transformed: dict[str, Callable[[Tensor], Any]] = {
            "grad": torch.func.grad(total),
            "vjp": lambda x: torch.func.vjp(total, x)[0],
            "jvp": lambda x: torch.func.jvp(total, (x,), (x,))[1],
            "vmap": lambda x: torch.func.vmap(total)(torch.stack([x, x])),
            "hessian": torch.func.hessian(total),
        }
        text = rf"fusedcomm\.{problem.op} does not work inside vmap or torch\.func transforms"
        if rank == 0:  # alone: nothing may be sent
            for run in transformed.values():
                with pytest.raises(RuntimeError, match=text):
                    run(x)
            for kind in ("grad", "vmap"):
                torch._dynamo.reset()
                with pytest.raises(Exception, match=text):
                    torch.compile(transformed[kind], backend="aot_eager", fullgraph=True)(x)
        total(x)


@on_ranks(2)
@pytest.mark.parametrize("name", ["heads", "all_gather_matmul-list-qkv", "matmul_all_reduce-nothing-divides"])
def test_batched_gradients_are_refused(rank: int, name: str) -> None:
    """vmap over a backward, where is_grads_batched and the vectorized jacobian put it."""
    problem = NAMED[name]
    x, *rest = integers(problem, rank, dist.get_world_size())
    outs = as_list(problem.call((x.requires_grad_(), *rest)))
    batch = [out.new_ones(3, *out.shape) for out in outs]
    if problem.op == "matmul_all_reduce":  # its backward communicates nothing
        (grads,) = torch.autograd.grad(outs, x, batch, is_grads_batched=True, retain_graph=True)
        want = torch.autograd.grad(outs, x, [each[0] for each in batch])[0]
        assert torch.equal(grads, torch.stack([want] * 3))
        return
    with pytest.raises(RuntimeError, match="does not work inside vmap"):
        torch.autograd.grad(outs, x, batch, is_grads_batched=True)


@on_ranks(2)
@pytest.mark.parametrize("name", ONE_EACH)
def test_forward_mode_is_refused(rank: int, name: str) -> None:
    """Where nothing requires grad too: there torch drops a tangent for which an op has no rule."""
    problem = NAMED[name]
    inputs = integers(problem, rank, dist.get_world_size())
    text = rf"fusedcomm\.{problem.op} has no forward-mode derivatives"
    for call in public_and_dispatched(problem, inputs):
        for requires_grad in (False, True) if rank == 0 else ():  # alone: nothing may be sent
            x = inputs[0].clone().requires_grad_(requires_grad)
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, torch.ones_like(x))
                compiled = torch.compile(call, backend="aot_eager", fullgraph=True)  # with gradients torch refuses it
                for run in (call, torch.no_grad()(call), *([] if requires_grad else [compiled])):
                    torch._dynamo.reset()
                    with pytest.raises(Exception, match=f"{text}|Attempted to wrap a dual tensor"):  # torch 2.15's
                        run(dual)
        with forward_ad.dual_level():
            call(inputs[0])


@on_ranks(2)
@pytest.mark.parametrize("op", SCHEMAS)
def test_routed_ops_refuse_forward_mode(rank: int, op: str) -> None:
    routing, where = torch.zeros(21, 2, dtype=torch.int64), (2, dist.group.WORLD.group_name)
    offsets, t = torch.zeros(1, dtype=torch.int32), torch.ones(6, 8)
    rest: dict[str, tuple[Any, ...]] = {
        "moe_dispatch": (torch.zeros(6, 1, dtype=torch.int64), [torch.ones(1, 8, 4)], 2, 6, 1, *where),
        "moe_send": (None, routing, 1, 6, *where),
        "moe_combine": (None, None, routing, 6, 1, False, *where),
        "moe_grouped_matmul": (torch.ones(1, 8, 4), offsets),
        "moe_grouped_outer": (t, offsets),
    }
    for requires_grad in (False, True):
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=rf"\.{op} has no forward-mode derivatives"):
            getattr(torch.ops.fusedcomm, op)(forward_ad.make_dual(t.requires_grad_(requires_grad), t), *rest[op])


@on_ranks(2)
def test_the_out_overloads_refuse_forward_mode(rank: int) -> None:
    x, w = torch.ones(4, 6), torch.ones(6, 8)
    group = (2, dist.group.WORLD.group_name)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, w)
        with pytest.raises(RuntimeError, match="has no forward-mode derivatives"):
            torch.ops.fusedcomm.matmul_all_reduce.out(x, dual, None, "sum", *group, out=torch.empty(4, 8))


class WithJvp(torch.autograd.Function):
    """What a user can write: the result is linear in x."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return fusedcomm.matmul_all_reduce(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return fusedcomm.matmul_all_reduce(tangent, *ctx.saved_tensors)


@on_ranks(2)
def test_a_function_with_its_own_jvp_works(rank: int) -> None:
    x, w = torch.ones(4, 6), torch.full((6, 8), 2.0)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(WithJvp.apply(forward_ad.make_dual(x, 3 * x), w))
    assert (out.primal == 24).all() and (out.tangent == 72).all()


@on_ranks(2)
@pytest.mark.parametrize("name", ONE_EACH)
def test_gradients_under_what_autograd_offers(rank: int, name: str) -> None:
    problem = NAMED[name]
    size = dist.get_world_size()
    leaves = [None if t is None else t.requires_grad_() for t in flat(integers(problem, rank, size))]
    inputs, there = unflat(problem, leaves), [t for t in leaves if t is not None]
    wants = [want for want in expected_gradients(problem, rank, size) if want is not None]

    def check(outs: list[Tensor], **options: Any) -> None:
        weights = [w.float() for w in loss_weights(problem, outs, rank, size)]
        unused = torch.ones(2, requires_grad=True)
        *got, none = torch.autograd.grad(outs, [*there, unused], weights, allow_unused=True, **options)
        assert none is None and all(map(torch.equal, got, wants))

    for context in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy),
        torch.autograd.set_detect_anomaly(True),
    ):
        with context:
            for _ in range(3):  # the third is a prepared call
                check(as_list(problem.call(inputs)))
    outs = as_list(problem.call(inputs))
    check(outs, retain_graph=True)
    check(outs, create_graph=True)
    check(outs)
    with pytest.raises(RuntimeError, match="second time"):
        check(outs)
    for plain in (torch.no_grad(), torch.inference_mode()):
        with plain:
            again = as_list(problem.call(inputs))
            assert all(map(torch.equal, again, outs)) and not any(out.requires_grad for out in again)


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
@pytest.mark.parametrize("name", ONE_EACH)
def test_autocast(rank: int, name: str, algorithm: str) -> None:
    problem = NAMED[name]
    size = dist.get_world_size()
    shapes = [None if t is None else t.shape for t in flat(integers(problem, rank, size))]
    torch.manual_seed(7)  # the bias of a matmul_all_reduce is the same on all ranks
    tensors = [None if shape is None else torch.randn(shape).requires_grad_() for shape in shapes]
    half = [None if t is None else t.detach().bfloat16() for t in tensors]
    want = problem.call(unflat(problem, half))
    with fusedcomm.force_algorithm(algorithm, strict=True):
        for x in (tensors[0], half[0]):  # the second: what an earlier layer under autocast gives
            with torch.autocast("cpu", torch.bfloat16):
                out = problem.call(unflat(problem, [x, *tensors[1:]]))
            torch.testing.assert_close(out, want)
            assert all(each.dtype == torch.bfloat16 for each in as_list(out))
            given = [t for t in tensors[1:] if t is not None]
            grads = torch.autograd.grad(torch.stack([each.sum() for each in as_list(out)]).sum(), given)
            assert all(grad.dtype == torch.float32 for grad in grads)


@on_ranks(2)
def test_explain_casts_as_autocast_does(rank: int) -> None:
    x, w = torch.ones(4, 6), torch.ones(6, 8)
    want = fusedcomm.explain("matmul_all_reduce", x.bfloat16(), w.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        for each in (w, w.bfloat16()):
            assert fusedcomm.explain("matmul_all_reduce", x, each) == want


def eager_and_compiled(rank: int, op: str, backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    program = program_of(op)
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (4, 6, 10) if dynamic else (4, 6):
        x = torch.randn(2, tokens, 8, requires_grad=True)
        ws = [torch.full((8, 8), 0.1).normal_().requires_grad_() for _ in range(2)]
        answers = []
        for run in (program, compiled):
            outs = run(x, ws)
            loss = torch.stack([out.square().sum() for out in outs]).sum()
            grads = torch.autograd.grad(loss, (x, *ws), allow_unused=True)
            answers.append([*(out.detach() for out in outs), *(g for g in grads if g is not None)])
        torch.testing.assert_close(answers[0], answers[1])
        assert [t.stride() for t in answers[0]] == [t.stride() for t in answers[1]]


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_in_a_compiled_graph(rank: int, op: str) -> None:
    eager_and_compiled(rank, op, "aot_eager", dynamic=False)


@on_ranks(2)
@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("op", OPS)
def test_in_a_graph_of_any_length(rank: int, op: str, backend: str) -> None:
    eager_and_compiled(rank, op, backend, dynamic=True)
