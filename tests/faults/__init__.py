"""Faults injected into ranks at named steps of the protocol: docs/faults.md.

cells.py        the matrix: algorithm / op / fault / step
steps.py        the functions that are replaced, inside a rank and for one call, to be at a step
prepared_calls.py  steps of prepared calls, which run no function of the package
injections.py   the faults
known_calls.py  calls with known results, and guarded memory around them
rank.py         a cell in one rank: the call, its result, the memory around it, the way back
judge.py        whether the ranks' reports are what the fault allows
matrix.py       cells in pools of ranks, several at a time
controls.py     protections switched off, for cells that must then fail
"""
