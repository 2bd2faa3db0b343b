"""Bytes and words: groups, votes, symmetric memory, the protocol on it, and what is known of a call when it fails."""
