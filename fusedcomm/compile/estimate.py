"""What ``fusedcomm.compile.overlap`` reckons with: the name under which programs import the Estimator."""

from fusedcomm.compile.overlap.estimator import Estimator

__all__ = ["Estimator"]
