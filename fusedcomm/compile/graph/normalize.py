"""`shard_dim_alltoall`, and DTensor's all_gather on CPU followed by this rank's part, become `all_to_all_single`.

An exchange sends only each rank's part, R times less than a gather, and the other passes know it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.collectives import UNEVEN, functional
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, quotient, size_of
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.split_cat import SLICE, SPLITS, args_of, part, shape_of
from fusedcomm.compile.graph.views import SAME, follow, value
from fusedcomm.memory import group

aten = torch.ops.aten


@dataclass(frozen=True)
class Exchange:
    """Rank p gets block p of x, one from each of ``sources``."""

    x: Node
    blocks: Factor
    sources: Factor
    before: Layout  # layout of x
    after: Layout  # layout of ``node``
    node: Node  # replaced by the exchange
    start: Node  # the exchange is written before this node
    group_name: str


def find(graph: Graph, gathers: bool) -> list[Exchange]:
    """``gathers``: also find gathers followed by each rank's own part, as DTensor writes them on CPU meshes.

    On rank 0, a program in which every rank keeps part 0 has the same graph. So the gather and the part must come from
    one call of the program (`_from_one_call`), as they do in `DTensor.redistribute`. If this rank is in several groups
    of that size, the part can be its own in another of them; such gathers stay, on all ranks of a mesh.
    """
    found = []
    for node in [*_shard_dim_alltoalls(graph), *(collectives.find(graph, "all_gather") if gathers else [])]:
        try:
            found.append(_of_gather(node) if node.target in collectives.STARTS else _of_shard_dim_alltoall(node))
        except CannotFuse:
            continue
    return [exchange for exchange in found if exchange is not None]


def sizes_from_inputs(rewriter: Rewriter) -> None:
    """Compute sizes from the graph's inputs where they have all symbols: reading a size is no use of a tensor."""
    known = {size_of(node.meta["val"]) for node in _symbolic(rewriter.graph.find_nodes(op="placeholder"))}
    for node in _symbolic(rewriter.graph.find_nodes(op="call_function", target=aten.sym_size.int)):
        size = size_of(node.meta["val"])
        if not isinstance(size, int) and size.free_symbols <= known:
            with rewriter.before(node, like=node):
                node.replace_all_uses_with(rewriter.size(size))  # type: ignore[arg-type]
            rewriter.graph.erase_node(node)


def _symbolic(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if isinstance(node.meta.get("val"), torch.SymInt)]


def rewrite(rewriter: Rewriter, exchange: Exchange) -> Node:
    """Write the exchange, and return the start of its all_to_all_single."""
    blocks, sources, rest = exchange.blocks, exchange.sources, exchange.before.without(exchange.blocks)
    sent = Layout(((blocks,), *rest.dims))
    received = Layout(((sources,), *rest.dims))
    with rewriter.before(exchange.start, like=exchange.node):
        x = rewriter.arrange(exchange.x, exchange.before.order, sent)
        x = rewriter.contiguous(x)
        splits = [1] * blocks.size
        start = rewriter.call(functional.all_to_all_single.default, x, splits, splits, exchange.group_name)
        start.meta[UNEVEN] = _uneven(exchange)
        wait = rewriter.call(functional.wait_tensor.default, start)
        result = rewriter.arrange(wait, received.order, exchange.after)
        if value(exchange.node).is_contiguous():
            result = rewriter.contiguous(result)
    rewriter.replace(exchange.node, result)
    return start


