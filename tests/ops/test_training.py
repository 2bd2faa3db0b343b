"""Training calls: forward and backward run without Python from the third on, and do what Python's do."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

import fusedcomm
from fusedcomm.ops.formula import Formula
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED, as_list, expected_gradients, loss_weights
from tests.helpers.prepared import IN_PYTHON, python_calls, started_group, without_plans
from tests.helpers.problems import GATHERS, OPS, Problem, leaves, unflat
from tests.helpers.spies import Dispatched, first_arguments
from tests.helpers.symmetric_memory import error_of
from tests.helpers.tiers import nightly_but
from tests.ops.test_call_check import ONE_EACH

LIST = NAMED["all_gather_matmul-list-qkv"]
KINDS = [*ONE_EACH.values(), LIST]
PARTIAL = [NAMED["matmul_reduce_scatter-partial-bias"], NAMED["matmul_all_reduce-partial-bias"]]
STEPS = 5
MULTIPLY_OR_SUM = ("aten::mm", "aten::bmm", "aten::sum")
NATIVE_NODE = "torch::autograd::CppNode<fusedcomm::TrainingNode>"


def formula_runs() -> AbstractContextManager[list[Formula]]:
    return first_arguments(Formula, "run")


@dataclass
class Step:
    """A step of a program: fresh leaves of a problem, which are different in each step and each rank."""

    problem: Problem
    group: Any
    seed: int
    frozen: str = ""

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.tensors = leaves(self.problem, self.rank, self.size, seed=self.seed, frozen=self.frozen)

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in self.tensors if t is not None and t.requires_grad]

    def call(self, **options: Any) -> list[Tensor]:
        return as_list(self.problem.call(unflat(self.problem, self.tensors), self.group, **options))

    def results(self) -> list[Tensor]:
        """The by-product of a gather among them."""
        by_product = self.problem.op in GATHERS
        *args, _, _ = self.problem.dispatched(unflat(self.problem, self.tensors), by_product=by_product)
        op = getattr(torch.ops.fusedcomm, self.problem.op).default
        found: list[Tensor] = pytree.tree_leaves(op(*args, self.size, self.group.group_name))
        return found

    def check(self, wants: list[Tensor | None], **options: Any) -> list[Tensor]:
        """Take the step as one of the whole group's program, whose gradients are ``wants``; its results."""
        outs = self.call(**options)
        torch.autograd.backward(outs, [w.float() for w in loss_weights(self.problem, outs, self.rank, self.size)])
        for t, want in zip(self.tensors, wants, strict=True):
            assert t is None or (torch.equal(t.grad, want) if t.requires_grad else t.grad is None)
        return outs

    def weights(self, outs: list[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(-3, 4, out.shape, generator=generator).to(out.dtype) for out in outs]

    def grads(self, outs: list[Tensor], **options: Any) -> Any:
        return torch.autograd.grad(outs, self.leaves, self.weights(outs), allow_unused=True, **options)


def same_in_python(algorithm: str, program: Callable[[Any], list[Any]]) -> None:
    """``program(group)`` is the same on a group whose calls are prepared and on another: values, strides and so on."""
    with started_group(algorithm) as group:
        found = program(group)
    with pytest.MonkeyPatch.context() as patch:
        without_plans(patch)
        with started_group(algorithm) as group:
            wanted = program(group)
    assert len(found) == len(wanted) > 0
    for each, want in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        if isinstance(want, Tensor):
            assert torch.equal(each, want) and each.stride() == want.stride()
        else:
            assert each == want


def check_steps(rank: int, problem: Problem, frozen: str = "", **options: Any) -> None:
    """Gradients are those of the whole group's program; from the third step on no Python runs, nor backwards."""
    wants = expected_gradients(problem, rank, dist.get_world_size())
    with started_group("chunked") as group, formula_runs() as backwards:
        for i in range(STEPS):
            with python_calls() as ran:
                outs = Step(problem, group, 0, frozen).check(wants, **options)
            assert (ran == []) == (i >= IN_PYTHON) and all(out.grad_fn.name() == NATIVE_NODE for out in outs)
        assert backwards == []


@on_ranks(2)
@pytest.mark.parametrize("problem", [*KINDS, *PARTIAL], ids=str)
def test_from_the_third_step_on_no_python_runs(rank: int, problem: Problem) -> None:
    check_steps(rank, problem)


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_frozen_inputs(rank: int, op: str) -> None:
    for frozen in ("x", "w", "b", "xb", "wb"):
        check_steps(rank, ONE_EACH[op], frozen)


@on_ranks(2)
@pytest.mark.parametrize("op", GATHERS)
def test_without_a_saved_by_product(rank: int, op: str) -> None:
    save = "save_exchanged" if op == "all_to_all_matmul" else "save_gathered"
    check_steps(rank, ONE_EACH[op], **{save: False})


@on_ranks(2)
def test_kinds_that_differ_in_what_requires_grad(rank: int) -> None:
    """They take turns in one group."""
    problem = ONE_EACH["matmul_all_to_all"]
    wants = expected_gradients(problem, rank, 2)
    with started_group("chunked") as group:
        for i in range(4 * STEPS):
            Step(problem, group, 0, frozen=["x", "w", "", "b"][i % 4]).check(wants)


@on_ranks(2)
def test_x_that_is_w_in_the_first_call(rank: int) -> None:
    """What is saved is told apart by argument, and not by tensor."""
    with started_group("chunked") as group:
        for i in range(STEPS):
            x = torch.full((4, 4), i + 1.0, requires_grad=True)
            w = x if i == 0 else torch.full((4, 4), 10.0, requires_grad=True)
            grads = torch.autograd.grad(fusedcomm.matmul_all_reduce(x, w, group).sum(), [x] if i == 0 else [x, w])
            wants = [8.0] if i == 0 else [40.0, 4 * (i + 1.0)]
            assert all((grad == want).all() for grad, want in zip(grads, wants, strict=True))


# Each takes a step of a program, and returns tensors and texts that must be the same in Python.
def plainly(step: Step) -> Any:
    return step.grads(step.call())


def by_product(step: Step) -> Any:
    """The loss takes all results, then the last one alone, then the first one."""
    outs = step.results()
    return [step.grads(each, retain_graph=True) for each in (outs, outs[-1:], outs[:1])]


def grads_that_lie_otherwise(step: Step) -> Any:
    """They are expanded, as those of sums, transposed, or slices."""
    outs = step.call()
    several = [[t.expand(out.shape) for t, out in zip(torch.ones(len(outs), 1), outs, strict=True)]]
    several += [[torch.ones_like(out.mT).mT * i for i, out in enumerate(outs, 1)]]
    several += [[out.new_ones(*out.shape[:-1], 2 * out.shape[-1])[..., ::2] for out in outs]]
    return [torch.autograd.grad(outs, step.leaves, grads, retain_graph=True) for grads in several]


def second_derivatives(step: Step) -> Any:
    outs = step.call()
    loss = torch.stack([out.square().sum() for out in outs]).sum()
    grads = torch.autograd.grad(loss, step.leaves, create_graph=True)
    return grads, torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), step.leaves)


