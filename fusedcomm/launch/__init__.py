"""Rank processes on this machine, and what all commands print and write alike."""
