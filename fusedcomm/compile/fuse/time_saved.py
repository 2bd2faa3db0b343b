"""Estimates from sizes alone the time that a fused op saves per call, roughly, to rank collectives.

It is the time of the plain collective, as far as the matmul is long enough to hide it, and of the saved layout copies.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import assumed, hint
from fusedcomm.compile.graph.matmuls import Product
from fusedcomm.compile.graph.views import value
from fusedcomm.memory import members
from fusedcomm.memory.topology import tf32_allowed
from fusedcomm.plan.cost.model import DEFAULTS, Constants
from fusedcomm.plan.planner import constants_of, dtype_name

SizeOf: TypeAlias = "Callable[[int | torch.SymInt], int]"
LAYOUT_COPIES = {"all_to_all": 2, "all_gather": 1, "reduce_scatter": 1}  # at most, before sending and after arrival


def saving_us(collective: Collective, products: Sequence[Product]) -> float:
    device = value(collective.sent).device
    member = members.known_member(collective.group_name, device)
    constants = DEFAULTS.get(device.type, DEFAULTS["cuda"]) if member is None else constants_of(member)
    # on CPUs at best in a group that is known to span hosts
    beside = constants.device_type != "cpu" or (member is not None and member.topology.across is not None)
    return _saving(collective, products, constants, hint, beside) * 1e6


def seconds_left(collective: Collective, products: Sequence[Product]) -> float:
    """Time that a program waits for the collective, fused with ``products``, if there are any.

    The same on all ranks: it depends neither on tuned numbers nor on sizes of symbols.
    """
    constants = DEFAULTS.get(value(collective.sent).device.type, DEFAULTS["cuda"])
    seconds, beside = _exchange(collective, constants, assumed), constants.device_type != "cpu"
    return max(0.0, seconds - _saving(collective, products, constants, assumed, beside)) if products else seconds


def _saving(
    collective: Collective, products: Sequence[Product], constants: Constants, size: SizeOf, beside: bool
) -> float:
    """``beside``: whether the exchange runs beside the matmul; else there is none, as ranks write to each other."""
    exchange = _exchange(collective, constants, size)
    if not beside:
        return exchange
    group_size = collective.group_size
    matmul = sum(_matmul(product, constants, size) for product in products)
    copies = LAYOUT_COPIES.get(collective.kind, 0) * constants.copy(_num_bytes(collective, size))
    return min(exchange, matmul * (group_size - 1) / group_size) + copies


def _exchange(collective: Collective, constants: Constants, size: SizeOf) -> float:
    group_size = collective.group_size
    return constants.collective(collective.kind, _num_bytes(collective, size) / group_size, group_size)


def _num_bytes(collective: Collective, size: SizeOf) -> float:
    sent = value(collective.sent)
    sent_bytes = math.prod(map(size, sent.shape)) * sent.dtype.itemsize
    return sent_bytes * (collective.group_size if collective.kind == "all_gather" else 1)


def _matmul(product: Product, constants: Constants, size: SizeOf) -> float:
    seconds, tf32 = 0.0, constants.device_type == "cuda" and tf32_allowed()
    for x, w in zip(product.xs, product.ws, strict=True):
        *batches, m, k = map(size, value(x).shape)
        dtype = dtype_name(value(x).dtype, tf32)
        seconds += constants.matmul(dtype, math.prod(batches), m, k, size(value(w).shape[-1]))
    return seconds
