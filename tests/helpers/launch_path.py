"""The package's launches through Triton's real launchers, down to a driver without a GPU, in a process of its own.

    python -m tests.helpers.launch_path FOLDER ARCH SUITE...

SUITE: ``kernels``, the launches of tests/helpers/compile_only.py; ``few``, calls of all ops as users make them;
``all``, all problems in all dtypes; ``norms``, with a norm behind; ``experts``, a mixture of them; ``uneven``, parts of
different sizes; ``views``, parts of tensors; ``planted``, launches with a defect each; ``slots``, gathers with a defect
of the slots that they load. It prints JSON, one object per case. It must run without TRITON_INTERPRET; the cache of
TRITON_CACHE_DIR spares compiling.
"""

import itertools
import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.runtime.jit import JITFunction

import fusedcomm
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.kernels.triton.bundles import Span
from fusedcomm.memory import launch_order, stream_writes
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.topology import Topology
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import dispatch, routed
from fusedcomm.plan import launches
from fusedcomm.plan import schedule as schedules
from fusedcomm.plan.geometry import norm
from fusedcomm.plan.schedule import Described
from fusedcomm.plan.tiles import num_cuts
from fusedcomm.run import python_executor
from fusedcomm.run.packing import pack
from tests.helpers import compile_only
from tests.helpers.device_rules import EARLY_START, Argument, Launch, Write, argument_violations
from tests.helpers.fake_driver import FakeDriver, Refused
from tests.helpers.op_problems import ALL_PROBLEMS
from tests.helpers.pretended_gpu import DEVICE, PretendedGpu
from tests.helpers.problems import GATHERS, Problem, integers
from tests.helpers.uneven import Uneven

RANK, GROUP_SIZE = 1, 4
SLOT_BYTES = 1 << 17  # the aligned problems take two rounds or more
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ALIGNED = [  # one for each op, whose tiles are boxes
    Problem("aligned", (256, 512), 256, 0, 1),
    Problem("aligned", (256, 128), 256, 1, 0, op="all_to_all_matmul"),
    Problem("aligned", (256, 512), (256, 128), 0, op="all_gather_matmul"),
    Problem("aligned", (256, 512), 256, scatter_dim=0, op="matmul_reduce_scatter"),
    Problem("aligned", (1024, 512), 256, op="matmul_all_reduce"),
]
RAGGED = [problem for problem in ALL_PROBLEMS if problem.name == "ragged"]
UNEVEN = [  # in one round, in which this rank sends to all but one, and gets from all but one
    Uneven("matmul_all_to_all", (33, 4, 64), 2, 0, 1, scatter=(2, 1, 1, 0), bias=True, other=128),
    Uneven("matmul_all_to_all", (33, 2, 64), 2, 0, 1, scatter=((0, 1), (0, 1), (1, 1), (1, 1)), other=128),
    Uneven("all_to_all_matmul", (33, 4, 64), 2, 1, 0, gather=(1, 2, 1, 0), other=128),
    Uneven("all_to_all_matmul", (33, 256), 1, 0, 1, gather=(17, 9, 7, 0), other=128),
    Uneven("all_gather_matmul", (33, 256), 1, 0, gather=(17, 9, 7, 0), other=128, bias=True),
    Uneven("matmul_reduce_scatter", (33, 256), 1, scatter_dim=0, scatter=(17, 9, 7, 0), other=128, bias=True),
]
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u32": 4, "u64": 8}


