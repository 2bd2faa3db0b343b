"""The abilities of a group on a device type. All ranks vote once on every rank's facts, and so plan alike."""

import ctypes
import functools
import importlib.util
import logging
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fusedcomm import env
from fusedcomm.kernels import native_part
from fusedcomm.memory import group, triton_probe
from fusedcomm.memory.departures import Departures, own_life
from fusedcomm.memory.vote import agree
from fusedcomm.plan import tiles
from fusedcomm.plan.cost import tuned
from fusedcomm.plan.cost.links import INTER, PCIE, Reach
from fusedcomm.plan.cost.model import Constants

log = logging.getLogger("fusedcomm")

MOST_GPU_RANKS = 32  # a thread each of the smallest kernels looks at their flags
_EARLY_IN_GRAPHS = 12030  # the driver from which a graph holds early launches


@dataclass(frozen=True)
class Topology:
    """The outcome of a group's votes; equal on all ranks. A reason is None if nothing is in the way."""

    no_workspace: str | None  # why chunked and fused cannot run
    no_fused: str | None  # why fused cannot run even with a workspace
    workspace_bytes: int  # the smallest cap of all ranks
    algorithm: str | None  # FUSEDCOMM_ALGORITHM
    constants: Constants | None = None  # by `fusedcomm tune`; None: the defaults of the device
    check: bool = False  # FUSEDCOMM_CHECK of any rank
    ranks_per_gpu: int = 1  # the most that share one; each rank's kernels get their part of its multiprocessors
    tf32: bool = False  # whether all ranks allowed TF32 at the vote; for estimates alone
    prove: bool = False  # whether an algorithm must be proved before it is used
    plan_bytes: int = 256 << 20  # the smallest FUSEDCOMM_PLAN_BYTES of all ranks
    backend: str = ""  # of the group's own collectives on this device type
    across: Reach | None = None  # None on a single host with NVLink
    backend_sums: bool = False  # FUSEDCOMM_BACKEND_SUMS of all ranks
    no_float8: str | None = None  # why fused cannot run on float8

    def name_of_proof(self, kind: str, algorithm: str, dtype: torch.dtype, uneven: bool) -> str:
        """``uneven``: with parts of different sizes, separate code in the algorithms."""
        name = f"{kind} {algorithm} {str(dtype).removeprefix('torch.')}{' uneven' if uneven else ''}"
        if algorithm == "pipelined" and self.backend_sums:
            return f"{name} with sums of the backend"
        return name


def probe(pg: ProcessGroup, device: torch.device) -> tuple[Topology, Departures | None]:
    """The group's Topology, by a bounded collective, and this rank's watch over its peers.

    GPUs vote twice: on facts, then on NVML's answer for each pair.
    """
    rank, group_size = pg.rank(), pg.size()
    if dist.get_backend(pg) == "fake":
        reason = "a fake process group has no peers"
        return Topology(reason, None, env.workspace_bytes(), env.algorithm(), backend="fake"), None
    store = group.store(pg, f"topology/{device.type}")
    constants = None
    own = _settings(device) | {"prove": _must_prove(device)} | own_life()
    try:
        constants = tuned.read(tuned.key(device, group_size))
        own |= _found(device) | {"constants": constants.digest if constants else None}
    except OSError as error:  # without descriptors, say; the peers wait to hear of it
        reason = f"it cannot find out what it can do ({error})"
        own |= {"host": "", "no_fused": None, "no_float8": None, "no_workspace": reason, "uuid": "", "index": None}
        own["constants"] = None
    facts = agree(store, rank, group_size, own, what="fusedcomm topology vote")
    no_workspace, across = _no_workspace(facts), _across([fact["host"] for fact in facts])
    if no_workspace is None and device.type == "cuda":
        verdict = {"reason": _no_peer_access(rank, *([fact[key] for fact in facts] for key in ("uuid", "index")))}
        verdicts = agree(store, rank, group_size, verdict, what="fusedcomm peer access vote")
        no_workspace = next((v["reason"] for v in verdicts if v["reason"]), None)
        if no_workspace and no_workspace.startswith("no NVLink"):
            across = Reach(PCIE, group_size, group_size - 1)
    if no_workspace is not None or not _all_have_the_same(facts, rank):  # measured with a workspace
        constants = None
    voted = Topology(
        no_workspace,
        no_fused=next((fact["no_fused"] for fact in facts if fact["no_fused"]), None),
        no_float8=next((fact["no_float8"] for fact in facts if fact["no_float8"]), None),
        workspace_bytes=min(fact["workspace_bytes"] for fact in facts),
        algorithm=_same(facts, "algorithm", "FUSEDCOMM_ALGORITHM"),
        plan_bytes=min(fact["plan_bytes"] for fact in facts),
        constants=constants,
        check=any(fact["check"] for fact in facts),
        ranks_per_gpu=_ranks_per_gpu([fact["uuid"] for fact in facts]),
        tf32=all(fact["tf32"] for fact in facts),
        prove=any(fact["prove"] for fact in facts),
        backend=_backend(pg, device),
        across=across,
        backend_sums=_backend_sums(facts, rank),
    )
    return voted, Departures(group.store(pg, "departures"), rank, facts)