def _uneven(exchange: Exchange) -> str | None:
    """Why the exchange must stay as it is, if DTensor's shards are uneven along one of its dims.

    DTensor then pads and cuts on some ranks: graphs of ranks differ around the same exchange. Every rank cuts a joined
    dim behind it, and pads a divided one before it. So every rank finds these in its own graph.
    """
    joined = next(dim for dim, factors in enumerate(exchange.after.dims) if exchange.sources in factors)
    divided = next(dim for dim, factors in enumerate(exchange.before.dims) if exchange.blocks in factors)
    received, sent = exchange.node, exchange.x
    while len(received.users) == 1 and (user := next(iter(received.users))).target in SAME:
        received = user
    cuts = [user for user in received.users if user.target is SLICE and args_of(user)[1:3] == (joined, 0)]
    sizes = {}
    for cut in cuts:
        if _from_one_call(exchange.start, cut):
            sizes[joined] = size_of(value(cut).shape[joined])
    whole = padded = size_of(value(sent).shape[divided])
    while sent.target in (*SAME, aten.constant_pad_nd.default) and _from_one_call(exchange.start, sent):
        amounts = args_of(sent)[1] if sent.target is aten.constant_pad_nd.default else ()
        whole -= sum(each for at, each in enumerate(amounts) if len(exchange.before.dims) - 1 - at // 2 == divided)
        sent = args_of(sent)[0]
    if whole != padded:
        sizes[divided] = whole
    if not sizes:
        return None
    dims = " and ".join(f"dim {dim} of size {size}" for dim, size in sorted(sizes.items()))
    return f"DTensor's shards are uneven along {dims}, so that graphs of ranks differ"


def _shard_dim_alltoalls(graph: Graph) -> list[Node]:
    if not hasattr(torch.ops._dtensor, "shard_dim_alltoall"):  # torch.distributed.tensor is not imported
        return []
    return list(graph.find_nodes(op="call_function", target=torch.ops._dtensor.shard_dim_alltoall.default))


def _of_shard_dim_alltoall(node: Node) -> Exchange:
    x, gather_dim, scatter_dim, group_name = args_of(node)
    before = Layout.of(value(x).shape)
    group_size = collectives.size_of_group(group_name)
    size = value(x).shape[scatter_dim]
    inner = size_of(size // group_size) if isinstance(size, torch.SymInt) else None  # R divides it, as DTensor pads
    blocks, sources = before.leading(scatter_dim % len(before.dims), group_size, inner), Factor(group_size)
    after = before.without(blocks).insert(gather_dim % len(before.dims), sources)
    return Exchange(x, blocks, sources, before, after, node, node, group_name)


def _of_gather(start: Node) -> Exchange | None:
    """A gather as an exchange, if only this rank's part of its result is used; else None."""
    gather = collectives.read(start)
    if value(gather.sent).device.type != "cpu":
        return None
    before = Layout.of(value(gather.sent).shape)
    received, _, sources = gather.received(before)
    node, layout = follow(gather.wait, received)[-1]
    if len(node.users) != 1:
        return None
    own = _own_part(next(iter(node.users)), gather.group_size)
    if own is None or own[2] != group.find(gather.group_name).rank() or _has_other_of_size(gather.group_name):
        return None
    node, dim, _ = own
    blocks = layout.leading(dim, gather.group_size)
    if blocks is sources or not _from_one_call(start, node):
        return None
    return Exchange(gather.sent, blocks, sources, before, layout.without(blocks), node, start, gather.group_name)


def _from_one_call(a: Node, b: Node) -> bool:
    """Whether both nodes come from the same node of the graph that dynamo traced, in the forward or the backward."""
    stacks = [node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack") or [] for node in (a, b)]
    names = [[name for name, _ in stack] for stack in stacks]
    return names[0] == names[1] != []


def _has_other_of_size(group_name: str) -> bool:
    """Whether this rank is in a group of the same size with other ranks."""
    ranks = {name: members for name, _, members in collectives.memberships()}
    own = ranks[group_name]
    return any(len(members) == len(own) and set(members) != set(own) for members in ranks.values())


def _own_part(user: Node, num_parts: int) -> tuple[Node, int, int] | None:
    """(node, dim, index) of the used part, if it is a single one of num_parts equal parts."""
    nodes = list(user.users) if user.target in SPLITS else [user]
    if user.target in SPLITS and len(user.meta["val"]) != num_parts:
        return None
    place = part(nodes[0]) if len(nodes) == 1 else None
    if place is None or place.picked or place.size * num_parts != shape_of(place.origin)[place.dim]:
        return None
    index = quotient(place.begin, place.size)
    return (nodes[0], place.dim, index) if isinstance(index, int) else None
