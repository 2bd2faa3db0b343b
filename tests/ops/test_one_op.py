"""Behaviour of single ops, and every way to name a group."""

import ast
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._device import _device_constructors

import fusedcomm
from docs.generate.imports import modules, room
from fusedcomm.kernels.native_part import native
from fusedcomm.ops.table import OPS as TABLE
from fusedcomm.plan.geometry import shapes
from tests.helpers.groups import call, check
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import expected, integers
from tests.helpers.spies import Dispatched, pushed


@on_ranks(2)
def test_bad_groups(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    x, w = torch.ones(4, 8), torch.ones(8, 6)
    with pytest.raises(ValueError, match="algorithm must be one of"):
        fusedcomm.force_algorithm("quick")
    group = dist.new_group()
    name = group.group_name
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="got a destroyed one"):
        fusedcomm.matmul_all_to_all(x, w, 0, 1, group)
    with pytest.raises(ValueError, match="must be an initialised process group"):
        fusedcomm.matmul_all_to_all(x, w, 0, 1, name)
    mesh = init_device_mesh("cpu", (2,))
    for bad in ((mesh, 7), (mesh, "zz"), (dist.group.WORLD, 0), (mesh, 0, 0), 3):
        with pytest.raises(ValueError, match=r"mesh_dim must be one of|group must be a ProcessGroup, DeviceMesh"):
            fusedcomm.matmul_all_to_all(x, w, 0, 1, bad)
    first = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="group must contain this rank"):
            fusedcomm.matmul_all_to_all(x, w, 0, 1, first)


@on_ranks(2)
def test_groups_in_a_compiled_graph(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, world = init_device_mesh("cpu", (2,)), dist.group.WORLD
    for group in (None, world, world.group_name, mesh, (mesh, 0)):

        def program(x: torch.Tensor, w: torch.Tensor, group: Any = group) -> torch.Tensor:
            return fusedcomm.matmul_all_to_all(x.relu(), w, 1, -2, group, out_shape=[4, 3]).sigmoid()

        torch._dynamo.reset()
        x, w = torch.randn(2, 4, 8), torch.randn(8, 12)
        compiled = torch.compile(program, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, w), program(x, w))


@on_ranks(4)
def test_groups(rank: int) -> None:
    """Every way to name a group, overlapping sub-groups, and a group made anew under its old name."""
    from torch.distributed.device_mesh import init_device_mesh

    problem = NAMED["heads"]
    x, w, _ = integers(problem, rank, 4)
    columns = problem.sizes(4)[2]
    mesh = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for group in (None, dist.group.WORLD, dist.group.WORLD.group_name, mesh, (square["a", "b"]._flatten(), 0)):
        out = fusedcomm.matmul_all_to_all(x, w, 1, -2, group, out_shape=columns)
        torch.testing.assert_close(out, expected(problem, 4)[rank], rtol=0, atol=0)
    with pytest.raises(ValueError, match="must be 1-D"):
        fusedcomm.matmul_all_to_all(x, w, 1, -2, square, out_shape=columns)
    for _ in range(2):
        groups = [dist.new_group(members) for members in ([0, 1], [1, 2, 3], [0, 3])]
        for members, group in zip(([0, 1], [1, 2, 3], [0, 3]), groups, strict=True):
            if rank in members:
                check(group, problem, call(group, problem))
        dist.barrier()
        for group, members in zip(groups, ([0, 1], [1, 2, 3], [0, 3]), strict=True):
            if rank in members:
                dist.destroy_process_group(group)


@on_ranks(2)
def test_gradients_without_columns(rank: int) -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 0, requires_grad=True)
    out = fusedcomm.matmul_all_to_all(x, w, 1, 0, out_shape=[4, 0])
    out.sum().backward()
    assert x.grad.shape == x.shape and not x.grad.any() and w.grad.shape == w.shape


@on_ranks(3)
def test_a_list_of_weights_shares_one_gather(rank: int) -> None:
    """A list of one weight gives a list too, a tensor gives a tensor, and many weights send no more than one."""
    x, ws = torch.randn(4, 8, requires_grad=True), [torch.randn(8, n, requires_grad=True) for n in (6, 3, 5)]
    biases = [torch.randn(6), None, torch.randn(5)]
    with fusedcomm.force_algorithm("chunked", strict=True):
        singles = []
        for w, bias in zip(ws, biases, strict=True):
            with pushed() as sent:
                singles.append(fusedcomm.all_gather_matmul(x, w, 0, bias=bias))
            assert sent.num_bytes == x.nbytes * (dist.get_world_size() - 1)
        with pushed() as sent, Dispatched() as dispatched:
            outs = fusedcomm.all_gather_matmul(x, ws, 0, bias=biases)
        assert sent.num_bytes == x.nbytes * (dist.get_world_size() - 1)
        assert dispatched.names("fusedcomm") == ["all_gather_matmul"]
        assert isinstance(outs, list)
        torch.testing.assert_close(outs, singles)
        (only,) = fusedcomm.all_gather_matmul(x, ws[:1], 0, bias=biases[:1])
        torch.testing.assert_close(only, singles[0])
        (unbiased,) = fusedcomm.all_gather_matmul(x, tuple(ws[1:2]), 0)
        torch.testing.assert_close(unbiased, singles[1])
        with Dispatched() as dispatched:
            torch.stack([out.sum() for out in outs]).sum().backward()
        assert dispatched.names("fusedcomm") == ["matmul_reduce_scatter"]  # one for all weights


