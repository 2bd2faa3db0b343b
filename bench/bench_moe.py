"""``fusedcomm bench moe``: a dispatch and a combine beside the program of all_to_all_single and sorts.

The host's clock times both, on GPUs too: today's program waits for its counts, so no pause could hide its launches.
"""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import common
from fusedcomm.bench.common import us
from fusedcomm.bench.measure import DTYPES
from fusedcomm.bench.timing import METHOD, Timing, by_host, check_values, measure
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.ops.exact_problem import difference

TODAY, OURS = "all_to_all_single", "fusedcomm"


@dataclass(frozen=True)
class MoeRow:
    """Times are the slowest rank's, in seconds; ``tokens``: of a rank."""

    tokens: int
    hidden: int
    experts: int
    k: int
    dtype: str
    group_size: int
    today: Timing
    ours: Timing

    @property
    def ratio(self) -> float:
        return self.ours.median / self.today.median


def measure_moe(
    rank: int, tokens: int, hidden: int, experts: int, k: int, dtype: str, device_type: str, rounds: int
) -> MoeRow:
    group_size, device = dist.get_world_size(), world.rank_device(device_type)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-3, 4, (tokens, hidden), generator=generator).to(device, DTYPES[dtype])
    ids = torch.rand(tokens, experts, generator=generator).topk(k).indices.to(device)
    scores = torch.randint(1, 4, (tokens, k), generator=generator).to(device, torch.float32)
    capacity = 2 * tokens * k
    calls = {TODAY: lambda: today(x, ids, scores, experts), OURS: lambda: ours(x, ids, scores, experts, capacity)}
    must = x * scores.sum(1, keepdim=True).to(x.dtype)
    check_values(calls, lambda name, result: difference(result, must))
    times = measure(calls, device, rounds=rounds, clock=by_host)
    return MoeRow(tokens, hidden, experts, k, dtype, group_size, times[TODAY], times[OURS])


def ours(x: Tensor, ids: Tensor, scores: Tensor, experts: int, capacity: int) -> Tensor:
    rows, _, routing = fusedcomm.moe_dispatch(x, ids, experts, capacity)
    return fusedcomm.moe_combine(rows, routing, scores)


def today(x: Tensor, ids: Tensor, scores: Tensor, experts: int) -> Tensor:
    """Rows sorted by expert, exchanged, sorted by expert again; and back."""
    group_size, k = dist.get_world_size(), ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = (each.view(group_size, -1).sum(1).tolist() for each in (counts, arriving))
    by_source = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(by_source, x[order // k], received, sent)
    expert = torch.arange(experts // group_size, device=x.device).repeat(group_size).repeat_interleave(arriving)
    by_expert = expert.argsort(stable=True)
    rows = by_source[by_expert]

    back = torch.empty_like(rows)
    back[by_expert] = rows
    returned = x.new_empty(order.numel(), x.shape[1])
    dist.all_to_all_single(returned, back, sent, received)
    of_tokens = torch.empty_like(returned)
    of_tokens[order] = returned
    return (of_tokens.view(*ids.shape, -1) * scores[..., None]).sum(1).to(x.dtype)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("tokens", 2048, "of a rank"),
        ("hidden", 1024, "columns of x"),
        ("experts", 8, "of all ranks"),
        ("k", 2, "experts of a token"),
    ):
        parser.add_argument(f"--{name}", type=console.positive, default=default, help=f"{text} (default: {default})")
    common.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _, num_ranks, problem = world.asked_for(args)
    if not problem and (args.experts % num_ranks or args.experts < args.k):
        text = f"--experts must be a multiple of {num_ranks} ranks and at least --k, {args.k}, got {args.experts}"
        return console.fail("bench moe", text, code=2)
    cases = [(args.tokens, args.hidden, args.experts, args.k, dtype) for dtype in common.dtypes_of(args)]
    by_clock = {"timing": METHOD | {"start": "barrier", "clock": "host", "l2_flush_bytes": 0, "skew_cycles": 0}}
    return common.run_cases("bench moe", args, measure_moe, cases, _COLUMNS, lambda rows: by_clock)


_COLUMNS = (
    Column("tokens", "of a rank", lambda r: str(r.tokens)),
    Column("hidden", "columns of x", lambda r: str(r.hidden)),
    Column("experts", "of all ranks", lambda r: str(r.experts)),
    Column("k", "experts of a token", lambda r: str(r.k)),
    Column("dtype", "of x", lambda r: r.dtype, left=True),
    Column("today\nus", "all_to_all_single with splits, and sorts; launches included", lambda r: us(r.today.median)),
    Column("fusedcomm\nus", "moe_dispatch and moe_combine; launches included", lambda r: us(r.ours.median)),
    Column("ratio", "fusedcomm us / today us", lambda r: f"{r.ratio:.2f}"),
)
