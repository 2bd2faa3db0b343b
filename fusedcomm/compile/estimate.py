"""The public import of the Estimator."""

from fusedcomm.compile.overlap.estimator import Estimator

__all__ = ["Estimator"]
