"""Rank processes on this machine, and the common output of all commands."""
