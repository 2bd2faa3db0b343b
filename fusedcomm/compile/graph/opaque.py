"""Collectives inside custom ops of other packages: found by the group that they name, and written out where known.

`expand` puts an op's registered program in its place, in functional collectives, which the other passes know. It works
on the graph of forward and backward before that is partitioned, and on each graph afterwards.
"""

import sys
import uuid
from collections.abc import Callable, Collection
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.collectives import functional, size_of_group
from fusedcomm.compile.graph.layout import CannotFuse, size_of
from fusedcomm.compile.graph.rewrite import Rewriter, held_outputs

_KNOWN = {"aten", "prims", "prim", "inductor", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d"}
_KNOWN |= {"fusedcomm", "symm_mem", "fsdp"}
_IN_KEY = {"torch", "fusedcomm"}  # the key of compiled graphs has their versions
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BY_VALUE = (int, float, complex, str, bytes, NoneType, EllipsisType, slice, *_OF_TORCH)


def _deepspeed_exchange(x: Tensor, group_name: str) -> Tensor:
    """DeepSpeed's Ulysses: an exchange of equal parts along dim 0."""
    group_size = size_of_group(group_name)
    if x.shape[0] % group_size:
        raise CannotFuse(f"its dim 0, of size {x.shape[0]}, is not known to be divisible by {group_size}")
    rows = [x.shape[0] // group_size] * group_size
    return functional.wait_tensor(functional.all_to_all_single(x, rows, rows, group_name))  # type: ignore[no-any-return]


_programs: dict[str, FunctionType] = {"deepspeed::dim_zero_all_to_all": _deepspeed_exchange}  # type: ignore[dict-item]


def register(name: str, program: Callable[..., Any]) -> None:
    """See `fusedcomm.compile.register_collective`."""
    namespace, _, op = name.partition("::")
    if not namespace or not op or namespace in _KNOWN:
        raise ValueError(f'name must be "namespace::op" of a custom op, got {name!r}')
    if not isinstance(program, FunctionType):
        raise TypeError(f"program must be a Python function, got {program!r}")
    _programs[name] = program


def registered() -> list[tuple[Any, ...]]:
    """For the cache key of compiled graphs: each program's name, code, and the values that it uses."""
    return [(name, _fact(program, (), set())) for name, program in sorted(_programs.items())]


def _fact(value: Any, names: Collection[str], seen: set[Any]) -> Any:
    """Stands for value in a key: equal in other processes if the value is, or else, where nothing tells, never.

    ``names``: of the code that uses value, to be looked up in a module.
    """
    if isinstance(value, _BY_VALUE):
        return repr(value)
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        parts = [_fact(each, names, seen) for each in (value.items() if isinstance(value, dict) else value)]
        return type(value).__name__, sorted(parts, key=repr) if isinstance(value, (set, frozenset)) else parts
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_varnames, _fact(value.co_consts, names, seen)
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(value)
    is_module = isinstance(value, ModuleType)
    if is_module or isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        name = value.__name__ if is_module else f"{value.__module__}.{value.__qualname__}"
        use = value, frozenset(names)
        if use in seen or name.partition(".")[0] in (_IN_KEY if is_module else _IN_KEY | sys.stdlib_module_names):
            return name
        seen.add(use)
        if is_module:
            return name, _fact(_among(vars(value), names), names, seen)
        if isinstance(value, FunctionType):
            names = _names(value.__code__)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            own = value.__code__, value.__defaults__, value.__kwdefaults__, cells, _among(value.__globals__, names)
            return name, _fact(own, names, seen)
    return uuid.uuid4().hex


def _among(space: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: space[name] for name in sorted(names) if name in space}


def _names(code: CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


def name_of(node: Node) -> str | None:
    """The qualified name of a custom op that takes the name of a process group; None for all other nodes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name
    if name.partition("::")[0] in _KNOWN:
        return None
    return name if any(map(_is_group, (*node.args, *node.kwargs.values()))) else None


def _is_group(arg: Any) -> bool:
    if not isinstance(arg, str):
        return False
    try:
        return size_of_group(arg) > 0
    except CannotFuse:
        return False


def expand(graph: Graph) -> None:
    found = [node for node in graph.nodes if name_of(node) in _programs]
    if found:
        rewriter = Rewriter(graph)
        with held_outputs(graph):
            for node in found:
                attempt("expand", _expand, rewriter, node)


def _expand(rewriter: Rewriter, node: Node) -> None:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    inputs = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Node)))
    program = _programs[str(name_of(node))]

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = pytree.tree_unflatten([given.get(leaf, leaf) for leaf in leaves], spec)  # type: ignore[call-overload]
        return program(*args, **kwargs)

    with torch.no_grad():
        traced = make_fx(call)(*(each.meta["val"] for each in inputs)).graph
    copies = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    with rewriter.before(node, like=node):
        for each in traced.nodes:
            if each.op == "call_function":
                args, kwargs = map_arg((each.args, each.kwargs), copies.__getitem__)
                copies[each] = rewriter.call(each.target, *args, **kwargs)
        results: Any = map_arg(traced.output_node().args[0], copies.__getitem__)
        _check_results(node, map_arg(results, lambda n: n.meta["val"]))
    if isinstance(results, Node):
        rewriter.replace(node, results)
    else:
        for user in list(node.users):  # each takes one of the results
            rewriter.replace(user, results[user.args[1]])


def _check_results(node: Node, got: Any) -> None:
    forms = [
        [(t.dtype, *map(size_of, (*t.shape, *t.stride()))) for t in pytree.tree_leaves(results)]
        for results in (node.meta["val"], got)
    ]
    if forms[0] != forms[1]:
        raise ValueError(f"the program of {name_of(node)} must return what the op does, {forms[0]}, got {forms[1]}")
