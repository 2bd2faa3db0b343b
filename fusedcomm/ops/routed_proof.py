"""The proofs of `fused` and `pipelined` calls of a mixture of experts, as `fusedcomm.ops.proof` has others."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomm.memory.group_member import Member
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.ops import proof
from fusedcomm.plan.planner import fingerprint_of
from fusedcomm.plan.routing import Routing, bytes_of_rows, counts_of, pack
from fusedcomm.run.routed_rows import ByCollective, ByKernels

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
def failure(op: str, algorithm: str, dtype: torch.dtype, ours: Member) -> str:
    """The failure of the algorithm's proof, made on all ranks if there is none yet, or ""."""
    name = ours.topology.name_of_proof(KIND, algorithm, dtype, False)
    if name not in ours.outcomes:
        proof.refuse_capture(op, algorithm, ours)
        num_bytes = 0
        if algorithm == "fused":
            ours.enter(op, FINGERPRINT)
            num_bytes = max(bytes_of_rows(each.capacity, each.columns, dtype.itemsize) for each in SIZES)
            num_bytes = max(num_bytes, 8 * ours.group_size**2 * SIZES[0].experts)
        what, results = (
            f"{algorithm} of {str(dtype).removeprefix('torch.')}",
            partial(_pairs, ours, num_bytes > 0, dtype),
        )
        ours.outcomes[name] = proof.outcome(KIND, what, ours, num_bytes, results)
    return ours.outcomes[name]


def _pairs(ours: Member, by_kernels: bool, dtype: torch.dtype, own: Member) -> proof.Pairs:
    if not by_kernels:
        return [pair for sizes in SIZES for pair in problem(sizes, ByCollective(ours.memory, 2), dtype)]
    with proof.bounded(own, KIND) as workspace:
        return [pair for sizes in SIZES for pair in problem(sizes, ByKernels(workspace, KIND, FINGERPRINT), dtype)]


def problem(sizes: Sizes, way: ByKernels | ByCollective, dtype: torch.dtype) -> proof.Pairs:
    """Results of the algorithm, and of the same routing on the host."""
    tokens, columns, experts, k, capacity, alignment = sizes
    size, rank, device = way.memory.group_size, way.memory.rank, way.memory.device
    generator = torch.Generator("cpu").manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> list[Tensor]:
        """Each rank's; so small that sums are exact."""
        return [torch.randint(low, high, shape, generator=generator, device="cpu") for _ in range(size)]

    xs, scores = integers(-2, 3, tokens, columns), integers(-2, 3, tokens, k)
    ids = integers(-1, experts * size, tokens * k)
    others = torch.randperm(columns, generator=generator, device="cpu")  # of each column of a product
    w = torch.eye(columns, device=device, dtype=dtype)[:, others].expand(experts, -1, -1).contiguous()
    w *= torch.arange(1, experts + 1, device=device, dtype=dtype).view(-1, 1, 1)

    x, score = xs[rank].to(device, dtype), scores[rank].to(device, torch.float32)
    own_ids, of_all = ids[rank].to(device), torch.stack([counts_of(each, experts * size) for each in ids])
    if isinstance(way, ByKernels):
        rows, _, packed, products = way.dispatch(x, own_ids, experts * size, k, capacity, alignment, [w], 2)
        routing = Routing(packed, rank, size, tokens * k)
        weighed = way.send(x, score.flatten(), k, routing, capacity)
        y, received = way.combine(rows, None, score, routing, k, True)
        found = [way.combine(rows, w, score, routing, k, True)[1], weighed, y, received]
    else:
        counts = way.counts(of_all[rank].to(device))
        routing = Routing(pack(own_ids, k, counts, rank, capacity, alignment), rank, size, tokens * k)
        rows, (products,) = way.dispatch(x, None, [w], k, routing, capacity)
        found = [way.collect(rows, w, routing).view(tokens, k, columns)]

    all_rows, all_weighed = torch.zeros(2, size * capacity, columns, dtype=torch.int64, device="cpu").unbind()
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
    wanted = [all_rows[block], all_rows[block][:, others] * of_rows]
    wanted += want[..., others] * factors, all_weighed[block], total, want
    return [(got, must.to(dtype)) for got, must in zip((rows, products, *found), wanted, strict=False)]
