"""Two hosts on one machine: network namespaces with a link between them, and a torchrun on each."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RANKS_PER_HOST = 2
PORT = 29400  # in a namespace all ports are free


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
def two_hosts() -> Iterator[list[Host]]:
    """The hosts exist until the end of the block. Then what still runs on them is killed."""
    if shutil.which("ip") is None:
        raise NoHosts("the command ip is not installed (Debian: iproute2)")
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
        except subprocess.CalledProcessError as error:
            raise NoHosts(f"{shlex.join(error.cmd)}: {error.stderr.strip()}") from None
        yield hosts


def set_link(device: str, up: bool) -> None:
    """Connect or cut the link, for a process on that host."""
    _ip("link", "set", device, "up" if up else "down")


def torchrun(hosts: list[Host], module: str, check: str, folder: Path, timeout_s: float) -> list[Any]:
    """Run ``python -m module check folder`` in every rank of both hosts.

    Returns what each wrote to folder/result.RANK, as JSON.
    """
    started: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    try:
        for host in hosts:
            command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", str(len(hosts)), "--node-rank", str(host.number)]
            command += ["--nproc-per-node", str(RANKS_PER_HOST), "--master-addr", hosts[0].address]
            command += ["--master-port", str(PORT), "-m", module, check, str(folder)]
            env = os.environ | {
                "FUSEDCOMM_HOST_ID": f"host {host.number}",
                "GLOO_SOCKET_IFNAME": host.device,
                "OMP_NUM_THREADS": "1",
            }
            with open(folder / f"log.{host.number}", "w") as log:
                started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
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
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(len(hosts) * RANKS_PER_HOST)]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


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


def _end(host: Host) -> None:
    for pid in host.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by now
            continue


def _remove(host: Host) -> None:
    _end(host)
    _ip("netns", "delete", host.namespace)
