"""Import, fork and interpreter exit in any order: no hang, no crash, and the peers are told. Fresh processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.helpers.process_programs import NUM_RANKS, PROGRAMS
from tests.helpers.tiers import nightly_but

ROOT = Path(__file__).parents[2]
RUN_S = 100  # bound of all ranks: long before pytest's own limit, which would leave them running
CRASHES = ("Fatal", "terminate called", "Segmentation", "core dumped")


def run(name: str) -> list[tuple[int, str, str]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FUSEDCOMM_TIMEOUT_S": "30"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.helpers.process_programs", name]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(store.port)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    deadline = time.monotonic() + RUN_S
    try:
        ended = [process.communicate(timeout=max(0.0, deadline - time.monotonic())) for process in started]
        return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait()


def crashed(code: int, errors: str) -> bool:
    return code < 0 or any(word in errors for word in CRASHES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", nightly_but(["left_open", "raises", "forks"], PROGRAMS))
def test_ranks_end_without_a_crash(name: str) -> None:
    ended = run(name)
    for rank, (code, output, errors) in enumerate(ended):
        assert not crashed(code, errors), errors
        if rank == 0 and name == "raises":
            assert code == 1 and "LookupError: on purpose" in errors
        else:
            later = "waited\n" * (name == "waits_at_the_end" or (name == "thread_waits" and rank == 0))
            assert (code, output) == (0, f"done\n{later}"), errors


def test_a_crash_is_seen() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(0)"]
    done = subprocess.run(command, capture_output=True, timeout=RUN_S)
    assert done.returncode == -signal.SIGSEGV
    assert crashed(0, done.stderr.decode())
