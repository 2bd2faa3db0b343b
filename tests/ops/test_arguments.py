"""Arguments of the wrong type: one short sentence, before torch can show a schema or a whole array."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedcomm
from tests.helpers.groups import check_bad_input, check_values
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.spies import Dispatched

X, W = torch.ones(4, 8), torch.ones(8, 8)
GOOD: dict[str, dict[str, Any]] = {
    "matmul_all_to_all": {"x": (4, 8), "w": (8, 6), "gather_dim": 0, "scatter_dim": 1, "bias": None, "out_shape": None},
    "all_to_all_matmul": {"x": (4, 8), "w": (16, 6), "gather_dim": 1, "scatter_dim": 0, "bias": None},
    "all_gather_matmul": {"x": (4, 8), "w": (8, 6), "gather_dim": 0, "bias": None},
    "matmul_reduce_scatter": {"x": (4, 8), "w": (8, 6), "scatter_dim": 0, "bias": None, "reduce_op": "sum"},
    "matmul_all_reduce": {"x": (4, 8), "w": (8, 6), "bias": None, "reduce_op": "sum"},
}
NESTED = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch will drop them
    QUANTISED = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)

BAD: list[tuple[dict[str, Any], str]] = [
    ({"w": None}, "w must be a tensor, got None"),
    ({"x": [[1.0]]}, "x must be a tensor, got list"),
    ({"w": nn.Linear(8, 8)}, "w must be a tensor, got Linear"),
    ({"x": np.ones((400, 8))}, "x must be a tensor, got ndarray"),
    ({"bias": np.ones(800)}, "bias must be a tensor, got ndarray"),
    ({"bias": 0.5}, "bias must be a tensor, got 0.5"),
    ({"x": "x" * 1000}, "x must be a tensor, got 'xxx"),
    ({"x": X.to_sparse()}, "x must be a dense tensor, got a torch.sparse_coo one"),
    ({"w": NESTED}, "w must be a dense tensor, got a nested one"),
    ({"x": QUANTISED}, "x must be a dense tensor, got a quantised one"),
    ({"gather_dim": "0"}, "gather_dim must be an int, got '0'"),
    ({"gather_dim": 1.0}, "gather_dim must be an int, got 1.0"),
    ({"scatter_dim": None}, "scatter_dim must be an int, got None"),
    ({"scatter_dim": np.ones(400)}, "scatter_dim must be an int, got ndarray"),
    ({"out_shape": 8}, "out_shape must be a list of sizes or None, got 8"),
    ({"out_shape": "8"}, "each size of out_shape must be an int, got '8'"),
    ({"out_shape": [2, 4.0]}, "each size of out_shape must be an int, got 4.0"),
    ({"reduce_op": None}, "reduce_op must be a str or a ReduceOp, got None"),
    ({"reduce_op": np.ones(400)}, "reduce_op must be a str or a ReduceOp, got ndarray"),
]


def refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with Dispatched() as dispatched, pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 120
    assert kind is ValueError or not dispatched.names("fusedcomm")
    assert not dispatched.names("_c10d_functional")


def check_refused(op: str, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    dims = {name: value for name, value in GOOD[op].items() if name.endswith("_dim")}
    arguments = {"x": X, "w": W, **dims, **change}
    refused(lambda: getattr(fusedcomm, op)(**arguments), kind, message)
    refused(lambda: fusedcomm.explain(op, **arguments), kind, message)


@on_ranks(2)
def test_wrong_types(rank: int) -> None:
    for op, takes in GOOD.items():
        for change, message in BAD:
            if change.keys() <= takes.keys():
                check_refused(op, change, TypeError, message)
    for op in GOOD.keys() - {"all_gather_matmul"}:
        check_refused(op, {"w": [W, W]}, TypeError, "w must be a tensor, got list")
    check_refused("all_gather_matmul", {"w": [W, None]}, TypeError, "w must be a tensor, got None")
    check_refused(
        "matmul_all_reduce", {"reduce_op": dist.ReduceOp.MAX}, ValueError, "reduce_op must be one of sum, avg"
    )
    with pytest.raises(ValueError, match=r"^group must be a ProcessGroup, .{,120}$"):
        fusedcomm.matmul_all_reduce(X, W, torch.ones(1000))  # a bias that was taken for the group


@on_ranks(2)
def test_dtensors(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (2,))
    for name, local in (("x", X), ("w", W), ("w", nn.Parameter(W)), ("bias", W[0])):
        given = DTensor.from_local(local, mesh, [Replicate()])
        for op in GOOD:
            message = (
                f"{name} must be a plain tensor, got a DTensor: pass its .to_local(), or use the styles of "
                "fusedcomm.parallel"
            )
            check_refused(op, {name: given}, TypeError, message)
    compiled = torch.compile(lambda x: fusedcomm.matmul_all_reduce(x, W), backend="eager")
    with pytest.raises(TypeError, match=r"pass its .to_local\(\)"):
        compiled(DTensor.from_local(X, mesh, [Replicate()]))


@on_ranks(2)
def test_what_is_taken_as_before(rank: int) -> None:
    """Subclasses that torch unwraps, stand-ins for tensors, NumPy's ints, and lists of other classes."""
    import torch.distributed._functional_collectives as funcol

    want = fusedcomm.matmul_all_reduce(X, W)
    late = funcol.all_reduce(X.clone(), "max", dist.group.WORLD)
    for x in (late, fusedcomm.DeviceToHost(X).lazy(), nn.Parameter(X)):
        assert torch.equal(fusedcomm.matmul_all_reduce(x, W), want)
    out = fusedcomm.matmul_all_to_all(X, W, np.int64(0), np.int64(1), out_shape=np.array([2, 4]))
    assert torch.equal(out, fusedcomm.matmul_all_to_all(X, W, 0, 1, out_shape=torch.Size([2, 4])))
    several = fusedcomm.all_gather_matmul(X, nn.ParameterList([W, W]), 0)  # type: ignore[call-overload]
    assert isinstance(several, list) and len(several) == 2
    assert fusedcomm.matmul_all_reduce(X.to("meta"), W.to("meta")).is_meta