@pytest.mark.parametrize(
    "x, w, gather_dim, scatter_dim, out_shape",
    [
        ((2, 6, 4, 8), (64, 5), 2, 1, [2, 3, 5]),  # K = heads * head_dim
        ((2, 6, 4, 8), (16, 5), 3, 1, [2, 3, 4, 5]),  # K = the gathered head_dim alone
        ((2, 6, 1, 8), (8, 5), 1, 0, [1, 12, 1, 5]),  # as few dims as make up K: not 1 * 8
        ((2, 6, 4, 8), (2, 64, 5), 2, 1, [2, 3, 5]),  # a batched w leaves one dim of rows
        ((2, 6, 4, 8), (4, 6, 8, 5), 0, 2, None),  # two batch dims: (4, 6) beside rows 2, columns 8
    ],
)
def test_as_few_dims_as_possible_make_up_k(
    x: tuple[int, ...], w: tuple[int, ...], gather_dim: int, scatter_dim: int, out_shape: list[int] | None
) -> None:
    exchange = shapes.all_to_all_matmul(x, w, gather_dim, scatter_dim, 2)
    assert exchange.out_shape == (out_shape or [*exchange.shape[:3], 5])
    assert exchange.k == w[-2]


@pytest.mark.parametrize(
    "x, w, shape, split_dim",
    [
        ((12, 5), (5, 8), [12, 8], 0),
        ((4, 5), (5, 8), [4, 8], 0),
        ((128, 5), (5, 136), [128, 136], 1),  # wide: each rank reads all of x, and a part of w
        ((124, 5), (5, 136), [124, 136], 0),  # few rows
        ((7, 5), (5, 8), [7, 8], 1),
        ((7, 5), (5, 9), [8, 9], 0),  # nothing divides: a row more
        ((2, 7, 5), (5, 9), [16, 9], 0),
        ((4, 7, 5), (5, 9), [28, 9], 0),
        ((4, 7, 5), (4, 5, 9), [4, 7, 9], 0),
        ((3, 7, 5), (3, 5, 9), [3, 8, 9], 1),
        ((0, 5), (5, 9), [0, 9], 0),
    ],
)
def test_the_dim_that_is_cut(x: tuple[int, ...], w: tuple[int, ...], shape: list[int], split_dim: int) -> None:
    exchange = shapes.matmul_all_reduce(x, w, "sum", 4)
    assert (exchange.shape, exchange.split_dim) == (shape, split_dim)
    assert math.prod(exchange.block) * 4 == math.prod(shape)


@on_ranks(4)
def test_padding_is_sent_and_not_seen(rank: int) -> None:
    """At most R - 1 rows more, per matrix, are computed and sent, and none is seen."""
    x, w = torch.randn(2, 7, 5), torch.randn(5, 9)
    with fusedcomm.force_algorithm("chunked", strict=True), pushed() as sent:
        out = fusedcomm.matmul_all_reduce(x, w)
    assert out.shape == (2, 7, 9) and out.is_contiguous()
    assert sent.num_bytes == 2 * 3 / 4 * (16 * 9 * 4)


# torch.ops gives plain arguments to the dispatcher at once, and leaves all others to torch's own call.
if native is None:
    pytest.skip("needs the native part", allow_module_level=True)


class Subclass(Tensor):
    pass


X, W, BIAS = (torch.empty(shape, device="meta") for shape in ((4, 8), (8, 6), (6,)))
PLAIN = (X, [W, W[:, :5]], [BIAS, None], 0, False, None, None, None, 2, "a group")
NOT_PLAIN: dict[str, Any] = {  # by name: the arguments
    "a subclass": (X.as_subclass(Subclass), *PLAIN[1:]),
    "a subclass in a list": (X, [W.as_subclass(Subclass)], [None], *PLAIN[3:]),
    "a tuple of tensors": (X, (W,), [None], *PLAIN[3:]),
    "no tensor": (None, *PLAIN[1:]),
    "a tensor for a list": (X, W, *PLAIN[2:]),
    "NumPy's int": (*PLAIN[:3], np.int64(0), *PLAIN[4:]),
    "a bool for an int": (*PLAIN[:3], False, *PLAIN[4:]),
    "an int for a bool": (*PLAIN[:4], 0, *PLAIN[5:]),
    "a large int": (*PLAIN[:3], 1 << 70, *PLAIN[4:]),
    "floats for sizes": (*PLAIN[:5], [2.0, 2.0], *PLAIN[6:]),
    "large sizes": (*PLAIN[:5], [1 << 70], *PLAIN[6:]),
    "a name that is no text": (*PLAIN[:-1], "\ud800"),
    "too few": PLAIN[:-1],
    "too many": (*PLAIN, "call", 1),
}


