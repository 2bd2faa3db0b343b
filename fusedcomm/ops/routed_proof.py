"""The proof of `fused` calls of a mixture of experts, as `fusedcomm.ops.proof` has those of other ops."""

from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomm.memory.group_member import Member
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import proof
from fusedcomm.plan.planner import fingerprint_of
from fusedcomm.plan.routing import Routing, bytes_of_rows, counts_of, pack
from fusedcomm.run.routed_rows import ByKernels

KIND, FINGERPRINT = "moe", fingerprint_of("proof", "moe")


class Sizes(NamedTuple):
    """A dispatch of [tokens, columns]; ``experts``: of each rank."""

    tokens: int
    columns: int
    experts: int
    k: int
    capacity: int
    alignment: int


# More tokens than programs; the first drops rows, the second's are vectors.
SIZES = (Sizes(701, 29, 3, 3, 1201, 8), Sizes(600, 136, 2, 2, 2000, 1))


@outside_modes()
def failure(op: str, dtype: torch.dtype, ours: Member) -> str:
    """The failure of the kernels' proof, made on all ranks if there is none yet, or ""."""
    name = ours.topology.name_of_proof(KIND, "fused", dtype, False)
    if name not in ours.outcomes:
        proof.refuse_capture(op, "fused", ours)
        ours.enter(op, FINGERPRINT)
        num_bytes = max(bytes_of_rows(each.capacity, each.columns, dtype.itemsize) for each in SIZES)
        num_bytes = max(num_bytes, 8 * ours.group_size**2 * SIZES[0].experts)
        what = f"fused of {str(dtype).removeprefix('torch.')}"
        ours.outcomes[name] = proof.outcome(KIND, what, ours, num_bytes, lambda own: _pairs(own, dtype))
    return ours.outcomes[name]


def _pairs(own: Member, dtype: torch.dtype) -> proof.Pairs:
    with proof.bounded(own, KIND) as workspace:
        return [pair for sizes in SIZES for pair in problem(sizes, workspace, dtype)]


def problem(sizes: Sizes, workspace: Workspace, dtype: torch.dtype) -> proof.Pairs:
    """Results of the kernels, and of the same routing on the host."""
    tokens, columns, experts, k, capacity, alignment = sizes
    size, rank, device = workspace.group_size, workspace.rank, workspace.device
    generator = torch.Generator("cpu").manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> list[Tensor]:
        """Each rank's; so small that sums are exact."""
        return [torch.randint(low, high, shape, generator=generator, device="cpu") for _ in range(size)]

    xs, scores = integers(-2, 3, tokens, columns), integers(-2, 3, tokens, k)
    ids = integers(-1, experts * size, tokens * k)
    others = torch.randperm(columns, generator=generator, device="cpu")  # of each column of a product
    w = torch.eye(columns, device=device, dtype=dtype)[:, others].expand(experts, -1, -1).contiguous()
    w *= torch.arange(1, experts + 1, device=device, dtype=dtype).view(-1, 1, 1)

    way = ByKernels(workspace, KIND, FINGERPRINT)
    x, score = xs[rank].to(device, dtype), scores[rank].to(device, torch.float32)
    rows, _, packed = way.dispatch(x, ids[rank].to(device), experts * size, k, capacity, alignment)
    routing = Routing(packed, rank, size, tokens * k)
    weighed = way.send(x, score.flatten(), k, routing, capacity)
    y, received = way.combine(rows, None, score, routing, k, True)
    multiplied = way.combine(rows, w, score, routing, k, True)[1]
    _, _, _, products = way.dispatch(x, ids[rank].to(device), experts * size, k, capacity, alignment, [w], 2)

    all_rows, all_weighed = torch.zeros(2, size * capacity, columns, dtype=torch.int64, device="cpu").unbind()
    of_all = torch.stack([counts_of(each, experts * size) for each in ids])
    places = [Routing(pack(ids[r], k, of_all, r, capacity, alignment), r, size, tokens * k).places for r in range(size)]
    for src, own in enumerate(places):
        slots = (own >= 0).nonzero().flatten()
        sent = xs[src][slots // k]
        all_rows[own[slots]], all_weighed[own[slots]] = sent, sent * scores[src].view(-1, 1)[slots]
    own = places[rank]
    want = all_rows[own.clamp(min=0)].masked_fill((own < 0)[:, None], 0).view(tokens, k, columns)
    block = slice(rank * capacity, (rank + 1) * capacity)
    total = (want * scores[rank][..., None]).sum(1)
    factors = ids[rank].view(tokens, k, 1) % experts + 1
    of_rows = torch.searchsorted(routing.ends.cpu(), torch.arange(capacity, device="cpu"), right=True)[:, None] + 1
    want_products = all_rows[block][:, others] * of_rows
    wanted = all_rows[block], all_weighed[block], total, want, want[..., others] * factors, want_products
    found = rows, weighed, y, received, multiplied, products
    return [(got, must.to(dtype)) for got, must in zip(found, wanted, strict=True)]