def _must_prove(device: torch.device) -> bool:
    """Algorithms are proved on GPUs, as there are many kinds; on CPUs the tests prove them."""
    return device.type == "cuda" and env.prove()


def tf32_allowed() -> bool:
    """Whether float32 matmuls of this rank may round their inputs to TF32: torch's own switch."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def architecture(device: torch.device) -> int:
    """The key of a device's tables in fusedcomm.plan.tiles. sm_120 has neither wgmma nor tcgen05, so it is sm_80's."""
    if device.type != "cuda":
        return 0
    major, _ = torch.cuda.get_device_capability(device)
    return major * 10 if major in (9, 10) else 80


@functools.cache
def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(number) for number in triton.__version__.split(".")[:2])


@functools.cache
def driver_version() -> int:
    """The CUDA driver's, as 12030 of 12.3; 0 without one."""
    version = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def launches_early(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one in front of it ends, also in a CUDA graph."""
    return architecture(device) >= 90 and driver_version() >= _EARLY_IN_GRAPHS and env.early_launch()


def num_sms(device: torch.device) -> int:
    """The multiprocessors that kernels are launched for."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4  # the interpreter runs programs one after another; 4 are enough to share out the tiles


def no_native() -> str | None:
    """Why CPU symmetric memory is missing, or None: then it is registered with torch."""
    if native_part.native is None:
        how = "pip install --no-build-isolation with torch and a C++ compiler builds it"
        return f"the native part of fusedcomm cannot be loaded ({native_part.error}); {how}"
    native_part.native.register_symmetric_memory()
    return None


def _settings(device: torch.device) -> dict[str, Any]:
    return {
        "workspace_bytes": env.workspace_bytes(),
        "plan_bytes": env.plan_bytes(),
        "algorithm": env.algorithm(),
        "check": env.check(),
        "backend_sums": env.backend_sums(),
        "tf32": tf32_allowed(),
    }


def _found(device: torch.device) -> dict[str, Any]:
    """This rank's findings on its machine. Raises OSError."""
    return {
        "host": env.known_host_id(),
        "no_fused": _no_fused(device),
        "no_float8": tiles.refuses_scaled(architecture(device)),
        "no_workspace": no_native() if device.type == "cpu" else _no_kernels(device),
        "uuid": "" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid),
        "index": device.index,
    }


def _no_fused(device: torch.device) -> str | None:
    if device.type == "cuda":
        return None
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "on CPU the fused kernel runs only in Triton's interpreter (TRITON_INTERPRET=1), for tests"
    return _no_triton()


