"""Two hosts on one machine: network namespaces with a link between them, throttled or not, and a torchrun on each."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RANKS_PER_HOST = 2
PORT = 29400  # in a namespace all ports are free
MOST_MBIT = 500  # a faster link is bounded by what copies its packets, which is the cores of the ranks
BURST, QUEUE = "256kb", "4mb"  # a packet of TCP's own offload has 64 KiB; the queue never drops what gloo sends


class NoHosts(Exception):
    """Why this machine cannot have two hosts."""


@dataclass(frozen=True)
class Host:
    number: int
    namespace: str

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def device(self) -> str:
        return f"link{self.number}"

    def pids(self) -> list[int]:
        return list(map(int, _ip("netns", "pids", self.namespace).split()))


@contextmanager
def two_hosts(mbit: int | None = None) -> Iterator[list[Host]]:
    """``mbit``: what the link carries each way, at most MOST_MBIT. At the end what runs on the hosts is killed."""
    assert mbit is None or 0 < mbit <= MOST_MBIT, mbit
    for command in ("ip", "tc")[: 1 + (mbit is not None)]:
        if shutil.which(command) is None:
            raise NoHosts(f"the command {command} is not installed (Debian: iproute2)")
    if os.geteuid() != 0:
        raise NoHosts("only root can make network namespaces")
    hosts = [Host(i, f"fusedcomm-{os.getpid()}-{i}") for i in range(2)]
    with ExitStack() as made:
        try:
            for host in _left_behind():
                _remove(host)
            for host in hosts:
                _ip("netns", "add", host.namespace)
                made.callback(_remove, host)
            _connect(*hosts)
            if mbit is not None:
                _throttle(hosts, mbit)
        except subprocess.CalledProcessError as error:
            raise NoHosts(f"{shlex.join(error.cmd)}: {error.stderr.strip()}") from None
        yield hosts


def set_link(device: str, up: bool) -> None:
    _ip("link", "set", device, "up" if up else "down")


def sent_bytes(device: str) -> int:
    """What the interface has sent since it was made, for a process on its host: ``ip netns exec`` mounts its /sys."""
    return int(Path("/sys/class/net", device, "statistics/tx_bytes").read_text())


def torchrun(
    hosts: list[Host],
    module: str,
    check: str,
    folder: Path,
    timeout_s: float,
    ranks_per_host: int = RANKS_PER_HOST,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``python -m module check folder`` in each rank of both hosts; returns every folder/result.RANK, as JSON."""
    started: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    try:
        for host in hosts:
            command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", str(len(hosts)), "--node-rank", str(host.number)]
            command += ["--nproc-per-node", str(ranks_per_host), "--master-addr", hosts[0].address]
            command += ["--master-port", str(PORT), "-m", module, check, str(folder)]
            own = {
                "FUSEDCOMM_HOST_ID": f"host {host.number}",
                "GLOO_SOCKET_IFNAME": host.device,
                "OMP_NUM_THREADS": "1",
            }
            with open(folder / f"log.{host.number}", "w") as log:
                process = subprocess.Popen(
                    command, cwd=ROOT, env={**os.environ, **own, **(env or {})}, stdout=log, stderr=subprocess.STDOUT
                )
                started.append(process)
        for process in started:
            process.wait(max(0.0, deadline - time.monotonic()))
        failed = any(process.returncode for process in started)
    except subprocess.TimeoutExpired:
        failed = True
    finally:
        for host in hosts:
            _end(host)
        for process in started:
            process.kill()  # it may not have come to its host
            process.wait()
    logs = "\n".join(f"{path.name}: {path.read_text()[-6000:]}" for path in sorted(folder.glob("log.*")))
    assert not failed, f"torchrun failed, or ran longer than {timeout_s:g} s\n{logs}"
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(len(hosts) * ranks_per_host)]


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _left_behind() -> list[Host]:
    """Namespaces left by tests that had no chance to remove theirs, as pytest-timeout ended them."""
    found = re.findall(r"^(fusedcomm-(\d+)-(\d))\b", _ip("netns", "list"), re.MULTILINE)
    return [Host(int(number), name) for name, pid, number in found if not Path("/proc", pid).exists()]


def _connect(one: Host, other: Host) -> None:
    peer = ("peer", "name", other.device, "netns", other.namespace)
    _ip("link", "add", one.device, "netns", one.namespace, "type", "veth", *peer)
    for host in (one, other):
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
        for device in ("lo", host.device):
            _ip("-n", host.namespace, "link", "set", device, "up")


def _throttle(hosts: list[Host], mbit: int) -> None:
    """A token bucket at each end of the link; what a host sends to itself goes by ``lo``, at full speed."""
    for host in hosts:
        bucket = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "limit", QUEUE)
        _run("tc", "-n", host.namespace, "qdisc", "add", "dev", host.device, "root", *bucket)


def _end(host: Host) -> None:
    for pid in host.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by now
            continue


def _remove(host: Host) -> None:
    _end(host)
    _ip("netns", "delete", host.namespace)
