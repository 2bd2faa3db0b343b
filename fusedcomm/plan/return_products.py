"""The launch of the matmul of experts' rows, which go straight to the ranks whose choices they are."""

import math
from collections.abc import Sequence

from torch import Tensor

from fusedcomm.kernels.triton.bundles import Sizes, Span, Traits
from fusedcomm.plan import launches, tiles
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.descriptors import can_describe_w, can_describe_x, describe_x, unit
from fusedcomm.plan.schedule import Table


def return_products(s: Builder, h: Tensor, w: Tensor, rows: Sequence[Tensor]) -> None:
    """h [capacity, K], of which the host knows no expert's rows; w [E / R, K, N]. ``rows``: tensors behind them."""
    h, w = s.contiguous(h), launches.matrices(s, w)
    capacity, (own, num_k, num_n) = len(h), w.shape
    parts = 1, num_k % tiles.BLOCK_K == 0
    aligned = math.gcd(16 // h.itemsize, num_n)
    # Narrow stores to rows anywhere take registers that the widest tiles do not leave.
    describable = can_describe_x(s, h) and can_describe_w(s, w, *parts) and aligned * h.itemsize == 16
    shape = tiles.Shape(own, _run(-(-capacity // own)), _run(num_n), num_k, 1)  # as if they were equal
    row_major = () if w.stride(2) != 1 else (num_n,)
    is_aligned = launches.aligned(w, num_k, *row_major)
    config = launches.matmul_config(s, w, shape, "push", describable, is_aligned, None, h.dtype)
    use_tma = s.device.has_tma and describable
    traits = Traits(
        use_tma,
        w.stride(2) != 1,
        rows_in_runs=2,
        columns_in_runs=2,
        even_k=num_k % config.block_k == 0,
        allow_tf32=s.device.allow_tf32,
        n_unit=unit(h.itemsize, num_n),
        **launches.loaded_units(w, use_tma),
    )
    arguments = (
        describe_x(s, h, config) if use_tma else s.place(h),
        launches.weights(s, w, None, config, use_tma, parts)[0],
        *map(s.place, rows),
        Table(),
        Sizes(capacity, num_n, num_k, *w.stride(), 0, s.memory.slot_bytes),
        own,
        *launches.of_round(s),
        config,
        traits,
        aligned,
        1 << (own - 1).bit_length(),
    )
    options = {"num_warps": config.num_warps, "num_stages": launches.num_stages(s, config, use_tma)}
    if config.num_warps < 8:
        options["maxnreg"] = launches.ALL_REGISTERS
    num_tiles = (-(-capacity // config.block_m) + own) * -(-num_n // config.block_n)
    launches.launch(
        s, "grouped_matmul.grouped_matmul_kernel", launches.programs(s, "push", num_tiles), arguments, **options
    )


def _run(size: int) -> Span:
    return Span(size, 0, max(size, 1), 0, 0)
