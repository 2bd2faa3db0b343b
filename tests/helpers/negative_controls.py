"""Every protection, how to switch it off, and a test that fails then.

    python -m tests.helpers.negative_controls [PROTECTION ...]

works on a copy of the sources, one protection off at a time. tests/package/test_negative_controls.py keeps the list
true.

The fault matrix, the random programs and the model of the protocol must find what is off in them too:
tests/faults/controls.py, tests/helpers/soak_faults.py, PLANTED in tests/protocol/test_model.py (a reset without
a new segment is there alone). What nothing here switches off: the order of memory on GPUs
(tests/kernels/test_ptx_order.py refuses PTX without one), and the order of waiting kernels on a GPU
(fusedcomm/memory/launch_order.py).
"""

import sys
import tempfile
from pathlib import Path

from tests.helpers.controls import of_calls, of_cpus, of_decisions
from tests.helpers.controls.control import Control, Sources

TESTS = ("tests/package/test_negative_controls.py",)
CONTROLS: dict[str, Control] = {**of_calls.CONTROLS, **of_decisions.CONTROLS, **of_cpus.CONTROLS}


def main(names: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fusedcomm-controls-") as folder:
        sources = Sources(Path(folder))
        for name in names or CONTROLS:
            reason = CONTROLS[name].run(sources)
            failed += reason is not None
            print(f"{name}: {reason or 'its test fails without it'}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
