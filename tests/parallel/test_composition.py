"""What composes with the styles: losses, norms, gradients and weights of a small Llama equal those of one process.

Stock styles are held to the same figures, so that a case says whether torch or this package is at fault.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedcomm.compile
import fusedcomm.parallel
from fusedcomm.parallel import layouts
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import (
    CLOSE,
    TAKES_PARTIAL_SUMS,
    Attention,
    Block,
    FeedForward,
    Llama,
    batch_of,
    by_ops,
    check,
    difference,
    llama,
    loss_of,
    meshes,
    parallelize,
    plain,
    shard,
    train,
    whole,
)
from tests.helpers.tiers import nightly_but

non_reentrant = functools.partial(checkpoint, use_reentrant=False)

Change = Callable[[Llama], dict[str, Any]]  # makes a change to the model, and returns arguments of `train`


def called_through(function: Callable[..., Tensor]) -> Change:
    def change(model: Llama) -> dict[str, Any]:
        model.around = function
        return {}

    return change


def wrapped(*kinds: type[nn.Module]) -> Change:
    def change(model: Llama) -> dict[str, Any]:
        apply_activation_checkpointing(model, checkpoint_wrapper, lambda module: isinstance(module, kinds))
        return {}

    return change


def save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op.namespace == "fusedcomm" or op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, save_matmuls)

CHANGES: dict[str, Change] = {
    "nothing": lambda model: {},
    "microbatches": lambda model: {"pieces": 2},
    "checkpoint": called_through(non_reentrant),
    "checkpoint-no-early-stop": called_through(functools.partial(non_reentrant, early_stop=False)),
    "checkpoint-reentrant": called_through(functools.partial(checkpoint, use_reentrant=True)),
    "checkpoint-selective": called_through(functools.partial(non_reentrant, context_fn=selective)),
    "checkpoint-wrapper": wrapped(Block),
    "checkpoint-wrapper-of-parts": wrapped(Attention, FeedForward),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_training(rank: int, name: str) -> None:
    model = parallelize(llama(), init_device_mesh("cpu", (2,)))
    run = train(model, **CHANGES[name](model))
    check(run)
    assert by_ops(model)


@on_ranks(2)
@pytest.mark.skipif(not TAKES_PARTIAL_SUMS, reason="this torch neither clips nor steps gradients that are partial sums")
def test_clipping_right_after_the_backward(rank: int) -> None:
    """As programs have it that know nothing of `SequenceParallel`'s partial sums."""
    run = train(parallelize(llama(), init_device_mesh("cpu", (2,))), laid_out=False)
    check(run)


def own_part(bias: Tensor | None) -> Tensor | None:
    return bias.to_local() if isinstance(bias, DTensor) else bias


@on_ranks(2)
def test_the_comparison_finds_a_partial_gradient(rank: int) -> None:
    """The control of all tests here: one gradient of one layer lacks its sum over ranks."""
    model = parallelize(llama(), init_device_mesh("cpu", (2,)))
    with mock.patch.object(layouts, "bias_of_part", own_part):
        run = train(model, steps=range(1))
    assert difference(run, plain(steps=1)) > 1000 * CLOSE


@on_ranks(2)
@pytest.mark.thorough
def test_wrapped_linears(rank: int) -> None:
    """Each in a checkpoint of its own takes what was made ahead, and multiplies what was gathered once more."""
    model = parallelize(llama(), init_device_mesh("cpu", (2,)))
    wrapped(nn.Linear)(model)
    check(train(model))
    ran = [each for each in fusedcomm.parallel.explain_layers(model).values() if each.startswith("F.linear")]
    assert len(ran) == 10


@on_ranks(2)
@pytest.mark.thorough
def test_frozen_parameters(rank: int) -> None:
    """Adapters, as they are: a few parameters in the middle have gradients."""
    trained = ("layers.0.attention.wk.weight", "layers.0.feed_forward.w2.bias", "layers.1.feed_forward.w3.weight")
    model = parallelize(llama(), init_device_mesh("cpu", (2,)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    loss_of(model, batch_of(0)).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == set(trained)
    for name, grad in found.items():
        want = plain().gradients[name]
        assert (whole(grad) - want).norm() <= CLOSE * want.norm()


# --- copies ---
@on_ranks(2)
def test_deepcopy(rank: int) -> None:
    model = parallelize(llama(), init_device_mesh("cpu", (2,)))
    loss_of(model, batch_of(0)).backward()
    model.zero_grad()
    copied = copy.deepcopy(model)
    check(train(copied))
    assert by_ops(copied)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), llama().get_parameter(name)), "the copy shares memory"


@on_ranks(2)
@pytest.mark.thorough
def test_functional_call(rank: int) -> None:
    model = parallelize(llama(), init_device_mesh("cpu", (2,)))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tokens = batch_of(0)[:, :-1]
    found = torch.func.functional_call(model, parameters, (tokens,))
    torch.testing.assert_close(found, llama()(tokens))