def saved_tensors_hooks(step: Step) -> Any:
    """What is packed and unpacked, in which order; and it comes back with other strides."""
    seen: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(("pack", list(t.shape), t.requires_grad))
        return t.detach().clone(memory_format=torch.contiguous_format)

    def unpack(t: Tensor) -> Tensor:
        seen.append(("unpack", list(t.shape)))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outs = step.call()
    return step.grads(outs), seen


def changed_in_place(step: Step) -> Any:
    """What is saved is changed between forward and backward: an error. A version that nothing saved is not."""
    found = []
    for leaf in step.leaves:
        outs = step.call()
        with torch.no_grad():
            leaf.add_(1)
        found.append(error_of(lambda outs=outs: step.grads(outs)))
    return found


def hooks(step: Step) -> Any:
    seen: list[Any] = []

    def doubled(grad: Tensor) -> Tensor:
        seen.append(grad)
        return 2 * grad

    outs = step.call()
    for t in (*outs, *step.leaves):
        t.register_hook(doubled)
    node = outs[0].grad_fn
    node.register_prehook(lambda grads: seen.append([None if g is None else g.shape for g in grads]))
    node.register_hook(lambda *both: seen.append([[g is None for g in grads] for grads in both]))
    outs[0].retain_grad()
    torch.autograd.backward(outs, step.weights(outs))
    return [t.grad for t in (outs[0], *step.leaves)], seen


