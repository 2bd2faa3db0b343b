"""The program that fusedcomm began with, unmodified, under torch.compile: with fusedcomm, and without.

    python -m fusedcomm.bench.start_program [--json FILE] ...           2 CPU ranks of one thread
    torchrun --nproc-per-node 8 -m fusedcomm.bench.start_program        GPUs, NCCL

roof      the matmuls alone
plain     torch.compile(program, fullgraph=True)
exchange  the same with fusedcomm's `normalize` alone: where DTensor gathers every part to keep one, as it does on CPU,
          parts are exchanged. The gain of the fused ops is plain / compiled over plain / exchange
compiled  the same as plain, in fusedcomm.compile.enabled()
op        fusedcomm.matmul_all_to_all, called by hand and not compiled

Each is compiled anew, with caches off. A ratio is the median of the ratios within a round, with their P10 and P90.

By default torch takes CPU memory in 4 KiB pages, while fusedcomm's ops ask for huge pages for their results: part of
the speed-up is page faults saved, and an op can be faster than its roof. With THP_MEM_ALLOC_ENABLE=1 torch asks for
them too: the rest is the gain of overlap. A result is allocated by Inductor in compiled, by fusedcomm in op.
"""

import argparse
import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
import fusedcomm.compile
from fusedcomm.bench import baselines, common
from fusedcomm.bench.common import Ratio
from fusedcomm.bench.measure import DTYPES
from fusedcomm.bench.timing import Timing, check_values, measure_rounds
from fusedcomm.compile.reports import CompileReport
from fusedcomm.launch import world
from fusedcomm.launch.console import Column
from fusedcomm.ops.exact_problem import difference

EAGER, ROOF, UNFUSED = "eager program", "roof", "matmul, all_to_all"
PLAIN, EXCHANGE, COMPILED, OP = "plain", "exchange", "compiled", "op"
FASTER = 1.3  # plain / compiled, at least
NOT_SLOWER = 0.97  # op / compiled, at least: 1 but for the noise of a median


