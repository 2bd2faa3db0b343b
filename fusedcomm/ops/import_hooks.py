"""Registers the ops with Inductor and the FLOP counter when a program imports them, as their import takes a second.

Neither asks anybody for lowerings, formulas or times, and a graph can be compiled without `fusedcomm.compile`. So the
import of their tables is hooked.
"""

import importlib
import logging
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

log = logging.getLogger("fusedcomm")

TABLES = {  # the module of torch that has the table, and the one that fills it
    "torch._inductor.lowering": "fusedcomm.ops.lowering",
    "torch.utils.flop_counter": "fusedcomm.ops.flops",
    "torch._inductor.fx_passes.overlap_scheduling": "fusedcomm.ops.roofline",
}


def install() -> None:
    """Called once, when all ops are defined."""
    for table in TABLES:
        if table in sys.modules:
            _register(table)
        else:
            sys.meta_path.insert(0, _AfterTable(table))


def _register(table: str) -> None:
    """If the table's module is importing itself, it is half imported now, and registers at its end."""
    try:
        importlib.import_module(TABLES[table])
    except Exception as error:  # a program without these ops must still run
        log.warning("%s does not know the ops of fusedcomm: %s", table, error)


class _AfterTable:
    """A finder that registers the ops behind the import of their table, and then removes itself."""

    def __init__(self, table: str) -> None:
        self.table = table

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self.table else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _register(self.table)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
