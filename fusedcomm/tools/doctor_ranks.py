"""Facts that the ranks of a group know only together: differences between them, and the planner's verdicts.

And functional checks, each in processes of its own, with a deadline. A hang or a crash is a finding.
"""

import contextlib
import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import env
from fusedcomm.env import version
from fusedcomm.launch.ranks import RankError, RankPool
from fusedcomm.launch.world import BACKENDS, rank_device
from fusedcomm.memory.group import process_group, store
from fusedcomm.memory.vote import agree
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize
from fusedcomm.tools.doctor_findings import ABSENT, ERROR, OK, WARNING, Finding, by_value, ranks_text
from fusedcomm.tools.selftest import small, why_not

START_S = 60.0  # until the ranks have come together
COPIED_BYTES = 1 << 20
ASK_S = 90.0  # until all ranks have answered; on GPUs CUDA starts
DTYPES = (torch.bfloat16, torch.float32)
# Rows, K and N, all multiplied by R: of decoding, of a small and of a large layer.
SIZES = ((8, 256, 512), (256, 256, 512), (2048, 512, 1024))


@dataclass(frozen=True)
class AlgorithmVerdict:
    """The planner's verdict on one algorithm on one device type."""

    device: str
    algorithm: str
    used: bool
    can_run: bool
    reason: str


@dataclass(frozen=True)
class GroupAnswer:
    """The joint answer of a group's ranks, equal on all of them."""

    ranks: list[dict[str, Any]]  # every rank's facts
    verdicts: list[AlgorithmVerdict]

    def ranks_by(self, fact: str) -> list[list[int]]:
        """Ranks by equal boot id (one machine), or host (shared memory)."""
        found: dict[str, list[int]] = {}
        for rank, facts in enumerate(self.ranks):
            found.setdefault(facts[fact], []).append(rank)
        return list(found.values())


def ask(rank: int, device_types: list[str]) -> GroupAnswer:
    """Ask for facts and verdicts, in every rank of WORLD; about GPUs only if each rank has one of its own.

    Raises PeerTimeoutError if a rank does not come, and the errors of wrong settings.
    """
    world = process_group(None)
    own, bound = _facts("cuda" in device_types), min(env.timeout_s(), ASK_S)
    ranks = agree(store(world, "doctor"), rank, world.size(), own, what="fusedcomm doctor", timeout_s=bound)
    verdicts = []
    for device_type in device_types:
        if device_type == "cpu" or all(fact["gpu"] for fact in ranks):  # alike on all ranks: a vote follows
            verdicts += _verdicts(device_type)
    return GroupAnswer(ranks, verdicts)


