"""The claims of docs/security.md: code that may run, access to segments, listeners. Files: test_tuned.py."""

import ast
import contextlib
import fcntl
import ipaddress
import itertools
import json
import os
import pickle
import re
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import HashStore

import fusedcomm
from fusedcomm.bench import launch_now
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory import group as groups
from fusedcomm.memory.segment import HeaderLayout
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.geometry.rank_order import peers_of, sources_of
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.problems import HEADS
from tests.helpers.symmetric_memory import Ranks, error_of, make, timeout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
CPU = torch.device("cpu")

# What may run code that data bring along, and what listens

DANGEROUS = (
    *("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("torch.load", "torch.serialization", "torch.package", "torch.hub", "numpy.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("eval", "exec", "__import__"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("socket.socket", "socket.create_server", "socket.create_connection", "socketserver", "http.server", "xmlrpc"),
    *("multiprocessing.connection.Listener", "multiprocessing.managers"),
    *("torch.distributed.TCPStore", "torch.distributed.rpc"),
)
UNPICKLES = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?")
RANKS = "fusedcomm/launch/ranks.py"
ALLOWED = {
    (RANKS, "pickle"): "tasks and answers between a process and the ranks that it started, over socket pairs",
    (RANKS, "torch.distributed.TCPStore"): "where these ranks meet",
    (RANKS, "socket.create_server"): "its socket, on loopback",
}


def dangerous(tree: ast.AST) -> set[str]:
    """What a file imports or uses of DANGEROUS and UNPICKLES, by its own name, and ``shell=True``."""
    names = {name: name for name in ("eval", "exec", "__import__")}
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    used = [*imported, *(dotted(node) for node in ast.walk(tree))]
    found = {each for name in used for each in DANGEROUS if f"{name}.".startswith(f"{each}.")}
    found |= {last for name in used if UNPICKLES.fullmatch(last := name.rpartition(".")[2])}
    shells = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "shell"]
    found |= {"shell=True" for value in shells if ast.unparse(value) != "False"}
    return found


def test_nothing_runs_what_data_bring_along_and_nothing_else_listens() -> None:
    files = [path for folder in ("fusedcomm", "kernels", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    found = {(str(path.relative_to(ROOT)), what) for path in files for what in dangerous(ast.parse(path.read_text()))}
    assert found == set(ALLOWED)  # what is no longer there is no longer allowed
    assert all(f"`{file}`" in PAGE for file, _ in ALLOWED)


SCANNED = {
    "import pickle": "pickle",
    "import marshal, json": "marshal",
    "import torch as t\nt.load(file)": "torch.load",
    "eval(text)": "eval",
    "import os\nos.system(text)": "os.system",
    "import subprocess\nsubprocess.run(text, shell=True)": "shell=True",
    "import subprocess\nsubprocess.run(text, shell=flag)": "shell=True",
    "import socket\nsocket.socket()": "socket.socket",
    "import torch.distributed as dist\ndist.TCPStore('', 0)": "torch.distributed.TCPStore",
    "import torch.distributed as dist\ndist.all_gather_object(a, b)": "all_gather_object",
    "from torch.distributed import broadcast_object_list": "broadcast_object_list",
}


def test_the_scan_finds_these_and_lets_the_rest_pass() -> None:
    assert {source: dangerous(ast.parse(source)) for source in SCANNED} == {
        source: {name} for source, name in SCANNED.items()
    }
    source = "import socket, yaml\nx.eval()\nsocket.gethostname()\nyaml.safe_load(t)\nx.load(t)\nrun(shell=False)"
    assert not dangerous(ast.parse(source))


NATIVE = re.compile(r"\b(system|popen|exec[lv]p?e?|dlopen|shm_open|socket|listen)\s*\(")


def test_the_native_part_starts_nothing_and_opens_no_socket_and_no_named_memory() -> None:
    sources = [path.read_text() for path in (ROOT / "kernels/cpu").iterdir() if path.suffix in (".h", ".cpp")]
    assert len(sources) > 5
    found = [call for source in sources for call in NATIVE.findall(re.sub("//.*", "", source))]
    assert found == ["dlopen"] and 'dlopen("libcuda.so.1", ' in (ROOT / "kernels/cpu/driver.h").read_text()
    assert NATIVE.findall('system ("ls"); shm_open(name); ecosystem(1);') == ["system", "shm_open"]


# Who reaches a segment
held: Any = None
SEGMENT = "/memfd:fusedcomm-"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def attach(rank: int) -> int:
    global held
    held = make(8)
    held[0].fill_(int.from_bytes(b"secret\n" + bytes([rank]), "little"))
    held[1].barrier()
    return os.getpid()


def detach(rank: int) -> list[int]:
    global held
    values, held = held[0].tolist(), None
    return values


def opened(pid: int, kind: str) -> dict[str, str]:
    """What a process has open of that kind, by the path under which others can open it."""
    found: dict[str, str] = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed since
            target = os.readlink(path := f"/proc/{pid}/fd/{fd}")
            found |= {path: target} if target.startswith(kind) else {}
    return found


def head(path: str, user: int) -> tuple[bytes, bytes]:
    """The first 8 bytes of a file as a process of that user reads them, and what went wrong."""
    other: dict[str, Any] = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run(["head", "-c", "8", path], capture_output=True, check=False, **other)
    return done.stdout, done.stderr


def resized(path: str, num_bytes: int) -> bool:
    """Whether this process, which can write the file, can also change its size."""
    try:
        os.truncate(path, num_bytes)
    except PermissionError:
        return False
    return True


def test_a_segment_has_no_name_and_is_its_users_and_keeps_its_size(ranks: Ranks) -> None:
    pids = ranks(2).run(attach)
    try:
        for rank, pid in enumerate(pids):
            content = b"secret\n" + bytes([rank])
            (path,) = [path for path in opened(pid, SEGMENT) if head(path, os.geteuid())[0] == content]
            facts = os.stat(path)
            assert stat.S_ISREG(facts.st_mode) and stat.S_IMODE(facts.st_mode) == 0o600
            assert (facts.st_uid, facts.st_nlink) == (os.geteuid(), 0)
            with open(path, "r+b", buffering=0) as file:
                assert fcntl.fcntl(file, fcntl.F_GET_SEALS) == SEALS
                os.pwrite(file.fileno(), (7).to_bytes(8, "little"), 8)  # who can read it can write it
            assert not resized(path, 0) and not resized(path, 2 * facts.st_size)
            assert os.stat(path).st_size == facts.st_size
        assert not [name for name in os.listdir("/dev/shm") if "fusedcomm" in name]
    finally:
        values = ranks(2).run(detach)
    assert [value[1] for value in values] == [7, 7]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_cannot_open_a_segment(ranks: Ranks) -> None:
    pids = ranks(2).run(attach)
    try:
        paths = [path for pid in pids for path in opened(pid, SEGMENT)]
        assert len(paths) >= 2
        for path in paths:
            content, error = head(path, 65534)  # the user nobody
            assert not content and b"Permission denied" in error
            assert len(head(path, os.geteuid())[0]) == 8  # negative control: this user reads it
    finally:
        ranks(2).run(detach)
    assert head("/proc/version", 65534)[0]  # negative control: the other one can read at all


# What listens
def listening(pids: list[int]) -> set[Any]:
    """The addresses of the TCP and UDP sockets on which these processes receive."""
    inodes = {target[len("socket:[") : -1] for pid in pids for target in opened(pid, "socket:[").values()}
    found = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if rest[5] in inodes and state in ("0A", "07"):  # LISTEN; a bound UDP socket
                words = bytes.fromhex(local.partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))  # on a little-endian host
                found.add(ipaddress.ip_address(packed))
    return found


def reachable(addresses: set[Any]) -> set[Any]:
    return {each for each in addresses if not (getattr(each, "ipv4_mapped", None) or each).is_loopback}


@pytest.mark.parametrize("who", ["ranks", "who starts them"])
def test_ranks_and_who_starts_them_listen_on_loopback(who: str, ranks: Ranks) -> None:
    ranks(2).run(posted)
    addresses = listening([ranks(2).pid(rank) for rank in range(2)] if who == "ranks" else [os.getpid()])
    assert addresses  # those of gloo and of the store
    assert not reachable(addresses)


# What the ranks of a group tell each other. Posts of others: tests/memory/test_vote.py
def posted(rank: int) -> tuple[list[bytes], dict[str, Any]]:
    """What a call in a new group has left in the store, and rank 0's facts by purpose."""
    whole: Any = dist.distributed_c10d._get_default_store()
    keys = getattr(whole.underlying_store, "list_keys", list)  # not every torch release has it
    before = set(keys())
    dist.barrier()
    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        dist.barrier(group)
        posts = {purpose: groups.store(group, f"{purpose}/cpu").get("post/0") for purpose in ("topology", "workspace")}
        new = [key for key in keys() if key not in before and "fusedcomm/" in key]
        values = [*posts.values(), *(whole.underlying_store.get(key) for key in new)]
    dist.barrier()
    return values, {purpose: json.loads(post)["facts"] for purpose, post in posts.items()}


def test_the_store_has_json_and_no_more_than_the_page_says(ranks: Ranks) -> None:
    values, facts = ranks(2).run(posted)[0]
    for value in values:
        json.loads(value)
    with pytest.raises(ValueError):  # negative control
        json.loads(pickle.dumps(facts))
    assert all(f"`{name}`" in PAGE for post in facts.values() for name in post)
    assert all(isinstance(value, str | int | None) for post in facts.values() for value in post.values())


MIB = 1 << 20
VOTE_S = 0.2


@pytest.mark.parametrize("offer", [b"", b"x" * 88, b"9" * MIB], ids=len)
def test_a_hostile_offer_of_memory_is_an_error_in_bounded_time(offer: bytes) -> None:
    name, store = f"test/hostile/{len(offer)}", HashStore()
    _SymmetricMemory.set_group_info(name, 0, 2, store)
    store.set(f"fusedcomm/symm_mem/{name}/offer/1", offer)
    t, start = torch.distributed._symmetric_memory.empty(4, device=CPU), time.monotonic()
    with timeout(VOTE_S):
        error = error_of(lambda: _SymmetricMemory.rendezvous(t, name))
    assert time.monotonic() - start < VOTE_S + 10
    assert re.fullmatch(r"DistStoreError: .* (rank 1|some rank) did not come within 0.2 s", error)


# Bounds of every peer index
def virtual_round() -> tuple[list[Tensor], dict[str, Callable[[int], Any]]]:
    """The segments of two virtual ranks, and the functions that take a rank on the first one's host."""
    workspace = VirtualGroup(2, 1 << 12, CPU).workspaces[0]
    workspace.timeout_s = 0.05
    return workspace.buffers, {
        "signal": lambda peer: workspace.signal(peer, 1, 7),
        "wait": lambda peer: workspace.wait(peer, 1, "op", 7),
        "signals.signal": lambda peer: launch_now.signal(workspace, peer, 7),
        "signals.wait_source": lambda peer: launch_now.wait_source(peer, workspace, 7),
    }


def test_a_round_refuses_ranks_outside_the_group() -> None:
    segments, functions = virtual_round()
    before = [segment.clone() for segment in segments]
    for function, peer in itertools.product(functions.values(), (-1, 2)):
        with pytest.raises(AssertionError, match=r"must be in \[0, 2\), got"):
            function(peer)
        assert all(map(torch.equal, segments, before))


@pytest.mark.parametrize("group_size", [1, 3, 72])
def test_peer_indices_are_made_from_the_size_of_the_group(group_size: int) -> None:
    """What the indices lead to lies in the segment, and each rank's is apart from the others'."""
    layout, every = HeaderLayout(group_size), list(range(group_size))
    for rank in every:
        assert sorted(peers_of(rank, group_size)) == sorted(sources_of(rank, group_size)) == every
    words = [layout.epoch, layout.arrivals, layout.timeout, layout.record]
    words += [layout.flag(epoch, src_rank) for epoch in (1, 2) for src_rank in every]
    words += [start + 8 * rank for start in (layout.broken, layout.tiles_done) for rank in every]
    assert len(set(words)) == len(words)
    assert all(word % 8 == 0 and 0 <= word < layout.header_bytes for word in words)
    for slot_bytes, itemsize in itertools.product((0, 128, 1000, 1 << 20), (2, 4)):
        num_bytes = Workspace.num_bytes(group_size, slot_bytes)
        each = (num_bytes - layout.header_bytes) // 2
        facts = {"rank": 0, "group_size": group_size, "segment_layout": layout.for_kernels}
        workspace = SimpleNamespace(**facts, slot_bytes=each, usable_bytes=each)
        last = group_size * (Workspace.memory_facts(workspace).max_chunk_bytes // itemsize) * itemsize
        ends = [layout.slot(epoch, workspace.slot_bytes) + last for epoch in (2, 1)]
        assert ends[0] <= layout.slot(1, workspace.slot_bytes) and ends[1] <= num_bytes
