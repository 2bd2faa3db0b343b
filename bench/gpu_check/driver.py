"""Runs each part in a process of its own, and writes its outcome as a line of JSON, at once.

A part may hang, crash, lose its CUDA context or write nonsense. Its whole process group is then killed, its results are
kept, and a new process goes on behind the case that ended the old one, while the part's limit lasts. This process never
touches the GPU, so nothing that happens there ends it.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
LOOK_S = 0.2  # how often a silent process is looked at
TRACE_S = 2.0  # how long a process that is killed may take to write where it was
REAP_S = 5.0  # a process that the GPU's driver holds may not end at all
MOST_OUTPUT = 4000  # characters of a process's output that are kept, from the end

Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Part:
    """A process to run: ``python -m module``. ``limit_s`` bounds the part, ``case_s`` each of its cases."""

    name: str
    module: str
    limit_s: float
    case_s: float
    arguments: tuple[str, ...] = ()


@dataclass
class PartResult:
    """The outcome of a part. ``names`` are its cases, as far as it said them; ``cases`` has the result of each."""

    part: str
    names: list[str] = field(default_factory=list)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # of its processes
    seconds: float = 0.0
    started: bool = False

    @property
    def failed(self) -> list[str]:
        return [name for name, case in self.cases.items() if not case["ok"]]

    @property
    def skipped(self) -> list[str]:
        return [name for name, case in self.cases.items() if "skipped" in case]

    @property
    def not_run(self) -> list[str]:
        return [name for name in self.names if name not in self.cases]

    @property
    def status(self) -> str:
        if not self.started:
            return "no time"
        whole = bool(self.names) and not (self.failed or self.not_run or self.problems)
        return "passed" if whole else "failed"

    def line(self) -> dict[str, Any]:
        listed = {"failed": self.failed, "skipped": self.skipped, "not_run": self.not_run, "problems": self.problems}
        return {"part": self.part, "status": self.status, "seconds": round(self.seconds, 1), **listed}


def run_parts(parts: Sequence[Part], device: str, budget_s: float, write: Write) -> list[PartResult]:
    """Run the parts in turn. Each gets its own limit or the rest of the budget, whichever is less."""
    end = time.monotonic() + budget_s
    results = []
    for part in parts:
        start = time.monotonic()
        result = PartResult(part.name)
        if start < end:
            result.started = True
            _run_part(part, device, min(end, start + part.limit_s), result, write)
            result.seconds = time.monotonic() - start
        write(result.line())
        results.append(result)
    return results


def _run_part(part: Part, device: str, end: float, result: PartResult, write: Write) -> None:
    after = None
    while True:
        process = _PartProcess(part, device, after, result, write)
        problem = process.follow(end)
        if problem is not None:
            result.problems.append(problem)
        # A process that began no case would not begin one the next time either.
        stuck = process.last == after
        if stuck or not result.not_run or time.monotonic() >= end:
            return
        after = process.last


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


class _PartProcess:
    """One process of a part: it is started, followed and ended here."""

    def __init__(self, part: Part, device: str, after: str | None, result: PartResult, write: Write) -> None:
        self.part, self.result, self.write = part, result, write
        self.last = after  # the case that was begun last
        self.running: str | None = None
        self.begun_at = time.monotonic()
        self.buffer = b""
        self.pipe, child_end = os.pipe()
        os.set_blocking(self.pipe, False)
        command = [sys.executable, "-m", part.module, *part.arguments, "--device", device, "--report", str(child_end)]
        command += [] if after is None else ["--after", after]
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  `follow` closes it
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            pass_fds=[child_end],
            start_new_session=True,  # so that its ranks end with it
        )
        os.close(child_end)

    def follow(self, end: float) -> str | None:
        """Read the process's reports until it ends or is killed. Returns the problem, or None."""
        late = None
        try:
            while late is None and not self._has_ended():
                if select.select([self.pipe], [], [], LOOK_S)[0]:
                    self._read()
                late = self._late(end)
        finally:
            code = self._end(write_trace=late is not None)
        self._read()
        problem = late or self._abnormal(code)
        if self.buffer:
            self._corrupt(self.buffer)
        if self.running is not None:
            self._record(self.running, {"ok": False, "error": problem or "it reported no result"})
        output = self._output() if problem else ""
        self.output.close()
        os.close(self.pipe)
        return f"{problem}; its last output:\n{output}".removesuffix("; its last output:\n") if problem else None

    def _has_ended(self) -> bool:
        """It stays a zombie, so that its id, also the group's, is not used again before the group is killed."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _late(self, end: float) -> str | None:
        now = time.monotonic()
        if now >= end:
            return f"killed in {self.running or 'no case'}: the part's time was over"
        if now >= self.begun_at + self.part.case_s:
            return f"killed in {self.running or 'no case'}: it took longer than {self.part.case_s:g} s"
        return None

    def _abnormal(self, code: int | None) -> str | None:
        if code is None:
            return "it was killed and has not ended"
        if code < 0:
            return f"killed in {self.running or 'no case'} by {_name_of(-code)}"
        if self.result.not_run and not self._is_poisoned():
            return f"ended with {code} in {self.running or 'no case'}"
        if not self.result.names:
            return f"ended with {code} and named no case"
        return None if code in (0, 1) else f"ended with {code} behind its last case"

    def _is_poisoned(self) -> bool:
        """Whether the last case lost the context and so ended the process, by its own result."""
        return bool(self.last and self.result.cases.get(self.last, {}).get("poisoned"))

    def _end(self, write_trace: bool) -> int | None:
        """Kill the group. On SIGABRT the process first writes where its threads were (faulthandler)."""
        with contextlib.suppress(ProcessLookupError):
            if write_trace:
                os.kill(self.process.pid, signal.SIGABRT)  # Popen.send_signal would reap it
                deadline = time.monotonic() + TRACE_S
                while not self._has_ended() and time.monotonic() < deadline:
                    time.sleep(LOOK_S / 4)
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            return self.process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return None

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 1 << 16):
                self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            if "cases" in said:
                self.result.names = [str(name) for name in said["cases"]]
            elif "begun" in said:
                self._begin(str(said["begun"]))
            else:
                result = {"ok": bool(said["ok"]), **said}
                self._record(str(result.pop("case")), result)
        except (ValueError, TypeError, KeyError, RecursionError):
            self._corrupt(line)

    def _begin(self, name: str) -> None:
        if self.running is not None:
            self._record(self.running, {"ok": False, "error": "it reported no result"})
        self.running = self.last = name
        self.begun_at = time.monotonic()

    def _record(self, name: str, result: dict[str, Any]) -> None:
        self.result.cases[name] = result
        self.running = None
        self.write({"part": self.part.name, "case": name, **result})

    def _corrupt(self, line: bytes) -> None:
        self.result.problems.append(f"wrote what is no report: {line[:200].decode(errors='replace')}")

    def _output(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-MOST_OUTPUT:].strip()
