"""torch.ops gives plain arguments to the dispatcher at once, and leaves all others to torch's own call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from fusedcomm.kernels.native_part import native

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
    call = native.direct_call("fusedcomm::all_gather_matmul", lambda *args, **kwargs: others.append((args, kwargs)))
    return call(*args, **kwargs), others


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


def test_keywords_and_function_modes_come_to_torch() -> None:
    assert called(*PLAIN[:-1], group_name="a group")[1] == [(PLAIN[:-1], {"group_name": "a group"})]
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