def under_modes(step: Step) -> Any:
    with Dispatched() as forward:
        outs = step.call()
    with Dispatched() as backward:
        grads = step.grads(outs)
    outs = step.call()  # by another node
    with Dispatched() as alone:
        again = step.grads(outs)
    return grads, again, [[name for name, _ in each.calls] for each in (forward, backward, alone)]


def autocast_around_the_backward(step: Step) -> Any:
    found = []
    for dtype in (torch.bfloat16, None, torch.float16):
        outs = step.call()
        grads = [torch.full_like(out, 1 + 2.0**-12) for out in outs]  # which 16 bits cannot hold
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            found.append(torch.autograd.grad(outs, step.leaves, grads))
    return found


def anomalies(step: Step) -> Any:
    """A gradient that is NaN is an error that names the node."""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        outs = step.call()
        grads = step.grads(outs, retain_graph=True)
        nan = [torch.full_like(out, float("nan")) for out in outs]
        return grads, error_of(lambda: torch.autograd.grad(outs, step.leaves, nan))


def some_inputs(step: Step) -> Any:
    outs = step.call()
    return [torch.autograd.grad(outs, leaf, step.weights(outs), retain_graph=True) for leaf in step.leaves]


def inference_tensors(step: Step) -> Any:
    """x is one, which nothing can save for the backward; and then where nothing needs x."""
    with torch.inference_mode():
        x = step.tensors[0].detach().clone()
    _, *rest = step.tensors
    found = [error_of(lambda: step.problem.call(unflat(step.problem, [x, *rest]), step.group))]
    frozen = [None if t is None else t.detach() if t.dim() > 1 else t for t in rest]
    if any(t is not None and t.requires_grad for t in frozen):
        found.append(as_list(step.problem.call(unflat(step.problem, [x, *frozen]), step.group)))
    return found


def after_a_reset(step: Step) -> Any:
    outs = step.call()
    fusedcomm.reset(step.group)
    return step.grads(outs)


def compiled_autograd(step: Step) -> Any:
    outs = step.call()
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(outs, step.weights(outs))
    return [t.grad for t in step.leaves]


PROGRAMS: dict[str, Callable[[Step], Any]] = {
    each.__name__: each
    for each in (
        *(plainly, by_product, grads_that_lie_otherwise, second_derivatives, saved_tensors_hooks, changed_in_place),
        *(hooks, under_modes, autocast_around_the_backward, anomalies, some_inputs, inference_tensors),
        compiled_autograd,
    )
}
PROGRAMS["reset"] = after_a_reset


@on_ranks(2)
@pytest.mark.parametrize("problem", nightly_but(KINDS[:1], KINDS), ids=str)
@pytest.mark.parametrize("name", nightly_but(PROGRAMS.keys() - {"compiled_autograd"}, PROGRAMS))
def test_a_program_does_the_same_in_python(rank: int, name: str, problem: Problem) -> None:
    def steps(group: Any) -> list[Any]:
        return [PROGRAMS[name](Step(problem, group, seed)) for seed in range(STEPS - 1)]

    same_in_python("chunked", steps)