def _no_kernels(device: torch.device) -> str | None:
    """Why nothing but unfused runs on a GPU. chunked needs Triton too: its signals, waits and copy-outs are kernels."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE=1 forbids peer memory"
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return f"compute capability must be at least 8.0, got {properties.major}.{properties.minor}"
    return _no_triton() or triton_probe.cannot_launch(device)


def _no_triton() -> str | None:
    return "Triton is not installed" if importlib.util.find_spec("triton") is None else None


def _no_workspace(facts: list[dict[str, Any]]) -> str | None:
    """The first reason in rank order, so that every rank gives the same one."""
    for rank, fact in enumerate(facts):
        if fact["no_workspace"]:
            return f"rank {rank}: {fact['no_workspace']}"
        if fact["host"] != facts[0]["host"]:
            return f"rank {rank} is on another host than rank 0"
    if facts[0]["uuid"] and len(facts) > MOST_GPU_RANKS:
        return f"kernels wait for at most {MOST_GPU_RANKS} ranks, got {len(facts)}"
    return None


def _backend(pg: ProcessGroup, device: torch.device) -> str:
    """An empty name if the group was made for other devices."""
    try:
        return str(pg._get_backend(torch.device(device.type)).name())
    except RuntimeError:
        return ""


def _across(hosts: list[str]) -> Reach | None:
    """The reach of a group over the ranks' ``hosts``; None on a single host."""
    fewest = min(Counter(hosts).values())
    return None if fewest == len(hosts) else Reach(INTER, len(hosts), len(hosts) - fewest, fewest)


def _ranks_per_gpu(uuids: list[str]) -> int:
    """Ranks on the busiest GPU. An empty UUID is a CPU."""
    return max(Counter(filter(None, uuids)).values(), default=1)


def _no_peer_access(rank: int, uuids: list[str], indices: list[int]) -> str | None:
    """Why this rank's GPU cannot read and write every peer's memory over NVLink (as NVML says), or None."""
    may_overlap = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    if len(set(uuids)) < len(uuids):
        if may_overlap:
            return None
        return "several ranks share one GPU and TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is not 1"
    if len(set(indices)) < len(indices) and not may_overlap:  # which torch's rendezvous takes for one GPU
        names = ", ".join(f"cuda:{index}" for index in indices)
        return f"GPUs of ranks have one name ({names}): show all GPUs to every rank and use cuda:LOCAL_RANK"
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}") for uuid in uuids]
        for index in (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_CAPS_INDEX_WRITE):
            for peer, handle in enumerate(handles):
                if peer == rank:
                    continue
                status = pynvml.nvmlDeviceGetP2PStatus(handles[rank], handle, index)
                if status != pynvml.NVML_P2P_STATUS_OK:
                    return f"no NVLink peer access between the GPUs of ranks {rank} and {peer} (NVML status {status})"
    except Exception as error:  # NVML is missing, MIG, a container: any failure means that access is unproven
        return f"rank {rank}: NVML cannot tell whether its GPU reaches the peers' ({error})"
    return None


def _all_have_the_same(facts: list[dict[str, Any]], rank: int) -> bool:
    """Whether all ranks have the same tuned constants; otherwise no rank uses its own."""
    digests = [fact["constants"] for fact in facts]
    if len(set(digests)) == 1:
        return True
    if rank == 0:
        without = [r for r, digest in enumerate(digests) if digest is None]
        text = f"ranks {without} have none" if without else "they differ between ranks"
        log.warning("tuned numbers are not used, for %s: run `fusedcomm tune` in such a group", text)
    return False


def _backend_sums(facts: list[dict[str, Any]], rank: int) -> bool:
    """Whether all ranks have asked for it. If only some have, the first one says so."""
    having = [r for r, fact in enumerate(facts) if fact["backend_sums"]]
    if 0 < len(having) < len(facts) and rank == 0:
        log.warning("FUSEDCOMM_BACKEND_SUMS=1 is not used: it must be set on all ranks, got ranks %s", having)
    return len(having) == len(facts)


def _same(facts: list[dict[str, Any]], key: str, name: str) -> str | None:
    values = [fact[key] for fact in facts]
    if len(set(values)) > 1:
        raise ValueError(f"{name} must be the same on all ranks, got {values} by rank")
    return values[0]
