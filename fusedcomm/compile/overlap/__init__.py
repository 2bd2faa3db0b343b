"""Collectives that stay unfused are started early and waited for late, beside compute that does not need them.

Times are milliseconds of a simulator with the estimates of an `Estimator`; nothing is run.
"""

from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.overlap.scheduler import OverlapReport, schedule

__all__ = ["Estimator", "OverlapReport", "schedule"]
