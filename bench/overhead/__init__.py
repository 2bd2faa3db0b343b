"""``fusedcomm bench overhead``: what a call of each op costs at a size where nothing else takes time."""

from fusedcomm.bench.overhead.overhead_command import add_arguments, run

__all__ = ["add_arguments", "run"]