@on_ranks(2)
def test_reduce_ops_of_torch(rank: int) -> None:
    sum_, avg = dist.ReduceOp.SUM, dist.ReduceOp.AVG

    def program(x: torch.Tensor, reduce_op: Any) -> list[torch.Tensor]:
        scattered = fusedcomm.matmul_reduce_scatter(x, W, 0, reduce_op=reduce_op)
        return [scattered, fusedcomm.matmul_all_reduce(x, W, reduce_op=reduce_op)]

    x = X * (rank + 1)
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    for given, value in (("sum", 24), (sum_, 24), (dist.ReduceOp(sum_), 24), ("avg", 12), (avg, 12)):
        for out in program(x, given) + ([] if type(given) is dist.ReduceOp else compiled(x, given)):
            assert (out == value).all(), (given, out)
    for given in (sum_, avg):
        fusedcomm.explain("matmul_all_reduce", x, W, reduce_op=given)


# Values that no device takes: a ValueError on all of them.
OF_ALL: list[tuple[dict[str, Any], str]] = [  # what is changed where an op takes it, and the message
    ({"x": (8,)}, "x must have at least 2 dims"),
    ({"w": (8,)}, "w must be 2-D .* batch dims, got 1 dims beside 2"),
    ({"w": (2, 8, 6)}, "w must be 2-D .* batch dims, got 3 dims beside 2"),
    ({"w": (9, 6)}, r"x and w must agree on K, got \d+ and 9"),
    ({"bias": (1, 6)}, r"bias must have shape \[N\] = \[6\], got \[1, 6\]"),
    ({"bias": (3,)}, r"bias must have shape \[N\] = \[6\], got \[3\]"),
    ({"reduce_op": "max"}, "reduce_op must be one of sum, avg, got 'max'"),
    *(({name: n}, rf"{name} must be in \[-2, 1\], got {n}") for name in ("gather_dim", "scatter_dim") for n in (-3, 2)),
]
BAD_VALUES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "matmul_all_to_all": [
        ({"x": (3, 4, 8), "w": (2, 8, 6)}, "batch dims of w must equal those of x"),
        ({"scatter_dim": -2}, "gather_dim and scatter_dim must differ, got 0 and -2"),
        ({"out_shape": [4]}, "out_shape must be sizes whose product is N=6"),
        ({"out_shape": [-1, -6]}, "out_shape must be sizes whose product is N=6"),
    ],
    "all_to_all_matmul": [
        ({"w": (32, 6)}, "the exchanged x and w must agree on K, got 16 and 32"),
        (
            {"x": (4, 6, 8), "w": (3, 16, 6), "gather_dim": 2, "scatter_dim": 1},
            r"batch dims of w must equal those of the exchanged x, got \(3,\) and \(4,\)",
        ),
        ({"scatter_dim": -1}, "gather_dim and scatter_dim must differ, got 1 and -1"),
    ],
    "all_gather_matmul": [
        ({"gather_dim": 1}, "the gathered x and w must agree on K, got 16 and 8"),
        (
            {"x": (2, 4, 8), "w": (2, 8, 6)},
            r"batch dims of w must equal those of the gathered x, got \(2,\) and \(4,\)",
        ),
        ({"w": []}, "w must be a tensor or a list of at least one, got an empty list"),
        ({"w": [(8, 6), (9, 6)]}, "the gathered x and w must agree on K, got 8 and 9"),
        (
            {"x": (1, 4, 8), "gather_dim": 1, "w": [(8, 6), (1, 8, 6)]},
            "either every w or none must have batch dims, got 2 and 3 dims",
        ),
        ({"w": [(8, 6), (8, 3)], "bias": [(6,)]}, "bias must have one entry per w, 2, got 1"),
        ({"w": [(8, 6), (8, 3)], "bias": (6,)}, "bias must be a list or None beside a list of w, got a tensor"),
        ({"bias": [(6,)]}, "bias must be a tensor or None beside one w, got a list"),
        ({"w": [(8, 6), (8, 3)], "bias": [None, (6,)]}, r"bias must have shape \[N\] = \[3\], got \[6\]"),
    ],
    "matmul_reduce_scatter": [
        ({"x": (3, 4, 8), "w": (2, 8, 6)}, r"batch dims of w must equal those of x, got \(2,\) and \(3,\)"),
        ({"bias": (6,), "scatter_dim": 1}, r"bias must have shape \[N / R\] = \[3\], got \[6\]"),
        ({"partial_bias": (3,), "scatter_dim": 1}, r"partial_bias must have shape \[N\] = \[6\], got \[3\]"),
    ],
    "matmul_all_reduce": [
        ({"x": (3, 4, 8), "w": (2, 8, 6)}, r"batch dims of w must equal those of x, got \(2,\) and \(3,\)"),
        ({"partial_bias": (3,)}, r"partial_bias must have shape \[N\] = \[6\], got \[3\]"),
    ],
}


@on_ranks(2)
@pytest.mark.parametrize("op", GOOD)
def test_it_is_a_value_error_on_every_device(rank: int, op: str) -> None:
    of_all = [each for each in OF_ALL if each[0].keys() <= GOOD[op].keys()]
    for change, message in [*of_all, *BAD_VALUES[op]]:
        check_bad_input(rank, op, GOOD[op] | change, message)
    ragged = "ragged" if op == "matmul_all_to_all" else f"{op}-ragged"
    check_values(rank, NAMED[ragged], torch.float32, "chunked", 1)  # nothing is lost
