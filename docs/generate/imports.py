"""Which module imports which, read from the sources: the layers of the package and the arrows between its rooms.

A room is a file in the root of the package or a folder right under it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# Lowest first: a room imports only rooms that stand before it. What is outside of the package stands above all.
LAYERS = (
    *("env", "files"),
    *("kernels", "plan", "memory", "run"),
    *("ops", "symm_mem", "parallel", "nn", "moe", "inference", "redistribution"),
    "__init__",  # what `import fusedcomm` offers
    *("launch", "compile", "testing", "bench", "tools", "__main__"),
)


def modules(root: Path) -> dict[str, Path]:
    """Files by module name: fusedcomm/, and kernels/ and bench/ as fusedcomm.kernels and fusedcomm.bench."""
    found = {}
    for folder, prefix in (("fusedcomm", ""), ("kernels", "fusedcomm."), ("bench", "fusedcomm.")):
        for file in sorted((root / folder).rglob("*.py")):
            if folder == "fusedcomm" and "kernels" in file.relative_to(root).parts:
                continue  # kernels is a link where sources are used without being installed
            name = prefix + ".".join(file.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = file
    return found


def imports(name: str, files: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Modules of the package that ``name`` imports, anywhere in it, and the lines."""
    for node in ast.walk(ast.parse(files[name].read_text())):
        if isinstance(node, ast.Import):
            asked = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"imports must be absolute: {files[name]}:{node.lineno}"
            asked = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for each in asked:
            target = each if each in files else each.rpartition(".")[0]
            if target in files and target != name:
                yield target, node.lineno


def room(module: str) -> str:
    first, _, rest = module.partition(".")
    assert first == "fusedcomm"
    return rest.partition(".")[0] or "__init__"


def arrows(root: Path) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    files = modules(root)
    found: dict[str, set[str]] = {room(name): set() for name in files}
    for name in files:
        found[room(name)] |= {room(target) for target, _ in imports(name, files)} - {room(name)}
    return found