def find_differences(group: GroupAnswer) -> list[Finding]:
    """Facts that should be equal on all ranks, or on the ranks of one host, and are not."""
    found: list[Finding] = []

    def compare(name: str, values: dict[int, Any], level: str, text: str, advice: str) -> None:
        if len(set(values.values())) > 1:
            found.append(Finding("ranks", name, level, f"{text}: {by_value(values)}", advice))

    facts = dict(enumerate(group.ranks))
    for kind, advice in (("versions", "one environment on all hosts"), ("settings", "set it alike on all ranks")):
        for key in facts[0][kind]:
            level = ERROR if kind == "versions" or key == "FUSEDCOMM_ALGORITHM" else WARNING
            compare(key, {r: fact[kind][key] for r, fact in facts.items()}, level, "differs between ranks", advice)
    for here in group.ranks_by("boot"):
        advice = "give all ranks of a host the same, and use cuda:LOCAL_RANK: torch tells GPUs apart by number"
        visible = {rank: facts[rank]["visible"] for rank in here}
        compare("CUDA_VISIBLE_DEVICES", visible, WARNING, "differs between ranks of a host", advice)
        if len({facts[rank]["host"] for rank in here}) > 1:
            text = f"{ranks_text(here)} are on one machine, in several PID namespaces: they cannot share memory"
            found.append(Finding("ranks", "containers", WARNING, text, "one container for all ranks of a host"))
    gpus = [fact["gpu"] for fact in group.ranks if fact["gpu"]]
    if len(set(gpus)) < len(gpus):
        text = f"{len(gpus)} ranks have {len(set(gpus))} GPUs"
        found.append(Finding("ranks", "GPUs", ERROR, text, "a GPU of its own for each rank: cuda:LOCAL_RANK"))
    if 0 < len(gpus) < len(facts):
        seen = {uuid for fact in group.ranks for uuid in fact["gpus"]}
        text = (
            f"each rank needs one of its own, but see {by_value({r: len(fact['gpus']) for r, fact in facts.items()})}"
        )
        advice = "show every rank all GPUs of its host (SLURM: --gpus-per-node, not --gpus-per-task), a rank for each"
        found.append(Finding("ranks", "GPUs", ERROR if len(seen) > 1 else ABSENT, text, advice))
    hosts = group.ranks_by("host")
    if len(hosts) > 1:
        used = " or ".join(sorted({verdict.algorithm for verdict in group.verdicts if verdict.used}))
        text = f"inside {len(hosts)} hosts ranks share memory ({'; '.join(map(ranks_text, hosts))})"
        found.append(Finding("ranks", "hosts", OK, f"{text}; groups across them run {used}"))
    return found or [Finding("ranks", "ranks", OK, f"{len(facts)} ranks have the same versions and settings")]


def find_verdicts(group: GroupAnswer, primary: str | None) -> list[Finding]:
    """A finding for each verdict. It is an error if ``primary``, the device type that matters, cannot use an algorithm.

    ``primary`` is None where GPUs only run unfused by design.
    """
    findings = []
    for verdict in group.verdicts:
        level, advice = ERROR if verdict.device == primary else WARNING, ""
        no_triton = (verdict.device, verdict.algorithm) == ("cpu", "fused")  # there is none for CPUs
        if verdict.can_run:
            level = OK
        elif no_triton or len(group.ranks) == 1 or (verdict.device == "cuda" and primary is None):
            level = ABSENT
        elif len(group.ranks_by("boot")) > 1:
            level, advice = ABSENT, "groups whose ranks are on one host can"
        name = f"{verdict.device} {verdict.algorithm}"
        findings.append(Finding("algorithms", name, level, verdict.reason, advice))
    return findings


def _facts(with_gpus: bool) -> dict[str, Any]:
    gpus: list[str] = []
    with contextlib.suppress(Exception):  # where CUDA does not start, the check of this host's devices has the reason
        gpus = uuids(0) if with_gpus else []
    index = rank_device("cuda").index if gpus else 0
    names = sorted(set(env.SETTINGS) - {"FUSEDCOMM_HOST_ID", "FUSEDCOMM_CACHE_DIR"})
    hosts = (env.host_id(), env.host_id().partition(" ")[0])  # the boot id, with the PID namespace and without
    host, boot = (hashlib.sha256(text.encode()).hexdigest()[:12] for text in hosts)
    return {
        "host": host,
        "boot": boot,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": gpus,
        "gpu": gpus[index] if index < len(gpus) else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": version("triton")},
        "settings": {name: os.environ.get(name) for name in names},
    }


def _verdicts(device_type: str) -> list[AlgorithmVerdict]:
    group = None
    if device_type == "cuda":
        torch.cuda.set_device(rank_device("cuda"))
        bound = timedelta(seconds=ASK_S)
        group = dist.new_group(backend=BACKENDS["cuda"], timeout=bound)  # torchrun's ranks have met by gloo
    plans = [_plan(op, size, dtype, device_type, group) for op in PROGRAMS for dtype in DTYPES for size in SIZES]
    verdicts = []
    for name in env.ALGORITHMS:
        cannot = why_not(name, partial(_plan, "matmul_all_to_all", SIZES[1], DTYPES[0], device_type, group))
        reason = f"not used: {cannot or f'the planner chooses others, as in {plans[len(plans) // 2]}'}"
        if used := [plan for plan in plans if plan.algorithm == name]:
            reason = f"used for {len(used)} of {len(plans)} example calls, as in {used[len(used) // 2]}"
        verdicts.append(AlgorithmVerdict(device_type, name, bool(used), cannot is None, reason))
    return verdicts


