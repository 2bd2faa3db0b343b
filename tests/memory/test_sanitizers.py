"""The native part under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.

The tests of symmetric memory run with a native part that is built with each of them, in a copy of the sources. Ranks
are processes there, and ThreadSanitizer sees no race between processes. So programs have threads. They stand for ranks
in sanitized_words.cpp, sanitized_handles.cpp and, for prepared calls, sanitized_plans.cpp. In sanitized_ring.cpp one
records calls while another forks.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.controls.control import copy_sources

HERE = Path("tests/memory")
SYMMETRIC_MEMORY = [
    f"tests/memory/test_{name}.py" for name in ("symmetric_memory", "rendezvous", "workspace", "limits")
]
SKIPPED = "not address_space"  # the allocators of the sanitizers end a process that has none left
SLOWER = "60"  # seconds that ranks wait for each other, in place of 20
RUN_S = 1500

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, with the sanitizers that it brings along"),
]


@dataclass(frozen=True)
class Sanitizer:
    flags: str
    library: str
    variable: str  # with the options of its runtime
    options: str

    def env(self, reports: Path) -> dict[str, str]:
        """The environment of a process that loads what is built with it. ``reports``: how its files begin."""
        libraries = [
            subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
            for name in (self.library, "libstdc++.so")  # the latter so that exceptions are seen from the start
        ]
        return {
            **os.environ,
            "LD_PRELOAD": " ".join(map(str.strip, libraries)),
            self.variable: f"log_path={reports}:{self.options}",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }


SANITIZERS = {
    "address": Sanitizer(
        # The check of vptr opens a pipe, and takes every object for a wrong one where a test leaves no descriptor.
        "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer",
        "libasan.so",
        "ASAN_OPTIONS",
        "detect_leaks=0",  # Python and torch leak; tests/memory/test_resources.py counts what the native part holds
    ),
    "thread": Sanitizer(
        "-fsanitize=thread -fno-omit-frame-pointer",
        "libtsan.so",
        "TSAN_OPTIONS",
        f"print_suppressions=0:suppressions={Path(__file__).with_name('sanitizers.supp')}",
    ),
}


def found(reports: Path) -> str:
    return "\n".join(each.read_text() for each in sorted(reports.parent.glob(f"{reports.name}.*")))


def run_program(folder: Path, source: str, sanitizer: Sanitizer) -> tuple[int, str]:
    """Build a program into a library and call its run() in a Python process; the exit code, and what is reported."""
    from torch.utils.cpp_extension import include_paths, library_paths

    library, reports = folder / "program.so", folder / "report"
    includes = [sysconfig.get_paths()["include"], *include_paths()]
    command = ["g++", "-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-tsan"]
    command += ["-DUSE_C10D", "-DUSE_DISTRIBUTED", *sanitizer.flags.split(), *(f"-I{each}" for each in includes)]
    command += [source, "-o", str(library), *(f"-L{each}" for each in library_paths())]
    subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch_python"], cwd=folder, check=True)
    call = f"import ctypes, torch; ctypes.CDLL({str(library)!r}).run()"
    env = sanitizer.env(reports)
    done = subprocess.run([sys.executable, "-c", call], cwd=folder, env=env, stderr=subprocess.PIPE, timeout=RUN_S)
    return done.returncode, found(reports) + done.stderr.decode()  # where UndefinedBehaviorSanitizer reports


@pytest.mark.parametrize("program", [f"sanitized_{name}.cpp" for name in ("words", "handles", "plans", "ring")])
@pytest.mark.parametrize("name", SANITIZERS)
def test_threads(name: str, program: str, tmp_path: Path) -> None:
    copy_sources(tmp_path)
    assert run_program(tmp_path, f"{HERE}/{program}", SANITIZERS[name]) == (0, "")


PLANTED = {
    "a race": (
        "thread",
        "kernels/cpu/flags.h",
        "__atomic_store_n(reinterpret_cast<int64_t*>(address), value, __ATOMIC_RELEASE);",
        "*reinterpret_cast<int64_t*>(address) = value;",
        "data race",
    ),
    "no acquire": (
        "thread",
        "kernels/cpu/flags.h",
        "reinterpret_cast<const int64_t*>(address), __ATOMIC_ACQUIRE)",
        "reinterpret_cast<const int64_t*>(address), __ATOMIC_RELAXED)",
        "data race",
    ),
    "an overflow": ("address", "kernels/cpu/flags.h", "i < num_words", "i <= num_words", "heap-buffer-overflow"),
    "a use after free": (
        "address",
        "kernels/cpu/segment.h",
        "  segment->seal();\n",
        "  delete segment.get();\n  segment->seal();\n",
        "heap-use-after-free",
    ),
    "a plan that does not wait": (
        "thread",
        "kernels/cpu/plan.cpp",
        "return rounds_.wait(step.rank);",
        "return;",
        "is wrong",
    ),
    "calls of two threads at once": (
        "thread",
        "kernels/cpu/prepared_calls.cpp",
        "  const std::lock_guard<CallLock> guard(*lock_);\n",
        "",
        "data race",
    ),
    # libtsan of g++ 12 does not see pthread_mutex_clocklock, so that it takes a lock that was waited for as not taken.
    "a lock that waits on a steady clock": (
        "thread",
        "kernels/cpu/call_lock.h",
        "#if defined(__SANITIZE_THREAD__)\n",
        "#if false\n",
        "unlock of an unlocked mutex",
    ),
    "a result that is too short": (
        "address",
        "kernels/cpu/plan.cpp",
        "Rounds::empty(each.shape,",
        "Rounds::empty({1},",
        "heap-buffer-overflow",
    ),
    "a fork that leaves the ring of calls locked": (
        "thread",
        "kernels/cpu/call_ring.h",
        "    pthread_atfork([] { call_ring().before_fork(); }, after, after);\n",
        "    (void)after;\n",
        "a child must find the ring of calls free",
    ),
    "undefined behaviour": (
        "address",
        "kernels/cpu/flags.h",
        "(word >> kKindBits) <= epoch",
        "(word >> (kKindBits + 64 * epoch)) <= epoch",
        "shift exponent",
    ),
}


# by part of the name of a file
PROGRAM_OF = {"ring": "ring", "plan": "plans", "prepared": "plans", "lock": "plans"}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_reported(what: str, tmp_path: Path) -> None:
    name, file, right, wrong, report = PLANTED[what]
    copy_sources(tmp_path)
    source = tmp_path / file
    source.write_text(source.read_text().replace(right, wrong))
    program = next((program for part, program in PROGRAM_OF.items() if part in file), "words")
    code, text = run_program(tmp_path, f"{HERE}/sanitized_{program}.cpp", SANITIZERS[name])
    assert code != 0 and report in text


@pytest.mark.parametrize("name", SANITIZERS)
def test_symmetric_memory(name: str, tmp_path: Path) -> None:
    copy_sources(tmp_path)
    sanitizer, reports = SANITIZERS[name], tmp_path / "report"
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", "temp"]
    compiler = tmp_path / "g++"  # ninja takes the name of a program, without flags
    compiler.write_text(f'#!/bin/sh\nexec g++ {sanitizer.flags} "$@"\n')
    compiler.chmod(0o755)
    subprocess.run(build, cwd=tmp_path, env={**os.environ, "CXX": str(compiler)}, check=True)
    env = sanitizer.env(reports) | {"PYTHONPATH": str(tmp_path), "FUSEDCOMM_TIMEOUT_S": SLOWER}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not thorough and not nightly", "-k", SKIPPED]
    done = subprocess.run(
        [*command, *SYMMETRIC_MEMORY], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=RUN_S
    )
    assert not (text := found(reports)), text
    assert done.returncode == 0, done.stdout[-5000:]
