"""Device functions take their arguments in bundles, and the host can fill these without Triton."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels" / "triton"
MOST_PARAMETERS = 12


def too_long(source: str) -> list[str]:
    """The functions for the device that have more parameters than a reader can hold."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    jitted = [node for node in functions if any("triton.jit" in ast.unparse(each) for each in node.decorator_list)]
    return [node.name for node in jitted if len(node.args.posonlyargs + node.args.args) > MOST_PARAMETERS]


def test_device_functions_have_few_parameters() -> None:
    files = sorted(KERNELS.glob("*.py"))
    assert len(files) >= 8
    assert not [f"{file.name}:{name}" for file in files for name in too_long(file.read_text())]


def test_a_parameter_too_many_is_found() -> None:
    parameters = [f"p{i}" for i in range(MOST_PARAMETERS + 1)]
    for decorator in ("@triton.jit", '@triton.jit(do_not_specialize=["p0"])'):
        assert too_long(f"{decorator}\ndef longer({', '.join(parameters)}):\n    pass\n") == ["longer"]
        assert not too_long(f"{decorator}\ndef long({', '.join(parameters[1:])}):\n    pass\n")


def test_the_host_fills_bundles_without_triton() -> None:
    """None in sys.modules makes an import fail."""
    imported = "import fusedcomm.algorithms.kernel_launch, fusedcomm.runtime.signals"
    subprocess.run([sys.executable, "-c", f"import sys; sys.modules['triton'] = None; {imported}"], check=True)