def _plan(
    op: str, size: tuple[int, int, int], dtype: torch.dtype, device_type: str, group: dist.ProcessGroup | None
) -> fusedcomm.Plan:
    """The plan of this rank's call. On a GPU it is asked for meta tensors, which take no memory."""
    program, device, num_ranks = PROGRAMS[op], "meta" if device_type == "cuda" else "cpu", dist.get_world_size()
    rows, k, n = (each * num_ranks for each in size)
    x = torch.empty(program.x_shape(MatmulSize(rows, k, n), num_ranks), dtype=dtype, device=device)
    w = torch.empty(k, n, dtype=dtype, device=device)
    return fusedcomm.explain(op, x, w, *program.dims(x), group)


class CheckRanks:
    """Rank processes, which a check may hang or end: the next check then gets new ones."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size, self.backend = world_size, backend
        self.pool: RankPool | None = None

    def run(self, limit_s: float, fn: Callable[..., Any], *args: Any) -> Any:
        """Rank 0's result of ``fn(rank, *args)``. Raises RankError."""
        if self.pool is None or self.pool.dead:
            self.pool = RankPool(self.world_size, backend=self.backend, timeout_s=START_S)
        self.pool.start(fn, *args)
        return self.pool.join(limit_s)[0]

    def check(self, name: str, advice: str, limit_s: float, fn: Callable[..., str], *args: Any) -> Finding:
        """``fn`` returns its evidence, or raises."""
        try:
            return Finding("checks", name, OK, self.run(limit_s, fn, *args))
        except Exception as error:  # the doctor survives any failure of a check
            return Finding("checks", name, ERROR, brief(error), advice)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def brief(error: Exception) -> str:
    """An error in one line, without the tracebacks of ranks."""
    if isinstance(error, RankError):
        first = error.failures[0]
        return f"rank {first.rank} {first.kind}: {first.message.splitlines()[0]}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def uuids(rank: int) -> list[str]:
    """The GPUs that torch sees, once CUDA has started."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def peer_copies(rank: int) -> str:
    """Copy random bytes from every GPU to every other and back, and compare it on the host."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    for a, b in pairs:
        sent = torch.randint(256, (COPIED_BYTES,), dtype=torch.uint8, device="cpu")
        there = sent.to(f"cuda:{a}").to(f"cuda:{b}")
        _must(torch.equal(there.cpu(), sent), f"GPU {a} -> {b}: wrong bytes arrived")
        _must(torch.equal(there.to(f"cuda:{a}").cpu(), sent), f"GPU {b} -> {a}: wrong bytes arrived")
    no_access = ", ".join(f"{a} -> {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b))
    text = f"{len(pairs)} pairs, {COPIED_BYTES >> 20} MiB each way, every byte right"
    return f"{text}; through the host: {no_access}" if no_access else text


def op_values(rank: int, device_type: str, algorithm: str) -> str:
    """Compare matmul_all_to_all, forward and backward, with the same computed in one process."""
    with fusedcomm.force_algorithm(algorithm, strict=True):
        data = small("matmul_all_to_all", rank_device(device_type))
        wrong = data.wrong(process_group(None))
    _must(wrong is None, f"rank {rank}: {wrong}")
    return f"matmul_all_to_all of {dist.get_world_size()} ranks, result and gradients exact"


def _must(condition: bool, text: str) -> None:
    """Like ``assert``, under PYTHONOPTIMIZE too."""
    if not condition:
        raise RuntimeError(text)
