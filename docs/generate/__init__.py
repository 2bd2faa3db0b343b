"""What ``python -m docs.generate`` writes: docs/api/ from the docstrings, and the map of the rooms from the imports.

It reads sources and imports none of them, so that it needs no torch and gives the same text under any Python.
"""