class LaunchPath:
    """A pretended GPU behind Triton's own driver and launchers. Every launch is checked."""

    def __init__(self, folder: Path, arch: int) -> None:
        dist.init_process_group("fake", rank=RANK, world_size=GROUP_SIZE, store=FakeStore())
        launch_order.native = None  # which takes torch's own streams alone
        self.gpu = PretendedGpu(arch)
        self.device = FakeDriver(folder, arch, self.gpu.tensors, self.gpu.streams)
        from triton.backends.nvidia.driver import CudaDriver
        from triton.runtime.driver import driver

        driver.set_active(CudaDriver())
        self._run = JITFunction.run
        path = self

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return path.launch(function, args, grid, warmup, options)

        JITFunction.run = run
        execute = python_executor.run

        def executed(schedule: Any, memory: Any, op: str, fingerprint: int, inputs: Sequence[Any]) -> Any:
            path.gpu.know(inputs)
            before = len(path.device.launches)
            found = execute(schedule, memory, op, fingerprint, inputs)
            if isinstance(memory, Workspace):
                check_packed(schedule, memory, fingerprint, path.device.launches[before:])
            return found

        python_executor.run = executed

    def launch(self, function: Any, args: Sequence[Any], grid: Any, warmup: bool, options: dict[str, Any]) -> Any:
        before = len(self.device.launches)
        kernel = self._run(function, *args, grid=grid, warmup=warmup, **options)
        reached = self.device.launches[before:]
        if len(reached) != 1:  # Triton leaves out a launch of no programs, and the peers would wait for its signals
            raise Refused(
                f"grid: {function.__name__} must reach the device once, did {len(reached)} times, grid {grid}"
            )
        violations = [
            *argument_violations(reached[0], arguments_of(kernel, args), list(self.gpu.tensors())),
            *start_violations(function.__name__, dict(zip(function.arg_names, args, strict=True))),
        ]
        text = "; ".join(violations)
        if text:
            raise Refused(text)
        return kernel

    def case(self, name: str, call: Callable[[], Any]) -> dict[str, Any]:
        self.gpu.forget()
        enqueued, maps = len(self.device.enqueued), len(self.device.tensor_maps)
        refused = None
        try:
            call()
        except (Refused, AssertionError, RuntimeError, ValueError, triton.runtime.errors.OutOfResources) as error:
            refused = f"{type(error).__name__}: {error}"
        return {
            "case": name,
            "triton": triton.__version__,
            "refused": refused,
            "tensor_maps": len(self.device.tensor_maps) - maps,
            "boxes": [(each.dims, each.strides, each.box) for each in self.device.tensor_maps[maps:]],
            "launches": [_as_json(each) for each in self.device.enqueued[enqueued:]],
        }


def check_packed(schedule: Any, memory: Any, fingerprint: int, reached: Sequence[Launch]) -> None:
    """The native executor's parameters are those of Triton's launcher, but for addresses and tensor maps."""
    works = [step.work for step in schedule.steps if isinstance(step.work, schedules.Launch)]
    for work, launch in zip(works, reached, strict=True):
        _, packed = pack(work, memory.kernels[id(work)][1], memory, fingerprint)
        of_run = {at for at, _ in packed.addresses} | {at for at, *_ in packed.maps}
        for at, data in zip(packed.offsets, launch.arguments, strict=True):
            if at not in of_run and packed.parameters[at : at + len(data)] != data:
                raise Refused(f"packed: {work.kernel} must have {data.hex()} at byte {at}")


def _as_json(enqueued: Launch | Write) -> dict[str, Any]:
    if isinstance(enqueued, Write):
        return {"kernel": "write", "stream": enqueued.stream}
    kernel, grid, shared = enqueued.kernel.name, enqueued.grid[0], enqueued.shared
    facts = {"grid": grid, "shared": shared, "stream": enqueued.stream, "early": EARLY_START in enqueued.attributes}
    return {"kernel": kernel, **facts}


def arguments_of(kernel: Any, args: Sequence[Any]) -> list[Argument]:
    """A compiled kernel's parameters for the arguments of a launch. The last two are pointers to scratch memory."""
    found: list[Argument] = []
    for (name, kind), value in zip(kernel.src.signature.items(), args, strict=False):
        found += _arguments(name, kind, value)
    return [*found, *(Argument(name, 8, bytes(8)) for name in ("global scratch", "profile scratch"))]