# --- initialisation on the meta device ---
def reset(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@on_ranks(2)
def test_meta_device(rank: int) -> None:
    """Parameters get memory only as shards; what initialises them draws what it draws under torch's own styles."""
    found = []
    mesh = init_device_mesh("cpu", (2,))
    for styles in (torch_parallel, fusedcomm.parallel):
        with torch.device("meta"):
            model = Llama()
        parallelize(model, mesh, styles)
        assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        reset(model, seed=3)
        found.append({name: whole(p) for name, p in model.named_parameters()})
    for name, parameter in found[0].items():
        assert torch.equal(parameter, found[1][name]), name
        assert parameter.isfinite().all() and parameter.any()


# --- what is shared where a layer is left out ---
class LeavesOut(nn.Module):
    """k is not called until ``uses_k``."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.uses_k = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x) + self.v(x)
        return y + self.k(x) if self.uses_k else y


@on_ranks(2)
@pytest.mark.parametrize("layout", [Shard(0), Replicate()], ids=str)
def test_checkpoint_of_a_module_that_leaves_a_layer_out(rank: int, layout: Any) -> None:
    """The recomputation saves what the forward saved, though the module has ended in between, and has learned."""
    x = torch.arange(64.0).view(8, 8).sin()
    mesh, modules = init_device_mesh("cpu", (2,)), []
    for styles in (torch_parallel, fusedcomm.parallel):
        torch.manual_seed(0)
        module = LeavesOut()
        prepare = styles.PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),))
        styles.parallelize_module(module, mesh, {"": prepare, **{name: styles.ColwiseParallel() for name in "qkv"}})
        modules.append(module)
    mine = x.chunk(2)[rank] if layout == Shard(0) else x
    for uses_k in (False, False, True, True, False):
        gradients = []
        for module in modules:
            module.uses_k = uses_k
            module.zero_grad()
            y = non_reentrant(module, mine.clone().requires_grad_())
            y.square().sum().backward()
            gradients.append({name: p.grad for name, p in module.named_parameters()})
        assert (gradients[0]["k.weight"] is None) == (not uses_k)
        for name, want in gradients[0].items():
            found = gradients[1][name]
            assert (found is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(whole(found), whole(want))


# Models under the styles in torch.compile, whole and by block, beside one process that compiles nothing.
@contextmanager
def compiling(enabled: bool) -> Iterator[Any]:
    torch._dynamo.reset()
    try:
        with fusedcomm.compile.enabled() if enabled else nullcontext() as report:
            yield report
    finally:
        torch._dynamo.reset()


def given_no_view(block: nn.Module, x: Tensor) -> Tensor:
    """What DTensor.to_local gives to a compiled module gets no gradient, or a wrong one: torch 2.13, stock styles too.
    Here it is what the embedding returns."""
    return block(x + 0)  # type: ignore[no-any-return]


def compile_blocks(model: Llama) -> None:
    model.around = given_no_view
    for block in model.layers:
        block.compile(fullgraph=True)


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("enabled", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_whole_model(rank: int, enabled: bool) -> None:
    with compiling(enabled) as report:
        model = parallelize(llama(), init_device_mesh("cpu", (2,)))
        run = train(model, called=torch.compile(model, fullgraph=True))
        check(run)
        fused = [each for each in report.collectives if each.status == "fused"] if enabled else []
        assert len(fused) >= (8 if enabled else 0)  # 4 gathers and their backwards: the other ops are in the graph


@on_ranks(4)
@pytest.mark.nightly
@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_under_fully_shard(rank: int, checkpointed: bool) -> None:
    with meshes(2, 2) as (data, tensor), compiling(enabled=not checkpointed):
        model = parallelize(llama(), tensor)
        compile_blocks(model)
        if checkpointed:
            model.around = functools.partial(checkpoint, given_no_view, use_reentrant=False)
        run = train(shard(model, data), data=data)
        check(run)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.o = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) * self.k(x))  # type: ignore[no-any-return]


def of_styles(layout: Any) -> nn.Module:
    p, model = fusedcomm.parallel, Shared()
    prepare = p.PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
    column, row = p.ColwiseParallel(), p.RowwiseParallel(output_layouts=layout)
    plan = {"": prepare, "q": column, "k": column, "o": row}
    return p.parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def alone(layout: Any) -> nn.Module:
    p, model = fusedcomm.parallel, Shared()
    column = p.ColwiseParallel(input_layouts=layout)
    plan = {"q": column, "k": column, "o": p.RowwiseParallel(output_layouts=layout)}
    return p.parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


MODES = {"grad": nullcontext, "x-without": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@on_ranks(2)
@pytest.mark.parametrize(
    ("mode", "autocast", "frozen"),
    nightly_but(
        [("no_grad", False, False), ("inference", False, False)], itertools.product(MODES, (False, True), (False, True))
    ),
)
def test_each_mode(rank: int, mode: str, autocast: bool, frozen: bool) -> None:
    """Whole graphs, and the numbers of the plain module."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    for make, layout in itertools.product((of_styles, alone), (Replicate(), Shard(1))):
        grads = []
        for model, compiled in ((Shared(), False), (make(layout), True)):
            mine = x.chunk(2, 1)[rank] if compiled and layout == Shard(1) else x
            mine = mine.clone().requires_grad_(mode == "grad")
            model.requires_grad_(not frozen)
            with compiling(enabled=False), MODES[mode](), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(mine)
            if y.requires_grad:
                y.float().sum().backward()
            whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
            cut = (lambda t: t.chunk(2, 1)[rank]) if layout == Shard(1) and not compiled else (lambda t: t)
            grad = mine.grad if mine.grad is None else cut(mine.grad)
            grads.append([cut(y.detach()).float(), grad, *(whole(p.grad) for p in model.parameters())])
        for found, want in zip(grads[1], grads[0], strict=True):
            assert (found is None) == (want is None), (make, layout)
            if want is not None:
                close = {"rtol": 5e-2, "atol": 1e-1} if autocast else {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(found, want, **close)
