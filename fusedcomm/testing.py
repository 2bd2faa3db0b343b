"""Helpers to test programs of several ranks on one machine."""

from fusedcomm.launch.ranks import KILLED, RankError, RankFailure, RankPool, run_ranks

__all__ = ["KILLED", "RankError", "RankFailure", "RankPool", "run_ranks"]
