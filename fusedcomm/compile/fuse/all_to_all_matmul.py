"""all_to_all_single -> views -> matmul becomes fusedcomm::all_to_all_matmul; other readers get its by-product."""

from torch.fx import Node

from fusedcomm.compile.fuse import match_gather
from fusedcomm.compile.fuse.match_gather import GatherMatch

OP = "all_to_all_matmul"
KIND = "all_to_all"

rewrite = match_gather.rewrite


def match(start: Node) -> GatherMatch:
    """The match for the collective that starts here. Raises CannotFuse."""
    found = match_gather.read(start)
    reader, product = min(found.consumers(), key=lambda each: found.copies(each[0].layout))
    return GatherMatch(found, reader, [product])
