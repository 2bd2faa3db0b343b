"""What only the ranks of a group know together: whether they differ, and how the planner decides for them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import env
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding, by_value, ranks_text
from fusedcomm.machine import version
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.runtime.group import store
from fusedcomm.runtime.members import known_member
from fusedcomm.runtime.vote import agree

ASK_S = 90.0  # until all ranks have answered; on GPUs CUDA starts
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DTYPES = (torch.bfloat16, torch.float32)
# Rows, K and N, all multiplied by R: those of decoding, of a small and of a large layer.
SIZES = (MatmulSize(8, 256, 512), MatmulSize(256, 256, 512), MatmulSize(2048, 512, 1024))


@dataclass(frozen=True)
class AlgorithmVerdict:
    """What the planner says of one algorithm on one device type."""

    device: str
    algorithm: str
    used: bool
    can_run: bool
    reason: str

    def __str__(self) -> str:
        return f"used for {self.reason}" if self.used else f"not used: {self.reason}"


@dataclass(frozen=True)
class GroupAnswer:
    """What the ranks of a group answer together. It is equal on all ranks."""

    ranks: list[dict[str, Any]]  # every rank's facts
    verdicts: list[AlgorithmVerdict]
    proofs: dict[str, str] | None = None  # by op, algorithm and dtype: what is wrong, if anything; None: none are made

    @property
    def num_hosts(self) -> int:
        return len({rank["boot"] for rank in self.ranks})

    @property
    def ranks_by_host(self) -> list[list[int]]:
        """The ranks that share memory, by host; several containers of a machine are several hosts."""
        found: dict[str, list[int]] = {}
        for rank, facts in enumerate(self.ranks):
            found.setdefault(facts["host"], []).append(rank)
        return list(found.values())

    @property
    def gpus_by_rank(self) -> dict[int, int]:
        """How many GPUs each rank sees."""
        return {rank: len(facts["gpus"]) for rank, facts in enumerate(self.ranks)}

    def on_host_of_rank_0(self) -> list[dict[str, Any]]:
        return [rank for rank in self.ranks if rank["boot"] == self.ranks[0]["boot"]]


def ask(rank: int, device_types: list[str]) -> GroupAnswer:
    """Ask for facts and verdicts, in every rank of WORLD; about GPUs only if each rank has one of its own.

    Raises PeerTimeoutError if a rank does not come, and what a wrong setting raises.
    """
    world = dist.group.WORLD
    assert world is not None
    log = logging.getLogger("fusedcomm")
    level = log.level
    log.setLevel(logging.ERROR)  # no warnings of fallbacks, which are what is asked about
    try:
        own = _facts("cuda" in device_types)
        with _bounded():
            ranks = agree(store(world, "doctor"), rank, world.size(), own, what="fusedcomm doctor")
            verdicts, proofs = [], None
            for device_type in device_types:
                if device_type == "cpu" or all(fact["gpu"] for fact in ranks):  # alike on all ranks: a vote follows
                    verdicts += _verdicts(device_type, world.size())
                    if (found := _proofs(device_type, world.group_name)) is not None:
                        proofs = found
        return GroupAnswer(ranks, verdicts, proofs)
    finally:
        log.setLevel(level)


def find_differences(group: GroupAnswer) -> list[Finding]:
    """What should be equal on all ranks, or on those of one host, and is not."""
    ranks, findings = group.ranks, []
    for key, values in _by_key(ranks, "versions"):
        advice = "one environment on all hosts"
        findings += _must_be_equal(key, values, ERROR, "versions differ between ranks", advice)
    for key, values in _by_key(ranks, "settings"):
        level = ERROR if key == "FUSEDCOMM_ALGORITHM" else WARNING
        findings += _must_be_equal(key, values, level, "differs between ranks", "set it alike on all ranks")
    for boot in sorted({rank["boot"] for rank in ranks}):
        here = {r: fact for r, fact in enumerate(ranks) if fact["boot"] == boot}
        visible = {r: fact["visible"] for r, fact in here.items()}
        advice = "give all ranks of a host the same, and use cuda:LOCAL_RANK: torch tells GPUs apart by number"
        findings += _must_be_equal("CUDA_VISIBLE_DEVICES", visible, WARNING, "differs between ranks of a host", advice)
        if len({fact["host"] for fact in here.values()}) > 1:
            text = f"{ranks_text(sorted(here))} are on one machine, in several PID namespaces: they cannot share memory"
            findings.append(Finding("ranks", "containers", WARNING, text, "one container for all ranks of a host"))
    gpus = [rank["gpu"] for rank in ranks if rank["gpu"]]
    if len(set(gpus)) < len(gpus):
        text = f"{len(gpus)} ranks have {len(set(gpus))} GPUs"
        findings.append(Finding("ranks", "GPUs", ERROR, text, "a GPU of its own for each rank: cuda:LOCAL_RANK"))
    if len(gpus) < len(ranks):
        text, advice = "ranks see more or fewer GPUs than others", "GPUs are not used: each rank needs one of its own"
        findings += _must_be_equal("GPUs by rank", group.gpus_by_rank, ERROR, text, advice)
    text = f"{len(ranks)} ranks on {group.num_hosts} host(s) have the same versions and settings"
    return findings or [Finding("ranks", "ranks", OK, text)]


def find_hosts(group: GroupAnswer) -> list[Finding]:
    """Which ranks share memory, where not all of them do, and what groups across them run."""
    hosts = group.ranks_by_host
    if len(hosts) == 1:
        return []
    used = {verdict.algorithm for verdict in group.verdicts if verdict.used}
    text = f"ranks share memory inside {len(hosts)} hosts ({'; '.join(map(ranks_text, hosts))}); "
    text += f"groups across them run {' or '.join(sorted(used))}"
    return [Finding("network", "hosts", OK, text)]


def find_verdicts(group: GroupAnswer, primary: str | None) -> list[Finding]:
    """A finding for each verdict. It is an error if ``primary``, the device type that matters, cannot use an algorithm.

    ``primary`` is None where GPUs only run unfused by design.
    """
    findings = []
    for verdict in group.verdicts:
        level, advice = OK, ""
        if not verdict.can_run:
            level = ERROR if verdict.device == primary else WARNING
            if verdict.device == "cpu" and verdict.algorithm == "fused":
                level = ABSENT  # it is Triton's, and there is no Triton for CPUs
            elif len(group.ranks) == 1 or (verdict.device == "cuda" and primary is None):
                level = ABSENT
            elif group.num_hosts > 1:
                level, advice = ABSENT, "groups whose ranks are on one host can"
        findings.append(Finding("algorithms", f"{verdict.device} {verdict.algorithm}", level, str(verdict), advice))
    return findings


def find_proofs(group: GroupAnswer) -> list[Finding]:
    """What is on record of the algorithms that GPUs use only after a proof."""
    if group.proofs is None:
        return []
    wrong = [text for text in group.proofs.values() if text]
    advice = "please report it; without the proofs-*.json of the cache directory they are proved again"
    findings = [Finding("algorithms", "cuda proofs", WARNING, text, advice) for text in wrong]
    right = [name for name, text in group.proofs.items() if not text]
    text = f"right on record: {', '.join(right) or 'none'}; others are proved at their first use"
    return [*findings, Finding("algorithms", "cuda proofs", OK, text)]


def _facts(with_gpus: bool) -> dict[str, Any]:
    gpus, index = _uuids() if with_gpus else [], int(os.environ.get("LOCAL_RANK", 0))
    names = sorted(set(env.SETTINGS) - {"FUSEDCOMM_HOST_ID", "FUSEDCOMM_CACHE_DIR"})
    return {
        "host": _hash(env.host_id()),
        "boot": _hash(BOOT_ID.read_text() if BOOT_ID.exists() else platform.node()),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": gpus,
        "gpu": gpus[index] if index < len(gpus) else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": version("triton")},
        "settings": {name: os.environ.get(name) for name in names},
    }


def _uuids() -> list[str]:
    """The GPUs that this rank sees; none where CUDA does not start."""
    try:
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    except Exception:  # the check of this host's devices has the reason
        return []


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """No vote takes longer than ASK_S, whatever FUSEDCOMM_TIMEOUT_S allows to the ops."""
    name = "FUSEDCOMM_TIMEOUT_S"
    theirs, bound = os.environ.get(name), min(env.timeout_s(), ASK_S)
    os.environ[name] = str(bound)
    try:
        yield
    finally:
        if theirs is None:
            del os.environ[name]
        else:
            os.environ[name] = theirs


def _verdicts(device_type: str, num_ranks: int) -> list[AlgorithmVerdict]:
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    chosen: dict[str, list[str]] = {name: [] for name in env.ALGORITHMS}
    for op in PROGRAMS:
        for dtype in DTYPES:
            for size in SIZES:
                scaled = MatmulSize(*(each * num_ranks for each in (size.rows, size.k, size.n)))
                plan = _plan(op, scaled, dtype, device_type)
                call = (
                    f"{op} {str(dtype).removeprefix('torch.')} [{scaled.rows}, {scaled.k}] @ [{scaled.k}, {scaled.n}]"
                )
                chosen[plan.algorithm].append(f"{call} ({plan.reason})")
    total = sum(map(len, chosen.values()))
    most = max(chosen, key=lambda name: len(chosen[name]))
    verdicts = []
    for name, calls in chosen.items():
        cannot = _cannot(name, device_type, num_ranks)
        if calls:
            reason = f"{len(calls)} of {total} example calls, such as {calls[len(calls) // 2]}"
        else:
            reason = cannot or f"the planner chooses {most}: {chosen[most][0].partition(' (')[2][:-1]}"
        verdicts.append(AlgorithmVerdict(device_type, name, bool(calls), cannot is None, reason))
    return verdicts


def _proofs(device_type: str, group_name: str) -> dict[str, str] | None:
    """The outcomes that hold for the group, which has voted; None where algorithms are used without a proof."""
    known = known_member(group_name, torch.device(device_type))
    return dict(known.outcomes) if known is not None and known.topology.prove else None


def _cannot(algorithm: str, device_type: str, num_ranks: int) -> str | None:
    """Why the planner refuses the algorithm even where it is asked for, or None."""
    with fusedcomm.force_algorithm(algorithm, strict=True):
        try:
            plan = _plan("matmul_all_to_all", MatmulSize(*(256 * num_ranks for _ in range(3))), DTYPES[0], device_type)
        except RuntimeError as error:
            return str(error).partition(": ")[2] or str(error)
    return None if plan.algorithm == algorithm else plan.reason


def _plan(op: str, size: MatmulSize, dtype: torch.dtype, device_type: str) -> fusedcomm.Plan:
    """The plan of this rank's call. On a GPU it is asked for meta tensors, which take no memory."""
    bench, device = PROGRAMS[op], "meta" if device_type == "cuda" else "cpu"
    x = torch.empty(bench.x_shape(size, dist.get_world_size()), dtype=dtype, device=device)
    w = torch.empty(size.k, size.n, dtype=dtype, device=device)
    return fusedcomm.explain(op, x, w, *bench.dims(x))


def _by_key(ranks: list[dict[str, Any]], what: str) -> list[tuple[str, dict[int, Any]]]:
    return [(key, {r: fact[what][key] for r, fact in enumerate(ranks)}) for key in ranks[0][what]]


def _must_be_equal(name: str, values: dict[int, Any], level: str, text: str, advice: str) -> list[Finding]:
    if len(set(values.values())) <= 1:
        return []
    return [Finding("ranks", name, level, f"{text}: {by_value(values)}", advice)]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