def _arguments(name: str, kind: Any, value: Any) -> Iterator[Argument]:
    if isinstance(kind, tuple):
        for i, (each, element) in enumerate(zip(kind, value, strict=True)):
            yield from _arguments(f"{name}[{i}]", each, element)
    elif kind.startswith("tensordesc"):
        yield Argument(name, 128, None)
        for size in value.shape:
            yield Argument(f"{name}.shape", 4, size.to_bytes(4, "little"))
        for stride in value.strides:
            yield Argument(f"{name}.strides", 8, stride.to_bytes(8, "little"))
    elif kind.startswith("*"):
        # a tensor without elements has the address 0, which nothing reads
        yield Argument(name, 8, value.data_ptr().to_bytes(8, "little"), is_pointer=value.numel() > 0)
    elif kind == "fp32":
        yield Argument(name, 4, struct.pack("<f", value))
    elif kind != "constexpr":
        yield Argument(name, _SIZES[kind], value.to_bytes(_SIZES[kind], "little", signed=kind[0] == "i"))


def kernels(path: LaunchPath) -> Iterator[dict[str, Any]]:
    """The launches whose code the compile-only tests read, with every way to load, layout and tile."""
    for name, start in compile_only.problems(path.device.arch):
        yield path.case(name, start)


def ops(path: LaunchPath, problems: Sequence[Problem], dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every problem by both algorithms, through the public functions; gathers also with their by-product."""
    for problem, dtype, algorithm in itertools.product(problems, dtypes, ("chunked", "fused")):
        for by_product in (False, True) if problem.op in GATHERS else (False,):
            with member(path) as workspace, fusedcomm.force_algorithm(algorithm, strict=True):
                found = path.case(str(problem), partial(call, problem, DTYPES[dtype], by_product))
                yield found | _facts(problem.op, dtype, algorithm, by_product, len(problem.ns), workspace)


def uneven(path: LaunchPath) -> Iterator[dict[str, Any]]:
    for case in UNEVEN:
        with member(path) as workspace, fusedcomm.force_algorithm("chunked", strict=True):
            found = path.case(f"ragged {case}", partial(uneven_call, replace(case, dtype=torch.bfloat16)))
            yield found | _facts(case.op, "bfloat16", "chunked", False, 1, workspace) | {"is_uneven": True}


def norms(path: LaunchPath) -> Iterator[dict[str, Any]]:
    """An all_reduce with a norm behind it, both ways, and a reduce_scatter."""
    for way, algorithm in itertools.product(("one_shot", "two_shot", "scattered"), ("chunked", "fused")):
        m, rows, where = (256, 256 // GROUP_SIZE, (0,)) if way == "scattered" else (64, 64, ())
        op = "matmul_reduce_scatter_norm" if where else "matmul_all_reduce_norm"
        x, w, residual = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((m, 512), (512, 256), (rows, 256)))
        given = x, w, residual, torch.ones(256, dtype=torch.bfloat16)
        at_once = mock.patch.object(norm, "goes_at_once", lambda *args, way=way: way == "one_shot")
        with member(path) as workspace, at_once, fusedcomm.force_algorithm(algorithm, strict=True):
            path.gpu.know(given)
            found = path.case(way, partial(getattr(fusedcomm, op), *given, *where))
            yield found | _facts(op, "bfloat16", algorithm, False, 1, workspace)


def experts(path: LaunchPath) -> Iterator[dict[str, Any]]:
    """A dispatch, combines with a matmul and without, and the gradient of one, whose routing only a GPU knows."""
    num_tokens, k, num_experts, capacity, width = 64, 2, 2 * GROUP_SIZE, 160, 256
    ops, where = torch.ops.fusedcomm, (GROUP_SIZE, dist.group.WORLD.group_name)
    x, ids = torch.empty(num_tokens, width, dtype=torch.bfloat16), torch.zeros(num_tokens, k, dtype=torch.int64)
    w, scores = torch.empty(2, width, width, dtype=torch.bfloat16), torch.ones(num_tokens, k)
    cuts = mock.patch.object(routed, "num_pieces", return_value=2)
    with member(path) as workspace, fusedcomm.force_algorithm("fused", strict=True), path.gpu.kept(), cuts:
        path.gpu.know((x, ids, w, scores))
        rows, _, routing = ops.moe_dispatch(x, ids, [], num_experts, capacity, 1, *where)
        path.gpu.know((rows, routing))
        for name, call in {
            "dispatch": partial(ops.moe_dispatch, x, ids, [], num_experts, capacity, 1),
            "dispatch of products": partial(ops.moe_dispatch, x, ids, [w], num_experts, capacity, 1),
            "combine": partial(ops.moe_combine, rows, None, scores, routing, num_tokens, k, False),
            "combine of products": partial(ops.moe_combine, rows, w, scores, routing, num_tokens, k, True),
            "gradient": partial(ops.moe_send, x, scores, routing, k, capacity),
        }.items():
            sends = workspace.streams[0].cuda_stream
            yield path.case(name, partial(call, *where)) | {"epochs": workspace.epoch, "sends": sends}


def _facts(op: str, dtype: str, algorithm: str, by_product: bool, num_ws: int, workspace: Workspace) -> dict[str, Any]:
    return {
        "op": op,
        "dtype": dtype,
        "algorithm": algorithm,
        "by_product": by_product,
        "num_ws": num_ws,
        "epochs": workspace.epoch,
        "streams": dict(zip((each.cuda_stream for each in workspace.streams), ("sends", "reads"), strict=True)),
    }


def views(path: LaunchPath) -> Iterator[dict[str, Any]]:
    """x and w as parts of other tensors, whose strides and addresses decide how a kernel may load them."""
    calls = list(calls_of_views())
    with path.gpu.kept():
        for name, start in calls:
            with member(path), fusedcomm.force_algorithm("fused", strict=True):
                yield path.case(name, start)


def calls_of_views() -> Iterator[tuple[str, Callable[[], Any]]]:
    made = partial(torch.empty, dtype=torch.bfloat16)
    x, w = made(72, 512), made(512, 1024)  # more rows than go to cuBLAS
    shifted = made(512 * 1024 + 1)[1:]
    operands = {
        "a row of a wider x": (made(1, 1003)[:, :512], w),
        "x behind an odd address": (shifted[: 72 * 512].view(72, 512), w),
        "w behind an odd address": (x, shifted.view(512, 1024)),
        "columns of a wider w": (x, made(512, 2048)[:, 8:1032]),
        "columns of an odd w": (x, made(512, 1031)[:, :1024]),
        "one row repeated as w": (x, made(1, 1024).expand(512, 1024)),
        "one column repeated as w": (x, made(512, 1).expand(512, 1024)),
        "rows of w that overlap": (x, made(512 * 8 + 1024).as_strided((512, 1024), (8, 1))),
        "batches of w apart": (made(2, 64, 512), made(2, 520, 1024)[:, :512]),
    }
    for name, (x, w) in operands.items():
        dims = x.dim() - 2, x.dim() - 1
        yield f"push, {name}", partial(fusedcomm.matmul_all_to_all, x, w, *dims)
        yield f"gather, {name}", partial(fusedcomm.all_gather_matmul, x, w, dims[0])


def call(problem: Problem, dtype: torch.dtype, by_product: bool) -> Any:
    inputs = integers(problem, RANK, GROUP_SIZE, dtype)
    if by_product:
        return getattr(torch.ops.fusedcomm, problem.op)(*problem.dispatched(inputs, by_product=True))
    return problem.call(inputs)


def uneven_call(case: Uneven) -> Any:
    return case.call(case.inputs(GROUP_SIZE)[RANK], None, GROUP_SIZE)


@contextmanager
def member(path: LaunchPath) -> Iterator[Workspace]:
    """This rank's part in WORLD, without a vote. Each case has a workspace: a refused call breaks its own."""
    group = VirtualGroup(GROUP_SIZE, SLOT_BYTES, "cuda")
    workspace = group.workspaces[RANK]
    topology = Topology(None, None, Workspace.num_bytes(GROUP_SIZE, SLOT_BYTES), None)
    ours = Member(RANK, GROUP_SIZE, dist.group.WORLD.group_name, DEVICE, None, topology, workspace=workspace)
    of_calls = (mock.patch.object(module, "member", lambda *args: ours) for module in (dispatch, routed))
    with next(of_calls), next(of_calls), path.gpu.kept():
        yield workspace


def planted(path: LaunchPath) -> Iterator[dict[str, Any]]:
    """One launch and one write as they are, then with one defect at a time."""
    push = compile_only.PushRound((512,), 256, 1024, 0, 1, bias=True).push
    yield path.case("nothing", push)
    words, stream = torch.zeros(2, dtype=torch.int64), torch.cuda.Stream()
    with path.gpu.kept():
        yield path.case("write", lambda: stream_writes.write(stream, words.data_ptr() + 8, 1))
        yield path.case("word", lambda: stream_writes.write(stream, words.data_ptr() + 4, 1))
    cut_anywhere = compile_only.PushRound((512,), 256, 4 * 262, 0, 1, bias=True).push
    yield path.case("cut anywhere", cut_anywhere)
    with mock.patch.object(launches, "column_shift", lambda *args: 0):
        yield path.case("start", cut_anywhere)
    for name, plant in _plants(path).items():
        with plant:
            yield path.case(name, push)


def _plants(path: LaunchPath) -> dict[str, AbstractContextManager[Any]]:
    from triton.runtime.driver import driver

    utils = driver.active.utils
    described = partial(_described, "describe_w")
    fill = "fill_tma_descriptor_tiled" if hasattr(utils, "fill_tma_descriptor_tiled") else "fill_tma_descriptor"
    encode, run = getattr(utils, fill), path._run

    def encoded(index: int, value: Any) -> AbstractContextManager[Any]:
        """fill(address, swizzle, element size, element type, box, shape, strides, padding)"""
        return mock.patch.object(utils, fill, lambda *args: encode(*args[:index], value, *args[index + 1 :]))

    def launched(
        num_warps: int | None = None, num_ctas: int = 1, shared: int | None = None
    ) -> AbstractContextManager[Any]:
        def changed(function: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            kernel = run(function, *args, warmup=True, **options)
            own = kernel.packed_metadata
            kernel.packed_metadata = (num_warps or own[0], num_ctas, own[2] if shared is None else shared)
            try:
                return run(function, *args, warmup=warmup, **options)
            finally:
                kernel.packed_metadata = own

        return mock.patch.object(path, "_run", changed)

    def widened(found: Described) -> Described:
        return found._replace(strides=(found.strides[0] + 4, *found.strides[1:]))

    def shifted(found: Described) -> Described:
        place = found.place._replace(offset=found.place.dtype.itemsize, sizes=(1,), strides=(1,))
        return found._replace(place=place)

    segments = torch.arange(GROUP_SIZE)  # PretendedGpu does not hear of it: it is no tensor of the call
    return {
        "stride": described(widened),
        "address": described(shifted),
        "end": described(_one_more),
        "box": encoded(4, [512, 64]),
        "swizzle": encoded(1, 1),
        "grid": mock.patch.object(launches, "programs", lambda *args: 0),
        "block": launched(num_warps=16),
        "cluster": launched(num_ctas=2),
        "shared": launched(shared=300 << 10),
        "pointer": mock.patch.object(compile_only.MetaWorkspace, "segments", _Always(segments), create=True),
    }


def slots(path: LaunchPath) -> Iterator[dict[str, Any]]:
    """A gather as it is, then with a defect of its descriptor of the slots."""
    gather = compile_only.GatherRound((512, 256), 1024, 0, bias=True).gather
    yield path.case("nothing", gather)

    def closer(found: Described) -> Described:
        return found._replace(strides=(found.shape[2], *found.strides[1:]))

    for name, change in {"a slot more": _one_more, "slots that overlap": closer}.items():
        with _described("describe_slots", change):
            yield path.case(name, gather)


def _one_more(found: Described) -> Described:
    return found._replace(shape=(found.shape[0] + 1, *found.shape[1:]))


def _described(name: str, change: Callable[[Described], Described]) -> AbstractContextManager[Any]:
    """The descriptor that a function of launches plans is changed."""
    describe = getattr(launches, name)
    return mock.patch.object(launches, name, lambda *args: change(describe(*args)))


class _Always:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self.value

    def __set__(self, instance: Any, value: Any) -> None:
        pass


SUITES: dict[str, Callable[[LaunchPath], Iterator[dict[str, Any]]]] = {
    "kernels": kernels,
    "planted": planted,
    "slots": slots,
    "few": partial(ops, problems=[*RAGGED, *ALIGNED], dtypes=["bfloat16"]),
    "all": partial(ops, problems=[*ALL_PROBLEMS, *ALIGNED], dtypes=list(DTYPES)),
    "uneven": uneven,
    "views": views,
    "norms": norms,
    "experts": experts,
}


def main(folder: Path, arch: int, *suites: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = LaunchPath(folder, arch)
    for suite in suites:
        for found in SUITES[suite](path):
            print(json.dumps({"suite": suite} | found), flush=True)


# Starts of TMA loads: one in the contiguous dim that is no multiple of 16 bytes is an illegal instruction, which ends
# the CUDA context. The driver does not see it, as tensor maps say nothing of coordinates.
ALIGNMENT = 16  # bytes


def start_violations(kernel: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """The rule broken by the loads that a launch of a matmul can reach."""
    if kernel not in ("push_matmul_kernel", "gather_matmul_kernel") or not arguments["TRAITS"].by_tma:
        return
    itemsize = _itemsize(arguments["w"])
    starts = _push_starts(arguments) if kernel == "push_matmul_kernel" else _gather_starts(arguments)
    for name, start in starts:
        if start * itemsize % ALIGNMENT:
            yield f"tensor map start of {name}: it must be a multiple of 16 bytes, got {start} * {itemsize}"
            return


def _itemsize(descriptor: Any) -> int:
    """The address of Triton's descriptor, or of a planned one."""
    return descriptor.place.dtype.itemsize if isinstance(descriptor, Described) else descriptor.base.itemsize


def _has_parts(descriptor: Any) -> bool:
    """Whether the sources' parts of K have a dim of their own."""
    return len(descriptor.shape) == 3


def _push_starts(arguments: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    tile, traits, num_k = arguments["TILE"], arguments["TRAITS"], arguments["sizes"].K
    for k in range(0, num_k, tile.block_k):
        yield "x", k
    if not traits.w_transposed:
        for peer in range(arguments["LAYOUT"].group_size):
            for start in _cut_starts(Span(*arguments["spans"][2]), peer, tile.block_n, traits.shift):
                yield "w", start


def _gather_starts(arguments: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    tile, traits, columns = arguments["TILE"], arguments["TRAITS"], Span(*arguments["spans"][2])
    for peer in range(arguments["LAYOUT"].group_size):
        for k in range(0, columns.size, tile.block_k):
            yield "slots", k
            if traits.w_transposed and (not traits.split_k or _has_parts(arguments["w"])):
                yield "w", k
        if traits.w_transposed and traits.split_k and not _has_parts(arguments["w"]):
            for start in _cut_starts(columns, peer, tile.block_k, 0):
                yield "w", start
    if not traits.w_transposed:
        yield "w", tile.block_n  # columns of w are not split


def _cut_starts(span: Span, peer: int, block: int, shift: int) -> Iterator[int]:
    """The index at which each tile of a Span begins, as kernels/triton/matmul.py:column_range has it."""
    if span.size == 0:
        return
    in_run = num_cuts(Span(span.inner, 0, span.inner, 0, 0), block, True, shift)
    for run in range(-(-span.size // span.inner)):
        begin = span.first(peer) + run * span.outer_stride
        for tile in range(in_run):
            yield begin + tile * block - begin % (shift + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