def called(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The result, and the arguments that torch's own call has got."""
    others: list[Any] = []
    direct = native.direct_call(
        "fusedcomm::all_gather_matmul", "", lambda *args, **kwargs: others.append((args, kwargs))
    )
    return direct(*args, **kwargs), others


@pytest.mark.parametrize("splits", [None, [4, 4]])
def test_plain_arguments_come_to_the_kernel(splits: list[int] | None) -> None:
    rank = None if splits is None else 0
    args = nn.Parameter(X), *PLAIN[1:5], splits, None, rank, *PLAIN[8:]
    (outs, gathered), others = called(*args)
    assert [each.shape for each in outs] == [(8, 6), (8, 5)] and gathered.shape == (0,) and not others


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_others_come_to_torch(case: str) -> None:
    given = NOT_PLAIN[case]
    result, [(args, kwargs)] = called(*given)
    assert result is None and args == given and not kwargs


@pytest.mark.parametrize("op", TABLE)
def test_arguments_of_every_type_come_to_the_kernel(op: str) -> None:
    values = {"Tensor": X, "List[Tensor]": [X], "List[Optional[Tensor]]": [X, None], "Optional[Tensor]": X}
    values |= {"int": 1, "bool": True, "float": 0.5, "str": "sum", "Optional[int]": None, "Optional[List[int]]": [2]}
    values["ScalarType"] = torch.bfloat16
    packet, others = getattr(torch.ops.fusedcomm, op), list[Any]()
    for overload in {*packet.overloads()} - {"flat"}:
        schema = getattr(packet, overload)._schema
        given = {each.name: values[str(each.real_type)] for each in schema.arguments}
        outs = {each.name: given.pop(each.name) for each in schema.arguments if each.kwarg_only}
        direct = native.direct_call(schema.name, schema.overload_name, lambda *args, **kwargs: others.append(args))
        with suppress(ValueError, TypeError):  # of the checks, as values fit types alone
            direct(*given.values(), **outs)
    assert not others


def test_wrong_keywords_and_function_modes_come_to_torch() -> None:
    assert not called(*PLAIN[:-1], group_name="a group")[1]
    assert called(*PLAIN[:-1], group="a group")[1] == [(PLAIN[:-1], {"group": "a group"})]
    assert called(*PLAIN, group_name="a group")[1] == [(PLAIN, {"group_name": "a group"})]
    with BaseTorchFunctionMode():
        assert called(*PLAIN)[1]


def test_torch_ops_call_so() -> None:
    """Its error for a wrong argument is torch's; modes of functions hear of a call."""
    packet = torch.ops.fusedcomm.all_gather_matmul
    heard: list[Any] = []

    class Hears(BaseTorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    for op in (packet, packet.default):
        assert op(*PLAIN)[0][0].shape == (8, 6)
        with pytest.raises(RuntimeError, match="Expected a value of type 'int' for argument 'gather_dim'"):
            op(*PLAIN[:3], "0", *PLAIN[4:])
        with Hears():
            op(*PLAIN)
    assert len(heard) == 2


def test_torchscript_knows_the_op() -> None:
    name = torch.jit._builtins._find_builtin(torch.ops.fusedcomm.all_reduce._op)
    assert name == "fusedcomm::all_reduce"


# Whatever torch.set_default_device says, the package makes its tensors on a device that it names.
ROOT = Path(__file__).parents[2]
MOVED = {function.__name__ for function in _device_constructors()}  # what the default device moves


def without_device(source: str) -> list[int]:
    """The lines of calls such as torch.zeros(4), or zeros(4) imported from torch, that name no device."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
        if alias.name in MOVED
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func) in {f"torch.{name}" for name in MOVED} | imported)
        and all(keyword.arg != "device" for keyword in node.keywords)
    ]


def test_every_tensor_names_its_device() -> None:
    assert {"zeros", "empty", "ones", "full", "tensor", "arange", "eye", "rand", "randint"} <= MOVED
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for name, file in modules(ROOT).items()
        if room(name) != "bench"  # its programs set no default device
        for line in without_device(file.read_text())
    ]
    assert not found, f"these calls must name a device: {found}"


def test_a_tensor_without_a_device_is_found() -> None:
    assert without_device("torch.zeros(4)\ntorch.zeros(4, device=d)\nx.new_zeros(4)\ntorch.empty_like(x)") == [1]
    assert without_device("from torch import eye as one\none(3)\nf(torch.tensor([1], dtype=t))") == [2, 3]
    with torch.device("meta"):  # what the rule is about
        assert torch.zeros(1).is_meta and not torch.zeros(1, device="cpu").is_meta