@on_ranks(2)
@pytest.mark.parametrize("problem", nightly_but([KINDS[0], LIST], KINDS), ids=str)
def test_saved_tensors_live_as_long_as_the_graph(rank: int, problem: Problem) -> None:
    """And no longer, be it by a backward or without one."""
    gc.collect()
    gc.freeze()  # what this rank has loaded for other tests, so that it is looked through once
    with started_group("chunked") as group:
        for seed in range(STEPS):
            for with_backward in (False, True):
                step = Step(problem, group, seed)
                leaves = [weakref.ref(t) for t in step.tensors[:2]]
                outs = step.call()
                weights = step.weights(outs)
                del step
                gc.collect()
                assert all(leaf() is not None for leaf in leaves)
                if with_backward:
                    torch.autograd.backward(outs, weights)
                else:
                    del outs
                gc.collect()
                saved = 1 if with_backward else 0  # outs still have the nodes of the leaves
                assert sum(leaf() is not None for leaf in leaves) in (0, 2 * saved)


@on_ranks(2)
def test_a_peer_that_does_not_come_to_a_backward(rank: int) -> None:
    problem = ONE_EACH["matmul_all_to_all"]
    with started_group("chunked", TIMEOUT_S="3") as group:
        for seed in range(STEPS):
            plainly(Step(problem, group, seed))
        step = Step(problem, group, 0)
        outs = step.call()
        if rank == 0:
            with formula_runs() as backwards, pytest.raises(fusedcomm.PeerTimeoutError) as caught:
                step.grads(outs)
            assert caught.value.op == "all_to_all_matmul" and caught.value.peers == [1] and backwards == []
        dist.barrier(group)
        fusedcomm.reset(group)
        Step(problem, group, 0).check(expected_gradients(problem, rank, 2))


def ops_of(call: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Returns (result, the ops that ran, natively too)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        result = call()
    names = [event.name for event in profiled.events()]
    return result, Counter(name for name in names if name.startswith("fusedcomm::") or name in MULTIPLY_OR_SUM)


@on_ranks(2)
@pytest.mark.parametrize("in_python", [False, True], ids=["native", "python"])
@pytest.mark.parametrize("problem", [*KINDS, *PARTIAL], ids=str)
def test_a_backward_for_some_gradients_computes_no_others(rank: int, problem: Problem, in_python: bool) -> None:
    """It runs the ops of a call in which the other tensors are frozen."""
    options = {"all_to_all_matmul": {"save_exchanged": False}, "all_gather_matmul": {"save_gathered": False}}
    save = options.get(problem.op, {})
    with pytest.MonkeyPatch.context() as patch:
        if in_python:
            without_plans(patch)
        with started_group("chunked") as group, formula_runs() as runs:
            step = Step(problem, group, 0)
            outs = step.call(**save)
            assert (outs[0].grad_fn.name() == NATIVE_NODE) != in_python
            wholes, all_ops = ops_of(lambda: step.grads(outs, retain_graph=True))
            by_leaf = dict(zip(map(id, step.leaves), wholes, strict=True))
            for asked in ("x", "w", "wb") if problem.partial else ("x", "w", "b", "wb"):  # or rank 1 asks for nothing
                frozen = Step(problem, group, 0, "".join({*"xwb"} - {*asked}))
                pairs = zip(step.tensors, frozen.tensors, strict=True)
                leaves = [t for t, alone in pairs if alone is not None and alone.requires_grad]
                weights, frozen_outs = step.weights(outs), frozen.call(**save)
                _, wanted_ops = ops_of(partial(frozen.grads, frozen_outs))
                grads, ops = ops_of(partial(torch.autograd.grad, outs, leaves, weights, retain_graph=True))
                assert ops == wanted_ops and not all_ops <= ops
                torch.autograd.backward(outs, weights, retain_graph=True, inputs=leaves)
                for leaf, grad in zip(leaves, grads, strict=True):
                    assert torch.equal(grad, by_leaf[id(leaf)]) and torch.equal(leaf.grad, grad)
                    leaf.grad = None
            assert all(t.grad is None for t in step.leaves) and runs == []
