"""The backend of pyproject.toml: setuptools, or one line that says which one is needed.

An older setuptools answers the metadata with pages about its schema, and without one pip prints its own traceback.
"""

import sys

LEAST = 77  # the first that reads `license` as an SPDX expression

try:
    from setuptools import __version__ as found
except ModuleNotFoundError:
    found = "none"
if found == "none" or int(found.partition(".")[0]) < LEAST:
    sys.exit(f"fusedcomm needs setuptools >= {LEAST} to be built, got {found}: pip install 'setuptools>={LEAST}'")

from setuptools.build_meta import *  # noqa: E402, F403
