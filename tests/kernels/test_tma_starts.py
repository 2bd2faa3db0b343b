"""Every TMA load begins at a multiple of 16 bytes, whatever the sizes of a call."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from fusedcomm.plan import launches
from fusedcomm.plan.builder import Builder, layout_of
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.schedule import Launch
from fusedcomm.run.launching import kernel
from tests.helpers.tma_starts import start_violations
from tests.helpers.virtual_ranks import virtual_ranks

NUM_CALLS = 1500
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.virtual_ranks.ARCHITECTURE", 90)


def size(random: Random) -> int:
    """Often one that boxes need, or next to it."""
    return max(1, random.choice([1, 8, 16, 64, 128]) * random.randint(1, 5) + random.choice([0, 0, -1, 4, 12]))


def weight(random: Random, num_k: int, num_n: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_k, num_n], K or N contiguous, in rows that begin at multiples of 16 bytes or anywhere."""
    unit = random.choice([1, 8])
    if random.random() < 0.5:
        return torch.empty(num_k, num_n + -num_n % unit, dtype=dtype)[:, :num_n]
    return torch.empty(num_n, num_k + -num_k % unit, dtype=dtype)[:, :num_k].T


class Call(NamedTuple):
    exchange: Exchange
    x: torch.Tensor  # of a push; the result of a gather
    w: torch.Tensor
    is_push: bool


def draw(random: Random) -> Call:
    group_size, dtype = random.choice([2, 3, 4, 8]), random.choice(DTYPES)
    rows, heads, dim = size(random), random.randint(1, 4), size(random)
    if random.random() < 0.5:
        k, split = 8 * random.randint(1, 20), group_size * dim
        x = torch.empty(rows, k, dtype=dtype)
        for_heads = {
            None: (split, 1),
            (heads, split): (heads * split, 2),
            (heads, 2 * group_size, dim): (heads * 2 * split, 2),
        }
        out_shape, (n, scatter_dim) = random.choice(list(for_heads.items()))
        w = weight(random, k, n, dtype)
        if random.random() < 0.3 and out_shape is None:
            return Call(shapes.matmul_reduce_scatter(x.shape, w.shape, "sum", 1, group_size), x, w, True)
        return Call(shapes.matmul_all_to_all(x.shape, w.shape, out_shape, 0, scatter_dim, group_size), x, w, True)
    n, scattered = size(random), group_size * rows
    op, shape, gather_dim = random.choice(
        [
            ("all_gather_matmul", (rows, dim), 0),
            ("all_gather_matmul", (rows, dim), 1),
            ("all_to_all_matmul", (scattered, heads, 3, dim), 2),
            ("all_to_all_matmul", (scattered, heads, dim), 2),
        ]
    )
    k = math.prod(shape[1:]) * (group_size if gather_dim > 0 else 1)
    w = weight(random, k, n, dtype)
    if op == "all_gather_matmul":
        exchange = shapes.all_gather_matmul(shape, [w.shape], gather_dim, group_size)
    else:
        exchange = shapes.all_to_all_matmul(shape, w.shape, gather_dim, 0, group_size)
    return Call(exchange, torch.empty(exchange.out_shapes[0], dtype=dtype), w, False)


def matmuls(random: Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """The kernel and arguments of each matmul that a random call launches."""
    call = draw(random)
    ranks = virtual_ranks(call.exchange.group_size, 1 << 10)
    rank = random.choice(ranks)
    numel = max(call.exchange.row_numel, call.exchange.chunk_numel // random.choice([1, 1, 2, 5]))
    for spans in call.exchange.rounds(numel):
        s = Builder(rank.memory_facts(), rank.device_facts(), [layout_of(call.x), layout_of(call.w)])
        x, w = s.inputs
        if call.is_push:
            launches.push(s, x, w, None, spans)
        else:
            launches.gather_matmul(s, x, w, None, spans, end_round=True)
        for work in (step.work for step in s.finish().steps if isinstance(step.work, Launch)):
            function = kernel(work.kernel)
            yield function.fn.__name__, dict(zip(function.arg_names, work.arguments, strict=True))


def violations(seed: int) -> tuple[list[str], Counter[tuple[Any, ...]]]:
    """Violations of random calls, and the number of launches of each kind that load by TMA."""
    random, found, by_tma = Random(seed), list[str](), Counter[tuple[Any, ...]]()
    for _ in range(NUM_CALLS):
        for name, arguments in matmuls(random):
            if "TRAITS" not in arguments:
                continue
            traits = arguments["TRAITS"]
            by_tma[name, traits.w_transposed, traits.split_k, traits.shift > 0] += traits.by_tma
            found += start_violations(name, arguments)
    return found, by_tma


def test_loads_of_random_calls() -> None:
    found, by_tma = violations(seed=1)
    assert not found
    kinds = {(name, *flags) for (name, *flags), count in by_tma.items() if count > 0}
    push = {("push_matmul_kernel", False, False, shifted) for shifted in (False, True)}
    gather = {("gather_matmul_kernel", *flags, False) for flags in itertools.product((False, True), repeat=2)}
    assert kinds == push | gather | {("push_matmul_kernel", True, False, False)}


def test_without_a_shift_a_load_begins_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: 98ac104 had none, and an H200 lost its context."""
    monkeypatch.setattr(launches, "column_shift", lambda *args: 0)
    found, _ = violations(seed=1)
    assert found and all(text.startswith("tensor map start of w") for text in found)
