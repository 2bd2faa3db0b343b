"""all_gather -> views -> matmuls becomes one fusedcomm::all_gather_matmul; other readers get its by-product."""

from torch.fx import Node

from fusedcomm.compile.fuse import match_gather
from fusedcomm.compile.fuse.match_gather import Gathered, GatherMatch, Reader
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.layout import CannotFuse
from fusedcomm.compile.graph.matmuls import MATMULS, SCALED, Product
from fusedcomm.compile.graph.rewrite import sizes
from fusedcomm.compile.graph.views import path_back, value

OP = "all_gather_matmul"
KIND = "all_gather"

rewrite = match_gather.rewrite


def match(start: Node) -> GatherMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found = match_gather.read(start)
    (reader, first), *more = sorted(_consumers(found), key=lambda each: found.copies(each[0].layout))
    products = [first]
    for other, product in more:
        shares = [f for dim in other.layout.dims for f in dim] == reader.layout.order
        shares &= other.layout.shape == reader.layout.shape and product.batched == first.batched
        nodes = {each.node for each in products}
        shares &= value(product.node).dtype == value(first.node).dtype
        shares &= (product.scales or ())[::2] == (first.scales or ())[::2]  # one scale of x
        independent = not any(match_gather.depends_on(operand, nodes) for operand in product.operands)
        if shares and independent and value(other.node).dtype == value(reader.node).dtype:
            products.append(product)
    return GatherMatch(found, reader, products, attempt(OP, _scales_beside, found, reader, products))


def _scales_beside(found: Gathered, reader: Reader, products: list[Product]) -> tuple[Gathered, Reader] | None:
    """The gather of the scales of x's rows, and what these products read of it, if nothing else reads either gather."""
    scales = products[0].scales
    start = None if scales is None else next(iter(path_back(scales.x, through_casts=False)[0].all_input_nodes), None)
    if scales is None or not scales.by_row or start is None or start not in collectives.find(start.graph, KIND):
        return None
    own = match_gather.read(start)
    place = next((each for each in own.readers if each.node is scales.x), None)
    users = {user for each in (*found.readers, *own.readers) for user in each.users}
    if place is None or users != {each.node for each in products} or len(place.dtypes) > 1:
        return None
    rows, of_scales = ([*each.layout.dims[0]] for each in (reader, place))
    if found.sources not in rows or found.collective.group_name != own.collective.group_name:
        return None
    before = rows[: rows.index(found.sources)], of_scales[: of_scales.index(own.sources)]
    return (own, place) if sizes(before[:1]) == sizes(before[1:]) else None


def _consumers(found: Gathered) -> list[tuple[Reader, Product]]:
    try:
        return found.consumers()
    except CannotFuse:
        if found.x.target in MATMULS | SCALED:  # as the gather of logits
            raise CannotFuse("the gathered tensor is the result of a matmul: no op fuses that order") from None
        raise
