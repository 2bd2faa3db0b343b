"""``python -m fusedcomm``."""

import sys

from fusedcomm.tools import main

if __name__ == "__main__":  # spawned ranks import this module too
    sys.exit(main())
