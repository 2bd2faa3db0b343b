"""A part of bench/gpu_check that goes wrong as it is told: python -m tests.helpers.broken_parts KIND ...

It imports nothing but the standard library, so that a process takes no time to start.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Say = Callable[[str], object]
PASSED = {"ok": True, "seconds": 0.0, "found": {"answer": 42}}
POISONED = {"ok": False, "error": "AcceleratorError: an illegal memory access was encountered", "poisoned": True}


def hang(say: Say, folder: Path) -> None:
    """With a process of its own, as a part that has started ranks."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "pid").write_text(str(child.pid))
    time.sleep(600)


def crash(say: Say, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def poison(say: Say, folder: Path) -> None:
    say(json.dumps({"case": "poison", **POISONED}) + "\n")
    sys.exit(1)


def half_a_line(say: Say, folder: Path) -> None:
    say('{"case": "half_a_line", "ok": true')
    sys.exit(0)


FAULTS = {each.__name__: each for each in (hang, crash, poison, half_a_line)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["good", "mute", "unfinished", *FAULTS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--report", type=int)
    parser.add_argument("--after")
    args = parser.parse_args()
    os.set_inheritable(args.report, False)
    if args.kind == "mute":
        sys.exit(3)
    names = ["first", args.kind, "last"]

    def say(text: str) -> None:
        os.write(args.report, text.encode("latin-1"))

    say(json.dumps({"cases": names}) + "\n")
    for name in names[names.index(args.after) + 1 if args.after else 0 :]:
        say(json.dumps({"begun": name}) + "\n")
        if name in FAULTS:
            FAULTS[name](say, args.folder)
        else:
            say(json.dumps({"case": name, **PASSED}) + "\n")
    if args.kind == "unfinished":
        sys.exit(3)


if __name__ == "__main__":
    main()
