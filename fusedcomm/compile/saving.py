"""About how much time a fused op saves per call, from sizes alone: what the program would wait for without it.

A rough model, to rank collectives by: the wire at its peak, as far as the matmul is long enough to hide it, and the
layout copies that go. The constants are those of an H100 over NVLink, and of two CPU cores with gloo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusedcomm.compile.chain import value
from fusedcomm.compile.collectives import Collective
from fusedcomm.compile.layout import hint
from fusedcomm.compile.product import Product


@dataclass(frozen=True)
class Machine:
    flops: float  # per second, of a 16 bit matmul
    wire: float  # bytes per second that a rank sends
    memory: float  # bytes per second
    latency_us: float  # of a collective


MACHINES = {
    "cuda": Machine(flops=790e12, wire=450e9, memory=3.35e12, latency_us=20),
    "cpu": Machine(flops=80e9, wire=2e9, memory=10e9, latency_us=100),
}
LAYOUT_COPIES = {"all_to_all": 2, "all_gather": 1, "reduce_scatter": 1}  # at most: before it is sent, after it arrives


def saving_us(collective: Collective, products: Sequence[Product]) -> float:
    sent = value(collective.sent)
    machine = MACHINES.get(sent.device.type, MACHINES["cuda"])
    remote = (collective.group_size - 1) / collective.group_size
    num_bytes = math.prod(map(hint, sent.shape)) * sent.dtype.itemsize
    rounds = {"all_gather": collective.group_size - 1.0, "all_reduce": 2 * remote}.get(collective.kind, remote)
    wire_us = num_bytes * rounds / machine.wire * 1e6 + machine.latency_us
    if sent.device.type == "cpu":  # nothing runs beside the matmul: what goes is the way through gloo
        return wire_us
    matmul_us = sum(map(flops, products)) / machine.flops * 1e6
    copied = LAYOUT_COPIES.get(collective.kind, 0) * 2 * num_bytes
    return min(wire_us, matmul_us * remote) + copied / machine.memory * 1e6


def flops(product: Product) -> int:
    pairs = zip(product.xs, product.ws, strict=True)
    return sum(2 * math.prod(map(hint, _shape(x))) * hint(_shape(w)[-1]) for x, w in pairs)


def _shape(node: Node) -> torch.Size:
    return value(node).shape