def matmul_and_reshard_heads(
    xs: list[Tensor], ws: list[Tensor], device_mesh: Any, num_heads: int = 16, async_op: bool = True
) -> list[Tensor]:
    from torch.distributed.tensor import DTensor, Shard

    ys = []
    for x, w in zip(xs, ws):  # noqa: B905  left as it was written
        y = torch.matmul(x, w)
        b, t, o = y.shape
        y = y.view(b, t, num_heads, o // num_heads)
        d = DTensor.from_local(y, device_mesh=device_mesh, placements=(Shard(1),))
        d = d.redistribute(device_mesh=device_mesh, placements=(Shard(-2),), async_op=async_op)
        ys.append(d.to_local())
    return ys


@dataclass(frozen=True)
class ProgramSizes:
    """x [batch, tokens, K], w [batch, K, N] on every rank."""

    pairs: int = 4
    batch: int = 2
    tokens: int = 2048  # each rank's
    k: int = 1024
    n: int = 2048
    heads: int = 16

    @property
    def out_shape(self) -> list[int]:
        return [self.heads, self.n // self.heads]

    def __str__(self) -> str:
        b, t, k, n = self.batch, self.tokens, self.k, self.n
        pairs = f"{self.pairs} pairs, " if self.pairs > 1 else ""
        return f"{pairs}x ({b}, {t}, {k}), w ({b}, {k}, {n}), {self.heads} heads"


class ProgramData:
    """One rank's inputs and the ways to use them.

    The inputs start as integers, small enough for products and sums to be exact in every dtype and order.
    """

    def __init__(self, sizes: ProgramSizes, dtype: torch.dtype, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        # Its warning, that it gathers every part to keep one, is in the docstring of this module
        logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (self.num_ranks,))
        self.xs, self.ws = self._integers(self.rank)
        self.num_fused = 0

    def randomize(self) -> None:
        """Make the inputs random for timing, after the checks: on integers GPUs draw less power, so they run faster."""
        self.__dict__.pop("_oracle", None)
        generator = torch.Generator(self.device).manual_seed(self.rank)
        for t in (*self.xs, *self.ws):
            t.normal_(generator=generator)

    def eager(self) -> dict[str, Callable[[], list[Tensor]]]:
        """The variants that are not compiled."""
        return {
            EAGER: self._calling(matmul_and_reshard_heads),
            ROOF: lambda: [torch.matmul(x, w) for x, w in self._pairs],
            UNFUSED: self._unfused,
            OP: self._op,
        }

    def variants(self) -> dict[str, Callable[[], list[Tensor]]]:
        from torch._inductor import config

        from fusedcomm.compile.passes import FusedcommPass, Settings

        normalize = FusedcommPass(Settings(fuse=()), CompileReport())
        with no_caches():
            plain = self._compiled()
            with config.patch(post_grad_custom_pre_pass=normalize):
                exchange = self._compiled()
            with fusedcomm.compile.enabled() as report:
                compiled = self._compiled()
        self.num_fused = sum(each.status == "fused" for each in report.collectives)
        return self.eager() | {PLAIN: plain, EXCHANGE: exchange, COMPILED: compiled}

    def check(self, name: str, results: list[Tensor]) -> str | None:
        expected = [self._product(x, w) for x, w in self._pairs] if name == ROOF else self._oracle
        for i, (result, must) in enumerate(zip(results, expected, strict=True)):
            if wrong := difference(result, must):
                return f"pair {i}: {wrong}"
        return None

    @property
    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.xs, self.ws, strict=True)

    def _compiled(self) -> Callable[[], list[Tensor]]:
        call = self._calling(torch.compile(same_program(matmul_and_reshard_heads), fullgraph=True))
        call()
        return call

    def _calling(self, program: Callable[..., list[Tensor]]) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            ys = program(self.xs, self.ws, self.mesh, self.sizes.heads)
            return [y.wait() if hasattr(y, "wait") else y for y in ys]

        return call

    def plan(self) -> fusedcomm.Plan:
        x, w, out_shape = self.xs[0], self.ws[0], self.sizes.out_shape
        return fusedcomm.explain("matmul_all_to_all", x, w, 1, 2, self.mesh, out_shape=out_shape)

    def _unfused(self) -> list[Tensor]:
        """A user's own program, with a copy to pack and one to unpack."""
        ys = [torch.matmul(x, w).unflatten(-1, self.sizes.out_shape) for x, w in self._pairs]
        return [baselines.unpacked(baselines.all_to_all(baselines.packed(y, 2)), 1) for y in ys]

    def _op(self) -> list[Tensor]:
        out_shape = self.sizes.out_shape
        return [fusedcomm.matmul_all_to_all(x, w, 1, 2, self.mesh, out_shape=out_shape) for x, w in self._pairs]

    @cached_property
    def _oracle(self) -> list[Tensor]:
        """This rank's results, from all ranks' inputs: no communication must be trusted."""
        parts = []
        for rank in range(self.num_ranks):
            ys = [self._product(x, w) for x, w in zip(*self._integers(rank), strict=True)]
            parts.append([y.unflatten(-1, self.sizes.out_shape).chunk(self.num_ranks, 2)[self.rank] for y in ys])
        return [torch.cat(each, 1) for each in zip(*parts, strict=True)]

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x.float(), w.float()).to(self.dtype)

    def _integers(self, rank: int) -> tuple[list[Tensor], list[Tensor]]:
        generator, s = torch.Generator(self.device).manual_seed(rank), self.sizes
        options: dict[str, Any] = {"generator": generator, "device": self.device, "dtype": self.dtype}
        xs = [torch.randint(-1, 2, (s.batch, s.tokens, s.k), **options) for _ in range(s.pairs)]
        ws = [torch.randint(-1, 2, (s.batch, s.k, s.n), **options) for _ in range(s.pairs)]
        return xs, ws


def same_program(program: Any) -> Any:
    """``program`` with a code object of its own: Dynamo's cache is by code object."""
    return types.FunctionType(program.__code__.replace(), program.__globals__, argdefs=program.__defaults__)


@contextlib.contextmanager
def no_caches() -> Iterator[None]:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    with warnings.catch_warnings(), fresh_cache(), config.patch(force_disable_caches=True):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        yield


