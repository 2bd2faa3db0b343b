"""Mixture of experts. Two parts, by the argument: values, on virtual ranks (in graphs too, and of a rank that waits in
vain) and of users' calls in 2 processes; and speed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusedcomm
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.captured import check_replays
from fusedcomm.bench.gpu_check.device_clock import interleaved
from fusedcomm.bench.gpu_check.gpu_calls import FINGERPRINT, assert_equal
from fusedcomm.bench.gpu_check.pools import Pools
from fusedcomm.bench.gpu_check.virtual_ranks import check_absent, check_graph
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import routed_proof
from fusedcomm.plan.routing import Routing, bytes_of_rows, packed_shape
from fusedcomm.run.routed_rows import ByKernels, grouped_matmul

META = torch.device("meta")
OP, TIMES = "moe_dispatch", 3
Inputs = tuple[Tensor, Tensor, Tensor]  # x [T, N], expert_ids [T * k], scores [T, k] of a rank


class Moe(NamedTuple):
    """A dispatch and a combine of its rows."""

    group_size: int
    dtype: torch.dtype
    tokens: int
    columns: int
    experts: int  # of a rank
    k: int
    capacity: int
    alignment: int = 1

    def __str__(self) -> str:
        return f"R={self.group_size} {str(self.dtype).removeprefix('torch.')} {self.columns} columns, k={self.k}"

    def group(self, device: torch.device) -> VirtualGroup:
        """A group that has run the calls once, on each rank."""
        num_bytes = max(
            bytes_of_rows(self.capacity, self.columns, self.dtype.itemsize), 8 * self.group_size**2 * self.experts, 128
        )
        group = VirtualGroup(self.group_size, num_bytes, device)
        inputs = self.inputs(device, 0)[0]
        for num in range(2 if device.type == "cpu" else 3):  # there two rounds are the most
            group.load(lambda workspace, num=num: self.products(workspace, inputs, num), FINGERPRINT)
        packed = inputs[1].new_zeros(packed_shape(inputs[1].numel(), self.num_experts, self.group_size))
        rows = inputs[0].new_zeros(self.capacity, self.columns)
        for w in (None, self.w(device)):
            group.load(lambda workspace, w=w: self.combine(workspace, rows, packed, inputs[2], w), FINGERPRINT)
        return group

    @property
    def op(self) -> str:
        return OP

    @property
    def num_experts(self) -> int:
        return self.group_size * self.experts

    def w(self, device: torch.device) -> Tensor:
        """Every expert's: columns in reverse, doubled."""
        w = torch.eye(self.columns, device=device, dtype=self.dtype).flip(1) * 2
        return w.expand(self.experts, -1, -1).contiguous()

    def inputs(self, device: torch.device, seed: int) -> list[Inputs]:
        """Small integers: all sums are exact."""
        generator = torch.Generator("cpu").manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator, device="cpu").to(device)

        num_slots = self.tokens * self.k
        return [
            (
                integers(-2, 3, self.tokens, self.columns).to(self.dtype),
                integers(-1, self.num_experts, num_slots),
                integers(-2, 3, self.tokens, self.k).float(),
            )
            for _ in range(self.group_size)
        ]

    def dispatch(
        self, workspace: Workspace, inputs: Inputs, ws: Sequence[Tensor] = (), num_pieces: int = 1
    ) -> list[Tensor]:
        """[rows, routing], as `fusedcomm.ops.routed` does it, and rows times each of ``ws``."""
        x, ids, _ = inputs
        workspace.enter(OP, FINGERPRINT)
        way = ByKernels(workspace, OP, FINGERPRINT)
        facts = self.num_experts, self.k, self.capacity, self.alignment
        rows, _, packed, *hs = way.dispatch(x, ids, *facts, ws, num_pieces)
        return [rows, packed, *hs]

    def products(self, workspace: Workspace, inputs: Inputs, num_pieces: int) -> list[Tensor]:
        """A dispatch, without a matmul in 0 pieces."""
        ws = [self.w(inputs[0].device)] if num_pieces else []
        return self.dispatch(workspace, inputs, ws, max(num_pieces, 1))

    def combine(
        self, workspace: Workspace, rows: Tensor, packed: Tensor, scores: Tensor, w: Tensor | None = None
    ) -> Tensor:
        workspace.enter(OP, FINGERPRINT)
        routing = Routing(packed, workspace.rank, self.group_size, scores.numel())
        return ByKernels(workspace, OP, FINGERPRINT).combine(rows, w, scores, routing, self.k, False)[0]

    def run(self, workspace: Workspace, inputs: Inputs) -> list[Tensor]:
        rows, packed = self.dispatch(workspace, inputs)
        hs = [self.products(workspace, inputs, num)[2] for num in (1, 2)]
        combined = [self.combine(workspace, rows, packed, inputs[2], w) for w in (None, self.w(rows.device))]
        return [rows, *(h.flip(1) / 2 for h in hs), combined[0], combined[1].flip(1) / 2]

    def public(self, inputs: Inputs) -> list[Tensor]:
        """As users do it."""
        x, ids, scores = inputs
        more = {"alignment": self.alignment}
        facts, w = (self.num_experts, self.capacity), self.w(x.device)
        rows, _, routing = fusedcomm.moe_dispatch(x, ids.view(-1, self.k), *facts, **more)
        h, _, _ = fusedcomm.dispatch_grouped_matmul(x, ids.view(-1, self.k), w, *facts, **more)
        multiplied = fusedcomm.grouped_matmul_combine(rows, w, routing, scores)
        return [
            rows,
            h.flip(1) / 2,
            h.flip(1) / 2,
            fusedcomm.moe_combine(rows, routing, scores),
            multiplied.flip(1) / 2,
        ]

    def expected(self, every: list[Inputs]) -> list[list[Tensor]]:
        """Every rank's rows, its sums twice, and which of its choices [T, k] have a row, by a loop over the choices."""
        wanted: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]  # by expert: (rank, choice)
        for rank, (_, ids, _) in enumerate(every):
            for choice, expert in enumerate(ids.tolist()):
                if expert >= 0:
                    wanted[expert].append((rank, choice))
        xs, scores = ([each[i].cpu().double() for each in every] for i in (0, 2))
        shape = self.tokens, self.k
        found = [[x.new_zeros(self.capacity, self.columns), torch.zeros_like(x), x.new_zeros(shape)] for x in xs]
        for owner in range(self.group_size):
            kept, at = self._kept(wanted[owner * self.experts :][: self.experts]), 0
            for choices in kept:
                for row, (rank, choice) in enumerate(choices, at):
                    token, nth = divmod(choice, self.k)
                    found[owner][0][row] = xs[rank][token]
                    found[rank][1][token] += xs[rank][token] * scores[rank][token, nth]
                    found[rank][2][token, nth] = 1
                at += self._units(choices) * self.alignment
        device = every[0][0].device
        return [[t.to(device, self.dtype) for t in (rows, rows, rows, y, y, kept)] for rows, y, kept in found]

    def check(self, device: torch.device) -> dict[str, Any]:
        """Back to back, with fresh routings."""
        group, every = self.group(device), [self.inputs(device, seed) for seed in range(TIMES)]
        group.run(self.run, every[0])
        group.check(OP)
        with never_waiting(device):
            results = [group.run(self.run, inputs) for inputs in every]
        group.check(OP)
        for seed, (outs, inputs) in enumerate(zip(results, every, strict=True)):
            for rank, expected in enumerate(self.expected(inputs)):
                assert_equal(outs[rank], expected, f"{self} rank {rank} call {seed}")
        return {"calls": TIMES * self.group_size}

    def _units(self, choices: list[tuple[int, int]]) -> int:
        return -(-len(choices) // self.alignment)

    def _kept(self, wanted: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        """Without the last unit of the fullest expert, the last of them, until all fit."""
        while sum(map(self._units, wanted)) * self.alignment > self.capacity:
            fullest = max(wanted, key=lambda each: (self._units(each), wanted.index(each)))
            del fullest[(self._units(fullest) - 1) * self.alignment :]
        return wanted


def right(cuda: bool) -> list[Moe]:
    if not cuda:  # one rank runs after the other
        return [Moe(1, torch.bfloat16, 9, 24, 4, 2, 32, 4), Moe(1, torch.float32, 5, 70, 3, 3, 9)]
    return [
        Moe(2, torch.bfloat16, 512, 1024, 8, 4, 4096),
        Moe(4, torch.float32, 300, 257, 3, 3, 512, 8),  # less than all rows
    ]


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU a wait of the host for it raises inside."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def of_users(rank: int, device_type: str, moe: Moe, algorithm: str | None) -> dict[str, Any]:
    """Values and gradients; and of a graph with other routings."""
    device = torch.device(device_type)
    with fusedcomm.force_algorithm(algorithm, strict=algorithm is not None):
        for seed in range(TIMES):
            every = moe.inputs(device, seed)
            x, _, scores = (each.requires_grad_(each.is_floating_point()) for each in every[rank])
            g = moe.inputs(device, 50 + seed)[rank][0]
            with never_waiting(device) if seed else nullcontext():  # the first call proves, allocates and loads
                outs = moe.public(every[rank])
                grads = torch.autograd.grad(outs[3], (x, scores), g)
            fusedcomm.synchronize()
            *want, kept = moe.expected(every)[rank]
            want += [(kept * scores).sum(1, keepdim=True).to(g.dtype) * g, kept * (x.double() * g).sum(1, keepdim=True)]
            assert_equal([*outs, *grads], want, f"{moe} {algorithm} rank {rank} call {seed}")
        _beside(moe, device, rank)
        return {"calls": TIMES} | (check_replays(rank, device_type, moe) if device.type == "cuda" else {})


def _beside(moe: Moe, device: torch.device, rank: int) -> None:
    """A shared expert, which has a stream of its own, and the same one behind the layer."""
    torch.manual_seed(0)
    options: Any = {"device": device, "dtype": moe.dtype}
    shared = nn.Linear(moe.columns, moe.columns, **options)
    layer = fusedcomm.nn.ExpertParallel(moe.columns, 64, moe.num_experts, capacity=moe.capacity, **options)
    x, ids, scores = (each.requires_grad_(each.is_floating_point()) for each in moe.inputs(device, 0)[rank])
    wanted, results = (x, scores, *layer.parameters(), *shared.parameters()), []
    for layer.shared_expert in (None, shared):
        y = layer(x, ids.view(-1, moe.k), scores)
        y = y if layer.shared_expert else y + shared(x)
        results.append([y, *torch.autograd.grad(y.sum(), wanted)])
    assert_equal(*results, f"a shared expert, {moe} rank {rank}")


LARGE = Moe(1, torch.bfloat16, 8192, 4096, 64, 8, 65536)
TINY = Moe(1, torch.bfloat16, 8, 64, 4, 2, 16)


def speed(moe: Moe, device: torch.device) -> dict[str, Any]:
    """One rank that sends itself all rows, and a copy of as many bytes; TB/s. ``plan``: the routing and its counts."""
    (workspace,) = moe.group(device).workspaces
    (inputs,) = moe.inputs(device, 0)
    x, ids, scores = inputs
    ids.clamp_(min=0)
    rows, packed = moe.dispatch(workspace, inputs)
    routing, way = Routing(packed, 0, 1, ids.numel()), ByKernels(workspace, OP, FINGERPRINT)
    block, source = rows.numel() * rows.itemsize, torch.empty_like(rows).normal_()
    w = torch.randn(moe.experts, moe.columns, moe.columns, device=device, dtype=moe.dtype)
    times = interleaved(
        {
            "dispatch": lambda: moe.dispatch(workspace, inputs),
            "dispatch and matmul": lambda: moe.dispatch(workspace, inputs, [w]),
            "dispatch and matmul in pieces": lambda: moe.dispatch(workspace, inputs, [w], 2),
            "send": lambda: way.send(x, None, moe.k, routing, moe.capacity),
            "combine": lambda: moe.combine(workspace, rows, packed, scores),
            "copy": lambda: rows.copy_(source),
            "matmul": lambda: grouped_matmul(rows, w, routing.ends),
            "matmul and combine": lambda: moe.combine(workspace, rows, packed, scores, w),
        },
        device,
    )
    workspace.check(OP)
    own = x.numel() * x.itemsize  # sent once, to the one rank; written by a combine
    moved = {"dispatch": 2 * (own + block), "send": 2 * (own + block), "combine": own + 3 * block, "copy": 2 * block}
    rates = {name: num_bytes / times[name] / 1e9 for name, num_bytes in moved.items()}
    ratios = {f"{name} ratio": rate / rates["copy"] for name, rate in rates.items() if name != "copy"}
    found = {"plan_ms": times["dispatch"] - times["send"], "matmul_ms": times["matmul"]}
    for name in ("dispatch and matmul", "dispatch and matmul in pieces", "matmul and combine"):
        found[f"{name} over matmul"] = times[name] / times["matmul"]
    return {**rates, **ratios, **found}


def jobs(half: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The launches of a part, on tensors without memory."""
    for moe in right(True) if half == "right" else [LARGE]:
        yield f"moe {moe}", partial(moe.group, META)
    if half == "right":
        yield "moe backward", partial(_backward, right(True)[0])
        yield from ((f"moe proof {sizes}", partial(_proof, sizes)) for sizes in routed_proof.SIZES)


def _backward(moe: Moe) -> None:
    workspace, inputs = moe.group(META).workspaces[0], moe.inputs(META, 0)[0]
    rows, packed = moe.dispatch(workspace, inputs)
    routing, way = Routing(packed, 0, moe.group_size, inputs[1].numel()), ByKernels(workspace, OP, FINGERPRINT)
    way.send(inputs[0], inputs[2].flatten(), moe.k, routing, moe.capacity)
    for scores in (inputs[2], None):
        way.combine(rows, None, scores, routing, moe.k, scores is not None)
    way.combine(rows, moe.w(META), scores, routing, moe.k, True)


def _proof(sizes: routed_proof.Sizes) -> None:
    num_bytes = bytes_of_rows(sizes.capacity, sizes.columns, 2)
    way = ByKernels(VirtualGroup(2, num_bytes, META).workspaces[0], OP, FINGERPRINT)
    routed_proof.problem(sizes, way, torch.bfloat16)


def cases(device: torch.device, part: str) -> child.Cases:
    cuda = device.type == "cuda"
    if part == "speed":
        moe = LARGE if cuda else TINY
        return {f"moe of {moe.tokens} tokens": partial(speed, moe, device)}
    found, pools = right(cuda), Pools(device)
    pair = found[0]._replace(group_size=2)
    return {
        **{f"values {moe}": partial(moe.check, device) for moe in found},
        "graph": partial(check_graph, found[0], device),
        "absent": partial(check_absent, pair, device),
        **{f"2 processes {each}": pools.case(2, of_users, pair, each) for each in ("fused", None)[: 1 + cuda]},
    }
