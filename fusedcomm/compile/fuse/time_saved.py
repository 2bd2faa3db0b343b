"""Estimates from sizes alone how much time a fused op saves per call: what the program would wait for without it.

The planner's model (`cost`) is used roughly, to rank collectives: it gives the time of the plain collective, as far as
the matmul is long enough to hide it, and of the layout copies that are saved. Its numbers are tuned ones, if the group
has come together and has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from fusedcomm.algorithms.planner import dtype_name
from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import hint
from fusedcomm.compile.graph.matmuls import Product
from fusedcomm.compile.graph.views import value
from fusedcomm.cost.model import DEFAULTS, Constants
from fusedcomm.runtime import members

LAYOUT_COPIES = {"all_to_all": 2, "all_gather": 1, "reduce_scatter": 1}  # at most, before sending and after arrival


def saving_us(collective: Collective, products: Sequence[Product]) -> float:
    sent, group_size = value(collective.sent), collective.group_size
    constants = _constants(collective.group_name, sent.device)
    sent_bytes = math.prod(map(hint, sent.shape)) * sent.dtype.itemsize
    all_bytes = sent_bytes * (group_size if collective.kind == "all_gather" else 1)
    exchange = constants.collective(collective.kind, all_bytes / group_size, group_size)
    if constants.device_type == "cpu":  # nothing runs beside the matmul, so all of gloo's time is saved
        return exchange * 1e6
    matmul = sum(_matmul(product, constants) for product in products)
    copies = LAYOUT_COPIES.get(collective.kind, 0) * constants.copy(all_bytes)
    return (min(exchange, matmul * (group_size - 1) / group_size) + copies) * 1e6


def _matmul(product: Product, constants: Constants) -> float:
    seconds = 0.0
    for x, w in zip(product.xs, product.ws, strict=True):
        *batches, m, k = map(hint, _shape(x))
        dtype = dtype_name(value(x).dtype, constants.device_type)
        seconds += constants.matmul(dtype, math.prod(batches), m, k, hint(_shape(w)[-1]))
    return seconds


def _constants(group_name: str, device: torch.device) -> Constants:
    member = members.known_member(group_name, device)
    tuned = member.topology.constants if member is not None else None
    return tuned or DEFAULTS.get(device.type, DEFAULTS["cuda"])


def _shape(node: Node) -> torch.Size:
    return value(node).shape
