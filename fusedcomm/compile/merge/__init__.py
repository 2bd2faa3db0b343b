"""Collectives over several dims of one mesh become one, and so do reductions that are added."""
