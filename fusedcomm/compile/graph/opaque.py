"""Collectives inside custom ops of other packages: found by the group that they name, and written out where known.

`expand` puts an op's registered program in its place, in functional collectives, which the other passes know. It works
on the graph of forward and backward before that is partitioned, and on each graph afterwards.
"""

import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.collectives import functional, size_of_group
from fusedcomm.compile.graph.layout import CannotFuse, refuse, size_of
from fusedcomm.compile.graph.rewrite import Rewriter, held_outputs

_KNOWN = {"aten", "prims", "prim", "inductor", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d"}
_KNOWN |= {"fusedcomm", "symm_mem", "fsdp"}


def _deepspeed_exchange(x: Tensor, group_name: str) -> Tensor:
    """DeepSpeed's Ulysses: an exchange of equal parts along dim 0."""
    group_size = size_of_group(group_name)
    refuse(x.shape[0] % group_size, f"its dim 0, of size {x.shape[0]}, is not known to be divisible by {group_size}")
    rows = [x.shape[0] // group_size] * group_size
    return functional.wait_tensor(functional.all_to_all_single(x, rows, rows, group_name))  # type: ignore[no-any-return]


_programs: dict[str, Callable[..., Any]] = {"deepspeed::dim_zero_all_to_all": _deepspeed_exchange}
_keys: dict[str, str] = {}


def register(name: str, program: Callable[..., Any]) -> None:
    """See `fusedcomm.compile.register_collective`."""
    namespace, _, op = name.partition("::")
    if not namespace or not op or namespace in _KNOWN:
        raise ValueError(f'name must be "namespace::op" of a custom op, got {name!r}')
    if not callable(program):
        raise TypeError(f"program must be callable, got {program!r}")
    _programs[name], _keys[name] = program, uuid.uuid4().hex


def registered() -> list[tuple[str, str]]:
    """For the cache key of compiled graphs: random, as nothing tells which values a program uses."""
    return sorted(_keys.items())


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
