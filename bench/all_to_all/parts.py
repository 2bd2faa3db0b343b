"""The parts of cases, each alone: their compute, checks included, and their communication."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fusedcomm.bench.all_to_all.case_call import CaseCall
from fusedcomm.bench.all_to_all.data import SuiteData
from fusedcomm.runtime.device_to_host import DeviceToHost

CasePart = Callable[[SuiteData, CaseCall], None]


def compute(data: SuiteData, call: CaseCall) -> None:
    y = data.produce()
    data.unrelated()
    call.check(y, data.sent)


def compute_twice(data: SuiteData, call: CaseCall) -> None:
    y = data.produce()
    data.unrelated()
    call.check(y, data.sent)
    z = y + 1
    data.unrelated()
    call.check(z, data.sent + 1)


def compute_with_sum(data: SuiteData, call: CaseCall) -> None:
    y, addend = data.produce(), data.addend.clone()
    data.unrelated()
    call.check(y, data.sent)
    call.check(addend, data.addend)


def all_to_all(data: SuiteData, call: CaseCall) -> None:
    received = torch.empty_like(data.sent)
    call.waited(lambda: dist.all_to_all_single(received, data.sent))
    if call.keep:
        call.check(received, data.expected)


def all_to_all_twice(data: SuiteData, call: CaseCall) -> None:
    all_to_all(data, call)
    all_to_all(data, call)


def all_to_all_and_sum(data: SuiteData, call: CaseCall) -> None:
    all_to_all(data, call)
    total = data.addend.clone() if call.keep else data.zeros
    call.waited(lambda: dist.all_reduce(total))
    if call.keep:
        call.check(total, data.total)


def copy_to_host(data: SuiteData, call: CaseCall) -> None:
    copied = DeviceToHost(data.sent)
    call.waited(copied.wait)
    if call.keep:
        call.check(copied.wait(), data.sent.cpu())


def all_to_all_and_copy(data: SuiteData, call: CaseCall) -> None:
    all_to_all(data, call)
    copy_to_host(data, call)
