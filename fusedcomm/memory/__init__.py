"""Bytes and words: groups, votes, symmetric memory, its protocol, and the records of failed calls."""
