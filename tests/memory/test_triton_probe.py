"""Triton is believed where a kernel of it has run: machines without a compiler or without Python's headers run unfused,
on all ranks together.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fusedcomm.memory import signals, topology, triton_probe
from fusedcomm.plan import planner
from fusedcomm.plan.cost import links, tuned
from tests.helpers.groups import fresh_group
from tests.helpers.on_ranks import on_ranks

pytest.importorskip("triton")

CPU = torch.device("cpu")


def test_a_signal_that_arrives_is_proof() -> None:
    """The interpreter stands in for the GPU: the kernel and its arguments are the real ones."""
    assert triton_probe.cannot_launch(CPU) is None


def test_a_launch_that_does_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "signal", lambda *args: None)
    assert triton_probe.cannot_launch(CPU) == "Triton cannot run a kernel (a signal of 0x70be was 0x0)"


MACHINES = """
import json, os, sys, sysconfig
import torch
from triton.backends.nvidia.driver import CudaDriver
from fusedcomm.memory import triton_probe

CudaDriver.is_active = staticmethod(lambda: True)
no_headers = sysconfig.get_paths(vars={"base": os.environ["EMPTY"], "installed_base": os.environ["EMPTY"]})
found = []
for change in ({"PATH": os.environ["EMPTY"]}, {}):
    before = dict(os.environ)
    os.environ.update(change)
    found.append(triton_probe.cannot_launch(torch.device("cpu")))
    os.environ.update(before)
    sysconfig.get_paths = lambda *args, **kwargs: no_headers
print(json.dumps(found))
"""


@pytest.mark.thorough
def test_a_machine_without_a_compiler_or_headers(tmp_path: Path) -> None:
    env = dict(os.environ, EMPTY=str(tmp_path), TRITON_LIBCUDA_PATH=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path))
    for name in ("CC", "TRITON_INTERPRET"):
        env.pop(name, None)
    run = subprocess.run([sys.executable, "-c", MACHINES], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    no_compiler, no_headers = json.loads(run.stdout)
    assert no_compiler.startswith("Triton cannot run a kernel (Failed to find C compiler")
    assert no_headers.startswith("Triton cannot build its launcher: ")
    assert no_headers.endswith(" ended with 1; it needs Python.h")
    assert "Python.h: No such file or directory" in run.stderr


@contextmanager
def gpus(rank: int, cannot_launch: str | None) -> Iterator[Any]:
    gpu = SimpleNamespace(uuid=str(rank), major=9, minor=0)
    with (
        fresh_group() as group,
        mock.patch("torch.cuda.get_device_properties", lambda device: gpu),
        mock.patch.multiple(tuned, key=lambda *args: {}, read=lambda key: None),
        mock.patch.object(triton_probe, "cannot_launch", lambda device: cannot_launch),
    ):
        yield topology.probe(group, torch.device("cuda", rank))[0]
        dist.barrier(group)


@on_ranks(2)
def test_one_rank_whose_kernels_do_not_run_makes_all_unfused(rank: int) -> None:
    with gpus(rank, "Triton cannot run a kernel (a compiler)" if rank == 1 else None) as voted:
        assert voted.no_workspace == "rank 1: Triton cannot run a kernel (a compiler)"


@on_ranks(2)
def test_gpus_without_nvlink_are_planned_by_pcie(rank: int) -> None:
    nvml = mock.Mock(nvmlDeviceGetP2PStatus=lambda *args: rank, NVML_P2P_STATUS_OK=0)
    with mock.patch.dict(sys.modules, pynvml=nvml), gpus(rank, None) as voted:
        assert voted.no_workspace == "no NVLink peer access between the GPUs of ranks 1 and 0 (NVML status 1)"
        constants = planner.constants_of(SimpleNamespace(topology=voted, device=torch.device("cuda")))
        assert set(constants.backend_bandwidth.values()) == {links.PCIE_BANDWIDTH}
