"""``fusedcomm bench all-to-all``: ways to have an all_to_all beside compute, each checked and timed side by side."""

from fusedcomm.bench.all_to_all.command import add_arguments, run

__all__ = ["add_arguments", "run"]