@dataclass(frozen=True)
class ProgramRow:
    dtype: str
    fused: int
    times: dict[str, Timing]
    plain_over_compiled: Ratio
    plain_over_exchange: Ratio
    op_over_compiled: Ratio
    compiled_over_roof: Ratio


TIMES = {
    ROOF: "the matmuls alone",
    PLAIN: "the program under torch.compile",
    EXCHANGE: "so, with parts exchanged where DTensor gathers",
    COMPILED: "so, in fusedcomm.compile.enabled()",
    OP: "fusedcomm.matmul_all_to_all, called by hand",
}
RATIOS = ("plain_over_compiled", "plain_over_exchange", "op_over_compiled", "compiled_over_roof")
SPREAD = "median of the ratios within a round (P10 .. P90 of them)"


def _time_column(name: str) -> Column:
    return Column(f"{name}\nms", TIMES[name], lambda row: f"{row.times[name].median * 1e3:.1f}")


def _ratio_column(name: str, drop: int) -> Column:
    return Column(name.replace("_over_", " /\n"), SPREAD, lambda row: str(getattr(row, name)), drop=drop)


COLUMNS = (
    Column("dtype", "the dtype of all tensors", lambda row: row.dtype, left=True),
    Column("fused", "pairs that became fused ops", lambda row: str(row.fused)),
    *map(_time_column, TIMES),
    *map(_ratio_column, RATIOS, (0, 2, 1, 3)),
)


def measure_program(rank: int, sizes: ProgramSizes, dtype: str, device_type: str, rounds: int) -> ProgramRow:
    device = world.rank_device(device_type)
    data = ProgramData(sizes, DTYPES[dtype], device)
    variants = data.variants()
    check_values(variants, data.check)
    data.randomize()
    seconds = measure_rounds({name: variants[name] for name in TIMES}, device, rounds=rounds, warmup=2)
    times = {name: Timing.of(each) for name, each in seconds.items()}
    ratios = (Ratio.of_rounds(*(seconds[each] for each in name.split("_over_"))) for name in RATIOS)
    return ProgramRow(dtype, data.num_fused, times, *ratios)


@dataclass(frozen=True)
class Goal:
    """A figure and its bound."""

    name: str
    value: float
    bound: str
    met: bool

    def __str__(self) -> str:
        return f"{self.name:40s}{self.value:6.2f}   goal on CPU {self.bound}: {'' if self.met else 'not '}met"


def goals(row: ProgramRow) -> list[Goal]:
    found = ("plain/compiled", row.plain_over_compiled, FASTER), ("op/compiled", row.op_over_compiled, NOT_SLOWER)
    return [
        Goal(f"{name}, {row.dtype}", ratio.median, f">= {least}", ratio.median >= least) for name, ratio, least in found
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Values are checked before anything is timed.")
    for field in fields(ProgramSizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    common.add_arguments(parser, rounds=41)
    parser.set_defaults(dtype=["float32", "bfloat16"])
    args = parser.parse_args(argv)
    sizes = ProgramSizes(**{field.name: getattr(args, field.name) for field in fields(ProgramSizes)})
    huge_pages, on_cpu = world.torch_asks_for_huge_pages(), world.asked_for(args)[0] == "cpu"

    def end(rows: list[ProgramRow]) -> dict[str, Any]:
        found = [goal for row in rows if on_cpu for goal in goals(row)]
        for goal in found:
            print(goal)
        facts = {"bench": "start_program", "sizes": asdict(sizes), "huge_pages": huge_pages}
        return facts | {"goals": [asdict(goal) for goal in found]}

    if world.is_rank_0():
        print(sizes, flush=True)
    if world.is_rank_0() and on_cpu:
        setting = "huge for all" if huge_pages else "torch's default, huge for the results of fusedcomm's ops"
        print(f"pages of CPUs: {setting} (transparent_hugepage: {world.system_huge_pages()})", flush=True)
    cases = [(sizes, dtype) for dtype in args.dtype]
    return common.run_cases("start_program", args, measure_program, cases, COLUMNS, end)


if __name__ == "__main__":
    sys.exit(main())
